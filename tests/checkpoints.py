"""Small checkpoints of known content, what is whole on disk, and processes that are killed at a chosen moment."""

import functools
import os
import signal
import tempfile
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_moe_strategy.checkpoint.manifest import MANIFEST, Manifest
from lightning_moe_strategy.checkpoint.save import save_directory
from lightning_moe_strategy.checkpoint.storage import LocalStorage

ABOUT: dict[str, Any] = dict(layout={"world_size": 4, "ep": 2}, versions={"torch": torch.__version__})
ROWS, COLUMNS, NUM_WEIGHTS = 64, 16, 6


def weights(value: int) -> dict[str, Tensor]:
    """Whole tensors, all different."""
    generator = torch.Generator().manual_seed(value)
    return {f"layer.{i}.weight": torch.randn(ROWS, COLUMNS, generator=generator) for i in range(NUM_WEIGHTS)}


def sharded_state(value: int) -> dict[str, Any]:
    """On the ranks of the world: halves of the weights, replicated on the ranks that are left."""
    world = dist.get_world_size()
    shards = min(world, 2)
    mesh = init_device_mesh("cpu", (world // shards, shards))
    tensors = {name: distribute_tensor(w, mesh, [Replicate(), Shard(0)]) for name, w in weights(value).items()}
    return {
        "state_dict": tensors,
        "optimizer_0": {"state": {}, "param_groups": [{"params": list(tensors), "lr": 0.1 * value}]},
        "rank_states": {"random": {str(dist.get_rank()): torch.full((5,), dist.get_rank(), dtype=torch.uint8)}},
    }


def save(path: str, value: int, **rest: Any) -> None:
    """On every rank of the world."""
    group = dist.group.WORLD
    assert group is not None
    save_directory(path, sharded_state(value), {"epoch": value, **rest}, **ABOUT, group=group)


def value_of(path: str | Path) -> int | None:
    """What ``save`` put into the checkpoint, every file verified and every tensor compared; None where nothing is."""
    path = Path(path)
    if not path.exists():
        return None
    if path.is_file():
        return int(torch.load(path, weights_only=True)["epoch"])
    manifest = Manifest.from_json((path / MANIFEST).read_text(), str(path))
    assert {file.name for file in path.iterdir()} == {*manifest.files, MANIFEST}
    for name, record in manifest.files.items():
        content = (path / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (record.num_bytes, record.crc32), name
    value = int(torch.load(path / "meta.pt", weights_only=True)["epoch"])
    for key, tensor in read_whole(path).items():
        if key.startswith("state_dict."):
            assert torch.equal(tensor, weights(value)[key.removeprefix("state_dict.")]), key
    return value


def read_whole(path: Path) -> dict[str, Tensor]:
    """With torch's own reader, in one process: whole tensors by key."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def dies(function: Callable[[], None], moment: int) -> bool:
    """Run ``function`` in a process of its own, a world of one rank, killed before its ``moment``-th step on disk.

    False where it came to an end first.
    """
    _import_what_a_save_imports()
    child = os.fork()
    if child == 0:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            _die_at(moment)
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@functools.cache
def _import_what_a_save_imports() -> None:
    """Once, and not in every process that is killed: ten times as fast."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/first", 1)
    dist.destroy_process_group()


def _die_at(moment: int) -> None:
    steps = iter(range(1, 10_000))

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        return run

    changed: Any = LocalStorage
    for name in ("open", "sync", "sync_directory", "make_directory"):
        setattr(changed, name, watched(getattr(LocalStorage, name)))
    # What a removal is made of too, one file at a time.
    for name in ("unlink", "rmdir", "symlink", "rename", "replace"):
        setattr(os, name, watched(getattr(os, name)))
