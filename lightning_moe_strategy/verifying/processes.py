"""Processes forked from this one: what they share is not built again, and none of them outlives the check."""

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

_POLL_SECONDS = 0.02
_OTHERS_SECONDS = 0.5
"""After the first failure, for the errors of the others: the earliest is the one to show."""
_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "LSB_", "MASTER_")
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")


class ForkedProcesses:
    """A ``with`` block whose processes are gone when it is left, whatever ends it; so are theirs (loader workers).

    What they print goes to files in ``folder``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[int, str] = {}

    def __enter__(self) -> "ForkedProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self._running:
            for kill in (os.killpg, os.kill):  # it may not have its group yet
                _kill(kill, pid)
        for pid in self._running:
            os.waitpid(pid, 0)
        self._running.clear()

    def start(self, name: str, work: Callable[[], None], environment: Mapping[str, str]) -> None:
        """Run ``work`` in a process of its own, with one thread and nothing of another launcher in its environment."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_child(self.folder, name, work, environment, parent)
        self._running[pid] = name

    def wait(self) -> None:
        """Until all have ended. ValueError or RuntimeError, with the error of the process that failed first."""
        while self._running:
            failed = self._reap()
            if failed:
                self._raise(failed)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> dict[str, int]:
        """Names and statuses of those that have failed since."""
        failed = {}
        for pid, name in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill(os.killpg, pid)  # what it started
                del self._running[pid]
                if status:
                    failed[name] = status
        return failed

    def _raise(self, failed: dict[str, int]) -> NoReturn:
        until = time.monotonic() + _OTHERS_SECONDS
        while self._running and time.monotonic() < until:
            failed |= self._reap()
            time.sleep(_POLL_SECONDS)
        errors = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.error"))]
        killed = [name for name, status in failed.items() if os.WIFSIGNALED(status)]
        if killed or not errors:  # a signal follows from nothing that another process does
            name = (killed or list(failed))[0]
            status = failed[name]
            how = f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "gone"
            raise RuntimeError(f"{name} was {how}, without an error of its own. {_tail(self.folder / f'{name}.log')}")
        first = min(errors, key=lambda error: error["time"])
        kind = ValueError if first["is_of_user"] else RuntimeError
        error = kind(f"{first['name']}: {first['message']}")
        error.add_note(first["traceback"])
        raise error


def _be_child(
    folder: Path, name: str, work: Callable[[], None], environment: Mapping[str, str], parent: int
) -> NoReturn:
    status = 1
    try:
        # A group of its own: Ctrl-C reaches the parent alone, which ends this one and what it started.
        os.setsid()
        _redirect(folder / f"{name}.log")
        threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
        for key in [key for key in os.environ if key in _OF_RANKS or key.startswith(_OF_LAUNCHERS)]:
            del os.environ[key]
        os.environ.update(environment)
        torch.set_num_threads(1)  # a team of threads does not live through a fork
        work()
        status = 0
    except BaseException as error:
        described = {
            "name": name,
            "time": time.time(),
            "is_of_user": isinstance(error, ValueError | TypeError),
            "message": str(error) or type(error).__name__,
            "traceback": traceback.format_exc(),
        }
        part = folder / f"{name}.part"
        part.write_text(json.dumps(described))
        part.rename(folder / f"{name}.error")
    finally:
        os._exit(status)


def _redirect(path: Path) -> None:
    """All that this process and its libraries print."""
    file = path.open("w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file


def _end_with(parent: int, folder: Path) -> None:
    """Nothing waits for this process any more when its parent is gone, and nobody else removes the folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
    return "It last said: " + " | ".join(lines) if lines else ""
