"""Weights of experts on their way to the ranks that compute some of their rows, and their gradients on the way home.

Weights are on their way while rows are sorted and travel, and while a block computes what it has beside its experts; in
the backward pass again. A weight's gradient is the sum of the parts that ranks have made of their own rows: those of
BF16 and FP16 weights are FP32, travel so, and are added at home in FP32, ranks ascending.

Shapes: R rows this rank computes, D hidden size, L experts of this rank, X experts it computes beside its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy._torch_compat import is_same_memory
from lightning_moe_strategy.collectives import Transfer, all_to_all_rows, exchanged_for, start_all_to_all_rows
from lightning_moe_strategy.kernels.on_cuda import HALF
from lightning_moe_strategy.kernels.outer_products import pass_fp32_gradients


@dataclass(frozen=True, kw_only=True)
class ExpertMove:
    """Whose weights go where in one layer and micro-batch. At least one moves between some two ranks."""

    group: dist.ProcessGroup
    sent: list[int]
    """Of this rank's experts those that are sent, receiver by receiver."""
    num_sent: list[int]
    """How many of them each rank gets."""
    num_received: list[int]
    """How many each rank sends this one."""

    @property
    def num_extra(self) -> int:
        """X."""
        return sum(self.num_received)

    def start_fetch(self, own: Tensor) -> Transfer:
        """Issue what brings the weights of the X experts computed here beside ``own`` [L, ...]."""
        sent = torch.cat([own[:0], *(own[expert : expert + 1] for expert in self.sent)])
        return start_all_to_all_rows(sent, self.num_sent, self.num_received, self.group)

    def add_at_home(self, grad: Tensor) -> Tensor:
        """From gradients of all L + X experts computed here to the whole ones of this rank's own; at least FP32."""
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        num_own = grad.shape[0] - self.num_extra
        with exchanged_for("moved experts"):
            returned = all_to_all_rows(grad[num_own:], self.num_received, self.num_sent, self.group)
        if not self.sent:
            return grad[:num_own]
        whole = grad[:num_own].clone()
        # Receiver by receiver: ranks ascending.
        for part, expert in zip(returned, self.sent, strict=True):
            whole[expert] += part
        return whole


class MovedWeights:
    """The weights of one forward, and again of its backward: begun early, waited for where they are read."""

    def __init__(self, move: ExpertMove) -> None:
        self.move = move
        self.extended: list[Tensor] = []
        """What the experts' module is shown, where it is freed and filled again; none where X is 0."""
        self._own: list[Tensor] = []
        self._transfers: list[Transfer] = []

    def begin(self, own: Sequence[Tensor]) -> None:
        """Issue the fetch of what goes with these parameters of this rank."""
        with torch.no_grad():
            self._own = [tensor.detach() for tensor in own]
            self._transfers = [self.move.start_fetch(tensor) for tensor in self._own]

    def end(self, own: Sequence[Tensor]) -> list[Tensor]:
        """What goes with ``own``; begun here where nothing, or something of another module, is on its way."""
        if len(self._own) != len(own) or not all(map(is_same_memory, self._own, own)):
            self.begin(own)
        transfers, self._own, self._transfers = self._transfers, [], []
        with exchanged_for("moved experts"):
            return [transfer.wait() for transfer in transfers]

    def free(self) -> None:
        """Let go of the memory of what the module was shown."""
        for tensor in self.extended:
            tensor.untyped_storage().resize_(0)

    def fill(self, own: Sequence[Tensor]) -> None:
        """What `free` let go of, made again."""
        others = self.end(own)
        for tensor, mine, of_others in zip(self.extended, own, others, strict=False):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor[: len(mine)].copy_(mine)
            tensor[len(mine) :].copy_(of_others)


def extend(ticket: Tensor, weights: MovedWeights, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Parameters of the L experts of this rank, followed by those of the X it is sent.

    The ticket is that of the dispatch: every rank's backward runs, after that of the combine and before that of the
    dispatch.
    """
    ticket, *extended = _Extend.apply(ticket, weights, *parameters)  # type: ignore[no-untyped-call]
    return ticket, extended


def free_until_backward(
    ticket: Tensor, rows_RD: Tensor, weights: MovedWeights, parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Frees extended parameters once the experts have run, and fills them again before their backward.

    The experts' own operations have saved them. FSDP frees and fills what it gathers in the same way; kept, every
    layer would hold a whole copy of its experts until its backward pass.
    """
    ticket, rows_RD = _FillAgain.apply(ticket, rows_RD, weights, *parameters)  # type: ignore[no-untyped-call]
    return ticket, rows_RD


def begin_in_backward(y_TD: Tensor, weights: MovedWeights, parameters: Sequence[Tensor]) -> Tensor:
    """``y_TD``, the layer's result, whose gradient finds the weights on their way before it travels itself."""
    result: Tensor = _BeginAgain.apply(y_TD, weights, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, weights: MovedWeights, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.weights = weights
        pairs = zip(parameters, weights.end(parameters), strict=True)
        extended = [torch.cat([own, others]) if len(others) else own.view_as(own) for own, others in pairs]
        pass_fp32_gradients(ctx, *(tensor for tensor in extended if tensor.dtype in HALF))
        return ticket.clone(), *extended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weights.free()
        # Whether a parameter is trained is the same on all ranks.
        needs_grad, move = ctx.needs_input_grad[2:], ctx.weights.move
        whole = (move.add_at_home(grad) if needs else None for grad, needs in zip(grads, needs_grad, strict=True))
        return grad_ticket, None, *whole


class _FillAgain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, rows_RD: Tensor, weights: MovedWeights, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.weights = weights
        ctx.save_for_backward(*parameters)
        weights.free()
        return ticket.clone(), rows_RD.view_as(rows_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ticket: Tensor, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        parameters = ctx.saved_tensors  # once: torch's checkpoint gives each only once
        ctx.weights.fill(parameters)
        return grad_ticket, grad_RD, None, *(None for _ in parameters)


class _BeginAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, weights: MovedWeights, *parameters: Tensor) -> Tensor:
        ctx.weights = weights
        ctx.save_for_backward(*parameters)
        # The same tensor: of a view, FSDP warns that a change in place would lose its hooks.
        ctx.mark_dirty(y_TD)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        parameters = ctx.saved_tensors
        ctx.weights.begin(parameters)
        return grad_TD, None, *(None for _ in parameters)
