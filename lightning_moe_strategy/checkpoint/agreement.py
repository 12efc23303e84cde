"""One outcome for all ranks that read a checkpoint: what is wrong on one of them is raised on every one."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_moe_strategy.checkpoint.errors import CheckpointError

_Result = TypeVar("_Result")


def together(where: str, action: Callable[[], _Result], group: dist.ProcessGroup | None) -> _Result:
    """Its result, if the ``action`` of every rank has one. ``group``: exchanges tensors of the CPU; None: one process.

    Raises:
        CheckpointError: on every rank, in the words of the first that failed.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as reason:
        error = reason
    words: list[str | None] = [None if error is None else _explained(where, error)]
    if group is not None:
        words = words * group.size()
        dist.all_gather_object(words, words[group.rank()], group=group)
    failed = [rank for rank, said in enumerate(words) if said is not None]
    if not failed:
        return result
    prefix = "" if len(failed) == len(words) else f"On rank {', '.join(map(str, failed))}: "
    raise CheckpointError(f"{prefix}{words[failed[0]]}") from error


def _explained(where: str, error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    said = f"checkpoint({where!r}) could not be read, {type(error).__name__}: {error}."
    if isinstance(error, PermissionError):
        return f"{said} Let the user who runs this read it: chmod -R u+rX."
    return f"{said} Look at the file system, or use another checkpoint."
