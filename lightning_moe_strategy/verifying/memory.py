"""Whether this machine can hold a module as often as the check needs it, asked before it is built."""

import os
from pathlib import Path

from torch import nn

COPIES_OF_A_PROCESS = 4
"""Weights, gradients and two moments of an optimizer."""


def bytes_of(module: nn.Module) -> int:
    """Of parameters and buffers, on whatever device; tied ones once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def require_memory(module_bytes: int, num_ranks: int, *, available: int | None = None) -> None:
    """ValueError, with how to shrink the module, where ``num_ranks`` and one process more could not hold it.

    Every rank puts whole gradients together one after another, so that each is counted as a process of its own.
    ``available`` None asks the machine.
    """
    available = available_bytes() if available is None else available
    needed = module_bytes * (num_ranks + 1) * COPIES_OF_A_PROCESS
    if needed <= available:
        return
    raise ValueError(
        f"The module takes {_text(module_bytes)}, and {num_ranks} ranks and one process hold it {COPIES_OF_A_PROCESS} "
        f"times each (weights, gradients, two moments): {_text(needed)}, of which this machine has {_text(available)}. "
        "Shrink it: fewer layers, experts and channels show the same faults. Command line: --model.init_args.NAME "
        "VALUE overrides what the file says, as --model.init_args.model.layers 2."
    )


def available_bytes() -> int:
    """What the machine, or the container this runs in, can still give."""
    return min([_of_machine(), *_of_container()])


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux: all there is, then
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024


def _of_container() -> list[int]:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
        return [] if limit == "max" else [max(0, int(limit) - int(used))]
    except (OSError, ValueError):
        return []


def _text(num_bytes: int) -> str:
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:,.1f} MB"
    return f"{num_bytes / 1e9:,.1f} GB"
