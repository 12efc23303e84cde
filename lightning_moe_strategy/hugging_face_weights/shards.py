"""Write safetensors files one tensor at a time, with the index that ``from_pretrained`` reads."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lightning_moe_strategy.hugging_face_weights.files import INDEX, NAMES, SINGLE, num_elements

_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class NewTensor:
    """What is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return num_elements(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Files of at most ``max_bytes`` (a larger tensor has one to itself), in the order of ``tensors``.

    Their headers are there at once; each tensor then goes to its place, in any order.
    """

    def __init__(self, folder: Path, tensors: Sequence[NewTensor], max_bytes: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._place: dict[str, tuple[str, int]] = {}
        self._streams: dict[str, IO[bytes]] = {}
        self._folder = folder
        groups = _grouped(tensors, max_bytes)
        for number, group in enumerate(groups, start=1):
            name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._begin(name, group)
        if len(groups) > 1:
            self._write_index()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def write(self, name: str, values: Tensor) -> None:
        """All of one tensor, cast to its dtype."""
        tensor = self._tensors[name]
        assert tuple(values.shape) == tensor.shape, f"{name}: {tuple(values.shape)} for {tensor.shape}"
        file, offset = self._place.pop(name)
        flat = values.to(tensor.dtype).contiguous().reshape(-1).view(torch.uint8)
        stream = self._streams[file]
        stream.seek(offset)
        stream.write(flat.numpy().data)

    def close(self) -> None:
        """Every tensor is in its file, and survives a power failure."""
        assert not self._place, f"nothing was written for {sorted(self._place)[:3]}"
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        self.abandon()

    def abandon(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _begin(self, file: str, group: Sequence[NewTensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        # Wide numbers first: then each tensor begins at a multiple of its width, and can be read in place.
        for tensor in sorted(group, key=lambda tensor: -tensor.dtype.itemsize):
            offsets[tensor.name] = end
            header[tensor.name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.num_bytes],
            }
            end += tensor.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        stream = (self._folder / file).open("wb")
        stream.write(len(text).to_bytes(8, "little") + text)
        self._streams[file] = stream
        self._place |= {name: (file, 8 + len(text) + offset) for name, offset in offsets.items()}

    def _write_index(self) -> None:
        weight_map: Mapping[str, str] = {name: file for name, (file, _) in sorted(self._place.items())}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _grouped(tensors: Sequence[NewTensor], max_bytes: int) -> list[list[NewTensor]]:
    groups: list[list[NewTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if groups[-1] and num_bytes + tensor.num_bytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return groups
