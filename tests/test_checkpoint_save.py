"""What a save writes: every byte once, summed up, readable by torch and without pickle, in place of what was there."""

import json
import math
import os
import pathlib
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from lightning_moe_strategy.checkpoint import publish
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import MANIFEST, Manifest
from lightning_moe_strategy.checkpoint.plain import require_plain
from lightning_moe_strategy.checkpoint.planner import KnownPlans, PlainPlanner
from lightning_moe_strategy.checkpoint.save import save_directory, save_file
from lightning_moe_strategy.checkpoint.storage import LocalStorage, plain_path, storage_of
from lightning_moe_strategy.checkpoint.writer import SummedFiles, SummedStream
from tests.checkpoints import ABOUT, COLUMNS, NUM_WEIGHTS, ROWS, read_whole, save, sharded_state, value_of
from tests.flavour import L
from tests.modules import PlainLanguageModel, loader
from tests.parity import QUIET, InOrder

C = L.callbacks


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def two_saves(path: str) -> None:
    save(path, 1)
    save(path, 2, where=pathlib.Path("/data"), rate=np.float32(0.5))


def test_every_byte_is_written_once_and_summed_up_and_replicas_share_the_work(ranks4, tmp_path):
    path = tmp_path / "deep" / "er" / "x.ckpt"
    ranks4(two_saves, str(path))
    assert names(path.parent) == ["x.ckpt"]
    assert value_of(path) == 2
    manifest = Manifest.from_json((path / MANIFEST).read_text(), str(path))
    assert manifest.layout == ABOUT["layout"] and manifest.versions == ABOUT["versions"]
    expected = {f"state_dict.layer.{i}.weight": ("float32", (ROWS, COLUMNS)) for i in range(NUM_WEIGHTS)}
    expected |= {f"rank_states.random.{rank}": ("uint8", (5,)) for rank in range(4)}
    assert {key: (record.dtype, record.shape) for key, record in manifest.tensors.items()} == expected
    by_rank = [manifest.files[f"__{rank}_0.distcp"].num_bytes for rank in range(4)]
    chunks = [chunk for entry in tensor_entries(path) for chunk in entry.chunks]
    assert sum(math.prod(chunk.sizes) for chunk in chunks) == NUM_WEIGHTS * ROWS * COLUMNS + 4 * 5
    assert max(by_rank) < 1.15 * min(by_rank), by_rank


def tensor_entries(path: Path) -> list[TensorStorageMetadata]:
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.values()
    return [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]


def test_torchs_own_reader_reads_it_and_the_rest_needs_no_pickle(ranks2, tmp_path):
    path = tmp_path / "x.ckpt"
    ranks2(two_saves, str(path))
    tensors = read_whole(path)
    assert [tensors[f"rank_states.random.{rank}"].tolist() for rank in (0, 1)] == [[0] * 5, [1] * 5]
    rest = torch.load(path / "meta.pt", weights_only=True)
    assert rest == {"epoch": 2, "where": "/data", "rate": 0.5}
    assert type(rest["where"]) is str and type(rest["rate"]) is float
    assert str(tmp_path).encode() not in (path / ".metadata").read_bytes()


def without_manifest(path: str) -> None:
    torch_save({"x": torch.ones(2)}, checkpoint_id=path)


def replaced(folder: str) -> None:
    """Whatever checkpoint lies there: Lightning's own, one file, a link, a link to nothing, an empty directory."""
    without_manifest(f"{folder}/lightnings")
    if dist.get_rank() == 0:
        torch.save({"epoch": 0}, f"{folder}/file")
        Path(folder, "empty").mkdir()
        Path(folder, "link").symlink_to("lightnings")
        Path(folder, "nowhere").symlink_to("missing")
        # What a save that was killed left, and one that was killed earlier.
        Path(folder, ".fresh.saving", "sub").mkdir(parents=True)
        Path(folder, ".fresh.saving", "sub", "x").write_text("x")
    dist.barrier()
    save(f"{folder}/kept", 1)
    for name in ("lightnings", "file", "empty", "link", "nowhere", "fresh"):
        save(f"{folder}/{name}", 2)


def test_a_checkpoint_of_any_kind_is_replaced_and_leftovers_are_not_in_the_way(ranks2, tmp_path):
    ranks2(replaced, str(tmp_path))
    assert names(tmp_path) == ["empty", "file", "fresh", "kept", "lightnings", "link", "nowhere"]
    for name in names(tmp_path):
        assert value_of(tmp_path / name) == (1 if name == "kept" else 2) and not (tmp_path / name).is_symlink()


def one_file(folder: str) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    for value in (1, 2):
        save_file(f"{folder}/a.ckpt", {"epoch": value}, group=group)
    save(f"{folder}/b.ckpt", 1)
    save_file(f"{folder}/b.ckpt", {"epoch": 3}, group=group)
    Path(folder, "mine.txt").write_text("mine")
    words = []
    dist.barrier()
    for path, content in ((f"{folder}/mine.txt", {"epoch": 4}), (f"{folder}/a.ckpt", {"f": lambda: 0})):
        try:
            save_file(path, content, group=group)
        except CheckpointError as error:
            words.append(str(error))
    return words


def test_one_file_is_replaced_at_once_or_stays(ranks2, tmp_path):
    first, second = ranks2(one_file, str(tmp_path))
    assert first == second and len(first) == 2
    assert "a file that is no checkpoint is in its place" in first[0] and "pickle" in first[1]
    assert value_of(tmp_path / "a.ckpt") == 2 and value_of(tmp_path / "b.ckpt") == 3
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "mine.txt"]


# What a checkpoint may hold


class Options:
    pass


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ({"hyper_parameters": {"width": 3, "path": Options}}, "hyper_parameters['path'] (type)"),
        ({"callbacks": {"Own": {"seen": [1, Options()]}}}, "callbacks['Own']['seen'][1] (tests.test_checkpoint_save."),
        ({"loops": {"f": lambda: 0}}, "loops['f'] (function)"),
        ({"a": Options(), "b": torch.nn.Linear(1, 1)}, "b (torch.nn.modules.linear.Linear) cannot be in a checkpoint"),
    ],
)
def test_what_would_need_pickle_is_refused_by_its_name(rest, name):
    with pytest.raises(CheckpointError) as refused:
        require_plain(rest)
    assert name in str(refused.value) and "save_hyperparameters(ignore=[...])" in str(refused.value)


def test_paths_and_numbers_of_numpy_become_plain_and_the_rest_stays():
    rest = {"a": [Path("x"), (np.int64(3),)], "b": {"c": np.bool_(True)}, "d": torch.ones(2), "e": None, 1: "f"}
    made = require_plain(rest)
    assert made["a"] == ["x", (3,)] and type(made["a"][1][0]) is int and made["b"]["c"] is True
    assert made["d"] is rest["d"] and made["e"] is None and made[1] == "f"


def sharded_in_rest() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(CheckpointError) as refused:
        require_plain({"callbacks": {"EMA": {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}}})
    return str(refused.value)


def test_a_sharded_tensor_in_the_rest_is_sent_to_where_it_belongs(ranks2):
    words = ranks2(sharded_in_rest)[0]
    assert (
        "callbacks['EMA']['w'] (torch.distributed.tensor.DTensor)" in words and "checkpoint['sharded_states']" in words
    )


# Leftovers


def test_a_folder_is_cleaned_of_what_saves_left_but_not_of_one_that_goes_on(tmp_path):
    for name in (".a.ckpt.saving", ".b.ckpt.saving", ".c.ckpt.removing", ".d.ckpt.replaced", ".e.ckpt.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(name)
    (tmp_path / ".f.ckpt.linking").symlink_to("nowhere")
    (tmp_path / ".g.ckpt.saving").write_text("one file")
    (tmp_path / "e.ckpt").mkdir()
    (tmp_path / ".hidden").write_text("mine")
    with LocalStorage().hold(str(tmp_path / ".b.ckpt.saving")):
        removed = publish.clean(str(tmp_path))
    assert names(tmp_path) == [".b.ckpt.saving", ".hidden", "d.ckpt", "e.ckpt"]
    assert removed == [".a.ckpt.saving", ".c.ckpt.removing", ".e.ckpt.replaced", ".f.ckpt.linking", ".g.ckpt.saving"]
    assert (tmp_path / "d.ckpt" / MANIFEST).read_text() == ".d.ckpt.replaced"
    assert publish.clean(str(tmp_path)) == [".b.ckpt.saving"] and publish.clean(str(tmp_path / "missing")) == []


def test_the_former_checkpoint_is_put_back_only_where_none_is(tmp_path):
    path = tmp_path / "x.ckpt"
    (tmp_path / ".x.ckpt.replaced").mkdir()
    publish.recover(str(path))
    assert names(tmp_path) == ["x.ckpt"]
    (tmp_path / ".x.ckpt.replaced").mkdir()
    publish.recover(str(path))
    publish.recover_all(str(tmp_path))
    assert names(tmp_path) == [".x.ckpt.replaced", "x.ckpt"]
    publish.remove(str(path))
    assert names(tmp_path) == []


def test_completeness_is_the_manifest(tmp_path):
    (tmp_path / "x").mkdir()
    assert not publish.is_complete(str(tmp_path / "x")) and not publish.is_complete(str(tmp_path / "y"))
    (tmp_path / "x" / MANIFEST).write_text("{}")
    assert publish.is_complete(str(tmp_path / "x"))


# Stores that fsspec reaches


def in_memory(folder: str) -> dict[str, Any]:
    """One rank: the memory of a process is what is shared."""
    from fsspec.core import url_to_fs

    files = url_to_fs(folder)[0]
    path, found = f"{folder}/x.ckpt", {}

    def content() -> tuple[int, set[str]]:
        manifest = Manifest.from_json(files.cat(f"{path}/{MANIFEST}").decode(), path)
        assert {name.rpartition("/")[2] for name in files.ls(path, detail=False)} == {*manifest.files, MANIFEST}
        for name, record in manifest.files.items():
            data = files.cat(f"{path}/{name}")
            assert (len(data), zlib.crc32(data)) == (record.num_bytes, record.crc32), name
        with files.open(f"{path}/meta.pt") as stream:
            return torch.load(stream, weights_only=True)["epoch"], set(storage_of(path).names(folder))

    save(path, 1)
    found["first"] = content()
    save(path, 2)
    found["second"] = content()
    broken: list[str] = []
    cp_file = type(files).cp_file

    def fails(self: Any, source: str, target: str, **options: Any) -> None:
        broken.append(target)
        if len(broken) == 7:  # after .metadata, four files of the former checkpoint and one of the new
            raise OSError(5, "the store is gone")
        cp_file(self, source, target, **options)

    type(files).cp_file = fails
    try:
        save(path, 3)
    except CheckpointError as error:
        found["error"] = str(error)
    finally:
        type(files).cp_file = cp_file
    publish.clean(folder)
    found["after an error"] = content()
    # Half a copy in its place has no manifest: what was there before is whole beside it.
    storage_of(path).rename(path, f"{folder}/.x.ckpt.replaced")
    files.pipe(f"{path}/meta.pt", b"half")
    publish.clean(folder)
    found["recovered"] = content()
    save_file(f"{folder}/one.ckpt", {"epoch": 5}, group=dist.group.WORLD)
    save_file(f"{folder}/one.ckpt", {"epoch": 6}, group=dist.group.WORLD)
    with files.open(f"{folder}/one.ckpt") as stream:
        found["file"] = torch.load(stream, weights_only=True)["epoch"]
    publish.remove(path)
    publish.remove(f"{folder}/one.ckpt")
    found["removed"] = storage_of(path).names(folder)
    return found


def test_a_store_without_rename_has_a_whole_checkpoint_or_none(ranks1):
    found = ranks1(in_memory, "memory://bucket/run")[0]
    assert found["first"] == (1, {"x.ckpt"}) and found["second"] == (2, {"x.ckpt"})
    assert "the store is gone" in found["error"]
    assert found["after an error"] == found["recovered"] == (2, {"x.ckpt"})
    assert found["file"] == 6 and found["removed"] == []


def test_paths_are_taken_as_lightning_gives_them():
    assert plain_path(Path("/run/x")) == plain_path("file:///run/x/") == "/run/x"
    assert plain_path("s3://bucket/run/") == "s3://bucket/run" and plain_path("/") == "/"


# In a Trainer


class Hyper(PlainLanguageModel):
    def __init__(self, loss: Any = None, path: Any = None) -> None:
        super().__init__(optimizer="adamw")
        self.save_hyperparameters()


class SaveBeforeTraining(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
        assert not trainer.optimizers[0].state


def fitted(folder: str, hyper: dict[str, Any], callbacks: list[Any] = [], strategy: Any = None, **options: Any) -> Any:  # noqa: B006
    torch.manual_seed(0)
    model = Hyper(**hyper)
    checkpoints = C.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, monitor="step", mode="max", **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu", devices=2, use_distributed_sampler=False, max_steps=3,
            strategy=strategy or FSDPCPEPStrategy(fsdp=2, ep=2),
            callbacks=[checkpoints, ZigZagContextParallel(shift="module"), *callbacks],
            **(QUIET | dict(enable_checkpointing=True)),
        )  # fmt: skip
        trainer.fit(model, datamodule=InOrder(loader(12, 16, 2)))
    return trainer, model


def in_trainers(folder: str) -> dict[str, Any]:
    if dist.get_rank() == 0:
        for name in (".step=1.ckpt.saving", ".step=7.ckpt.removing"):
            Path(folder, "links", name).mkdir(parents=True)
    dist.barrier()
    before = SaveBeforeTraining(f"{folder}/before.ckpt")
    trainer, model = fitted(f"{folder}/links", dict(path=Path("/x")), [before], save_top_k=2, save_last="link")
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    steps = {name: float(trainer.optimizers[0].state[p]["step"]) for name, p in model.named_parameters()}
    trainer.save_checkpoint(f"{folder}/alone.ckpt", weights_only=True)
    fitted(f"{folder}/copies", {}, save_top_k=1, save_last=True)
    one = FSDPCPEPStrategy(fsdp=2, ep=2, save_distributed_checkpoint=False)
    fitted(f"{folder}/files", {}, [SaveBeforeTraining(f"{folder}/before.file")], one, save_last="link")
    words = []
    for options in (dict(), dict(save_top_k=0, save_last=False)):
        try:
            fitted(f"{folder}/refused", dict(loss=torch.nn.ReLU()), **options)
            words.append("trained")
        except CheckpointError as error:
            words.append(str(error))
    try:
        trainer.save_checkpoint(f"{folder}/x", storage_options={"a": 1})
    except TypeError as error:
        words.append(str(error))
    return {"words": words, "weights": {k: v.detach() for k, v in weights.items()}, "steps": set(steps.values())}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    from tests.conftest import _pool

    folder = tmp_path_factory.mktemp("trainers")
    return folder, _pool(2)(in_trainers, str(folder))


def test_top_k_and_a_linked_last_checkpoint_are_directories_and_the_folder_is_tidy(trainers):
    folder, results = trainers
    assert names(folder / "links") == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert os.readlink(folder / "links" / "last.ckpt") == "step=3.ckpt"
    manifest = json.loads((folder / "links" / "last.ckpt" / MANIFEST).read_text())
    assert manifest["layout"] == {
        "d_rep": 1, "fsdp": 2, "cp": 1, "e_rep": 1, "e_fsdp": 1, "ep": 2, "world_size": 2,
    }  # fmt: skip
    assert {"lightning-moe-strategy", "torch", "lightning"} == manifest["versions"].keys()
    tensors = read_whole(folder / "links" / "step=3.ckpt")
    for name, weight in results[0]["weights"].items():
        assert torch.equal(tensors[f"state_dict.{name}"], weight), name
        assert f"optimizer_0.state.{name}.exp_avg" in tensors
    rest = torch.load(folder / "links" / "last.ckpt" / "meta.pt", weights_only=True)
    assert rest["hyper_parameters"]["path"] == "/x" and rest["global_step"] == 3


def test_a_last_checkpoint_of_its_own_takes_the_place_of_the_one_before(trainers):
    folder, _ = trainers
    assert names(folder / "copies") == ["last.ckpt", "step=3.ckpt"]
    last, newest = (read_whole(folder / "copies" / name) for name in names(folder / "copies"))
    assert last.keys() == newest.keys() and all(torch.equal(last[key], newest[key]) for key in last)


def test_a_save_before_the_first_step_makes_no_step(trainers):
    folder, results = trainers
    # torch's way to a state dict is a step with zero gradients, after which AdamW counts one too many.
    assert results[0]["steps"] == {3.0}
    keys = read_whole(folder / "before.ckpt").keys()
    assert not any(key.startswith("optimizer_0.state") for key in keys) and any(
        key.startswith("state_") for key in keys
    )
    states = torch.load(folder / "before.file", weights_only=True)["optimizer_states"]
    assert states[0]["state"] == {} and len(states[0]["param_groups"][0]["params"]) == len(results[0]["weights"])


def test_weights_alone_are_saved_alone(trainers):
    folder, _ = trainers
    keys = read_whole(folder / "alone.ckpt").keys()
    assert keys and all(key.startswith("state_dict.") for key in keys)


def test_one_file_for_all_ranks_is_lightnings(trainers):
    folder, results = trainers
    assert names(folder / "files") == ["last.ckpt", "step=3.ckpt"] and (folder / "files" / "last.ckpt").is_symlink()
    content = torch.load(folder / "files" / "last.ckpt", weights_only=True)
    for name, weight in results[0]["weights"].items():
        assert torch.equal(content["state_dict"][name], weight), name


def test_hyperparameters_that_no_checkpoint_can_hold_are_refused_before_training(trainers):
    folder, results = trainers
    words = results[0]["words"]
    assert words == results[1]["words"]
    assert words[0].startswith("hyper_parameters['loss'] (torch.nn.modules.activation.ReLU) cannot be in a checkpoint")
    assert words[1] == "trained"
    assert "storage_options({'a': 1}) would be handed to a CheckpointIO" in words[2]
    assert not (folder / "refused").exists()


def test_replicated_tensors_are_written_by_one_rank_each(ranks4, tmp_path):
    ranks4(replicated, str(tmp_path / "x"))
    sizes = [(tmp_path / "x" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.1 * min(sizes), sizes


def replicated(path: str) -> None:
    """Uneven sizes, some on all ranks and some halved on pairs of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {}
    for i in range(24):
        placements = [Replicate(), Shard(0) if i % 3 else Replicate()]
        tensors[f"w{i}"] = distribute_tensor(torch.randn(32 * (1 + i % 5), 16), mesh, placements)
    assert dist.group.WORLD is not None
    save_directory(path, {"state_dict": tensors}, {}, **ABOUT, group=dist.group.WORLD)


def saves_in_a_row(folder: str) -> list[bool]:
    """Whether this rank sent what it holds: the first time, the same again, rank 1 with another dtype, a tensor more, a
    save that fails on rank 1, and the one after it.
    """
    known, sent, rank = KnownPlans(), [], dist.get_rank()
    create = PlainPlanner.create_local_plan

    def created(self: PlainPlanner) -> SavePlan:
        plan = create(self)
        sent.append(plan.usable)
        return plan

    def save_known(name: str, value: int, **more: Any) -> None:
        state = sharded_state(value)
        state["rank_states"]["random"].update(more)
        assert dist.group.WORLD is not None
        save_directory(f"{folder}/{name}", state, {"epoch": value}, **ABOUT, group=dist.group.WORLD, known=known)

    failing = mock.patch.object(SummedStream, "write", lambda *args: 1 / 0)
    with mock.patch.object(PlainPlanner, "create_local_plan", created):
        save_known("first", 1)
        save_known("second", 2)
        save_known("wider", 3, **({"1": torch.full((5,), 1, dtype=torch.int64)} if rank == 1 else {}))
        save_known("more", 4, new=torch.arange(3))
        with failing if rank == 1 else nullcontext():
            with pytest.raises(CheckpointError, match="rank 1 failed with ZeroDivisionError"):
                save_known("failed", 5)
        save_known("last", 6)
    return sent


def test_what_ranks_hold_is_agreed_on_once_and_again_when_it_changes_or_a_save_has_failed(ranks2, tmp_path):
    sent = ranks2(saves_in_a_row, str(tmp_path))
    assert sent == [[True, False, False, True, True, True], [True, False, True, True, True, True]]
    assert names(tmp_path) == ["first", "last", "more", "second", "wider"]
    for value, name in enumerate(("first", "second", "wider", "more"), start=1):
        assert value_of(tmp_path / name) == value
        tensors = read_whole(tmp_path / name)
        of_one = tensors["rank_states.random.1"]
        assert of_one.tolist() == [1] * 5 and of_one.dtype == (torch.int64 if name == "wider" else torch.uint8)
        assert ("rank_states.random.new" in tensors) == (name == "more")
    assert value_of(tmp_path / "last") == 6 and tensors["rank_states.random.new"].tolist() == [0, 1, 2]


class Noting(LocalStorage):
    """What the disk is asked to begin with, and what is in the file by then."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, int]] = []

    def begin_sync(self, stream: Any, offset: int, num_bytes: int) -> None:
        super().begin_sync(stream, offset, num_bytes)
        self.begun.append((offset, num_bytes, os.fstat(stream.fileno()).st_size))


def test_the_disk_begins_while_a_large_file_is_still_being_written(tmp_path):
    storage, piece = Noting(), bytes(range(256)) * (1 << 16)  # 16.8 MB
    files = SummedFiles(storage)
    with files.create_stream(str(tmp_path / "large"), "wb") as stream:
        for _ in range(9):
            stream.write(piece)
    assert storage.begun == [(0, 4 * len(piece), 4 * len(piece)), (4 * len(piece), 4 * len(piece), 8 * len(piece))]
    assert files.records["large"].crc32 == zlib.crc32(piece * 9)
    assert (tmp_path / "large").read_bytes() == piece * 9
