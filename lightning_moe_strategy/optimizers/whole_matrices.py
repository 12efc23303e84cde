"""Bring matrices that are cut into pieces together, each on one rank, transform them there, and cut them again.

Each rank transforms a share of the matrices: what is moved is each piece to its owner and back, 2 (n - 1) / n of all
elements over the n ranks of a group, where a gather on every rank would move n - 1 times all of them and compute the
same n times. Matrices that are whole where they lie are transformed there, and nothing is moved.

Shapes: L matrices of one stack, M rows, N columns; lower case for this rank's piece of a matrix.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_strategy.collectives import Transfer, start_all_to_all_rows

ROUND_NUMEL = 2**26
"""Elements that a rank holds whole at a time: 134 MB in BF16, of which Newton-Schulz holds about five."""

Transform = Callable[[Tensor], Tensor]
"""From [L, M, N] to as many."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which ranks hold a matrix together."""

    group: dist.ProcessGroup | None = None
    """None: each matrix is whole on the ranks that hold it."""
    dim: int = -2
    """-2: each rank has some of the rows; -1: of the columns."""

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def lengths(self, shape: Sequence[int]) -> list[int]:
        """Rows (or columns) of a whole that each rank has: as ``chunk`` cuts, so the last ranks may have none."""
        length = shape[self.dim]
        full = math.ceil(length / self.num_ranks)
        return [max(0, min(full, length - rank * full)) for rank in range(self.num_ranks)]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """This rank's piece of a stack of matrices, and what becomes of it."""

    shape: tuple[int, int, int]
    """Of the whole matrices, [L, M, N]."""
    cut: Cut
    take: Callable[[], Tensor]
    """This rank's piece of what is transformed."""
    put: Callable[[Tensor], None]
    """Called with this rank's piece of the result, [L, M, N] but for the dim that is cut."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def cut_of(parameter: Tensor) -> Cut:
    """How the matrices of a parameter, its last two dims, lie on the ranks.

    Raises:
        ValueError: they are cut along two axes of a mesh.
    """
    if not isinstance(parameter, DTensor):
        return Cut()
    # Strided shards, as FSDP makes of experts, are no ``Shard``.
    dims = [getattr(placement, "dim", None) for placement in parameter.placements]
    cuts = [
        (axis, dim - parameter.ndim)
        for axis, dim in enumerate(dims)
        if dim is not None and dim >= parameter.ndim - 2 and parameter.device_mesh.size(axis) > 1
    ]
    if len(cuts) > 1:
        raise ValueError(
            f"a parameter {tuple(parameter.shape)} has matrices cut along {len(cuts)} axes of its mesh "
            f"({parameter.placements}), and Muon puts together what is cut along one. Give it to AdamW."
        )
    if not cuts:
        return Cut()
    axis, dim = cuts[0]
    return Cut(group=parameter.device_mesh.get_group(axis), dim=dim)


def transform_whole(pieces: Sequence[Piece], transform: Transform) -> None:
    """Call every piece's ``put`` with its piece of ``transform`` of the whole matrices.

    All ranks that hold pieces of the same matrices call it with these in the same order. Owners are chosen by the
    cost of Newton-Schulz, so every rank computes about as much, and the same on every replica.
    """
    for cut, together in _by_cut(pieces):
        # One round is on its way while the one before is computed.
        rounds = [_Round(part, owners, cut) for part, owners in _rounds(together, cut.num_ranks)]
        returning: _Round | None = None
        rounds[0].gather()
        for index, current in enumerate(rounds):
            if index + 1 < len(rounds):
                rounds[index + 1].gather()
            current.compute(transform)
            if returning is not None:
                returning.deliver()
            returning = current
        assert returning is not None
        returning.deliver()


def share_out(costs: Sequence[float], num_ranks: int) -> list[int]:
    """The rank that takes each, the costliest first, always the one with the least so far; the i-th of equal ones
    goes to rank ``i % num_ranks``."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + costs[index], rank))
    return owners


class _Round:
    """As many matrices as a rank should hold whole at a time."""

    def __init__(self, pieces: Sequence[Piece], owners: Sequence[int], cut: Cut) -> None:
        self.cut = cut
        by_owner = sorted(range(len(pieces)), key=lambda i: owners[i])
        self.pieces = [pieces[i] for i in by_owner]
        self.owned = [pieces[i] for i in by_owner if owners[i] == cut.rank]
        self.sent = [0] * cut.num_ranks
        for i in by_owner:
            self.sent[owners[i]] += self._numel(pieces[i], cut.rank)
        self.received = [sum(self._numel(piece, rank) for piece in self.owned) for rank in range(cut.num_ranks)]

    def gather(self) -> None:
        """Send every piece to the owner of its matrix."""
        self.rows = torch.cat([piece.take().flatten() for piece in self.pieces])
        self.transfer = self._start(self.rows, self.sent, self.received)

    def compute(self, transform: Transform) -> None:
        """Transform what this rank owns, stacks of one shape at once, and send the pieces back."""
        gathered = self._finish()
        from_ranks = torch.split(gathered, self.received)
        parts = [torch.split(flat, [self._numel(p, rank) for p in self.owned]) for rank, flat in enumerate(from_ranks)]
        wholes = [self._join([part[i] for part in parts], piece) for i, piece in enumerate(self.owned)]
        results: dict[int, Tensor] = {}
        for alike in _alike([piece.shape for piece in self.owned]):
            stack = torch.cat([wholes[i] for i in alike]) if len(alike) > 1 else wholes[alike[0]]
            transformed = torch.split(transform(stack), [self.owned[i].shape[0] for i in alike])
            results |= zip(alike, transformed, strict=True)
        back = [
            results[i].narrow(self.cut.dim, sum(self._lengths(piece)[:rank]), self._lengths(piece)[rank]).flatten()
            for rank in range(self.cut.num_ranks)
            for i, piece in enumerate(self.owned)
        ]
        self.rows = torch.cat(back) if back else gathered
        self.transfer = self._start(self.rows, self.received, self.sent)

    def deliver(self) -> None:
        """Hand every piece of the result to whom it belongs."""
        results = torch.split(self._finish(), [self._numel(piece, self.cut.rank) for piece in self.pieces])
        for piece, result in zip(self.pieces, results, strict=True):
            piece.put(result.view(self._shape(piece, self.cut.rank)))

    def _start(self, rows: Tensor, send: list[int], receive: list[int]) -> Transfer | None:
        return None if self.cut.group is None else start_all_to_all_rows(rows, send, receive, self.cut.group)

    def _finish(self) -> Tensor:
        rows = self.rows if self.transfer is None else self.transfer.wait()
        del self.rows, self.transfer
        return rows

    def _join(self, parts: Sequence[Tensor], piece: Piece) -> Tensor:
        shaped = [part.view(self._shape(piece, rank)) for rank, part in enumerate(parts)]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped, dim=self.cut.dim)

    def _lengths(self, piece: Piece) -> list[int]:
        return self.cut.lengths(piece.shape)

    def _shape(self, piece: Piece, rank: int) -> list[int]:
        shape = list(piece.shape)
        shape[self.cut.dim] = self._lengths(piece)[rank]
        return shape

    def _numel(self, piece: Piece, rank: int) -> int:
        return math.prod(self._shape(piece, rank))


def _by_cut(pieces: Sequence[Piece]) -> Iterator[tuple[Cut, list[Piece]]]:
    """Of all ranks in the same order: that of the pieces."""
    cuts: dict[Cut, list[Piece]] = {}
    for piece in pieces:
        cuts.setdefault(piece.cut, []).append(piece)
    yield from cuts.items()


def _rounds(pieces: Sequence[Piece], num_ranks: int) -> Iterator[tuple[list[Piece], list[int]]]:
    """Pieces and their owners, large ones first, so that equal shapes are computed together."""
    ordered = sorted(pieces, key=lambda piece: (-_cost(piece), piece.shape))
    owners = share_out([_cost(piece) for piece in ordered], num_ranks)
    start, held = 0, [0] * num_ranks
    for index, (piece, owner) in enumerate(zip(ordered, owners, strict=True)):
        if held[owner] and held[owner] + piece.numel > ROUND_NUMEL:
            yield ordered[start:index], owners[start:index]
            start, held = index, [0] * num_ranks
        held[owner] += piece.numel
    yield ordered[start:], owners[start:]


def _cost(piece: Piece) -> float:
    """FLOPs of Newton-Schulz, up to a factor."""
    return piece.numel * min(piece.shape[1:])


def _alike(shapes: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Which stacks hold matrices of one shape."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        found.setdefault(shape[1:], []).append(index)
    return list(found.values())
