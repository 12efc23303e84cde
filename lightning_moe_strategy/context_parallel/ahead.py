"""A sequence whose gather starts when this rank's tokens are there, and is waited for where it is read.

In between it travels while queries are projected and keys are selected. The way back is the same: the gradient is
reduce-scattered when it is whole and waited for where autograd hands it on, behind the gradients of the queries, which
were computed later in the forward pass. Collectives are issued in the order of the program on every rank, and what is
gathered, how often and in which dtype is the same as without.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import (
    AnyGroup,
    Transfer,
    start_gather_in_steps,
    start_reduce_scatter_in_steps,
)
from lightning_moe_strategy.context_parallel.gather import in_natural_order, in_pieces
from lightning_moe_strategy.context_parallel.layout import SequenceLayout


class GatheredAhead:
    """This rank's tokens, ``local``, and those of all ranks once they are there.

    ``local`` is what was given, and carries the gradient: whoever reads the sequence takes it as the input to
    differentiate by, and hands the gradient of the whole to ``way_back``.
    """

    def __init__(self, x: Tensor, dim: int, layout: SequenceLayout, group: AnyGroup) -> None:
        """Starts the gather along ``dim``. ValueError for tokens that are not this rank's."""
        self.way_back = WayBack(dim, layout.for_local_length(x.shape[dim]), group)
        self.local: Tensor = _Announced.apply(x, self.way_back) if x.requires_grad else x  # type: ignore[no-untyped-call]
        self._transfer: Transfer | None = start_gather_in_steps(x.detach().movedim(dim, 0), group)

    def gathered(self) -> Tensor:
        """The whole sequence in natural order. Outside of autograd, once."""
        assert self._transfer is not None, "read before"
        delivered, self._transfer = self._transfer.wait(), None
        return in_natural_order(delivered, self.way_back.dim, self.way_back.layout, self.way_back.group)


class WayBack:
    """The gradient of a sequence that was gathered ahead: started by the one that read it, ended by autograd.

    It knows no tensor but what is on its way, so it may be held by both ends of the graph.
    """

    def __init__(self, dim: int, layout: SequenceLayout, group: AnyGroup) -> None:
        self.dim, self.layout, self.group = dim, layout, group
        self._transfer: Transfer | None = None

    def start(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """Reduce-scatter ``partial``, in natural order. Zeros of ``dtype`` that stand for ``local``'s gradient."""
        pieces = in_pieces(partial, self.dim, self.layout, self.group)
        self._transfer = start_reduce_scatter_in_steps(pieces, self.group)
        shape = list(partial.shape)
        shape[self.dim] = self.layout.tokens_per_rank
        return partial.new_zeros((), dtype=dtype).expand(shape)

    def end(self, grad: Tensor) -> Tensor:
        """``grad``, what others than the reader of the sequence gave, and the reader's."""
        if self._transfer is None:
            return grad
        summed, self._transfer = self._transfer.wait(), None
        return grad + summed.movedim(0, self.dim).to(grad.dtype)


class _Announced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way_back: WayBack) -> Tensor:
        ctx.way_back = way_back
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.way_back.end(grad), None
