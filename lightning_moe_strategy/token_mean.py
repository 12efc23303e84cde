"""One gradient for a step: d(sum of token losses) / (tokens that count), over all ranks and micro-batches.

A training step returns a mean over its own tokens. It is turned into a sum before the backward pass, gradients of
all ranks and micro-batches simply add up, and once per step they are divided by the number of tokens behind them.
Ranks and micro-batches with many or few tokens then weigh what they hold, on every mesh.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.sharding import local_tensor


class TokenMean:
    """Keeps the micro-batches of a step between their backward passes and the division."""

    def __init__(self) -> None:
        self._micro_batches: list[MicroBatch] = []

    def as_sum(self, loss: Tensor, micro_batch: MicroBatch) -> Tensor:
        """A mean over the micro-batch's tokens as a sum over them.

        Several losses of one micro-batch share its tokens. A batch without labels weighs the same on every rank, so
        that plain means are averaged.
        """
        if not any(micro_batch is seen for seen in self._micro_batches):
            self._micro_batches.append(micro_batch)
        return loss * loss_weight(micro_batch)

    def divide(self, gradients: Iterable[Tensor | None], device: torch.device) -> None:
        """Divide in place by the tokens of the step. Every rank calls it; the second call of a step does nothing."""
        if not self._micro_batches:
            return
        weights = [torch.as_tensor(loss_weight(m), dtype=torch.int64, device=device) for m in self._micro_batches]
        self._micro_batches.clear()
        total = torch.stack(weights).sum()
        dist.all_reduce(total)
        local_gradients = [local_tensor(gradient) for gradient in gradients if gradient is not None]
        if local_gradients:
            # A step without a single token has zero gradients: leave them zero.
            torch._foreach_div_(local_gradients, total.clamp(min=1).to(torch.float32))


def loss_weight(micro_batch: MicroBatch) -> Tensor | int:
    """A micro-batch's share of a step's gradient, by what this rank holds: its labels that count, 1 without labels."""
    return 1 if micro_batch.num_loss_tokens is None else micro_batch.num_loss_tokens
