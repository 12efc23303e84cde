"""The seed's own arithmetic, with its round figures: what ``assumptions="seed"`` computes.

The figures are those of GLM-5.2; a number is rounded where the seed rounds before it goes on, so that every value of
the text comes out.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_moe_strategy.plan import memory, time, traffic
from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.evaluate import DensePrice, ExpertPrice, Figures, Times, largest_total
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide, group, ranks_per_domain
from lightning_moe_strategy.plan.memory import Peak
from lightning_moe_strategy.plan.presets import MODELS
from lightning_moe_strategy.plan.traffic import Transfer
from lightning_moe_strategy.plan.workload import BF16, FP32, Workload

PARAMETERS = 753e9
EXPERT_SHARE = 0.98
"""Seed, "Deriving the Scheme": experts are over 98 % of a model of this scale, 2 % are dense."""
LAYERS, INDEXER_LAYERS = 78, 21
HIDDEN, EXPERTS, TOP_K, INDEX_TOP_K = 6144, 256, 8, 2048
RESIDENT = {"masters": 4, "optimizer_state": 8, "gradients": 4, "bf16_copy": 2}
"""Bytes per parameter; the seed keeps a bf16 copy resident: 18 in all."""
ROW_BYTES = BF16 * HIDDEN + FP32 * EXPERTS
"""One token on its way to an ep rank: hidden state and FP32 probabilities of all experts, 13312 B."""
RECOMPUTE_BACKWARD = 2.5e6
FA4_SAVES = 1.0e6
"""Bytes per token of one layer's recompute and backward, and what FlashAttention pull request 2816 takes off."""
ACTIVE_PER_LAYER, FLOPS_PER_TOKEN_LAYER = 0.5e9, 4e9
"""Rounded from 753e9 / 78 * (2 % + 98 % * 8 / 256) = 0.489 B; 2 FLOP forward, recompute, dgrad, wgrad each."""
PEAK_FLOPS, ACHIEVABLE = 2.5e15, 0.8
LATENT_BYTES, INDEX_KEY_BYTES = BF16 * (512 + 64), BF16 * 128

_MEMORY_BYTES = {"gb200-nvl72": 200e9, "b300-nvl8": 309e9}


def seed_cluster(cluster: Cluster) -> Cluster:
    """The same machines with the seed's memory (GB200 200 GB, B300 309 GB) and 80 % of 2.5 PFLOP/s."""
    memory_bytes = _MEMORY_BYTES.get(cluster.name, cluster.memory_bytes)
    achieved, source = PEAK_FLOPS * ACHIEVABLE, "80 % of 2.5 PFLOP/s, the seed's overestimate"
    return dataclasses.replace(
        cluster, memory_bytes=memory_bytes, peak_flops=PEAK_FLOPS, achieved_flops=achieved, source=source
    )


def check(workload: Workload) -> None:
    """Raise where the seed has no figure: another model, recompute, optimizer, dispatcher or routing."""
    if dataclasses.replace(workload.model, name="glm-5.2") != MODELS["glm-5.2"]:
        raise PlanError(
            f"assumptions('seed') are GLM-5.2's, and model is {workload.model.name!r}. Plan glm-5.2, or use exact."
        )
    if workload.fa4_token_chunk is not None:
        raise PlanError(
            f"fa4_token_chunk({workload.fa4_token_chunk}) has no figure in the seed, which takes off all of dS. Leave "
            "it out, or use assumptions exact."
        )
    priced = {"recompute": "block", "optimizer": "adamw", "dispatcher": "all_to_all", "balance": "worst"}
    priced["ep_chunks"] = "none"
    for name, value in priced.items():
        if getattr(workload, name) != value:
            raise PlanError(
                f"{name}({getattr(workload, name)!r}) has no figure in the seed, which prices {value!r}. Leave it "
                "out, or use assumptions exact."
            )


def attention_ratio(context: int) -> float:
    """Time of attention over linear layers: 2 at 256k tokens and 4 at 1M, a square root between and beyond."""
    return 2 * math.sqrt(context / 262_144)


def round_layer_bytes(size: float) -> float:
    """One significant digit below 1 GB (295.6 -> 300 MB), as it is above (2.365 GB)."""
    if size >= 1e9 or size <= 0:
        return size
    digit = 10.0 ** math.floor(math.log10(size))
    return round(size / digit) * digit


def round_seconds(seconds: float) -> float:
    """Whole milliseconds, where there is one (26.7 -> 27 ms, 122.3 -> 122 ms)."""
    return round(seconds, 3) if seconds >= 1e-3 else seconds


@dataclass(frozen=True, kw_only=True)
class Seed:
    """An ``Arithmetic`` of the seed's figures; ``PlanError`` where the seed has none."""

    workload: Workload

    def __post_init__(self) -> None:
        check(self.workload)

    def dense(self, side: DenseSide) -> DensePrice:
        """Dense parameters, saved activations, recompute. Seed, "Deriving the Scheme"."""
        work = self.workload
        tokens = work.tokens_per_gpu(side)
        local = PARAMETERS * (1 - EXPERT_SHARE) / side.shards
        recompute = RECOMPUTE_BACKWARD - (FA4_SAVES if work.fa4_pr_2816 else 0.0)
        buckets = {name: size * local for name, size in RESIDENT.items()} | {
            "dense_units": PARAMETERS / LAYERS * (1 - EXPERT_SHARE) * (BF16 + BF16 + FP32),
            "block_inputs": tokens * LAYERS * HIDDEN * BF16,
            "dsa_topk": tokens * INDEXER_LAYERS * INDEX_TOP_K * 4,
            "recompute_backward": tokens * recompute,
        }
        shards = group(side.shards, 1, self._domain)
        transfers = (
            _weights("fsdp_cp", _dense_layer_bytes(), on_rdma=shards.domains > 1, present=side.shards > 1),
            self._context_parallel(side),
        )
        seconds = tokens * FLOPS_PER_TOKEN_LAYER * (1 + attention_ratio(work.context)) / work.achieved_flops
        return DensePrice(
            side=side,
            tokens=tokens,
            moments={"step": buckets},
            transfers=transfers,
            links=time.link_seconds(transfers, _rdma_alone(work.cluster), moe_layer=True),
            step_seconds=0.0,
            forward_seconds=seconds / 4,
            backward_seconds=seconds * 3 / 4,
            outer_seconds=0.0,
        )

    def experts(self, side: ExpertSide, tokens: int) -> ExpertPrice:
        """Expert parameters, dispatch buffers for the worst case, eFSDP."""
        local = PARAMETERS * EXPERT_SHARE / side.shards
        layer = PARAMETERS / LAYERS * EXPERT_SHARE / side.ep
        buckets = {name: size * local for name, size in RESIDENT.items()} | {
            "expert_units": layer * (BF16 + BF16 + FP32),
            "ep_buffers": tokens * ROW_BYTES * side.ep,
        }
        shards = group(side.e_fsdp, side.ep, self._domain)
        weights = round_layer_bytes(BF16 * layer)
        transfers = (
            _weights("e_fsdp", weights, on_rdma=shards.domains > 1, present=side.e_fsdp > 1),
            self._dispatch(side, tokens),
        )
        return ExpertPrice(
            side=side,
            moments={"step": buckets},
            transfers=transfers,
            links=time.link_seconds(transfers, _rdma_alone(self.workload.cluster), moe_layer=True),
            step_seconds=0.0,
        )

    @property
    def _domain(self) -> int:
        return ranks_per_domain(self.workload.gpus, self.workload.cluster)

    def _dispatch(self, side: ExpertSide, tokens: int) -> Transfer:
        """Rows out and back in forward, recompute and backward. The seed keeps ep inside NVLink, where it takes no
        time; a layout that does not pays for what crosses RDMA."""
        ranks = group(side.ep, 1, self._domain)
        rows = 2 * tokens * TOP_K * BF16 * HIDDEN
        return Transfer(
            axis="ep",
            forward_rdma=rows * ranks.rdma_share,
            forward_nvlink=rows * ranks.nvlink_share,
            backward_rdma=2 * rows * ranks.rdma_share,
            backward_nvlink=2 * rows * ranks.nvlink_share,
            hideable=False,
            only_moe_layers=True,
        )

    def _context_parallel(self, side: DenseSide) -> Transfer:
        kv = (LATENT_BYTES + INDEX_KEY_BYTES) * self.workload.tokens_per_cp_group
        rdma, nvlink = traffic.context_parallel_shares(side, self._domain)
        return Transfer(
            axis="cp",
            forward_rdma=kv * rdma,
            forward_nvlink=kv * nvlink,
            # bf16 gathered again, FP32 gradients scattered.
            backward_rdma=3 * kv * rdma,
            backward_nvlink=3 * kv * nvlink,
            hideable=False,
        )

    def peak(self, dense: DensePrice, experts: ExpertPrice) -> Peak:
        """Everything added, nothing else reserved."""
        return memory.combine(dense.moments, experts.moments, with_reserve=False)

    def peak_bytes(self, dense: DensePrice, experts: ExpertPrice) -> float:
        """See ``Arithmetic``."""
        return largest_total(dense, experts)

    def times(self, dense: DensePrice, experts: ExpertPrice) -> Times:
        """Seed: one layer of 78 cannot hide its traffic (1.28 %); context parallel over RDMA is never hidden."""
        compute = dense.forward_seconds + dense.backward_seconds
        exposed = max(0.0, self._shard_seconds(dense, experts) - compute)
        layer = compute + exposed + dense.links.critical + experts.links.critical
        step = LAYERS * layer
        return Times(
            step=step,
            exposed=LAYERS * exposed + layer,
            structural=layer,
            tokens_per_second=dense.tokens / step,
        )

    def _shard_seconds(self, dense: DensePrice, experts: ExpertPrice) -> float:
        rdma = sum(t.rdma for t in (*dense.transfers, *experts.transfers) if t.hideable)
        return round_seconds(rdma / self.workload.cluster.rdma_bytes_per_second)

    def per_token_mb(self, dense: DensePrice, experts: ExpertPrice) -> Mapping[str, float]:
        """Seed: 0.958, 0.172, 0.852 and 2.5 MB."""
        buckets = {**dense.moments["step"], "ep_buffer": experts.moments["step"]["ep_buffers"]}
        names = ("block_inputs", "dsa_topk", "ep_buffer", "recompute_backward")
        return {name: buckets[name] / dense.tokens / 1e6 for name in names}

    def figures(self, dense: DensePrice, experts: ExpertPrice) -> Figures:
        """Seed, "Hiding eFSDP Communication" and "What If There's No NVL72?"."""
        work, side = self.workload, dense.side
        shards = {transfer.axis: transfer for transfer in (*dense.transfers, *experts.transfers)}
        resident = sum(
            part.get(name, 0.0) for part in (dense.moments["step"], experts.moments["step"]) for name in RESIDENT
        )
        seconds = self._shard_seconds(dense, experts)
        # The seed takes 2:1 to be on the safe side, and 4:1 where it prices 1M tokens on two-dimensional cp.
        ratio = attention_ratio(work.context) if side.cp_inter > 1 else min(2.0, attention_ratio(work.context))
        kv = LATENT_BYTES + INDEX_KEY_BYTES
        rdma, nvlink = traffic.context_parallel_shares(side, self._domain)
        return Figures(
            parameters=PARAMETERS,
            expert_share=EXPERT_SHARE,
            active_per_layer=ACTIVE_PER_LAYER,
            resident_bytes_per_parameter=sum(RESIDENT.values()),
            resident_bytes=resident,
            layer_expert_bytes=round_layer_bytes(BF16 * PARAMETERS / LAYERS * EXPERT_SHARE / experts.side.ep),
            efsdp_bytes=shards["e_fsdp"].rdma + shards["e_fsdp"].nvlink,
            dense_shard_bytes=shards["fsdp_cp"].rdma + shards["fsdp_cp"].nvlink,
            efsdp_seconds=seconds,
            min_tokens_to_hide=work.achieved_flops * seconds / (FLOPS_PER_TOKEN_LAYER * (1 + ratio)),
            kv_bytes_per_token=kv,
            kv_bytes=kv * work.tokens_per_cp_group,
            cp_rdma_bytes=kv * work.tokens_per_cp_group * rdma,
            cp_nvlink_bytes=kv * work.tokens_per_cp_group * nvlink,
            cp_rdma_seconds=shards["cp"].rdma / work.cluster.rdma_bytes_per_second,
            flops_per_token_layer=FLOPS_PER_TOKEN_LAYER,
            attention_ratio=attention_ratio(work.context),
            model_flops_per_token=6 * ACTIVE_PER_LAYER * LAYERS,
        )


def _dense_layer_bytes() -> float:
    return BF16 * PARAMETERS / LAYERS * (1 - EXPERT_SHARE)


def _weights(axis: str, weights: float, *, on_rdma: bool, present: bool) -> Transfer:
    """bf16 twice and FP32 once, at the upper bound: the whole layer crosses one link."""
    rdma, nvlink = (weights, 0.0) if on_rdma else (0.0, weights)
    scale = 1.0 if present else 0.0
    return Transfer(
        axis=axis,
        forward_rdma=scale * rdma,
        forward_nvlink=scale * nvlink,
        backward_rdma=3 * scale * rdma,
        backward_nvlink=3 * scale * nvlink,
        hideable=True,
        only_moe_layers=axis == "e_fsdp",
    )


def _rdma_alone(cluster: Cluster) -> Cluster:
    """The seed takes no time for NVLink."""
    return dataclasses.replace(cluster, nvlink_bytes_per_second=math.inf)
