"""What is wrong with a checkpoint is one clear error on every rank, and nothing has changed by then."""

import json
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.sharding import local_tensor
from tests.laid_out import adamw, load_again, placed, save, sgd, step

DEGREES = dict(fsdp=2, e_fsdp=1, ep=2)
MANIFEST, METADATA, REST, SHARD = "manifest.json", ".metadata", "meta.pt", "__1_0.distcp"
NOBODY = 65534

Change = Callable[[Path], Path | None]
"""Of a whole checkpoint in a directory of its own; where it is to be loaded from, if not from there."""


class Evil:
    """Whoever loads it with pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """What is done to a checkpoint, who loads it, and what the error has to say."""

    change: Change = lambda path: None
    says: str
    by_torch: bool = False
    """A directory without a manifest, as Lightning's ModelParallelStrategy writes it."""
    decoder: dict[str, Any] = field(default_factory=dict)
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda model: [adamw(model)]
    as_nobody: bool = False


def cut(name: str, num_bytes: int = 100) -> Change:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - num_bytes)


def flip(name: str, place: float = 0.5) -> Change:
    def change(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(len(content) * place)] ^= 1
        (path / name).write_bytes(content)

    return change


def write(name: str, content: bytes) -> Change:
    return lambda path: [(path / name).write_bytes(content)] and None


def without(name: str) -> Change:
    return lambda path: os.unlink(path / name)


def manifest(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(path: Path) -> None:
        content = json.loads((path / MANIFEST).read_text())
        edit(content)
        (path / MANIFEST).write_text(json.dumps(content))

    return change


def summed(name: str, content: Callable[[Path], bytes]) -> Change:
    """A file that the manifest knows with its checksum: whoever wrote it means harm."""

    def change(path: Path) -> None:
        written = content(path)
        (path / name).write_bytes(written)
        record = {"num_bytes": len(written), "crc32": zlib.crc32(written)}
        manifest(lambda found: found["files"].update({name: record}))(path)

    return change


def metadata(edit: Callable[[Any], Any]) -> Change:
    def change(path: Path) -> None:
        found = FileSystemReader(path).read_metadata()
        (path / METADATA).write_bytes(pickle.dumps(edit(found) or found))

    return change


def move_item(**fields: Any) -> Change:
    def edit(found: Any) -> None:
        for info in found.storage_data.values():
            vars(info).update(fields)

    return metadata(edit)


def evil(path: Path) -> Evil:
    return Evil(path.parent / "evil")


def evil_item(path: Path) -> None:
    """An option of the optimizer, in the place of one that is as long."""
    found = FileSystemReader(path).read_metadata()
    info = found.storage_data[MetadataIndex("optimizer_0.param_groups.0.lr")]
    content = _saved(evil(path))
    file = path / info.relative_path
    info.offset, info.length = file.stat().st_size, len(content)
    with file.open("ab") as stream:
        stream.write(content)
    (path / METADATA).write_bytes(pickle.dumps(found))


def _saved(value: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def as_file(value: Callable[[Path], Any]) -> Change:
    def change(path: Path) -> Path:
        torch.save(value(path), path.parent / "file.ckpt")
        return path.parent / "file.ckpt"

    return change


def then(change: Change, other: Callable[[Path], Any]) -> Change:
    def both(path: Path) -> Path:
        file = change(path)
        assert file is not None
        other(file)
        return file

    return both


def renamed(name: str) -> Change:
    return lambda path: path.rename(path.parent / name)


def linked(target: str) -> Change:
    def change(path: Path) -> Path:
        os.symlink(target, path.parent / "link.ckpt")
        return path.parent / "link.ckpt"

    return change


def shard_is_a_link(path: Path) -> None:
    os.unlink(path / SHARD)
    os.symlink("nowhere", path / SHARD)


def shard_is_a_directory(path: Path) -> None:
    os.unlink(path / SHARD)
    (path / SHARD).mkdir()


def other_directory(path: Path) -> Path:
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes.txt").write_text("nothing")
    return path


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def half_a_chunk(found: Any) -> None:
    entry = found.state_dict_metadata["state_dict.embedding.weight"]
    chunk = entry.chunks[0]
    entry.chunks[0] = ChunkStorageMetadata(chunk.offsets, torch.Size((chunk.sizes[0] - 1, *chunk.sizes[1:])))


def chunk_outside(found: Any) -> None:
    entry = found.state_dict_metadata["state_dict.embedding.weight"]
    entry.chunks[0] = ChunkStorageMetadata(torch.Size((1000, 0)), entry.chunks[0].sizes)


def chunk_twice(found: Any) -> None:
    entry = found.state_dict_metadata["state_dict.blocks.0.sparse.experts.up"]
    entry.chunks[1] = entry.chunks[0]


def other_shape(found: Any) -> None:
    """As large, and not what lies in the file."""
    entry = found.state_dict_metadata["state_dict.norm.weight"]
    entry.properties.dtype = torch.int32


def forget_place(found: Any) -> None:
    found.planner_data["state_dict.norm.weight"] = ("state_dict", 2**40)


def by_hand(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.01)]


EMBEDDING = r"embedding.weight is \(61, 16\) in it and \(70, 16\) in the model"
WRONG: dict[str, Wrong] = {
    # Files that are not as they were written.
    "shard truncated": Wrong(change=cut(SHARD), says=rf"{SHARD} has \d+ bytes, not \d+.*Copy it again"),
    "shard emptied": Wrong(change=write(SHARD, b""), says=f"{SHARD} has 0 bytes"),
    "shard longer": Wrong(
        change=lambda p: (p / SHARD).write_bytes((p / SHARD).read_bytes() + b"x") and None, says=SHARD
    ),
    "shard bit flipped": Wrong(change=flip(SHARD), says=f"{SHARD} has other bytes than were written"),
    "shard's last bit flipped": Wrong(change=flip(SHARD, 0.9999), says=f"{SHARD} has other bytes"),
    "shard missing": Wrong(change=without(SHARD), says=f"{SHARD} is missing"),
    "shard a dangling link": Wrong(change=shard_is_a_link, says=f"{SHARD} is missing"),
    "shard a directory": Wrong(change=shard_is_a_directory, says=f"{SHARD} is missing"),
    "shard too many": Wrong(change=write("__9_0.distcp", b"x"), says="__9_0.distcp does not belong to it"),
    "metadata truncated": Wrong(change=cut(METADATA), says=rf"{METADATA} has \d+ bytes, not"),
    "metadata bit flipped": Wrong(change=flip(METADATA), says=f"{METADATA} has other bytes"),
    "metadata missing": Wrong(change=without(METADATA), says=f"{METADATA} is missing"),
    "rest truncated": Wrong(change=cut(REST), says=rf"{REST} has \d+ bytes, not"),
    "rest bit flipped": Wrong(change=flip(REST), says=f"{REST} has other bytes"),
    "rest missing": Wrong(change=without(REST), says=f"{REST} is missing"),
    # The manifest.
    "newer format": Wrong(
        change=manifest(lambda found: found.update(format=99)), says="has format 99, and this version reads up to 1"
    ),
    "manifest missing": Wrong(change=without(MANIFEST), says="has no manifest.json, which is written last"),
    "manifest empty": Wrong(change=write(MANIFEST, b""), says="has a damaged manifest.json"),
    "manifest garbage": Wrong(change=write(MANIFEST, b"\xff\x00garbage"), says="has a damaged manifest.json"),
    "manifest truncated": Wrong(change=cut(MANIFEST), says="has a damaged manifest.json"),
    "manifest of a list": Wrong(change=write(MANIFEST, b"[1]"), says="has a damaged manifest.json"),
    "manifest with a word for a number": Wrong(
        change=manifest(lambda found: found.update(format="1")), says="'1' must be a whole number"
    ),
    "manifest with a negative size": Wrong(
        change=manifest(lambda found: found["files"][SHARD].update(num_bytes=-1)), says="-1 must be a whole number"
    ),
    "manifest that leads out": Wrong(
        change=manifest(lambda found: found["files"].update({"../other": found["files"][SHARD]})),
        says="'../other' must be the name of a file in the directory",
    ),
    "manifest without the rest": Wrong(
        change=manifest(lambda found: found["files"].pop(REST)), says=f"manifest.json without {REST}"
    ),
    "manifest of other tensors": Wrong(
        change=manifest(lambda found: found["tensors"]["state_dict.norm.weight"].update(shape=[3])),
        says="do not agree about 1 tensors, 'state_dict.norm.weight'",
    ),
    # Code that would run.
    "evil metadata": Wrong(
        by_torch=True,
        change=lambda p: (p / METADATA).write_bytes(pickle.dumps(evil(p))) and None,
        says="names posix.mkdir",
    ),
    "evil metadata, summed": Wrong(
        change=summed(METADATA, lambda path: pickle.dumps(evil(path))),
        says="it names posix.mkdir.*Nothing of it was run",
    ),
    "evil rest": Wrong(
        by_torch=True,
        change=lambda p: (p / REST).write_bytes(_saved({"epoch": evil(p)})) and None,
        says="weights_only=False",
    ),
    "hyperparameters that need pickle": Wrong(
        change=summed(REST, lambda path: _saved({"hyper_parameters": {"loss": nn.MSELoss()}})),
        says=r"meta.pt.*without running code.*MSELoss.*save_hyperparameters\(ignore",
    ),
    "rest of a list": Wrong(change=summed(REST, lambda path: _saved([1])), says="with a list where a dict has to be"),
    "evil option of an optimizer": Wrong(
        by_torch=True, change=evil_item, says="optimizer_0.param_groups.0.lr' in it does not.*names posix.mkdir"
    ),
    # What a directory without a manifest says of itself.
    "metadata that leads out": Wrong(
        by_torch=True, change=move_item(relative_path="../other"), says="'../other', which is no file of this directory"
    ),
    "metadata that leads to the root": Wrong(
        by_torch=True, change=move_item(relative_path="/etc/passwd"), says="'/etc/passwd', which is no file of this"
    ),
    "metadata beyond the file": Wrong(
        by_torch=True, change=move_item(offset=10**9), says="lies in bytes 1000000000 to"
    ),
    "metadata before the file": Wrong(by_torch=True, change=move_item(offset=-5), says="-5 must be a whole number"),
    "metadata to other bytes": Wrong(by_torch=True, change=move_item(offset=7), says="not|no tensor"),
    "metadata of a dict": Wrong(
        by_torch=True, change=metadata(lambda found: {"a": 1}), says="a dict is where a Metadata has to be"
    ),
    "metadata of compressed items": Wrong(
        by_torch=True, change=move_item(transform_descriptors=["zstd"]), says="'zstd'.*not supported"
    ),
    "chunk outside of its tensor": Wrong(by_torch=True, change=metadata(chunk_outside), says="outside of it"),
    "chunks that hold too little": Wrong(by_torch=True, change=metadata(half_a_chunk), says="its chunks hold"),
    "chunk twice": Wrong(by_torch=True, change=metadata(chunk_twice), says="its chunks hold"),
    "chunk of another dtype": Wrong(by_torch=True, change=metadata(other_shape), says="norm.weight.*int32"),
    "list of a size beyond all memory": Wrong(
        by_torch=True, change=metadata(forget_place), says="norm.weight.*belongs"
    ),
    "shard truncated, no manifest": Wrong(by_torch=True, change=cut(SHARD, 3000), says=rf"of {SHARD}, which has \d+"),
    # Another model.
    "more layers": Wrong(decoder=dict(num_layers=2), says=r"it lacks 9: blocks.1.norm.bias \(16,\).*strict_loading"),
    "fewer experts": Wrong(
        decoder=dict(num_experts=2),
        says=r"experts.up is \(4, 32, 16\) in it and \(2, 32, 16\) in the model.*Build the model that was saved\.",
    ),
    "more experts": Wrong(decoder=dict(num_experts=8), says=r"experts.down is \(4, 16, 32\) in it and \(8, 16, 32\)"),
    "more words": Wrong(decoder=dict(num_words=70), says=EMBEDDING),
    "another width": Wrong(decoder=dict(width=32), says="of another shape or dtype 14: .*and 6 more"),
    # Other optimizers.
    "another optimizer": Wrong(
        make_optimizers=lambda model: [sgd(model)], says="has the options amsgrad, .* a SGD, has dampening, .* instead"
    ),
    "two optimizers": Wrong(
        make_optimizers=lambda model: [adamw(model), adamw(model)], says="holds 1 optimizers, and .* returned 2"
    ),
    "no optimizer": Wrong(make_optimizers=lambda model: [], says="holds 1 optimizers, and .* returned 0"),
    "another number of groups": Wrong(make_optimizers=by_hand, says="has 1 parameter groups, and the module's has 2"),
    "other parameters": Wrong(
        make_optimizers=lambda model: [torch.optim.AdamW(list(model.parameters())[1:])],
        says="other parameters in group 0: the module's lacks embedding.weight",
    ),
    # No checkpoint at all.
    "nothing there": Wrong(change=lambda path: path.parent / "no.ckpt", says=r"no.ckpt'\) does not exist.*x.ckpt"),
    "empty directory": Wrong(change=emptied, says="is an empty directory"),
    "directory of something else": Wrong(
        change=other_directory, says="is no checkpoint: the directory has no .metadata"
    ),
    "where a save writes": Wrong(change=renamed(".x.ckpt.saving"), says="is where a save writes.*Load 'x.ckpt'"),
    "link that leads nowhere": Wrong(change=linked("nowhere"), says="is a link that leads nowhere"),
    "link to itself": Wrong(change=linked("link.ckpt"), says="is a link that leads nowhere"),
    "no permission": Wrong(change=lambda path: os.chmod(path, 0), as_nobody=True, says="PermissionError.*chmod"),
    # One file.
    "file of words": Wrong(
        change=lambda p: (p / REST).write_text("no checkpoint") and p / REST,
        says="without running code .*or is damaged",
    ),
    "file of a list": Wrong(change=as_file(lambda path: [1, 2]), says="is no checkpoint of Lightning.*list"),
    "file of weights alone": Wrong(
        change=as_file(lambda path: {"norm.weight": torch.ones(16)}), says="it has no 'state_dict', but the keys 'norm"
    ),
    "file truncated": Wrong(
        change=then(as_file(lambda path: {"state_dict": {"a": torch.ones(999)}}), lambda f: os.truncate(f, 3000)),
        says="file.ckpt'.*or is damaged",
    ),
    "file bit flipped": Wrong(
        change=then(as_file(lambda p: {"state_dict": {"a": torch.ones(9999)}}), lambda f: flip(f.name, 0.5)(f.parent)),
        says="file.ckpt'.*data/0 in it has other bytes than were written",
    ),
    "evil file": Wrong(
        change=as_file(lambda path: {"state_dict": {}, "loops": evil(path)}), says="without running code"
    ),
}


@contextmanager
def nobody(is_asked: bool) -> Iterator[None]:
    """A user who may not read all."""
    if is_asked and os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def save_as_lightning(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"state_dict": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    save_by_torch(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({"epoch": 1}, path / REST)


def everything(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Copies of all that a load may change."""
    tensors = [local_tensor(tensor).detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [local_tensor(value).clone() for value in state.values() if isinstance(value, torch.Tensor)]
    groups = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    return [*tensors, torch.get_rng_state(), repr(groups), repr(random.getstate())]


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def refusals(folder: str) -> dict[str, tuple[str, bool]]:
    """Of every wrong input: the error on this rank, and whether all is as it was."""
    rank, root, found = dist.get_rank(), Path(folder), {}
    model = placed(DEGREES)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    save(str(root / "ours"), model, optimizer, epoch=1)
    save_as_lightning(root / "torchs", model, optimizer)
    for index, (name, wrong) in enumerate(WRONG.items()):
        at = root / str(index) / "x.ckpt"
        loaded_from: list[Any] = [at]
        if rank == 0:
            shutil.copytree(root / ("torchs" if wrong.by_torch else "ours"), at)
            loaded_from = [wrong.change(at) or at]
        dist.broadcast_object_list(loaded_from)
        if wrong.decoder:
            model = placed(DEGREES, **wrong.decoder)
        optimizers = wrong.make_optimizers(model)
        for one in optimizers:
            step(model, one, index)
        before = everything(model, optimizers)
        try:
            with nobody(wrong.as_nobody):
                load_again(str(loaded_from[0]), model, *optimizers)
            said = "nothing was refused"
        except CheckpointError as error:
            said = str(error)
        after = everything(model, optimizers)
        unchanged = len(before) == len(after) and all(map(is_same, before, after))
        found[name] = (said, unchanged and not (root / str(index) / "evil").exists())
        dist.barrier()
        if wrong.decoder:
            model = placed(DEGREES)
    return found


_found: list[list[dict[str, tuple[str, bool]]]] = []


@pytest.fixture
def found(ranks2, tmp_path_factory):
    if not _found:
        folder = tmp_path_factory.mktemp("refused")
        folder.chmod(0o755)
        _found.append(ranks2(refusals, str(folder)))
    return _found[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_on_every_rank_and_nothing_has_changed(name, found):
    for of_rank in found:
        said, is_unchanged = of_rank[name]
        assert re.search(WRONG[name].says, said, re.DOTALL), said
        assert is_unchanged
        assert len(said) < 1200 and said.endswith(("another.", "checkpoint.", "ckpt_path.", ".")), said


def test_forty_inputs_are_refused_and_each_has_words_of_its_own(found):
    assert len(WRONG) >= 40
    words = {name: re.sub(r"'/[^']*'|\d+", "", said) for name, (said, _) in found[0].items()}
    assert len(set(words.values())) > 35
