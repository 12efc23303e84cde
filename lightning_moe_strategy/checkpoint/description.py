"""What stands in a checkpoint directory, for people: where it comes from, how far it had trained, what is large."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_moe_strategy.checkpoint.open_checkpoint import MODULE_KEY, OpenCheckpoint, Stored

_KINDS = {
    MODULE_KEY: "parameters and buffers",
    "sharded_states": "averages and other sharded states",
    "rank_states": "random states and positions of ranks",
}
"""By the first part of a key; ``optimizer_0`` and the like are called by their names."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors of one kind."""

    name: str
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint as its own files tell it."""

    path: str
    is_complete: bool
    """It has a manifest. Of a directory without one, which Lightning wrote, no file can be verified."""
    versions: Mapping[str, str]
    layout: Mapping[str, int]
    """Degrees by name, and ``world_size``."""
    epoch: int | None
    num_steps: int | None
    parts: tuple[Part, ...]
    largest: tuple[Stored, ...]
    num_files: int | None
    num_file_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "is_complete": self.is_complete,
            "versions": dict(self.versions),
            "layout": dict(self.layout),
            "epoch": self.epoch,
            "num_steps": self.num_steps,
            "parts": [vars(part) | {"dtypes": list(part.dtypes)} for part in self.parts],
            "largest": [_named(stored) for stored in self.largest],
            "num_files": self.num_files,
            "num_file_bytes": self.num_file_bytes,
        }


def describe(checkpoint: OpenCheckpoint, *, num_largest: int = 3) -> Description:
    """Reads no tensor.

    Raises:
        CheckpointError: what lies beside the tensors does not load without running code.
    """
    rest, manifest = checkpoint.rest(), checkpoint.manifest
    tensors = checkpoint.tensors()
    by_kind: dict[str, list[Stored]] = {}
    for key, stored in tensors.items():
        by_kind.setdefault(key.partition(".")[0], []).append(stored)
    return Description(
        path=checkpoint.path,
        is_complete=manifest is not None,
        versions={} if manifest is None else manifest.versions,
        layout={} if manifest is None else manifest.layout,
        epoch=rest.get("epoch"),
        num_steps=rest.get("global_step"),
        parts=tuple(_part(_KINDS.get(kind, kind), found) for kind, found in sorted(by_kind.items(), key=_order)),
        largest=tuple(sorted(tensors.values(), key=num_bytes_of, reverse=True)[:num_largest]),
        num_files=None if manifest is None else len(manifest.files),
        num_file_bytes=None if manifest is None else sum(record.num_bytes for record in manifest.files.values()),
    )


def num_bytes_of(stored: Stored) -> int:
    return stored.shape.numel() * stored.dtype.itemsize


def dtype_of(stored: Stored) -> str:
    return str(stored.dtype).removeprefix("torch.")


def _named(stored: Stored) -> dict[str, Any]:
    return {"key": stored.key, "dtype": dtype_of(stored), "shape": list(stored.shape)}


def _part(name: str, found: list[Stored]) -> Part:
    return Part(
        name=name,
        num_tensors=len(found),
        num_bytes=sum(map(num_bytes_of, found)),
        dtypes=tuple(sorted({dtype_of(stored) for stored in found})),
    )


def _order(kind: tuple[str, list[Stored]]) -> tuple[int, str]:
    names = [MODULE_KEY, "optimizer", "sharded_states", "rank_states"]
    name = kind[0].partition("_")[0] if kind[0].startswith("optimizer") else kind[0]
    return names.index(name) if name in names else len(names), kind[0]
