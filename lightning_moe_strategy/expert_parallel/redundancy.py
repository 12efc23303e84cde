"""Which rows of overloaded experts other ranks compute, so that every rank of ep computes as many.

Integers alone: ranks that know the same counts come to the same plan, and no bytes are needed to agree on it. Seed, on
load imbalance: "perfect balance through dynamic redundant experts and online planning".

Shapes: R ranks, E experts in all, L experts of each rank, S segments. Rank r is the home of the experts ``r * L`` to
``(r + 1) * L - 1``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RedundancyPlan:
    """Who computes which rows. A segment is consecutive rows of one expert that one rank computes.

    The rows of an expert are numbered by (source rank, token, k). Segments are in the order of (expert, first row),
    and every expert has one at its home, be it empty.
    """

    expert_S: Integers
    rank_S: Integers
    """Who computes the segment."""
    slot_S: Integers
    """Where its weights are there: below L the rank's own experts, from L on those it computes beside them."""
    rows_RS: Integers
    """How many of a segment's rows come from each source rank."""
    extra_experts: tuple[tuple[int, ...], ...]
    """By rank, the experts whose weights it is sent, in the order of their slots: at most L, all from one home."""
    rows_before: tuple[int, ...]
    """Rows that each rank is the home of."""
    rows_after: tuple[int, ...]
    """Rows that each rank computes."""

    @property
    def num_moved_experts(self) -> int:
        """Experts that are sent to a rank, each time they are."""
        return sum(map(len, self.extra_experts))

    @property
    def num_moved_rows(self) -> int:
        """Rows that are computed away from their expert's home."""
        num_local_experts = (int(self.expert_S[-1]) + 1) // len(self.rows_after)
        return int(self.rows_RS[:, self.slot_S >= num_local_experts].sum())


def plan_redundancy(
    counts_RE: npt.NDArray[np.integer[Any]], num_ranks: int, *, max_imbalance: float = 1.0
) -> RedundancyPlan:
    """The plan under which no rank computes more than ``max_imbalance`` times the mean; nothing moves below that.

    ``counts_RE``: rows of each source rank for each expert. Where the ranks do not divide the rows, the fullest of
    them compute one more than the others.

    It always exists. A receiver takes rows once, of one home, and is done with; unused room that it leaves is no more
    than all have to spare, so the ranks that remain always have room for their rows. While one of them has too many,
    another has room, and what a home gives is its own: it has received nothing. A home that has given more than it had
    too much becomes a receiver itself (the chains of Vose's alias method), so there are less than R moves.

    Raises:
        ValueError: ranks that do not divide the experts, or a ``max_imbalance`` below 1.
    """
    num_experts = counts_RE.shape[1]
    if num_experts % num_ranks:
        raise ValueError(f"num_ranks({num_ranks}) must divide the counts' {num_experts} experts: choose such an ep.")
    if not 1.0 <= max_imbalance < float("inf"):
        raise ValueError(
            f"max_imbalance({max_imbalance}) must be at least 1: rows of the busiest rank over the mean. 1.0 is exact."
        )
    ends_RE = counts_RE.astype(np.int64).cumsum(0)
    rows_E: list[int] = ends_RE[-1].tolist()
    before = ends_RE[-1].reshape(num_ranks, -1).sum(1).tolist()
    moves = _moves(before, _limits(before, max_imbalance))
    segments, extra_experts = _segments(rows_E, moves, num_experts // num_ranks)
    expert_S, first_S, rank_S, slot_S, num_S = np.array(segments, dtype=np.int64).T
    # Of the rows first .. first + num of an expert, those that lie among the ones of a source rank.
    ends_RS = ends_RE[:, expert_S]
    starts_RS = ends_RS - counts_RE[:, expert_S]
    rows_RS = (np.minimum(ends_RS, first_S + num_S) - np.maximum(starts_RS, first_S)).clip(min=0)
    return RedundancyPlan(
        expert_S=expert_S,
        rank_S=rank_S,
        slot_S=slot_S,
        rows_RS=rows_RS,
        extra_experts=extra_experts,
        rows_before=tuple(before),
        rows_after=tuple(np.bincount(rank_S, weights=num_S, minlength=num_ranks).astype(np.int64).tolist()),
    )


class _Move(NamedTuple):
    home: int
    receiver: int
    num_rows: int


class _Segment(NamedTuple):
    expert: int
    first: int
    rank: int
    slot: int
    num_rows: int


def _limits(loads: Sequence[int], max_imbalance: float) -> list[int]:
    """The most rows that each rank may compute."""
    num_ranks, num_rows = len(loads), sum(loads)
    share, rest = divmod(num_rows, num_ranks)
    # One more for the fullest: where they differ by one already, nothing moves.
    fullest = sorted(range(num_ranks), key=lambda rank: -loads[rank])[:rest]
    limits = [max(share, int(max_imbalance * num_rows) // num_ranks)] * num_ranks
    for rank in fullest:
        limits[rank] = max(limits[rank], share + 1)
    return limits


def _moves(loads: Sequence[int], limits: Sequence[int]) -> list[_Move]:
    """The fullest home gives to the emptiest rank, until none has more than its limit."""
    loads, spare, moves = list(loads), sum(limits) - sum(loads), []
    over = [(limit - load, rank) for rank, (load, limit) in enumerate(zip(loads, limits, strict=True)) if load > limit]
    under = [(load - limit, rank) for rank, (load, limit) in enumerate(zip(loads, limits, strict=True)) if load < limit]
    heapify(over)
    heapify(under)
    while over:
        home, receiver = heappop(over)[1], heappop(under)[1]
        room, excess = limits[receiver] - loads[receiver], loads[home] - limits[home]
        num_rows = min(room, max(excess, room - spare))
        spare -= room - num_rows
        loads[home] -= num_rows
        moves.append(_Move(home, receiver, num_rows))
        if loads[home] != limits[home]:
            is_over = loads[home] > limits[home]
            heappush(over if is_over else under, (-abs(loads[home] - limits[home]), home))
    return moves


def _segments(
    rows_E: Sequence[int], moves: Sequence[_Move], num_local_experts: int
) -> tuple[list[_Segment], tuple[tuple[int, ...], ...]]:
    """Every move in as few experts as make it up, the fullest first; an expert's last rows go first."""
    kept, num_ranks = list(rows_E), len(rows_E) // num_local_experts
    segments: list[_Segment] = []
    extra_experts: list[list[int]] = [[] for _ in range(num_ranks)]
    for home, receiver, num_rows in moves:
        own = range(home * num_local_experts, (home + 1) * num_local_experts)
        for slot, expert in enumerate(sorted(own, key=lambda e: -kept[e]), start=num_local_experts):
            taken = min(num_rows, kept[expert])
            if not taken:
                break
            kept[expert] -= taken
            num_rows -= taken
            segments.append(_Segment(expert, kept[expert], receiver, slot, taken))
            extra_experts[receiver].append(expert)
    at_home = [
        _Segment(expert, 0, expert // num_local_experts, expert % num_local_experts, num_rows)
        for expert, num_rows in enumerate(kept)
    ]
    # At home first, where an expert keeps no row: its segment is empty.
    return sorted(at_home + segments, key=lambda s: (s.expert, s.first, s.slot)), tuple(map(tuple, extra_experts))
