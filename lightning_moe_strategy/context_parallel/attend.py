"""Attention of one rank's segments of queries, and its backward pass.

Where there is a kernel for it, a segment is one call (``attend_rows``). Else it is computed piece by piece: every piece
is one kernel call without a mask; outputs of a query's pieces are merged by their log-sum-exp. Pieces of one size (the
blocks of a window, documents of equal length) share a call.

Shapes: B batch, L tokens of this rank, S tokens that its queries may see, H query heads, G key heads (G divides H), D
channels of a query or key head, E channels of a value head.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.context_parallel.attend_rows import attend_rows, attend_rows_backward
from lightning_moe_strategy.context_parallel.sight import Part, Sight
from lightning_moe_strategy.context_parallel.visible import Piece
from lightning_moe_strategy.kernels.attention import attention_kernel_for
from lightning_moe_strategy.kernels.attention_pieces import OfRows, PieceKernel
from lightning_moe_strategy.kernels.attention_rows import RowKernel


def attend(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, E] and log-sum-exp [B, H, L]."""
    kernel = attention_kernel_for(query_BHLD, value_BGSE, sight.kernel, window=sight.window)
    query, key, value = _padded(kernel, query_BHLD, key_BGSD, value_BGSE)
    outs, lses = [], []
    for part in sight.parts():
        queries = query[:, :, part.rows]
        if isinstance(kernel, RowKernel):
            out, lse = attend_rows(kernel, queries, key, value, part, scale)
        else:
            out, lse = _attend_pieces(kernel, queries, key, value, part, scale)
        outs.append(out.to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, 2)[..., : value_BGSE.shape[-1]], torch.cat(lses, 2)


def attend_backward(
    of_rows: OfRows, key_BGSD: Tensor, value_BGSE: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (its dtype) and of key and value (at least FP32, of this rank's queries only)."""
    grad_out_BHLE, query_BHLD, out_BHLE, lse_BHL = of_rows
    kernel = attention_kernel_for(query_BHLD, value_BGSE, sight.kernel, window=sight.window)
    query, key, value = _padded(kernel, query_BHLD, key_BGSD, value_BGSE)
    grad_out, out = (_widened(x, value.shape[-1]) for x in (grad_out_BHLE, out_BHLE))
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key_BGSD, value_BGSE))
    grad_queries = []
    for part in sight.parts():
        # The merged log-sum-exp makes the probabilities those of the whole row.
        of_part = (grad_out[:, :, part.rows], query[:, :, part.rows], out[:, :, part.rows], lse_BHL[:, :, part.rows])
        into = (grad_key, grad_value)
        if isinstance(kernel, RowKernel):
            grad_query = attend_rows_backward(kernel, of_part, key, value, part, scale, into)
        else:
            grad_query = _attend_pieces_backward(kernel, of_part, key, value, part, scale, into)
        grad_queries.append(grad_query.to(query.dtype))
    return torch.cat(grad_queries, 2)[..., : query_BHLD.shape[-1]], grad_key, grad_value


def _attend_pieces(
    kernel: PieceKernel, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor]:
    merged: tuple[Tensor, Tensor] | None = None
    for pieces in _calls(part):
        turned = pieces[0].shape == "from own"
        queries = _stack((query[_rows_of(piece, part)] for piece in pieces), turned)
        keys, values = (_stack((x[_keys_of(piece, part)] for piece in pieces), turned) for x in (key, value))
        out, lse = kernel.forward(queries, keys, values, pieces[0].shape != "all", scale)
        if merged is None and len(part.pieces) == 1:
            return out, lse
        if merged is None:
            merged = _nothing_seen(query, value, lse.dtype)
        for piece, out_piece, lse_piece in zip(pieces, *(_unstack(x, pieces, turned) for x in (out, lse)), strict=True):
            rows = _rows_of(piece, part)
            _merge_into(merged[0][rows], merged[1][rows], out_piece, lse_piece)
    assert merged is not None, "every query sees its own key"
    return merged


def _attend_pieces_backward(
    kernel: PieceKernel,
    of_rows: OfRows,
    key: Tensor,
    value: Tensor,
    part: Part,
    scale: float,
    into: tuple[Tensor, Tensor],
) -> Tensor:
    """Gradient of the query, at least FP32; those of keys and values are added to ``into``."""
    grad_key, grad_value = into
    grad_query = torch.zeros_like(of_rows[1], dtype=grad_key.dtype)
    for pieces in _calls(part):
        turned = pieces[0].shape == "from own"
        stacked = [_stack((x[_rows_of(piece, part)] for piece in pieces), turned) for x in of_rows]
        keys, values = (_stack((x[_keys_of(piece, part)] for piece in pieces), turned) for x in (key, value))
        is_causal = pieces[0].shape != "all"
        grads = kernel.backward((stacked[0], stacked[1], stacked[2], stacked[3]), keys, values, is_causal, scale)
        for piece, grad_q, grad_k, grad_v in zip(pieces, *(_unstack(x, pieces, turned) for x in grads), strict=True):
            grad_query[_rows_of(piece, part)] += grad_q
            grad_key[_keys_of(piece, part)] += grad_k[..., : grad_key.shape[-1]]
            grad_value[_keys_of(piece, part)] += grad_v[..., : grad_value.shape[-1]]
    return grad_query


def _calls(part: Part) -> Iterator[list[Piece]]:
    """Pieces that share a kernel call."""
    for _, alike in groupby(part.pieces, key=lambda piece: piece.queries == piece.keys):
        yield from (list(group) for _, group in groupby(sorted(alike, key=_by_size), key=lambda piece: piece.size))


def _rows_of(piece: Piece, part: Part) -> tuple[slice, slice, slice]:
    """Of a tensor [B, heads, queries of the segment, ...]."""
    return _index(piece, piece.queries, -part.segment.start)


def _keys_of(piece: Piece, part: Part) -> tuple[slice, slice, slice]:
    """Of a tensor [B, heads, S, ...]."""
    return _index(piece, piece.keys, part.key_shift)


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


def _padded(
    kernel: RowKernel | PieceKernel, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    width_qk, width_v = kernel.head_dims(query.shape[-1], value.shape[-1])
    return _widened(query, width_qk), _widened(key, width_qk), _widened(value, width_v)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zero channels up to ``width``. They change no score, and what they add to the output is cut off."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
