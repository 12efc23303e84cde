"""Attention of a segment of queries in one call of a row kernel, and its backward pass.

What a segment sees lies in one piece: from the first key that its first query sees to its own last token. Only the
first document of a segment may have begun before it. Sequences of a batch are documents of one call too.

Shapes: B batch, L queries of a segment, S tokens that the rank's queries may see, T = B * L, U keys of a segment, H
query heads, G key heads, D channels of a query or key head, E channels of a value head.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_moe_strategy.context_parallel.sight import Part
from lightning_moe_strategy.kernels.attention_pieces import OfRows
from lightning_moe_strategy.kernels.attention_rows import RowKernel, Rows


def attend_rows(
    kernel: RowKernel, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, E] and log-sum-exp [B, H, L] of a segment."""
    batch, num_heads, length, _ = query_BHLD.shape
    seen = _seen(part, batch)
    key_UGD, value_UGE = seen.keys_of(key_BGSD), seen.keys_of(value_BGSE)
    out_THE, lse_HT = kernel.forward(_by_token(query_BHLD), key_UGD, value_UGE, seen.rows, scale)
    return _by_head(out_THE, batch), lse_HT.reshape(num_heads, batch, length).transpose(0, 1)


def attend_rows_backward(
    kernel: RowKernel,
    of_rows: OfRows,
    key: Tensor,
    value: Tensor,
    part: Part,
    scale: float,
    into: tuple[Tensor, Tensor],
) -> Tensor:
    """Gradient of the query [B, H, L, D]; those of keys and values are added to ``into``, [B, G, S, ...]."""
    *tensors, lse_BHL = of_rows
    batch = lse_BHL.shape[0]
    grad_out_THE, query_THD, out_THE = map(_by_token, tensors)
    lse_HT = lse_BHL.transpose(0, 1).flatten(1).contiguous()
    seen = _seen(part, batch)
    grad_query_THD, *grads = kernel.backward(
        (grad_out_THE, query_THD, out_THE, lse_HT), seen.keys_of(key), seen.keys_of(value), seen.rows, scale
    )
    for total, grad_UGD in zip(into, grads, strict=True):
        for (sequence, keys), grad_KGD in zip(seen.places(), torch.split(grad_UGD, seen.num_keys), strict=True):
            total[sequence, :, keys] += grad_KGD.transpose(0, 1)[..., : total.shape[-1]]
    return _by_head(grad_query_THD, batch)


@dataclass(frozen=True)
class _Seen:
    """Keys of a segment in every sequence of the batch."""

    rows: Rows
    first_places: list[int]
    """Per sequence, where its keys begin among the S; all end at ``end``."""
    end: int

    @property
    def num_keys(self) -> list[int]:
        return [self.end - first for first in self.first_places]

    def places(self) -> Iterator[tuple[int, slice]]:
        return ((sequence, slice(first, self.end)) for sequence, first in enumerate(self.first_places))

    def keys_of(self, x_BGSD: Tensor) -> Tensor:
        """[U, G, D]; no copy for one sequence."""
        keys = [x_BGSD[sequence, :, keys].transpose(0, 1) for sequence, keys in self.places()]
        return keys[0] if len(keys) == 1 else torch.cat(keys)


def _seen(part: Part, batch: int) -> _Seen:
    segment, sight = part.segment, part.sight
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    first_places = []
    for starts in sight.documents if len(sight.documents) > 1 else sight.documents * batch:
        # Documents that begin inside the segment cut it; of the one it begins in, keys before it may be seen.
        inside = starts[bisect_right(starts, segment.start) : bisect_left(starts, segment.end)]
        queries = [end - start for start, end in pairwise((segment.start, *inside, segment.end))]
        first_key = starts[bisect_right(starts, segment.start) - 1]
        if sight.window is not None:
            first_key = max(first_key, segment.start - sight.window + 1)
        query_lengths += queries
        key_lengths += [queries[0] + segment.start - first_key, *queries[1:]]
        first_places.append(first_key + part.key_shift)
    return _Seen(
        Rows(tuple(query_lengths), tuple(key_lengths), sight.window), first_places, segment.end + part.key_shift
    )


def _by_token(x_BHLD: Tensor) -> Tensor:
    """[T, H, D]; no copy for one sequence."""
    return x_BHLD.transpose(1, 2).flatten(0, 1)


def _by_head(x_THD: Tensor, batch: int) -> Tensor:
    """[B, H, L, D]"""
    return x_THD.reshape(batch, -1, *x_THD.shape[1:]).transpose(1, 2)
