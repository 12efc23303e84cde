"""The peak memory of one step's tensors on this rank: a GPU's allocator tells it, on a CPU every operation is watched.

Both are started and stopped around each micro-batch, so that a validation between two of them does not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.simulation.memory import Phase
from lightning_moe_strategy.simulation.watch import StepWatch


class DevicePeak:
    """What the CUDA allocator has handed out at most. It does not know what for."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device

    def start(self, module: nn.Module, optimizers: Sequence[Optimizer], batch: Iterable[Tensor]) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def enter(self, phase: Phase) -> None:
        """Nothing: the allocator does not ask which phase runs."""

    def stop(self) -> None:
        self.num_bytes = max(self.num_bytes, torch.cuda.max_memory_allocated(self._device))

    def buckets(self) -> Mapping[str, int]:
        """None are known."""
        return {}


class WatchedPeak:
    """The storages of all tensors that the step's operations make, and of those that are there before."""

    def __init__(self, placement: Placement) -> None:
        self._watch = StepWatch(placement)
        self._phase, self._opened = ExitStack(), ExitStack()

    @property
    def num_bytes(self) -> int:
        return max((peak.num_bytes for peak in self._watch.memory.peaks.values()), default=0)

    def start(self, module: nn.Module, optimizers: Sequence[Optimizer], batch: Iterable[Tensor]) -> None:
        others = [*module.buffers(), *batch]
        self._opened.enter_context(
            self._watch.opened(parameters=module.parameters(), optimizer_state=_state(optimizers), others=others)
        )
        self.enter("forward")

    def enter(self, phase: Phase) -> None:
        """The step's next phase begins."""
        self._phase.close()
        self._phase.enter_context(self._watch.phase(phase))

    def stop(self) -> None:
        self._phase.close()
        self._opened.close()

    def buckets(self) -> Mapping[str, int]:
        """Bytes at the peak by purpose, as ``simulation.memory.Bucket`` names them."""
        peak = max(self._watch.memory.peaks.values(), key=lambda peak: peak.num_bytes)
        return self._watch.memory.buckets(peak.moment)


def _state(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
