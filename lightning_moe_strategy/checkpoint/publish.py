"""How a checkpoint appears at once, and how the one before it stays until then.

It is written beside its place, under ``staging_of``, and then renamed. What is in its place is renamed first and
removed last, so that whoever dies in between leaves one of the two whole: ``recover`` puts the former back.
One process calls these functions, rank 0 as a rule; those that read call ``recover``.
"""

import os
import re
from contextlib import suppress

from lightning_moe_strategy.checkpoint.manifest import MANIFEST
from lightning_moe_strategy.checkpoint.storage import Storage, storage_of

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced|removing|linking)")


def staging_of(path: str) -> str:
    """Where a save writes what becomes ``path``: one place for each, whose leftovers the next save removes."""
    return _beside(path, "saving")


def is_complete(path: str) -> bool:
    """Whether a checkpoint directory is there, whole as far as its manifest says so."""
    storage = storage_of(path)
    return storage.is_directory(path) and MANIFEST in storage.names(path)


def recover(path: str) -> None:
    """Put the former checkpoint back into its place, if a save died between taking it out and publishing.

    Several processes may do it at the same time.
    """
    storage, replaced = storage_of(path), _beside(path, "replaced")
    if not storage.exists(path) and storage.exists(replaced):
        with suppress(FileNotFoundError):  # another process was faster
            storage.rename(replaced, path)


def recover_all(directory: str) -> None:
    """``recover`` every checkpoint of a directory."""
    for name in storage_of(directory).names(directory):
        match = _LEFTOVER.fullmatch(name)
        if match is not None and match["kind"] == "replaced":
            recover(f"{directory}/{match['name']}")


def publish(path: str) -> None:
    """Let what lies in ``staging_of(path)``, a file or a directory, take its place.

    Raises:
        OSError: it cannot; what was there before is there again.
    """
    storage, staging, replaced = storage_of(path), staging_of(path), _beside(path, "replaced")
    recover(path)
    _discard(storage, replaced)
    try:
        if storage.exists(path) and (storage.is_directory(path) or storage.is_directory(staging)):
            storage.rename(path, replaced)
        storage.rename(staging, path)
    except OSError:
        recover(path)
        raise
    storage.sync_directory(_folder(path))
    _discard(storage, replaced)


def discard_staging(path: str) -> None:
    """Remove what an earlier save of ``path`` left where it wrote."""
    _discard(storage_of(path), staging_of(path))


def remove(path: str) -> None:
    """Remove a checkpoint, a link or a file. It is gone at once, not half there while it is being removed."""
    storage, removing = storage_of(path), _beside(path, "removing")
    for leftover in (removing, _beside(path, "replaced")):
        _discard(storage, leftover)
    if storage.exists(path):
        storage.rename(path, removing)
        storage.remove(removing)


def link(target: str, path: str) -> None:
    """Make ``path`` a symbolic link to ``target``, in place of what is there: at every moment it leads somewhere."""
    storage, linking = storage_of(path), _beside(path, "linking")
    _discard(storage, linking)
    os.symlink(os.path.relpath(target, os.path.dirname(path)), linking)
    if os.path.isdir(path) and not os.path.islink(path):
        replaced = _beside(path, "replaced")
        _discard(storage, replaced)
        storage.rename(path, replaced)
        storage.rename(linking, path)
        _discard(storage, replaced)
    else:
        os.replace(linking, path)
    storage.sync_directory(_folder(path))


def clean(directory: str) -> list[str]:
    """Bring a directory of checkpoints in order after saves that died: names of what was removed.

    Former checkpoints get back into their places. What another process is writing now is left alone, where the file
    system can lock.
    """
    storage = storage_of(directory)
    removed = []
    for name in storage.names(directory):
        match = _LEFTOVER.fullmatch(name)
        if match is None:
            continue
        leftover, path = f"{directory}/{name}", f"{directory}/{match['name']}"
        if match["kind"] == "replaced":
            recover(path)
        elif match["kind"] == "saving" and storage.is_held(leftover):
            continue
        if _is_there(storage, leftover):
            _discard(storage, leftover)
            removed.append(name)
    return removed


def _discard(storage: Storage, leftover: str) -> None:
    if _is_there(storage, leftover):
        storage.remove(leftover)


def _is_there(storage: Storage, leftover: str) -> bool:
    """Whole or not: a store without directories asks for a manifest where it says that something exists."""
    return storage.exists(leftover) or storage.is_directory(leftover)


def _beside(path: str, kind: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{kind}"


def _folder(path: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return folder or slash
