"""Saves that die, and disks that fail: the checkpoint before stays, and every rank hears why."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_moe_strategy.checkpoint import publish
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.save import save_directory, save_file
from lightning_moe_strategy.checkpoint.storage import LocalStorage
from lightning_moe_strategy.checkpoint.writer import SummedFiles, SummedStream
from tests.checkpoints import ABOUT, dies, save, sharded_state, value_of
from tests.ranks import RankError

KILL_SAVE = Path(__file__).parent.parent / "benchmarks" / "kill_save.py"


def one_file(path: str, value: int) -> None:
    assert dist.group.WORLD is not None
    save_file(path, {"epoch": value}, group=dist.group.WORLD)


def nothing_else(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(None, save, id="first"),
        pytest.param(save, save, id="over-a-directory"),
        pytest.param(one_file, one_file, id="file-over-file"),
        pytest.param(one_file, save, id="directory-over-file", marks=pytest.mark.slow),
        pytest.param(save, one_file, id="file-over-directory", marks=pytest.mark.slow),
    ],
)
def test_a_save_killed_at_any_step_leaves_the_former_checkpoint_or_the_new_one(before, after, tmp_path):
    former, found, moment, is_dead = tmp_path / "former", [], 0, True
    if before is not None:
        assert not dies(partial(before, str(former), 1), 0)
    while is_dead:
        moment += 1
        folder = tmp_path / "run"
        folder.mkdir()
        path = folder / "last.ckpt"
        if former.is_dir():
            shutil.copytree(former, path)
        elif former.is_file():
            shutil.copy(former, path)
        is_dead = dies(partial(after, str(path), 2), moment)
        publish.clean(str(folder))
        found.append(value_of(path))
        assert nothing_else(folder) <= {"last.ckpt"}
        # The next save goes on from whatever is left, also where nobody cleaned.
        shutil.rmtree(folder)
    first = None if before is None else 1
    assert moment > 5 and found == sorted(found, key=lambda value: value == 2)
    assert set(found) == {first, 2}, found


def test_the_save_after_a_killed_one_needs_nobody_to_clean(tmp_path):
    path = str(tmp_path / "last.ckpt")
    assert not dies(partial(save, path, 1), 0)
    for moment in range(1, 60, 4):
        was_killed = dies(partial(save, path, 2), moment)
        assert not dies(partial(save, path, 3), 0)
        assert value_of(path) == 3 and nothing_else(tmp_path) == {"last.ckpt"}
        if not was_killed:
            return
    raise AssertionError("no save came to its end")


def test_a_removal_killed_at_any_step_leaves_a_whole_checkpoint_or_none(tmp_path):
    path, found, moment, is_dead = tmp_path / "old.ckpt", [], 0, True
    while is_dead:
        moment += 1
        assert not dies(partial(save, str(path), 1), 0)
        is_dead = dies(partial(publish.remove, str(path)), moment)
        found.append(value_of(path))
        publish.clean(str(tmp_path))
        assert nothing_else(tmp_path) <= {"old.ckpt"}
    assert found[0] == 1 and found[-1] is None and moment > 3


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_a_link_killed_at_any_step_leads_to_the_former_checkpoint_or_the_new_one(kind, tmp_path):
    for value in (1, 2):
        assert not dies(partial(save, str(tmp_path / f"{value}.ckpt"), value), 0)
    path, found, moment, is_dead = tmp_path / "last.ckpt", [], 0, True
    while is_dead:
        moment += 1
        publish.remove(str(path))
        if kind == "link":
            path.symlink_to("1.ckpt")
        else:
            shutil.copytree(tmp_path / "1.ckpt", path)
        is_dead = dies(partial(publish.link, str(tmp_path / "2.ckpt"), str(path)), moment)
        if kind == "directory":
            publish.recover(str(path))
        found.append(value_of(path))
        publish.clean(str(tmp_path))
        assert nothing_else(tmp_path) == {"1.ckpt", "2.ckpt", "last.ckpt"}
    assert found[0] == 1 and found[-1] == 2 and set(found) == {1, 2}
    assert path.is_symlink() and os.readlink(path) == "2.ckpt"


def error_of(path: str, state: dict[str, Any] | None = None, **rest: Any) -> str:
    assert dist.group.WORLD is not None
    try:
        save_directory(path, state or sharded_state(2), {"epoch": 2} | rest, **ABOUT, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "saved"


def same_on_all(words: list[str]) -> str:
    assert len(set(words)) == 1, words
    return words[0]


def saved_with_faults(folder: str) -> dict[str, str]:
    """Each fault in turn, on the ranks of one world; nobody is left behind in a collective."""
    rank = dist.get_rank()
    save(f"{folder}/kept", 1)
    found = {}

    def failing(self: Any, content: Any) -> int:
        raise OSError(5, "Input/output error", "disk")

    write = SummedStream.write
    for of_rank in (0, 1):
        if rank == of_rank:
            SummedStream.write = failing  # type: ignore[method-assign]
        found[f"rank {of_rank}"] = error_of(f"{folder}/kept")
        SummedStream.write = write  # type: ignore[method-assign]

    sync = LocalStorage.sync
    if rank == 1:
        LocalStorage.sync = lambda self, stream: failing(self, stream)  # type: ignore[method-assign,assignment,return-value]
    found["sync"] = error_of(f"{folder}/kept")
    LocalStorage.sync = sync  # type: ignore[method-assign]

    rename = LocalStorage.rename

    def no_publishing(self: LocalStorage, source: str, target: str) -> None:
        if target.endswith("/kept") and source.endswith(".saving"):
            raise PermissionError(13, "Permission denied", target)
        rename(self, source, target)

    LocalStorage.rename = no_publishing  # type: ignore[method-assign]
    found["publish"] = error_of(f"{folder}/kept")
    LocalStorage.rename = rename  # type: ignore[method-assign]

    Path(folder, "file").write_text("mine")
    Path(folder, "other").mkdir(exist_ok=True)
    Path(folder, "other", "notes.txt").write_text("mine")
    dist.barrier()
    found["file"] = error_of(f"{folder}/file")
    found["below a file"] = error_of(f"{folder}/file/deeper/x")
    found["directory"] = error_of(f"{folder}/other")
    found["hyperparameters"] = error_of(f"{folder}/kept", hyper_parameters={"depth": 2, "loss": {"f": torch.nn.ReLU()}})
    found["not root"] = _as_nobody(folder)
    return found


def _as_nobody(folder: str) -> str:
    if os.geteuid() != 0:
        return "skipped"
    os.chmod(folder, 0o755)
    state = sharded_state(2)
    dist.barrier()
    os.seteuid(65534)
    try:
        return error_of(f"{folder}/denied", state)
    finally:
        os.seteuid(0)


def test_every_rank_hears_which_rank_failed_and_what_to_do_and_the_former_checkpoint_stays(ranks2):
    # Not below pytest's folder, which other users may not enter.
    with tempfile.TemporaryDirectory() as folder:
        results = ranks2(saved_with_faults, folder)
        found = {name: same_on_all([result[name] for result in results]) for name in results[0]}
        assert value_of(f"{folder}/kept") == 1
        assert nothing_else(Path(folder)) == {"kept", "file", "other"}
        assert Path(folder, "file").read_text() == Path(folder, "other", "notes.txt").read_text() == "mine"
    kept = "was not saved, and what was there before stays"
    assert all(kept in words for name, words in found.items() if words != "skipped"), found
    for rank in (0, 1):
        assert f"rank {rank} failed with OSError: [Errno 5] Input/output error" in found[f"rank {rank}"]
        assert "Look at the file system on that rank" in found[f"rank {rank}"]
    assert "rank 1 failed with OSError" in found["sync"]
    assert "PermissionError" in found["publish"] and "ModelCheckpoint(dirpath=...)" in found["publish"]
    assert "a file that is no checkpoint is in its place" in found["file"]
    assert "A file is where a directory has to be: move it away" in found["below a file"]
    assert "a directory with other files (notes.txt) is in its place" in found["directory"]
    assert "hyper_parameters['loss']['f'] (torch.nn.modules.activation.ReLU) cannot be" in found["hyperparameters"]
    assert "save_hyperparameters(ignore=[...])" in found["hyperparameters"]
    if found["not root"] != "skipped":
        assert "PermissionError" in found["not root"] and "where the user who trains may write" in found["not root"]


class FullAfter(LocalStorage):
    """Takes so many writes to a file."""

    def __init__(self, num_writes: int) -> None:
        self.num_left = num_writes

    def open(self, path: str, mode: str) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def write(self, content: Any) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("num_writes", range(0, 12, 3))
def test_what_failed_below_torchs_writer_is_told_and_not_what_it_makes_of_it(num_writes, tmp_path):
    files = SummedFiles(FullAfter(num_writes))
    with pytest.raises(OSError, match="No space left on device"):
        with files.create_stream(f"{tmp_path}/shard", "wb") as stream:
            torch.save(torch.zeros(400_000), stream)


def filled(folder: str) -> tuple[str, str]:
    save(f"{folder}/kept", 1)
    size = 400_000  # of each rank, more than the disk has
    big = {"state_dict": {f"w{dist.get_rank()}": torch.zeros(size)}}
    assert dist.group.WORLD is not None
    words = []
    for path in ("kept", "fresh"):
        try:
            save_directory(f"{folder}/{path}", big, {}, **ABOUT, group=dist.group.WORLD)
            words.append("saved")
        except CheckpointError as error:
            words.append(str(error))
    return words[0], words[1]


def test_a_full_disk_is_named_and_its_space_is_free_again(ranks2, tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no file system can be mounted: {mount.stderr.strip()}")
    try:
        for over, fresh in ranks2(filled, str(tmp_path)):
            for words in (over, fresh):
                assert "No space left on device" in words and "Free space there, or keep fewer checkpoints" in words
        assert value_of(tmp_path / "kept") == 1
        assert nothing_else(tmp_path) == {"kept"}
        assert shutil.disk_usage(tmp_path).free > 500_000
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def killed_while_writing(path: str, victim: int) -> str:
    save(path, 1)
    if dist.get_rank() == victim:
        SummedStream.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    save(path, 2)
    return "saved"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_save_of_the_others(victim, ranks2, tmp_path):
    with pytest.raises((EOFError, OSError, RankError)):
        ranks2(killed_while_writing, str(tmp_path / "last.ckpt"), victim)
    publish.clean(str(tmp_path))
    assert value_of(tmp_path / "last.ckpt") == 1 and nothing_else(tmp_path) == {"last.ckpt"}
    ranks2(save, str(tmp_path / "last.ckpt"), 3)
    assert value_of(tmp_path / "last.ckpt") == 3


@pytest.mark.slow
def test_ranks_killed_at_random_moments_lose_nothing(tmp_path):
    """``benchmarks/kill_save.py``: 10 of its 100 moments, and one of a Trainer."""
    command = [sys.executable, str(KILL_SAVE), "--moments", "10", "--trainers", "1", "--seed", "7"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "10 moments in" in result.stdout and "1 moments of Trainers" in result.stdout
