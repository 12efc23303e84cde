"""A folder of safetensors files: what is in it, read from the headers alone, and any part of any tensor."""

import json
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.checkpoint.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""By their names in a header."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000  # what the format allows

Box = tuple[slice, ...]
"""From where to where along each dim, with plain numbers and steps of 1."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_byte: int
    """From the beginning of the file."""

    @property
    def num_bytes(self) -> int:
        return num_elements(self.shape) * self.dtype.itemsize


class WeightFiles:
    """The tensors of a Hugging Face folder, by name. The headers are read and checked at once, values when asked for.

    Raises:
        CheckpointError: no safetensors there, a file of its index is missing, or a file is damaged or cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.num_bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()
        names, index = _file_names(folder)
        for name in names:
            for key, tensor in read_header(folder / name).items():
                if index is None or index.get(key) == name:
                    self.tensors[key] = tensor
        lost = sorted(set(index or ()) - set(self.tensors))
        if lost:
            raise CheckpointError(
                f"{folder / INDEX} names {_some(lost)}, and the files it gives for them hold no such tensor. Fetch the "
                "folder again."
            )

    def read(self, key: str, box: Box) -> Tensor:
        """A part of a tensor, as it is stored. From any thread."""
        stored = self.tensors[key]
        handle = self._handle(stored.file)
        part: Tensor = handle.get_slice(key)[box] if box else handle.get_tensor(key)
        with self._lock:
            self.num_bytes_read += part.numel() * part.element_size()
        return part

    def read_whole(self, key: str) -> Tensor:
        return self.read(key, tuple(slice(0, length) for length in self.tensors[key].shape))

    def read_element(self, key: str, where: tuple[int, ...]) -> Tensor:
        """One number, by its place in the file: another way than ``read`` goes."""
        stored = self.tensors[key]
        offset = 0
        for index, length in zip(where, stored.shape, strict=True):
            offset = offset * length + index
        size = stored.dtype.itemsize
        with stored.file.open("rb") as file:
            file.seek(stored.first_byte + offset * size)
            return torch.frombuffer(bytearray(file.read(size)), dtype=stored.dtype)[0]

    def _handle(self, file: Path) -> Any:
        from safetensors import safe_open

        with self._lock:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """What one safetensors file holds.

    Raises:
        CheckpointError: it cannot be read, is none, or is shorter than its header says.
    """
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {key: _stored(file, 8 + length, entry) for key, entry in header.items()}
        ends = [8 + length + entry["data_offsets"][1] for entry in header.values()]
    except OSError as reason:
        raise CheckpointError(f"{file} cannot be read: {reason.strerror}.") from reason
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as reason:
        raise CheckpointError(
            f"{file} is no safetensors file, or a damaged one ({type(reason).__name__}: {reason}). Fetch it again."
        ) from reason
    if size != max(ends, default=8 + length):
        raise CheckpointError(
            f"{file} has {size} bytes, and its header says {max(ends, default=8 + length)}. It was cut short or "
            "damaged: fetch it again."
        )
    return tensors


def num_elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _stored(file: Path, data: int, entry: Mapping[str, Any]) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} is not known")
    first, end = (int(offset) for offset in entry["data_offsets"])
    stored = StoredTensor(
        file=file,
        dtype=DTYPES[entry["dtype"]],
        shape=tuple(int(length) for length in entry["shape"]),
        first_byte=data + first,
    )
    if first < 0 or end - first != stored.num_bytes:
        raise ValueError(f"a tensor of shape {list(stored.shape)} has {end - first} bytes")
    return stored


def _file_names(folder: Path) -> tuple[list[str], Mapping[str, str] | None]:
    """The files to read, and the file of each tensor where there is an index."""
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            index = {str(key): str(name) for key, name in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as reason:
            raise CheckpointError(f"{folder / INDEX} is damaged ({type(reason).__name__}: {reason}).") from reason
        names = sorted(set(index.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{folder / INDEX} names {_some(outside)}, outside of its folder.")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} has no {_some(missing)}, which its {INDEX} names ({len(missing)} of {len(names)} files are "
                "missing). Fetch the folder again."
            )
        return names, index
    if (folder / SINGLE).is_file():
        return [SINGLE], None
    raise CheckpointError(
        f"{folder} has neither {INDEX} nor {SINGLE}. Give the folder of a Hugging Face model with safetensors; "
        "save_pretrained of transformers writes one."
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
