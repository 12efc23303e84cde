"""State of a callback that lies on the ranks as parameters do: saved beside the model, loaded on any layout.

A callback puts it into the checkpoint it is given, ``checkpoint[SHARDED_STATES][name] = {key: tensor}``, and gets it
back with ``read_state`` from the checkpoint that is loaded. In a checkpoint that is a directory its entries are
``sharded_states.<name>.<key>``, beside those of the model; in a single file it is there as whole tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import local_slices
from lightning_moe_strategy.checkpoint.read import open_directory
from lightning_moe_strategy.sharding import local_tensor

SHARDED_STATES = "sharded_states"
_PATH = "sharded_states_path"

State = Mapping[str, Tensor]


def names_of_states(checkpoint: Mapping[str, Any]) -> dict[str, list[str]]:
    """What ``checkpoint`` says of the states when their tensors are saved as entries of their own."""
    return {name: list(state) for name, state in checkpoint[SHARDED_STATES].items()}


def whole_states(checkpoint: dict[str, Any], *, is_kept: bool) -> None:
    """Make the states in ``checkpoint`` whole tensors where they are kept, one file for all. Every rank calls it."""
    if SHARDED_STATES in checkpoint:
        checkpoint[SHARDED_STATES] = {
            name: _on_one_rank(state, is_kept=is_kept) for name, state in checkpoint[SHARDED_STATES].items()
        }


def remember_path(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checkpoint as it was loaded, with what ``read_state`` needs to know of it."""
    return {**checkpoint, _PATH: str(path)} if SHARDED_STATES in checkpoint else checkpoint


def keys_of_state(checkpoint: Mapping[str, Any], name: str) -> list[str] | None:
    """What was saved under this name; None where nothing was."""
    saved = checkpoint.get(SHARDED_STATES, {}).get(name)
    return None if saved is None else list(saved)


@torch.no_grad()
def read_state(checkpoint: Mapping[str, Any], name: str, into: State) -> None:
    """Fill the tensors of ``into``, sharded as they may be, from what was saved. Every rank calls it."""
    saved = checkpoint[SHARDED_STATES][name]
    if not isinstance(saved, Mapping):
        with open_directory(checkpoint[_PATH]) as directory:
            directory.load_into({SHARDED_STATES: {name: dict(into)}})
        return
    for key, tensor in into.items():
        part = saved[key][local_slices(tensor)] if isinstance(tensor, DTensor) else saved[key]
        local_tensor(tensor).copy_(part)


def _on_one_rank(state: State, *, is_kept: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, one at a time."""
    whole = {}
    for key, tensor in state.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_kept:
            whole[key] = gathered.cpu()
    return whole
