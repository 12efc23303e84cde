"""What a tensor is made of, found by running the code that makes it on stand-ins instead of values.

transformers says how the tensors of a file become those of a model, and back, in operations on tensors: stack the
experts, put gate and up one after the other, cut in three. Run on a `Mosaic` they give, for every part of the result,
which part of which tensor it is. So any rank reads its own part, whatever the operations, and no rule of theirs is
written down twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.hugging_face_weights.files import Box


class NotInPieces(Exception):
    """An operation whose result is no arrangement of parts of its arguments."""


@dataclass(frozen=True)
class Piece:
    """A box of a made tensor that is a box of one other tensor, its dims perhaps in another order."""

    key: str
    """The other tensor."""
    start: tuple[int, ...]
    """Where it begins in the made tensor."""
    lengths: tuple[int, ...]
    """Along the dims of the made tensor."""
    dims: tuple[int | None, ...]
    """For each dim of the made tensor, that of the other; None where it has none and the length is 1."""
    other_start: tuple[int, ...]
    """Where it begins in the other tensor."""

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.lengths).numel())

    @property
    def box(self) -> Box:
        """In the made tensor."""
        return tuple(slice(first, first + length) for first, length in zip(self.start, self.lengths, strict=True))

    @property
    def other_box(self) -> Box:
        """In the other tensor."""
        lengths = [1] * len(self.other_start)
        for dim, length in zip(self.dims, self.lengths, strict=True):
            if dim is not None:
                lengths[dim] = length
        return tuple(slice(first, first + length) for first, length in zip(self.other_start, lengths, strict=True))

    def inside(self, box: Box) -> "Piece | None":
        """The part of it that lies in a box of the made tensor."""
        start, lengths, other_start = list(self.start), list(self.lengths), list(self.other_start)
        for dim, wanted in enumerate(box):
            first = max(self.start[dim], wanted.start)
            length = min(self.start[dim] + self.lengths[dim], wanted.stop) - first
            if length <= 0:
                return None
            other = self.dims[dim]
            if other is not None:
                other_start[other] += first - self.start[dim]
            start[dim], lengths[dim] = first, length
        return replace(self, start=tuple(start), lengths=tuple(lengths), other_start=tuple(other_start))

    def inside_other(self, box: Box) -> "Piece | None":
        """The part of it that lies in a box of the other tensor."""
        wanted: list[slice] = []
        for dim, other in enumerate(self.dims):
            if other is None:
                wanted.append(self.box[dim])
            else:
                shift = self.start[dim] - self.other_start[other]
                wanted.append(slice(box[other].start + shift, box[other].stop + shift))
        for other, first in enumerate(self.other_start):
            if other not in self.dims and not box[other].start <= first < box[other].stop:
                return None
        return self.inside(tuple(wanted))

    def arrange(self, other: Tensor) -> Tensor:
        """Values of ``other_box`` as they lie in the made tensor: a view of the shape ``lengths``."""
        kept = [dim for dim in self.dims if dim is not None]
        dropped = [dim for dim in range(other.dim()) if dim not in kept]
        ordered = other.permute(*kept, *dropped) if other.dim() else other
        for _ in dropped:
            ordered = ordered[..., 0]
        return ordered.reshape(self.lengths)


class Mosaic:
    """A tensor of which only the shape, the dtype and the pieces are known."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pieces: tuple[Piece, ...]) -> None:
        self.shape, self.dtype, self.pieces = torch.Size(shape), dtype, pieces

    @staticmethod
    def of(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> "Mosaic":
        """The whole of one tensor."""
        dims = tuple(range(len(shape)))
        zeros = (0,) * len(shape)
        return Mosaic(shape, dtype, (Piece(key, zeros, tuple(shape), dims, zeros),))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = _OPERATIONS.get(func)
        if known is None:
            raise NotInPieces(getattr(func, "__name__", str(func)))
        return known(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "Mosaic":
        return self

    def detach(self) -> "Mosaic":
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple["Mosaic", ...]:
        return _chunk(self, chunks, dim)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple["Mosaic", ...]:
        return _split(self, sizes, dim)

    def transpose(self, dim0: int, dim1: int) -> "Mosaic":
        return _transpose(self, dim0, dim1)

    def squeeze(self, dim: int) -> "Mosaic":
        return _squeeze(self, dim)


def _stack(tensors: Sequence[Mosaic], dim: int = 0) -> Mosaic:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _cat(tensors: Sequence[Mosaic], dim: int = 0) -> Mosaic:
    first, dim = tensors[0], dim % tensors[0].ndim
    pieces: list[Piece] = []
    length = 0
    for tensor in tensors:
        if not isinstance(tensor, Mosaic) or _without(tensor.shape, dim) != _without(first.shape, dim):
            raise ValueError(f"shapes {list(first.shape)} and {list(tensor.shape)} do not go together along dim {dim}")
        for piece in tensor.pieces:
            pieces.append(replace(piece, start=_set(piece.start, dim, piece.start[dim] + length)))
        length += tensor.shape[dim]
    return Mosaic(_set(tuple(first.shape), dim, length), first.dtype, tuple(pieces))


def _narrow(tensor: Mosaic, dim: int, start: int, length: int) -> Mosaic:
    shape = _set(tuple(tensor.shape), dim, length)
    box = tuple(slice(start, start + length) if d == dim else slice(0, n) for d, n in enumerate(tensor.shape))
    inside = (piece.inside(box) for piece in tensor.pieces)
    moved = (replace(piece, start=_set(piece.start, dim, piece.start[dim] - start)) for piece in inside if piece)
    return Mosaic(shape, tensor.dtype, tuple(moved))


def _split(tensor: Mosaic, sizes: int | Sequence[int], dim: int = 0) -> tuple[Mosaic, ...]:
    dim %= tensor.ndim
    whole = tensor.shape[dim]
    lengths = list(sizes) if not isinstance(sizes, int) else [min(sizes, whole - i) for i in range(0, whole, sizes)]
    if sum(lengths) != whole:
        raise ValueError(f"shape {list(tensor.shape)} cannot be split into {lengths} along dim {dim}")
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return tuple(_narrow(tensor, dim, start, length) for start, length in zip(starts, lengths, strict=True))


def _chunk(tensor: Mosaic, chunks: int, dim: int = 0) -> tuple[Mosaic, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _unbind(tensor: Mosaic, dim: int = 0) -> tuple[Mosaic, ...]:
    return tuple(_squeeze(part, dim) for part in _split(tensor, 1, dim))


def _unsqueeze(tensor: Mosaic, dim: int) -> Mosaic:
    dim %= tensor.ndim + 1

    def insert(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:dim], value, *values[dim:])

    pieces = tuple(
        replace(p, start=insert(p.start, 0), lengths=insert(p.lengths, 1), dims=insert(p.dims, None))
        for p in tensor.pieces
    )
    return Mosaic(insert(tuple(tensor.shape), 1), tensor.dtype, pieces)


def _squeeze(tensor: Mosaic, dim: int) -> Mosaic:
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return tensor
    pieces = tuple(
        replace(p, start=_without(p.start, dim), lengths=_without(p.lengths, dim), dims=_without(p.dims, dim))
        for p in tensor.pieces
    )
    return Mosaic(_without(tuple(tensor.shape), dim), tensor.dtype, pieces)


def _transpose(tensor: Mosaic, dim0: int, dim1: int) -> Mosaic:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def permute(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[dim] for dim in order)

    pieces = tuple(
        replace(p, start=permute(p.start), lengths=permute(p.lengths), dims=permute(p.dims)) for p in tensor.pieces
    )
    return Mosaic(permute(tensor.shape), tensor.dtype, pieces)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.unbind: _unbind,
    torch.transpose: _transpose,
    torch.squeeze: _squeeze,
    torch.unsqueeze: _unsqueeze,
}


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _without(values: Sequence[Any], index: int) -> tuple[Any, ...]:
    return (*values[:index], *values[index + 1 :])
