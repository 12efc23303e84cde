"""The seconds of a step: compute, and what it waits for, from the order in which the step issues its work.

Elementwise operations take no time of their own: the achieved rate of a cluster is that of whole training runs.
Latencies of collectives are left out.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import Group
from lightning_moe_strategy.simulation.issue import Issue
from lightning_moe_strategy.simulation.schedule import LANES, Lane, Span, schedule
from lightning_moe_strategy.simulation.streams import tasks_of


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Predicted times of one step of one rank: ``step == compute + sum(exposed.values())``."""

    step: float
    compute: float
    exposed: Mapping[str, float]
    """By axis, longest first: what compute waits for. What runs behind compute is not in it."""
    busy: Mapping[Lane, float]
    """By lane; what overlaps is in several of them."""
    tokens_per_second_per_gpu: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What runs when."""

    seconds: StepSeconds
    spans: tuple[Span, ...]
    """In the order of issue, those that take no lane included."""

    def times_of_moments(self, moments: Sequence[int]) -> list[float]:
        """Seconds at which the memory of these moments is allocated: when what needs it starts."""
        program = [span for span in self.spans if span.task.is_program]
        known = [span.task.moment for span in program]
        indices = [bisect_left(known, moment) for moment in moments]
        return [program[i].start if i < len(program) else self.seconds.step for i in indices]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A stretch in which nothing is computed."""

    axis: str
    start: float
    end: float


def time_step(
    issues: Sequence[Issue], *, cluster: Cluster, links: Mapping[str, Group], tokens_per_gpu: float
) -> Timeline:
    """Run a step's work on the lanes of one GPU. ``links``: how far each axis reaches over NVLink domains."""
    spans = schedule(tasks_of(issues, cluster, links))
    busy: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    for span in spans:
        if span.task.lane is not None:
            busy[span.task.lane] += span.task.seconds
    exposed: defaultdict[str, float] = defaultdict(float)
    for wait in waits(spans):
        exposed[wait.axis] += wait.end - wait.start
    step = max((span.end for span in spans), default=0.0)
    return Timeline(
        spans=tuple(spans),
        seconds=StepSeconds(
            step=step,
            compute=busy["compute"],
            exposed=dict(sorted(exposed.items(), key=lambda item: -item[1])),
            busy=busy,
            tokens_per_second_per_gpu=tokens_per_gpu / step if step else 0.0,
        ),
    )


def waits(spans: Sequence[Span]) -> list[Wait]:
    """Every stretch in which compute stands still, with the axis of the collective it waits for."""
    found: list[Wait] = []
    now = 0.0
    for span in spans:
        if not span.task.is_program:
            continue
        if span.task.axis:
            axis, end = span.task.axis, span.end
        else:
            last = max((spans[index] for index in span.task.after), key=lambda before: before.end, default=span)
            axis, end = last.task.axis, span.start
        if end > now:
            found.append(Wait(axis=axis, start=now, end=end))
        now = max(now, span.end)
    return found
