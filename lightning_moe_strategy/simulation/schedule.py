"""Who runs when, on lanes that do one thing at a time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "nvlink", "rdma"]
LANE_NAMES: dict[Lane, str] = {"compute": "compute", "nvlink": "NVLink", "rdma": "RDMA"}
LANES = tuple(LANE_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work. ``after``: indices of earlier tasks that end before it starts."""

    lane: Lane | None
    """None for a moment on the way: it takes no time and no lane."""
    seconds: float = 0.0
    after: tuple[int, ...]
    name: str = ""
    axis: str = ""
    """Of the mesh, for what a collective moves."""
    phase: str
    moment: int = 0
    """On the clock of ``MemoryWatch``."""
    is_program: bool
    """One after the other on the GPU's main stream, in the order of the program."""
    amount: int = 0
    """FLOP of compute, bytes of a collective's larger buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task with its seconds from the start of the step."""

    task: Task
    start: float
    end: float


def schedule(tasks: Sequence[Task]) -> list[Span]:
    """When each task runs: as soon as what it waits for has ended, its lane first come, first served."""
    waiting = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(index)
    ready = [(0.0, index) for index, count in enumerate(waiting) if not count]
    ready_at = [0.0] * len(tasks)
    free_at: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    spans: dict[int, Span] = {}
    heapq.heapify(ready)
    while ready:
        # Popped in the order of readiness: what becomes ready later cannot have been ready before.
        start, index = heapq.heappop(ready)
        task = tasks[index]
        if task.lane is not None:
            start = max(start, free_at[task.lane])
            free_at[task.lane] = start + task.seconds
        spans[index] = Span(task=task, start=start, end=start + task.seconds)
        for follower in followers[index]:
            ready_at[follower] = max(ready_at[follower], start + task.seconds)
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (ready_at[follower], follower))
    return [spans[index] for index in range(len(tasks))]
