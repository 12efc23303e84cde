"""Options of an optimizer that a checkpoint does not know, because something added them after it was saved.

A scheduler adds ``initial_lr`` to every parameter group. torch.distributed.checkpoint refuses to load an optimizer
that has one option more than was saved; ``torch.load`` would simply keep it.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim import Optimizer

_OPTION = "initial_lr"


@contextmanager
def kept_from_loading(optimizers: Sequence[Optimizer], path: Path) -> Generator[None, None, None]:
    """Inside, ``initial_lr`` is out of the parameter groups, if the directory ``path`` has none; then it is back."""
    kept = []
    for index, optimizer in enumerate(optimizers):
        if path.is_dir() and not _knows(path, f"optimizer_{index}."):
            kept += [(group, group.pop(_OPTION)) for group in optimizer.param_groups if _OPTION in group]
    try:
        yield
    finally:
        for group, value in kept:
            group[_OPTION] = value


def _knows(path: Path, prefix: str) -> bool:
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    return any(key.startswith(prefix) and key.endswith(f".{_OPTION}") for key in keys)
