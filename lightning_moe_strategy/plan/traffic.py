"""Bytes one GPU receives per layer on each axis, by link. Forward, and recompute with backward.

Sizes are what crosses a link: of a gathered whole, the pieces that are not a rank's own.
"""

from dataclasses import dataclass

from lightning_moe_strategy.plan import activations as act
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide, Group, group
from lightning_moe_strategy.plan.workload import BF16, FP32, INT32, Workload


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What one axis moves for one layer and micro-batch (``per_step``: for a whole optimizer step)."""

    axis: str
    forward_rdma: float = 0.0
    forward_nvlink: float = 0.0
    backward_rdma: float = 0.0
    backward_nvlink: float = 0.0
    hideable: bool
    """Prefetched behind compute; the others stand on the critical path."""
    only_moe_layers: bool = False
    per_step: bool = False

    @property
    def rdma(self) -> float:
        """Bytes over RDMA, both passes."""
        return self.forward_rdma + self.backward_rdma

    @property
    def nvlink(self) -> float:
        """Bytes over NVLink, both passes."""
        return self.forward_nvlink + self.backward_nvlink


def dense_transfers(workload: Workload, side: DenseSide, ranks_per_domain: int) -> tuple[Transfer, ...]:
    """Dense shards, context parallel and dense replicas."""
    shape = workload.model
    # Shards are gathered over the flattened (fsdp, cp): consecutive ranks.
    shards = group(side.shards, 1, ranks_per_domain)
    mean_layer = shape.counts.layers_without_experts / shape.layers
    replicas = group(side.d_rep, side.shards, ranks_per_domain)
    return (
        _gathered_weights("fsdp_cp", mean_layer, shards, only_moe_layers=False),
        context_parallel(workload, side, ranks_per_domain),
        _all_reduced("d_rep", shape.counts.dense / side.shards, replicas),
    )


def expert_transfers(workload: Workload, side: ExpertSide, tokens: int, ranks_per_domain: int) -> tuple[Transfer, ...]:
    """Expert shards, dispatch and combine, expert replicas."""
    shape = workload.model
    weights = shape.expert_layer_parameters / side.ep
    shards = group(side.e_fsdp, side.ep, ranks_per_domain)
    replicas = group(side.e_rep, side.shards, ranks_per_domain)
    return (
        _gathered_weights("e_fsdp", weights, shards, only_moe_layers=True),
        _dispatched_rows(workload, side, tokens, ranks_per_domain),
        _all_reduced("e_rep", shape.counts.experts / side.shards, replicas),
    )


def _gathered_weights(axis: str, parameters: float, group: Group, *, only_moe_layers: bool) -> Transfer:
    """bf16 weights forward and again backward, FP32 gradients. Seed, "Hiding eFSDP Communication": 300 + 300 + 600 MB.

    The seed takes the upper bound 1 for (degree - 1) / degree.
    """
    return Transfer(
        axis=axis,
        forward_rdma=BF16 * parameters * group.rdma_share,
        forward_nvlink=BF16 * parameters * group.nvlink_share,
        backward_rdma=(BF16 + FP32) * parameters * group.rdma_share,
        backward_nvlink=(BF16 + FP32) * parameters * group.nvlink_share,
        hideable=True,
        only_moe_layers=only_moe_layers,
    )


def context_parallel(workload: Workload, side: DenseSide, ranks_per_domain: int) -> Transfer:
    """Keys and values of the mean layer: bf16 gathered in the forward and in the backward, FP32 gradients scattered.

    An indexer's keys carry no gradient, and its saved top-k spares the second gather. Seed, "What If There's No
    NVL72?": over ``cp_inter`` first, then NVLink, so that RDMA carries (cp_inter - 1) / cp of the whole.
    """
    shape = workload.model
    latent = act.latent_bytes(shape) * shape.softmax_layers / shape.layers
    keys = BF16 * shape.index_head_dim * shape.indexer_layers / shape.layers
    forward = workload.tokens_per_cp_group * (latent + keys)
    backward = workload.tokens_per_cp_group * latent * (1 + FP32 / BF16)
    rdma, nvlink = context_parallel_shares(side, ranks_per_domain)
    return Transfer(
        axis="cp",
        forward_rdma=forward * rdma,
        forward_nvlink=forward * nvlink,
        backward_rdma=backward * rdma,
        backward_nvlink=backward * nvlink,
        hideable=False,
    )


def context_parallel_shares(side: DenseSide, ranks_per_domain: int) -> tuple[float, float]:
    """Shares of the whole sequence's keys and values that a GPU receives over RDMA and over NVLink."""
    intra = group(side.cp_intra, 1, ranks_per_domain)
    if side.cp_inter == 1:
        return intra.rdma_share, intra.nvlink_share
    inter = group(side.cp_inter, side.cp_intra, ranks_per_domain)
    rdma = inter.rdma_share / side.cp_intra + intra.rdma_share
    return rdma, inter.nvlink_share / side.cp_intra + intra.nvlink_share


def _dispatched_rows(workload: Workload, side: ExpertSide, tokens: int, ranks_per_domain: int) -> Transfer:
    """Copies of tokens out and partial results back, routing even: once forward, once in each recompute, once backward.

    Beside a copy travel the probabilities of all its experts, whose gradients come back, and the first time their ids.
    """
    shape = workload.model
    ranks = group(side.ep, 1, ranks_per_domain)
    copies = tokens * workload.sent_copies_per_token(side)
    both_ways = copies * (2 * BF16 * shape.hidden + FP32 * shape.top_k)
    ids = copies * INT32 * shape.top_k
    passes = 1 + (workload.recompute != "none") + workload.chunks_even_routing
    return Transfer(
        axis="ep",
        forward_rdma=(both_ways + ids) * ranks.rdma_share,
        forward_nvlink=(both_ways + ids) * ranks.nvlink_share,
        backward_rdma=both_ways * passes * ranks.rdma_share,
        backward_nvlink=both_ways * passes * ranks.nvlink_share,
        hideable=False,
        only_moe_layers=True,
    )


def sent_tokens(workload: Workload, side: ExpertSide, tokens: int, ranks_per_domain: int) -> Transfer:
    """Of those, copies of tokens and their probabilities on their way out, once."""
    shape, ranks = workload.model, group(side.ep, 1, ranks_per_domain)
    size = tokens * workload.sent_copies_per_token(side) * (BF16 * shape.hidden + FP32 * shape.top_k)
    return Transfer(
        axis="ep",
        forward_rdma=size * ranks.rdma_share,
        forward_nvlink=size * ranks.nvlink_share,
        hideable=True,
        only_moe_layers=True,
    )


def _all_reduced(axis: str, parameters: float, group: Group) -> Transfer:
    """FP32 gradients of one GPU's shards, summed over the replicas once per step."""
    return Transfer(
        axis=axis,
        backward_rdma=2 * FP32 * parameters * group.rdma_share,
        backward_nvlink=2 * FP32 * parameters * group.nvlink_share,
        hideable=False,
        per_step=True,
    )
