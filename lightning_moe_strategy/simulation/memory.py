"""Memory of every tensor of a step by purpose: how much, when most, and what it was then.

Storages are followed from the operation that makes them to their end, FSDP's that are resized included. Nothing is
sorted while the step runs: pieces carry the moments of their birth and death, and a moment is looked up afterwards,
when it is known what a piece was for (an activation is what the forward pass left behind).
"""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


class MemoryWatch:
    """Follows storages while it is open; ``observe`` is given the result of every operation."""

    def __init__(self, experts_units: Collection[str] = ()) -> None:
        """``experts_units`` names the units of experts."""
        self.num_bytes = 0
        self.activation_bytes = 0
        """Kept by the forward pass for the backward pass."""
        self.peaks: dict[str, Peak] = {}
        self.row_counts: set[int] = set()
        """Lengths of tensors of expert rows, as they turn out during the step."""
        self.unit = ""
        self._experts_units = frozenset(experts_units)
        self._phase = ""
        self._bucket: Bucket | None = None
        self._moment = 0
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

    def buckets(self, moment: int) -> dict[str, int]:
        """Bytes by purpose at a moment, largest first."""
        sizes: Counter[str] = Counter()
        for piece in self._alive(moment):
            sizes[self._purpose(piece)] += piece.num_bytes
        return dict(sizes.most_common())

    def largest(self, moment: int, count: int) -> list[Piece]:
        """The largest allocations at a moment."""
        largest = sorted(self._alive(moment), key=lambda piece: -piece.num_bytes)[:count]
        return [replace(piece, bucket=self._purpose(piece)) for piece in largest]

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
        self._moment += 1
        piece = Piece(
            num_bytes=storage.nbytes(),
            bucket=bucket,
            operation=operation,
            shape=() if tensor is None else tuple(tensor.shape),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            unit=self.unit,
            born=self._moment,
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
            self._moment += 1
            piece.died = self._moment
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
            self.peaks[self._phase] = Peak(
                num_bytes=self.num_bytes, moment=self._moment, operation=operation, unit=unit
            )
