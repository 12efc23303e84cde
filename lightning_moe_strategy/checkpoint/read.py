"""Open a checkpoint, a directory or one file, of this package or of Lightning.

    checkpoint = open_directory("run/last.ckpt")
    checkpoint.verify()
    weight = checkpoint.tensor("state_dict.model.embed.weight")

In one process or on all ranks of a group; on any layout. No code that a file names is run.
"""

import os
from contextlib import suppress

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import MANIFEST, METADATA, REST, Manifest
from lightning_moe_strategy.checkpoint.open_checkpoint import MODULE_KEY, OpenCheckpoint, Stored
from lightning_moe_strategy.checkpoint.publish import recover
from lightning_moe_strategy.checkpoint.safe_metadata import Contents, read_metadata
from lightning_moe_strategy.checkpoint.single_file import SingleFile, open_file
from lightning_moe_strategy.checkpoint.storage import Storage, plain_path, storage_of
from lightning_moe_strategy.checkpoint.verify import check_content, check_sizes, sizes_of

__all__ = ["MODULE_KEY", "OpenCheckpoint", "Stored", "open_checkpoint", "open_directory"]


def open_checkpoint(path: str, *, weights_only: bool = True) -> OpenCheckpoint | SingleFile:
    """``open_directory``, or the same for one file.

    ``weights_only``: of the file. Without, the code that it names is run; a directory asks when its ``rest`` is read.

    Raises:
        CheckpointError: see ``open_directory``.
    """
    path = plain_path(path)
    recover(path)
    storage = storage_of(path)
    if os.path.islink(path) and not os.path.exists(path):
        raise CheckpointError(
            f"checkpoint({path!r}) is a link that leads nowhere: what it led to was removed. {_advice(storage, path)}"
        )
    if storage.exists(path) and not storage.is_directory(path):
        return open_file(path, storage, weights_only=weights_only)
    return open_directory(path)


def open_directory(path: str) -> OpenCheckpoint:
    """Read what a checkpoint directory says of itself, and see that its files are there, of their sizes.

    Several processes may do it at the same time. ``verify`` compares the bytes.

    Raises:
        CheckpointError: it is no checkpoint, is not complete, is damaged or of a newer format.
    """
    path = plain_path(path)
    recover(path)
    storage = storage_of(path)
    _require_checkpoint(storage, path)
    sizes = sizes_of(storage, path)
    manifest = Manifest.from_json(_text(storage, path), path) if MANIFEST in sizes else None
    if manifest is not None:
        check_sizes(manifest, sizes, path)
        lost = [name for name in (METADATA, REST) if name not in manifest.files]
        if lost:
            raise CheckpointError(f"checkpoint({path!r}) has a {MANIFEST} without {lost[0]}. Use another checkpoint.")

    def content_of(name: str) -> bytes:
        with storage.open(f"{path}/{name}", "rb") as stream:
            content = stream.read()
        if manifest is not None:
            check_content(content, manifest.files[name], name, path)
        return content

    contents = read_metadata(content_of(METADATA), sizes, path)
    if manifest is None and not contents.names_its_place:
        raise CheckpointError(
            f"checkpoint({path!r}) has no {MANIFEST}, which is written last: it is not complete. Use another "
            "checkpoint, or copy it again with all of its files."
        )
    if manifest is not None:
        _compare(manifest, contents, path)
    return OpenCheckpoint(path, storage, manifest, contents, lambda: content_of(REST))


def _require_checkpoint(storage: Storage, path: str) -> None:
    name = path.rpartition("/")[2]
    if storage.exists(path) and not storage.is_directory(path):
        raise CheckpointError(f"checkpoint({path!r}) is no directory. {_advice(storage, path)}")
    if not storage.is_directory(path):
        if "://" not in path:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.stat(path)  # raises where it may not be seen, which is something else
        raise CheckpointError(f"checkpoint({path!r}) does not exist. {_advice(storage, path)}")
    if name.startswith(".") and name.endswith(".saving"):
        raise CheckpointError(
            f"checkpoint({path!r}) is where a save writes, and an interrupted one leaves it: it may be incomplete. "
            f"Load {name[1:].removesuffix('.saving')!r}, or an earlier one."
        )
    names = storage.names(path)
    if not names:
        raise CheckpointError(f"checkpoint({path!r}) is an empty directory. {_advice(storage, path)}")
    lost = [needed for needed in (METADATA, REST) if needed not in names]
    if lost and MANIFEST not in names:
        raise CheckpointError(
            f"checkpoint({path!r}) is no checkpoint: the directory has no {' and no '.join(lost)}. "
            f"{_advice(storage, path)}"
        )


def _advice(storage: Storage, path: str) -> str:
    """Names of checkpoints nearby."""
    folder = path if storage.is_directory(path) else path.rpartition("/")[0] or "."
    names = [name for name in storage.names(folder) if name.endswith(".ckpt") and not name.startswith(".")]
    return f"Give ckpt_path one of those in {folder!r}: {', '.join(names[:5])}." if names else "Correct ckpt_path."


def _compare(manifest: Manifest, contents: Contents, path: str) -> None:
    """Both files tell of the same tensors."""
    said = {key: (record.dtype, record.shape) for key, record in manifest.tensors.items()}
    held = {
        key: (str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size))
        for key, entry in contents.entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    differing = sorted(key for key in said.keys() | held.keys() if said.get(key) != held.get(key))
    if differing:
        raise CheckpointError(
            f"checkpoint({path!r}) has a {MANIFEST} and a {METADATA} that do not agree about {len(differing)} tensors, "
            f"{differing[0]!r} the first. Use another checkpoint."
        )


def _text(storage: Storage, path: str) -> str:
    with storage.open(f"{path}/{MANIFEST}", "rb") as stream:
        return stream.read().decode(errors="replace")
