"""The user's module with values on the CPU, and the user's own left as it was given."""

import copy
from typing import Any

import torch

from lightning_moe_strategy._lightning_compat import LightningModule, is_overridden
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.hugging_face_weights.pretrained import load_pretrained, waiting_folders
from lightning_moe_strategy.initialization import materialize
from lightning_moe_strategy.verifying.memory import bytes_of


def bytes_when_built(module: LightningModule) -> int:
    """What the module takes, before it is built."""
    if not is_overridden("configure_model", module, LightningModule):
        return bytes_of(module)
    with torch.device("meta"):
        probe = _copy(module)
        probe.configure_model()
    return bytes_of(probe)


def built_on_cpu(module: LightningModule, seed: int) -> LightningModule:
    """The module; a copy where it is on the meta device or builds itself in ``configure_model``.

    The copy is drawn as the strategy draws it, or read from the folder that it waits for.

    Raises:
        RuntimeError: a tensor on the meta device has no initialiser.
        CheckpointError: pretrained weights that are not the model's.
    """
    builds_itself = is_overridden("configure_model", module, LightningModule)
    if builds_itself or _is_on_meta(module):
        module = _copy(module)
    if builds_itself:
        torch.manual_seed(seed)
        module.configure_model()
        module.configure_model = _stay_as_you_are  # type: ignore[method-assign]
    if _is_on_meta(module):
        folders = waiting_folders(module)
        given = {f"{name}.{tensor}" if name else tensor
                 for name in folders for tensor in module.get_submodule(name).state_dict()}  # fmt: skip
        materialize(module, torch.device("cpu"), seed=seed, experts=find_experts(module), given=given)
        for name, folder in folders.items():
            load_pretrained(module.get_submodule(name), folder)
    return module


def _copy(module: LightningModule) -> LightningModule:
    """Without the Trainer it may be at."""
    trainer: Any = getattr(module, "_trainer", None)
    return copy.deepcopy(module, {} if trainer is None else {id(trainer): None})


def _is_on_meta(module: torch.nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _stay_as_you_are() -> None:
    """Built already, for every process alike."""
