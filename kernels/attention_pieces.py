"""One piece of attention: a rectangle of queries and keys, or a causal square, with its log-sum-exp.

Three kernels with one signature: torch's flash attention for CPU and for CUDA, and plain arithmetic for
everything else (FP64, FP32 on CUDA, head dims above 256). The backward pass takes the output and log-sum-exp
of the whole row, not of the piece, so pieces of a row can be computed apart and merged.

Shapes: B batch, L queries, K keys (K == L in a causal square), H query heads, G key heads, D channels of a
query or key head, E channels of a value head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

OfRows = tuple[Tensor, Tensor, Tensor, Tensor]
"""grad_out [B, H, L, E], query [B, H, L, D], out [B, H, L, E], lse [B, H, L], all of the whole rows."""

CUDA_FLASH_MAX_HEAD_DIM = 256
"""Of FlashAttention-2, which torch ships."""


@dataclass(frozen=True)
class PieceKernel:
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    """query, key, value, is_causal, scale -> out, lse (FP32, or FP64 for FP64 inputs)."""

    backward: Callable[[OfRows, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]
    """of_rows, key, value, is_causal, scale -> grad_query, grad_key [G heads], grad_value [G heads]."""

    head_dims: Callable[[int, int], tuple[int, int]]
    """The head dims (D, E) it wants for given ones; what is added must be zero."""

    name: str = "pieces"


def piece_kernel(query: Tensor, value: Tensor) -> PieceKernel:
    """The kernel for tensors like these."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "cpu" and (half or query.dtype == torch.float32):
        return _CPU_FLASH
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cuda" and half and head_dim <= CUDA_FLASH_MAX_HEAD_DIM:
        return _CUDA_FLASH
    return _MATH


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return out, lse


def _cpu_backward(
    of_rows: OfRows, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
    )
    return grad_query, grad_key, grad_value


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def _cuda_backward(
    of_rows: OfRows, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    # The state of the dropout generator: never read, because nothing is dropped, but the schema asks for it.
    unread_seed, unread_offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        unread_seed,
        unread_offset,
        scale=scale,
    )
    return grad_query, grad_key, grad_value


def _math_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores_BGRLK = _scores(_by_key_head(query, key), key, is_causal, scale)
    lse_BGRL = scores_BGRLK.logsumexp(-1)
    probs_BGRLK = (scores_BGRLK - lse_BGRL[..., None]).exp()
    out = probs_BGRLK @ value[:, :, None].to(probs_BGRLK.dtype)
    return out.flatten(1, 2).to(query.dtype), lse_BGRL.flatten(1, 2)


def _math_backward(
    of_rows: OfRows, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = (_by_key_head(x, key) for x in of_rows)
    probs = (_scores(query, key, is_causal, scale) - lse[..., None]).exp()
    grad_out, query, out = (x.to(probs.dtype) for x in (grad_out, query, out))
    grad_probs = grad_out @ value[:, :, None].to(probs.dtype).mT
    grad_scores = probs * (grad_probs - (grad_out * out).sum(-1, keepdim=True)) * scale
    grad_query = grad_scores @ key[:, :, None].to(probs.dtype)
    grad_key = (grad_scores.mT @ query).sum(2)
    grad_value = (probs.mT @ grad_out).sum(2)
    return grad_query.flatten(1, 2), grad_key, grad_value


def _by_key_head(x: Tensor, key: Tensor) -> Tensor:
    """[B, H, ...] -> [B, G, R, ...]: the R query heads of each key head."""
    return x.reshape(x.shape[0], key.shape[1], -1, *x.shape[2:])


def _scores(query_BGRLD: Tensor, key_BGKD: Tensor, is_causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(query_BGRLD.dtype, torch.float32)
    scores_BGRLK = query_BGRLD.to(wide) @ key_BGKD[:, :, None].to(wide).mT * scale
    if is_causal:
        future_LK = torch.ones(scores_BGRLK.shape[-2:], dtype=torch.bool, device=scores_BGRLK.device).triu(1)
        scores_BGRLK = scores_BGRLK.masked_fill(future_LK, float("-inf"))
    return scores_BGRLK


def _equal(head_dim_qk: int, head_dim_v: int) -> tuple[int, int]:
    width = max(head_dim_qk, head_dim_v)
    return width, width


def _equal_multiple_of_8(head_dim_qk: int, head_dim_v: int) -> tuple[int, int]:
    width = -(-max(head_dim_qk, head_dim_v) // 8) * 8
    return width, width


_CPU_FLASH = PieceKernel(_cpu_forward, _cpu_backward, _equal)
_CUDA_FLASH = PieceKernel(_cuda_forward, _cuda_backward, _equal_multiple_of_8)
_MATH = PieceKernel(_math_forward, _math_backward, lambda head_dim_qk, head_dim_v: (head_dim_qk, head_dim_v))
