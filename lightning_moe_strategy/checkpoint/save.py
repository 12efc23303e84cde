"""Save a checkpoint directory: written aside by all ranks, complete or absent, one outcome for all.

Every rank calls these functions, in the same order, on a group that exchanges tensors of the CPU.
"""

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from lightning_moe_strategy._torch_compat import tensors_in
from lightning_moe_strategy.checkpoint.agreement import one_outcome
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import MANIFEST, METADATA, REST, FileRecord, Manifest, TensorRecord
from lightning_moe_strategy.checkpoint.plain import packed
from lightning_moe_strategy.checkpoint.planner import KnownPlans, PlainPlanner
from lightning_moe_strategy.checkpoint.publish import discard_staging, publish, recover, staging_of
from lightning_moe_strategy.checkpoint.storage import Storage, plain_path, storage_of
from lightning_moe_strategy.checkpoint.writer import SummedStream, SummedWriter, without_checksums_inside

_Result = TypeVar("_Result")

_ZIP = b"PK\x03\x04"
_REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT),
        "Free space there, or keep fewer checkpoints: ModelCheckpoint(save_top_k=...).",
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "Save where the user who trains may write: ModelCheckpoint(dirpath=...).",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        "A file is where a directory has to be: move it away, or save elsewhere: ModelCheckpoint(dirpath=...).",
    ),
}
_OTHER_REMEDY = "Look at the file system on that rank, or save elsewhere: ModelCheckpoint(dirpath=...)."


def save_directory(
    path: str,
    sharded: Mapping[str, Any],
    rest: Mapping[str, Any],
    *,
    layout: Mapping[str, int],
    versions: Mapping[str, str],
    group: dist.ProcessGroup,
    known: KnownPlans | None = None,
) -> None:
    """Save ``sharded`` (nested, by torch.distributed.checkpoint) and rank 0's ``rest`` as the directory ``path``.

    A checkpoint that is there stays until the new one is whole. ``layout`` and ``versions`` are for the manifest.
    ``known``: of the saves before this one.

    Raises:
        CheckpointError: on every rank, if one of them cannot; names the first that could not, why and what to do.
    """
    path = plain_path(path)
    pack = partial(packed, rest)
    write_directory(path, sharded, pack, layout=layout, versions=versions, group=group, known=known)


def write_directory(
    path: str,
    sharded: Mapping[str, Any],
    pack_rest: Callable[[], bytes],
    *,
    layout: Mapping[str, int],
    versions: Mapping[str, str],
    group: dist.ProcessGroup,
    known: KnownPlans | None = None,
) -> None:
    """``save_directory`` with ``meta.pt`` as rank 0 packs it, before anything is written."""
    storage, is_first = storage_of(path), group.rank() == 0

    def prepare() -> bytes:
        packed_rest = pack_rest()
        _prepare_directory(storage, path)
        return packed_rest

    try:
        packed_rest = agreed(path, prepare if is_first else bytes, group)
        with storage.hold(staging_of(path)) if is_first else nullcontext():
            metadata, records = _write_tensors(storage, path, sharded, group, known or KnownPlans())
            manifest = Manifest(versions=versions, layout=layout, tensors=_tensors(metadata), files=records)
            agreed(path, lambda: _finish(storage, path, packed_rest, manifest) if is_first else None, group)
    except BaseException:
        if is_first:
            with suppress(Exception):
                discard_staging(path)
        raise


def save_file(path: str, content: Mapping[str, Any], *, group: dist.ProcessGroup) -> None:
    """Save rank 0's ``content`` with ``torch.save`` as the one file ``path``. A checkpoint there stays until then.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot.
    """
    storage, staging = storage_of(path), staging_of(path)

    def write() -> None:
        _prepare(storage, path)
        with storage.open(staging, "wb") as stream:
            torch.save(content, stream)
            storage.sync(stream)
        publish(path)

    try:
        agreed(path, write if group.rank() == 0 else lambda: None, group)
    except BaseException:
        if group.rank() == 0:
            with suppress(Exception):
                discard_staging(path)
        raise


def agreed(path: str, action: Callable[[], _Result], group: dist.ProcessGroup) -> _Result:
    """Its result, if every rank's ``action`` has one.

    Raises:
        CheckpointError: on every rank, in the words of the first that failed.
    """
    return one_outcome(
        action,
        lambda error: explained(path, error, group.rank()),
        lambda words, failed: str(words[failed[0]]),
        group,
    )


def explained(path: str, error: BaseException, rank: int) -> str:
    """Why ``path`` was not saved, for the ranks that have no error of their own."""
    kept = f"checkpoint({path!r}) was not saved, and what was there before stays"
    if isinstance(error, CheckpointError):
        return str(error) if str(error).startswith("checkpoint(") else f"{kept}: {error}"
    remedy = _REMEDIES.get(error.errno or 0, _OTHER_REMEDY) if isinstance(error, OSError) else _OTHER_REMEDY
    return f"{kept}: rank {rank} failed with {type(error).__name__}: {error}. {remedy}"


def require_replaceable(storage: Storage, path: str) -> None:
    """Nothing, if ``path`` is free or a checkpoint, of whatever kind.

    Raises:
        CheckpointError: it is a file or a directory of something else.
    """
    if not storage.exists(path):
        return
    if storage.is_directory(path):
        names = storage.names(path)
        if names and not {MANIFEST, METADATA}.intersection(names):
            raise CheckpointError(
                f"a directory with other files ({', '.join(names[:3])}) is in its place. Move it away, or save "
                "elsewhere: ModelCheckpoint(dirpath=...)."
            )
        return
    with suppress(FileNotFoundError):  # a link that leads nowhere
        with storage.open(path, "rb") as stream:
            start = stream.read(len(_ZIP))
        if start != _ZIP:
            raise CheckpointError(
                "a file that is no checkpoint is in its place. Move it away, or save elsewhere: "
                "ModelCheckpoint(dirpath=...)."
            )


def _prepare(storage: Storage, path: str) -> None:
    recover(path)
    require_replaceable(storage, path)
    discard_staging(path)
    storage.make_directory(os.path.dirname(path) or ".")


def _prepare_directory(storage: Storage, path: str) -> None:
    _prepare(storage, path)
    storage.make_directory(staging_of(path))


def _write_tensors(
    storage: Storage, path: str, sharded: Mapping[str, Any], group: dist.ProcessGroup, known: KnownPlans
) -> tuple[Metadata, dict[str, FileRecord]]:
    """Every rank's file; replicas share the bytes among them. Records of all files by name, on every rank."""
    is_on_gpu = any(tensor.is_cuda for tensor in tensors_in(dict(sharded)))
    writer = SummedWriter(staging_of(path), storage, is_on_gpu=is_on_gpu)
    try:
        # Where there are no gradients, a DTensor hands out its part as it is.
        with torch.no_grad(), without_checksums_inside():
            metadata = save_distributed(
                dict(sharded), storage_writer=writer, planner=PlainPlanner(known), process_group=group
            )
    except CheckpointException as failed:
        known.forget()
        rank, (error, _) = min(failed.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(explained(path, error, rank)) from error
    records: list[dict[str, FileRecord]] = [{}] * group.size()
    dist.all_gather_object(records, writer.files.records, group=group)
    return metadata, {name: record for of_rank in records for name, record in of_rank.items()}


def _finish(storage: Storage, path: str, packed_rest: bytes, manifest: Manifest) -> None:
    """Rank 0 alone: the rest, then the manifest, then the name."""
    staging = staging_of(path)
    rest_record = _write(storage, f"{staging}/{REST}", packed_rest)
    complete = Manifest(
        versions=manifest.versions,
        layout=manifest.layout,
        tensors=manifest.tensors,
        files={**manifest.files, REST: rest_record},
    )
    storage.sync_directory(staging)
    _write(storage, f"{staging}/{MANIFEST}", complete.to_json().encode())
    storage.sync_directory(staging)
    publish(path)


def _write(storage: Storage, path: str, content: bytes) -> FileRecord:
    """A file that survives a power failure."""
    with storage.open(path, "wb") as stream:
        summed = SummedStream(stream)
        summed.write(content)
        storage.sync(stream)
    return summed.record


def _tensors(metadata: Metadata) -> dict[str, TensorRecord]:
    return {
        key: TensorRecord(dtype=str(entry.properties.dtype).removeprefix("torch."), shape=tuple(entry.size))
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
