"""The collectives the package issues itself; FSDP issues its own.

Every rank of a group calls them in the same order, whatever its data: there is no rank ``if`` around any of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_along_dim0(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of every rank of the group, stacked along dim 0 in rank order. Not differentiable."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    _all_gather(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter_along_dim0(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along dim 0 of the sum of ``x`` over the group. Not differentiable."""
    if x.shape[0] % group.size():
        raise ValueError(f"dim 0 of {tuple(x.shape)} must be a multiple of the group's {group.size()} ranks.")
    piece = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    _reduce_scatter(piece, x.contiguous(), group=group)
    return piece


def all_to_all_rows(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Rows sent to and received from each rank of the group, in rank order; the gradient goes the way back."""
    received: Tensor = _AllToAllRows.apply(rows, list(send_counts), list(receive_counts), group)  # type: ignore[no-untyped-call]
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts, group):  # type: ignore[no-untyped-def]
        ctx.send_counts, ctx.receive_counts, ctx.group = send_counts, receive_counts, group
        return _exchange(rows, send_counts, receive_counts, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _exchange(grad, ctx.receive_counts, ctx.send_counts, ctx.group), None, None, None


def _exchange(rows: Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=group)
    return received


# torch 2.13 renamed these two and deprecated the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
