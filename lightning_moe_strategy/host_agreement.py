"""What the hosts of all ranks agree on in passing: counts that are added up, an error of one that every one raises.

A few integers in one all-reduce over gloo, on the CPU: no stream of a GPU is waited for, and none waits. What it
costs is the way between the hosts, and that the fastest host waits for the slowest (docs/data.md has measurements).
Every rank calls each function, in the same order.
"""

import atexit
import contextlib
import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

_RAISED_AS_THEY_ARE: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)
}
"""Errors that other ranks raise with the same type. The rest may need arguments that a message does not have."""

_RAISED_BY = "_raised_by_rank"


def host_group(timeout: timedelta) -> dist.ProcessGroup:
    """All ranks, in a group that exchanges tensors of the CPU."""
    world = dist.group.WORLD
    assert world is not None
    return _gloo_beside(world, timeout) if dist.get_backend(world) == "nccl" else world


@functools.cache
def _gloo_beside(world: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Made once for a world: it has threads and connections of its own."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    atexit.register(_end, group)  # gloo's threads may abort a process that just ends
    return group


def _end(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError, AssertionError):  # the user has ended all groups already
        dist.destroy_process_group(group)


def sum_over_hosts(counts: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Each count, added up over the ranks of the group."""
    return _reduce(counts, dist.ReduceOp.SUM, group)


def max_over_hosts(counts: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each count over the ranks of the group."""
    return _reduce(counts, dist.ReduceOp.MAX, group)


def _reduce(counts: Sequence[int], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> list[int]:
    total = torch.tensor(counts, dtype=torch.int64, device="cpu")
    dist.all_reduce(total, op=operation, group=group)
    reduced: list[int] = total.tolist()
    return reduced


def ranks_that(is_so: bool, group: dist.ProcessGroup) -> list[int]:
    """Ranks on which something is so, in order."""
    answers: list[bool] = [False] * group.size()
    dist.all_gather_object(answers, is_so, group=group)
    return [rank for rank, answer in enumerate(answers) if answer]


def rank_that_raised(error: BaseException) -> int | None:
    """The first rank that had the error, of one that every rank raises; None of any other error."""
    rank: int | None = error.__dict__.get(_RAISED_BY)
    return rank


def raise_together(error: Exception | None, group: dist.ProcessGroup, doing: str) -> None:
    """Nothing when no rank has an error; else every rank raises, see ``raise_everywhere``."""
    if sum_over_hosts([error is not None], group)[0]:
        raise_everywhere(error, group, doing)


def raise_everywhere(error: Exception | None, group: dist.ProcessGroup, doing: str) -> NoReturn:
    """Raise the error of the first rank that has one, on the others with that rank before its words.

    Where all ranks have one, each raises its own. ``doing``: what failed; a note of the error says it.
    """
    answers: list[tuple[str, str] | None] = [None] * group.size()
    dist.all_gather_object(answers, None if error is None else (type(error).__name__, str(error)), group=group)
    failed = [rank for rank, answer in enumerate(answers) if answer is not None]
    first = answers[failed[0]]
    assert first is not None
    told = error
    if told is None or (failed[0] != group.rank() and len(failed) < group.size()):
        kind, words = first
        raised_as = _RAISED_AS_THEY_ARE.get(kind)
        where = f"On rank {failed[0]}: "
        told = RuntimeError(f"{where}{kind}: {words}") if raised_as is None else raised_as(f"{where}{words}")
    told.__dict__[_RAISED_BY] = failed[0]
    told.add_note(f"Raised on every rank: rank {', '.join(map(str, failed))} failed while {doing}.")
    if told is error:
        raise told
    raise told from error
