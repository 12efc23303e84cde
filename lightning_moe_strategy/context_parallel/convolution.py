"""Causal convolutions over a sequence that is spread over the cp ranks: each segment behind the tokens before it.

Of a kernel W tokens wide, W - 1 of the segment before are needed: every rank gathers the tails of all segments,
``2 * cp * (W - 1)`` tokens under a zig-zag layout, however long the sequence is.

Shapes: B batch, C channels, L tokens of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.document_parts import (
    Part,
    check_documents,
    join,
    of_one_size,
    parts_of,
)
from lightning_moe_strategy.context_parallel.gather import gather_sequence
from lightning_moe_strategy.context_parallel.halo import Halo
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents


def convolve_over_chunks(
    convolution: Callable[[Tensor], Tensor],
    x_BCL: Tensor,
    *,
    width: int,
    layout: SequenceLayout,
    group: AnyGroup,
    documents: Documents = ONE_DOCUMENT,
) -> Tensor:
    """``convolution`` of this rank's tokens and of those before them in their document: [B, C, L].

    It is causal, ``width`` tokens wide, takes what is before its first token for zeros, and may have an activation. The
    layout's dummies get zeros. Where a segment is shorter than ``width - 1``, the whole sequence is gathered.
    """
    if x_BCL.dim() != 3:
        raise ValueError(f"x {tuple(x_BCL.shape)}: a convolution over tokens wants [batch, channels, tokens].")
    check_documents(documents, x_BCL.shape[0])
    local = layout.for_local_length(x_BCL.shape[2])
    num_dummies = local.tail_tokens_per_rank
    real = local.for_local_length(local.tokens_per_rank - num_dummies)
    segments = real.segments[group.rank()]
    x_real = x_BCL[..., : real.tokens_per_rank]
    if Halo.fits(real, width - 1):
        halo = Halo(real, group, width - 1)
        seen: Tensor = _BehindHalo.apply(x_real, halo)  # type: ignore[no-untyped-call]
        firsts = halo.first_keys
    else:
        seen, firsts = gather_sequence(x_real, 2, real, group), [segment.start for segment in segments]

    def size(part: Part) -> tuple[int, int]:
        return min(width - 1, part.tokens_before), part.length

    parts = parts_of(segments, documents)
    outputs: dict[Part, Tensor] = {}
    for same in of_one_size(parts, size):
        context, length = size(same[0])
        places = [firsts[part.segment] + part.offset for part in same]
        pieces = [seen[part.rows, :, at - context : at + length] for part, at in zip(same, places, strict=True)]
        convolved = convolution(torch.cat(pieces))[..., context:]
        outputs |= zip(same, convolved.chunk(len(same)), strict=True)
    return join(outputs, parts, 2, num_dummies)


class _BehindHalo(torch.autograd.Function):
    """This rank's tokens [B, C, L], each segment behind the tail of the one before it."""

    @staticmethod
    def forward(ctx: Any, x_BCL: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo.gather(x_BCL, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: reduce writes into what it is given.
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        return ctx.halo.reduce(wide, 2).to(grad.dtype), None
