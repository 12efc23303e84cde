"""From which skew of the ranks on redundant experts pay, and what memory the weights take that move.

The step waits for the rank with most rows: at a skew of s (max / mean), a layer's experts take s times what even
routing takes. Under ``balance="redundant"`` they take that once, and experts are sent to other ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import ExpertSide, group
from lightning_moe_strategy.plan.workload import BF16, FP32, Workload

MOVED_BYTES = BF16 + BF16 + FP32
"""Of a parameter: its weight forward and again in the backward pass, its gradient on the way back."""

LARGEST_PARAMETER = 2 / 3
"""Of an expert's parameters, those of gate and up projection: one all-to-all returns gradients of one parameter."""

# `plan_redundancy` on one CPU core while the GPU waits for split sizes: 1.1 ms at E = 256 and 64 ranks, 0.3 ms at 8
# (benchmarks/redundancy_plan.py). Once a layer and micro-batch: a recompute replays the plan.
PLAN_SECONDS_PER_EXPERT, PLAN_SECONDS_PER_EXPERT_AND_RANK = 1e-6, 50e-9


@dataclass(frozen=True, kw_only=True)
class RedundancyPrice:
    """Of one layer with experts and one micro-batch; seconds of the rank that the others wait for."""

    expert_bytes: float
    """One expert's weights, as they are sent."""
    experts_seconds: float
    """The routed experts under even routing, both passes. A skew of s costs (s - 1) times as much."""
    plan_seconds: float
    least_move_seconds: float
    """Each rank is sent one expert at the most, and sends as many."""
    most_move_seconds: float
    """One home sends an expert to every other rank: all of them lack rows, and it alone has too many."""

    @property
    def pays_above_skew(self) -> tuple[float, float]:
        """The skew above which less time is spent on weights than on rows, at the least and at the most of moves."""
        costs = (self.plan_seconds + self.least_move_seconds, self.plan_seconds + self.most_move_seconds)
        return 1 + costs[0] / self.experts_seconds, 1 + costs[1] / self.experts_seconds

    @property
    def sentence(self) -> str:
        """When it pays."""
        least, most = self.pays_above_skew
        return (
            f"balance='redundant' pays above a skew of the ep ranks of {least:.2f} where each is sent one expert, of "
            f"{most:.2f} where one rank has too many rows and sends to all others."
        )


def redundancy(workload: Workload, side: ExpertSide, *, tokens: int, ranks_per_domain: int) -> RedundancyPrice | None:
    """The price for that many ``tokens`` of a GPU. None where every expert is on every rank."""
    shape = workload.model
    if side.ep == 1:
        return None
    parameters = shape.expert_layer_parameters / shape.num_experts
    passes = 3 + (workload.recompute != "none")
    rows = tokens * shape.top_k
    one_move = MOVED_BYTES * parameters / _bytes_per_second(workload.cluster, side.ep, ranks_per_domain)
    return RedundancyPrice(
        expert_bytes=BF16 * parameters,
        experts_seconds=2 * parameters * rows * passes / workload.achieved_flops,
        plan_seconds=shape.num_experts * (PLAN_SECONDS_PER_EXPERT + PLAN_SECONDS_PER_EXPERT_AND_RANK * side.ep),
        least_move_seconds=one_move,
        most_move_seconds=one_move * (side.ep - 1),
    )


def with_moved_weights(
    workload: Workload, side: ExpertSide, tokens: int, buckets: Mapping[str, float], *, gathered: float, backward: bool
) -> dict[str, float]:
    """A layer while its experts run, ``buckets``, and the weights that move: of the rank that then holds most.

    A receiver shows its experts one copy of its own weights and of others', at most as many, and has FP32 gradients of
    both. A home sends each receiver a copy, while its rows travel, and is returned FP32 gradients from each.
    ``gathered``: bytes of the layer's weights and of those on their way, which all have.
    """
    if not workload.moves_experts(side):
        return dict(buckets)
    shape = workload.model
    expert, own = shape.expert_layer_parameters / shape.num_experts, shape.num_experts // side.ep
    rows = BF16 * shape.hidden * tokens * workload.expert_rows_per_token(side)
    extended = BF16 * 2 * own * expert + (FP32 * own * expert if backward else 0.0)
    receiver = {**buckets, "expert_units": buckets["expert_units"] + extended}
    # Every move but the last of an expert's rows is of one expert: less than ep moves, and as many experts as it has.
    sent = side.ep + own - 2
    without_rows = {**buckets, "ep_buffers": 0.0}
    roles = [
        receiver,
        {**without_rows, "expert_units": gathered + BF16 * sent * expert, "expert_rows": 2 * rows},
    ]
    if backward:
        gradients = own + LARGEST_PARAMETER * (own + sent)
        roles.append({**without_rows, "expert_units": gathered + FP32 * gradients * expert, "expert_rows": rows})
    return max(roles, key=lambda role: sum(role.values()))


def _bytes_per_second(cluster: Cluster, ep: int, ranks_per_domain: int) -> float:
    """To another rank of the group; all are as likely."""
    ranks = group(ep, 1, ranks_per_domain)
    of_rdma = ranks.rdma_share / (ranks.rdma_share + ranks.nvlink_share)
    return 1 / (of_rdma / cluster.rdma_bytes_per_second + (1 - of_rdma) / cluster.nvlink_bytes_per_second)
