"""The processes of the ranks on this host: whether each is there, as far as another process can see."""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Literal

State = Literal["runs", "stopped", "gone", "unknown"]
"""``unknown``: on another host, or without ``/proc``."""
_NOT_THERE = ("", "Z", "X")
"""States of ``/proc`` in which a process has ended."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """The process of one rank."""

    host: str
    process: int
    begun: str
    """What tells it from a later process of the same number: its start in ticks since the machine started."""

    @classmethod
    def here(cls) -> "Member":
        return cls(host=socket.gethostname(), process=os.getpid(), begun=_stat(os.getpid())[1])

    def state(self) -> State:
        """Of a process on this host."""
        if not self.begun:
            return "unknown"
        letter, begun = _stat(self.process)
        if begun != self.begun or letter in _NOT_THERE:
            return "gone"
        return "stopped" if letter in ("T", "t") else "runs"

    def kill(self) -> None:
        """Of a process on this host."""
        if self.state() in ("runs", "stopped"):
            with suppress(OSError):
                os.kill(self.process, signal.SIGKILL)


def _stat(process: int) -> tuple[str, str]:
    """State and start of a process, from ``/proc``; empty where it is not there."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Neighbours:
    """The ranks of this host, as one of them sees the others."""

    def __init__(self, rank: int, *, ranks: range, children: Sequence[Popen[Any]]) -> None:
        """``ranks`` of this host; ``children``: those that this process has started, the ranks that follow its own."""
        self.rank, self.ranks, self._children = rank, ranks, children
        self.members: Mapping[int, Member] = {}
        """Those that have joined."""
        self._parent = os.getppid()
        self._seen_to_end: dict[int, float] = {}

    @property
    def turn(self) -> int:
        """How many ranks of this host come before this one."""
        return self.ranks.index(self.rank)

    def states(self) -> dict[int, State]:
        return {rank: member.state() for rank, member in self.members.items()}

    def ended(self, *, for_seconds: float) -> dict[int, str]:
        """Ranks that ended so long ago, and not by coming to their end: how, each time it is asked."""
        ended = self._ended_children() if self._children else self._ended_others()
        now = time.monotonic()
        since = {rank: self._seen_to_end.setdefault(rank, now) for rank in ended}
        return {rank: how for rank, how in ended.items() if now - since[rank] >= for_seconds}

    def end_children(self, *, after_seconds: float) -> None:
        """Those that have not ended by themselves until then. They end, so that none is left."""
        until = time.monotonic() + after_seconds
        for child in self._children:
            with suppress(TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
        for child in self._children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def _ended_children(self) -> dict[int, str]:
        codes = {self.rank + number: child.poll() for number, child in enumerate(self._children, start=1)}
        return {rank: self._named(rank, _ending(code)) for rank, code in codes.items() if code}

    def _ended_others(self) -> dict[int, str]:
        parent = self.members.get(self.ranks[0])
        # Which knows how its children ended, and tells it.
        known = [self.ranks[0]] if parent is not None and parent.process == self._parent else list(self.members)
        gone = [rank for rank in known if rank != self.rank and self.members[rank].state() == "gone"]
        return {rank: self._named(rank, "was killed or crashed") for rank in gone}

    def _named(self, rank: int, how: str) -> str:
        member = self.members.get(rank)
        return f"its process {how}" if member is None else f"process {member.process} {how}"


def _ending(code: int) -> str:
    """An exit code as ``subprocess`` has it."""
    if code > 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}"


_LAUNCHER_VARIABLE = "LIGHTNING_MOE_LAUNCHER"
_END_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux."""


def tie_to_launcher(*, starts_ranks: bool) -> None:
    """Until ``untie_from_launcher``, a rank that another rank's process starts ends with it.

    It would wait for the store in that process, until the timeout. Called in both: by the one that ``starts_ranks``
    before it does.
    """
    if starts_ranks:
        os.environ[_LAUNCHER_VARIABLE] = str(os.getpid())
    elif launcher := _launcher():
        if os.getppid() == launcher:
            _set_end_with_parent(signal.SIGKILL)
        if _stat(os.getpid())[0] and _stat(launcher)[0] in _NOT_THERE:
            os._exit(1)


def untie_from_launcher() -> None:
    """From now on it is seen, and said, how that process ends."""
    if _launcher():
        _set_end_with_parent(0)


def _launcher() -> int:
    """The process that started this rank, if another rank's did; else 0."""
    launcher = int(os.environ.get(_LAUNCHER_VARIABLE, 0))
    is_rank_0 = os.environ.get("LOCAL_RANK", "0") == "0"  # or a program that it has run
    return 0 if is_rank_0 or launcher == os.getpid() else launcher


def _set_end_with_parent(signal_number: int) -> None:
    with suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal_number)
