"""What is planned, apart from the layout: model, machines, sequences and the ways to spend memory."""

from dataclasses import dataclass
from typing import Literal

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.model import ModelShape

Recompute = Literal["block", "selective", "none"]
Dispatcher = Literal["all_to_all", "all_gather", "symm_mem"]
Balance = Literal["balanced", "worst"]
Optimizer = Literal["adamw", "muon"]
Assumptions = Literal["exact", "seed"]

BF16, FP32, INT32, INT64 = 2, 4, 4, 8
"""Bytes of one number."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training run whose layout is still open. See ``PlanRequest`` for the fields."""

    model: ModelShape
    cluster: Cluster
    gpus: int
    context: int
    micro_batch: int
    recompute: Recompute
    dispatcher: Dispatcher
    balance: Balance
    optimizer: Optimizer
    fa4_pr_2816: bool
    achieved_flops: float

    @property
    def tokens_per_cp_group(self) -> int:
        """Tokens of the sequences that one cp group shares."""
        return self.context * self.micro_batch

    def tokens_per_gpu(self, dense: DenseSide) -> int:
        """Tokens of one GPU and micro-batch."""
        return self.tokens_per_cp_group // dense.cp

    def expert_rows_per_token(self, experts: ExpertSide) -> float:
        """Rows a GPU's experts must have memory for, for each token of its own. Time is that of even routing.

        Balanced: every GPU gets as many rows as it sends, top_k. Worst: every rank of the ep group sends all it
        can to this one; the ids of a token differ, so at most one row for each expert held here.
        """
        if self.balance == "balanced":
            return self.model.top_k
        return experts.ep * min(self.model.top_k, self.model.num_experts // experts.ep)
