"""Tensors on their way to other ranks while this one computes, forward and backward.

The way out is issued, others compute, and it is waited for; so is its way back in the backward pass. Autograd runs
what is ready latest first: what was recorded between issue and wait runs between them there too, by itself.

Shapes: T tokens of this rank, C what comes to it, D channels.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import Transfer, exchanged_for


class Way(abc.ABC):
    """How tensors come to the ranks that have work for them, and results back. Neither records a graph.

    It holds numbers alone; ``index`` are the tensors that go with them. Every rank of the group starts and waits for
    the same, in the same order, whatever its data.
    """

    @abc.abstractmethod
    def start_spread(self, x_TD: Tensor, *index: Tensor) -> Transfer:
        """Issue `spread`."""

    @abc.abstractmethod
    def start_collect(self, x_CD: Tensor, *index: Tensor) -> Transfer:
        """Issue `collect`."""

    def spread(self, x_TD: Tensor, *index: Tensor) -> Tensor:
        """``x_CD``: what the ranks have for this one, ranks ascending."""
        return self.start_spread(x_TD, *index).wait()

    def collect(self, x_CD: Tensor, *index: Tensor) -> Tensor:
        """``y_TD``: what they have made of it, back where it came from."""
        return self.start_collect(x_CD, *index).wait()


def send(
    way: Way, index: Sequence[Tensor], tensors: Sequence[Tensor], meanwhile: Callable[[], object] | None
) -> tuple[Tensor, list[Tensor]]:
    """A ticket for `bring_back`, and ``tensors`` as they arrive; ``meanwhile`` runs while they travel.

    Autograd leaves out what no gradient flows to: a rank whose tokens need none, or that received no row and whose
    experts therefore return a constant, would skip collectives the others wait in. The ticket, an empty tensor, always
    asks for a gradient and passes through both functions, so both backwards run, that of `bring_back` first.
    """
    ticket, flight = torch.zeros(0, device=tensors[0].device, requires_grad=torch.is_grad_enabled()), _Flight()
    ticket = _Issue.apply(ticket, flight, way, len(index), *index, *tensors)  # type: ignore[no-untyped-call]
    if meanwhile is not None:
        meanwhile()
    ticket, *arrived = _Arrive.apply(ticket, flight, way, *index)  # type: ignore[no-untyped-call]
    return ticket, arrived


def bring_back(ticket: Tensor, way: Way, index: Sequence[Tensor], x_CD: Tensor) -> Tensor:
    """``y_TD``: results on their way back, which is waited for at once; the ticket is that of their `send`."""
    _, y_TD = _Return.apply(ticket, way, *index, x_CD)  # type: ignore[no-untyped-call]
    result: Tensor = y_TD
    return result


class _Flight:
    """What is on its way between the two functions below. A gradient has the shape of what it is the gradient of, so
    one that has not come yet is handed on past autograd."""

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []

    def begin(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def end(self) -> list[Tensor]:
        transfers, self._transfers = self._transfers, []
        return [transfer.wait() for transfer in transfers]


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight, way: Way, num_index: int, *tensors: Tensor) -> Tensor:
        index, tensors = tensors[:num_index], tensors[num_index:]
        ctx.flight, ctx.num_index = flight, num_index
        flight.begin([way.start_spread(x_TD, *index) for x_TD in tensors])
        return ticket.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor) -> tuple[Tensor | None, ...]:
        return grad_ticket, None, None, None, *[None] * ctx.num_index, *ctx.flight.end()


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight, way: Way, *index: Tensor) -> tuple[Tensor, ...]:
        ctx.flight, ctx.way = flight, way
        ctx.save_for_backward(*index)
        return ticket.clone(), *flight.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index = ctx.saved_tensors
        ctx.flight.begin([ctx.way.start_collect(grad_CD, *index) for grad_CD in grads])
        return grad_ticket, None, None, *(None for _ in index)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, way: Way, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *index, x_CD = tensors
        ctx.way = way
        ctx.save_for_backward(*index)
        with exchanged_for("results"):
            return ticket.clone(), way.collect(x_CD, *index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        index = ctx.saved_tensors
        with exchanged_for("results"):
            return grad_ticket, None, *(None for _ in index), ctx.way.spread(grad_TD, *index)
