"""Attention of whole rows: one call for the queries of a segment, each of which sees all its keys.

Documents lie one behind the other. Of a document, the last query sees the last key, the one before it the key before
(bottom-right causal), and so on; with a window the last so many of them. Every kernel has one signature: the reference,
plain arithmetic a block at a time, and the packages of ``flash_attention.py``.

Shapes: T queries and U keys of all documents, H query heads, G key heads (G divides H, R = H / G), D channels of a
query or key head, E channels of a value head; L queries and K keys of one block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.attention_pieces import OfRows

REFERENCE_BLOCK = 512
"""Queries, and keys, of a block of the reference: its scores are FP32 [H, 512, 512], 67 MB for 64 heads."""


@dataclass(frozen=True)
class Rows:
    """How many queries and keys the documents of one call have."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    """No less than the queries of the document, whose own keys are the last."""
    window: int | None = None
    """Keys that a query sees at most, its own included."""

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the documents begin and the last one ends, int32: of the queries, of the keys."""
        both = [[0, *accumulate(lengths)] for lengths in (self.query_lengths, self.key_lengths)]
        cu_queries, cu_keys = torch.tensor(both, dtype=torch.int32, device=device).unbind()
        return cu_queries, cu_keys

    @property
    def longest(self) -> tuple[int, int]:
        """Queries, and keys, of the document that has most of them."""
        return max(self.query_lengths), max(self.key_lengths)


@dataclass(frozen=True)
class RowKernel:
    name: str

    forward: Callable[[Tensor, Tensor, Tensor, Rows, float], tuple[Tensor, Tensor]]
    """query_THD, key_UGD, value_UGE, rows, scale -> out_THE, lse_HT (FP32, or FP64 for FP64 inputs)."""

    backward: Callable[[OfRows, Tensor, Tensor, Rows, float], tuple[Tensor, Tensor, Tensor]]
    """(grad_out_THE, query_THD, out_THE, lse_HT), key, value, rows, scale -> grad_query, grad_key, grad_value. A
    log-sum-exp that counts more than these keys (a sink) is that of the whole row, as ``out`` is."""

    head_dims: Callable[[int, int], tuple[int, int]] = lambda head_dim_qk, head_dim_v: (head_dim_qk, head_dim_v)
    """The head dims (D, E) it wants for given ones; what is added must be zero."""


def _forward(query_THD: Tensor, key_UGD: Tensor, value_UGE: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query_THD.dtype, torch.float32)
    out_THE = query_THD.new_empty((*query_THD.shape[:2], value_UGE.shape[-1]))
    lse_HT = query_THD.new_empty(query_THD.shape[1::-1], dtype=wide)
    for queries, blocks in _query_blocks(rows):
        query_GRLD = _by_key_head(query_THD[queries], key_UGD).to(wide)
        out = query_GRLD.new_zeros((*query_GRLD.shape[:-1], value_UGE.shape[-1]))
        lse = query_GRLD.new_full(query_GRLD.shape[:-1], float("-inf"))
        for block in blocks:
            scores_GRLK = _scores(query_GRLD, key_UGD, block, scale)
            # The first block holds every query's own key: from it on no log-sum-exp is -inf.
            both = torch.logaddexp(lse, scores_GRLK.logsumexp(-1))
            out = out * (lse - both).exp()[..., None]
            out += (scores_GRLK - both[..., None]).exp() @ _heads_first(value_UGE[block.keys], wide)
            lse = both
        out_THE[queries] = out.flatten(0, 1).transpose(0, 1).to(out_THE.dtype)
        lse_HT[:, queries] = lse.flatten(0, 1)
    return out_THE, lse_HT


def _backward(
    of_rows: OfRows, key_UGD: Tensor, value_UGE: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out_THE, query_THD, out_THE, lse_HT = of_rows
    wide = lse_HT.dtype
    grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (query_THD, key_UGD, value_UGE))
    for queries, blocks in _query_blocks(rows):
        query, grad_out, out = (_by_key_head(x[queries], key_UGD).to(wide) for x in (query_THD, grad_out_THE, out_THE))
        lse_GRL1 = _by_key_head(lse_HT[:, queries].T[..., None], key_UGD)
        dot_GRL1 = (grad_out * out).sum(-1, keepdim=True)
        for block in blocks:
            probs_GRLK = (_scores(query, key_UGD, block, scale) - lse_GRL1).exp()
            grad_probs = grad_out @ _heads_first(value_UGE[block.keys], wide).mT
            grad_scores = probs_GRLK * (grad_probs - dot_GRL1) * scale
            grad_q = grad_scores @ _heads_first(key_UGD[block.keys], wide)
            grad_query[queries] += grad_q.flatten(0, 1).transpose(0, 1)
            grad_key[block.keys] += (grad_scores.mT @ query).sum(1).transpose(0, 1)
            grad_value[block.keys] += (probs_GRLK.mT @ grad_out).sum(1).transpose(0, 1)
    return grad_query, grad_key, grad_value


REFERENCE = RowKernel("reference", _forward, _backward)


@dataclass(frozen=True)
class _Block:
    """Keys that some query of a block of queries sees."""

    keys: slice
    first_query: int
    """Place of the first query's own key, counted from the first of ``keys``."""
    window: int | None


def _query_blocks(rows: Rows) -> Iterator[tuple[slice, list[_Block]]]:
    """Blocks of queries with those of their keys, the last keys first. What nobody sees is in none."""
    starts = (accumulate(lengths, initial=0) for lengths in (rows.query_lengths, rows.key_lengths))
    for num_queries, num_keys, at_query, at_key in zip(rows.query_lengths, rows.key_lengths, *starts, strict=False):
        for first in range(0, num_queries, REFERENCE_BLOCK):
            last = min(first + REFERENCE_BLOCK, num_queries) - 1
            own = first + num_keys - num_queries
            oldest = 0 if rows.window is None else max(0, own - rows.window + 1)
            blocks, end = [], last + num_keys - num_queries + 1
            while end > oldest:
                start = max(oldest, end - REFERENCE_BLOCK)
                blocks.append(_Block(slice(at_key + start, at_key + end), own - start, rows.window))
                end = start
            yield slice(at_query + first, at_query + last + 1), blocks


def _scores(query_GRLD: Tensor, key_UGD: Tensor, block: _Block, scale: float) -> Tensor:
    """-inf where a query does not see a key."""
    scores_GRLK = query_GRLD @ _heads_first(key_UGD[block.keys], query_GRLD.dtype).mT * scale
    own_L, key_K = (torch.arange(length, device=scores_GRLK.device) for length in scores_GRLK.shape[-2:])
    own_L1 = own_L[:, None] + block.first_query
    is_hidden_LK = key_K > own_L1
    if block.window is not None:
        is_hidden_LK |= key_K <= own_L1 - block.window
    return scores_GRLK.masked_fill(is_hidden_LK, float("-inf"))


def _by_key_head(x_LHD: Tensor, key_UGD: Tensor) -> Tensor:
    """[G, R, L, D]"""
    x_HLD = x_LHD.transpose(0, 1)
    return x_HLD.reshape(key_UGD.shape[1], -1, *x_HLD.shape[1:])


def _heads_first(x_KGD: Tensor, dtype: torch.dtype) -> Tensor:
    """[G, 1, K, D]"""
    return x_KGD.transpose(0, 1)[:, None].to(dtype)
