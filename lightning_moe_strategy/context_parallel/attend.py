"""Attention of one rank's segments of queries, piece by piece, and its backward pass.

Every piece is one kernel call without a mask; outputs of a query's pieces are merged by their log-sum-exp. Pieces of
one size (the blocks of a window, documents of equal length) share a call.

Shapes: B batch, L tokens of this rank, S tokens that its queries may see, H query heads, G key heads (G divides H), D
channels of a query or key head, E channels of a value head.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.context_parallel.attention_pieces import OfRows, PieceKernel, piece_kernel
from lightning_moe_strategy.context_parallel.layout import Segment
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents, Piece, pieces_of_batch


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What this rank's queries see, and where the keys lie."""

    segments: Sequence[Segment]
    """Of this rank's queries, in the order it holds them."""
    documents: Documents = ONE_DOCUMENT
    window: int | None = None
    first_keys: Sequence[int] | None = None
    """Per segment, the place of its first own token among the keys; None: keys are those of the whole sequence."""

    def parts(self) -> "Iterator[_Part]":
        """Each segment with its pieces."""
        first_row = 0
        for index, segment in enumerate(self.segments):
            first_key = segment.start if self.first_keys is None else self.first_keys[index]
            pieces = pieces_of_batch(segment, self.documents, self.window)
            yield _Part(segment, first_row, first_key - segment.start, pieces)
            first_row += segment.length


@dataclass(frozen=True)
class _Part:
    segment: Segment
    first_row: int
    key_shift: int
    """What is added to a key's position to find its place."""
    pieces: list[Piece]

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.segment.length)

    def rows_of(self, piece: Piece) -> tuple[slice, slice, slice]:
        """Of a tensor [B, heads, queries of the segment, ...]."""
        return _index(piece, piece.queries, -self.segment.start)

    def keys_of(self, piece: Piece) -> tuple[slice, slice, slice]:
        """Of a tensor [B, heads, S, ...]."""
        return _index(piece, piece.keys, self.key_shift)

    def calls(self) -> Iterator[list[Piece]]:
        """Pieces that share a kernel call."""
        for _, alike in groupby(self.pieces, key=lambda piece: piece.queries == piece.keys):
            yield from (list(group) for _, group in groupby(sorted(alike, key=_by_size), key=lambda piece: piece.size))


def attend(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, E] and log-sum-exp [B, H, L]."""
    kernel = piece_kernel(query_BHLD, value_BGSE)
    query, key, value = _padded(kernel, query_BHLD, key_BGSD, value_BGSE)
    outs, lses = [], []
    for part in sight.parts():
        out, lse = _attend_part(kernel, query[:, :, part.rows], key, value, part, scale)
        outs.append(out.to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, 2)[..., : value_BGSE.shape[-1]], torch.cat(lses, 2)


def attend_backward(
    of_rows: OfRows, key_BGSD: Tensor, value_BGSE: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (its dtype) and of key and value (at least FP32, of this rank's queries only)."""
    grad_out_BHLE, query_BHLD, out_BHLE, lse_BHL = of_rows
    kernel = piece_kernel(query_BHLD, value_BGSE)
    query, key, value = _padded(kernel, query_BHLD, key_BGSD, value_BGSE)
    grad_out, out = (_widened(x, value.shape[-1]) for x in (grad_out_BHLE, out_BHLE))
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key_BGSD, value_BGSE))
    grad_queries = []
    for part in sight.parts():
        # The merged log-sum-exp makes each piece's probabilities those of the whole row.
        rows = tuple(x[:, :, part.rows] for x in (grad_out, query, out, lse_BHL))
        grad_query = torch.zeros_like(rows[1], dtype=wide)
        for pieces in part.calls():
            turned = pieces[0].shape == "from own"
            stacked = [_stack((x[part.rows_of(piece)] for piece in pieces), turned) for x in rows]
            keys, values = (_stack((x[part.keys_of(piece)] for piece in pieces), turned) for x in (key, value))
            is_causal = pieces[0].shape != "all"
            grads = kernel.backward((stacked[0], stacked[1], stacked[2], stacked[3]), keys, values, is_causal, scale)
            for piece, grad_q, grad_k, grad_v in zip(
                pieces, *(_unstack(x, pieces, turned) for x in grads), strict=True
            ):
                grad_query[part.rows_of(piece)] += grad_q
                grad_key[part.keys_of(piece)] += grad_k[..., : grad_key.shape[-1]]
                grad_value[part.keys_of(piece)] += grad_v[..., : grad_value.shape[-1]]
        grad_queries.append(grad_query.to(query.dtype))
    return torch.cat(grad_queries, 2)[..., : query_BHLD.shape[-1]], grad_key, grad_value


def _attend_part(
    kernel: PieceKernel, query: Tensor, key: Tensor, value: Tensor, part: _Part, scale: float
) -> tuple[Tensor, Tensor]:
    merged: tuple[Tensor, Tensor] | None = None
    for pieces in part.calls():
        turned = pieces[0].shape == "from own"
        queries = _stack((query[part.rows_of(piece)] for piece in pieces), turned)
        keys, values = (_stack((x[part.keys_of(piece)] for piece in pieces), turned) for x in (key, value))
        out, lse = kernel.forward(queries, keys, values, pieces[0].shape != "all", scale)
        if merged is None and len(part.pieces) == 1:
            return out, lse
        if merged is None:
            merged = _nothing_seen(query, value, lse.dtype)
        for piece, out_piece, lse_piece in zip(pieces, *(_unstack(x, pieces, turned) for x in (out, lse)), strict=True):
            rows = part.rows_of(piece)
            _merge_into(merged[0][rows], merged[1][rows], out_piece, lse_piece)
    assert merged is not None, "every query sees its own key"
    return merged


def _nothing_seen(query: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    return out, query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)


def _merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """In place, attention over the union of two disjoint sets of keys. The other one saw at least one key."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp()[..., None]).add_(other_out * (other_lse - both).exp()[..., None])
    lse.copy_(both)


def _stack(pieces: Iterable[Tensor], turned: bool) -> Tensor:
    """Along the batch; one piece as it is."""
    tensors = [piece.flip(2) if turned else piece for piece in pieces]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _unstack(x: Tensor, pieces: Sequence[Piece], turned: bool) -> Sequence[Tensor]:
    return (x.flip(2) if turned else x).chunk(len(pieces))


def _index(piece: Piece, span: tuple[int, int], shift: int) -> tuple[slice, slice, slice]:
    sequence = slice(None) if piece.sequence is None else slice(piece.sequence, piece.sequence + 1)
    return sequence, slice(None), slice(span[0] + shift, span[1] + shift)


def _by_size(piece: Piece) -> tuple[str, int, int]:
    return piece.size


def _padded(kernel: PieceKernel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width_qk, width_v = kernel.head_dims(query.shape[-1], value.shape[-1])
    return _widened(query, width_qk), _widened(key, width_qk), _widened(value, width_v)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zero channels up to ``width``. They change no score, and what they add to the output is cut off."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
