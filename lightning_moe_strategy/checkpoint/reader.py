"""Read tensors from the files of torch.distributed.checkpoint: the bytes that are asked for, straight to their place.

Each chunk of a tensor lies in a file as ``torch.save`` writes a tensor, a ZIP archive. Its rows are found in there
once, and what a rank needs of them is read into its part; so a byte is read once however the chunks were cut.
"""

import io
import math
import mmap
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.checkpoint.safe_metadata import Item
from lightning_moe_strategy.checkpoint.storage import LocalStorage, Storage

Slices = tuple[slice, ...]

_MIN_RUN_BYTES = 4096
"""Of bytes that are contiguous in the file and in the tensor: below, a call for each costs more than it copies."""
_SMALL_ITEM_BYTES = 1 << 14
"""Read whole, at once."""
_LOCAL_HEADER = 30


@dataclass(frozen=True)
class Rows:
    """A chunk of a tensor, contiguous, as it lies in a file."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: bytes | None = None
    """All of it, where it is small."""


class ItemReader:
    """The files of one checkpoint directory, opened as they are needed. Close it."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self._directory = storage, directory
        self._descriptors: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._streams: dict[str, Any] = {}
        self.num_bytes_read = 0
        """Of tensors, without the headers around them."""

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        for stream in (*self._streams.values(), *self._maps.values()):
            stream.close()
        self._descriptors, self._streams, self._maps = {}, {}, {}

    def rows(self, item: Item) -> Rows | None:
        """Where the rows of a chunk lie; None where they are not as they are in memory, see ``load``.

        Raises:
            ValueError: there is no tensor.
        """
        window = _Window(self, item)
        stream: Any = io.BytesIO(window.read()) if item.num_bytes <= _SMALL_ITEM_BYTES else io.BufferedReader(window)
        try:
            found = _find_rows(stream)
        except (zipfile.BadZipFile, KeyError, struct.error, EOFError, IndexError, pickle.UnpicklingError) as reason:
            raise ValueError(f"{item.file} has no tensor at byte {item.offset} ({reason})") from reason
        if found is None:
            return None
        start, dtype, shape = found
        num_bytes = math.prod(shape) * dtype.itemsize
        if start + num_bytes > item.num_bytes:
            raise ValueError(f"{item.file} ends within the tensor at byte {item.offset}")
        content = stream.getvalue()[start : start + num_bytes] if isinstance(stream, io.BytesIO) else None
        return Rows(item.file, item.offset + start, dtype, shape, content)

    def load(self, item: Item) -> Any:
        """What ``torch.load`` makes of an item, without running what it names."""
        return torch.load(io.BytesIO(_Window(self, item).read()), map_location="cpu", weights_only=True)

    def read_whole(self, item: Item) -> bytes:
        return bytes(_Window(self, item).read())

    def copy(self, rows: Rows, box: Slices, into: Tensor) -> None:
        """Read the part ``box`` of the rows into a tensor of its shape."""
        if not into.numel():
            return
        if into.device.type != "cpu" or into.dtype != rows.dtype:
            read = torch.empty(into.shape, dtype=rows.dtype)
            self.copy(rows, box, read)
            into.copy_(read)
            return
        self.num_bytes_read += into.numel() * rows.dtype.itemsize
        if rows.content is not None:
            into.copy_(_source(bytearray(rows.content), 0, rows)[box])
            return
        num_outer, run = _runs(rows, box)
        if run * rows.dtype.itemsize < _MIN_RUN_BYTES or not _is_contiguous_inside(into, num_outer):
            into.copy_(self._mapped(rows)[box])
            return
        for offset, index in _run_places(rows, box, num_outer):
            self._read(rows.file, rows.offset + offset * rows.dtype.itemsize, _bytes_of(into[index]))

    def _mapped(self, rows: Rows) -> Tensor:
        """The rows as a tensor, whose pages are read as they are touched."""
        if not isinstance(self._storage, LocalStorage):
            content = bytearray(math.prod(rows.shape) * rows.dtype.itemsize)
            self._read(rows.file, rows.offset, memoryview(content))
            return _source(content, 0, rows)
        if rows.file not in self._maps:
            # Copy on write and never written: torch warns of memory that it may not write.
            self._maps[rows.file] = mmap.mmap(self._descriptor(rows.file), 0, access=mmap.ACCESS_COPY)
        return _source(self._maps[rows.file], rows.offset, rows)

    def _read(self, file: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` from a file. Raises EOFError where it ends before."""
        if not isinstance(self._storage, LocalStorage):
            if file not in self._streams:
                self._streams[file] = self._storage.open(f"{self._directory}/{file}", "rb")
            stream = self._streams[file]
            stream.seek(offset)
            while into:
                content = stream.read(len(into))
                if not content:
                    raise EOFError(f"{file} ends before byte {offset + len(into)}")
                into[: len(content)] = content
                into = into[len(content) :]
            return
        descriptor = self._descriptor(file)
        while into:
            num_read = os.preadv(descriptor, [into], offset)
            if not num_read:
                raise EOFError(f"{file} ends before byte {offset + len(into)}")
            into, offset = into[num_read:], offset + num_read

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(f"{self._directory}/{file}", os.O_RDONLY)
        return self._descriptors[file]


class _Window(io.RawIOBase):
    """One item as a file of its own."""

    def __init__(self, reader: ItemReader, item: Item) -> None:
        self._reader, self._item, self._position = reader, item, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._item.num_bytes)[whence]
        if self._position < 0:
            raise zipfile.BadZipFile("it is too short")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        num_bytes = max(0, min(len(buffer), self._item.num_bytes - self._position))
        view = memoryview(buffer).cast("B")[:num_bytes]
        self._reader._read(self._item.file, self._item.offset + self._position, view)
        self._position += num_bytes
        return num_bytes


def _find_rows(stream: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
    """Where in a ``torch.save`` of one tensor its elements begin, if they are as a contiguous tensor has them."""
    with zipfile.ZipFile(stream) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    tensor = _TensorUnpickler(io.BytesIO(_content(stream, records["data.pkl"]))).load()
    order = _content(stream, records["byteorder"]) if "byteorder" in records else b"little"
    if not isinstance(tensor, _Tensor) or order.decode() != sys.byteorder or not tensor.is_contiguous:
        return None
    record = records[f"data/{tensor.storage}"]
    if (tensor.first + math.prod(tensor.shape)) * tensor.dtype.itemsize > record.file_size:
        raise zipfile.BadZipFile("a tensor is larger than its elements")
    return _start_of(stream, record) + tensor.first * tensor.dtype.itemsize, tensor.dtype, tensor.shape


def _content(stream: Any, record: zipfile.ZipInfo) -> bytes:
    """Not by ``zipfile``, which compares checksums: records may have none, as the manifest has one of all bytes."""
    stream.seek(_start_of(stream, record))
    content: bytes = stream.read(record.file_size)
    return content


def _start_of(stream: Any, record: zipfile.ZipInfo) -> int:
    if record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("it is compressed")
    stream.seek(record.header_offset)
    header = stream.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("a header is damaged")
    length_of_name, length_of_extra = struct.unpack("<HH", header[26:])
    return int(record.header_offset + _LOCAL_HEADER + length_of_name + length_of_extra)


@dataclass(frozen=True)
class _Tensor:
    storage: str
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Other:
    """Anything but a plain tensor: ``torch.load`` decides about it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _TensorUnpickler(pickle.Unpickler):
    """Knows a plain tensor, and makes nothing of the rest."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuilt
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return _Other

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *_ = pid
        return (str(key), dtype if kind == "storage" and isinstance(dtype, torch.dtype) else None)


def _rebuilt(storage: Any, first: Any, shape: Any, strides: Any, *others: Any) -> "_Tensor | _Other":
    # Of version 3, for dtypes without a storage class of their own, the dtype comes after requires_grad and the hooks.
    dtype = others[2] if len(others) > 2 and isinstance(others[2], torch.dtype) else storage[1]
    if not isinstance(dtype, torch.dtype):
        return _Other()
    if any(type(number) is not int or number < 0 for number in (first, *shape, *strides)):
        raise pickle.UnpicklingError("a tensor has no shape")
    return _Tensor(storage[0], dtype, first, tuple(shape), tuple(strides))


def _source(memory: Any, offset: int, rows: Rows) -> Tensor:
    num_elements = math.prod(rows.shape)
    return torch.frombuffer(memory, dtype=rows.dtype, count=num_elements, offset=offset).view(rows.shape)


def _runs(rows: Rows, box: Slices) -> tuple[int, int]:
    """How many outer dims of the box are gone through one by one, and the elements that are contiguous inside."""
    num_outer, run = len(box), 1
    for length, part in zip(reversed(rows.shape), reversed(box), strict=True):
        num_outer, run = num_outer - 1, run * (part.stop - part.start)
        if part.stop - part.start != length:
            break
    return num_outer, run


def _run_places(rows: Rows, box: Slices, num_outer: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Of every run: the element of the rows at which it begins, and its index in the tensor that is filled."""
    strides = [math.prod(rows.shape[dim + 1 :]) for dim in range(len(box))]
    first = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
    for index in product(*(range(part.stop - part.start) for part in box[:num_outer])):
        yield first + sum(place * stride for place, stride in zip(index, strides, strict=False)), index


def _is_contiguous_inside(tensor: Tensor, num_outer: int) -> bool:
    return tensor[(0,) * num_outer].is_contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def intersection(offsets: Sequence[int], sizes: Sequence[int], wanted: Slices) -> tuple[Slices, Slices] | None:
    """Of a chunk and the part of a tensor that is wanted: where both meet, in the chunk and in the part."""
    in_chunk, in_part = [], []
    for offset, size, part in zip(offsets, sizes, wanted, strict=True):
        start, stop = max(offset, part.start), min(offset + size, part.stop)
        if start >= stop:
            return None
        in_chunk.append(slice(start - offset, stop - offset))
        in_part.append(slice(start - part.start, stop - part.start))
    return tuple(in_chunk), tuple(in_part)
