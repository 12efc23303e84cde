"""Where FSDP makes compute wait: private names of torch, each with the versions it was seen in."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

GroupStep = Literal["unshard", "wait_for_unshard", "post_backward", "finalize_backward"]
"""What FSDP does for one unit: issue a gather, copy it out, reduce gradients, end a backward pass."""

_STEPS: tuple[GroupStep, ...] = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")

Waiting = Callable[[], AbstractContextManager[object]]


@contextmanager
def watched_steps(group: Any, around: Callable[[GroupStep, Callable[[], Any]], Any]) -> Generator[None, None, None]:
    """Have ``around(step, run)`` run each step of one parameter group. Seen in torch 2.11-2.13.

    Of this instance alone, so that who watches the class (`_torch_compat.watched_units`) may begin and end as it likes.
    """

    def watched(step: GroupStep) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return around(step, lambda: getattr(type(group), step)(group, *args, **kwargs))

        return run

    for step in _STEPS:
        group.__dict__[step] = watched(step)
    try:
        yield
    finally:
        for step in _STEPS:
            group.__dict__.pop(step, None)


@contextmanager
def watched_collectives(group: Any, waiting: Waiting) -> Generator[None, None, None]:
    """Enter ``waiting()`` around the gathers and reduce-scatters of one parameter group that block the host, as gloo's
    do. Seen in torch 2.11-2.13.
    """
    originals = {name: getattr(group, name) for name in _COLLECTIVES}
    for name, original in originals.items():
        setattr(group, name, _Watched(original, waiting))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


class _Watched:
    """In place of FSDP's ``AllGather`` or ``ReduceScatter``."""

    def __init__(self, collective: Any, waiting: Waiting) -> None:
        self._collective, self._waiting = collective, waiting
        self.allocate = collective.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            return self._collective(*args, **kwargs)
        with self._waiting():
            return self._collective(*args, **kwargs)


@contextmanager
def watched_all_reduces(waiting: Waiting) -> Generator[None, None, None]:
    """Enter ``waiting()`` around every ``dist.all_reduce``: how FSDP sums replicas. Seen in torch 2.11-2.13."""
    all_reduce = dist.all_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        with waiting():
            return all_reduce(*args, **kwargs)

    with _replaced(dist, "all_reduce", all_reduce, watched):
        yield


@contextmanager
def watched_stream_waits(device_type: str, waiting: Waiting) -> Generator[None, None, None]:
    """Enter ``waiting()`` where the current stream is made to wait for an event. Seen in torch 2.11-2.13."""
    handle = getattr(torch, device_type)
    wait_event = handle.Stream.wait_event

    def watched(stream: Any, event: Any) -> None:
        if stream != handle.current_stream():
            wait_event(stream, event)
            return
        with waiting():
            wait_event(stream, event)

    with _replaced(handle.Stream, "wait_event", wait_event, watched):
        yield


@contextmanager
def _replaced(owner: Any, name: str, original: Any, replacement: Any) -> Generator[None, None, None]:
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:  # what somebody has put over it since is theirs
            setattr(owner, name, original)


def gather_is_pending(group: Any) -> bool:
    """Whether a parameter group's gather was issued and not waited for. Seen in torch 2.11-2.13."""
    return group._all_gather_result is not None


def pending_work(group: Any) -> dist.Work | None:
    """The work of a pending gather that was issued as asynchronous. Seen in torch 2.11-2.13."""
    result = group._all_gather_result
    return None if result is None else result.all_gather_work
