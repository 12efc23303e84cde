"""What the ranks of an ep group tell each other before rows travel: how many rows of which tokens go where.

Shapes: T tokens of this rank, K experts per token, E experts in all, L experts of this rank, P ranks of the ep group,
G pieces that a rank's tokens are counted in.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy.collectives import all_to_all_rows, waited
from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting, assumed_counts

AssumeCopies = Callable[[int, list[int], list[int]], tuple[list[int], list[int]]]
"""From the tokens of a chunk, and its rows sent to and received from each rank, to its copies sent and received."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How many rows of some tokens go where: what a dispatch needs to know, and the host waits for."""

    sent_E: Tensor
    received_PL: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """Empty, as are the lists, where no collective wants to know: see one_sided.py."""
    num_sent: list[int] = field(default_factory=list)
    """Rows to each rank of the group."""
    num_received: list[int] = field(default_factory=list)
    """Rows from each rank of the group."""
    copies_sent: list[int] = field(default_factory=list)
    """Copies of tokens to each rank of the group; empty where every row travels by itself."""
    copies_received: list[int] = field(default_factory=list)
    """Copies of tokens from each rank of the group."""
    slots_of_rows: list[Tensor] = field(default_factory=list)
    """What the ids that come with the copies say, once they have come: see deduplicated.py. A replay finds it here."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens whose rows travel and are computed together."""

    tokens: slice
    splits: Splits | None
    """None where there is nothing to agree on, or the dispatcher's plan does it."""


@dataclass
class SplitMemory:
    """The chunks of one pass through a block, in the order in which its experts run."""

    kept: list[list[Chunk]] = field(default_factory=list)
    num_replayed: int | None = None
    """None while the first pass adds to ``kept``."""


@runtime_checkable
class RemembersSplits(Protocol):
    """A dispatcher that agrees with other ranks, and need not do so again in a recompute."""

    def remember_splits(self, memory: SplitMemory, *, replaying: bool) -> AbstractContextManager[None]:
        """Keep the splits of every forward in ``memory``; when ``replaying``, take them from there, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The tokens of every rank in as many consecutive pieces, which can be joined to chunks."""

    most_rows_G: list[int]
    """Rows of each piece at the rank that receives most of it: the same on all ranks. Empty where not asked for."""
    most_rows: int
    """Rows of all pieces together at the rank that receives most."""
    most_tokens: int
    """Tokens of the rank that has most."""
    join: Callable[[int, int], Chunk]
    """Pieces ``start`` to ``stop - 1`` as one chunk."""


@runtime_checkable
class BoundsPieces(Protocol):
    """A dispatcher that can provide for the most that pieces can bring, and then needs no count on the host."""

    def bound(self, expert_ids_TK: Tensor, num_pieces: int) -> Pieces:
        """The most rows of each of ``num_pieces`` pieces; each is a chunk of its own. Every rank calls it."""
        ...


def piece_bounds(num_tokens: int, num_pieces: int) -> list[int]:
    """First token of each piece, and the end of the last: as even as they come."""
    return [piece * num_tokens // num_pieces for piece in range(num_pieces + 1)]


def agree_on_pieces(
    expert_ids_TK: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    *,
    num_pieces: int,
    count_most: bool,
    copies_PG: Tensor | None = None,
) -> Pieces:
    """Count each piece's rows and exchange the counts: one all-to-all, one host sync, whatever the number of pieces.

    ``count_most`` adds an all-reduce of G + 2 numbers. ``copies_PG``: copies of each piece's tokens that go to each
    rank, exchanged along with the rows.

    Raises:
        ValueError: an id that is not below ``num_experts``.
    """
    num_ranks, bounds = group.size(), piece_bounds(len(expert_ids_TK), num_pieces)
    sent_PGL = count_pieces(expert_ids_TK, num_experts, num_ranks, num_pieces)
    received_PGL, received_PG = _exchanged(sent_PGL, copies_PG, group)
    numbers = [sent_PGL.sum(2).view(-1), received_PGL.sum(2).view(-1)]
    if copies_PG is not None:
        numbers += [copies_PG.view(-1), received_PG.view(-1)]
    if count_most:
        numbers.append(_busiest(received_PGL, len(expert_ids_TK), group))
    # The layer's one host sync.
    on_host: list[int] = torch.cat(numbers).tolist()
    size = num_ranks * num_pieces
    num_kinds = 2 if copies_PG is None else 4
    num_sent, num_received, *copies = (on_host[size * kind : size * (kind + 1)] for kind in range(num_kinds))
    most = on_host[size * num_kinds :]
    check_ids(sum(num_sent), expert_ids_TK.numel(), num_experts)

    def join(start: int, stop: int) -> Chunk:
        def of_ranks(numbers: list[int]) -> list[int]:
            return [sum(numbers[rank * num_pieces + start : rank * num_pieces + stop]) for rank in range(num_ranks)]

        splits = Splits(
            sent_E=sent_PGL[:, start:stop].sum(1, dtype=torch.int32).view(-1),
            received_PL=received_PGL[:, start:stop].sum(1, dtype=torch.int32),
            num_sent=of_ranks(num_sent),
            num_received=of_ranks(num_received),
            copies_sent=of_ranks(copies[0]) if copies else [],
            copies_received=of_ranks(copies[1]) if copies else [],
        )
        return Chunk(tokens=slice(bounds[start], bounds[stop]), splits=splits)

    return Pieces(
        most_rows_G=most[:num_pieces],
        most_rows=most[num_pieces] if count_most else 0,
        most_tokens=most[num_pieces + 1] if count_most else 0,
        join=join,
    )


def assumed_pieces(
    routing: AssumedRouting,
    expert_ids_TK: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    *,
    num_pieces: int,
    count_most: bool,
    copies_PG: Tensor | None = None,
    assume_copies: AssumeCopies | None = None,
) -> Pieces:
    """`agree_on_pieces` in a simulation: the exchanges are what they cost, what they would bring is assumed."""
    (num_tokens, top_k), num_ranks = expert_ids_TK.shape, group.size()
    bounds = piece_bounds(num_tokens, num_pieces)
    sent_PGL = count_pieces(expert_ids_TK, num_experts, num_ranks, num_pieces)
    received_PGL, _ = _exchanged(sent_PGL, copies_PG, group)
    if count_most:
        _busiest(received_PGL, num_tokens, group)

    def assume(start: int, stop: int) -> tuple[list[int], list[list[int]]]:
        rank, num_local_experts = group.rank(), num_experts // num_ranks
        tokens = bounds[stop] - bounds[start]
        return assumed_counts(
            routing, tokens, top_k, rank=rank, num_ranks=num_ranks, num_local_experts=num_local_experts
        )

    def most(start: int, stop: int) -> int:
        num_sent, received = assume(start, stop)
        # This rank, or one that all send more to.
        return max(sum(map(sum, received)), num_ranks * max(num_sent))

    def join(start: int, stop: int) -> Chunk:
        num_sent, received = assume(start, stop)
        num_received = [sum(from_rank) for from_rank in received]
        copies: tuple[list[int], list[int]] = ([], [])
        if assume_copies is not None:
            copies = assume_copies(bounds[stop] - bounds[start], num_sent, num_received)
        splits = Splits(
            sent_E=sent_PGL[:, start:stop].sum(1, dtype=torch.int32).view(-1),
            received_PL=torch.tensor(received, dtype=torch.int32, device=expert_ids_TK.device),
            num_sent=num_sent,
            num_received=num_received,
            copies_sent=copies[0],
            copies_received=copies[1],
        )
        return Chunk(tokens=slice(bounds[start], bounds[stop]), splits=splits)

    return Pieces(
        most_rows_G=[most(piece, piece + 1) for piece in range(num_pieces)] if count_most else [],
        most_rows=most(0, num_pieces) if count_most else 0,
        most_tokens=num_tokens,
        join=join,
    )


def count_pieces(expert_ids_TK: Tensor, num_experts: int, num_ranks: int, num_pieces: int) -> Tensor:
    """``sent_PGL``: this rank's rows for each expert, piece by piece, in the order in which ranks want them."""
    (num_tokens, _), num_local_experts = expert_ids_TK.shape, num_experts // num_ranks
    piece_T = piece_of_token(num_tokens, num_pieces, expert_ids_TK.device)
    ids_TK = expert_ids_TK.long()
    place_TK = (ids_TK // num_local_experts * num_pieces + piece_T[:, None]) * num_local_experts
    place_TK += ids_TK % num_local_experts
    size = num_experts * num_pieces
    # One place more, for ids of no expert: they are missed when the counts are added up.
    counted = torch.zeros(size + 1, dtype=torch.int32, device=ids_TK.device)
    counted.scatter_add_(0, place_TK.clamp_(max=size).view(-1), torch.ones_like(place_TK, dtype=torch.int32).view(-1))
    return counted[:size].view(num_ranks, num_pieces, num_local_experts)


def piece_of_token(num_tokens: int, num_pieces: int, device: torch.device) -> Tensor:
    """Of each token its piece: the inverse of `piece_bounds`."""
    token_T = torch.arange(num_tokens, device=device)
    return ((token_T + 1) * num_pieces - 1) // max(1, num_tokens)


def _exchanged(sent_PGL: Tensor, copies_PG: Tensor | None, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """What the other ranks send this one: rows of each piece for each local expert, and copies (none: empty)."""
    sent = sent_PGL if copies_PG is None else torch.cat([sent_PGL, copies_PG.unsqueeze(2)], 2)
    counts = [sent.shape[1] * sent.shape[2]] * len(sent)
    received = all_to_all_rows(sent.view(-1), counts, counts, group).view_as(sent)
    return received[..., : sent_PGL.shape[2]], received[..., sent_PGL.shape[2] :].squeeze(2)


def _busiest(received_PGL: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Rows of each piece, rows of all, and tokens: each at the rank that has most."""
    rows_G = received_PGL.sum((0, 2))
    tokens = torch.full((1,), num_tokens, dtype=rows_G.dtype, device=rows_G.device)
    most = torch.cat([rows_G, rows_G.sum(0, keepdim=True), tokens])
    with waited(group):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most


def check_ids(num_sent: int, num_ids: int, num_experts: int) -> None:
    """ValueError where fewer rows are sent than there are ids."""
    if num_sent != num_ids:
        raise ValueError(
            f"{num_ids - num_sent} of {num_ids} expert ids are not below num_experts({num_experts}): "
            "the router must return ids of this layer's experts."
        )
