"""What of a checkpoint goes into which tensor of a model: all of it, or one error that names what does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.verify import said_of


@dataclass(kw_only=True)
class MatchedWeights:
    """What to load, and what there is to say of it."""

    pairs: list[tuple[Tensor, Any]] = field(default_factory=list)
    """Tensors of the model, each with what was saved of it."""
    values: dict[str, Any] = field(default_factory=dict)
    """What is no tensor, of ``get_extra_state``."""
    notes: list[str] = field(default_factory=list)


def match_weights(model: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool, where: str) -> MatchedWeights:
    """``model``: its ``state_dict``. Not ``strict``: names that only one of them has are skipped.

    Raises:
        CheckpointError: names everything that does not fit.
    """
    matched = MatchedWeights()
    missing = [f"{name} {_shape(value)}" for name, value in model.items() if name not in saved and not _is_void(value)]
    unknown = [f"{name} {_shape(value)}" for name, value in saved.items() if name not in model]
    other: list[str] = []
    converted: dict[str, list[str]] = {}
    for name in model.keys() & saved.keys():
        own, found = model[name], saved[name]
        if not isinstance(own, Tensor) or not hasattr(found, "shape"):
            if isinstance(own, Tensor) or hasattr(found, "shape"):
                other.append(f"{name} is a tensor in one of them only")
            matched.values[name] = found
        elif tuple(own.shape) != tuple(found.shape):
            other.append(f"{name} is {_shape(found)} in it and {_shape(own)} in the model")
        elif own.dtype != found.dtype and not (own.dtype.is_floating_point and found.dtype.is_floating_point):
            other.append(f"{name} is {found.dtype} in it and {own.dtype} in the model")
        else:
            if own.dtype != found.dtype:
                converted.setdefault(f"{found.dtype} to {own.dtype}", []).append(name)
            matched.pairs.append((own, found))
    if other or (strict and (missing or unknown)):
        raise CheckpointError(_misfit(where, missing if strict else [], unknown if strict else [], sorted(other)))
    for problems, what in ((missing, "keep the values they have, as it has none"), (unknown, "are not in the model")):
        if problems:
            matched.notes.append(f"{len(problems)} of the tensors {what}: {said_of(sorted(problems))}.")
    matched.notes += [f"{len(names)} tensors are converted from {what}." for what, names in converted.items()]
    return matched


def _misfit(where: str, missing: list[str], unknown: list[str], other: list[str]) -> str:
    parts = [
        f"{what} {len(problems)}: {said_of(sorted(problems))}"
        for problems, what in (
            (missing, "it lacks"),
            (unknown, "the model lacks"),
            (other, "of another shape or dtype"),
        )
        if problems
    ]
    partly = "" if other else ", or set strict_loading = False in the LightningModule to load what fits"
    return (
        f"checkpoint({where!r}) does not fit the model. Of the tensors, {'. And '.join(parts)}. Build the model that "
        f"was saved{partly}."
    )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if hasattr(value, "shape") else "(extra state)"


def _is_void(value: Any) -> bool:
    """An empty dict leaves no trace in a directory."""
    return isinstance(value, Mapping) and not value
