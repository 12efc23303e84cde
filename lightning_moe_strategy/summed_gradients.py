"""How a step's gradient comes about: losses weighed, gradients reduced, divided once, handed to the optimizer.

The methods stand in the order in which a Trainer calls them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_strategy._lightning_compat import rank_zero_info
from lightning_moe_strategy.callbacks.balance import ExpertBalance
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.placed_strategy import PlacedStrategy
from lightning_moe_strategy.token_mean import TokenMean

GradientSync = Literal["micro_batch", "step"]


class SummedGradients(PlacedStrategy):
    """A strategy whose gradients are sums over ranks and micro-batches until the step divides them."""

    micro_batch: MicroBatch
    """What the current batch holds on this rank."""
    _token_mean: TokenMean
    _gradient_sync: GradientSync
    _balance: ExpertBalance | None
    _is_plain_mean_said = False

    @property
    def backward_is_of_mean(self) -> bool:
        """Whether each backward pass is of its micro-batch's mean, and not of a sum that the step divides."""
        assert self.lightning_module is not None
        return not self.lightning_module.automatic_optimization and self._token_mean.reduction == "mean"

    def require_a_divided_step(self, setting: str) -> None:
        """ValueError where nothing divides a step's gradient by its tokens, which ``setting`` relies on."""
        if self.backward_is_of_mean:
            raise ValueError(
                f"{setting} needs automatic_optimization: its gradient is a sum over the tokens of a step, and where a "
                "module optimizes by hand no step is divided by them. Let Lightning optimize, or leave it out."
            )

    def say_price_of_sync(self) -> None:
        """What whole gradients take, where they wait for the last micro-batch of a step."""
        if self._gradient_sync == "micro_batch":
            return
        assert self.model is not None
        numbers = sum(_gathered_numel(p) for p in self.model.parameters() if p.requires_grad)
        rank_zero_info(
            "gradient_sync='step' keeps whole FP32 gradients while micro-batches are accumulated: "
            f"{numbers * 4 / 1e9:.3g} GB on every rank, which 'micro_batch' shards."
        )

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """All but the last micro-batch of a step: reduce to shards as always, but leave the replicas for the last.

        ``gradient_sync="step"`` leaves all of the reduction for the last, and keeps whole gradients until then.
        """
        modules = [unit.module for unit in self.units if isinstance(unit.module, FSDPModule)]
        switch = "set_requires_all_reduce" if self._gradient_sync == "micro_batch" else "set_requires_gradient_sync"
        for module in modules:
            getattr(module, switch)(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                getattr(module, switch)(True, recurse=False)

    def _weigh_loss(self, loss: Tensor) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self._say_plain_mean()
        if not module.automatic_optimization:
            return self._token_mean.as_mean(loss, self.micro_batch)
        num_accumulated = module.trainer.accumulate_grad_batches
        # Lightning has divided the loss by it already, and zeroes gradients before the first of so many.
        starts_step = module.trainer.fit_loop.batch_idx % num_accumulated == 0
        return self._token_mean.as_sum(loss * num_accumulated, self.micro_batch, starts_step=starts_step)

    def _say_plain_mean(self) -> None:
        if self._is_plain_mean_said or self.micro_batch.num_loss_tokens is not None or dist.get_world_size() == 1:
            return
        self._is_plain_mean_said = True
        if self._token_mean.reduction == "mean":
            rank_zero_info(
                "The batches have no labels with one entry per token, so the losses of all ranks and micro-batches "
                "weigh the same in the gradient: their plain mean. Set loss_reduction='sum' if training_step returns "
                "a sum."
            )

    def _mean_over_tokens(self) -> None:
        assert self.model is not None
        self._token_mean.divide((parameter.grad for parameter in self.model.parameters()), self.root_device)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        def closure_then_mean() -> Any:
            result = closure()
            self._mean_over_tokens()
            return result

        output = super().optimizer_step(optimizer, closure_then_mean, model, **kwargs)
        if self._balance is not None:
            self._balance.after_optimizer_step()
        return output


def _gathered_numel(parameter: Tensor) -> int:
    """Of a parameter as this rank computes with it: experts stay spread over ep."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    is_spread = "ep" in (mesh.mesh_dim_names or ())
    return parameter.numel() // (mesh["ep"].size() if is_spread else 1)
