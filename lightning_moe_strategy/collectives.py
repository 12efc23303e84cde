"""The collectives the package issues itself; FSDP issues its own.

Every rank of a group calls them in the same order, whatever its data: there is no rank ``if`` around any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TwoStepGroup:
    """Ranks that exchange in two steps: between NVLink domains and inside of one.

    What crosses RDMA is then each rank's own piece and nothing twice. Seed, "What If There's No NVL72?": of a whole
    that is gathered, (inter - 1) / (inter * intra) cross RDMA and (intra - 1) / intra NVLink.
    """

    whole: dist.ProcessGroup
    """All of them; rank ``i * intra.size() + j`` is the j-th of domain i."""
    inter: dist.ProcessGroup
    """The j-th ranks of all domains."""
    intra: dist.ProcessGroup
    """The ranks of this domain."""

    def rank(self) -> int:
        return self.whole.rank()

    def size(self) -> int:
        return self.whole.size()

    @property
    def delivery_order(self) -> tuple[int, ...]:
        """Ranks in the order in which ``all_gather_in_steps`` delivers their pieces."""
        domains, in_domain = self.inter.size(), self.intra.size()
        return tuple(i * in_domain + j for j in range(in_domain) for i in range(domains))


AnyGroup = dist.ProcessGroup | TwoStepGroup


def all_gather_in_steps(x: Tensor, group: AnyGroup) -> Tensor:
    """``x`` of every rank, stacked along dim 0: over RDMA while it is small, then over NVLink. Not differentiable."""
    if not isinstance(group, TwoStepGroup):
        return all_gather_along_dim0(x, group)
    return all_gather_along_dim0(all_gather_along_dim0(x, group.inter), group.intra)


def reduce_scatter_in_steps(x: Tensor, group: AnyGroup) -> Tensor:
    """The way back, summed: NVLink first, so that RDMA carries what one rank in each domain keeps."""
    if not isinstance(group, TwoStepGroup):
        return reduce_scatter_along_dim0(x, group)
    return reduce_scatter_along_dim0(reduce_scatter_along_dim0(x, group.intra), group.inter)


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
