"""Sparse attention over a sequence that is spread over the cp ranks: chosen keys are places in the whole sequence.

A rank scores and attends with its own queries. Layers with an indexer gather its keys, once and without a gradient;
every layer gathers latents, the smallest thing that determines keys and values. Chosen keys stay on the rank of their
query, so layers that share a choice have nothing more to gather.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence; H heads, N channels of an index head, M channels
of a latent, C of them the value, K keys per query.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.ahead import GatheredAhead
from lightning_moe_strategy.context_parallel.documents import positions_in_documents
from lightning_moe_strategy.context_parallel.gather import (
    all_gather_natural,
    gathered_should_be_kept,
    reduce_scatter_natural,
)
from lightning_moe_strategy.context_parallel.indexer_loss import Index, index_gradients
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.key_selection import check_selection
from lightning_moe_strategy.kernels.sparse_attention import check_sparse_attention


def select_keys_of_sequence(
    query_BLHN: Tensor,
    key_BLN: Tensor,
    weights_BLH: Tensor,
    top_k: int,
    *,
    layout: SequenceLayout,
    group: AnyGroup,
    documents: Documents = ONE_DOCUMENT,
    ahead: GatheredAhead | None = None,
) -> Tensor:
    """The best keys of this rank's queries among the tokens of their document up to their own: key_ids_BLK, natural
    positions. ``ahead``: ``key_BLN`` on its way already."""
    _check_local(query_BLHN, key_BLN)
    check_selection(query_BLHN, key_BLN, weights_BLH, top_k=top_k)
    local = layout.for_local_length(key_BLN.shape[1])
    key_BSN = all_gather_natural(key_BLN.detach(), 1, local, group) if ahead is None else ahead.gathered()
    positions_L, first_keys_BL = local.token_ids(group.rank()).to(key_BLN.device), None
    if documents != ONE_DOCUMENT:
        in_document_BS = positions_in_documents(documents, key_BLN.shape[0], local.num_tokens, key_BLN.device)
        first_keys_BL = positions_L - in_document_BS[:, positions_L]
    ids: Tensor = torch.ops.lightning_moe.select_keys(
        query_BLHN, key_BSN, weights_BLH, positions_L, first_keys_BL, top_k
    )
    return ids


def attend_to_selected(
    query_BLHM: Tensor,
    latent_BLM: Tensor,
    key_ids_BLK: Tensor,
    value_channels: int,
    scale: float,
    *,
    layout: SequenceLayout,
    group: AnyGroup,
    ahead: GatheredAhead | None = None,
    index: Index | None = None,
) -> Tensor:
    """Attention of this rank's queries to the latents they chose in the whole sequence: [B, L, H, C].

    Latents are gathered in their dtype, in the forward and again in the backward pass, so that only tensors of this
    rank are kept in between; inside an activation recompute, which is followed by its backward pass at once, the
    gathered ones are kept instead. Their gradient is accumulated and reduce-scattered in FP32. ``ahead``: on their way
    already; then ``latent_BLM`` is its ``local``. ``index``: what chose the keys, to be trained by this attention.
    """
    _check_local(query_BLHM, latent_BLM)
    check_sparse_attention(query_BLHM, latent_BLM, key_ids_BLK, value_channels)
    local = layout.for_local_length(latent_BLM.shape[1])
    attended: Tensor = _GatherAndAttend.apply(  # type: ignore[no-untyped-call]
        query_BLHM,
        latent_BLM,
        key_ids_BLK,
        value_channels,
        scale,
        local,
        group,
        ahead,
        None if index is None else index.loss,
        *(() if index is None else index.tensors),
    )
    return attended


class _GatherAndAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        latent: Tensor,
        key_ids: Tensor,
        value_channels: int,
        scale: float,
        layout: SequenceLayout,
        group: AnyGroup,
        ahead: GatheredAhead | None,
        loss: IndexerLoss | None,
        *index: Tensor,
    ) -> Tensor:
        latent_all = all_gather_natural(latent, 1, layout, group) if ahead is None else ahead.gathered()
        out, lse = torch.ops.lightning_moe.sparse_attention(query, latent_all, key_ids, value_channels, scale)
        kept = latent_all if gathered_should_be_kept() else latent
        ctx.save_for_backward(query, kept, key_ids, out, lse, *index)
        ctx.loss, ctx.scale, ctx.layout, ctx.group = loss, scale, layout, group
        ctx.way_back = None if ahead is None else ahead.way_back
        attended: Tensor = out
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, latent, key_ids, out, lse, *index = ctx.saved_tensors
        layout, group = ctx.layout, ctx.group
        if latent.shape[1] != layout.num_tokens:
            latent = all_gather_natural(latent, 1, layout, group)
        grad_query, partial = torch.ops.lightning_moe.sparse_attention_backward(
            grad_out, query, latent, key_ids, out, lse, ctx.scale
        )
        if ctx.way_back is not None and ctx.needs_input_grad[1]:
            grad_latent = ctx.way_back.start(partial, latent.dtype)
        else:
            grad_latent = reduce_scatter_natural(partial, 1, layout, group).to(latent.dtype)
        grad_index: tuple[Tensor | None, ...] = ()
        if ctx.loss is not None:
            attention = query, latent, key_ids, ctx.scale
            grad_index = index_gradients(tuple(index), ctx.loss, attention, layout=layout, group=group)
        return grad_query, grad_latent, None, None, None, None, None, None, None, *grad_index


def _check_local(query: Tensor, key: Tensor) -> None:
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and what it selects from {key.shape[1]}: pass this rank's of both, "
            "they are gathered here. Cross attention cannot be split along the sequence."
        )
