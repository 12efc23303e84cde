"""One outcome for all ranks that save or read a checkpoint: what is wrong on one of them is raised on every one."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.host_agreement import sum_over_hosts

_Result = TypeVar("_Result")


def together(where: str, action: Callable[[], _Result], group: dist.ProcessGroup | None) -> _Result:
    """Its result, if the ``action`` of every rank has one. ``group``: exchanges tensors of the CPU; None: one process.

    Raises:
        CheckpointError: on every rank, in the words of the first that failed.
    """

    def told(words: list[str | None], failed: list[int]) -> str:
        prefix = "" if len(failed) == len(words) else f"On rank {', '.join(map(str, failed))}: "
        return f"{prefix}{words[failed[0]]}"

    return one_outcome(action, lambda error: _explained(where, error), told, group)


def one_outcome(
    action: Callable[[], _Result],
    explain: Callable[[Exception], str],
    told: Callable[[list[str | None], list[int]], str],
    group: dist.ProcessGroup | None,
) -> _Result:
    """The result of ``action``. An error is put into words by ``explain``; ``told`` makes of everyone's words, and the
    ranks that have some, what all of them raise.

    Raises:
        CheckpointError: on every rank, if one has an error.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as reason:
        error = reason
    num_failed = int(error is not None)
    if group is not None:
        (num_failed,) = sum_over_hosts([num_failed], group)
    if not num_failed:
        return result
    words: list[str | None] = [None if error is None else explain(error)]
    if group is not None:
        words = words * group.size()
        dist.all_gather_object(words, words[group.rank()], group=group)
    failed = [rank for rank, said in enumerate(words) if said is not None]
    raise CheckpointError(told(words, failed)) from error


def _explained(where: str, error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    said = f"checkpoint({where!r}) could not be read, {type(error).__name__}: {error}."
    if isinstance(error, PermissionError):
        return f"{said} Let the user who runs this read it: chmod -R u+rX."
    return f"{said} Look at the file system, or use another checkpoint."
