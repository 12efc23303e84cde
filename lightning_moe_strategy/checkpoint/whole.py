"""A checkpoint directory as the one dict that a Trainer without this package's strategy loads."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.checkpoint.open_checkpoint import RANK_STATES
from lightning_moe_strategy.checkpoint.read import open_directory

_SHARDED_STATES = "sharded_states"


def whole_checkpoint(
    path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """As ``torch.load`` would give it, were it one file of one process. In one process, in its memory.

    Raises:
        CheckpointError: it is damaged, not complete, or would have to run code (unless ``weights_only`` is False).
    """
    with open_directory(os.fspath(path)) as saved:
        saved.verify()
        checkpoint = saved.rest(weights_only=weights_only is not False)
        checkpoint["state_dict"] = saved.whole(saved.weights())
        optimizers = saved.optimizers()
        if optimizers:
            checkpoint["optimizer_states"] = [_numbered(saved.whole(optimizer)) for optimizer in optimizers]
        states = saved.tree(_SHARDED_STATES)
        if states:
            checkpoint[_SHARDED_STATES] = saved.whole(states)
        if saved.has_rank_states():
            checkpoint[RANK_STATES] = saved.whole(saved.tree(RANK_STATES))
    device = map_location.get("cpu") if isinstance(map_location, Mapping) else map_location
    if device is None or callable(device):
        return checkpoint
    moved: dict[str, Any] = _moved(checkpoint, torch.device(device))
    return moved


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Parameters by their number in the groups, as one process counts them, in place of names."""
    number: dict[str, int] = {}
    groups = []
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            number[name] = len(number)
        groups.append(group | {"params": [number[name] for name in group["params"]]})
    state = {number[name]: values for name, values in (optimizer.get("state") or {}).items()}
    return {"state": state, "param_groups": groups}


def _moved(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if type(tree) is dict:
        return {name: _moved(value, device) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_moved(value, device) for value in tree)
    return tree
