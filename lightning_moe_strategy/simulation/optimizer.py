"""The optimizer of a simulated step: the module's own, on this rank's shards as plain tensors.

Plain tensors do the same arithmetic without the whole tensors that DTensor makes to find shapes.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_strategy import _torch_compat

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Of ``torch.optim``: they look at whole matrices, or at values."""


class ShardOptimizer:
    """Steps the module's own optimizers where its ``configure_optimizers`` can be called here, and AdamW where not.

    ``shards``: the plain tensor that stands for each of the module's parameters. ``for_gpu``: fused over tensors, as
    torch chooses on a GPU.
    """

    def __init__(self, module: nn.Module, shards: Mapping[nn.Parameter, nn.Parameter], *, for_gpu: bool) -> None:
        self.note: str | None = None
        """Why it is not the module's own."""
        self._shards, self._for_gpu, self._is_tried = shards, for_gpu, False
        self.optimizers = self._own(module)
        if self.optimizers and (strange := self._not_elementwise()):
            self._take_adamw(f"{strange} is not an elementwise optimizer")

    def step(self) -> None:
        if self._is_tried:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        self._is_tried = True
        try:
            self.step()
        except _torch_compat.needs_values() as error:
            self._take_adamw(f"{self._names()} reads values of tensors ({error})")
            self.step()
        else:
            if not all(self._is_like_its_parameter(optimizer) for optimizer in self.optimizers):
                self._take_adamw(f"{self._names()} is not an elementwise optimizer")
                self.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state(self) -> Iterator[Tensor]:
        """Every tensor the optimizers keep."""
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, Tensor))

    def _own(self, module: nn.Module) -> list[Optimizer]:
        configure = getattr(module, "configure_optimizers", None)
        if configure is None:
            self._take_adamw("the module has no configure_optimizers")
            return self.optimizers
        try:
            with _attached_to(module, _NoTrainer()):
                with _with_parameters(module, self._shards):
                    found = list(_optimizers_in(configure()))
                if any(getattr(optimizer, "reads_placements", False) for optimizer in found):
                    # Ours: what it exchanges depends on the shards, and it asks DTensor for no shapes.
                    found = list(_optimizers_in(configure()))
        except Exception as error:
            reason = " ".join(str(error).split())
            self._take_adamw(f"configure_optimizers needs a Trainer ({type(error).__name__}: {reason})")
            return self.optimizers
        if not found:
            self._take_adamw("configure_optimizers returned no optimizer")
            return self.optimizers
        for group in (group for optimizer in found for group in optimizer.param_groups):
            if self._for_gpu and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = not group.get("differentiable")
            if self._for_gpu and "ns_dtype" in group and group["ns_dtype"] is None:
                group["ns_dtype"] = torch.bfloat16
        return found

    def _take_adamw(self, reason: str) -> None:
        self.note = f"{reason}: the optimizer simulated is AdamW."
        trained = [shard for shard in self._shards.values() if shard.requires_grad]
        self.optimizers = [torch.optim.AdamW(trained, lr=1e-3, foreach=self._for_gpu)] if trained else []

    def _not_elementwise(self) -> str:
        kinds = tuple(getattr(torch.optim, name) for name in NOT_ELEMENTWISE if hasattr(torch.optim, name))
        return ", ".join(type(optimizer).__name__ for optimizer in self.optimizers if isinstance(optimizer, kinds))

    def _names(self) -> str:
        return ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def _is_like_its_parameter(self, optimizer: Optimizer) -> bool:
        """Whether what it keeps of a parameter is as large as that, or a number: true of elementwise arithmetic."""
        return all(
            value.numel() in (1, parameter.numel())
            for parameter, values in optimizer.state.items()
            for value in values.values()
            if isinstance(value, Tensor)
        )


class _NoTrainer:
    """Stands where a Trainer would be, and knows what schedules ask for: the number of steps changes no figure."""

    estimated_stepping_batches = 10**6

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is read")


@contextmanager
def _attached_to(module: Any, trainer: object) -> Generator[None, None, None]:
    before = module.__dict__.get("_trainer")
    module.trainer = trainer
    try:
        yield
    finally:
        module.trainer = before


@contextmanager
def _with_parameters(module: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Generator[None, None, None]:
    """The module with other parameters in the place of its own, tied ones included."""
    own = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    for parameters, name, parameter in own:
        parameters[name] = others[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in own:
            parameters[name] = parameter


def _optimizers_in(result: Any) -> Iterable[Optimizer]:
    """The optimizers in whatever ``configure_optimizers`` may return; schedulers are passed over."""
    if isinstance(result, Optimizer):
        yield result
    elif isinstance(result, Mapping):
        yield from _optimizers_in(result.get("optimizer"))
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _optimizers_in(part)
