"""Optimizers that were built before the model was sharded.

LightningCLI builds the optimizer of its YAML with ``model.parameters()`` as soon as the model exists, and so do users
in ``__init__``. Sharding then puts other parameters in their place, and steps of such an optimizer would change
tensors that nothing reads any more.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

_names_of_stale: WeakKeyDictionary[nn.Module, WeakTensorKeyDictionary] = WeakKeyDictionary()


def remember_parameters(module: nn.Module) -> None:
    """Keep the names of the parameters that ``module`` has now, before they are replaced."""
    names = _names_of_stale.setdefault(module, WeakTensorKeyDictionary())
    for name, parameter in module.named_parameters():
        names[parameter] = name


def hand_over_parameters(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Let ``optimizers`` step the parameters that ``module`` has now. In place; groups and their options stay.

    RuntimeError for one that is trained and was never the module's: its gradients would not be reduced. And for one
    whose state the optimizer holds already, of the whole parameter.
    """
    current, stale = dict(module.named_parameters()), _names_of_stale.get(module, WeakTensorKeyDictionary())
    ids = {id(parameter) for parameter in current.values()}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in ids:
                    continue
                if parameter in stale:
                    _refuse_state(optimizer, parameter, stale[parameter])
                    group["params"][place] = current[stale[parameter]]
                elif parameter.requires_grad:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} trains a parameter {list(parameter.shape)} (group {index}, place "
                        f"{place}) that {type(module).__name__} does not hold, so no rank would get the others' "
                        "gradients. Assign it to an attribute of the module, and build the optimizer in "
                        "configure_optimizers()."
                    )


def _refuse_state(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> None:
    if parameter in optimizer.state:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before {name} {list(parameter.shape)} was sharded, and holds state "
            "of all of it. Build it in configure_optimizers(), which runs after it; leave 'optimizer' out of YAML."
        )
