"""One watch over a step, simulated or real: memory by purpose, bytes by axis and unit, arithmetic, order of issue."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy._torch_compat import (
    OperationMode,
    is_asynchronous,
    max_held_reductions,
    pending_gather,
    sharded_gradients,
    unit_name,
    watched_units,
    whole_gradients,
)
from lightning_moe_strategy.collectives import observed_waits
from lightning_moe_strategy.expert_parallel.experts import routing_observers
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.simulation.arithmetic import ArithmeticWatch, compute_kind
from lightning_moe_strategy.simulation.communication import Collective, CommunicationWatch, axes_of_groups
from lightning_moe_strategy.simulation.issue import (
    AheadWait,
    Communicate,
    Compute,
    GatherWait,
    Issue,
    PhaseEnd,
    ReductionWait,
)
from lightning_moe_strategy.simulation.memory import MemoryWatch, Phase
from lightning_moe_strategy.simulation.places import Places


class StepWatch(OperationMode):
    """Sees every operation of a step below autograd, and what FSDP does for each unit."""

    def __init__(self, placement: Placement, *, reductions_are_copied: bool = False) -> None:
        """``reductions_are_copied``: the real run is on gloo, which reduces and scatters a copy of the input."""
        super().__init__()
        self._reductions_are_copied = reductions_are_copied
        self.memory = MemoryWatch({unit.name for unit in placement.units if unit.kind == "experts"})
        self.communication = CommunicationWatch(axes_of_groups(placement))
        self.arithmetic = ArithmeticWatch()
        self.places = Places(placement.units)
        self.issues: list[Issue] = []
        """What the step handed to the GPU, in order."""
        self._experts = tuple(placement.experts.values())
        self._ahead: dict[int, int] = {}
        """By the id of the result, the number of a collective that was started ahead."""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        self.memory.observe(operation, args, result)
        if self._reductions_are_copied and operation is torch.ops.c10d._reduce_scatter_base_.default:
            self.memory.pass_through(args[1], str(operation))
        if operation is torch.ops.c10d.alltoall_base_.default:
            self.memory.row_counts |= {rows.shape[0] for rows in args[:2] if rows.dim() == 2}
        if operation is torch.ops.aten._grouped_mm.default and args[1].dim() == 3:
            self.memory.row_counts.add(args[0].shape[0])  # rows, of which the copies that travel are fewer
        collective = self.communication.observe(operation, args)
        if collective is not None:
            self.issues.append(self._communication(collective, args))
            return result
        module = self.places.current
        phase, flops = self.arithmetic.observe(operation, args, kwargs, result, module)
        if flops:
            kind = compute_kind(operation)
            self.issues.append(Compute(phase=phase, moment=self.memory.moment, module=module, kind=kind, flops=flops))
        return result

    def _communication(self, collective: Collective, args: tuple[Any, ...]) -> Communicate:
        phase, moment = self.arithmetic.phase, self.memory.moment
        # FSDP's own are watched by its steps; the strategy's all-reduces are waited for where they are issued.
        is_ours = collective.unit is None and collective.name in ("all_gather", "reduce_scatter", "all_to_all")
        if not is_ours or not is_asynchronous(args):
            return Communicate(phase=phase, moment=moment, collective=collective)
        result, source = args[:2]
        number = self._ahead[id(result)] = len(self.issues)
        follows = self._ahead.get(id(source))
        return Communicate(phase=phase, moment=moment, collective=collective, number=number, follows=follows)

    def _note_wait(self, result: Tensor) -> None:
        number = self._ahead.pop(id(result), None)
        if number is not None:
            phase = self.arithmetic.phase
            self.issues.append(AheadWait(phase=phase, moment=self.memory.moment, number=number))

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
            waits = observed_waits(self._note_wait)
            with watched_units(self._around), waits, self.memory.opened(), self.places.opened(), self:
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
        self.places.reset()
        with self.memory.phase(name):
            yield
        self.places.reset()
        self.issues.append(PhaseEnd(phase=name, moment=self.memory.moment))
        if name == "forward":
            self.memory.keep_as_activations()

    @contextmanager
    def _around(self, step: str, group: Any) -> Generator[None, None, None]:
        outer, self.communication.unit = self.communication.unit, unit_name(group)
        phase, unit = self.arithmetic.phase, unit_name(group)
        try:
            if step == "post_backward":
                max_held = max_held_reductions(group)
                self.issues.append(ReductionWait(phase=phase, moment=self.memory.moment, max_held=max_held))
                self.memory.adopt(whole_gradients(group), "reduce_buffers")
                with self.memory.made_for("reduce_buffers"):
                    yield
                self.memory.adopt(sharded_gradients(group), "gradients")
                return
            if step == "wait_for_unshard":
                self.memory.unit = unit
                pending = pending_gather(group)
                if pending != "none":
                    is_kept = pending == "kept"
                    self.issues.append(GatherWait(phase=phase, moment=self.memory.moment, unit=unit, is_kept=is_kept))
            with self.memory.made_for("gathered_weights"):
                yield
        finally:
            self.communication.unit = outer
