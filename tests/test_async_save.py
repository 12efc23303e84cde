"""Saves beside the training: what is written is what was there when they began, one at a time, and nothing is lost."""

import threading
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from lightning_moe_strategy.checkpoint import asynchronous
from lightning_moe_strategy.checkpoint.asynchronous import BackgroundSaves
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.host_copy import HostCopy
from lightning_moe_strategy.checkpoint.publish import link, remove, staging_of
from lightning_moe_strategy.checkpoint.storage import LocalStorage
from lightning_moe_strategy.checkpoint.writer import SummedStream
from lightning_moe_strategy.sharding import local_tensor
from tests.checkpoints import ABOUT, read_whole, sharded_state, value_of
from tests.flavour import L
from tests.modules import PlainLanguageModel, loader
from tests.parity import QUIET, InOrder


@contextmanager
def disk_waits_for(gate: threading.Event) -> Generator[None, None, None]:
    """No file is opened before the gate is."""
    opens = LocalStorage.open

    def opened(self: LocalStorage, path: str, mode: str) -> Any:
        assert gate.wait(30)
        return opens(self, path, mode)

    LocalStorage.open = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalStorage.open = opens  # type: ignore[method-assign]


@contextmanager
def disk_is_slow() -> Generator[None, None, None]:
    opens = LocalStorage.open

    def opened(self: LocalStorage, path: str, mode: str) -> Any:
        time.sleep(0.1)
        return opens(self, path, mode)

    LocalStorage.open = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalStorage.open = opens  # type: ignore[method-assign]


@contextmanager
def writing_fails(*, on_rank: int) -> Generator[None, None, None]:
    def failing(self: Any, content: Any) -> int:
        raise OSError(5, "Input/output error")

    write = SummedStream.write
    if dist.get_rank() == on_rank:
        SummedStream.write = failing  # type: ignore[method-assign]
    try:
        yield
    finally:
        SummedStream.write = write  # type: ignore[method-assign]


def new_saves() -> BackgroundSaves:
    return BackgroundSaves(timedelta(seconds=60))


def later_changes(folder: str) -> dict[str, bool]:
    saves, state, gate, is_so = new_saves(), sharded_state(1), threading.Event(), {}
    path = f"{folder}/1.ckpt"
    rest = {"epoch": 1, "progress": [0]}
    with disk_waits_for(gate):
        saves.save(path, state, rest, **ABOUT)
        is_so["returns before anything is written"] = not Path(path).exists()
        is_so["path is known at once"] = saves.path == path
        for tensor in state["state_dict"].values():
            local_tensor(tensor).zero_()
        state["optimizer_0"]["param_groups"][0]["lr"] = 7.0
        rest["epoch"] = 2
        gate.set()
        saves.wait()
    is_so["nothing is in flight"] = saves.path is None
    return is_so


def test_what_is_saved_is_what_was_there_however_the_training_goes_on(ranks2, tmp_path):
    for is_so in ranks2(later_changes, str(tmp_path)):
        assert all(is_so.values()), is_so
    assert value_of(tmp_path / "1.ckpt") == 1


def two_saves(folder: str) -> dict[str, bool]:
    saves, gate, is_so = new_saves(), threading.Event(), {}
    with disk_waits_for(gate):
        saves.save(f"{folder}/1.ckpt", sharded_state(1), {"epoch": 1}, **ABOUT)
        # Once the first is there, the second takes its place, and a link goes over from the one to the other.
        saves.then(lambda: link(f"{folder}/1.ckpt", f"{folder}/last.ckpt") if dist.get_rank() == 0 else None)
        is_so["a link waits"] = not Path(folder, "last.ckpt").is_symlink()
        threading.Timer(0.3, gate.set).start()
        saves.save(f"{folder}/2.ckpt", sharded_state(2), {"epoch": 2}, **ABOUT)
        is_so["the second waits for the first"] = gate.is_set() and Path(folder, "1.ckpt").exists()
    dist.barrier()
    if dist.get_rank() == 0:
        saves.then(lambda: remove(f"{folder}/1.ckpt"))
        saves.then(lambda: link(f"{folder}/2.ckpt", f"{folder}/last.ckpt"))
    saves.wait()
    return is_so


def test_one_save_is_in_flight_and_links_and_removals_wait_for_it(ranks2, tmp_path):
    for is_so in ranks2(two_saves, str(tmp_path)):
        assert all(is_so.values()), is_so
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.ckpt", "last.ckpt"]
    assert value_of(tmp_path / "last.ckpt") == 2


def failures(folder: str) -> dict[str, str]:
    saves, words, done = new_saves(), {}, []
    saves.save(f"{folder}/1.ckpt", sharded_state(1), {"epoch": 1}, **ABOUT)
    saves.wait()

    def failing_save() -> None:
        gate = threading.Event()
        with disk_waits_for(gate), writing_fails(on_rank=1):
            saves.save(f"{folder}/2.ckpt", sharded_state(2), {"epoch": 2}, **ABOUT)
            saves.then(lambda: done.append("removed"))
            gate.set()
            assert saves._save is not None and saves._save.join(30)

    for name, act in (
        ("at the next save", lambda: saves.save(f"{folder}/3.ckpt", sharded_state(3), {"epoch": 3}, **ABOUT)),
        ("at the end", saves.wait),
    ):
        failing_save()
        try:
            act()
            words[name] = "nothing raised"
        except CheckpointError as error:
            words[name] = str(error)
    failing_save()
    words["alone"] = str(saves.finish_alone(30))
    words["done"] = ",".join(done)

    def cannot() -> None:
        raise ValueError("no")

    saves.save(f"{folder}/4.ckpt", sharded_state(4), {"epoch": 4}, **ABOUT)
    saves.then(cannot if dist.get_rank() == 0 else lambda: None)
    try:
        saves.wait()
    except CheckpointError as error:
        words["action"] = str(error)
    try:
        saves.save(f"{folder}/5.ckpt", sharded_state(5), {"epoch": 5, "f": threading.Thread}, **ABOUT)
    except CheckpointError as error:
        words["rest"] = str(error)
    return words


def test_a_failure_is_raised_on_all_ranks_at_the_next_save_or_the_end_and_what_should_follow_does_not(ranks2, tmp_path):
    first, second = ranks2(failures, str(tmp_path))
    assert first == second
    for name in ("at the next save", "at the end", "alone"):
        assert first[name].startswith(f"checkpoint('{tmp_path}/2.ckpt') was not saved, and what was there before stays")
        assert "rank 1 failed with OSError" in first[name] and first[name].count("was not saved") == 1
    assert first["done"] == ""
    assert "rank 0 failed with ValueError" in first["action"]
    assert "f (type) cannot be in a checkpoint" in first["rest"]
    assert value_of(tmp_path / "1.ckpt") == 1 and value_of(tmp_path / "4.ckpt") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.ckpt", "4.ckpt"]


def kept_memory() -> tuple[bool, bool, int]:
    copy = HostCopy()
    states = [sharded_state(value) for value in (1, 2)]
    pointers, sizes = [], []
    for state in states:
        taken = copy.take(state)
        tensors = [local_tensor(t) for t in taken["state_dict"].values()]
        pointers.append([t.data_ptr() for t in tensors])
        sizes.append(sum(t.nbytes for t in copy._buffers.values() for t in [local_tensor(t)]))
    shards = sum(local_tensor(t).nbytes for t in states[0]["state_dict"].values())
    return pointers[0] == pointers[1], sizes[0] == sizes[1], sizes[0] - shards - 5


def test_the_copy_is_as_large_as_the_shards_and_its_memory_is_used_again(ranks2):
    assert ranks2(kept_memory) == [(True, True, 0)] * 2


@contextmanager
def copying_is_slow(gate: threading.Event | None = None) -> Generator[None, None, None]:
    """What is left for later is copied 0.2 s later, or when the gate opens."""
    finish = HostCopy.finish

    def finished(self: HostCopy) -> None:
        if gate is None:
            time.sleep(0.2)
        else:
            assert gate.wait(30)
        finish(self)

    with mock.patch.object(HostCopy, "finish", finished):
        yield


def trained(optimizer: torch.optim.Optimizer, *, how: str) -> None:
    """One step: with a closure as Lightning does it, or without as a manual optimization may."""
    (weight,) = optimizer.param_groups[0]["params"]

    def closure() -> Tensor:
        weight.grad = torch.ones_like(weight)
        return torch.zeros(())

    if how == "closure by name":
        optimizer.step(closure=closure)
    elif how == "closure by place":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def a_step_meanwhile(folder: str, how: str) -> dict[str, Any]:
    """Options and weights are changed at once, the optimizer's state by its step, which comes before the copy."""
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer, saves, gate = torch.optim.AdamW([weight], lr=0.1), new_saves(), threading.Event()
    trained(optimizer, how=how)
    group = {"lr": torch.tensor(0.1)}
    sharded = {
        "state_dict": {"weight": weight},
        "optimizer_0": {"state": {"weight": optimizer.state[weight]}, "param_groups": [group]},
    }
    expected = {name: value.clone() for name, value in optimizer.state[weight].items()} | {"weight": weight.clone()}
    order: list[str] = []
    with copying_is_slow(gate):
        saves.save(f"{folder}/{how}", sharded, {}, **ABOUT, optimizers={"optimizer_0": optimizer})
        group["lr"].zero_()
        with torch.no_grad():
            weight.zero_()
        threading.Timer(0.3, lambda: (order.append("copied"), gate.set())).start()
        trained(optimizer, how=how)
        order.append("stepped")
    saves.wait()
    hooks_left = len(optimizer._optimizer_step_pre_hooks)
    saved = read_whole(Path(folder, how))
    found = {name: saved[f"optimizer_0.state.weight.{name}"] for name in optimizer.state[weight]}
    found["weight"] = saved["state_dict.weight"]
    is_same = {name: torch.equal(found[name], value) for name, value in expected.items()}
    has_moved = not torch.equal(optimizer.state[weight]["exp_avg"], expected["exp_avg"])
    rate = float(saved["optimizer_0.param_groups.0.lr"])
    return {"is_same": is_same, "moved": has_moved, "order": order, "hooks": hooks_left, "lr": rate}


@pytest.mark.parametrize("how", ["closure by name", "closure by place", "no closure"])
def test_an_optimizers_state_is_copied_after_the_save_has_returned_and_its_step_waits_for_that(ranks2, tmp_path, how):
    for found in ranks2(a_step_meanwhile, str(tmp_path), how):
        assert found["order"] == ["copied", "stepped"] and found["moved"]
        assert all(found["is_same"].values()) and len(found["is_same"]) == 4, found
        assert found["hooks"] == 0 and found["lr"] == pytest.approx(0.1)


def changed_behind_the_back(folder: str) -> dict[str, str]:
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer, saves, words = torch.optim.AdamW([weight], lr=0.1), new_saves(), {}
    trained(optimizer, how="no closure")
    sharded: dict[str, Any] = {"optimizer_0": {"state": {"weight": optimizer.state[weight]}}}
    about = {**ABOUT, "optimizers": {"optimizer_0": optimizer}}
    gate = threading.Event()
    with copying_is_slow(gate):
        saves.save(f"{folder}/changed", sharded, {}, **about)
        if dist.get_rank() == 1:
            optimizer.state[weight]["exp_avg"].zero_()
        gate.set()
        try:
            saves.wait()
        except CheckpointError as error:
            words["changed"] = str(error)
    take, refused = HostCopy.take, MemoryError("no memory")

    def taken(self: HostCopy, *args: Any) -> Any:
        copy = take(self, *args)
        if dist.get_rank() == 1:
            raise refused
        return copy

    with mock.patch.object(HostCopy, "take", taken):
        try:
            saves.save(f"{folder}/refused", sharded, {}, **about)
        except CheckpointError as error:
            words["refused"] = str(error)
    trained(optimizer, how="no closure")  # waits for nobody
    saves.save(f"{folder}/next", sharded, {}, **about)
    saves.wait()
    return words


def test_a_state_that_changes_while_it_is_copied_is_not_saved_and_no_step_waits_for_a_copy_that_failed(
    ranks2, tmp_path
):
    first, second = ranks2(changed_behind_the_back, str(tmp_path))
    assert first == second
    assert first["changed"].startswith(f"checkpoint('{tmp_path}/changed') was not saved")
    assert "optimizer_0.state.weight.exp_avg was changed outside its optimizer's step" in first["changed"]
    assert "rank 1 failed with MemoryError" in first["refused"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next"]


C = L.callbacks
NUM_STEPS = 4


def batches() -> Any:
    return loader(NUM_STEPS * 4, 16, 2)


class StopWhileSaving(L.Callback):
    """The disk is slow, and the training fails in the meantime."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if path := trainer.strategy._saves and trainer.strategy._saves.path:
            threading.Timer(0.3, self.gate.set).start()
            raise ArithmeticError(f"{Path(path).name} is there: {Path(path).exists()}")


class SaveNow(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
            assert len(whole(Path(self.path))) > 20


def fitted(folder: str, *, async_save: bool, callbacks: list[Any] = [], **options: Any) -> Any:  # noqa: B006
    torch.manual_seed(0)
    checkpoints = C.ModelCheckpoint(
        folder, every_n_train_steps=1, monitor="step", mode="max",
        **(dict(filename="{step}", save_top_k=2, save_last="link") | options),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu", devices=2, use_distributed_sampler=False, max_steps=NUM_STEPS,
            strategy=FSDPCPEPStrategy(fsdp=2, ep=2, async_save=async_save),
            callbacks=[checkpoints, ZigZagContextParallel(shift="module"), *callbacks],
            **(QUIET | dict(enable_checkpointing=True)),
        )  # fmt: skip
        trainer.fit(PlainLanguageModel(optimizer="adamw"), datamodule=InOrder(batches()))
    return checkpoints


def in_trainers(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    fitted(f"{folder}/sync", async_save=False)
    with copying_is_slow():
        fitted(f"{folder}/async", async_save=True)
    now = SaveNow(f"{folder}/now.ckpt")
    fitted(f"{folder}/copies", async_save=True, save_last=True, save_top_k=-1, callbacks=[now])
    gate = threading.Event()
    try:
        with disk_waits_for(gate):
            fitted(f"{folder}/stopped", async_save=True, callbacks=[StopWhileSaving(gate)])
    except ArithmeticError as error:
        found["stopped"] = str(error)
    with disk_is_slow():
        fitted(f"{folder}/same", async_save=True, filename="same", save_top_k=-1, save_last=None)
    saves: list[str] = []
    take = HostCopy.take

    def taken(self: HostCopy, *args: Any) -> Any:
        saves.append("")
        if len(saves) == NUM_STEPS and dist.get_rank() == 1:
            SummedStream.write = lambda *args: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        return take(self, *args)

    write = SummedStream.write
    HostCopy.take = taken  # type: ignore[method-assign]
    try:
        fitted(f"{folder}/failed", async_save=True)
    except CheckpointError as error:
        found["failed"] = str(error)
    finally:
        HostCopy.take, SummedStream.write = take, write  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    from tests.conftest import _pool

    folder = tmp_path_factory.mktemp("trainers")
    return folder, _pool(2)(in_trainers, str(folder))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole(path: Path) -> dict[str, Tensor]:
    return read_whole(path.resolve())


def test_checkpoints_of_a_trainer_are_those_of_saves_that_stop_it(trainers):
    folder, _ = trainers
    expected = ["last.ckpt", f"step={NUM_STEPS - 1}.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert names(folder / "sync") == names(folder / "async") == expected
    for name in expected:
        sync, at_once = whole(folder / "sync" / name), whole(folder / "async" / name)
        assert sync.keys() == at_once.keys() and len(sync) > 20
        assert all(torch.equal(at_once[key], tensor) for key, tensor in sync.items())
    assert (folder / "async" / "last.ckpt").resolve().name == f"step={NUM_STEPS}.ckpt"


def test_a_last_checkpoint_of_its_own_is_saved_too_and_what_a_user_saves_is_there_at_once(trainers):
    folder, _ = trainers
    expected = whole(folder / "copies" / "step=2.ckpt")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in whole(folder / "now.ckpt").items())
    assert names(folder / "copies") == ["last.ckpt", *(f"step={step + 1}.ckpt" for step in range(NUM_STEPS))]
    last, newest = whole(folder / "copies" / "last.ckpt"), whole(folder / "copies" / f"step={NUM_STEPS}.ckpt")
    assert all(torch.equal(last[key], tensor) for key, tensor in newest.items())


def test_a_training_that_fails_finishes_the_save_in_flight(trainers):
    folder, results = trainers
    assert [result["stopped"] for result in results] == ["step=1.ckpt is there: False"] * 2
    assert names(folder / "stopped") == ["last.ckpt", "step=1.ckpt"]
    expected = whole(folder / "copies" / "step=1.ckpt")
    for name in ("last.ckpt", "step=1.ckpt"):
        found = whole(folder / "stopped" / name)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_the_last_save_that_fails_fails_the_training_and_neither_removes_nor_links(trainers):
    folder, results = trainers
    assert results[0]["failed"] == results[1]["failed"]
    assert (
        f"step={NUM_STEPS}.ckpt') was not saved" in results[0]["failed"]
        and "rank 1 failed with" in results[0]["failed"]
    )
    assert names(folder / "failed") == ["last.ckpt", f"step={NUM_STEPS - 2}.ckpt", f"step={NUM_STEPS - 1}.ckpt"]
    assert (folder / "failed" / "last.ckpt").resolve().name == f"step={NUM_STEPS - 1}.ckpt"


def test_a_checkpoint_that_is_being_saved_has_its_name(trainers):
    folder, _ = trainers
    assert names(folder / "same") == ["same-v1.ckpt", "same-v2.ckpt", "same-v3.ckpt", "same.ckpt"]


def test_one_file_is_not_saved_beside_the_training():
    with pytest.raises(ValueError, match=r"async_save\(True\) needs save_distributed_checkpoint\(True\)"):
        FSDPCPEPStrategy(async_save=True, save_distributed_checkpoint=False)


def test_the_place_of_a_save_is_beside_its_checkpoint():
    assert staging_of("/run/step=1.ckpt") == "/run/.step=1.ckpt.saving"
    assert asynchronous.plain_path("file:///run/x/") == "/run/x"
