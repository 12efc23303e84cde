"""One rank that fails ends all, within seconds, and the first error is what is shown.

A thread of every rank asks the store twice a second whether a rank has failed, and looks whether the processes beside
it are there. When one has, each says where it stands; who failed first shows its error, the others end without theirs,
and a collective that nobody ended is named with the ranks that are missing. This works where a rank's main thread can
do nothing any more: it waits inside gloo, NCCL or CUDA. A step pays nothing for it.
"""

import atexit
import os
import sys
import threading
import time
import traceback as tracebacks
import uuid
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer, take_over_children
from lightning_moe_strategy.failures.board import Board, Failure, Kind
from lightning_moe_strategy.failures.last_words import end_process_after, exit_now, say, stay_alive, tell_launcher
from lightning_moe_strategy.failures.neighbours import Member, Neighbours, untie_from_launcher
from lightning_moe_strategy.failures.position import (
    Position,
    Standstill,
    is_of_collective,
    position_of_error,
    position_of_thread,
    summary_of,
)
from lightning_moe_strategy.failures.report import Evidence, notice, report
from lightning_moe_strategy.host_agreement import rank_that_raised
from lightning_moe_strategy.placed_strategy import PlacedStrategy

CALM_INTERVAL, BUSY_INTERVAL = 0.5, 0.1
"""Seconds between two looks: of a run that is well, of one that has failed."""
PATIENCE = 2.0
"""Seconds in which every rank must say where it stands; who has not is missing."""
TURN = 0.15
"""Seconds that each rank of a host leaves to the one after it, to be the one that speaks."""
TIME_TO_LEAVE, TIME_TO_CLOSE = 0.5, 3.0
"""Seconds after the verdict in which a main thread may end by itself: one that waits, one that closes loggers."""
HARD_LIMIT = 7.0
"""Seconds after which a process of a failed run ends, whatever its threads do."""
STORE_TIMEOUT = timedelta(seconds=20)

_watch: "FailureWatch | None" = None


def watch_failures(strategy: PlacedStrategy, *, is_new: bool) -> None:
    """End this rank's run when another rank fails, and show what failed first.

    Every rank calls it when its process group exists, before each run of a Trainer. ``is_new``: the group was made for
    this Trainer just now. A group that a program made by itself is not watched: its store may be of any kind.
    """
    global _watch
    if is_new and dist.get_world_size() > 1:
        if _watch is not None:
            _watch.stop()
        _watch = FailureWatch(strategy)
        _watch.start()
    if _watch is None:
        return
    _watch.module = strategy.lightning_module
    assert _watch.module is not None
    callbacks: list[Callback] = _watch.module.trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(each, _FirstToHear) for each in callbacks):
        # Before those of the user, who may wait for the other ranks in theirs.
        callbacks.insert(0, _FirstToHear())


class _FirstToHear(Callback):
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if _watch is not None:
            _watch.failed(exception)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if _watch is not None and _watch.standstill is not None:
            _watch.standstill.move()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start


class FailureWatch:
    """The watch of one rank. What is public is for its main thread, the rest is done by its own."""

    def __init__(self, strategy: PlacedStrategy) -> None:
        self.module: LightningModule | None = None
        """The one that is trained: it names the layers."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._name: str = strategy.broadcast(uuid.uuid4().hex)
        first_here = self._rank - strategy.local_rank
        ranks = range(first_here, first_here + strategy.num_processes)
        self._beside = Neighbours(self._rank, ranks=ranks, children=take_over_children(strategy))
        self._me, self._main_thread = Member.here(), threading.get_ident()
        self._timeout = strategy._mesh_timeout.total_seconds()
        self.standstill = Standstill(self._main_thread) if dist.get_backend() == "nccl" else None

        self._exception: BaseException | None = None
        self._evidence = Evidence(world_size=self._world_size)
        self._speaks = False
        self._wake, self._ends, self._others_know = threading.Event(), threading.Event(), threading.Event()
        self._generation = -1
        self._forget()
        self._thread = threading.Thread(target=self._run, daemon=True, name="failure-watch")

    def _forget(self) -> None:
        """A new beginning: every rank has failed, and the program goes on."""
        self._own: Failure | None = None
        self._is_published = self._has_answered = self._is_shown = self._is_left = False
        self._since: float | None = None
        self._concluded_at: float | None = None
        self._shown_at = 0.0
        """When the main thread began to show its error."""
        self._concluded = threading.Event()
        self._generation += 1

    def start(self) -> None:
        self._hook_before, sys.excepthook = sys.excepthook, self._show_uncaught
        atexit.register(self.stop)
        self._thread.start()
        untie_from_launcher()

    def stop(self) -> None:
        """This process ends, or its process group has."""
        if os.getpid() == self._me.process and not self._ends.is_set():
            self._ends.set()
            self._wake.set()
            self._thread.join(timeout=TIME_TO_LEAVE)

    def failed(self, exception: BaseException) -> None:
        """Say it to the others, and wait until it is known what failed first: some seconds at most."""
        if os.getpid() != self._me.process or exception is self._exception:
            return
        self._exception = exception
        concluded = self._concluded
        self._own = self._failure_of(exception)
        self._wake.set()
        if not concluded.wait(PATIENCE + TURN * len(self._beside.ranks) + TIME_TO_LEAVE):
            self._conclude_alone()

    def _failure_of(self, exception: BaseException) -> Failure:
        position = position_of_error(exception.__traceback__, self.module)
        kind: Kind = "collective" if is_of_collective(exception, position) else "error"
        if rank_that_raised(exception) not in (None, self._rank):
            kind = "relayed"
        trainer = None if self.module is None else self.module._trainer
        step = "" if trainer is None else f"step {trainer.global_step}, "
        shown = "".join(tracebacks.format_exception(exception))
        return self._failure(kind, summary_of(exception), position, traceback=shown, place=step + position.line)

    def _failure(
        self, kind: Kind, summary: str, position: Position | None = None, *, rank: int | None = None, **more: str
    ) -> Failure:
        return Failure(
            rank=self._rank if rank is None else rank,
            kind=kind,
            summary=summary,
            host=self._me.host,
            seconds=time.time(),
            position=position or Position(),
            **more,
        )

    def _show_uncaught(
        self, kind: type[BaseException], exception: BaseException, traceback: TracebackType | None
    ) -> None:
        """``sys.excepthook``: the first error is shown, and what only follows from it is not."""
        if os.getpid() != self._me.process or self._ends.is_set():
            self._hook_before(kind, exception, traceback)
            return
        if self._is_left:
            return  # the watch has shown the error, and is about to end the process
        self.failed(exception)
        own, first = self._evidence.failure_of(self._rank), self._evidence.first
        is_first = first is None or (first.rank == self._rank and first.kind == "error")
        is_another = own is not None and own.kind == "error" and first is not None and own.summary != first.summary
        if is_first or is_another:
            self._is_shown, self._shown_at = True, time.monotonic()  # before it is said: its own thread looks meanwhile
            if first is not None and is_first:
                say(notice(first, self._world_size))
            self._hook_before(kind, exception, traceback)
        elif self._speaks and not self._is_shown:
            say(report(self._evidence))
        sys.stderr.flush()
        if self._rank == 0:
            self._others_know.wait(TIME_TO_LEAVE)  # rank 0 may keep the store
        self._beside.end_children(after_seconds=TIME_TO_LEAVE)  # and is what a user waits for: it ends last

    # Its own thread

    def _run(self) -> None:
        try:
            board = Board(self._name, rank=self._rank, world_size=self._world_size, timeout=STORE_TIMEOUT)
            while not self._ends.is_set():
                board.start_again(self._generation)
                board.join(self._me)
                self._watch_until_together(board)
            board.leave()
        except (RuntimeError, OSError):  # the store is gone, and with it rank 0 or the launcher
            self._watch_alone()

    def _watch_until_together(self, board: Board) -> None:
        while not self._ends.is_set():
            self._look(board)
            if self._concluded_at is not None and self._evidence.verdict() == "together":
                stay_alive()
                self._forget()
                return
            self._wake.wait(CALM_INTERVAL if self._since is None else BUSY_INTERVAL)
            self._wake.clear()

    def _look(self, board: Board) -> None:
        if len(self._beside.members) < len(self._beside.ranks):
            self._beside.members = board.members(self._beside.ranks)
        if self._own is None and self.standstill is not None and self._since is None:
            self._own = self._stands_for_too_long(self.standstill)
        if self._own is not None and not self._is_published:
            if not (self._has_answered and self._own.kind == "collective"):
                board.publish(self._own)
            self._is_published = True
        self._publish_gone(board)
        if not board.has_failures():
            return
        if self._since is None:
            self._since = time.monotonic()
            end_process_after(HARD_LIMIT)
        if self._own is None and not self._has_answered:
            board.stand_at(position_of_thread(self._main_thread, self.module))
            self._has_answered = True
        if self._concluded_at is not None:
            self._leave(board)
        elif board.num_heard() >= self._world_size or time.monotonic() - self._since > PATIENCE:
            self._conclude(board)

    def _publish_gone(self, board: Board) -> None:
        """Processes of this host that ended without a word, each told by one rank only."""
        # What a rank said before it ended may still be on its way.
        for rank, how in self._beside.ended(for_seconds=BUSY_INTERVAL).items():
            if board.has_left(rank) or not board.is_first_to(f"end/{rank}"):
                continue
            if all(failure.rank != rank for failure in board.failures()):
                board.publish(self._failure("gone", how, rank=rank))

    def _stands_for_too_long(self, standstill: "Standstill") -> Failure | None:
        """NCCL ends a process at its timeout, from a thread of its own: where it stood must be said before."""
        seconds = standstill.seconds()
        if seconds < self._timeout - min(10.0, self._timeout / 2):
            return None
        position = position_of_thread(self._main_thread, self.module)
        return self._failure("hang", f"did not move for {seconds:.0f} s", position, place=position.line)

    def _conclude(self, board: Board) -> None:
        """Everybody has been heard, or had the time for it."""
        self._evidence = Evidence(world_size=self._world_size, failures=board.failures())
        first = self._evidence.first
        needs_words = first is not None and not self._is_shown_here(first)
        if needs_words:
            threading.Event().wait(TURN * self._beside.turn)
        self._speaks = needs_words and board.is_first_to(f"speak/{self._me.host}")
        if self._speaks:
            members = board.members(range(self._world_size))
            self._evidence = Evidence(
                world_size=self._world_size,
                failures=board.failures(),
                positions=board.positions(),
                members=members,
                states=self._beside.states(),
                timeout_seconds=self._timeout,
            )
        self._end_with_words()
        board.decide()

    def _is_shown_here(self, first: Failure) -> bool:
        """Python shows it, at the end of the process on this host that raised it."""
        is_quiet = first.summary.startswith(("SystemExit", "KeyboardInterrupt"))
        return first.kind == "error" and first.host == self._me.host and not is_quiet

    def _end_with_words(self) -> None:
        """The last words on this host, from the rank that speaks for it."""
        evidence, verdict = self._evidence, self._evidence.verdict()
        first = evidence.first
        assert first is not None
        if self._speaks and verdict != "together":
            self._is_shown = True  # before it is said: the main thread may look meanwhile
            say(report(evidence))
            for rank in evidence.silent:
                if rank in self._beside.members:
                    self._beside.members[rank].kill()
        tell_launcher(first, self._rank, self._me.host, report(evidence))
        self._concluded_at = time.monotonic()
        self._concluded.set()

    def _leave(self, board: Board) -> None:
        """By force, where the main thread waits for ranks that will not come."""
        if board.num_decided() + len(self._evidence.silent) >= self._world_size:
            self._others_know.set()
        first = self._evidence.first
        assert self._concluded_at is not None and first is not None
        closes = self._rank == 0 or self._own is not None
        waited = time.monotonic() - max(self._concluded_at, self._shown_at)
        if waited < (TIME_TO_CLOSE if closes else TIME_TO_LEAVE):
            return
        if first.rank == self._rank and not self._is_shown:
            # The program has caught it and goes on, the only rank that does; or it is late, and will show nothing.
            self._is_left = True
            say(report(self._evidence))
        self._beside.end_children(after_seconds=0.0)
        exit_now()

    # Without a store

    def _watch_alone(self) -> None:
        """Rank 0 has ended, or the launcher. Whether it should have, shows in the collectives of this rank."""
        while not self._ends.is_set():
            trainer = None if self.module is None else self.module._trainer
            is_running = trainer is not None and not trainer.state.finished
            if self._own is not None or (is_running and self._beside.states().get(0) == "gone"):
                self._conclude_alone()
                threading.Event().wait(TIME_TO_LEAVE)
                exit_now()
            self._wake.wait(CALM_INTERVAL)
            self._wake.clear()

    def _conclude_alone(self) -> None:
        """From what this rank sees of the processes beside it, as the store does not answer."""
        if self._concluded.is_set():
            return
        end_process_after(HARD_LIMIT)
        states = self._beside.states()
        failures = [] if self._own is None else [self._own]
        if self._rank != 0 and states.get(0) != "stopped":
            how = self._beside.ended(for_seconds=0.0).get(0, "the store in its process does not answer")
            failures.append(self._failure("gone", how, rank=0))
        alive = [rank for rank, state in states.items() if state in ("runs", "unknown")]
        self._evidence = Evidence(
            world_size=self._world_size,
            failures=failures,
            members=self._beside.members,
            states=states,
            asked=[0, *(rank for rank in states if rank not in alive)],
            timeout_seconds=self._timeout,
        )
        self._speaks = self._rank == min([*alive, self._rank])
        if self._evidence.first is not None:
            self._end_with_words()
