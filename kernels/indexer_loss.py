"""What an indexer is trained by: how far its scores are from the attention they chose the keys for, and the gradient.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1.1, sparse training): over the keys that a query chose, the target is the
attention's probabilities summed over its heads and normalised, the prediction the softmax of the index scores, and the
loss their Kullback-Leibler divergence. Everything is FP32 inside (FP64 stays FP64), whatever the dtypes.

Shapes: B batch, L queries, S keys, K keys per query; I heads of the indexer, N channels of each; H query heads, M
channels of a latent and of an absorbed query; R queries of one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_moe_strategy.kernels.sparse_attention import GATHERED_PER_BLOCK


@torch.library.custom_op("lightning_moe::indexer_loss", mutates_args=())
def _indexer_loss(
    index_query_BLIN: Tensor,
    index_key_BSN: Tensor,
    index_weights_BLI: Tensor,
    query_BLHM: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    token_weights_BL: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(query_BLHM.device.type, enabled=False):
        return _by_blocks(
            (index_query_BLIN, index_weights_BLI, query_BLHM),
            index_key_BSN,
            latent_BSM,
            key_ids_BLK,
            token_weights_BL=token_weights_BL,
            scale=scale,
        )


@_indexer_loss.register_fake
def _(
    index_query_BLIN: Tensor,
    index_key_BSN: Tensor,
    index_weights_BLI: Tensor,
    query_BLHM: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    token_weights_BL: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = _wide(index_query_BLIN)
    return (
        index_query_BLIN.new_empty(index_query_BLIN.shape[:2], dtype=wide),
        index_query_BLIN.new_empty(index_query_BLIN.shape),
        index_key_BSN.new_empty(index_key_BSN.shape, dtype=wide),
        index_weights_BLI.new_empty(index_weights_BLI.shape),
    )


@register_flop_formula(torch.ops.lightning_moe.indexer_loss)
def _indexer_loss_flops(
    index_query_shape: Any,
    index_key_shape: Any,
    index_weights_shape: Any,
    query_shape: Any,
    latent_shape: Any,
    key_ids_shape: Any,
    *args: Any,
    **kwargs: Any,
) -> int:
    """The attention's scores again; index scores, and the gradients of index query, key and weights."""
    batch, num_queries, width = key_ids_shape
    (index_heads, index_channels), (heads, channels) = index_query_shape[2:], query_shape[2:]
    per_pair = heads * channels + index_heads * (3 * index_channels + 2)
    return int(2 * batch * num_queries * width * per_pair)


def indexer_loss(
    index_query_BLIN: Tensor,
    index_key_BSN: Tensor,
    index_weights_BLI: Tensor,
    *,
    query_BLHM: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    token_weights_BL: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """kl_BL of every query, in nats, and the gradient of ``sum(token_weights_BL * kl_BL)``.

    The gradient is that of index query, index key (at least FP32: a sum over queries) and index weights; the target is
    no function of them, and attention gets none. A score is the sum over heads of ``weight * relu(q . k)``: unlike for
    a choice of keys, a factor common to all belongs to it and must be in the weights. ``query``, ``latent`` and
    ``scale`` are those of ``sparse_attention``. Ids are int32 and -1 is skipped; a query without any key has loss and
    gradients 0.

    Gathered keys and latents exist for a block of queries at a time, 0.2 GB, whatever the length of the sequence.

    Raises:
        ValueError: shapes that do not go together.
    """
    _check(index_query_BLIN, index_key_BSN, index_weights_BLI, query_BLHM, latent_BSM, key_ids_BLK, token_weights_BL)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.lightning_moe.indexer_loss(
        index_query_BLIN, index_key_BSN, index_weights_BLI, query_BLHM, latent_BSM, key_ids_BLK, token_weights_BL, scale
    )
    return results


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The keys of some queries of one row."""

    queries: slice
    """Among all B*L."""
    keys_RK: Tensor
    """Among all B*S; some key stands in where there is none."""
    is_no_key_RK: Tensor


def _by_blocks(
    queries: tuple[Tensor, Tensor, Tensor],
    index_key_BSN: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    *,
    token_weights_BL: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index_query_TIN, index_weights_TI, query_THM = (x.flatten(0, 1) for x in queries)
    index_keys, latents, token_weights_T = (x.flatten(0, 1) for x in (index_key_BSN, latent_BSM, token_weights_BL))
    wide = _wide(index_query_TIN)
    kl_T = index_query_TIN.new_empty(len(index_query_TIN), dtype=wide)
    grad_query_TIN, grad_weights_TI = (
        index_query_TIN.new_empty(index_query_TIN.shape),
        torch.empty_like(index_weights_TI),
    )
    grad_keys = index_keys.new_zeros(index_keys.shape, dtype=wide)
    for block in _blocks(index_key_BSN.shape[1], key_ids_BLK, latents.shape[-1] + index_keys.shape[-1]):
        here = block.queries
        target_RK = _target(query_THM[here], latents, block, scale).to(wide)
        weights_RI, index_query_RIN = index_weights_TI[here].to(wide), index_query_TIN[here].to(wide)
        key_RKN = _rows(index_keys, block.keys_RK).to(wide)
        products_RIK = torch.bmm(index_query_RIN, key_RKN.mT).relu_()
        log_predicted_RK = _log_softmax(torch.bmm(weights_RI[:, None], products_RIK)[:, 0], block.is_no_key_RK)
        kl_T[here] = (torch.xlogy(target_RK, target_RK) - target_RK * log_predicted_RK).sum(dim=-1)
        predicted_RK = log_predicted_RK.exp().masked_fill_(block.is_no_key_RK, 0.0)
        grad_scores_RK = predicted_RK.sub_(target_RK).mul_(token_weights_T[here, None])
        grad_weights_TI[here] = torch.bmm(products_RIK, grad_scores_RK[..., None])[..., 0].to(grad_weights_TI.dtype)
        grad_products_RIK = products_RIK.sign_().mul_(weights_RI[..., None]).mul_(grad_scores_RK[:, None])
        grad_query_TIN[here] = torch.bmm(grad_products_RIK, key_RKN).to(grad_query_TIN.dtype)
        grad_RKN = torch.bmm(grad_products_RIK.mT, index_query_RIN)
        # What is no key has gradient 0 and adds exact zeros to the key that stands in for it.
        grad_keys.index_add_(0, block.keys_RK.flatten(), grad_RKN.flatten(0, 1))
    shapes = (kl_T, token_weights_BL), (grad_query_TIN, queries[0]), (grad_keys, index_key_BSN)
    kl_BL, grad_query, grad_key = (x.view(like.shape) for x, like in shapes)
    return kl_BL, grad_query, grad_key, grad_weights_TI.view(queries[1].shape)


def _blocks(num_keys: int, key_ids_BLK: Tensor, channels: int) -> Iterator[_Block]:
    batch, num_queries, width = key_ids_BLK.shape
    block_length = max(1, GATHERED_PER_BLOCK // max(1, width * channels))
    for row in range(batch):
        for start in range(0, num_queries, block_length):
            ids_RK = key_ids_BLK[row, start : start + block_length]
            first = row * num_queries + start
            yield _Block(
                queries=slice(first, first + len(ids_RK)),
                keys_RK=ids_RK.clamp(min=0).long() + row * num_keys,
                is_no_key_RK=ids_RK < 0,
            )


def _target(query_RHM: Tensor, latents: Tensor, block: _Block, scale: float) -> Tensor:
    """Each key's share of all heads' attention; zeros for a query without a key."""
    latent_RKM = _rows(latents, block.keys_RK).to(_wide(latents))
    scores_RHK = torch.bmm(query_RHM.to(latent_RKM.dtype), latent_RKM.mT).mul_(scale)
    scores_RHK.masked_fill_(block.is_no_key_RK[:, None], float("-inf"))
    target_RK = scores_RHK.softmax(dim=-1).mean(dim=1)
    return target_RK.masked_fill_(block.is_no_key_RK, 0.0)


def _log_softmax(scores_RK: Tensor, is_no_key_RK: Tensor) -> Tensor:
    """Zero where there is no key, so that no infinity meets a probability of zero."""
    log_RK = scores_RK.masked_fill(is_no_key_RK, float("-inf")).log_softmax(dim=-1)
    return log_RK.masked_fill_(is_no_key_RK, 0.0)


def _rows(x: Tensor, rows_RK: Tensor) -> Tensor:
    return x.index_select(0, rows_RK.flatten()).view(*rows_RK.shape, x.shape[-1])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query: Tensor,
    latent: Tensor,
    key_ids: Tensor,
    token_weights: Tensor,
) -> None:
    named = {
        "index_query [B, L, I, N]": index_query,
        "index_key [B, S, N]": index_key,
        "index_weights [B, L, I]": index_weights,
        "query [B, L, H, M]": query,
        "latent [B, S, M]": latent,
        "key_ids [B, L, K]": key_ids,
        "token_weights [B, L]": token_weights,
    }
    dims: dict[str, int] = {}
    for name, x in named.items():
        letters = name.partition("[")[2].rstrip("]").split(", ")
        if len(letters) != x.dim() or any(dims.setdefault(k, n) != n for k, n in zip(letters, x.shape, strict=True)):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
            raise ValueError(f"Shapes do not go together at {name}: {shapes}. Equal letters must be equal numbers.")
