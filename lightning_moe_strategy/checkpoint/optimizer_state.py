"""What of a checkpoint goes into an optimizer: its state where it had some, none where it had none.

A state is made as large as its parameter, and sharded like it, so that no step is needed to make one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.verify import said_of

_ON_HOST = "step"
"""A count of steps, which torch keeps apart from the parameter."""
_SAME = ("shape", "dtype", "device", "device_mesh", "placements")
"""Of two tensors that lie alike; the last two are a DTensor's."""
_OF_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
"""What learning-rate schedulers add to parameter groups."""

State = dict[str, Any]


@dataclass(kw_only=True)
class MatchedOptimizer:
    """What to load into one optimizer."""

    optimizer: Optimizer
    pairs: list[tuple[Tensor, Any]] = field(default_factory=list)
    """Tensors made for it, each with what was saved of it."""
    states: dict[nn.Parameter, State] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Options of each."""
    notes: list[str] = field(default_factory=list)

    def apply(self) -> None:
        """Put it into the optimizer, once the pairs are filled."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        position = {parameter: index for index, parameter in enumerate(parameters)}
        groups = [
            {**options, "params": [position[parameter] for parameter in group["params"]]}
            for options, group in zip(self.groups, self.optimizer.param_groups, strict=True)
        ]
        state = {position[parameter]: values for parameter, values in self.states.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, values in self.states.items():
            # torch casts what is saved to the dtype of the parameter: FP32 sums of BF16 weights would lose their bits.
            loaded = self.optimizer.state[parameter]
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and key != _ON_HOST:
                    loaded[key] = value if loaded[key].dtype != value.dtype else loaded[key]


def match_optimizers(
    optimizers: Sequence[Optimizer],
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[nn.Parameter, str],
    *,
    strict: bool,
    where: str,
    make_states: Callable[[Optimizer], object],
) -> list[MatchedOptimizer]:
    """``make_states``: has an optimizer make states of its own, for those that are not as large as their parameter.

    Raises:
        CheckpointError: other optimizers than were saved.
    """
    if len(optimizers) != len(saved):
        raise CheckpointError(
            f"checkpoint({where!r}) holds {len(saved)} optimizers, and configure_optimizers returned {len(optimizers)}."
            " Return as many as were saved, or load the weights alone: LightningModule.load_from_checkpoint."
        )
    return [
        _Match(optimizer, of_one, names, strict=strict, where=f"optimizer {index} of checkpoint({where!r})").made(
            make_states
        )
        for index, (optimizer, of_one) in enumerate(zip(optimizers, saved, strict=True))
    ]


class _Match:
    """One optimizer and what was saved of one."""

    def __init__(
        self,
        optimizer: Optimizer,
        saved: Mapping[str, Any],
        names: Mapping[nn.Parameter, str],
        *,
        strict: bool,
        where: str,
    ) -> None:
        self._groups: list[dict[str, Any]] = list(saved.get("param_groups") or [])
        self._states: Mapping[Any, State] = saved.get("state") or {}
        self._names, self._strict, self._where = names, strict, where
        self._matched = MatchedOptimizer(optimizer=optimizer)

    def made(self, make_states: Callable[[Optimizer], object]) -> MatchedOptimizer:
        matched, own_groups = self._matched, self._matched.optimizer.param_groups
        if len(self._groups) != len(own_groups):
            raise self._refused(f"has {len(self._groups)} parameter groups, and the module's has {len(own_groups)}")
        keys: dict[nn.Parameter, Any] = {}
        for index, (own, saved) in enumerate(zip(own_groups, self._groups, strict=True)):
            self._check_options(own, saved)
            keys.update(self._keys_of(index, own["params"], saved["params"]))
            options = {name: value for name, value in saved.items() if name != "params"}
            matched.groups.append({name: value for name, value in own.items() if name != "params"} | options)
        states = {parameter: self._states[key] for parameter, key in keys.items() if key in self._states}
        if any(self._is_odd(p, key, value) for p, state in states.items() for key, value in state.items()):
            make_states(matched.optimizer)
        for parameter, state in states.items():
            matched.states[parameter] = {
                key: self._target(parameter, key, value) if hasattr(value, "shape") else value
                for key, value in state.items()
            }
        return matched

    def _check_options(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Versions of one optimizer add options or drop them; of two kinds, each has some that the other has not."""
        of_own, of_saved = own.keys() - _OF_SCHEDULERS, saved.keys() - _OF_SCHEDULERS
        if of_own - of_saved and of_saved - of_own:
            raise self._refused(
                f"has the options {', '.join(sorted(of_saved - of_own))}, and the module's, a "
                f"{type(self._matched.optimizer).__name__}, has {', '.join(sorted(of_own - of_saved))} instead"
            )

    def _keys_of(self, index: int, own: Sequence[nn.Parameter], saved: Sequence[Any]) -> dict[nn.Parameter, Any]:
        """The key of each parameter's state: its name, or a number where the file counts its parameters."""
        if not all(isinstance(key, str) for key in saved):
            if len(own) != len(saved):
                raise self._refused(f"has {len(saved)} parameters in group {index}, and the module's has {len(own)}")
            return dict(zip(own, saved, strict=True))
        known, wanted = set(saved), {self._names[parameter] for parameter in own}
        if known != wanted:
            problems = [f"the checkpoint lacks {name}" for name in sorted(wanted - known)]
            problems += [f"the module's lacks {name}" for name in sorted(known - wanted)]
            if self._strict:
                raise self._refused(f"has other parameters in group {index}: {said_of(problems)}")
            self._matched.notes.append(f"Parameters of optimizer group {index} differ: {said_of(problems)}.")
        return {parameter: self._names[parameter] for parameter in own if self._names[parameter] in known}

    def _is_odd(self, parameter: nn.Parameter, key: str, value: Any) -> bool:
        """Neither as large as its parameter nor a number."""
        return hasattr(value, "shape") and value.shape != parameter.shape and len(value.shape) > 0

    def _target(self, parameter: nn.Parameter, key: str, saved: Any) -> Tensor:
        """A tensor to read it into: the optimizer's own, one like the parameter or like what it made, or a number."""
        live = self._matched.optimizer.state.get(parameter, {}).get(key)
        if self._is_odd(parameter, key, saved):
            if not isinstance(live, Tensor) or live.shape != saved.shape:
                raise self._refused(
                    f"has {key!r} of shape {tuple(saved.shape)} for {self._names[parameter]}, which the module's "
                    f"({type(self._matched.optimizer).__name__}) does not make"
                )
            target = torch.empty_like(live, dtype=saved.dtype)
        elif saved.shape == parameter.shape and key != _ON_HOST:
            # New memory costs a page fault for every 4 KB, five times what reading them takes.
            fresh = torch.empty_like(parameter.detach(), dtype=saved.dtype)
            is_alike = all(getattr(live, name, None) == getattr(fresh, name, None) for name in _SAME)
            target = live.detach() if isinstance(live, Tensor) and is_alike else fresh
        else:
            target = torch.empty((), dtype=saved.dtype)
        self._matched.pairs.append((target, saved))
        return target

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where} is another than the module's: it {why}. Return the optimizer that was saved from "
            "configure_optimizers, or load the weights alone: LightningModule.load_from_checkpoint."
        )
