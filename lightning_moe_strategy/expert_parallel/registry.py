"""Dispatchers by name: those of this package, and those that a user registers."""

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist

from lightning_moe_strategy.expert_parallel.all_gather import AllGatherDispatcher
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting
from lightning_moe_strategy.expert_parallel.dispatch import EPDispatcher, LocalDispatcher
from lightning_moe_strategy.expert_parallel.one_sided import OneSidedDispatcher


class DispatcherFactory(Protocol):
    """Makes the dispatcher of one layer; every rank of ``group`` calls it, layer by layer in the model's order."""

    def __call__(
        self, num_experts: int, group: dist.ProcessGroup, assumed_routing: AssumedRouting | None = None, /
    ) -> EPDispatcher:
        """``num_experts`` of the whole layer, ``group`` the ranks of ep. ``assumed_routing`` comes in a simulation."""
        ...


_OWN: Mapping[str, DispatcherFactory] = {
    "all_to_all": AllToAllDispatcher,
    "all_gather": AllGatherDispatcher,
    "symm_mem": OneSidedDispatcher,
}
_NEEDS_NO_NAME = ("auto", "local")
_REFUSED = {
    "deepep": "it needs GPUs on NVLink and a library of its own, and has not been tested here on such hardware",
    "moonep": "it needs GPUs on NVLink and a library of its own, and has not been tested here on such hardware",
}
_registered: dict[str, DispatcherFactory] = {}


def register_dispatcher(name: str, factory: DispatcherFactory) -> None:
    """Make ``FSDPCPEPStrategy(dispatcher=name)`` bring tokens to their experts with what ``factory`` returns.

    ``factory(num_experts, group)`` is called once per layer; see `EPDispatcher` for what it must return. Do it on every
    rank, before the strategy is built.

    Raises:
        ValueError: a name that is taken, or kept for a dispatcher of this package.
    """
    if name in (*_NEEDS_NO_NAME, *_OWN, *_REFUSED) or name in _registered:
        raise ValueError(
            f"dispatcher({name!r}) cannot be registered: the name is taken. Choose one that is not among "
            f"{_listed((*known_dispatchers(), *_REFUSED))}."
        )
    _registered[name] = factory


def known_dispatchers() -> tuple[str, ...]:
    """Names that ``FSDPCPEPStrategy(dispatcher=...)`` takes."""
    return (*_NEEDS_NO_NAME, *_OWN, *_registered)


def require_dispatcher(name: str, *, balance: str = "none") -> None:
    """For a setting of the user.

    Raises:
        ValueError: a name that no dispatcher has, one that is not offered yet, or one that cannot balance as asked.
    """
    if balance == "redundant" and name not in ("auto", "all_to_all"):
        raise ValueError(
            f"dispatcher({name!r}) cannot move experts as balance='redundant' does: leave dispatcher out, or balance."
        )
    if name in known_dispatchers():
        return
    reason = f"is not offered: {_REFUSED[name]}" if name in _REFUSED else "is not known"
    raise ValueError(
        f"dispatcher({name!r}) {reason}. Choose among {_listed(known_dispatchers())}, or register your own with "
        "register_dispatcher(name, factory)."
    )


def make_dispatcher(
    name: str, num_experts: int, group: dist.ProcessGroup, assumed_routing: AssumedRouting | None = None
) -> EPDispatcher:
    """The dispatcher of one layer. ``auto`` is ``local`` where all experts are on this rank, else ``all_to_all``.

    Raises:
        ValueError: ``local`` for experts that are spread over ranks, or a name that no dispatcher has.
    """
    require_dispatcher(name)
    if name in _registered:
        factory = _registered[name]
        # A factory of two arguments is enough for training.
        return factory(num_experts, group) if assumed_routing is None else factory(num_experts, group, assumed_routing)
    if group.size() == 1:
        return LocalDispatcher(num_experts)
    if name == "local":
        raise ValueError(
            f"dispatcher('local') needs every expert on every rank, but ep is {group.size()}. Set ep=1, or leave "
            "dispatcher out."
        )
    return _OWN["all_to_all" if name == "auto" else name](num_experts, group, assumed_routing)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
