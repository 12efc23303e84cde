"""A checkpoint that is one file of ``torch.save``: of this package, of Lightning's DDP, of any Trainer.

Its tensors stay in the file, mapped into memory, until a rank takes its parts of them.
"""

import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import local_slices
from lightning_moe_strategy.checkpoint.agreement import together
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.open_checkpoint import RANK_STATES, unsafe
from lightning_moe_strategy.checkpoint.storage import LocalStorage, Storage
from lightning_moe_strategy.checkpoint.verify import Advance
from lightning_moe_strategy.sharding import local_tensor

_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"
_ZIP_MAGIC = b"PK\x03\x04"
_BLOCK_BYTES = 1 << 22


class SingleFile:
    """What ``OpenCheckpoint`` is for a directory."""

    def __init__(self, path: str, storage: Storage, content: dict[str, Any]) -> None:
        self.path = path
        self._storage, self._content = storage, content

    def __enter__(self) -> "SingleFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing: what maps the file goes with its last tensor."""

    def weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = self._content[_WEIGHTS]
        return weights

    def optimizers(self) -> list[dict[str, Any]]:
        optimizers: list[dict[str, Any]] = self._content.get(_OPTIMIZERS, [])
        return optimizers

    def whole(self, tree: Any) -> Any:
        return tree

    def rest(self, *, weights_only: bool = True) -> dict[str, Any]:
        kept = self._content.keys() - {_WEIGHTS, _OPTIMIZERS, RANK_STATES}
        return {name: value for name, value in self._content.items() if name in kept}

    def rank_states(self, rank: int) -> dict[str, Tensor]:
        saved: Mapping[str, Mapping[str, Tensor]] = self._content.get(RANK_STATES, {})
        return {name: states[str(rank)] for name, states in saved.items() if str(rank) in states}

    def has_rank_states(self) -> bool:
        return RANK_STATES in self._content

    def saved_world_size(self) -> int:
        """Ranks that have states of their own in there; 0 where none has."""
        return max((len(states) for states in self._content.get(RANK_STATES, {}).values()), default=0)

    def verify(self, group: dist.ProcessGroup | None = None, *, advance: Advance | None = None) -> None:
        """Compare the checksums that ``torch.save`` writes, each by one rank; every rank calls it.

        Raises:
            CheckpointError: on every rank; a part of the file is not as it was written.
        """
        rank, num_ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        together(self.path, lambda: _check_records(self._storage, self.path, rank, num_ranks, advance), group)

    def num_bytes_to_verify(self, group: dist.ProcessGroup | None = None) -> int:
        """About as much as this rank will read."""
        with self._storage.open(self.path, "rb") as stream:
            return stream.seek(0, 2) // (group.size() if group is not None else 1)

    def prepare(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Nothing: the tensors are there."""

    @torch.no_grad()
    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]], *, advance: Advance | None = None) -> None:
        """Copy each tensor, or this rank's part of it, into its place; dtypes are converted."""
        for target, saved in pairs:
            local = local_tensor(target.detach())
            part = saved[local_slices(target)] if isinstance(target, DTensor) else saved
            local.copy_(part)
            if advance is not None:
                advance(part.numel() * part.dtype.itemsize)


def open_file(path: str, storage: Storage, *, weights_only: bool) -> SingleFile:
    """Raises:
    CheckpointError: it is no checkpoint, is damaged, or its code would have to be run.
    """
    with storage.open(path, "rb") as stream:
        is_zip = stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        stream.seek(0)
        try:
            if is_zip and isinstance(storage, LocalStorage):
                content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
            else:
                content = torch.load(stream, map_location="cpu", weights_only=weights_only)
        except OSError:
            raise
        except Exception as reason:
            raise CheckpointError(unsafe(path, reason)) from reason
    if not isinstance(content, dict) or not isinstance(content.get(_WEIGHTS), Mapping):
        held = f"the keys {', '.join(map(repr, list(content)[:5]))}" if isinstance(content, dict) else type(content)
        raise CheckpointError(
            f"checkpoint({path!r}) is no checkpoint of Lightning: it has no 'state_dict', but {held}. Load it in the "
            "LightningModule, model.load_state_dict(torch.load(path)), or correct ckpt_path."
        )
    return SingleFile(path, storage, content)


def _check_records(storage: Storage, path: str, rank: int, num_ranks: int, advance: Advance | None) -> None:
    with storage.open(path, "rb") as stream:
        if stream.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            return  # as torch wrote before 1.6, without checksums
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            if not any(record.CRC for record in records):
                return  # saved with torch.serialization.set_crc32_options(False)
            for record in records[rank::num_ranks]:
                try:
                    with archive.open(record) as content:
                        while block := content.read(_BLOCK_BYTES):
                            if advance is not None:
                                advance(len(block))
                except zipfile.BadZipFile as reason:
                    raise CheckpointError(
                        f"checkpoint({path!r}) is damaged: {record.filename} in it has other bytes than were written "
                        "(its checksum differs). Copy it again from where it was saved, or use another."
                    ) from reason
