"""A checkpoint directory that is open: what it holds, and its tensors as they are asked for, on any layout."""

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import local_slices
from lightning_moe_strategy.checkpoint.agreement import together
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.manifest import METADATA, REST, Manifest
from lightning_moe_strategy.checkpoint.reader import ItemReader, Rows, Slices, intersection
from lightning_moe_strategy.checkpoint.safe_metadata import Contents, Item
from lightning_moe_strategy.checkpoint.storage import Storage
from lightning_moe_strategy.checkpoint.verify import Advance, check_files, share_of
from lightning_moe_strategy.sharding import local_tensor

MODULE_KEY, RANK_STATES = "state_dict", "rank_states"


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a checkpoint, whole, however it was cut."""

    key: str
    dtype: torch.dtype
    shape: torch.Size


Pairs = Iterable[tuple[Tensor, Stored]]
"""Tensors to fill, DTensors or whole, each with what it is filled from."""


class OpenCheckpoint:
    """A checkpoint directory that was found and understood; its tensors are read when they are asked for."""

    def __init__(
        self, path: str, storage: Storage, manifest: Manifest | None, contents: Contents, rest: Callable[[], bytes]
    ) -> None:
        self.path = path
        self.manifest = manifest
        """None in a directory of Lightning's, of which nothing can be verified."""
        self._storage, self._contents, self._rest = storage, contents, rest
        self._reader = ItemReader(storage, path)
        self._rows: dict[tuple[str, tuple[int, ...] | None], Rows | None] = {}

    def __enter__(self) -> "OpenCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    @property
    def num_bytes_read(self) -> int:
        """Of tensors, by this process."""
        return self._reader.num_bytes_read

    def keys(self) -> list[str]:
        """``state_dict.<parameter>``, ``optimizer_0.state.<parameter>.exp_avg``, ``optimizer_0.param_groups.0.lr``."""
        return list(self._contents.entries)

    def tensors(self) -> dict[str, Stored]:
        """Those of the keys that are tensors."""
        return {
            key: Stored(key, entry.properties.dtype, entry.size)
            for key, entry in self._contents.entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def tensor(self, key: str) -> Tensor:
        """One whole tensor, on the CPU."""
        stored = self.stored(key)
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill([(whole, stored)])
        return whole

    def stored(self, key: str) -> Stored:
        """Raises:
        CheckpointError: there is no such tensor.
        """
        entry = self._contents.entries.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"checkpoint({self.path!r}) has no tensor {key!r}. Ask for one of its keys().")
        return Stored(key, entry.properties.dtype, entry.size)

    def value(self, key: str) -> Any:
        """What is no tensor.

        Raises:
            CheckpointError: it is none, or to read it code would have to be run.
        """
        try:
            return self._reader.load(self._contents.items[key, None])
        except (OSError, KeyError):
            raise
        except Exception as reason:
            raise CheckpointError(unsafe(self.path, reason, f"{key!r} in it")) from reason

    def tree(self, name: str) -> Any:
        """What was saved under ``name``, ``"state_dict"`` or ``"optimizer_0"``: dicts and lists as they were, and a
        ``Stored`` in place of each tensor. None where nothing was.
        """
        root: dict[Any, Any] = {}
        for key, path in self._contents.paths.items():
            if path[0] == name:
                is_value = isinstance(self._contents.entries[key], BytesStorageMetadata)
                _put(root, path, self.value(key) if is_value else self.stored(key))
        return _as_lists(root).get(name)

    def weights(self) -> dict[str, Any]:
        """Of the model, by name."""
        weights: dict[str, Any] = self.tree(MODULE_KEY) or {}
        return weights

    def optimizers(self) -> list[dict[str, Any]]:
        """``state`` by name of parameter, and ``param_groups``, of each; empty where weights alone were saved."""
        roots = {str(path[0]) for path in self._contents.paths.values()}
        number = next(number for number in range(len(roots) + 1) if f"optimizer_{number}" not in roots)
        return [self.tree(f"optimizer_{index}") for index in range(number)]

    def whole(self, tree: Any) -> Any:
        """The same with every tensor read."""
        if isinstance(tree, Stored):
            return self.tensor(tree.key)
        if isinstance(tree, dict):
            return {name: self.whole(item) for name, item in tree.items()}
        return [self.whole(item) for item in tree] if isinstance(tree, list) else tree

    def rest(self, *, weights_only: bool = True) -> dict[str, Any]:
        """What lies on no mesh: loops, callbacks, schedulers, hyperparameters. Not ``weights_only`` runs its code.

        Raises:
            CheckpointError: to read it code would have to be run.
        """
        content = self._rest()
        try:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)
        except Exception as reason:
            raise CheckpointError(unsafe(f"{self.path}/{REST}", reason)) from reason
        if not isinstance(found, dict):
            raise CheckpointError(
                f"checkpoint({self.path!r}) has a {REST} with a {type(found).__name__} where a dict has to be. Use "
                "another checkpoint."
            )
        return found

    def rank_states(self, rank: int) -> dict[str, Tensor]:
        """What this rank had alone, by name."""
        found = {}
        for key, path in self._contents.paths.items():
            if path[0] == RANK_STATES and len(path) == 3 and path[2] == str(rank):
                found[str(path[1])] = self.tensor(key)
        return found

    def has_rank_states(self) -> bool:
        """Whether any rank had something alone."""
        return any(path[0] == RANK_STATES for path in self._contents.paths.values())

    def saved_world_size(self) -> int:
        """Ranks that saved it; 0 where nothing says so."""
        if self.manifest is not None:
            return self.manifest.layout.get("world_size", 0)
        return len({path[2] for path in self._contents.paths.values() if path[0] == RANK_STATES and len(path) == 3})

    def verify(self, group: dist.ProcessGroup | None = None, *, advance: Advance | None = None) -> None:
        """Compare every file with the manifest. Each is read by one rank of the group; every rank calls it.

        ``advance``: called with the bytes that this rank has read since. Without a manifest, nothing is compared.

        Raises:
            CheckpointError: on every rank; names the files that are not as they were written.
        """
        manifest = self.manifest
        if manifest is None:
            return
        names = share_of(manifest, group.rank(), group.size()) if group is not None else list(manifest.files)
        together(self.path, lambda: check_files(manifest, names, self._storage, self.path, advance), group)

    def num_bytes_to_verify(self, group: dist.ProcessGroup | None = None) -> int:
        """Of this rank's files."""
        if self.manifest is None:
            return 0
        files = self.manifest.files
        names = share_of(self.manifest, group.rank(), group.size()) if group is not None else list(files)
        return sum(files[name].num_bytes for name in names)

    def prepare(self, pairs: Pairs) -> None:
        """Find the bytes that ``fill`` will read, which leaves it nothing to refuse.

        Raises:
            CheckpointError: a tensor is not in its file.
        """
        for target, stored in pairs:
            for part in self._parts(target, stored):
                self._rows_of(part)

    @torch.no_grad()
    def fill(self, pairs: Pairs, *, advance: Advance | None = None) -> None:
        """Read each tensor, or this rank's part of it, into its place; dtypes are converted."""
        parts = [part for target, stored in pairs for part in self._parts(target, stored)]
        for part in sorted(parts, key=lambda part: (part.item.file, part.item.offset)):
            rows = self._rows_of(part)
            if rows is None:
                read = self._reader.load(part.item)[part.box]
                part.into.copy_(read)
                self._reader.num_bytes_read += read.numel() * read.dtype.itemsize
            else:
                self._reader.copy(rows, part.box, part.into)
            if advance is not None:
                advance(part.into.numel() * part.into.dtype.itemsize)

    def load_into(self, tree: Mapping[str, Any]) -> None:
        """Fill the tensors in nested dicts, ``{"state_dict": {"<parameter>": tensor}}``. Every one is found first.

        Raises:
            CheckpointError: one was not saved, or with another shape.
        """
        pairs = []
        for path, tensor in _leaves(tree, ()):
            stored = self.stored(".".join(path))
            if stored.shape != tensor.shape:
                raise CheckpointError(
                    f"checkpoint({self.path!r}) has {stored.key!r} of shape {tuple(stored.shape)}, not "
                    f"{tuple(tensor.shape)}. Load it into what it was saved from."
                )
            pairs.append((tensor, stored))
        self.prepare(pairs)
        self.fill(pairs)

    def _parts(self, target: Tensor, stored: Stored) -> Iterator["_Part"]:
        """What of the chunks lies on this rank."""
        local = local_tensor(target.detach())
        if not local.numel():
            return
        wanted = (
            local_slices(target) if isinstance(target, DTensor) else tuple(slice(0, length) for length in stored.shape)
        )
        entry = self._contents.entries[stored.key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            both = intersection(chunk.offsets, chunk.sizes, wanted)
            if both is not None:
                place = tuple(chunk.offsets)
                item = self._contents.items[stored.key, place]
                yield _Part(stored, place, tuple(chunk.sizes), item, both[0], local[both[1]])

    def _rows_of(self, part: "_Part") -> Rows | None:
        found_as = (part.stored.key, part.place)
        if found_as not in self._rows:
            self._rows[found_as] = self._found(part)
        return self._rows[found_as]

    def _found(self, part: "_Part") -> Rows | None:
        expected = (part.stored.dtype, part.shape)
        try:
            rows = self._reader.rows(part.item)
            found: Any = rows if rows is not None else self._reader.load(part.item)
            if (found.dtype, tuple(found.shape)) != expected:
                raise ValueError(f"{part.item.file} has a tensor of {found.dtype} and shape {tuple(found.shape)} there")
        except (ValueError, AttributeError, EOFError, RuntimeError, pickle.UnpicklingError) as reason:
            raise CheckpointError(
                f"checkpoint({self.path!r}) does not have {part.stored.key!r}, {expected[0]} of shape {part.shape}, "
                f"where its {METADATA} says: {reason}. Use another checkpoint."
            ) from reason
        return rows


@dataclass(frozen=True)
class _Part:
    """Of a chunk, what lies on this rank."""

    stored: Stored
    place: tuple[int, ...]
    """Of the chunk in the tensor."""
    shape: tuple[int, ...]
    """Of the chunk."""
    item: Item
    box: Slices
    """In the chunk."""
    into: Tensor
    """Of the same shape, memory of the tensor that is filled."""


def unsafe(where: str, reason: Exception, what: str = "it") -> str:
    """The words for what does not load with ``weights_only``."""
    named = re.search(r"GLOBAL (\S+)", str(reason))
    words = f"it names {named[1]}" if named else (str(reason).splitlines() or [type(reason).__name__])[0]
    remedy = (
        "If you trust whoever wrote it, pass weights_only=False, trainer.fit(..., weights_only=False); or save again "
        "without what needs it: save_hyperparameters(ignore=[...])."
        if what == "it"
        else "Use another checkpoint."
    )
    return (
        f"checkpoint({where!r}): {what} does not load without running code that the file names, or is damaged "
        f"({words}). Nothing was run or loaded. {remedy}"
    )


def _put(root: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    at = root
    for part in path[:-1]:
        at = at.setdefault(part, {})
    at[path[-1]] = value


def _as_lists(value: Any) -> Any:
    """Dicts whose keys are the indices of a list become the list."""
    if type(value) is not dict:
        return value
    made = {key: _as_lists(item) for key, item in value.items()}
    if made and all(type(key) is int for key in made):
        return [made.get(index) for index in range(max(made) + 1)]
    return made


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Tensor]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value
