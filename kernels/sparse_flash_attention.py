"""Sparse latent attention of flash-attn-4, where it is installed and the GPU is a B200 or B300.

Neither the probabilities P nor more than a chunk of their gradient dS are ever in memory: the forward pass keeps output
and log-sum-exp, the backward pass computes P again and goes through the queries in chunks (FlashAttention pull request
2816). Read in flash-attn-4 4.0.0b36.

Shapes: B batch, L queries, S latents, H query heads, M channels of a latent and of an absorbed query, C of them the
value, K latents per query.
"""

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.kernels.attention import capability
from lightning_moe_strategy.kernels.flash_attention import NotInstalled, require

SCORE_GRADIENT_BYTES = 2**29
"""Of dS at a time, where the caller does not say how many queries. GLM-5.2, 64 heads and 2048 keys: 2048 queries, of
16,384 on a rank whose whole dS were 4.3 GB."""

CHANNELS, VALUE_CHANNELS, MAX_HEADS, KEYS_MULTIPLE = 576, 512, 128, 128
"""The kernel's: value and 64 rope channels, heads of one token, and what the keys of a query are filled up to."""


def can_attend(query_BLHM: Tensor, latent_BSM: Tensor, value_channels: int) -> bool:
    """Whether ``attend`` and ``attend_backward`` take tensors like these, here. The order of a latent's sum is not
    fixed, so not where algorithms must be deterministic."""
    fits = (
        query_BLHM.dtype == latent_BSM.dtype == torch.bfloat16
        and (query_BLHM.shape[-1], value_channels) == (CHANNELS, VALUE_CHANNELS)
        and query_BLHM.shape[2] <= MAX_HEADS
        and min(query_BLHM.numel(), latent_BSM.numel()) > 0
    )
    return (
        fits
        and capability(query_BLHM.device)[0] == 10
        and not torch.are_deterministic_algorithms_enabled()
        and isinstance(package(), ModuleType)
    )


@lru_cache
def package() -> ModuleType | NotInstalled:
    """Or why there is none."""
    try:
        module = import_module("flash_attn.cute.interface")
        require(
            module,
            {
                "_flash_attn_fwd": ("qv", "gather_kv_indices", "gather_bwd_recompute_p"),
                "_flash_attn_bwd_sparse_mla": ("recompute_p", "token_chunk"),
            },
        )
    except (ImportError, OSError) as error:
        return NotInstalled(str(error))
    except NotInstalled as error:
        return error
    return module


def attend(
    query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
) -> tuple[Tensor, Tensor]:
    """out_BLHC and lse_BLH."""
    query_BLHR, value_query_BLHC = _rope_and_value(query_BLHM, value_channels)
    key_BS1R, value_BS1C = _rope_and_value(latent_BSM[:, :, None], value_channels)
    out_BLHC, lse_BLH, *_ = _functions()._flash_attn_fwd(
        query_BLHR,
        key_BS1R,
        value_BS1C,
        qv=value_query_BLHC,
        softmax_scale=scale,
        causal=False,  # ids name no key that the query must not see
        return_lse=True,
        gather_kv_indices=_filled_up(key_ids_BLK),
        gather_bwd_recompute_p=True,
    )
    return out_BLHC, lse_BLH


def attend_backward(
    outputs: tuple[Tensor, Tensor, Tensor],
    query_BLHM: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    scale: float,
    *,
    token_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Gradients of query (its dtype) and latent (FP32), from (grad_out_BLHC, out_BLHC, lse_BLH).

    ``token_chunk`` queries at a time; 0 is as many as ``SCORE_GRADIENT_BYTES`` hold.
    """
    value_channels, key_ids = outputs[1].shape[-1], _filled_up(key_ids_BLK)
    per_query = query_BLHM.shape[2] * key_ids.shape[-1] * query_BLHM.element_size()
    chunk = token_chunk or max(1, SCORE_GRADIENT_BYTES // per_query)
    grad_queries, grad_latents = [], []
    # The kernel cuts one sequence, or none of a batch, into chunks.
    for row in range(len(query_BLHM)):
        grad_out, out, lse = (x[row : row + 1] for x in outputs)
        query, value_query = _rope_and_value(query_BLHM[row : row + 1], value_channels)
        key, value = _rope_and_value(latent_BSM[row : row + 1, :, None], value_channels)
        grad_query, grad_key, grad_value, grad_value_query, _ = _functions()._flash_attn_bwd_sparse_mla(
            query,
            key,
            value,
            value_query,
            out,
            grad_out,
            lse,
            None,
            None,
            key_ids[row : row + 1],
            softmax_scale=scale,
            causal=False,
            recompute_p=True,
            token_chunk=chunk if chunk < query.shape[1] else None,
        )
        grad_queries.append(torch.cat([grad_value_query, grad_query], -1))
        grad_latents.append(torch.cat([grad_value, grad_key], -1)[:, :, 0])
    return _joined(grad_queries), _joined(grad_latents)


def _functions() -> ModuleType:
    module = package()
    assert isinstance(module, ModuleType), "can_attend was asked"
    return module


def _rope_and_value(x: Tensor, value_channels: int) -> tuple[Tensor, Tensor]:
    """What of a latent, or of a query to it, is position and what is value."""
    return x[..., value_channels:], x[..., :value_channels]


def _filled_up(key_ids_BLK: Tensor) -> Tensor:
    """With -1, which is no key."""
    return F.pad(key_ids_BLK, (0, -key_ids_BLK.shape[-1] % KEYS_MULTIPLE), value=-1)


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
