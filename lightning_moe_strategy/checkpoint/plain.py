"""What a checkpoint may hold beside tensors: what ``torch.load(weights_only=True)`` reads, so that no pickle is run."""

import io
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from lightning_moe_strategy.checkpoint.errors import CheckpointError


def require_plain(rest: Mapping[str, Any]) -> dict[str, Any]:
    """The same with paths as strings and numbers of NumPy as Python's.

    Raises:
        CheckpointError: names the entries that would need pickle, ``hyper_parameters['loss']``.
    """
    return _checked(rest)[0]


def packed(rest: Mapping[str, Any]) -> bytes:
    """What ``meta.pt`` holds.

    Raises:
        CheckpointError: see ``require_plain``.
    """
    return _checked(rest)[1]


def _checked(rest: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    made_plain = {key: plain(value) for key, value in rest.items()}
    if saved := _that_loads(made_plain):
        return made_plain, saved
    found = [f"{name} ({_kind(value)})" for name, value in _refused(made_plain)]
    raise CheckpointError(
        f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''} cannot be in a checkpoint: "
        "to read it, pickle would have to run code that the file names. Make it a number, a string, a list or a dict "
        "of them or a tensor; or leave it out: save_hyperparameters(ignore=[...]) for hyper_parameters. A sharded "
        "tensor goes into checkpoint['sharded_states'][name] in on_save_checkpoint."
    )


def plain(value: Any) -> Any:
    """The same with paths as strings and numbers of NumPy as Python's, in dicts, lists and tuples too."""
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def _refused(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The innermost values that do not load, with their names."""
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"{name}[{key!r}]" if name else str(key), item) for key, item in value.items()]
    elif type(value) in (list, tuple):
        inside = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    failed = [(inner, item) for inner, item in inside if _that_loads(item) is None]
    for inner, item in failed:
        yield from _refused(item, inner)
    if not failed:
        yield name, value


def _that_loads(value: Any) -> bytes | None:
    """What ``torch.save`` makes of it, if that can be loaded without pickle."""
    if _is_sharded(value):
        return None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return None
    return buffer.getvalue()


def _is_sharded(value: Any) -> bool:
    """A sharded tensor is in there: torch would read it, and wait for the other ranks of its mesh."""
    if isinstance(value, Mapping):
        return any(_is_sharded(item) for item in value.values())
    if type(value) in (list, tuple):
        return any(_is_sharded(item) for item in value)
    return isinstance(value, DTensor)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
