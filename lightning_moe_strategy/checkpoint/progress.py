"""How far a checkpoint or a copy of weights is that takes a while: a bar with bytes and their rate, on a terminal."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Called with the bytes that are done since."""

_SECONDS_UNSEEN = 2.0
"""What is over sooner shows no bar."""


@contextmanager
def progress(
    doing: str, total_bytes: int, *, is_shown: bool = True, sums_up: bool = False
) -> Generator[Advance, None, None]:
    """A bar on standard error once it has taken two seconds, gone at the end; none where that is no terminal.

    ``sums_up``: a line with bytes, seconds and rate at the end, wherever standard error goes.
    """
    start = time.perf_counter()
    if is_shown and sys.stderr.isatty():
        with _bar(doing, total_bytes) as advance:
            yield advance
    else:
        yield lambda num_bytes: None
    seconds = time.perf_counter() - start
    if is_shown and sums_up:
        print(f"{doing}: {size(total_bytes)} in {seconds:.1f} s, {size(total_bytes / seconds)}/s", file=sys.stderr)


def size(num_bytes: float) -> str:
    """In the unit that leaves one to three digits before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


@contextmanager
def _bar(doing: str, total_bytes: int) -> Generator[Advance, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(doing, total=total_bytes)
    start = time.monotonic()

    def advance(num_bytes: int) -> None:
        bar.advance(task, num_bytes)
        if not bar.live.is_started and time.monotonic() - start > _SECONDS_UNSEEN:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
