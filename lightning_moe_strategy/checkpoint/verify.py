"""See that the files of a checkpoint are those that were written, before anything of them is used."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from lightning_moe_strategy.checkpoint.checksum import crc32
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from lightning_moe_strategy.checkpoint.storage import Storage

Advance = Callable[[int], None]

_BLOCK_BYTES = 1 << 22
_SHARDS = ".distcp"


def sizes_of(storage: Storage, directory: str) -> dict[str, int]:
    """Bytes of each file that lies in a directory, by its name."""
    found = {}
    for name in storage.names(directory):
        path = f"{directory}/{name}"
        if not storage.is_directory(path):
            with suppress(FileNotFoundError), storage.open(path, "rb") as stream:  # a link may lead nowhere
                found[name] = stream.seek(0, os.SEEK_END)
    return found


def check_sizes(manifest: Manifest, sizes: Mapping[str, int], where: str) -> None:
    """Raises:
    CheckpointError: a file is missing, is longer or shorter, or is of another checkpoint; all of them are named.
    """
    problems = [f"{name} is missing" for name in manifest.files if name not in sizes]
    problems += [
        f"{name} has {sizes[name]} bytes, not {record.num_bytes}"
        for name, record in manifest.files.items()
        if name in sizes and sizes[name] != record.num_bytes
    ]
    problems += [
        f"{name} does not belong to it" for name in sizes if name.endswith(_SHARDS) and name not in manifest.files
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint({where!r}) is not as it was saved, says its {MANIFEST}: {said_of(problems)}. Copy it again "
            "from where it was saved, or use another."
        )


def check_content(content: bytes, record: FileRecord, name: str, where: str) -> None:
    """Raises:
    CheckpointError: ``content`` is not what was written into the file.
    """
    if crc32(content) != record.crc32:
        raise _changed([name], where)


def share_of(manifest: Manifest, rank: int, num_ranks: int) -> list[str]:
    """Names of the files that this rank checks, so that each is checked once and all ranks read about as much."""
    loads = [0] * num_ranks
    own = []
    for name, record in sorted(manifest.files.items(), key=lambda entry: (-entry[1].num_bytes, entry[0])):
        busy = loads.index(min(loads))
        loads[busy] += record.num_bytes
        if busy == rank:
            own.append(name)
    return own


def check_files(
    manifest: Manifest, names: list[str], storage: Storage, directory: str, advance: Advance | None = None
) -> None:
    """Read the named files whole and compare their checksums.

    Raises:
        CheckpointError: names those that were changed.
    """
    changed = [name for name in names if _crc32(storage, f"{directory}/{name}", advance) != manifest.files[name].crc32]
    if changed:
        raise _changed(changed, directory)


def _crc32(storage: Storage, path: str, advance: Advance | None) -> int:
    found, block = 0, bytearray(_BLOCK_BYTES)
    with storage.open(path, "rb") as stream:
        while num_read := stream.readinto(block):  # type: ignore[attr-defined]
            found = crc32(memoryview(block)[:num_read], found)
            if advance is not None:
                advance(num_read)
    return found


def _changed(names: list[str], where: str) -> CheckpointError:
    said = said_of([f"{name} has other bytes than were written" for name in names])
    return CheckpointError(
        f"checkpoint({where!r}) is damaged: {said} (its checksum differs). Copy it again from where it was saved, or "
        "use another."
    )


def said_of(problems: list[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    more = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {more} more" if more > 0 else "")
