"""Find the run below the folder that a user names."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("metrics.csv", "run.json", "expert_load.jsonl", "receipt.jsonl")
EVENTS = "events.out.tfevents.*"
"""TensorBoard's, several in one folder after a resume."""
MAX_DEPTH = 3
"""``default_root_dir/lightning_logs/version_0`` is two deep; a logger's own name may be a path."""


class ReportError(ValueError):
    """There is nothing to report on, or no place to report to. One line: name, value, rule, remedy."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """One run's files."""

    path: Path
    others: tuple[str, ...] = ()
    """Other runs below the folder that was given, by their names in it."""


def find_run(given: Path) -> RunFolder:
    """``given`` where it holds a run's metrics, else the highest version of the place below it that was used last.

    Raises:
        ReportError: no folder, or no run in it.
    """
    if not given.is_dir():
        reason = "is a file" if given.exists() else "does not exist"
        raise ReportError(f"run_dir({str(given)!r}) {reason}. Give a run's folder: default_root_dir, or its version_N.")
    runs = [Path(folder) for folder in _runs_below(given)]
    if not runs:
        raise ReportError(
            f"run_dir({str(given)!r}) holds no run: there is no {', '.join(SOURCES)} or {EVENTS} in it, nor "
            f"{MAX_DEPTH} folders deep. Give the Trainer's default_root_dir, or the save_dir of its logger."
        )
    used_last = {run.parent: max(_modified(each) for each in runs if each.parent == run.parent) for run in runs}
    # Of a default_root_dir that holds little more than other runs the newest is meant, not itself.
    is_meant = {run: run == given and _has_metrics(run) for run in runs}
    runs.sort(key=lambda run: (is_meant[run], used_last[run.parent], _version(run), _modified(run)), reverse=True)
    return RunFolder(path=runs[0], others=tuple(str(run.relative_to(given)) for run in runs[1:]))


def _runs_below(given: Path) -> Iterator[str]:
    for folder, below, names in os.walk(given):
        depth = len(Path(folder).relative_to(given).parts)
        is_run = bool(set(SOURCES) & set(names)) or any(name.startswith(EVENTS[:-1]) for name in names)
        if is_run:
            yield folder
        # TensorBoard has folders of its own inside of a run, checkpoints are folders of a thousand files.
        is_over = depth >= MAX_DEPTH or (is_run and depth > 0)
        below[:] = [] if is_over else sorted(name for name in below if not name.startswith(".") and ".ckpt" not in name)


def _has_metrics(run: Path) -> bool:
    return (run / "metrics.csv").is_file() or any(run.glob(EVENTS))


def _modified(run: Path) -> float:
    files = [*(run / name for name in SOURCES), *run.glob(EVENTS)]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _version(run: Path) -> int:
    found = re.fullmatch(r".*?(\d+)", run.name)
    return int(found[1]) if found else -1
