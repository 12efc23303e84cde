"""Read ``.metadata``, a pickle, without running what it names, and see that it describes what is there.

A pickle may name any function of any module and have it called. Here the names it may use are those of
torch.distributed.checkpoint's records, and even they stand for records that do nothing; what they hold is checked and
only then put into torch's own classes.
"""

import io
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import METADATA

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Item:
    """Where one chunk of a tensor, or one value, lies."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Contents:
    """What ``.metadata`` says, checked."""

    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    """By key, ``state_dict.<parameter>``."""
    paths: Mapping[str, Path]
    """Where in the nested dicts a key belongs, ``("state_dict", "<parameter>")``."""
    items: Mapping[tuple[str, tuple[int, ...] | None], Item]
    """By key and the chunk's place in the tensor, None for a value."""
    names_its_place: bool
    """Whether it says where it was saved. torch's own writer does, this package's does not."""


def read_metadata(content: bytes, sizes: Mapping[str, int], where: str) -> Contents:
    """``sizes``: bytes of the files in the directory. ``where``: the checkpoint, for the errors.

    Raises:
        CheckpointError: it names what DCP does not write, or what is not there.
    """
    try:
        return _contents(_Unpickler(io.BytesIO(content)).load(), sizes)
    except (CheckpointError, MemoryError):
        raise
    except Exception as reason:  # a damaged pickle raises anything
        raise CheckpointError(
            f"checkpoint({where!r}) has a {METADATA} that is damaged or not of torch.distributed.checkpoint "
            f"({type(reason).__name__}: {reason}). Nothing of it was run or loaded. Use another checkpoint."
        ) from reason


class _Unpickler(pickle.Unpickler):
    """Knows the names that DCP writes, each as something that only holds what it is given."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _RECORDS_OF_METADATA:
            return self._record(name)
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return self._record(name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path"):
            return self._record("Path")
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it names the object {pid!r} outside")

    def _record(self, name: str) -> "type[_Record]":
        """A class of this pickle alone, so that nothing it does to a class outlives it."""
        if name not in self._records:
            self._records[name] = type(name, (_Record,), {})
        return self._records[name]


class _Record:
    """Holds what a pickle makes of a record: arguments of its making, then its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


_RECORDS_OF_METADATA = frozenset(
    (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
)


def _contents(metadata: Any, sizes: Mapping[str, int]) -> Contents:
    fields = _fields(metadata, "Metadata")
    items = dict(_items(fields["storage_data"], sizes))
    entries = {_text(key): _entry(key, entry) for key, entry in fields["state_dict_metadata"].items()}
    for key, entry in entries.items():
        places: list[Any] = (
            [tuple(chunk.offsets) for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        )
        lost = [place for place in places if (key, place) not in items]
        if lost:
            raise ValueError(f"{key!r} has no bytes in any file{f' at {lost[0]}' if lost[0] else ''}")
    meta = fields.get("storage_meta")
    saved_at = None if meta is None else _fields(meta, "StorageMeta").get("checkpoint_id")
    return Contents(
        entries=entries,
        paths={key: _path(key, fields["planner_data"]) for key in entries},
        items=items,
        names_its_place=saved_at is not None,
    )


def _items(storage_data: Any, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Item]]:
    for index, info in storage_data.items():
        of_index, of_info = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        key, place = _text(of_index["fqn"]), of_index.get("offset")
        if of_info.get("transform_descriptors"):
            raise ValueError(f"{key!r} is stored with {of_info['transform_descriptors']!r}, which is not supported")
        item = Item(_text(of_info["relative_path"]), _whole(of_info["offset"]), _whole(of_info["length"]))
        if item.file not in sizes:
            # Of the names that lie in the directory, so that none leads out of it.
            raise ValueError(f"{key!r} lies in {item.file!r}, which is no file of this directory")
        if item.offset + item.num_bytes > sizes[item.file]:
            raise ValueError(
                f"{key!r} lies in bytes {item.offset} to {item.offset + item.num_bytes} of {item.file}, which has "
                f"{sizes[item.file]}"
            )
        yield (key, None if place is None else _lengths(place)), item


def _entry(key: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        _fields(entry, "BytesStorageMetadata")
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    properties, shape = fields["properties"], _lengths(fields["size"])
    if type(properties).__name__ != "TensorProperties" or not isinstance(properties, _Record):
        raise TypeError(f"{key!r} has no properties")
    dtype, layout = properties.state[0], properties.state[1]
    if not isinstance(dtype, torch.dtype) or layout != "torch.strided":
        raise TypeError(f"{key!r} has dtype {dtype!r} and layout {layout!r}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    boxes = [(_lengths(chunk["offsets"]), _lengths(chunk["sizes"])) for chunk in chunks]
    _check_cover(key, shape, boxes)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


def _check_cover(key: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"{key!r} of shape {shape} has a chunk of shape {sizes} at {offsets}")
        if any(offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{key!r} of shape {shape} has a chunk of shape {sizes} at {offsets}, outside of it")
    num_held = sum(math.prod(sizes) for _, sizes in boxes)
    if num_held != math.prod(shape) or len({offsets for offsets, sizes in boxes if math.prod(sizes)}) < sum(
        bool(math.prod(sizes)) for _, sizes in boxes
    ):
        raise ValueError(f"{key!r} of shape {shape} has {math.prod(shape)} elements, and its chunks hold {num_held}")


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise TypeError(f"a {type(record).__name__} is where a {kind} has to be")
    state = {} if record.state is None else record.state
    if isinstance(state, list | tuple):
        names = {"MetadataIndex": ("fqn", "offset", "index")}.get(kind, ())
        state = dict(zip(names, state, strict=True))
    if not isinstance(state, dict):
        raise TypeError(f"a {kind} holds a {type(state).__name__}")
    return state


def _path(key: str, planner_data: Any) -> Path:
    path = tuple(planner_data[key])
    if not path or any(not isinstance(part, str | int) or isinstance(part, bool) for part in path):
        raise TypeError(f"{key!r} belongs to {path!r}")
    if any(isinstance(part, int) and not 0 <= part < _MAX_LIST for part in path):
        raise ValueError(f"{key!r} belongs to {path!r}")
    return path


_MAX_LIST = 1 << 20
"""Entries of a list. A damaged index must not fill the memory."""


def _lengths(values: Any) -> tuple[int, ...]:
    return tuple(_whole(value) for value in values)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} must be a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} must be a name")
    return value
