"""From which skew of the ranks on redundant experts pay: rows they save against weights they move.

The step waits for the rank with most rows: at a skew of s (max / mean), a layer's experts take s times what even
routing takes. Under ``balance="redundant"`` they take that once, and experts are sent to other ranks.
"""

from dataclasses import dataclass

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import ExpertSide, group
from lightning_moe_strategy.plan.workload import BF16, Workload

TIMES_MOVED = 3
"""Weights forward and again in the backward pass, gradients on the way back; all in bf16."""

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
    expert_bytes = BF16 * parameters
    passes = 3 + (workload.recompute != "none")
    rows = tokens * shape.top_k
    one_move = TIMES_MOVED * expert_bytes / _bytes_per_second(workload.cluster, side.ep, ranks_per_domain)
    return RedundancyPrice(
        expert_bytes=expert_bytes,
        experts_seconds=2 * parameters * rows * passes / workload.achieved_flops,
        plan_seconds=shape.num_experts * (PLAN_SECONDS_PER_EXPERT + PLAN_SECONDS_PER_EXPERT_AND_RANK * side.ep),
        least_move_seconds=one_move,
        most_move_seconds=one_move * (side.ep - 1),
    )


def _bytes_per_second(cluster: Cluster, ep: int, ranks_per_domain: int) -> float:
    """To another rank of the group; all are as likely."""
    ranks = group(ep, 1, ranks_per_domain)
    of_rdma = ranks.rdma_share / (ranks.rdma_share + ranks.nvlink_share)
    return 1 / (of_rdma / cluster.rdma_bytes_per_second + (1 - of_rdma) / cluster.nvlink_bytes_per_second)
