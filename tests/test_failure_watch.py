"""What a failed run knows and says: where threads stand, which processes are there, who failed first."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy._torch_compat import fake_world
from lightning_moe_strategy.failures import last_words, watch
from lightning_moe_strategy.failures.board import Board, Failure, Kind
from lightning_moe_strategy.failures.neighbours import Member, Neighbours
from lightning_moe_strategy.failures.position import (
    Position,
    Standstill,
    is_of_collective,
    position_of_error,
    position_of_thread,
    ranks_in_words,
    summary_of,
)
from lightning_moe_strategy.failures.report import Evidence, notice, report
from lightning_moe_strategy.host_agreement import raise_together, rank_that_raised

ROOT = Path(__file__).parents[1]
WAITS = Position(collective="all_reduce", group="7", axis="ep", ranks=(0, 1), layer="blocks.1", phase="backward")
COMPUTES = Position(line="train.py:12 in training_step")


def failure(rank: int, kind: Kind, summary: str = "ValueError: loss is nan", **more: Any) -> Failure:
    return Failure(**{"rank": rank, "kind": kind, "summary": summary, "host": "a", "seconds": 5.0} | more)


# Where a thread stands


def waits_for_the_other() -> tuple[Position, Position, str, bool]:
    """A thread that waits on an axis of a mesh, as its neighbour sees it; then an error of another group."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("e_fsdp", "ep"), backend_override={"ep": "gloo"})
    rank, ep = dist.get_rank(), mesh.get_group("ep")
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)  # until rank 0 has seen its own thread wait
    joins = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=ep))
    joins.start()
    seen, until = Position(), time.monotonic() + 5
    while rank == 0 and not seen.collective and time.monotonic() < until:
        seen = position_of_thread(joins.ident or 0, None)
    if rank == 0:
        dist.send(torch.zeros(1), dst=1)
    joins.join()
    alone = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    dist.barrier()
    raised, is_collective, summary = Position(), False, ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=alone)
        except RuntimeError as error:
            raised = position_of_error(error.__traceback__, None)
            is_collective, summary = is_of_collective(error, raised), summary_of(error)
    dist.barrier()
    return seen, raised, summary, is_collective


def test_a_thread_in_a_collective_is_seen_with_its_axis_and_ranks(ranks2):
    (seen, raised, summary, is_collective), _ = ranks2(waits_for_the_other)
    assert (seen.collective, seen.axis, seen.ranks, seen.phase) == ("all_reduce", "ep", (0, 1), "")
    assert "test_failure_watch.py" in seen.line and seen.in_words().startswith("all_reduce, axis ep (rows of the expe")
    assert (raised.collective, raised.ranks) == ("all_reduce", (0, 1)) and raised.group != seen.group
    assert is_collective and "imed out" in summary
    assert Position.from_json(json.loads(json.dumps(seen.to_json()))) == seen


def test_an_error_about_the_arguments_of_a_collective_is_the_ranks_own():
    with fake_world(4, 0):
        try:
            dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2, dtype=torch.float64))
        except Exception as error:
            position = position_of_error(error.__traceback__, None)
            assert "all_gather" in position.collective and position.axis == "world"
            assert not is_of_collective(error, position)
        else:
            pytest.fail("the arguments were taken")
    assert not is_of_collective(RuntimeError("the socket is closed"), COMPUTES)


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, see: Callable[[], None]) -> Tensor:
        ctx.see = see
        see()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.see()
        return grad, None


class Block(nn.Module):
    def __init__(self, see: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.see = nn.Linear(4, 4), see

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Watched.apply(self.linear(x), self.see))


class Stack(nn.Module):
    def __init__(self, see: Callable[[], None], *, recomputes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(see) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_layer_is_known_forward_backward_and_when_it_is_recomputed(recomputes):
    seen: list[tuple[str, str]] = []

    def see() -> None:
        position = position_of_thread(threading.get_ident(), model)
        seen.append((position.phase, position.layer))

    with fake_world(2, 0):
        model = Stack(see, recomputes=recomputes)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    names = [f"blocks.{i}" for i in range(3)]
    expected = [("forward", name) for name in names]
    for name in reversed(names):
        expected += [("recompute", name)] * recomputes + [("backward", name)]
    assert seen == expected


def test_ranks_are_said_in_spans():
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([0, 1, 2, 7, 5, 4]) == "ranks 0-2, 4-5, 7"


# Which processes are there


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Killed at the end, whether it is stopped or the test fails."""
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_state_of_a_process_is_seen_from_beside():
    with started("sleep", "60") as sleeps:
        stat = Path(f"/proc/{sleeps.pid}/stat").read_text().rpartition(")")[2].split()
        member = Member(host="a", process=sleeps.pid, begun=stat[19])
        assert member.state() == "runs"
        sleeps.send_signal(signal.SIGSTOP)
        until(lambda: member.state() == "stopped")
        later = Member(host="a", process=sleeps.pid, begun=stat[19] + "1")
        assert later.state() == "gone"  # a later process of the same number
        later.kill()
        assert member.state() == "stopped"
        member.kill()
        until(lambda: member.state() == "gone")
        beside = Neighbours(2, ranks=range(2, 4), children=[sleeps])
        beside.members = {3: member}
        until(lambda: bool(beside.ended(for_seconds=0.0)))
        assert beside.ended(for_seconds=0.0) == {3: f"process {sleeps.pid} was ended by SIGKILL"}
        assert beside.ended(for_seconds=60.0) == {} and beside.states() == {3: "gone"}
    assert Member.here().state() == "runs"


def test_a_process_that_ends_as_it_should_is_not_reported():
    with subprocess.Popen(["true"]) as good, subprocess.Popen(["false"]) as bad:
        good.wait()
        bad.wait()
        beside = Neighbours(0, ranks=range(3), children=[good, bad])
        assert beside.ended(for_seconds=0.0) == {2: "its process ended with exit code 1"}


def test_children_are_given_time_and_then_ended():
    with started("sleep", "0.2") as short, started("sleep", "60") as long:
        Neighbours(0, ranks=range(3), children=[short, long]).end_children(after_seconds=1.0)
        assert (short.returncode, long.returncode) == (0, -signal.SIGKILL)


RANK_0 = """
import os, subprocess, sys
from lightning_moe_strategy.failures.neighbours import tie_to_launcher
tie_to_launcher(starts_ranks=True)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | {"LOCAL_RANK": "1"})
print(child.pid, flush=True)
child.wait()
"""
RANK_1 = """
import time
from lightning_moe_strategy.failures.neighbours import tie_to_launcher, untie_from_launcher
time.sleep({before}); tie_to_launcher(starts_ranks=False); {then}; open("{tied}", "w").close(); time.sleep(60)
"""


@pytest.mark.parametrize(
    ("before", "then", "lives"), [("0", "0", False), ("0", "untie_from_launcher()", True), ("1", "0", False)]
)
def test_a_rank_ends_with_the_one_that_starts_it_until_it_watches(tmp_path, before, then, lives):
    tied = tmp_path / "tied"
    command = [sys.executable, "-c", RANK_0, RANK_1.format(before=before, then=then, tied=tied)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as rank_0:
        assert rank_0.stdout is not None
        child = int(rank_0.stdout.readline())
        begun = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]
        member = Member(host="a", process=child, begun=begun)
        if before == "0":  # else rank 0 is gone before it could be tied
            until(tied.exists)
        rank_0.kill()
    try:
        if lives:
            time.sleep(0.3)
            assert member.state() == "runs"
        else:
            until(lambda: member.state() == "gone")
            assert tied.exists() == (before == "0")
    finally:
        member.kill()


def until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


# What ranks tell each other


@pytest.fixture
def boards(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    made = [Board("run", rank=rank, world_size=3, timeout=timedelta(seconds=5)) for rank in range(3)]
    yield made
    del server


def test_ranks_are_heard_once_in_the_order_in_which_they_fail(boards):
    assert not boards[0].has_failures()
    boards[2].publish(failure(2, "error"))
    boards[0].stand_at(WAITS)
    boards[0].publish(failure(0, "relayed", "RuntimeError: On rank 2"))
    boards[0].publish(failure(1, "gone", "was ended by SIGKILL"))
    assert boards[1].has_failures() and (boards[1].num_heard(), boards[1].num_own()) == (3, 2)
    assert [(each.rank, each.kind) for each in boards[1].failures()] == [(2, "error"), (0, "relayed"), (1, "gone")]
    assert boards[1].positions() == {0: WAITS}
    boards[1].join(Member.here())
    assert boards[0].members(range(3)) == {1: Member.here()}
    assert boards[0].is_first_to("speak") and not boards[1].is_first_to("speak")
    boards[1].leave()
    assert boards[0].has_left(1) and not boards[0].has_left(2)
    boards[0].start_again(1)
    assert not boards[0].has_failures() and boards[1].has_failures()


def raised_on_all() -> tuple[int | None, str]:
    try:
        raise_together(ValueError("damaged") if dist.get_rank() == 1 else None, dist.group.WORLD, "reading")
    except ValueError as error:
        return rank_that_raised(error), str(error)
    return None, ""


def test_an_error_that_all_ranks_raise_knows_where_it_came_from(ranks2):
    assert ranks2(raised_on_all) == [(1, "On rank 1: damaged"), (1, "damaged")]
    assert rank_that_raised(ValueError()) is None


# What is said


@pytest.mark.parametrize(
    ("failures", "positions", "verdict", "first"),
    [
        ([], {}, "open", None),
        ([failure(0, "collective", "RuntimeError: closed"), failure(2, "error")], {1: WAITS}, "failed", 2),
        ([failure(0, "collective", "RuntimeError: closed"), failure(2, "gone")], {1: WAITS}, "gone", 2),
        ([failure(1, "relayed"), failure(2, "error"), failure(0, "relayed")], {}, "together", 2),
        ([failure(0, "collective", "RuntimeError: Timed out waiting 5000ms")], {1: COMPUTES}, "hang", 0),
        ([failure(1, "hang", "did not move")], {0: WAITS, 2: COMPUTES}, "hang", 1),
        ([failure(1, "collective", "closed"), failure(0, "collective", "timed out")], {2: WAITS}, "hang", 0),
        ([failure(1, "collective", "RuntimeError: closed by peer")], {0: WAITS, 2: WAITS}, "broken", 1),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_follow_from(failures, positions, verdict, first):
    evidence = Evidence(world_size=3, failures=failures, positions=positions)
    assert evidence.verdict() == verdict and (evidence.first and evidence.first.rank) == first


def test_a_hang_names_the_collective_the_layer_and_who_is_missing():
    member = Member(host="a", process=42, begun="1")
    words = report(
        Evidence(
            world_size=5,
            failures=[failure(0, "collective", "RuntimeError: Timed out", position=WAITS)],
            positions={1: WAITS, 2: COMPUTES},
            members={3: member, 4: member},
            states={3: "stopped"},
            timeout_seconds=1800,
        )
    )
    place = "all_reduce, axis ep (rows of the experts), among ranks 0-1, backward of layer blocks.1"
    assert f"A collective did not end within timeout=1800 s: {place}." in words
    assert f"waiting  ranks 0-1: {place}\n" in words
    assert "missing  rank 2: in no collective: train.py:12 in training_step\n" in words
    assert "missing  rank 3: process 42 on host a is stopped" in words
    assert "missing  rank 4: process 42 on host a does not answer" in words and "timeout(...)" in words


def test_ranks_in_different_collectives_are_told_apart():
    other = Position(collective="all_to_all_single", group="8", axis="cp", ranks=(0, 1))
    failures = [failure(0, "collective", "RuntimeError: Timed out", position=WAITS)]
    words = report(Evidence(world_size=2, failures=failures, positions={1: other}))
    assert "waiting  rank 0: all_reduce" in words and "waiting  rank 1: all_to_all_single" in words
    assert "not in the same one" in words and "missing  " not in words


def test_another_host_is_shown_the_whole_error():
    first = failure(2, "error", traceback="Traceback\nValueError: loss is nan\n", place="step 3, train.py:9 in f")
    words = report(Evidence(world_size=4, failures=[first]))
    assert (
        "Rank 2 of 4 failed first, on host a at step 3, train.py:9 in f:\n\nTraceback\nValueError: loss is nan" in words
    )
    assert "with ValueError at step 3" in notice(first, 4) and "loss is nan" not in notice(first, 4)


def test_a_standstill_ends_with_another_instruction_or_batch():
    goes_on, ends = threading.Event(), threading.Event()

    def waits() -> None:
        goes_on.wait()
        while not ends.is_set():
            pass

    thread = threading.Thread(target=waits)
    thread.start()
    stands = Standstill(thread.ident or 0)
    until(lambda: stands.seconds() > 0.2)
    stands.move()
    assert stands.seconds() < 0.1
    until(lambda: stands.seconds() > 0.2)
    goes_on.set()
    until(lambda: stands.seconds() < 0.1)
    ends.set()
    thread.join()


def test_torchrun_reads_the_first_error_from_the_files_of_the_ranks(tmp_path, monkeypatch):
    first = failure(2, "error", traceback="Traceback\nValueError: loss is nan")

    def told(first: Failure, rank: int, host: str) -> ProcessFailure:
        path = str(tmp_path / f"{rank}.json")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        last_words.tell_launcher(first, rank, host, "the report")
        return ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=path)

    failures = {0: told(first, 0, "a"), 2: told(first, 2, "a")}
    error = ChildFailedError("train", failures)
    assert error.get_first_failure()[0] == 2 and str(error).count("ValueError: loss is nan") == 1
    assert "loss is nan" in str(told(first, 5, "b").message)
    assert "the report" in str(told(failure(2, "gone"), 0, "a").message)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    last_words.tell_launcher(first, 0, "a", "")


# Two threads, one error


@pytest.mark.parametrize("first", ["main", "watch"])
def test_an_error_is_shown_once_and_whole_whichever_thread_comes_first(monkeypatch, first):
    """A main thread that closes for as long as it may: its watch is about to end the process."""
    said: list[str] = []
    monkeypatch.setattr(watch, "say", said.append)
    monkeypatch.setattr(watch, "exit_now", lambda: said.append("exits"))
    own = failure(1, "error", traceback="the traceback")
    here: Any = watch.FailureWatch.__new__(watch.FailureWatch)
    here._rank, here._world_size, here._me, here._speaks, here._generation = 1, 2, Member.here(), False, 0
    here._evidence = Evidence(world_size=2, failures=[own, failure(0, "relayed")])
    here._beside = SimpleNamespace(end_children=lambda after_seconds: None)
    here._ends, here._others_know = threading.Event(), threading.Event()
    here._hook_before = lambda *error: said.append("raised")
    here._forget()
    here._exception, here._own = ValueError("loss is nan"), own
    here._concluded_at = time.monotonic() - watch.TIME_TO_CLOSE
    threads: dict[str, Callable[[], None]] = {
        "main": lambda: here._show_uncaught(ValueError, here._exception, None),
        "watch": lambda: here._leave(SimpleNamespace(num_decided=lambda: 2)),
    }
    for name in sorted(threads, key=lambda name: name != first):
        threads[name]()
    if first == "main":
        assert said == [notice(own, 2), "raised"]  # and it has the time to say it
    else:
        assert len(said) == 2 and "the traceback" in said[0] and said[1] == "exits"
