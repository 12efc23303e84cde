"""What is planned, apart from the layout: model, machines, sequences and the ways to spend memory."""

import math
from dataclasses import dataclass
from typing import Literal

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.model import ModelShape

Recompute = Literal["block", "selective", "none"]
Dispatcher = Literal["all_to_all", "all_gather", "symm_mem"]
Balance = Literal["balanced", "worst", "redundant"]
EPChunks = int | Literal["none", "adaptive"]
Optimizer = Literal["adamw", "muon"]
Assumptions = Literal["exact", "seed"]

BF16, FP32, INT32, INT64 = 2, 4, 4, 8
"""Bytes of one number."""

CHUNK_ROWS, CHUNK_FLOOR_BYTES = 1.5, 2**28
"""Of adaptive chunks, the rows that one may bring: over those of even routing, and in bytes at the least
(expert_parallel/chunks.py)."""


def distinct_ranks(top_k: int, ep: int, num_experts: int) -> float:
    """Ranks that a token's experts lie on, on average over even routing: copies of it that are sent.

    Its experts are distinct, so a rank has none of them where all are drawn among the others' experts.
    """
    elsewhere = num_experts - num_experts // ep
    return ep * (1 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k))


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
    fa4_token_chunk: int | None = None
    ep_chunks: EPChunks = "none"
    ep_chunk_bytes: int | None = None
    max_imbalance: float = 1.0
    """Of ``redundant``: rows of the busiest rank over the mean, up to which no expert moves."""

    @property
    def tokens_per_cp_group(self) -> int:
        """Tokens of the sequences that one cp group shares."""
        return self.context * self.micro_batch

    def tokens_per_gpu(self, dense: DenseSide) -> int:
        """Tokens of one GPU and micro-batch."""
        return self.tokens_per_cp_group // dense.cp

    def expert_rows_per_token(self, experts: ExpertSide) -> float:
        """Rows a GPU's experts must have memory for, for each token of its own. Time is that of even routing.

        Balanced: every GPU gets as many rows as it sends, top_k. Redundant: it does under any routing, or up to
        ``max_imbalance`` times as many. Worst: every rank of the ep group sends all it can to this one; the ids of a
        token differ, so at most one row for each expert held here. One-sided writes in a number of chunks provide for
        that whatever the routing: the host learns of no count.
        """
        is_bounded = self.dispatcher == "symm_mem" and isinstance(self.ep_chunks, int)
        if self.balance != "worst" and not is_bounded:
            return self.model.top_k * (self.max_imbalance if self.moves_experts(experts) else 1)
        return experts.ep * min(self.model.top_k, self.model.num_experts // experts.ep)

    def sent_copies_per_token(self, experts: ExpertSide) -> float:
        """Copies of a token that are sent, this GPU's own included, routing even. Where experts move, one a row."""
        if self.moves_experts(experts):
            return self.model.top_k
        if self.dispatcher == "all_gather":
            return experts.ep
        return distinct_ranks(self.model.top_k, experts.ep, self.model.num_experts)

    def received_copies_per_token(self, experts: ExpertSide) -> float:
        """Copies of tokens a GPU must have memory for, for each token of its own. Worst: every token's."""
        if self.moves_experts(experts):
            return self.expert_rows_per_token(experts)
        return self.sent_copies_per_token(experts) if self.balance != "worst" else experts.ep

    def moves_experts(self, experts: ExpertSide) -> bool:
        """Whether ranks compute rows of others' experts, and are sent their weights for it."""
        return self.balance == "redundant" and experts.ep > 1

    def keeps_copies(self, experts: ExpertSide, tokens: int) -> bool:
        """Whether the experts keep tokens for their backward pass, and gather rows from them there again."""
        is_kept = self.recompute == "none" and self.num_chunks(experts, tokens) == 1
        is_overwritten = self.dispatcher == "symm_mem"  # what they came to is the next layer's
        return experts.ep == 1 or (is_kept and not is_overwritten and not self.moves_experts(experts))

    @property
    def chunks_even_routing(self) -> bool:
        """Whether experts run in chunks even where routing is even, and so once more in their backward pass."""
        return self.ep_chunks not in ("none", "adaptive", 1)

    def num_chunks(self, experts: ExpertSide, tokens: int) -> int:
        """Chunks in which ``tokens`` of a GPU go through a layer's experts.

        Adaptive: the tokens are counted in pieces, as many as the worst routing needs, and pieces are joined up to the
        limit. More pieces where one alone is above it.
        """
        if self.ep_chunks != "adaptive":
            return 1 if self.ep_chunks == "none" else self.ep_chunks
        top_k, rows_of_a_token = self.model.top_k, self.expert_rows_per_token(experts)
        worst = experts.ep * min(top_k, self.model.num_experts // experts.ep)
        limit = max(CHUNK_ROWS * top_k * tokens, CHUNK_FLOOR_BYTES // self._bytes_of_row, worst)
        if self.ep_chunk_bytes is not None:
            limit = self.ep_chunk_bytes // self._bytes_of_row
        if tokens * rows_of_a_token <= limit:
            return 1
        pieces = math.ceil(worst / (CHUNK_ROWS * top_k))
        while (rows := math.ceil(tokens / pieces) * rows_of_a_token) > limit and pieces < tokens:
            pieces = min(tokens, pieces * math.ceil(rows / max(1, limit)))
        return math.ceil(pieces / max(1, limit // rows))

    @property
    def _bytes_of_row(self) -> int:
        """As the run takes a row to need: as it arrives, as a result and as a gradient, each product's result twice."""
        return BF16 * (3 * self.model.hidden + 2 * 3 * self.model.moe_intermediate)
