"""What compute waits for: the seconds of gathers, reductions and exchanges that nothing hid, by layer.

On a GPU two timing events on the compute stream, one before it waits and one after; on a CPU the host's clock around
what blocks. Nothing is issued otherwise or in another order, and nothing waits for a measurement: the events of a step
are read when the device has passed them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightning_moe_strategy._torch_compat import fsdp_groups, in_backward
from lightning_moe_strategy._torch_waits import (
    GroupStep,
    gather_is_pending,
    pending_work,
    watched_all_reduces,
    watched_collectives,
    watched_steps,
    watched_stream_waits,
)
from lightning_moe_strategy.collectives import timed_waits
from lightning_moe_strategy.units import Unit

Category = Literal[
    "dense_gather",
    "expert_gather",
    "reduce_scatter",
    "cp_gather",
    "ep_dispatch",
    "ep_combine",
    "expert_move",
    "optimizer",
    "copies",
]
"""Gathers of weights that all ranks hold shards of, and of experts (eFSDP); gradients on their way to shards and
replicas; what attention gathers and its gradient; tokens to their experts and results back; experts that
``balance="redundant"`` sends; the optimizer's own exchanges. ``copies`` are no wait, but take the same stream: FSDP's,
into and out of its buffers.
"""

CATEGORIES: tuple[Category, ...] = get_args(Category)

CATEGORY_OF_AXIS: Mapping[str, Category] = {
    "cp": "cp_gather",
    "cp_inter": "cp_gather",
    "cp_intra": "cp_gather",
    "ep": "ep_dispatch",
}
"""Of what this package exchanges itself, by mesh axis. What is on no such axis is the optimizer's."""

_CATEGORY_OF_PURPOSE: Mapping[str, Category] = {"results": "ep_combine", "moved experts": "expert_move"}


class Wait(NamedTuple):
    """What was waited for, and where."""

    layer: str
    """Name of the block, or of the unit where it is in none; empty for the root."""
    category: Category
    in_backward: bool


@dataclass(frozen=True, kw_only=True)
class StepWaits:
    """One step of this rank."""

    seconds: float
    """Of the whole step."""
    waits: Mapping[Wait, float]
    """Seconds of them."""


Mark = float | torch.cuda.Event


@dataclass
class _Step:
    stretches: list[tuple[Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[Wait, Wait | None, Mark, Mark]] = field(default_factory=list)
    """What, the copies that it is part of, from, to."""

    @property
    def marks(self) -> list[Mark]:
        of_waits = [mark for _, _, *marks in self.waits for mark in marks]
        return [*(mark for marks in self.stretches for mark in marks), *of_waits]


class WaitWatch:
    """Times what a module's steps wait for, while open.

    Args:
        units: what FSDP gathers and reduces.
        device: where they compute.
        axes: mesh axis of each process group by the group's name; without it FSDP's own are timed and no others.
    """

    def __init__(self, units: Sequence[Unit], *, device: torch.device, axes: Mapping[str, str] | None = None) -> None:
        self.layers = tuple(dict.fromkeys(layers_of(units).values()))
        """Every name a ``Wait`` can have, in the order of ``units``."""
        self._units, self._device = units, device
        self._categories = {name: CATEGORY_OF_AXIS.get(axis) for name, axis in (axes or {}).items()}
        self._has_axes = axes is not None
        self._clock = Clock(device)
        self._step, self._done = _Step(), deque[_Step]()
        self._began: Mark | None = None
        """Of the stretch that is measured now; None between them."""
        self._layer = ""
        """Whose weights were read last, so which one runs."""
        self._reduced = ""
        """Whose gradients were reduced last."""
        self._inside: tuple[Wait, Wait | None] | None = None
        """In one of FSDP's steps what it waits for, and its copies."""

    @contextmanager
    def opened(self) -> Generator["WaitWatch", None, None]:
        """Time what runs inside, from each ``start`` to the next ``stop``. Afterwards all functions are torch's."""
        layers = layers_of(self._units)
        with ExitStack() as stack:
            stack.enter_context(timed_waits(self._around_exchange))
            if self._clock.is_hosts:
                stack.enter_context(watched_all_reduces(self._waiting))
            else:
                stack.enter_context(watched_stream_waits(self._device.type, self._waiting))
            for unit in self._units:
                gathers: Category = "expert_gather" if unit.kind == "experts" else "dense_gather"
                for group in fsdp_groups(unit.module) if isinstance(unit.module, FSDPModule) else []:
                    stack.enter_context(watch_group(self, group, layers[unit.name], gathers))
            yield self

    def start(self) -> None:
        """A stretch of a step begins: a micro-batch."""
        self._began = self._clock.mark()

    def stop(self) -> None:
        """The stretch ends. What runs between two is no part of a step."""
        if self._began is not None:
            self._step.stretches.append((self._began, self._clock.mark()))
        self._began = None

    def end_step(self) -> None:
        """The stretches since the last step were one."""
        self._done.append(self._step)
        self._step = _Step()

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """A step in one stretch."""
        self.start()
        try:
            yield
        finally:
            self.stop()
            self.end_step()

    def take(self, *, wait: bool = False) -> list[StepWaits]:
        """The steps that have ended and that the device is through with; ``wait`` for it to be through with all."""
        found = []
        while self._done and (wait or self._clock.has_passed(self._done[0].stretches)):
            step = self._done.popleft()
            if wait:
                self._clock.pass_by(step.stretches)
            found.append(self._read(step))
        return found

    def _read(self, step: _Step) -> StepWaits:
        waits: defaultdict[Wait, float] = defaultdict(float)
        for what, part_of, start, end in step.waits:
            seconds = between(start, end)
            waits[what] += seconds
            if part_of is not None:
                waits[part_of] -= seconds
        total = sum(between(start, end) for start, end in step.stretches)
        self._clock.take_back(step.marks)
        return StepWaits(seconds=total, waits=dict(waits))

    def _timed(self, what: Wait, part_of: Wait | None = None) -> AbstractContextManager[object]:
        return _NOTHING if self._began is None else _Timed(self._clock, self._step.waits, what, part_of)

    def _waiting(self) -> AbstractContextManager[object]:
        """Around what waits in one of FSDP's steps; the same may run outside of them."""
        return _NOTHING if self._inside is None else self._timed(*self._inside)

    def _around_exchange(self, group: dist.ProcessGroup, purpose: str) -> AbstractContextManager[object]:
        if self._began is None or not self._has_axes or group.size() == 1:
            return _NOTHING
        category = self._categories.get(group.group_name) or "optimizer"
        if category == "ep_dispatch":
            category = _CATEGORY_OF_PURPOSE.get(purpose, category)
        return self._timed(Wait(self._layer, category, in_backward()))


@contextmanager
def watch_group(watch: WaitWatch, group: Any, layer: str, gathers: Category) -> Generator[None, None, None]:
    """Have ``watch`` time what compute waits for in the steps of one of FSDP's groups."""
    with ExitStack() as stack:
        stack.enter_context(watched_steps(group, _GroupSteps(watch, group, layer, gathers).run))
        if watch._clock.is_hosts:
            stack.enter_context(watched_collectives(group, watch._waiting))
        yield


class _GroupSteps:
    """What FSDP does for one unit."""

    def __init__(self, watch: WaitWatch, group: Any, layer: str, gathers: Category) -> None:
        self._watch, self._group, self._layer, self._gathers = watch, group, layer, gathers

    def run(self, step: GroupStep, run: Callable[[], Any]) -> Any:
        watch = self._watch
        if step == "wait_for_unshard":
            watch._layer = self._layer
        if watch._began is None:
            return run()
        outer = watch._inside
        try:
            if step == "unshard":
                return self._issue(run)
            if step == "wait_for_unshard":
                return self._read(run)
            if step == "post_backward":
                return self._reduce(run)
            return self._end(run)
        finally:
            watch._inside = outer

    def _issue(self, run: Callable[[], Any]) -> Any:
        watch, was_pending = self._watch, gather_is_pending(self._group)
        if was_pending or not watch._clock.is_hosts:  # on a GPU it is another stream that copies
            return run()
        copies = self._copies(in_backward())
        watch._inside = Wait(self._layer, self._gathers, copies.in_backward), copies
        with watch._timed(copies):
            return run()

    def _read(self, run: Callable[[], Any]) -> Any:
        if not gather_is_pending(self._group):
            return run()
        watch, copies = self._watch, self._copies(in_backward())
        watch._inside = Wait(self._layer, self._gathers, copies.in_backward), copies
        with watch._timed(copies):
            self._wait_for_work()
            return run()

    def _reduce(self, run: Callable[[], Any]) -> Any:
        watch, copies = self._watch, self._copies(True)
        # On a GPU one reduction is waited for when the next is about to be issued.
        layer = self._layer if watch._clock.is_hosts else watch._reduced
        watch._inside = Wait(layer, "reduce_scatter", True), copies
        with watch._timed(copies):
            result = run()
        watch._reduced = self._layer
        return result

    def _end(self, run: Callable[[], Any]) -> Any:
        watch = self._watch
        watch._inside = Wait(self._layer, self._gathers, True), None
        self._wait_for_work()  # of a gather that nobody read
        watch._inside = Wait(watch._reduced, "reduce_scatter", True), None
        result = run()
        watch._layer = ""
        return result

    def _wait_for_work(self) -> None:
        """FSDP waits for it next, and then need not."""
        work = pending_work(self._group)
        if work is not None:
            with self._watch._waiting():
                work.wait()

    def _copies(self, backward: bool) -> Wait:
        return Wait(self._layer, "copies", backward)


class Clock:
    """Marks in time: events on a GPU's current stream, used again and again; the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.is_hosts = device.type != "cuda"
        self._spare: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        if self.is_hosts:
            return time.perf_counter()
        event: torch.cuda.Event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def has_passed(self, stretches: Sequence[tuple[Mark, Mark]]) -> bool:
        """Whether the device is through with what came before the last mark. Waits for nothing."""
        end = stretches[-1][1] if stretches else 0.0
        return isinstance(end, float) or bool(end.query())  # type: ignore[no-untyped-call]

    def pass_by(self, stretches: Sequence[tuple[Mark, Mark]]) -> None:
        """Wait until it is."""
        end = stretches[-1][1] if stretches else 0.0
        if not isinstance(end, float):
            end.synchronize()

    def take_back(self, marks: Sequence[Mark]) -> None:
        """They were read."""
        self._spare += [mark for mark in marks if not isinstance(mark, float)]


def between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another."""
    if isinstance(start, float) or isinstance(end, float):
        return end - start  # type: ignore[operator]  # both are of one clock
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


class _Timed:
    """The seconds that its inside takes."""

    def __init__(
        self, clock: Clock, waits: list[tuple[Wait, Wait | None, Mark, Mark]], what: Wait, part_of: Wait | None
    ) -> None:
        self._clock, self._waits, self._what, self._part_of = clock, waits, what, part_of

    def __enter__(self) -> None:
        self._start = self._clock.mark()

    def __exit__(self, *error: object) -> None:
        self._waits.append((self._what, self._part_of, self._start, self._clock.mark()))


_NOTHING: AbstractContextManager[object] = nullcontext()


def layers_of(units: Sequence[Unit]) -> dict[str, str]:
    """For each unit by name the block it is in; itself where it is in none."""
    blocks = [unit.name for unit in units if unit.kind == "block"]
    return {
        unit.name: next((b for b in blocks if unit.name == b or unit.name.startswith(f"{b}.")), unit.name)
        for unit in units
    }
