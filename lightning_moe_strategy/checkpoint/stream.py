"""Write a checkpoint directory in one process, a part of a tensor at a time: none of them needs to fit into memory.

The same format as ``save`` writes, by torch.distributed.checkpoint's own writer. It asks for every part when its turn
comes, and the part is freed as soon as it is in the file.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import MANIFEST, REST, Manifest, TensorRecord
from lightning_moe_strategy.checkpoint.plain import packed
from lightning_moe_strategy.checkpoint.publish import discard_staging, publish, recover, staging_of
from lightning_moe_strategy.checkpoint.save import explained, require_replaceable
from lightning_moe_strategy.checkpoint.storage import plain_path, storage_of
from lightning_moe_strategy.checkpoint.writer import SummedWriter, without_checksums_inside

_MAX_FILE_BYTES = 4 << 30
MAX_PART_BYTES = 1 << 28
"""Of a part of a tensor, which is made in memory."""


@dataclass(frozen=True)
class StreamedTensor:
    """One tensor to write."""

    key: str
    """In the files, ``state_dict.<parameter>``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    make_rows: Callable[[int, int], Tensor]
    """Rows ``first`` to ``last`` (exclusive) of dim 0, in memory of their own; all of a tensor without dims."""


def write_streamed(
    path: str,
    tensors: Sequence[StreamedTensor],
    rest: Mapping[str, Any],
    *,
    versions: Mapping[str, str],
    max_part_bytes: int = MAX_PART_BYTES,
) -> None:
    """Write ``tensors`` and ``rest`` as the checkpoint ``path``, as a run on one rank would have saved them.

    Raises:
        CheckpointError: it cannot; what was there before stays.
    """
    path = plain_path(path)
    storage = storage_of(path)
    try:
        packed_rest = packed(rest)
        recover(path)
        require_replaceable(storage, path)
        discard_staging(path)
        storage.make_directory(staging_of(path))
        with storage.hold(staging_of(path)):
            writer = SummedWriter(staging_of(path), storage, is_on_gpu=False)
            with without_checksums_inside():
                _write_tensors(writer, tensors, max_part_bytes)
            _write_file(writer, REST, packed_rest)
            storage.sync_directory(staging_of(path))
            _write_file(writer, MANIFEST, _manifest(writer, tensors, versions))
            storage.sync_directory(staging_of(path))
            publish(path)
    except BaseException as error:
        with suppress(Exception):
            discard_staging(path)
        if isinstance(error, OSError | CheckpointError):
            raise CheckpointError(explained(path, error, 0)) from error
        raise


class _MakingPlanner(DefaultSavePlanner):
    """Gives the writer each part when it asks for it, and takes the memory of the one before."""

    def __init__(self, parts: Mapping[MetadataIndex, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._parts = parts
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self.free()
        self._last = self._parts[write_item.index]().contiguous()
        return self._last

    def free(self) -> None:
        if self._last is not None:
            self._last.untyped_storage().resize_(0)  # the writer of torch 2.13 keeps tensors until its file is whole
        self._last = None


def _write_tensors(writer: SummedWriter, tensors: Sequence[StreamedTensor], max_part_bytes: int) -> None:
    parts: dict[MetadataIndex, Callable[[], Tensor]] = {}
    files: list[list[WriteItem]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        for item, make in _parts_of(tensor, max_part_bytes):
            size = item.tensor_data.chunk.sizes.numel() * tensor.dtype.itemsize  # type: ignore[union-attr]
            if files[-1] and num_bytes + size > _MAX_FILE_BYTES:
                files.append([])
                num_bytes = 0
            files[-1].append(item)
            num_bytes += size
            parts[item.index] = make
    plans, metadata = create_default_global_save_plan([SavePlan(items) for items in files])
    metadata.planner_data = {tensor.key: tuple(tensor.key.split(".", 1)) for tensor in tensors}
    writer.reset()
    writer.set_up_storage_writer(True)
    planner = _MakingPlanner(parts)
    results = []
    for plan in writer.prepare_global_plan(plans):
        results.append(writer.write_data(plan, planner).wait())
        planner.free()
    writer.finish(metadata, results)


def _parts_of(tensor: StreamedTensor, max_part_bytes: int) -> list[tuple[WriteItem, Callable[[], Tensor]]]:
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = torch.Size(tensor.shape[1:]).numel() * tensor.dtype.itemsize
    step = max(1, max_part_bytes // max(1, row_bytes))
    parts = []
    for first in range(0, max(1, rows), step):
        last = min(first + step, rows)
        offsets = torch.Size((first, *[0] * (len(tensor.shape) - 1)) if tensor.shape else ())
        sizes = torch.Size((last - first, *tensor.shape[1:]) if tensor.shape else ())
        item = WriteItem(
            index=MetadataIndex(tensor.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.shape),
            ),
        )
        parts.append((item, _rows(tensor, first, last)))
    return parts


def _rows(tensor: StreamedTensor, first: int, last: int) -> Callable[[], Tensor]:
    return lambda: tensor.make_rows(first, last)


def _write_file(writer: SummedWriter, name: str, content: bytes) -> None:
    with writer.files.create_stream(os.path.join(os.fspath(writer.path), name), "wb") as stream:
        stream.write(content)


def _manifest(writer: SummedWriter, tensors: Sequence[StreamedTensor], versions: Mapping[str, str]) -> bytes:
    axes = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep", "world_size")
    records = {
        tensor.key: TensorRecord(dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
        for tensor in tensors
    }
    manifest = Manifest(
        versions=versions, layout=dict.fromkeys(axes, 1), tensors=records, files=dict(writer.files.records)
    )
    return manifest.to_json().encode()
