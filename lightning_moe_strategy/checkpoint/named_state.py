"""States of a model and of its optimizers by the names they are saved under, each tensor as it lies on this rank.

As torch's ``get_model_state_dict`` and ``get_optimizer_state_dict`` give them, which first go through the whole model
several times: a quarter of what an asynchronous save kept a step waiting for.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """As they are saved."""
    return {parameter: _without_wrappers(name) for name, parameter in model.named_parameters()}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, under all their names."""
    state: dict[str, Tensor] = model.state_dict()
    return {_without_wrappers(name): value for name, value in state.items()}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``state`` and ``param_groups`` with names instead of numbers. No step is made to have a state."""
    names = names_of_parameters(model)
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[str, Any] = optimizer.state_dict()
    state = {in_order[number]: values for number, values in found["state"].items()}
    groups = [group | {"params": [in_order[number] for number in group["params"]]} for group in found["param_groups"]]
    return {"state": state, "param_groups": groups}


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
