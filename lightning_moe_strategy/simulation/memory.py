"""Memory of every tensor of a step by purpose: how much, when most, and what it was then.

Storages are followed from the operation that makes them to their end, FSDP's that are resized included. Nothing is
sorted while the step runs: pieces carry the moments of their birth and death, and a moment is looked up afterwards,
when it is known what a piece was for (an activation is what the forward pass left behind).
"""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import tensors_in, watched_resizes

Bucket = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered_weights",
    "reduce_buffers",
    "expert_rows",
    "temporary",
    "other",
]
"""``activations``: kept by the forward pass for the backward pass, block inputs included. ``gathered_weights``: what
FSDP gathered. ``reduce_buffers``: whole gradients on their way into a reduce-scatter. ``expert_rows``: rows on their
way to experts, through them and back, which are not kept. ``other``: the batch and buffers."""

Phase = Literal["forward", "backward", "optimizer"]


@dataclass(slots=True, eq=False)
class Piece:
    """One allocation."""

    num_bytes: int
    bucket: Bucket
    operation: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    """The unit that ran when it was made."""
    born: int
    died: int | None = None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a phase with most bytes."""

    num_bytes: int
    moment: int
    operation: str
    """What had just allocated."""
    unit: str


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Memory at one moment of a step."""

    moment: int
    phase: str
    buckets: Mapping[str, int]
    """Bytes by purpose."""

    @property
    def num_bytes(self) -> int:
        return sum(self.buckets.values())


def thinned(points: Sequence[MemoryPoint], max_points: int) -> list[MemoryPoint]:
    """The highest point of every few, phase by phase: fewer points with the same peak."""
    every = -(-len(points) // max(1, max_points - len({point.phase for point in points})))
    stretches = [
        phase_points[start : start + every]
        for _, group in groupby(points, key=lambda point: point.phase)
        for phase_points in [list(group)]
        for start in range(0, len(phase_points), every)
    ]
    return [max(stretch, key=lambda point: point.num_bytes) for stretch in stretches]


class MemoryWatch:
    """Follows storages while it is open; ``observe`` is given the result of every operation."""

    def __init__(self, experts_units: Collection[str] = ()) -> None:
        """``experts_units`` names the units of experts."""
        self.num_bytes = 0
        self.activation_bytes = 0
        """Kept by the forward pass for the backward pass."""
        self.peaks: dict[str, Peak] = {}
        self.moment = 0
        """Number of allocations and frees so far."""
        self.row_counts: set[int] = set()
        """Lengths of tensors of expert rows, as they turn out during the step."""
        self.unit = ""
        self._experts_units = frozenset(experts_units)
        self._phase = ""
        self._bucket: Bucket | None = None
        self._phase_starts: list[tuple[int, str]] = []
        self._pieces: list[Piece] = []
        self._live: dict[int, Piece] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def opened(self) -> Iterator["MemoryWatch"]:
        with watched_resizes(self._resized):
            yield self

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Find the peak of what runs inside."""
        self._phase = name
        self._phase_starts.append((self.moment, name))
        self._note_peak("start", "")
        try:
            yield
        finally:
            self._phase = ""

    @contextmanager
    def made_for(self, bucket: Bucket) -> Iterator[None]:
        """Whatever is made inside has this purpose."""
        outer, self._bucket = self._bucket, bucket
        try:
            yield
        finally:
            self._bucket = outer

    def adopt(self, tensors: Iterable[Tensor | None], bucket: Bucket) -> None:
        """Count tensors that exist already, or say what they are for."""
        for tensor in tensors:
            if tensor is not None:
                piece = self._add(tensor, bucket, bucket)
                if piece is not None:
                    piece.bucket = bucket

    def keep_as_activations(self) -> None:
        """What the forward pass has made and left alive is kept for the backward pass."""
        for piece in self._live.values():
            if piece.bucket == "temporary":
                piece.bucket = "activations"
                self.activation_bytes += piece.num_bytes

    def observe(self, operation: Any, args: tuple[Any, ...], result: Any) -> None:
        for tensor in tensors_in(result):
            self._add(tensor, str(operation), None)

    def pass_through(self, tensor: Tensor, operation: str) -> None:
        """Count a copy of ``tensor`` that a library makes and drops inside of an operation."""
        self.moment += 1
        piece = Piece(
            num_bytes=tensor.numel() * tensor.element_size(),
            bucket=self._bucket or "temporary",
            operation=operation,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            unit=self.unit,
            born=self.moment,
        )
        self._pieces.append(piece)
        self.num_bytes += piece.num_bytes
        self._note_peak(operation, self.unit)
        self.moment += 1
        piece.died = self.moment
        self.num_bytes -= piece.num_bytes

    def buckets(self, moment: int) -> dict[str, int]:
        """Bytes by purpose at a moment, largest first."""
        sizes: Counter[str] = Counter()
        for piece in self._alive(moment):
            sizes[self._purpose(piece)] += piece.num_bytes
        return dict(sizes.most_common())

    def largest(self, moment: int, count: int) -> list[Piece]:
        """The largest allocations at a moment."""
        largest = sorted(self._alive(moment), key=lambda piece: -piece.num_bytes)[:count]
        return [self._as_used(piece) for piece in largest]

    def cause(self, peak: Peak) -> Piece | None:
        """The tensor that makes a peak: the largest that the running unit made. None where a phase begins with it."""
        made = [piece for piece in self._alive(peak.moment) if piece.unit == peak.unit and piece.shape]
        if peak.operation == "start" or not made:
            return None
        return self._as_used(max(made, key=lambda piece: (piece.num_bytes, piece.born)))

    def _as_used(self, piece: Piece) -> Piece:
        """A piece with the purpose it turned out to have."""
        return replace(piece, bucket=self._purpose(piece))

    def timeline(self, max_points: int) -> list[MemoryPoint]:
        """The highest moment of each of ``max_points`` stretches of the step, or fewer, and so the peak.

        No stretch reaches over the border of two phases.
        """
        if not self._phase_starts:
            return []
        first, num_moments = self._phase_starts[0][0], self.moment - self._phase_starts[0][0] + 1
        names = [name for _, name in self._phase_starts]
        starts = [start for start, _ in self._phase_starts]
        num_bins = max(1, max_points - len(names))
        points: list[MemoryPoint] = []
        last_bin, highest = None, 0
        for moment, num_bytes, sizes in self._sizes_from(first):
            phase = bisect_right(starts, moment) - 1
            this_bin = (phase, (moment - first) * num_bins // num_moments)
            if this_bin != last_bin or num_bytes > highest:
                buckets: dict[str, int] = {bucket: size for bucket, size in sizes.items() if size}
                point = MemoryPoint(moment=moment, phase=names[phase], buckets=buckets)
                points[len(points) if this_bin != last_bin else -1 :] = [point]
                last_bin, highest = this_bin, num_bytes
        return points

    def _sizes_from(self, first: int) -> Iterator[tuple[int, int, Counter[Bucket]]]:
        """Every moment from ``first`` on: bytes in all, and by purpose (one counter, which changes)."""
        changes: list[tuple[Bucket, int] | None] = [None] * (self.moment + 1)
        for piece in self._pieces:
            bucket = self._purpose(piece)
            changes[piece.born] = (bucket, piece.num_bytes)
            if piece.died is not None:
                changes[piece.died] = (bucket, -piece.num_bytes)
        sizes: Counter[Bucket] = Counter()
        num_bytes = 0
        for moment, change in enumerate(changes):
            if change is not None:
                sizes[change[0]] += change[1]
                num_bytes += change[1]
            if moment >= first:
                yield moment, num_bytes, sizes

    def _purpose(self, piece: Piece) -> Bucket:
        # By length and place: T*K rows may be as many as the tokens of a whole sequence (top_k == cp).
        is_rows = piece.unit in self._experts_units and bool(piece.shape) and piece.shape[0] in self.row_counts
        return "expert_rows" if is_rows and piece.bucket == "temporary" else piece.bucket

    def _alive(self, moment: int) -> list[Piece]:
        return [p for p in self._pieces if p.born <= moment and (p.died is None or p.died > moment)]

    def _add(self, tensor: Tensor, operation: str, bucket: Bucket | None) -> Piece | None:
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return self._live[key]
        if storage.nbytes() == 0:
            return None
        return self._start(storage, bucket or self._bucket or "temporary", operation, tensor)

    def _start(self, storage: Any, bucket: Bucket, operation: str, tensor: Tensor | None) -> Piece:
        self.moment += 1
        piece = Piece(
            num_bytes=storage.nbytes(),
            bucket=bucket,
            operation=operation,
            shape=() if tensor is None else tuple(tensor.shape),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            unit=self.unit,
            born=self.moment,
        )
        key = storage._cdata
        self._pieces.append(piece)
        self._live[key] = piece
        self._ends[key] = weakref.ref(storage, lambda _: self._end(key))
        self.num_bytes += piece.num_bytes
        self._note_peak(operation, self.unit)
        return piece

    def _end(self, key: int) -> None:
        piece = self._live.pop(key, None)
        self._ends.pop(key, None)
        if piece is not None:
            self.moment += 1
            piece.died = self.moment
            self.num_bytes -= piece.num_bytes

    def _resized(self, storage: Any) -> None:
        """FSDP frees and refills the storage of gathered weights in place."""
        piece = self._live.get(storage._cdata)
        if piece is not None:
            self._end(storage._cdata)
        if storage.nbytes():
            bucket = self._bucket or ("temporary" if piece is None else piece.bucket)
            self._start(storage, bucket, "resize", None)

    def _note_peak(self, operation: str, unit: str) -> None:
        best = self.peaks.get(self._phase)
        if self._phase and (best is None or self.num_bytes > best.num_bytes):
            self.peaks[self._phase] = Peak(num_bytes=self.num_bytes, moment=self.moment, operation=operation, unit=unit)
