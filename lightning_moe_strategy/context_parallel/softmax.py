"""Causal softmax attention over a sequence that is spread over the cp ranks.

Every rank gathers the keys and values that its own queries see and attends with those queries. What a segment of
queries sees (its document, a window) is one call of a kernel that knows it, or is cut into pieces, each of them one
kernel call without a mask, whose outputs are merged by their log-sum-exp. No mask is ever built, and any kernel that
returns a log-sum-exp will do.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence, H query heads, G key heads (G divides
H), D channels of a query or key head, E channels of a value head.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.attend import attend, attend_backward
from lightning_moe_strategy.context_parallel.attended_once import attended_once
from lightning_moe_strategy.context_parallel.compiled import KINDS, GraphCall, GraphKind, attend_in_graph
from lightning_moe_strategy.context_parallel.gather import (
    all_gather_natural,
    gathered_should_be_kept,
    reduce_scatter_natural,
)
from lightning_moe_strategy.context_parallel.halo import Halo
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.sight import Sight
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.attention import AttentionKernelName


def causal_attention(
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLE: Tensor,
    *,
    layout: SequenceLayout,
    group: AnyGroup,
    scale: float | None = None,
    documents: Documents = ONE_DOCUMENT,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    kernel: AttentionKernelName = "auto",
) -> Tensor:
    """Attention of this rank's queries to every token of their document up to their own: [B, H, L, E].

    Keys and values are gathered in their dtype, in the forward and again in the backward pass, so that only
    tensors of this rank are kept in between; inside an activation recompute, which is followed by its
    backward pass at once, the gathered ones are kept instead of gathered a third time. Their gradients are
    accumulated in FP32, summed over the query heads of a key head, and reduce-scattered in FP32. ``scale``
    defaults to ``D ** -0.5``.

    ``window``: of those tokens the last so many, the own one included; where no segment is shorter than that, only the
    tails of the segments are gathered. ``sinks_H``: a score per head that takes part in the softmax and has no value.
    ``kernel``: see ``kernels.attention.attention_kernel_for``.
    """
    query, key, value = _as_sdpa_would_cast(query_BHLD, key_BGLD, value_BGLE)
    _check(query, key, value, documents, window, sinks_H)
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} tokens and key {key.shape[2]}: causal_attention wants this rank's "
            "keys and gathers them itself. Cross attention cannot be split along the sequence."
        )
    local = layout.for_local_length(query.shape[2])
    if torch.compiler.is_compiling():
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        call = GraphCall(layout=local, group=group, scale=scale, documents=documents, window=window, kernel=kernel)
        return attend_in_graph("keys and values", query, key, value, sinks_H, call)
    keys, sight = keys_in_sight(local, group, documents, window, kernel)
    return _attended(query, key, value, sinks_H, keys, sight, scale)


def causal_attention_on_gathered(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    layout: SequenceLayout,
    rank: int,
    scale: float | None = None,
    documents: Documents = ONE_DOCUMENT,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    kernel: AttentionKernelName = "auto",
) -> Tensor:
    """The same for keys and values of the whole sequence, in natural order: [B, H, L, E].

    For models that expand them from something smaller that was gathered (a latent). Nothing is communicated
    here; the gradient of keys and values holds this rank's queries only and is summed where the latent was
    gathered.
    """
    query, key, value = _as_sdpa_would_cast(query_BHLD, key_BGSD, value_BGSE)
    _check(query, key, value, documents, window, sinks_H)
    local = layout.for_local_length(query.shape[2])
    if key.shape[2] != local.num_tokens:
        raise ValueError(
            f"key has {key.shape[2]} tokens; the whole sequence of {query.shape[2]} tokens on each of the "
            f"{local.degree} cp ranks has {local.num_tokens}. Gather what the keys are made of first."
        )
    sight = Sight(segments=local.segments[rank], documents=documents, window=window, kernel=kernel)
    return _attended(query, key, value, sinks_H, _Gathered(), sight, scale)


def keys_in_sight(
    layout: SequenceLayout,
    group: AnyGroup,
    documents: Documents,
    window: int | None,
    kernel: AttentionKernelName = "auto",
) -> "tuple[Keys, Sight]":
    """Where the keys of this rank's queries come from, and what of them the queries see."""
    whole, sight = whole_sequence_in_sight(layout, group, documents, window, kernel)
    if window is not None and Halo.fits(layout, window - 1):
        halo = Halo(layout, group, window - 1)
        return halo, replace(sight, first_keys=halo.first_keys)
    return whole, sight


def whole_sequence_in_sight(
    layout: SequenceLayout,
    group: AnyGroup,
    documents: Documents,
    window: int | None,
    kernel: AttentionKernelName = "auto",
) -> "tuple[Keys, Sight]":
    """The same where the whole sequence is gathered, whatever the window."""
    segments = layout.segments[group.rank()]
    return _WholeSequence(layout, group), Sight(segments=segments, documents=documents, window=window, kernel=kernel)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, keys: "Keys", sight: Sight, scale: float | None
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended: Tensor = _Attend.apply(query, key, value, sinks_H, keys, sight, scale)  # type: ignore[no-untyped-call]
    return attended


class Keys(Protocol):
    """Where the keys that this rank's queries see come from, and where their gradients go."""

    def gather(self, x: Tensor, dim: int) -> Tensor: ...

    def reduce(self, grad: Tensor, dim: int) -> Tensor: ...


@dataclass(frozen=True)
class _WholeSequence:
    """Of all ranks, in natural order."""

    layout: SequenceLayout
    group: AnyGroup

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return all_gather_natural(x, dim, self.layout, self.group)

    def reduce(self, grad: Tensor, dim: int) -> Tensor:
        return reduce_scatter_natural(grad, dim, self.layout, self.group)


class _Gathered:
    """Gathered before, by somebody who sums their gradients."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def reduce(self, grad: Tensor, dim: int) -> Tensor:
        return grad


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        keys: Keys,
        sight: Sight,
        scale: float,
    ) -> Tensor:
        key_all, value_all = keys.gather(key, 2), keys.gather(value, 2)
        out, lse = attended_once(lambda: _with_lse(query, key_all, value_all, sinks_H, sight, scale))
        ctx.is_gathered = gathered_should_be_kept()
        kept = (key_all, value_all) if ctx.is_gathered else (key, value)
        ctx.save_for_backward(query, *kept, out, lse, sinks_H)
        ctx.keys, ctx.sight, ctx.scale = keys, sight, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks_H = ctx.saved_tensors
        if not ctx.is_gathered:
            key, value = ctx.keys.gather(key, 2), ctx.keys.gather(value, 2)
        # The log-sum-exp counts the sink already, so every key's probability is that of the whole row.
        grad_query, *partial = attend_backward((grad_out, query, out, lse), key, value, ctx.sight, ctx.scale)
        grad_key, grad_value = (ctx.keys.reduce(grad, 2).to(query.dtype) for grad in partial)
        grad_sinks = None if sinks_H is None else sinks_gradient(grad_out, out, lse, sinks_H)
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None


def _with_lse(
    query: Tensor, key_all: Tensor, value_all: Tensor, sinks_H: Tensor | None, sight: Sight, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = attend(query, key_all, value_all, sight, scale)
    return (out, lse) if sinks_H is None else with_sinks(out, lse, sinks_H)


def _arguments(call: GraphCall) -> dict[str, Any]:
    keys, sight = keys_in_sight(call.layout, call.group, call.documents, call.window, call.kernel)
    return {"keys": keys, "sight": sight, "scale": call.scale}


KINDS["keys and values"] = GraphKind(_Attend, _arguments, lambda query, key, value: value.shape[-1])


def with_sinks(out_BHLE: Tensor, lse_BHL: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """One more key in every row, whose score is the sink and whose value is zero."""
    with_sink_BHL = torch.logaddexp(lse_BHL, sinks_H.to(lse_BHL.dtype)[:, None])
    share_BHL = (lse_BHL - with_sink_BHL).exp()
    return (out_BHLE * share_BHL[..., None]).to(out_BHLE.dtype), with_sink_BHL


def sinks_gradient(grad_out_BHLE: Tensor, out_BHLE: Tensor, lse_BHL: Tensor, sinks_H: Tensor) -> Tensor:
    """From this rank's queries: a sink has no value, so it takes its probability's share of what the output gives."""
    probability_BHL = (sinks_H.to(lse_BHL.dtype)[:, None] - lse_BHL).exp()
    given_BHL = (grad_out_BHLE.to(lse_BHL.dtype) * out_BHLE.to(lse_BHL.dtype)).sum(-1)
    return -(probability_BHL * given_BHL).sum((0, 2)).to(sinks_H.dtype)


def _as_sdpa_would_cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _check(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, sinks_H: Tensor | None
) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(x.dim() != 4 for x in (query, key, value)):
        raise ValueError(f"{shapes}: attention wants [batch, heads, tokens, channels].")
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise ValueError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: cast them to one dtype.")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{shapes}: batch, key heads, keys and query channels must agree.")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{shapes}: key heads({key.shape[1]}) must divide query heads({query.shape[1]}).")
    check_sight(query, documents, window, sinks_H)


def check_sight(query: Tensor, documents: Documents, window: int | None, sinks_H: Tensor | None) -> None:
    """ValueError for a pattern that does not fit ``query`` [B, H, ...]."""
    if len(documents) not in (1, query.shape[0]):
        raise ValueError(f"documents are given for {len(documents)} sequences, but the batch has {query.shape[0]}.")
    if window is not None and window < 1:
        raise ValueError(f"window({window}) must be at least 1: a query sees its own key.")
    if sinks_H is not None and sinks_H.shape != (query.shape[1],):
        raise ValueError(f"sinks {tuple(sinks_H.shape)} must be one score for each of {query.shape[1]} query heads.")
