"""Which gathers each unit starts, forward and backward, from the order in which the units run.

A block starts the gathers of its own experts and of the next block, and while its experts compute the next block's
experts are on their way (seed, "Hiding eFSDP Communication").
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_moe_strategy.units import Unit

Group = list[str]
"""Names of a block's unit and of the units inside it, in the order in which they run."""

PrefetchLists = dict[str, list[str]]
"""For each unit by name, the units whose gathers it starts."""


class UnitPrefetch:
    """Explicit prefetch of sharded units, stage by stage.

    The first batch of a stage runs without it and shows in which order the units run. During a backward pass the
    forward lists are empty: an activation recompute runs the experts' forward again, and must not gather the layer
    after it a second time.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = {unit.name: unit.module for unit in units if isinstance(unit.module, FSDPModule)}
        self._kinds = {unit.name: unit.kind for unit in units}
        self._forward_lists: dict[str, PrefetchLists] = {}
        self._stage = ""
        self._recording: list[RemovableHandle] = []
        self._order: list[str] = []

    def before_batch(self, stage: str) -> None:
        """Record the stage's first batch, prefetch in the others."""
        if stage == self._stage or not self.units:
            return
        self._stage = stage
        if stage in self._forward_lists:
            self._set_forward(self._forward_lists[stage])
            return
        self._set_forward({})
        self._order = []
        self._recording = [
            _module(unit).register_forward_pre_hook(self._record(name)) for name, unit in self.units.items()
        ]

    def before_backward(self) -> None:
        """Set the backward lists the first time, and empty the forward ones."""
        if self._recording:
            lists = backward_prefetch(group_units(self._finish_recording(), self._kinds))
            for name, targets in lists.items():
                self.units[name].set_modules_to_backward_prefetch([self.units[t] for t in targets])
        self._set_forward({})

    def after_backward(self) -> None:
        self._set_forward(self._forward_lists.get(self._stage, {}))

    def after_evaluation_batch(self) -> None:
        if self._recording:
            self._finish_recording()
            self._set_forward(self._forward_lists[self._stage])

    def _record(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if name not in self._order:
                self._order.append(name)

        return hook

    def _finish_recording(self) -> list[str]:
        for handle in self._recording:
            handle.remove()
        self._recording = []
        self._forward_lists[self._stage] = forward_prefetch(group_units(self._order, self._kinds))
        return self._order

    def _set_forward(self, lists: PrefetchLists) -> None:
        for name, unit in self.units.items():
            unit.set_modules_to_forward_prefetch([self.units[target] for target in lists.get(name, [])])


def group_units(order: Sequence[str], kinds: Mapping[str, str]) -> list[Group]:
    """Units that run, in order, each block together with the router and experts inside it; the root left out."""
    groups: list[Group] = []
    for name in order:
        if not name:
            continue
        if groups and kinds[name] in ("experts", "router", "norm") and name.startswith(f"{groups[-1][0]}."):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def forward_prefetch(groups: Sequence[Group]) -> PrefetchLists:
    """A block starts the rest of its own group and the next block; its experts start the whole next group."""
    if not groups:  # a step in which no unit ran
        return {}
    lists: PrefetchLists = {"": groups[0]}
    for group, following in zip(groups, [*groups[1:], []], strict=True):
        first, *rest = group
        if not rest:
            lists[first] = following
        else:
            lists[first] = [*rest, *following[:1]]
            lists[rest[-1]] = following
    return lists


def backward_prefetch(groups: Sequence[Group]) -> PrefetchLists:
    """A block starts the rest of its own group and the whole group before it."""
    if not groups:
        return {}
    lists: PrefetchLists = {"": groups[-1]}
    for group, preceding in zip(groups, [[], *groups[:-1]], strict=True):
        first, *rest = group
        lists[first] = [*rest[::-1], *preceding[:1], *preceding[:0:-1]]
        for name in rest:
            lists[name] = [*preceding[:1], *preceding[:0:-1]]
    return lists


def _module(unit: FSDPModule) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit
