"""What a run that failed says: who failed first, who waited where, who is missing, and what to do. Words only."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_moe_strategy.failures.board import Failure
from lightning_moe_strategy.failures.neighbours import Member, State
from lightning_moe_strategy.failures.position import Position, is_timeout, ranks_in_words

Verdict = Literal["open", "together", "failed", "gone", "hang", "broken"]
"""``together``: every rank raised an error of its own, and a program may go on after it. ``broken``: a connection broke
and nobody is missing."""

REPORT_WIDTH = 100
_GONE = (
    "A process that ends without a word was killed (by the kernel when the machine ran out of memory: see "
    "`dmesg | grep -i 'killed process'`; by SLURM or Kubernetes at a memory limit) or crashed in native code (run it "
    "again with PYTHONFAULTHANDLER=1)."
)
_HANG = (
    "Look at the missing ranks first: the others only wait for them. Where they are slow and not stuck, raise the "
    "strategy's timeout(...)."
)
_DESYNC = (
    "Every rank is in a collective, but not in the same one: what they do must not depend on their data or their rank."
)
_BROKEN = "No rank is missing: the network between these ranks broke, or a rank closed its connections by itself."


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a failed run."""

    world_size: int
    failures: Sequence[Failure] = ()
    """In the order in which they were published."""
    positions: Mapping[int, Position] = field(default_factory=dict)
    """Where the ranks stand that have not failed."""
    members: Mapping[int, Member] = field(default_factory=dict)
    states: Mapping[int, State] = field(default_factory=dict)
    """Of the processes on the host of who looks."""
    asked: Collection[int] | None = None
    """Ranks that could have said something; None: all."""
    timeout_seconds: float | None = None

    @property
    def first(self) -> Failure | None:
        """What everything else follows from: an error or the end of one rank, else a collective."""
        for kinds in (("error", "gone"), ("relayed",), ("hang", "collective")):
            found = [failure for failure in self.failures if failure.kind in kinds]
            if found:
                # Who lost a connection failed after who ran out of time: that one has closed it.
                return min(found, key=lambda each: "hang" in kinds and not is_timeout([each.summary]))
        return None

    def failure_of(self, rank: int) -> Failure | None:
        """How a rank failed, in its own words."""
        return next((failure for failure in self.failures if failure.rank == rank), None)

    @property
    def silent(self) -> list[int]:
        """Ranks that have said nothing."""
        heard = {failure.rank for failure in self.failures} | set(self.positions)
        asked = range(self.world_size) if self.asked is None else self.asked
        return sorted(set(asked) - heard)

    @property
    def where(self) -> dict[int, Position]:
        """Each rank's last position."""
        failed = {failure.rank: failure.position for failure in self.failures if failure.kind != "gone"}
        return dict(self.positions) | failed

    def verdict(self) -> Verdict:
        """What kind of end it is; ``open`` while nobody failed."""
        first = self.first
        if first is None:
            return "open"
        own = {failure.rank for failure in self.failures if failure.kind in ("error", "relayed")}
        if len(own) == self.world_size:
            return "together"
        if first.kind in ("error", "relayed"):
            return "failed"
        if first.kind == "gone":
            return "gone"
        waits = is_timeout([first.summary]) or first.kind == "hang"
        return "hang" if waits or self.silent else "broken"


def notice(first: Failure, world_size: int) -> str:
    """One line, before the error itself."""
    kind = first.summary.partition(":")[0]
    place = f" at {first.place}" if first.place else ""
    return f"Rank {first.rank} of {world_size} failed first, with {kind}{place}. All ranks end; its error follows."


def report(evidence: Evidence) -> str:
    """The last words of a run, for a host on which the first error was not raised."""
    first, verdict = evidence.first, evidence.verdict()
    if first is None:
        return ""
    lines = ["-" * REPORT_WIDTH, *_said[verdict](evidence, first), "-" * REPORT_WIDTH]
    return "\n".join(lines)


def _failed(evidence: Evidence, first: Failure) -> list[str]:
    place = f" at {first.place}" if first.place else ""
    title = f"Rank {first.rank} of {evidence.world_size} failed first, on host {first.host}{place}:"
    return [title, "", first.traceback.rstrip() or first.summary]


def _gone(evidence: Evidence, first: Failure) -> list[str]:
    gone = [failure for failure in evidence.failures if failure.kind == "gone"]
    lines = [f"Rank {each.rank} of {evidence.world_size} is gone: {each.summary} on host {each.host}." for each in gone]
    waiting = {rank: position for rank, position in evidence.where.items() if position.collective}
    return [*lines, *_listed("waited for it", waiting), _GONE]


def _hang(evidence: Evidence, first: Failure) -> list[str]:
    limit = "" if evidence.timeout_seconds is None else f" within timeout={evidence.timeout_seconds:g} s"
    position = first.position
    what = position.in_words() if position.collective else first.summary
    lines = [f"A collective did not end{limit}: {what}."]
    where = evidence.where
    waiting = {rank: position for rank, position in where.items() if position.collective}
    outside = {rank: position for rank, position in where.items() if not position.collective}
    lines += _listed("waiting", waiting)
    lines += _listed("missing", outside)
    for rank in evidence.silent:
        lines.append(f"  missing  rank {rank}: {_process(rank, evidence)}")
    return [*lines, _HANG if outside or evidence.silent else _DESYNC]


def _broken(evidence: Evidence, first: Failure) -> list[str]:
    position = first.position
    title = f"Rank {first.rank} of {evidence.world_size} lost its connection in {position.in_words()}: {first.summary}"
    return [title, *_listed("waiting", evidence.where), _BROKEN]


_said = {"together": _failed, "failed": _failed, "gone": _gone, "hang": _hang, "broken": _broken}


def _process(rank: int, evidence: Evidence) -> str:
    member = evidence.members.get(rank)
    if member is None:
        return "it never joined"
    place = f"process {member.process} on host {member.host}"
    state = evidence.states.get(rank, "unknown")
    says = {
        "stopped": f"{place} is stopped (SIGSTOP, Ctrl-Z, a debugger)",
        "runs": f"{place} runs, and does not answer: it holds Python's lock, or its machine is very busy",
        "gone": f"{place} is gone",
        "unknown": f"{place} does not answer",
    }
    return says[state]


def _listed(word: str, positions: Mapping[int, Position]) -> list[str]:
    """Ranks that stand at the same place share a line."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, position in sorted(positions.items()):
        ranks[position.in_words()].append(rank)
    return [f"  {word}  {ranks_in_words(same)}: {place}" for place, same in ranks.items()]
