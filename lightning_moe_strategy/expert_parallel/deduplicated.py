"""One copy of a token for each rank that has work for it, and one result back.

Beside its copy travel the token's expert ids and probabilities, so that a rank knows its own rows of the token. It
adds their results in FP32, k ascending, and rounds the sum to the dtype of the rows; the token's rank adds these sums
in FP32, ranks ascending, and rounds once. The backward pass is the mirror image: one gradient goes to each rank, and
one comes back. All dispatchers of this kind have one arithmetic, and differ in how copies come to ranks.

Shapes: T tokens of this rank, K experts per token, D hidden size, E experts in all, L experts of this rank, P ranks of
the ep group, C copies on this rank, R rows this rank computes, G pieces that tokens are counted in. A slot is one
(copy, k) pair.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._torch_compat import assert_later, in_backward, in_checkpointed_region
from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting
from lightning_moe_strategy.expert_parallel.dispatch import Plan, SpreadDispatcher
from lightning_moe_strategy.expert_parallel.splits import (
    Pieces,
    Splits,
    agree_on_pieces,
    assumed_pieces,
    count_pieces,
)
from lightning_moe_strategy.expert_parallel.travel import Way, bring_back, send
from lightning_moe_strategy.kernels.ragged_rows import RaggedRows, gather_ragged_rows, ragged_rows, sum_ragged_rows
from lightning_moe_strategy.kernels.routing import Routing, sort_by_expert


class CopyWay(Way):
    """How copies of tokens come to the ranks that have work for them, and results back.

    Copies come in the order of the ranks and, within one, of its tokens; where there is no token, one holds zeros, or
    -1 for integers. What the ranks have for a token is added in FP32, ranks ascending, and cast once.
    """

    @property
    @abc.abstractmethod
    def num_copies(self) -> int:
        """Copies that come to this rank."""


@dataclass
class Sent:
    """What a dispatcher has sent to other ranks, evaluations included and replays left out."""

    rows: int = 0
    """What would have travelled with a copy for every expert."""
    copies: int = 0
    bytes_saved: int = 0
    """By the hidden states on their way out. Results, and the gradients of both, save as much again."""

    @property
    def share_saved(self) -> float:
        """Of the rows, those that were not sent."""
        return 1 - self.copies / self.rows if self.rows else 0.0


@dataclass(kw_only=True)
class CopyPlan(Plan):
    """A plan whose ``routing`` is that of the copies on this rank: a slot of another rank's expert has row -1."""

    way: CopyWay
    index: tuple[Tensor, ...]
    splits: Splits
    ticket: Tensor | None = None
    """An empty tensor that ties the exchanges of one forward together; see `send`."""

    @property
    def rows(self) -> RaggedRows:
        return RaggedRows(self.routing.slot_of_row_R, self.routing.row_of_slot_TK)


class CopyDispatcher(SpreadDispatcher, abc.ABC):
    """What dispatchers that send one copy to a rank have in common. A kind says how copies travel."""

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, assumed_routing: AssumedRouting | None = None
    ) -> None:
        super().__init__(num_experts, group, assumed_routing)
        self.sent = Sent()

    @abc.abstractmethod
    def count_copies(self, expert_ids_TK: Tensor, num_pieces: int) -> Tensor:
        """``copies_PG`` (int32): copies of each piece of this rank's tokens that each rank gets."""

    @abc.abstractmethod
    def way(self, expert_ids_TK: Tensor, splits: Splits) -> tuple[CopyWay, tuple[Tensor, ...]]:
        """How copies of these tokens travel, and the index tensors for it."""

    @abc.abstractmethod
    def assume_copies(
        self, num_tokens: int, rows_sent: list[int], rows_received: list[int]
    ) -> tuple[list[int], list[int]]:
        """Under the assumed routing, copies to and from each rank, whose rows are known."""

    def count(self, expert_ids_TK: Tensor, num_pieces: int, *, count_most: bool) -> Pieces:
        copies_PG = self.count_copies(expert_ids_TK, num_pieces)
        where = (expert_ids_TK, self.num_experts, self.group)
        if self.assumed_routing is None:
            return agree_on_pieces(*where, num_pieces=num_pieces, count_most=count_most, copies_PG=copies_PG)
        return assumed_pieces(
            self.assumed_routing,
            *where,
            num_pieces=num_pieces,
            count_most=count_most,
            copies_PG=copies_PG,
            assume_copies=self.assume_copies,
        )

    def plan(self, expert_ids_TK: Tensor, splits: Splits | None = None) -> CopyPlan:
        if splits is None:
            (chunk,) = self.once(lambda: [self.count(expert_ids_TK, 1, count_most=False).join(0, 1)])
            splits = chunk.splits
            assert splits is not None
        if self._is_replaying:
            # Copies sent by counts that are not theirs would land at the wrong experts without a word.
            counts_E = count_pieces(expert_ids_TK, self.num_experts, self.num_ranks, 1).view(-1)
            assert_later(
                (counts_E == splits.sent_E).all(),
                "A recompute chose other experts than the first pass: its router is not deterministic. "
                "Set recompute='none'.",
            )
        way, index = self.way(expert_ids_TK, splits)
        if not splits.slots_of_rows:
            ids_CK = way.spread(expert_ids_TK.int(), *index)
            splits.slots_of_rows.append(self._slots_of_rows(ids_CK, sum(splits.num_received)))
            self.sent.rows += self._to_others(splits.num_sent)
            self.sent.copies += self._to_others(splits.copies_sent)
        (slot_of_row_R,) = splits.slots_of_rows
        rows = ragged_rows(slot_of_row_R, way.num_copies, expert_ids_TK.shape[1])
        offsets_L = splits.received_PL.sum(0).cumsum(0, dtype=torch.int32)
        routing = Routing(slot_of_row_R, rows.token_of_row_R, rows.row_of_slot_TK, offsets_L)
        return CopyPlan(routing=routing, way=way, index=index, splits=splits)

    def dispatch(
        self, x_TD: Tensor, probs_TK: Tensor, plan: Plan, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(plan, CopyPlan)
        probs_TK = probs_TK.to(torch.promote_types(probs_TK.dtype, torch.float32))
        plan.ticket, (x_CD, probs_CK) = send(plan.way, plan.index, (x_TD, probs_TK), meanwhile)
        if torch.is_grad_enabled() and not in_backward() and not in_checkpointed_region():
            # What is kept until a backward pass that is far: copies are fewer than rows. In a recompute, whose
            # backward pass is next, they would stand in memory beside the rows.
            plan.copied_from = x_CD, plan.routing.token_of_row_R
        rows_RD = gather_ragged_rows(x_CD, plan.rows)
        probs_R = probs_CK.reshape(-1).index_select(0, plan.routing.slot_of_row_R)
        if not in_backward():
            not_sent = self._to_others(plan.splits.num_sent) - self._to_others(plan.splits.copies_sent)
            self.sent.bytes_saved += not_sent * x_TD.shape[1] * x_TD.element_size()
        return rows_RD, probs_R, plan.routing.offsets_E

    def combine(self, rows_RD: Tensor, plan: Plan) -> Tensor:
        assert isinstance(plan, CopyPlan) and plan.ticket is not None
        partial_CD = sum_ragged_rows(rows_RD, plan.rows)
        y_TD = bring_back(plan.ticket, plan.way, plan.index, partial_CD)
        plan.ticket = None
        return y_TD

    def _slots_of_rows(self, ids_CK: Tensor, num_rows: int) -> Tensor:
        """Slots whose experts are here, sorted by expert and, within one, by (source rank, token, k)."""
        num_copies, top_k = ids_CK.shape
        if self.assumed_routing is not None:
            # The ids are none that a rank has sent: rows are dealt out to the copies.
            row_R = torch.arange(num_rows, dtype=torch.int32, device=ids_CK.device)
            return row_R % max(1, num_copies) * top_k + row_R // max(1, num_copies)
        local_CK = ids_CK - self.group.rank() * self.num_local_experts
        is_here_CK = (local_CK >= 0) & (local_CK < self.num_local_experts)
        routing = sort_by_expert(torch.where(is_here_CK, local_CK, self.num_local_experts), self.num_local_experts)
        # A copy: what is kept for a replay is 4 bytes a row, not a slot.
        return routing.slot_of_row_R[:num_rows].clone()

    def _to_others(self, numbers: list[int]) -> int:
        return sum(numbers) - numbers[self.group.rank()]
