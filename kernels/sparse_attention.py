"""Attention of many query heads to chosen latents: absorbed multi-query attention, and its gradient.

Everything is FP32 inside (FP64 stays FP64), whatever the dtype of query and latents. On a B200 or B300 the kernel of
flash-attn-4 takes over, where it is installed (``sparse_flash_attention.py``).

Shapes: B batch, L queries, S latents, H query heads, M channels of a latent and of an absorbed query, C of them the
value, K latents per query, T = B*L queries of all rows, R of them in one block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

from lightning_moe_strategy.kernels import sparse_flash_attention

# Numbers of gathered latents in memory at once, whatever the length of the sequence. GLM-5.2 (K 2048, M 576): 14
# queries a block, 67 MB of latents in FP32, 7 MB of scores; the backward has as much again for their gradient.
GATHERED_PER_BLOCK = 2**24


@torch.library.custom_op("lightning_moe::sparse_attention", mutates_args=())
def _forward(
    query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
) -> tuple[Tensor, Tensor]:
    if sparse_flash_attention.can_attend(query_BLHM, latent_BSM, value_channels):
        return sparse_flash_attention.attend(query_BLHM, latent_BSM, key_ids_BLK, value_channels, scale)
    with torch.autocast(query_BLHM.device.type, enabled=False):
        return _attend_by_blocks(query_BLHM, latent_BSM, key_ids_BLK, value_channels, scale)


@_forward.register_fake
def _(
    query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
) -> tuple[Tensor, Tensor]:
    rows = query_BLHM.shape[:3]
    return query_BLHM.new_empty((*rows, value_channels)), query_BLHM.new_empty(rows, dtype=_wide(query_BLHM))


@register_flop_formula(torch.ops.lightning_moe.sparse_attention)
def _forward_flops(
    query_shape: Any, latent_shape: Any, key_ids_shape: Any, value_channels: int, *args: Any, **kwargs: Any
) -> int:
    """Scores and output."""
    num_heads, channels = query_shape[2:]
    return int(2 * _num_pairs(key_ids_shape) * num_heads * (channels + value_channels))


@torch.library.custom_op("lightning_moe::sparse_attention_backward", mutates_args=())
def _backward(
    grad_out_BLHC: Tensor,
    query_BLHM: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    out_BLHC: Tensor,
    lse_BLH: Tensor,
    scale: float,
    token_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    if sparse_flash_attention.can_attend(query_BLHM, latent_BSM, out_BLHC.shape[-1]):
        return sparse_flash_attention.attend_backward(
            (grad_out_BLHC, out_BLHC, lse_BLH), query_BLHM, latent_BSM, key_ids_BLK, scale, token_chunk=token_chunk
        )
    with torch.autocast(query_BLHM.device.type, enabled=False):
        return _attend_backward_by_blocks(
            (grad_out_BLHC, out_BLHC, lse_BLH), query_BLHM, latent_BSM, key_ids_BLK, scale
        )


@_backward.register_fake
def _(
    grad_out_BLHC: Tensor,
    query_BLHM: Tensor,
    latent_BSM: Tensor,
    key_ids_BLK: Tensor,
    out_BLHC: Tensor,
    lse_BLH: Tensor,
    scale: float,
    token_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    grad_query = query_BLHM.new_empty(query_BLHM.shape)
    return grad_query, latent_BSM.new_empty(latent_BSM.shape, dtype=_wide(latent_BSM))


@register_flop_formula(torch.ops.lightning_moe.sparse_attention_backward)
def _backward_flops(
    grad_out_shape: Any, query_shape: Any, latent_shape: Any, key_ids_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """Scores again, and the gradients of query and latent (M each), of probabilities and values (C each)."""
    num_heads, channels = query_shape[2:]
    return int(2 * _num_pairs(key_ids_shape) * num_heads * (3 * channels + 2 * grad_out_shape[-1]))


def _num_pairs(key_ids_shape: Any) -> int:
    batch, num_queries, width = key_ids_shape
    return int(batch * num_queries * width)


def _attend_by_blocks(
    query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
) -> tuple[Tensor, Tensor]:
    out_BLHC = query_BLHM.new_empty((*query_BLHM.shape[:3], value_channels))
    lse_BLH = query_BLHM.new_empty(query_BLHM.shape[:3], dtype=_wide(query_BLHM))
    out_THC, lse_TH, query_THM = (x.flatten(0, 1) for x in (out_BLHC, lse_BLH, query_BLHM))
    for block, _, is_no_key_RK, latent_RKM in _gathered_blocks(latent_BSM, key_ids_BLK):
        scores_RHK = _block_scores(query_THM[block], latent_RKM, is_no_key_RK, scale)
        lse_TH[block] = scores_RHK.logsumexp(dim=-1)
        probs_RHK = _probabilities(scores_RHK, lse_TH[block])
        out_THC[block] = torch.bmm(probs_RHK, latent_RKM[..., :value_channels]).to(out_THC.dtype)
    return out_BLHC, lse_BLH


def _attend_backward_by_blocks(
    outputs: tuple[Tensor, Tensor, Tensor], query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    grad_out_THC, out_THC, lse_TH = (x.flatten(0, 1) for x in outputs)
    query_THM = query_BLHM.flatten(0, 1)
    value_channels, wide = out_THC.shape[-1], _wide(query_BLHM)
    grad_query_THM = query_THM.new_empty(query_THM.shape)
    # B*S rows, one for each latent: two batch rows share none.
    grad_latent = latent_BSM.new_zeros(latent_BSM.shape, dtype=wide).flatten(0, 1)
    for block, rows_RK, is_no_key_RK, latent_RKM in _gathered_blocks(latent_BSM, key_ids_BLK):
        query_RHM, grad_out_RHC = query_THM[block].to(wide), grad_out_THC[block].to(wide)
        scores_RHK = _block_scores(query_RHM, latent_RKM, is_no_key_RK, scale)
        probs_RHK = _probabilities(scores_RHK, lse_TH[block])
        grad_probs_RHK = torch.bmm(grad_out_RHC, latent_RKM[..., :value_channels].mT)
        dot_RH1 = (grad_out_RHC * out_THC[block]).sum(dim=-1, keepdim=True)
        grad_scores_RHK = grad_probs_RHK.sub_(dot_RH1).mul_(probs_RHK).mul_(scale)
        grad_query_THM[block] = torch.bmm(grad_scores_RHK, latent_RKM).to(grad_query_THM.dtype)
        grad_RKM = torch.bmm(grad_scores_RHK.mT, query_RHM)
        grad_RKM[..., :value_channels].baddbmm_(probs_RHK.mT, grad_out_RHC)
        # What is no key has probability 0 and adds exact zeros to the latent that stands in for it.
        grad_latent.index_add_(0, rows_RK.flatten(), grad_RKM.flatten(0, 1))
    return grad_query_THM.view_as(query_BLHM), grad_latent.view_as(latent_BSM)


def _gathered_blocks(latent_BSM: Tensor, key_ids_BLK: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Blocks of queries: which, the rows of their latents among all B*S, which are no key, and the latents."""
    (batch, num_latents, channels), (_, num_queries, width) = latent_BSM.shape, key_ids_BLK.shape
    latents, wide = latent_BSM.flatten(0, 1), _wide(latent_BSM)
    first_row_B11 = num_latents * torch.arange(batch, device=key_ids_BLK.device)[:, None, None]
    block_length = max(1, GATHERED_PER_BLOCK // max(1, width * channels))
    for row in range(batch):
        for start in range(0, num_queries, block_length):
            ids_RK = key_ids_BLK[row, start : start + block_length]
            rows_RK = ids_RK.clamp(min=0) + first_row_B11[row]
            latent_RKM = latents.index_select(0, rows_RK.flatten()).to(wide).view(*ids_RK.shape, channels)
            block = slice(row * num_queries + start, row * num_queries + start + len(ids_RK))
            yield block, rows_RK, ids_RK < 0, latent_RKM


def _block_scores(query_RHM: Tensor, latent_RKM: Tensor, is_no_key_RK: Tensor, scale: float) -> Tensor:
    scores_RHK = torch.bmm(query_RHM.to(latent_RKM.dtype), latent_RKM.mT).mul_(scale)
    return scores_RHK.masked_fill_(is_no_key_RK[:, None], float("-inf"))


def _probabilities(scores_RHK: Tensor, lse_RH: Tensor) -> Tensor:
    """Softmax, in place; all zeros where there is no key, whose log-sum-exp is -inf."""
    return scores_RHK.sub_(lse_RH.masked_fill(lse_RH == float("-inf"), 0.0)[..., None]).exp_()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
    ) -> Tensor:
        out_BLHC, lse_BLH = torch.ops.lightning_moe.sparse_attention(
            query_BLHM, latent_BSM, key_ids_BLK, value_channels, scale
        )
        ctx.save_for_backward(query_BLHM, latent_BSM, key_ids_BLK, out_BLHC, lse_BLH)
        ctx.scale = scale
        kept: Tensor = out_BLHC
        return kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BLHC: Tensor) -> tuple[Tensor | None, ...]:
        query_BLHM, latent_BSM, key_ids_BLK, out_BLHC, lse_BLH = ctx.saved_tensors
        grad_query, grad_latent = torch.ops.lightning_moe.sparse_attention_backward(
            grad_out_BLHC, query_BLHM, latent_BSM, key_ids_BLK, out_BLHC, lse_BLH, ctx.scale
        )
        return grad_query, grad_latent.to(latent_BSM.dtype), None, None, None


def sparse_attention(
    query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
) -> Tensor:
    """Each query's softmax average of the latents it chose: out_BLHC, in the dtype of the query.

    All heads share a latent: its M channels are their key, the first C = ``value_channels`` their value. Ids are
    int32 places in S, no id twice for one query, and -1 is skipped; a query without any gives exact zeros and has
    exact zero gradients. Nothing is hidden from a query but what its ids leave out: causality is theirs.

    Gathered latents exist for a block of queries at a time: 0.1 GB, twice that in the backward. Kept for the backward
    are the inputs, the output and its log-sum-exp; probabilities are computed again. The gradient of a latent adds up
    in FP32; on CUDA in any order, unless ``torch.use_deterministic_algorithms`` fixes it.
    """
    inputs = (query_BLHM, latent_BSM)
    if has_torch_function(inputs):
        taken_over: Tensor = handle_torch_function(
            sparse_attention, inputs, query_BLHM, latent_BSM, key_ids_BLK, value_channels, scale
        )
        return taken_over
    check_sparse_attention(query_BLHM, latent_BSM, key_ids_BLK, value_channels)
    out_BLHC: Tensor = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        query_BLHM, latent_BSM, key_ids_BLK, value_channels, scale
    )
    return out_BLHC


def check_sparse_attention(query_BLHM: Tensor, latent_BSM: Tensor, key_ids_BLK: Tensor, value_channels: int) -> None:
    """ValueError for shapes or dtypes that do not go together."""
    batch, _, channels = latent_BSM.shape
    shapes = f"query {tuple(query_BLHM.shape)}, latent {tuple(latent_BSM.shape)}, key_ids {tuple(key_ids_BLK.shape)}"
    if query_BLHM.dim() != 4 or (query_BLHM.shape[0], query_BLHM.shape[3]) != (batch, channels):
        raise ValueError(f"{shapes}: they must be [B, L, H, M], [B, S, M] and [B, L, K].")
    if key_ids_BLK.shape[:2] != query_BLHM.shape[:2] or key_ids_BLK.dtype != torch.int32:
        raise ValueError(f"{shapes}: key_ids ({key_ids_BLK.dtype}) must be int32 [B, L, K], a row for each query.")
    if not 0 < value_channels <= channels:
        raise ValueError(f"value_channels({value_channels}) must be 1 to {channels}, the channels of a latent.")
    if query_BLHM.dtype != latent_BSM.dtype:
        raise ValueError(f"query is {query_BLHM.dtype}, latent {latent_BSM.dtype}: cast them to one dtype.")
