"""Causal attention to latents that are spread over the cp ranks: keys and values never exist for all heads at once.

Every rank gathers latents and rope keys, the smallest thing that determines keys and values, and expands the keys and
values of a few heads at a time, in the forward and again in the backward pass. Kept in between: tensors of this rank.

Shapes: B batch, L tokens of this rank, S tokens that its queries may see, H heads, J of them at a time; N channels of a
key head without position, R rope channels, X = N + R, V channels of a value head, U = N + V; C latent, M = C + R.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.ahead import GatheredAhead
from lightning_moe_strategy.context_parallel.attend import attend, attend_backward
from lightning_moe_strategy.context_parallel.attended_once import attended_once
from lightning_moe_strategy.context_parallel.compiled import KINDS, GraphCall, GraphKind, attend_in_graph
from lightning_moe_strategy.context_parallel.gather import gathered_should_be_kept
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.sight import Sight
from lightning_moe_strategy.context_parallel.softmax import (
    Keys,
    check_sight,
    keys_in_sight,
    sinks_gradient,
    whole_sequence_in_sight,
    with_sinks,
)
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.attention import AttentionKernelName
from lightning_moe_strategy.kernels.attention_pieces import OfRows

EXPANDED_BYTES = 2**30
"""Of the keys and values that are expanded at a time, unless one head's are more; in the backward pass their gradients,
in FP32, stand beside them. One head of GLM-5.2 at 1M tokens has 2 * (256 + 256) bytes a token, 1.07e9; all 64 have
68.7e9."""


def attend_to_latents(
    query_BHLX: Tensor,
    latent_BLC: Tensor,
    rope_key_BLR: Tensor,
    up_weight: Tensor,
    *,
    layout: SequenceLayout,
    group: AnyGroup,
    scale: float | None = None,
    documents: Documents = ONE_DOCUMENT,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    ahead: GatheredAhead | None = None,
    kernel: AttentionKernelName = "auto",
    expanded_bytes: int = EXPANDED_BYTES,
) -> Tensor:
    """Attention of this rank's queries to every token of their document up to their own: [B, H, L, V].

    ``up_weight`` [H * (N + V), C] maps a latent to each head's key without position and its value. Latents and rope
    keys are gathered together, in one dtype, in the forward and again in the backward pass; inside an activation
    recompute, which is followed by its backward pass at once, the gathered ones are kept instead. Their gradient is
    summed over the heads and reduce-scattered in FP32. ``scale`` (``X ** -0.5``), ``window``, ``sinks_H`` and
    ``kernel`` are those of ``causal_attention``. ``ahead``: what ``gather_latents_ahead`` made of the same latents and
    rope keys; with it a window, too, reads the whole sequence.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or tokens that are not this rank's.
    """
    query, latent, rope_key, weight = _as_linear_would_cast(query_BHLX, latent_BLC, rope_key_BLR, up_weight)
    rope_key = rope_key.to(latent.dtype)
    _check(query, latent, rope_key, weight)
    check_sight(query, documents, window, sinks_H)
    local = layout.for_local_length(query.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        call = GraphCall(
            layout=local,
            group=group,
            scale=scale,
            documents=documents,
            window=window,
            kernel=kernel,
            expanded_bytes=expanded_bytes,
        )
        return attend_in_graph("latents", query, torch.cat([latent, rope_key], dim=-1), weight, sinks_H, call)
    if ahead is None:
        keys, sight = keys_in_sight(local, group, documents, window, kernel)
        latents = torch.cat([latent, rope_key], dim=-1)
    else:
        keys, sight = whole_sequence_in_sight(local, group, documents, window, kernel)
        latents = ahead.local
    attended: Tensor = _AttendToLatents.apply(  # type: ignore[no-untyped-call]
        query, latents, weight, sinks_H, _Call(keys, sight, scale, expanded_bytes), ahead
    )
    return attended


def gather_latents_ahead(
    latent_BLC: Tensor, rope_key_BLR: Tensor, *, layout: SequenceLayout, group: AnyGroup
) -> GatheredAhead:
    """Start what ``attend_to_latents`` gathers, before there are queries."""
    latent, rope_key = _as_linear_would_cast(latent_BLC, rope_key_BLR)
    return GatheredAhead(torch.cat([latent, rope_key.to(latent.dtype)], dim=-1), 1, layout, group)


@dataclass(frozen=True)
class _Call:
    """What one call does besides its tensors."""

    keys: Keys
    sight: Sight
    scale: float
    expanded_bytes: int

    def gather(self, latents_BLM: Tensor) -> Tensor:
        """latents_BSM, contiguous for the products."""
        return self.keys.gather(latents_BLM, 1).contiguous()

    def head_groups(self, latents_BSM: Tensor, weight_HUC: Tensor) -> list[slice]:
        """Heads that are expanded together, as even as they come."""
        num_heads, per_head, channels = weight_HUC.shape
        rope = latents_BSM.shape[-1] - channels
        head_bytes = latents_BSM.shape[:2].numel() * (per_head + rope) * latents_BSM.element_size()
        num_groups = -(-num_heads // max(1, self.expanded_bytes // head_bytes))
        size = -(-num_heads // num_groups)
        return [slice(first, min(first + size, num_heads)) for first in range(0, num_heads, size)]


class _AttendToLatents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        latents: Tensor,
        weight: Tensor,
        sinks_H: Tensor | None,
        call: _Call,
        ahead: GatheredAhead | None,
    ) -> Tensor:
        latents_BSM = call.gather(latents) if ahead is None else ahead.gathered().contiguous()
        weight_HUC = weight.view(query.shape[1], -1, weight.shape[1])
        out, lse = attended_once(lambda: _attend_by_groups(query, latents_BSM, weight_HUC, sinks_H, call))
        ctx.is_gathered = gathered_should_be_kept()
        ctx.save_for_backward(query, latents_BSM if ctx.is_gathered else latents, weight, out, lse, sinks_H)
        ctx.call, ctx.way_back = call, None if ahead is None else ahead.way_back
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, latents, weight, out, lse, sinks_H = ctx.saved_tensors
        call: _Call = ctx.call
        latents_BSM = latents if ctx.is_gathered else call.gather(latents)
        weight_HUC = weight.view(query.shape[1], -1, weight.shape[1])
        grad_latents_BSM = torch.zeros_like(latents_BSM, dtype=torch.promote_types(query.dtype, torch.float32))
        grad_queries, grad_weights = [], []
        for heads in call.head_groups(latents_BSM, weight_HUC):
            of_rows = (grad_out[:, heads], query[:, heads], out[:, heads], lse[:, heads])
            grad_query, grad_up = _backward_with(of_rows, latents_BSM, weight_HUC[heads], call, grad_latents_BSM)
            grad_queries.append(grad_query)
            if ctx.needs_input_grad[2]:
                grad_weights.append(_grad_weight(grad_up, latents_BSM, weight.shape[1]))
            del grad_up
        if ctx.way_back is not None and ctx.needs_input_grad[1]:
            grad_latents = ctx.way_back.start(grad_latents_BSM, query.dtype)
        else:
            grad_latents = call.keys.reduce(grad_latents_BSM, 1).to(query.dtype)
        grad_weight = torch.cat(grad_weights) if grad_weights else None
        grad_sinks = None if sinks_H is None else sinks_gradient(grad_out, out, lse, sinks_H)
        return torch.cat(grad_queries, 1), grad_latents, grad_weight, grad_sinks, None, None


def _arguments(call: GraphCall) -> dict[str, Any]:
    keys, sight = keys_in_sight(call.layout, call.group, call.documents, call.window, call.kernel)
    return {"call": _Call(keys, sight, call.scale, call.expanded_bytes), "way_back": None}


def _value_channels(query: Tensor, latents: Tensor, weight: Tensor) -> int:
    nope = query.shape[-1] - (latents.shape[-1] - weight.shape[1])
    return weight.shape[0] // query.shape[1] - nope


KINDS["latents"] = GraphKind(_AttendToLatents, _arguments, _value_channels)


def _attend_by_groups(
    query_BHLX: Tensor, latents_BSM: Tensor, weight_HUC: Tensor, sinks_H: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, V] and log-sum-exp [B, H, L]."""
    parts = [
        _attend_with(query_BHLX[:, heads], latents_BSM, weight_HUC[heads], call)
        for heads in call.head_groups(latents_BSM, weight_HUC)
    ]
    out, lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return (out, lse) if sinks_H is None else with_sinks(out, lse, sinks_H)


# The keys and values of some heads live in these two functions and no longer: those of the next are expanded after.


def _attend_with(query_BJLX: Tensor, latents_BSM: Tensor, weight_JUC: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """Output [B, J, L, V] and log-sum-exp [B, J, L]."""
    key_BJSX, value_BJSV = _expand(latents_BSM, weight_JUC, query_BJLX.shape[-1])
    return attend(query_BJLX, key_BJSX, value_BJSV, call.sight, call.scale)


def _backward_with(
    of_rows: OfRows, latents_BSM: Tensor, weight_JUC: Tensor, call: _Call, grad_latents_BSM: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the query and of what is expanded, [B, S, J * U]; that of the latents is added to the last argument.

    Products are computed in the dtype of the pass, as those of any linear map, and summed over the heads in FP32.
    """
    dtype, channels = latents_BSM.dtype, weight_JUC.shape[-1]
    key_BJSX, value_BJSV = _expand(latents_BSM, weight_JUC, of_rows[1].shape[-1])
    grad_query, grad_key, grad_value = attend_backward(of_rows, key_BJSX, value_BJSV, call.sight, call.scale)
    rope = latents_BSM.shape[-1] - channels
    grad_nope, grad_rope = torch.split(grad_key, [grad_key.shape[-1] - rope, rope], dim=-1)
    grad_up = torch.cat([x.transpose(1, 2).to(dtype) for x in (grad_nope, grad_value)], dim=-1).flatten(2)
    grad_latents_BSM[..., :channels] += grad_up @ weight_JUC.flatten(0, 1)
    grad_latents_BSM[..., channels:] += grad_rope.sum(1)
    return grad_query, grad_up


def _grad_weight(grad_up: Tensor, latents_BSM: Tensor, channels: int) -> Tensor:
    """Rows of the weight's gradient, [J * U, C]."""
    return grad_up.flatten(0, 1).mT @ latents_BSM[..., :channels].flatten(0, 1)


def _expand(latents_BSM: Tensor, weight_JUC: Tensor, key_channels: int) -> tuple[Tensor, Tensor]:
    """key_BJSX and value_BJSV."""
    channels = weight_JUC.shape[-1]
    latent, rope_key = torch.split(latents_BSM, [channels, latents_BSM.shape[-1] - channels], dim=-1)
    nope = key_channels - rope_key.shape[-1]
    nope_BJSN, value_BJSV = (
        F.linear(latent, weight.flatten(0, 1)).view(*latent.shape[:2], *weight.shape[:2]).transpose(1, 2)
        for weight in (weight_JUC[:, :nope], weight_JUC[:, nope:])
    )
    rope_BJSR = rope_key[:, None].expand(-1, weight_JUC.shape[0], -1, -1)
    return torch.cat([nope_BJSN, rope_BJSR], dim=-1), value_BJSV


def _as_linear_would_cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def _check(query: Tensor, latent: Tensor, rope_key: Tensor, weight: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, latent {tuple(latent.shape)}, rope key {tuple(rope_key.shape)}"
    if query.dim() != 4 or latent.dim() != 3 or rope_key.dim() != 3:
        raise ValueError(f"{shapes}: want [batch, heads, tokens, channels] and twice [batch, tokens, channels].")
    if len({query.dtype, latent.dtype, weight.dtype}) > 1:
        raise ValueError(
            f"query is {query.dtype}, latent {latent.dtype}, up_weight {weight.dtype}: cast them to one dtype."
        )
    if not query.shape[0] == latent.shape[0] == rope_key.shape[0]:
        raise ValueError(f"{shapes}: the batch must agree.")
    if not query.shape[2] == latent.shape[1] == rope_key.shape[1]:
        raise ValueError(
            f"{shapes}: the tokens must be this rank's in all of them, latents are gathered here. Cross attention "
            "cannot be split along the sequence."
        )
    num_heads, nope = query.shape[1], query.shape[-1] - rope_key.shape[-1]
    if weight.shape[1:] != latent.shape[2:] or weight.shape[0] % num_heads or weight.shape[0] // num_heads <= nope:
        raise ValueError(
            f"{shapes}, up_weight {tuple(weight.shape)}: the weight must have heads({num_heads}) * (key channels "
            f"without position({nope}) + value channels) rows of {latent.shape[-1]} channels."
        )
