"""How copies of tokens come into the memory of the ranks that have work for them, and results back.

The arithmetic is that of deduplicated.py: a rank adds a token's rows in FP32, k ascending, the token's rank adds the
sums of the ranks in FP32, ranks ascending, and each rounds once.

Shapes: T tokens of this rank, K experts per token, D hidden size, P ranks of the ep group, J of them at most that a
token goes to (the smaller of K and P), C copies that this rank has room for, R rows that it computes at the most, L
experts of this rank. A copy's slots are its (copy, k) pairs; a token's are its (token, j) pairs, one for each rank it
goes to, numbered ``token * J + j``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import exchanged_for
from lightning_moe_strategy.expert_parallel.splits import Splits
from lightning_moe_strategy.expert_parallel.symmetric_memory import Array, Exchange, Workspace
from lightning_moe_strategy.kernels.peer_copy import Peers, put_copies, put_sums
from lightning_moe_strategy.kernels.ragged_rows import add_ragged_rows, spread_ragged_rows


class Arrived(NamedTuple):
    """What the ids say that came with the copies."""

    rank_C: Tensor
    """Whose each copy is; -1 behind the last."""
    slot_C: Tensor
    """The slot of its token there."""
    slot_of_row_R: Tensor
    offsets_L: Tensor


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much memory the exchanges of some tokens need."""

    most_copies: int
    """Of the rank that gets most, and so the same on all ranks, as are ``most_tokens``."""
    most_tokens: int
    num_copies: int
    """That this rank gets, and ``num_rows`` likewise."""
    num_rows: int
    is_bound: bool
    """Whether there may be fewer of each; else they are exact."""


@dataclass(frozen=True, kw_only=True)
class OneSidedSplits(Splits):
    """What the exchanges of some tokens need to know beside the tokens."""

    room: Room
    first_place_P: Tensor
    """Of this rank's copies at each rank."""
    end_of_copies_P: Tensor
    """Of each rank's copies at this one."""
    arrived: list[Arrived] = field(default_factory=list)
    """Empty until ids have been exchanged. A replay finds them here."""


class Index(NamedTuple):
    """Where rows go, and where they come from."""

    rank_TJ: Tensor
    """Ranks of a token's experts, ascending; -1 for none."""
    place_TJ: Tensor
    """Of its copies there."""
    rank_C: Tensor
    slot_C: Tensor
    row_of_slot_CK: Tensor
    """-1 for a slot without a row here."""
    slot_of_row_R: Tensor


@dataclass(frozen=True)
class Way:
    """How copies come to the ranks that have work for them, and results back."""

    workspace: Workspace
    room: Room

    def send_copies(self, tensors: Sequence[Tensor], index: Index) -> Exchange:
        """Each tensor [T, *] to the ranks of its tokens."""
        tensors = [x.contiguous() for x in tensors]
        arrays = [Array(self.room.most_copies, x.shape[1], x.dtype) for x in tensors]

        def put(peers: Peers, first_bytes: Sequence[int]) -> None:
            for x, first_byte in zip(tensors, first_bytes, strict=True):
                put_copies(x, peers, first_byte, index.rank_TJ, index.place_TJ)

        return self.workspace.start(tensors[0].device, arrays, put)

    def received_copies(self, exchange: Exchange) -> list[Tensor]:
        """``x_CD`` of each tensor."""
        return [array[: self.room.num_copies] for array in exchange.wait()]

    def send_results(self, rows_RD: Tensor, of_copies: Sequence[Tensor], index: Index) -> Exchange:
        """The sum of each copy's rows, and tensors [C, *] as they are, to where the copies came from."""
        rows_RD, of_copies = rows_RD.contiguous(), [x.contiguous() for x in of_copies]
        num_slots = self.room.most_tokens * index.rank_TJ.shape[1]
        arrays = [Array(num_slots, x.shape[1], x.dtype) for x in (rows_RD, *of_copies)]

        def put(peers: Peers, first_bytes: Sequence[int]) -> None:
            put_sums(rows_RD, peers, first_bytes[0], index.row_of_slot_CK, index.rank_C, index.slot_C)
            for x, first_byte in zip(of_copies, first_bytes[1:], strict=True):
                put_copies(x, peers, first_byte, index.rank_C[:, None], index.slot_C[:, None])

        return self.workspace.start(rows_RD.device, arrays, put)

    def received_results(self, exchange: Exchange, index: Index) -> list[Tensor]:
        """``y_TD`` of each tensor: results of a token's ranks, added in FP32, ranks ascending, and cast once."""
        slot = torch.arange(index.rank_TJ.numel(), dtype=torch.int32, device=index.rank_TJ.device)
        place_of_slot_TJ = torch.where(index.rank_TJ < 0, -1, slot.view_as(index.rank_TJ))
        return [add_ragged_rows(array[: len(slot)], slot, place_of_slot_TJ) for array in exchange.wait()]


def sent(way: Way, index: Index, x_TD: Tensor, probs_TK: Tensor, meanwhile: Callable[[], object] | None) -> "Delivered":
    """Tokens as rows of the ranks of their experts; ``meanwhile`` runs while they travel.

    In the backward pass what was recorded in ``meanwhile`` runs while gradients do. As in travel.py a ticket brings
    every rank to every exchange. Other than there one exchange carries several tensors, adds a copy's rows as it sends
    them, and leaves nothing but rows behind.
    """
    ticket = torch.zeros(0, device=x_TD.device, requires_grad=torch.is_grad_enabled())
    under_way: list[Exchange] = []
    ticket = _Issue.apply(ticket, under_way, way, x_TD, probs_TK, *index)  # type: ignore[no-untyped-call]
    if meanwhile is not None:
        meanwhile()
    return Delivered(*_Arrive.apply(ticket, under_way, way, *index))  # type: ignore[no-untyped-call]


class Delivered(NamedTuple):
    """What comes to a rank."""

    ticket: Tensor
    """For `returned`."""
    rows_RD: Tensor
    probs_R: Tensor


def returned(way: Way, index: Index, ticket: Tensor, rows_RD: Tensor) -> Tensor:
    """``y_TD``: the sum of the results of each token of this rank."""
    y_TD: Tensor = _Return.apply(ticket, way, rows_RD, *index)[1]  # type: ignore[no-untyped-call]
    return y_TD


class _Issue(torch.autograd.Function):
    """Begins what `_Arrive` ends, and ends in the backward pass what that begins. ``under_way`` is known to both: a
    gradient has the shape of what it belongs to, so it cannot be handed on as an exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, under_way: list[Exchange], way: Way, x_TD: Tensor, probs_TK: Tensor, *index: Tensor
    ) -> Tensor:
        ctx.under_way, ctx.way = under_way, way
        ctx.save_for_backward(*index)
        under_way.append(way.send_copies([x_TD, probs_TK], Index(*index)))
        return ticket.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor) -> tuple[Tensor | None, ...]:
        index = Index(*ctx.saved_tensors)
        gradients = ctx.way.received_results(ctx.under_way.pop(), index)
        return grad_ticket, None, None, *gradients, *(None for _ in index)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, under_way: list[Exchange], way: Way, *index: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.under_way, ctx.way = under_way, way
        ctx.save_for_backward(*index)
        _, _, _, _, row_of_slot_CK, slot_of_row_R = index
        x_CD, probs_CK = way.received_copies(under_way.pop())
        rows_RD = spread_ragged_rows(x_CD, slot_of_row_R, row_of_slot_CK)
        return ticket.clone(), rows_RD, probs_CK.reshape(-1).index_select(0, slot_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        index = Index(*ctx.saved_tensors)
        # One number more: what a slot without a row has.
        row_of_slot_CK = torch.where(index.row_of_slot_CK < 0, len(grad_R), index.row_of_slot_CK)
        grad_CK = torch.cat([grad_R, grad_R.new_zeros(1)])[row_of_slot_CK]
        ctx.under_way.append(ctx.way.send_results(grad_RD, [grad_CK], index))
        return grad_ticket, None, None, *(None for _ in index)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, way: Way, rows_RD: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.way = way
        ctx.save_for_backward(*index)
        with exchanged_for("results"):
            (y_TD,) = way.received_results(way.send_results(rows_RD, [], Index(*index)), Index(*index))
        return ticket.clone(), y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        index = Index(*ctx.saved_tensors)
        with exchanged_for("results"):
            (grad_CD,) = ctx.way.received_copies(ctx.way.send_copies([grad_TD], index))
        grad_RD = spread_ragged_rows(grad_CD, index.slot_of_row_R, index.row_of_slot_CK)
        return grad_ticket, None, grad_RD, *(None for _ in index)
