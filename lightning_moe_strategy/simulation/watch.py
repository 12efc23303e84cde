"""One watch over a step, simulated or real: memory by purpose, bytes by axis and unit, arithmetic."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy._torch_compat import (
    OperationMode,
    sharded_gradients,
    unit_name,
    watched_units,
    whole_gradients,
)
from lightning_moe_strategy.expert_parallel.experts import routing_observers
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.simulation.arithmetic import ArithmeticWatch
from lightning_moe_strategy.simulation.communication import CommunicationWatch, axes_of_groups
from lightning_moe_strategy.simulation.memory import MemoryWatch, Phase


class StepWatch(OperationMode):
    """Sees every operation of a step below autograd, and what FSDP does for each unit."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.memory = MemoryWatch({unit.name for unit in placement.units if unit.kind == "experts"})
        self.communication = CommunicationWatch(axes_of_groups(placement))
        self.arithmetic = ArithmeticWatch()
        self._experts = tuple(placement.experts.values())

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        for watch in (self.memory, self.communication, self.arithmetic):
            watch.observe(operation, args, result)
        if operation is torch.ops.c10d.alltoall_base_.default:
            self.memory.row_counts |= {rows.shape[0] for rows in args[:2] if rows.dim() == 2}
        return result

    @contextmanager
    def opened(
        self,
        *,
        parameters: Iterable[Tensor],
        optimizer_state: Iterable[Tensor],
        others: Iterable[Tensor],
    ) -> Generator["StepWatch", None, None]:
        """Watch what runs inside. The tensors are those that exist already; gradients are found at the parameters."""
        parameters = list(parameters)
        for experts in self._experts:
            routing_observers(experts).append(self._note_rows)
        try:
            with watched_units(self._around), self.memory.opened(), self:
                self.memory.adopt(parameters, "parameters")
                self.memory.adopt((parameter.grad for parameter in parameters), "gradients")
                self.memory.adopt(optimizer_state, "optimizer")
                self.memory.adopt(others, "other")
                yield self
        finally:
            for experts in self._experts:
                routing_observers(experts).remove(self._note_rows)

    def _note_rows(self, expert_ids_TK: Tensor) -> None:
        if expert_ids_TK.shape[1] > 1:
            self.memory.row_counts.add(expert_ids_TK.numel())

    @contextmanager
    def phase(self, name: Phase) -> Generator[None, None, None]:
        """What runs inside is this phase of the step."""
        self.arithmetic.phase = name
        with self.memory.phase(name):
            yield
        if name == "forward":
            self.memory.keep_as_activations()

    @contextmanager
    def _around(self, step: str, group: Any) -> Generator[None, None, None]:
        outer, self.communication.unit = self.communication.unit, unit_name(group)
        try:
            if step == "post_backward":
                self.memory.adopt(whole_gradients(group), "reduce_buffers")
                with self.memory.made_for("reduce_buffers"):
                    yield
                self.memory.adopt(sharded_gradients(group), "gradients")
            else:
                if step == "wait_for_unshard":
                    self.memory.unit = unit_name(group)
                with self.memory.made_for("gathered_weights"):
                    yield
        finally:
            self.communication.unit = outer
