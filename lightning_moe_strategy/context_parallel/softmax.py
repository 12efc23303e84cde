"""Causal softmax attention over a sequence that is spread over the cp ranks.

Every rank gathers the keys and values and attends with its own queries. A segment of queries that starts at
token a sees a rectangle, the keys 0 ... a - 1, and a square, its own keys under the causal mask: two kernel
calls whose outputs are merged by their log-sum-exp. No mask is ever built, and any kernel that returns a
log-sum-exp will do.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence, H query heads, G key heads (G divides
H), D channels of a query or key head, E channels of a value head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy._torch_compat import in_backward, in_checkpointed_region, saved_tensors_hook
from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.attention_pieces import PieceKernel, piece_kernel
from lightning_moe_strategy.context_parallel.gather import all_gather_natural, reduce_scatter_natural
from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout


def causal_attention(
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLE: Tensor,
    *,
    layout: SequenceLayout,
    group: AnyGroup,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to every token up to their own: [B, H, L, E].

    Keys and values are gathered in their dtype, in the forward and again in the backward pass, so that only
    tensors of this rank are kept in between; inside an activation recompute, which is followed by its
    backward pass at once, the gathered ones are kept instead of gathered a third time. Their gradients are
    accumulated in FP32, summed over the query heads of a key head, and reduce-scattered in FP32. ``scale``
    defaults to ``D ** -0.5``.
    """
    query, key, value = _as_sdpa_would_cast(query_BHLD, key_BGLD, value_BGLE)
    _check(query, key, value)
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} tokens and key {key.shape[2]}: causal_attention wants this rank's "
            "keys and gathers them itself. Cross attention cannot be split along the sequence."
        )
    local = layout.for_local_length(query.shape[2])
    attended: Tensor = _GatherAndAttend.apply(  # type: ignore[no-untyped-call]
        query, key, value, local, group, query.shape[-1] ** -0.5 if scale is None else scale
    )
    return attended


def causal_attention_on_gathered(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    layout: SequenceLayout,
    rank: int,
    scale: float | None = None,
) -> Tensor:
    """The same for keys and values of the whole sequence, in natural order: [B, H, L, E].

    For models that expand them from something smaller that was gathered (a latent). Nothing is communicated
    here; the gradient of keys and values holds this rank's queries only and is summed where the latent was
    gathered.
    """
    query, key, value = _as_sdpa_would_cast(query_BHLD, key_BGSD, value_BGSE)
    _check(query, key, value)
    local = layout.for_local_length(query.shape[2])
    if key.shape[2] != local.num_tokens:
        raise ValueError(
            f"key has {key.shape[2]} tokens; the whole sequence of {query.shape[2]} tokens on each of the "
            f"{local.degree} cp ranks has {local.num_tokens}. Gather what the keys are made of first."
        )
    attended: Tensor = _AttendToGathered.apply(  # type: ignore[no-untyped-call]
        query, key, value, local.segments[rank], query.shape[-1] ** -0.5 if scale is None else scale
    )
    return attended


class _GatherAndAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SequenceLayout,
        group: AnyGroup,
        scale: float,
    ) -> Tensor:
        key_all, value_all = (all_gather_natural(x, 2, layout, group) for x in (key, value))
        out, lse = _attend(query, key_all, value_all, layout.segments[group.rank()], scale)
        kept = (key_all, value_all) if _gathered_should_be_kept() else (key, value)
        ctx.save_for_backward(query, *kept, out, lse)
        ctx.layout, ctx.group, ctx.scale = layout, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout, group = ctx.layout, ctx.group
        if key.shape[2] != layout.num_tokens:
            key, value = (all_gather_natural(x, 2, layout, group) for x in (key, value))
        grad_query, *partial = _attend_backward(
            grad_out, query, key, value, out, lse, segments=layout.segments[group.rank()], scale=ctx.scale
        )
        grad_key, grad_value = (reduce_scatter_natural(grad, 2, layout, group).to(key.dtype) for grad in partial)
        return grad_query, grad_key, grad_value, None, None, None


class _AttendToGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
    ) -> Tensor:
        out, lse = _attend(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = _attend_backward(grad_out, query, key, value, out, lse, segments=ctx.segments, scale=ctx.scale)
        return *(grad.to(query.dtype) for grad in grads), None, None


def _attend(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, segments: Sequence[Segment], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, E] and log-sum-exp [B, H, L] of one rank's segments of queries."""
    kernel = piece_kernel(query_BHLD, value_BGSE)
    query, key, value = _padded(kernel, query_BHLD, key_BGSD, value_BGSE)
    outs, lses = [], []
    for rows, segment in _rows_of(segments):
        own = slice(segment.start, segment.end)
        out, lse = kernel.forward(query[:, :, rows], key[:, :, own], value[:, :, own], True, scale)
        if segment.start:
            before = slice(0, segment.start)
            prefix = kernel.forward(query[:, :, rows], key[:, :, before], value[:, :, before], False, scale)
            out, lse = _merge(out, lse, *prefix)
        outs.append(out.to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, 2)[..., : value_BGSE.shape[-1]], torch.cat(lses, 2)


def _attend_backward(
    grad_out_BHLE: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    out_BHLE: Tensor,
    lse_BHL: Tensor,
    *,
    segments: Sequence[Segment],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (its dtype) and of key and value (at least FP32, this rank's queries only)."""
    kernel = piece_kernel(query_BHLD, value_BGSE)
    query, key, value = _padded(kernel, query_BHLD, key_BGSD, value_BGSE)
    grad_out, out = (_widened(x, value.shape[-1]) for x in (grad_out_BHLE, out_BHLE))
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key_BGSD, value_BGSE))
    grad_queries = []
    for rows, segment in _rows_of(segments):
        # The merged log-sum-exp makes each piece's probabilities those of the whole row.
        of_rows = (grad_out[:, :, rows], query[:, :, rows], out[:, :, rows], lse_BHL[:, :, rows])
        pieces = [(slice(segment.start, segment.end), True)]
        pieces += [(slice(0, segment.start), False)] if segment.start else []
        grad_query = torch.zeros_like(query[:, :, rows], dtype=wide)
        for keys, is_causal in pieces:
            grad_q, grad_k, grad_v = kernel.backward(of_rows, key[:, :, keys], value[:, :, keys], is_causal, scale)
            grad_query += grad_q
            grad_key[:, :, keys] += grad_k[..., : grad_key.shape[-1]]
            grad_value[:, :, keys] += grad_v[..., : grad_value.shape[-1]]
        grad_queries.append(grad_query.to(query.dtype))
    return torch.cat(grad_queries, 2)[..., : query_BHLD.shape[-1]], grad_key, grad_value


def _rows_of(segments: Sequence[Segment]) -> list[tuple[slice, Segment]]:
    """Each segment with the rows in which this rank holds it."""
    rows, first = [], 0
    for segment in segments:
        rows.append((slice(first, first + segment.length), segment))
        first += segment.length
    return rows


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def _padded(kernel: PieceKernel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width_qk, width_v = kernel.head_dims(query.shape[-1], value.shape[-1])
    return _widened(query, width_qk), _widened(key, width_qk), _widened(value, width_v)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zero channels up to ``width``. They change no score, and what they add to the output is cut off."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _gathered_should_be_kept() -> bool:
    """True under activation checkpointing: what is saved now is dropped at once, or used at once.

    Both passes of a checkpoint must save the same tensors, so the first pass has to say so too.
    """
    return in_checkpointed_region() or (saved_tensors_hook() is None and in_backward())


def _as_sdpa_would_cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(x.dim() != 4 for x in (query, key, value)):
        raise ValueError(f"{shapes}: attention wants [batch, heads, tokens, channels].")
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise ValueError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: cast them to one dtype.")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{shapes}: batch, key heads, keys and query channels must agree.")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{shapes}: key heads({key.shape[1]}) must divide query heads({query.shape[1]}).")
