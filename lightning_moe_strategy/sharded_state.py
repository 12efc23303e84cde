"""State of a callback that lies on the ranks as parameters do: saved beside the model, loaded on any layout.

A callback puts it into the checkpoint it is given, ``checkpoint[SHARDED_STATES][name] = {key: tensor}``, and gets it
back with ``read_state`` from the checkpoint that is loaded. In a checkpoint that is a directory it is a directory of
its own, ``<checkpoint>/<name>``, written by all ranks; in a single file it is there as whole tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import local_slices
from lightning_moe_strategy.sharding import local_tensor

SHARDED_STATES = "sharded_states"
_PATH = "sharded_states_path"

State = Mapping[str, Tensor]


def take_states(checkpoint: dict[str, Any], *, as_whole_on: int | None, rank: int) -> dict[str, State]:
    """Leave only the names of keys in ``checkpoint``; the states are to be saved with ``save_states``.

    ``as_whole_on``: leave whole tensors in this rank's checkpoint instead, one file for all, and nothing to save. Every
    rank calls it.
    """
    states: dict[str, State] = checkpoint.pop(SHARDED_STATES, {})
    if not states:
        return {}
    if as_whole_on is None:
        checkpoint[SHARDED_STATES] = {name: list(state) for name, state in states.items()}
        return states
    whole = {name: _on_one_rank(state, is_kept=rank == as_whole_on) for name, state in states.items()}
    checkpoint[SHARDED_STATES] = whole
    return {}


def save_states(states: Mapping[str, State], path: Path) -> None:
    """Each into a directory of its own. Every rank calls it."""
    for name, state in states.items():
        save(dict(state), checkpoint_id=path / name)


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
        load(dict(into), checkpoint_id=Path(checkpoint[_PATH]) / name)
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
