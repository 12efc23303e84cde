"""The predicted overlap of a step as a trace for ui.perfetto.dev (Chrome's trace event format).

One thread for each lane of the GPU, one for what compute waits for, one for the phases, and memory as a counter.
"""

from collections.abc import Iterator
from typing import Any

from lightning_moe_strategy.simulation.report import GB, Simulation
from lightning_moe_strategy.simulation.schedule import LANE_NAMES, Span
from lightning_moe_strategy.simulation.timeline import waits

THREADS: dict[str, str] = {
    "phases": "phases",
    "waits": "compute waits for",
    **{str(lane): name for lane, name in LANE_NAMES.items()},
}
"""By what runs on them, in the order in which they are shown."""

_MICROSECONDS = 1e6


def to_trace(simulation: Simulation) -> dict[str, Any]:
    """The trace as a JSON object. Times are microseconds from the start of the step.

    Raises:
        ValueError: the simulation has no seconds.
    """
    if simulation.timeline is None or simulation.cluster is None:
        raise ValueError("a trace needs the speed of GPUs and links: name a cluster, such as gb200-nvl72.")
    names = [f"rank {simulation.rank} of {simulation.dims.world_size}, {simulation.cluster.name}"]
    events = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": names[0]}},
        *_thread_names(),
        *_phases(simulation.timeline.spans),
        *(
            _complete("waits", wait.axis or "the program", wait.start, wait.end, {})
            for wait in waits(simulation.timeline.spans)
        ),
        *(_span(span) for span in simulation.timeline.spans if span.task.lane is not None),
        *_memory(simulation),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _thread_names() -> Iterator[dict[str, Any]]:
    for index, name in enumerate(THREADS.values()):
        yield {"ph": "M", "pid": 0, "tid": index, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": index, "name": "thread_sort_index", "args": {"sort_index": index}}


def _phases(spans: tuple[Span, ...]) -> Iterator[dict[str, Any]]:
    """Forward, backward (with its recompute) and optimizer, one after the other on the main stream."""
    start, end = 0.0, 0.0
    phase = ""
    for span in spans:
        if not span.task.is_program:
            continue
        of_span = "backward" if span.task.phase == "recompute" else span.task.phase
        if of_span != phase:
            if phase:
                yield _complete("phases", phase, start, end, {})
            phase, start = of_span, end
        end = max(end, span.end)
    if phase:
        yield _complete("phases", phase, start, end, {})


def _span(span: Span) -> dict[str, Any]:
    task = span.task
    assert task.lane is not None
    if task.lane == "compute":
        figures = {"phase": task.phase, "TFLOP": task.amount / 1e12}
        return _complete(task.lane, task.name or "the model", span.start, span.end, figures)
    figures = {"phase": task.phase, "axis": task.axis, "GB": task.amount / GB}
    return _complete(task.lane, f"{task.axis} {task.name}", span.start, span.end, figures)


def _complete(thread: str, name: str, start: float, end: float, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": list(THREADS).index(thread),
        "name": name,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": figures,
    }


def _memory(simulation: Simulation) -> Iterator[dict[str, Any]]:
    times = simulation.times_of(simulation.memory) or []
    buckets = {bucket: None for point in simulation.memory for bucket in point.buckets}
    for seconds, point in zip(times, simulation.memory, strict=True):
        # Every series in every event: one that is left out would keep its last value.
        sizes = {bucket: point.buckets.get(bucket, 0) / GB for bucket in buckets}
        yield {"ph": "C", "pid": 0, "name": "memory, GB", "ts": seconds * _MICROSECONDS, "args": sizes}
