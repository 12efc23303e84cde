"""A sequence that is spread over the cp ranks, gathered in natural order.

What is gathered travels in its own dtype; the gradient travels back in FP32 (FP64 stays FP64), because it is
a sum over ranks. Only this file, ``ahead`` and ``halo`` issue the collectives of attention.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy._torch_compat import in_backward, in_checkpointed_region, saved_tensors_hook
from lightning_moe_strategy.collectives import AnyGroup, TwoStepGroup, all_gather_in_steps, reduce_scatter_in_steps
from lightning_moe_strategy.context_parallel.layout import SequenceLayout, take_segments


def gather_sequence(x: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> Tensor:
    """The whole sequence along ``dim``, in natural order, from every rank's own tokens. Differentiable."""
    local = layout.for_local_length(x.shape[dim])
    gathered: Tensor = _GatherSequence.apply(x, dim, local, group)  # type: ignore[no-untyped-call]
    return gathered


def restore_sequence(x: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup, *, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` of the whole sequence, in natural order: padding and dummies are cut off.

    For outputs (predictions, metrics): not differentiable.
    """
    local = layout.for_local_length(x.shape[dim])
    return all_gather_natural(x.detach(), dim, local, group).narrow(dim, 0, num_tokens)


def all_gather_natural(x: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> Tensor:
    """Every rank's ``x`` along ``dim``, in natural order. Outside of autograd."""
    if group.size() == 1:
        return x
    return in_natural_order(all_gather_in_steps(x.movedim(dim, 0), group), dim, layout, group)


def in_natural_order(delivered: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> Tensor:
    """What a gather over ``group`` delivers, the sequence along dim 0, in natural order and along ``dim``."""
    return take_segments(delivered, 0, as_delivered(layout, group).natural_in_rank_major).movedim(0, dim)


def reduce_scatter_natural(partial: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> Tensor:
    """This rank's tokens of ``partial`` (in natural order) summed over the ranks, at least in FP32."""
    if group.size() == 1:
        return partial.to(torch.promote_types(partial.dtype, torch.float32))
    return reduce_scatter_in_steps(in_pieces(partial, dim, layout, group), group).movedim(0, dim)


def in_pieces(partial: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> Tensor:
    """``partial`` (in natural order along ``dim``), at least in FP32, as a reduce-scatter over ``group`` wants it."""
    wide = partial.to(torch.promote_types(partial.dtype, torch.float32))
    return take_segments(wide.movedim(dim, 0), 0, as_delivered(layout, group).rank_major_in_natural)


def as_delivered(layout: SequenceLayout, group: AnyGroup) -> SequenceLayout:
    """The layout whose rank-major order is that in which a gather over ``group`` delivers."""
    return layout.in_order(group.delivery_order) if isinstance(group, TwoStepGroup) else layout


def gathered_should_be_kept() -> bool:
    """True under activation checkpointing: what is saved now is dropped at once, or used at once.

    Both passes of a checkpoint must save the same tensors, so the first pass has to say so too.
    """
    return in_checkpointed_region() or (saved_tensors_hook() is None and in_backward())


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> Tensor:
        ctx.dim, ctx.layout, ctx.group = dim, layout, group
        return all_gather_natural(x, dim, layout, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local = reduce_scatter_natural(grad, ctx.dim, ctx.layout, ctx.group)
        return local.to(grad.dtype), None, None, None
