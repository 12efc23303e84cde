"""What a split model and the same in one process have in common, and how a user is told.

Nothing here computes or communicates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

NUM_NAMED = 5
"""Parameters that an error names."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two computations of one number may lie apart because they add up in another order."""

    relative: float
    """Of a tensor's largest element."""
    noise: float
    """Gradients smaller than this share of the model's largest one are measured against that share: what cancels
    exactly (the bias of a key, say) leaves its terms' rounding errors."""


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    # Random walk over 100 layers of sums over 1e4 terms: sqrt(1e6) roundings of 6e-8 each. Tiny models: 1e-6.
    torch.float32: Tolerance(relative=1e-4, noise=1e-2),
    # Some 4 roundings a layer of 2e-3 each, 100 layers: 4e-2 of a usual element, a quarter of that of the largest.
    torch.bfloat16: Tolerance(relative=3e-2, noise=1e-1),
}
"""By the coarsest dtype that is computed in. A token that is mixed up or misplaced changes percents."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest differences on any rank, relative; infinite where something is not finite."""

    tolerance: Tolerance
    dtype: torch.dtype
    loss: float
    outputs: Mapping[str, float]
    """Per module, in the order in which they ran. The last one's are the logits."""
    gradients: Mapping[str, float]
    routing: float
    """By how much the score of a chosen expert is below that of the one the other run would have chosen."""
    num_changed: int
    num_choices: int
    """Tokens times routers."""
    num_counted: int
    """Labels that count, on the rank with the most."""

    @property
    def logits(self) -> tuple[str, float]:
        return [*self.outputs.items()][-1] if self.outputs else ("", 0.0)

    @property
    def worst_gradients(self) -> Sequence[tuple[str, float]]:
        return sorted(self.gradients.items(), key=lambda item: -item[1])

    @property
    def what_differs(self) -> dict[str, float]:
        found = {"the loss": self.loss, f"the logits (output of {self.logits[0] or 'the module'})": self.logits[1]}
        found["the choice of experts"] = self.routing
        found["gradients"] = max(self.gradients.values(), default=0.0)
        return {name: difference for name, difference in found.items() if difference > self.tolerance.relative}


def relative(difference: float, size: float) -> float:
    """``difference`` as a share of ``size``; infinite of nothing."""
    return 0.0 if difference == 0.0 else difference / size if size else float("inf")


def success_text(found: Comparison, what: str, degree: int, seconds: float) -> str:
    name, worst = next(iter(found.worst_gradients), ("none", 0.0))
    text = (
        f"verify_cp: with cp={degree} the model is what it is in one process ({what}, {seconds:.1f} s). Largest "
        f"difference of the loss {found.loss:.1e}, of the logits {found.logits[1]:.1e}, of a gradient {worst:.1e} "
        f"({name}); tolerance {found.tolerance.relative:.0e} for {_name(found.dtype)}."
    )
    return f"{text} {_ties(found)}" if found.num_changed else text


def _ties(found: Comparison) -> str:
    return (
        f"{found.num_changed:,} of {found.num_choices:,} choices of experts were ties within rounding and would have "
        "been others; they were compared with the same experts."
    )


def failure_text(found: Comparison, as_one: Comparison | None, what: str, degree: int) -> str:
    differing = ", ".join(f"{name} by {difference:.1e}" for name, difference in found.what_differs.items())
    worst = [item for item in found.worst_gradients if item[1] > found.tolerance.relative][:NUM_NAMED]
    named = ", ".join(f"{name} ({difference:.1e})" for name, difference in worst)
    lines = [
        f"verify_cp: with cp={degree} this model is not what it is in one process. On {what} differ {differing}, of "
        f"the largest element each; {found.tolerance.relative:.0e} is allowed for {_name(found.dtype)}."
    ]
    if named:
        lines.append(f"Gradients that differ most: {named}.")
    if found.num_changed:
        lines.append(_ties(found) if found.routing <= found.tolerance.relative else
                     f"{found.num_changed:,} of {found.num_choices:,} choices of experts differ.")  # fmt: skip
    lines.append(_remedy(found, as_one))
    if found.dtype != torch.float32:
        lines.append("Trainer(precision='32-true') makes the check sharper.")
    return " ".join(lines)


def _remedy(found: Comparison, as_one: Comparison | None) -> str:
    limit = found.tolerance.relative
    first = next((name for name, difference in found.outputs.items() if difference > limit), None)
    if as_one is not None and not as_one.what_differs:
        return (
            "As one document the same tokens are equal: in one process the model lets packed documents see one "
            "another, with cp it keeps them apart. Leave out documents='separate' and give one document per row, or "
            "hand the model the marks by which it keeps them apart."
        )
    if first is not None:
        return (
            f"The first module whose output differs is {first or 'the LightningModule'}: it mixes tokens in a way "
            "that is not taken over (a mean, a shift or a running sum over the sequence), or counts positions from 0 "
            "instead of reading batch['position_ids']. Choose cp=1, or let it go through causal attention."
        )
    if found.routing > limit:
        return "Everything before the routers is equal: they do not choose token by token. Choose cp=1."
    if found.loss > limit:
        return (
            "All outputs are equal, so it is the loss: it must be the mean over the labels that count, shifted once. "
            "See ZigZagContextParallel(shift=..., ignore_index=...); what is no such mean (a penalty on a statistic of "
            "the sequence) changes with cp."
        )
    return (
        "Loss and outputs are equal, so it is the backward pass: something in it mixes tokens (a gradient that is "
        "scaled, clipped or replaced over the sequence). Choose cp=1; where nothing of yours does that, report it."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
