"""One layout priced: peak memory, tokens per second, and the figures between. Exact dimensions and published rates.

``Exact`` prices the two meshes apart; ``pair`` adds them. ``Seed`` in assumptions.py offers the same with the
seed's round figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from lightning_moe_strategy.plan import activations as act
from lightning_moe_strategy.plan import memory, time, traffic
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide, ranks_per_domain
from lightning_moe_strategy.plan.memory import Moments, Peak
from lightning_moe_strategy.plan.time import LinkSeconds
from lightning_moe_strategy.plan.traffic import Transfer
from lightning_moe_strategy.plan.workload import BF16, Workload


@dataclass(frozen=True, kw_only=True)
class DensePrice:
    """What the dense mesh costs, and the compute, which depends on it alone."""

    side: DenseSide
    tokens: int
    """Of one GPU and micro-batch."""
    moments: Moments
    transfers: tuple[Transfer, ...]
    links: LinkSeconds
    """Of one layer."""
    step_seconds: float
    """Moved once per step."""
    forward_seconds: float
    """Compute of one layer, all tokens of a GPU."""
    backward_seconds: float
    outer_seconds: float
    """Compute outside the layers."""

    @cached_property
    def totals(self) -> Mapping[str, float]:
        """Bytes by moment."""
        return {moment: sum(buckets.values()) for moment, buckets in self.moments.items()}


@dataclass(frozen=True, kw_only=True)
class ExpertPrice:
    """What the expert mesh costs."""

    side: ExpertSide
    moments: Moments
    transfers: tuple[Transfer, ...]
    links: LinkSeconds
    step_seconds: float

    @cached_property
    def totals(self) -> Mapping[str, float]:
        """Bytes by moment."""
        return {moment: sum(buckets.values()) for moment, buckets in self.moments.items()}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step and what of them nothing hides."""

    step: float
    exposed: float
    """Prefetched traffic that compute does not cover, first gather and last reduction included."""
    structural: float
    """Of those, the first layer's gather and the last layer's reduction."""
    tokens_per_second: float


class Arithmetic(Protocol):
    """A way to price layouts of one workload."""

    def __hash__(self) -> int:
        """Equal workloads are priced once."""
        ...

    @property
    def workload(self) -> Workload:
        """What is priced."""
        ...

    def dense(self, side: DenseSide) -> DensePrice:
        """The dense mesh."""
        ...

    def experts(self, side: ExpertSide, tokens: int) -> ExpertPrice:
        """The expert mesh for that many tokens per GPU."""
        ...

    def peak(self, dense: DensePrice, experts: ExpertPrice) -> Peak:
        """Memory of both."""
        ...

    def peak_bytes(self, dense: DensePrice, experts: ExpertPrice) -> float:
        """The total of ``peak``: all that a search asks of most layouts."""
        ...

    def times(self, dense: DensePrice, experts: ExpertPrice) -> Times:
        """Time of both."""
        ...

    def per_token_mb(self, dense: DensePrice, experts: ExpertPrice) -> Mapping[str, float]:
        """block_inputs, dsa_topk, ep_buffer, recompute_backward (and more) in MB per token of a GPU."""
        ...

    def figures(self, dense: DensePrice, experts: ExpertPrice) -> "Figures":
        """What else the JSON says."""
        ...


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Values of the JSON that memory and time do not hold. Bytes, seconds, FLOPs."""

    parameters: float
    expert_share: float
    active_per_layer: float
    resident_bytes_per_parameter: float
    resident_bytes: float
    layer_expert_bytes: float
    efsdp_bytes: float
    dense_shard_bytes: float
    efsdp_seconds: float
    """Prefetched traffic of one layer, experts and dense shards."""
    min_tokens_to_hide: float
    kv_bytes_per_token: float
    kv_bytes: float
    cp_rdma_bytes: float
    """Of one all-gather, received by one GPU."""
    cp_nvlink_bytes: float
    cp_rdma_seconds: float
    """Of a layer: gathered forward and backward, gradients scattered."""
    flops_per_token_layer: float
    attention_ratio: float
    model_flops_per_token: float
    """Of the whole model, recompute left out."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Exact dimensions, achieved rates, buckets that coexist."""

    workload: Workload

    def dense(self, side: DenseSide) -> DensePrice:
        """See ``Arithmetic``."""
        work = self.workload
        tokens = work.tokens_per_gpu(side)
        transfers = traffic.dense_transfers(work, side, self._domain)
        compute = time.layer_compute(work, side)
        return DensePrice(
            side=side,
            tokens=tokens,
            moments=memory.dense_moments(work, side),
            transfers=transfers,
            links=time.link_seconds(transfers, work.cluster, moe_layer=True),
            step_seconds=time.step_link_seconds(transfers, work.cluster),
            forward_seconds=tokens * compute.forward_seconds(work.achieved_flops),
            backward_seconds=tokens * compute.backward_seconds(work.achieved_flops),
            outer_seconds=time.head_seconds(work.model, tokens, work.achieved_flops),
        )

    def experts(self, side: ExpertSide, tokens: int) -> ExpertPrice:
        """See ``Arithmetic``."""
        work = self.workload
        transfers = traffic.expert_transfers(work, side, tokens, self._domain)
        one_way = traffic.sent_tokens(work, side, tokens, self._domain)
        behind_shared = time.behind_shared_experts(work, side, tokens, one_way)
        return ExpertPrice(
            side=side,
            moments=memory.expert_moments(work, side, tokens),
            transfers=transfers,
            links=time.link_seconds(transfers, work.cluster, moe_layer=True) + LinkSeconds(critical=-behind_shared),
            step_seconds=time.step_link_seconds(transfers, work.cluster),
        )

    @property
    def _domain(self) -> int:
        return ranks_per_domain(self.workload.gpus, self.workload.cluster)

    def peak(self, dense: DensePrice, experts: ExpertPrice) -> Peak:
        """See ``Arithmetic``."""
        return memory.combine(dense.moments, experts.moments, with_reserve=True)

    def peak_bytes(self, dense: DensePrice, experts: ExpertPrice) -> float:
        """See ``Arithmetic``."""
        total = largest_total(dense, experts)
        return total + memory.reserve(total)

    def times(self, dense: DensePrice, experts: ExpertPrice) -> Times:
        """See ``Arithmetic``."""
        shape, links = self.workload.model, dense.links + experts.links
        moe, moe_exposed = _layer_seconds(dense, links)
        plain, plain_exposed = _layer_seconds(dense, dense.links)
        structural = links.hidden_forward + experts.links.hidden_backward * GRADIENT_SHARE
        exposed = shape.moe_layers * moe_exposed + shape.dense_first_layers * plain_exposed + structural
        step = shape.moe_layers * moe + shape.dense_first_layers * plain + structural
        step += dense.outer_seconds + dense.step_seconds + experts.step_seconds
        return Times(step=step, exposed=exposed, structural=structural, tokens_per_second=dense.tokens / step)

    def per_token_mb(self, dense: DensePrice, experts: ExpertPrice) -> Mapping[str, float]:
        """See ``Arithmetic``."""
        work, side, tokens = self.workload, dense.side, dense.tokens
        saved = memory.saved_between_passes(work, side)
        kept = saved.pop("saved_activations", 0.0) + memory.saved_expert_rows(work, experts.side, tokens)
        rows = memory.expert_row_bytes(work, experts.side, tokens)
        layer = dense.moments["last layer's experts"]["recompute_backward"] + rows["expert_rows"]
        static = act.exchange_buffers(work, experts.side) * tokens
        in_bytes = {**saved, "ep_buffer": static + rows["ep_buffers"], "recompute_backward": layer}
        in_bytes["saved_activations"] = kept
        return {name: size / tokens / 1e6 for name, size in in_bytes.items()}

    def figures(self, dense: DensePrice, experts: ExpertPrice) -> Figures:
        """See ``Arithmetic``."""
        work, shape, counts = self.workload, self.workload.model, self.workload.model.counts
        compute = time.layer_compute(work, dense.side)
        links = dense.links + experts.links
        shards = {transfer.axis: transfer for transfer in (*dense.transfers, *experts.transfers)}
        optimizer_moment = [{**dense.moments["optimizer"]}, {**experts.moments["optimizer"]}]
        resident = sum(
            part.get(name, 0.0) for part in optimizer_moment for name in ("masters", "optimizer_state", "gradients")
        )
        local = counts.dense / dense.side.shards + counts.experts / experts.side.shards
        latent = act.latent_bytes(shape) * shape.softmax_layers / shape.layers
        index_keys = BF16 * shape.index_head_dim * shape.indexer_layers / shape.layers
        kv = latent + index_keys
        rdma, nvlink = traffic.context_parallel_shares(dense.side, self._domain)
        return Figures(
            parameters=counts.total,
            expert_share=counts.expert_share,
            active_per_layer=shape.active_layer_parameters,
            resident_bytes_per_parameter=resident / local,
            resident_bytes=resident,
            layer_expert_bytes=BF16 * shape.expert_layer_parameters / experts.side.ep,
            efsdp_bytes=shards["e_fsdp"].rdma + shards["e_fsdp"].nvlink,
            dense_shard_bytes=shards["fsdp_cp"].rdma + shards["fsdp_cp"].nvlink,
            efsdp_seconds=links.hidden,
            min_tokens_to_hide=time.tokens_to_hide(compute, links, work.achieved_flops),
            kv_bytes_per_token=kv,
            kv_bytes=kv * work.tokens_per_cp_group,
            cp_rdma_bytes=kv * work.tokens_per_cp_group * rdma,
            cp_nvlink_bytes=kv * work.tokens_per_cp_group * nvlink,
            cp_rdma_seconds=shards["cp"].rdma / work.cluster.rdma_bytes_per_second,
            flops_per_token_layer=compute.linear_step,
            attention_ratio=compute.attention_ratio,
            model_flops_per_token=compute.model_flops * shape.layers + 6 * shape.vocab_size * shape.hidden,
        )


def largest_total(dense: DensePrice, experts: ExpertPrice) -> float:
    """Bytes of the moment with most, both meshes together."""
    others = experts.totals
    return max(size + others[moment] for moment, size in dense.totals.items())


GRADIENT_SHARE = 2 / 3
"""Of a layer's backward traffic, the FP32 gradients: 4 of 6 bytes per parameter."""


def _layer_seconds(dense: DensePrice, links: LinkSeconds) -> tuple[float, float]:
    """Seconds of one layer, and of them the prefetched traffic that compute does not cover."""
    exposed = max(0.0, links.hidden_forward - dense.forward_seconds)
    exposed += max(0.0, links.hidden_backward - dense.backward_seconds)
    return dense.forward_seconds + dense.backward_seconds + exposed + links.critical, exposed
