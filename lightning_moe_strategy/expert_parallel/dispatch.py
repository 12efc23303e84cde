"""Take rows to the ranks that hold their experts, and the results back.

Shapes: T tokens of this rank, K experts per token, D hidden size, E experts in all, L experts of this rank,
P ranks of the ep group, R rows this rank computes. Rank r owns the experts ``r * L`` to ``(r + 1) * L - 1``.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._torch_compat import assert_later
from lightning_moe_strategy.collectives import Transfer, all_to_all_rows, start_all_to_all_rows
from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting as AssumedRouting
from lightning_moe_strategy.expert_parallel.assumed_routing import assumed_counts
from lightning_moe_strategy.expert_parallel.splits import (
    Chunk,
    Pieces,
    Splits,
    agree_on_pieces,
    assumed_pieces,
    piece_bounds,
)
from lightning_moe_strategy.expert_parallel.splits import SplitMemory as SplitMemory
from lightning_moe_strategy.expert_parallel.travel import Way, bring_back, send
from lightning_moe_strategy.kernels.routing import Routing, gather_rows, sort_by_expert, sum_rows

Chosen = TypeVar("Chosen")


@dataclass(kw_only=True)
class Exchange:
    """Who sends how many rows to whom, and how the received ones are sorted by expert."""

    num_sent: list[int]
    """Rows to each rank of the group."""
    num_received: list[int]
    """Rows from each rank of the group."""
    offsets_L: Tensor
    arrival_of_row_R: Tensor
    row_of_arrival_R1: Tensor
    ticket: Tensor | None = None
    """An empty tensor that ties the exchanges of one forward together; see `send`."""


@dataclass(kw_only=True)
class Plan:
    """What `dispatch` and `combine` of one forward share: index tensors, and split sizes on the host."""

    routing: Routing
    exchange: Exchange | None = None
    """None where every expert is on this rank."""
    copied_from: tuple[Tensor, Tensor] | None = None
    """``(x_CD, copy_of_row_R)``: what the rows that `dispatch` returns are copies of, where that is to be kept for the
    backward pass in their place."""
    rows_end_early: bool = False
    """Whether rows may be fewer than there is memory for: those from ``offsets_L[-1]`` on are never filled."""

    @property
    def token_of_row_R(self) -> Tensor | None:
        """The token each computed row is a copy of, where that token is on this rank."""
        return self.routing.token_of_row_R if self.exchange is None else None

    def weights_of_rows(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parameters of the experts whose rows this rank computes, from those of its own. Once, after `dispatch`."""
        return parameters


class EPDispatcher(Protocol):
    """Brings rows to experts. All dispatchers agree bitwise in FP32 at the same ep.

    Probabilities travel with the rows, in FP32, so that the expert applies them and a row comes back final.
    Rows arrive sorted by local expert and, within one, by (source rank, token, k). A token's results on one rank
    are added in FP32, k ascending, and cast to the dtype of the rows; these sums in FP32, ranks ascending, and cast
    once. Every collective is called by every rank, forward and backward, whatever the routing.
    """

    num_experts: int
    num_local_experts: int

    def plan(self, expert_ids_TK: Tensor, splits: Splits | None = None) -> Plan:
        """Where every row goes. ``expert_ids_TK``: integers in [0, num_experts).

        ``splits``: those of a chunk, whose tokens these are; without them the ranks agree on some, all tokens at once.
        """
        ...

    def count(self, expert_ids_TK: Tensor, num_pieces: int, *, count_most: bool) -> Pieces:
        """The rows of each of ``num_pieces`` pieces of this rank's tokens; one host sync. Every rank calls it."""
        ...

    def once(self, choose: Callable[[], Chosen]) -> Chosen:
        """What ``choose`` returns, or what it has returned in the first pass, while a recompute runs."""
        ...

    def dispatch(
        self, x_TD: Tensor, probs_TK: Tensor, plan: Plan, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``rows_RD``, ``probs_R`` (FP32) and ``offsets_L`` (int32, end of each local expert's rows).

        ``meanwhile`` is called once: while tokens travel, where they do. It has work for this rank alone, and is only
        given to a dispatcher whose signature names it.
        """
        ...

    def combine(self, rows_RD: Tensor, plan: Plan) -> Tensor:
        """``y_TD``: the sum of each token's K rows."""
        ...


class LocalDispatcher:
    """All experts on this rank: a sort and no communication."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = self.num_local_experts = num_experts

    def plan(self, expert_ids_TK: Tensor, splits: Splits | None = None) -> Plan:
        return Plan(routing=sort_by_expert(expert_ids_TK, self.num_experts))

    def count(self, expert_ids_TK: Tensor, num_pieces: int, *, count_most: bool) -> Pieces:
        num_tokens, top_k = expert_ids_TK.shape
        bounds = piece_bounds(num_tokens, num_pieces)
        return Pieces(
            most_rows_G=[top_k * (stop - start) for start, stop in pairwise(bounds)],
            most_rows=top_k * num_tokens,
            most_tokens=num_tokens,
            join=lambda start, stop: Chunk(tokens=slice(bounds[start], bounds[stop]), splits=None),
        )

    def once(self, choose: Callable[[], Chosen]) -> Chosen:
        return choose()

    def dispatch(
        self, x_TD: Tensor, probs_TK: Tensor, plan: Plan, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if meanwhile is not None:
            meanwhile()
        rows_RD, probs_R1 = _sorted_by_expert(x_TD, probs_TK, plan.routing)
        plan.copied_from = x_TD, plan.routing.token_of_row_R
        return rows_RD, probs_R1.squeeze(1), plan.routing.offsets_E

    def combine(self, rows_RD: Tensor, plan: Plan) -> Tensor:
        return sum_rows(rows_RD, plan.routing.token_of_row_R, plan.routing.row_of_slot_TK)


class SpreadDispatcher:
    """What dispatchers whose experts are spread over a group have in common: who they are, and what they remember.

    Args:
        num_experts: of the whole layer; the group's size must divide it.
        group: the ranks of the ep axis.
        assumed_routing: take split sizes from the shapes instead of the ids, for a simulation on a fake
            process group: ``"balanced"`` receives T*K rows, ``"worst"`` all that P ranks of T tokens can send, a
            ``RecordedRouting`` what P ranks send in its proportions.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        assumed_routing: AssumedRouting | None = None,
    ) -> None:
        self.num_ranks = group.size()
        if num_experts % self.num_ranks:
            raise ValueError(
                f"ep({self.num_ranks}) must divide num_experts({num_experts}): every rank holds as many experts "
                f"as the next. Choose an ep among the divisors of {num_experts}."
            )
        if assumed_routing is not None and dist.get_backend(group) != "fake":
            raise ValueError(
                f"assumed_routing({assumed_routing!r}) sends rows where no expert expects them: it is for the "
                f"backend 'fake', and this group has {dist.get_backend(group)!r}. Leave it None."
            )
        self.num_experts, self.num_local_experts = num_experts, num_experts // self.num_ranks
        self.group, self.assumed_routing = group, assumed_routing
        self._memory: SplitMemory | None = None

    @contextmanager
    def remember_splits(self, memory: SplitMemory, *, replaying: bool) -> Generator[None, None, None]:
        """Keep the splits of every forward in ``memory``; when ``replaying``, take them from there, in order.

        A replay then needs neither an exchange of counts or ids nor the host sync.
        """
        outer, self._memory = self._memory, memory
        memory.num_replayed = 0 if replaying else None
        try:
            yield
        finally:
            self._memory = outer

    def once(self, choose: Callable[[], Chosen]) -> Chosen:
        memory = self._memory
        kept: list[Any] = [] if memory is None else memory.kept
        if memory is not None and memory.num_replayed is not None:
            memory.num_replayed += 1
            replayed: Chosen = kept[memory.num_replayed - 1]
            return replayed
        chosen = choose()
        kept.append(chosen)
        return chosen

    @property
    def remembers(self) -> bool:
        """Whether a recompute of what runs now will be told what was chosen, or is."""
        return self._memory is not None

    @property
    def _is_replaying(self) -> bool:
        return self._memory is not None and self._memory.num_replayed is not None


class RowDispatcher(SpreadDispatcher):
    """Every row travels by itself, so that a plan may send the rows of one expert to several ranks.

    One all-to-all of counts, one host sync, then rows out and results back. A token's K results are added in FP32,
    k ascending, and cast once.
    """

    def plan(self, expert_ids_TK: Tensor, splits: Splits | None = None) -> Plan:
        routing = sort_by_expert(expert_ids_TK, self.num_experts)
        if splits is None:
            agree = self._assumed_splits if self.assumed_routing else self._agree_on_splits
            whole = slice(0, len(expert_ids_TK))
            (chunk,) = self.once(lambda: [Chunk(tokens=whole, splits=agree(routing))])
            assert chunk.splits is not None
            splits = chunk.splits
        if self._is_replaying:
            # Rows sent by counts that are not theirs would land at the wrong experts without a word.
            assert_later(
                (_counts(routing) == splits.sent_E).all(),
                "A recompute chose other experts than the first pass: its router is not deterministic. "
                "Set recompute='none'.",
            )
        exchange = _exchange_plan(splits.received_PL, splits.num_sent, splits.num_received)
        return Plan(routing=routing, exchange=exchange)

    def count(self, expert_ids_TK: Tensor, num_pieces: int, *, count_most: bool) -> Pieces:
        where = (expert_ids_TK, self.num_experts, self.group)
        if self.assumed_routing is not None:
            return assumed_pieces(self.assumed_routing, *where, num_pieces=num_pieces, count_most=count_most)
        return agree_on_pieces(*where, num_pieces=num_pieces, count_most=count_most)

    def _agree_on_splits(self, routing: Routing) -> Splits:
        sent_E = _counts(routing)
        counts = [self.num_local_experts] * self.num_ranks
        received_PL = all_to_all_rows(sent_E, counts, counts, self.group).view(self.num_ranks, -1)
        # The layer's one host sync: a collective wants its split sizes on the host.
        num_sent, num_received = torch.stack([sent_E.view(self.num_ranks, -1).sum(1), received_PL.sum(1)]).tolist()
        num_ids = routing.row_of_slot_TK.numel()
        if sum(num_sent) != num_ids:
            raise ValueError(
                f"{num_ids - sum(num_sent)} of {num_ids} expert ids are not below num_experts({self.num_experts}): "
                "the router must return ids of this layer's experts."
            )
        return Splits(sent_E=sent_E, received_PL=received_PL, num_sent=num_sent, num_received=num_received)

    def _assumed_splits(self, routing: Routing) -> Splits:
        assert self.assumed_routing is not None
        num_sent, received = assumed_counts(
            self.assumed_routing,
            *routing.row_of_slot_TK.shape,
            rank=self.group.rank(),
            num_ranks=self.num_ranks,
            num_local_experts=self.num_local_experts,
        )
        sent_E = _counts(routing)
        counts = [self.num_local_experts] * self.num_ranks
        all_to_all_rows(sent_E, counts, counts, self.group)  # what it would bring is assumed, what it costs is not
        return Splits(
            sent_E=sent_E,
            received_PL=torch.tensor(received, dtype=torch.int32, device=routing.offsets_E.device),
            num_sent=num_sent,
            num_received=[sum(from_rank) for from_rank in received],
        )

    def dispatch(
        self, x_TD: Tensor, probs_TK: Tensor, plan: Plan, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange = plan.exchange
        assert exchange is not None
        rows_RD, probs_R1 = _sorted_by_expert(x_TD, probs_TK, plan.routing)
        exchange.ticket, (rows_RD, probs_R1) = send(self._way(exchange), (), (rows_RD, probs_R1), meanwhile)
        rows_RD, probs_R1 = (
            gather_rows(arrived, exchange.arrival_of_row_R, exchange.row_of_arrival_R1)
            for arrived in (rows_RD, probs_R1)
        )
        return rows_RD, probs_R1.squeeze(1), exchange.offsets_L

    def combine(self, rows_RD: Tensor, plan: Plan) -> Tensor:
        exchange = plan.exchange
        assert exchange is not None and exchange.ticket is not None
        rows_RD = gather_rows(rows_RD, exchange.row_of_arrival_R1.squeeze(1), exchange.arrival_of_row_R.unsqueeze(1))
        rows_RD = bring_back(exchange.ticket, self._way(exchange), (), rows_RD)
        exchange.ticket = None
        return sum_rows(rows_RD, plan.routing.token_of_row_R, plan.routing.row_of_slot_TK)

    def _way(self, exchange: Exchange) -> "RowWay":
        return RowWay(exchange.num_sent, exchange.num_received, self.group)


@dataclass(frozen=True)
class RowWay(Way):
    """Rows as they stand, so many to and from each rank."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def start_spread(self, x_TD: Tensor, *index: Tensor) -> Transfer:
        return start_all_to_all_rows(x_TD, self.sent, self.received, self.group)

    def start_collect(self, x_CD: Tensor, *index: Tensor) -> Transfer:
        return start_all_to_all_rows(x_CD, self.received, self.sent, self.group)


def _counts(routing: Routing) -> Tensor:
    return routing.offsets_E.diff(prepend=routing.offsets_E.new_zeros(1))


def _sorted_by_expert(x_TD: Tensor, probs_TK: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    rows_RD = gather_rows(x_TD, routing.token_of_row_R, routing.row_of_slot_TK)
    probs_R1 = probs_TK.to(torch.promote_types(probs_TK.dtype, torch.float32)).reshape(-1, 1)
    return rows_RD, gather_rows(probs_R1, routing.slot_of_row_R, routing.row_of_slot_TK.view(-1, 1))


def _exchange_plan(received_PL: Tensor, num_sent: list[int], num_received: list[int]) -> Exchange:
    """The permutation from (source rank, local expert), as rows arrive, to (local expert, source rank)."""
    num_rows = sum(num_received)
    count_by_arrival = received_PL.reshape(-1)
    count_by_row = received_PL.t().reshape(-1)
    start_of_arrival_PL = (count_by_arrival.cumsum(0) - count_by_arrival).view_as(received_PL)
    start_of_row_LP = (count_by_row.cumsum(0) - count_by_row).view_as(received_PL.t())
    shift_LP = start_of_arrival_PL.t() - start_of_row_LP
    position_R = torch.arange(num_rows, device=received_PL.device)

    def moved(shift: Tensor, counts: Tensor) -> Tensor:
        # output_size: without it repeat_interleave waits for the device to learn the sum.
        return (position_R + shift.reshape(-1).repeat_interleave(counts, output_size=num_rows)).int()

    return Exchange(
        num_sent=num_sent,
        num_received=num_received,
        offsets_L=received_PL.sum(0).cumsum(0, dtype=torch.int32),
        arrival_of_row_R=moved(shift_LP, count_by_row),
        row_of_arrival_R1=moved(-shift_LP.t(), count_by_arrival).unsqueeze(1),
    )
