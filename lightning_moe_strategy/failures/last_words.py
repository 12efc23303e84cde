"""How the process of a run that failed ends: what it prints, what its launcher reads, and that it ends at all."""

import contextlib
import faulthandler
import json
import os
import sys
from typing import Any, NoReturn

from lightning_moe_strategy.failures.board import Failure


def say(words: str) -> None:
    """On the terminal, at once."""
    with contextlib.suppress(OSError, ValueError):
        print(words, file=sys.stderr, flush=True)


def exit_now() -> NoReturn:
    """With exit code 1, whatever the main thread does."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


_nowhere: Any = None


def end_process_after(seconds: float) -> None:
    """Unless ``stay_alive`` is called until then.

    By a thread of C: it needs no lock of Python's, and no main thread that comes back.
    """
    global _nowhere
    _nowhere = open(os.devnull, "w")
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere)


def stay_alive() -> None:
    faulthandler.cancel_dump_traceback_later()


def tell_launcher(first: Failure, rank: int, host: str, words: str) -> None:
    """torchrun shows, of the ranks of a host, the error with the earliest time in these files."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    is_first = first.rank == rank
    shown = first.traceback if first.kind == "error" else words
    if first.host == host and first.kind == "error" and not is_first:
        shown = f"ended, as rank {first.rank} failed first"
    extra = {"py_callstack": shown, "timestamp": str(int(first.seconds) + int(not is_first))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": f"rank {first.rank}: {first.summary}", "extraInfo": extra}}, file)
