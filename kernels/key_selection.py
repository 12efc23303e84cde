"""Which keys a query attends to: the top-k of an indexer's scores (DeepSeek sparse attention).

Shapes: B batch, L queries, S keys, H heads of the indexer, N channels of a head, K keys per query; R queries of one
block, E the keys that a block can see, C keys of one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

NO_KEY = -1
"""Stands for a key that is not there: a query saw fewer than K."""

# Numbers in memory at once; neither depends on the length of the sequence, and no tensor has L*S of them. At a million
# keys: 8 queries a block with 34 MB of FP32 scores and 67 MB of the int64 ranks they are sorted by. Products with the
# 32 heads of GLM-5.2: chunks of 65,536 keys, 67 MB, and 34 MB for the chunk's keys in FP32. The two never coexist.
SCORES_PER_BLOCK = 2**23
PRODUCTS_PER_CHUNK = 2**24

_HIDDEN = torch.iinfo(torch.int64).min


@torch.library.custom_op("lightning_moe::select_keys", mutates_args=())
def _select_keys(
    query_BLHN: Tensor,
    key_BSN: Tensor,
    weights_BLH: Tensor,
    query_positions_L: Tensor | None,
    first_keys_BL: Tensor | None,
    top_k: int,
) -> Tensor:
    with torch.autocast(query_BLHN.device.type, enabled=False):
        return _select_by_blocks(query_BLHN, key_BSN, weights_BLH, query_positions_L, first_keys_BL, top_k)


@_select_keys.register_fake
def _(
    query_BLHN: Tensor,
    key_BSN: Tensor,
    weights_BLH: Tensor,
    query_positions_L: Tensor | None,
    first_keys_BL: Tensor | None,
    top_k: int,
) -> Tensor:
    width = min(top_k, key_BSN.shape[1])
    return query_BLHN.new_empty((*query_BLHN.shape[:2], width), dtype=torch.int32)


@register_flop_formula(torch.ops.lightning_moe.select_keys)
def _select_keys_flops(query_shape: Any, key_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Products of queries with the half of all keys that a query sees on average: a block leaves the others out."""
    batch, num_queries, num_heads, head_dim = query_shape
    return int(batch * num_queries * key_shape[1] * num_heads * head_dim)


def _select_by_blocks(
    query_BLHN: Tensor,
    key_BSN: Tensor,
    weights_BLH: Tensor,
    query_positions_L: Tensor | None,
    first_keys_BL: Tensor | None,
    top_k: int,
) -> Tensor:
    batch, num_queries = query_BLHN.shape[:2]
    num_keys = key_BSN.shape[1]
    width = min(top_k, num_keys)
    key_ids_BLK = torch.full((batch, num_queries, width), NO_KEY, dtype=torch.int32, device=query_BLHN.device)
    if query_positions_L is None:
        query_positions_L = torch.arange(num_queries, device=query_BLHN.device)
    # On the host once for all blocks: what no query of a block can see is half of the work.
    positions = query_positions_L.tolist()
    block_length = max(1, SCORES_PER_BLOCK // max(1, num_keys))
    for start in range(0, num_queries, block_length):
        block = slice(start, start + block_length)
        num_seen = min(num_keys, 1 + max(positions[block]))
        for row in range(batch if num_seen > 0 else 0):
            best_RK = _best_of_block(
                query_BLHN[row, block],
                key_BSN[row, :num_seen],
                weights_BLH[row, block],
                query_positions_L[block],
                None if first_keys_BL is None else first_keys_BL[row, block],
                min(width, num_seen),
            )
            key_ids_BLK[row, block, : best_RK.shape[1]] = best_RK
    return key_ids_BLK


def _best_of_block(
    query_RHN: Tensor,
    key_EN: Tensor,
    weights_RH: Tensor,
    query_positions_R: Tensor,
    first_keys_R: Tensor | None,
    width: int,
) -> Tensor:
    """Ids of the ``width`` best visible keys of each query, best first, the lower id first among equals."""
    scores_RE = _scores(query_RHN, key_EN, weights_RH)
    num_seen = scores_RE.shape[1]
    key_ids_E = torch.arange(num_seen, device=scores_RE.device)
    # ReLU makes long plateaus of equal scores, and a plain top-k takes any of them: another set for another layout,
    # device or recompute. One integer per key, the score above and the id below, has no equals.
    bits_RE = scores_RE.add_(0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits_RE ^= (bits_RE >> 31) & 0x7FFFFFFF  # as integers, negative floats run backwards
    ranks_RE = bits_RE.long()
    ranks_RE <<= 32
    ranks_RE |= num_seen - 1 - key_ids_E
    ranks_RE.masked_fill_(key_ids_E > query_positions_R[:, None], _HIDDEN)
    if first_keys_R is not None:
        ranks_RE.masked_fill_(key_ids_E < first_keys_R[:, None], _HIDDEN)
    best_RK = ranks_RE.topk(width, dim=-1).values
    ids_RK = num_seen - 1 - (best_RK & 0xFFFFFFFF)
    return ids_RK.masked_fill_(best_RK == _HIDDEN, NO_KEY)


def _scores(query_RHN: Tensor, key_EN: Tensor, weights_RH: Tensor) -> Tensor:
    num_rows, num_heads = weights_RH.shape
    num_keys = key_EN.shape[0]
    query = query_RHN.float().flatten(0, 1)
    weights_R1H = weights_RH.float()[:, None]
    scores_RE = query.new_empty(num_rows, num_keys)
    chunk_length = max(1, PRODUCTS_PER_CHUNK // (num_rows * num_heads))
    for start in range(0, num_keys, chunk_length):
        chunk = slice(start, start + chunk_length)
        products_RHC = (query @ key_EN[chunk].float().t()).view(num_rows, num_heads, -1).relu_()
        scores_RE[:, chunk] = torch.bmm(weights_R1H, products_RHC)[:, 0]
    return scores_RE


def select_keys(
    query_BLHN: Tensor,
    key_BSN: Tensor,
    weights_BLH: Tensor,
    query_positions_L: Tensor | None = None,
    *,
    top_k: int,
    first_keys_BL: Tensor | None = None,
) -> Tensor:
    """The ``min(top_k, S)`` best keys of every query: key_ids_BLK, int32, best first.

    A key's score is the sum over heads of ``weight * relu(q . k)``, in FP32 whatever the dtypes; a positive factor
    common to all keys changes nothing and belongs into the weights, if anywhere. Key s is visible to a query at
    position p when ``s <= p``; ``query_positions_L`` are the queries' places among the keys, 0 ... L-1 by default,
    and not below ``first_keys_BL``, where a query's document starts, if that is given.
    Where fewer than K keys are visible the rest is -1. Of keys with equal scores the lower id wins, on every device.

    Scores exist for a block of queries at a time, 0.2 GB at a million keys. A selection has no gradient.
    """
    inputs = (query_BLHN, key_BSN, weights_BLH)
    if has_torch_function(inputs):
        selected: Tensor = handle_torch_function(
            select_keys,
            inputs,
            query_BLHN,
            key_BSN,
            weights_BLH,
            query_positions_L,
            top_k=top_k,
            first_keys_BL=first_keys_BL,
        )
        return selected
    check_selection(query_BLHN, key_BSN, weights_BLH, query_positions_L, top_k=top_k)
    with torch.no_grad():
        ids: Tensor = torch.ops.lightning_moe.select_keys(
            query_BLHN, key_BSN, weights_BLH, query_positions_L, first_keys_BL, top_k
        )
    return ids


def check_selection(
    query_BLHN: Tensor, key_BSN: Tensor, weights_BLH: Tensor, query_positions_L: Tensor | None = None, *, top_k: int
) -> None:
    """ValueError for shapes that do not go together."""
    batch, num_queries, num_heads, head_dim = query_BLHN.shape
    if (key_BSN.shape[0], key_BSN.shape[2]) != (batch, head_dim) or weights_BLH.shape != query_BLHN.shape[:3]:
        raise ValueError(
            f"query {tuple(query_BLHN.shape)}, key {tuple(key_BSN.shape)} and weights {tuple(weights_BLH.shape)} must "
            "be [B, L, H, N], [B, S, N] and [B, L, H]."
        )
    if top_k < 1:
        raise ValueError(f"top_k({top_k}) must be at least 1: every query attends to some key.")
    if query_positions_L is None and num_queries > key_BSN.shape[1]:
        raise ValueError(
            f"{num_queries} queries cannot be the first of {key_BSN.shape[1]} keys. Pass query_positions_L."
        )
    if query_positions_L is not None and query_positions_L.shape != (num_queries,):
        raise ValueError(
            f"query_positions_L {tuple(query_positions_L.shape)} must hold one position for each of the "
            f"{num_queries} queries."
        )
