"""Seconds of a training step by phase, on the device's own clock: nothing waits until the seconds are read."""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import torch

Phase = Literal["data", "forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


class PhaseClock:
    """Marks between phases: events on a GPU's stream, the host's clock elsewhere.

    On a GPU a phase is what the current stream worked and waited between two marks, so that communication it waited for
    counts and what the host prepared meanwhile does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Phase | None, float | torch.cuda.Event]] = []

    def mark(self, phase: Phase | None) -> None:
        """Now ``phase`` is over, which began with the mark before. None: what was before is no part of a step."""
        if not self._on_gpu:
            self._marks.append((phase, time.perf_counter()))
            return
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((phase, event))

    def read(self) -> Mapping[Phase, float]:
        """Seconds of every phase since the last reading. Waits for the device."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()  # type: ignore[union-attr]
        seconds: dict[Phase, float] = defaultdict(float)
        for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                seconds[phase] += _between(start, end)
        del self._marks[:-1]
        return {phase: seconds[phase] for phase in PHASES}


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return end - start  # type: ignore[operator]  # both are of one clock
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
