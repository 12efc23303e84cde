"""Ranks against one process: a row per number that must be equal, the first wrong module, and the pattern of it all."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.comparison import Tolerance, relative
from lightning_moe_strategy.verifying.causes import MIN_RATIO_SHARE, Gradient, Pattern, WrongOutput
from lightning_moe_strategy.verifying.outputs import INPUT
from lightning_moe_strategy.verifying.recorded import OutputDifference, RankRecord, ReferenceRecord
from lightning_moe_strategy.verifying.result import Kind, Row

THE_STEP = "training_step"
"""Where what no module computes is wrong: the loss."""


class Compared:
    """All rows, and what follows from them."""

    def __init__(self, ranks: Sequence[RankRecord], reference: ReferenceRecord, tolerance: Tolerance) -> None:
        self.ranks, self.reference, self.tolerance = ranks, reference, tolerance
        self.first = ranks[0]
        self.rows: list[Row] = []
        self.gradients: dict[str, Gradient] = {}
        """By parameter; of the first step in which it is wrong."""
        self.count_ratios: list[float] = []
        self.low_precision: list[str] = []
        self.steps = len(reference.parameters)
        self._largest_gradient = [_largest(step.values()) for step in reference.gradients]
        for rows in (self._outputs(), self._routing(), self._leaks(), self._losses(), self._counts(),
                     self._gradients(), self._parameters(), self._replicas()):  # fmt: skip
            self.rows += rows

    def wrong(self, kind: Kind) -> list[Row]:
        return [row for row in self.rows if row.kind == kind and row.is_wrong]

    @property
    def first_wrong_module(self) -> str | None:
        """In forward order, by its outputs; where these are right, the last whose gradient is wrong."""
        of_modules: tuple[Kind, ...] = ("leak", "output", "router dtype", "routing")
        for kind in of_modules:
            found = self._in_order([row.name for row in self.wrong(kind)])
            if found:
                return self._parent_where_input_is_wrong(found[0], kind)
        if self.wrong("loss"):
            return THE_STEP
        others: tuple[tuple[Kind, int], ...] = (("gradient", -1), ("replica", 0), ("parameter", 0), ("count", 0))
        for kind, at in others:
            names = [row.name if kind == "count" else self._module_of(row.name) for row in self.wrong(kind)]
            if names:
                return self._in_order(names)[at]
        return None

    def _parent_where_input_is_wrong(self, name: str, kind: Kind) -> str:
        """All before the module is right, and what it is called with is not: its parent made that, between modules."""
        is_wrong = False
        if kind == "output" and (found := self.reference.outputs.get(f"{name}{INPUT}")) is not None:
            is_wrong = bool((found.difference_N > self.tolerance.relative * found.size).any())
        if kind == "leak":
            is_wrong = any((rank.leaked or {}).get(f"{name}{INPUT}", 0.0) > 0 for rank in self.ranks)
        return name.rpartition(".")[0] or name if is_wrong else name

    def pattern(self) -> Pattern:
        leaked = self._in_order([row.name for row in self.wrong("leak")])
        return Pattern(
            degrees=self.first.degrees,
            wrong_output=self._wrong_output(),
            leaked=leaked[0] if leaked else None,
            low_precision_routers=self.low_precision,
            routing_is_wrong=bool(self.wrong("routing")),
            loss_is_wrong=bool(self.wrong("loss")),
            count_ratios=self.count_ratios,
            gradients=tuple(self.gradients.values()),
            stale_replicas=tuple(row.name for row in self.wrong("replica")),
            parameters_are_wrong=bool(self.wrong("parameter")),
        )

    def _wrong_output(self) -> WrongOutput | None:
        names = self._in_order([row.name for row in self.wrong("output")])
        if not names:
            return None
        found = self.reference.outputs[names[0]]
        wrong_N = found.difference_N > self.tolerance.relative * found.size
        places = found.place_N[wrong_N]
        chunk = min((rank.first_chunk for rank in self.ranks if rank.first_chunk), default=0)
        later = bool(chunk) and bool((places >= chunk).all())
        return WrongOutput(
            name=names[0],
            difference=relative(float(found.difference_N.max()), found.size),
            is_router=names[0] in self.first.routers,
            later_tokens_alone=later,
            other_documents_alone=self.first.documents > 1 and bool((places >= self.first.first_document).all()),
        )

    def _in_order(self, names: Sequence[str]) -> list[str]:
        place = {name: number for number, name in enumerate(self.first.order)}
        return sorted(set(names), key=lambda name: place.get(name, len(place)))

    def _module_of(self, parameter: str) -> str:
        """The closest module around a parameter that ran by itself."""
        name, ran = parameter.rpartition(".")[0], set(self.first.order)
        while name and name not in ran:
            name = name.rpartition(".")[0]
        return name or parameter.rpartition(".")[0]

    def _row(self, kind: Kind, name: str, shape: Any, difference: float, tolerance: float, step: int = 0) -> Row:
        units = [unit for unit, _ in self.first.units if not unit or name == unit or name.startswith(f"{unit}.")]
        return Row(
            kind=kind,
            name=name,
            shape=tuple(shape),
            unit=max(units, key=len, default=""),
            difference=difference if not math.isnan(difference) else math.inf,
            tolerance=tolerance,
            step=step,
        )

    def _outputs(self) -> Iterator[Row]:
        for name in self.first.order:
            found: OutputDifference | None = self.reference.outputs.get(name)
            if found is not None and found.difference_N.numel():
                difference = relative(float(found.difference_N.max()), found.size)
                shape = self.first.outputs[name].shape
                yield self._row("output", name, shape, difference, self.tolerance.relative)

    def _routing(self) -> Iterator[Row]:
        for name, (lost, size) in self.reference.routing.items():
            yield self._row("routing", name, (), relative(lost, size), self.tolerance.relative)
        for name in self.first.routers:
            kept = self.first.outputs.get(name)
            if kept is not None:
                is_low = kept.dtype in (torch.bfloat16, torch.float16)
                self.low_precision += [name] if is_low else []
                yield self._row("router dtype", name, kept.shape, float(is_low), 0.0)

    def _leaks(self) -> Iterator[Row]:
        leaks = [rank.leaked for rank in self.ranks if rank.leaked is not None]
        for name in self.first.order if leaks else []:
            changes = [leak[name] for leak in leaks if name in leak]
            if changes:
                yield self._row("leak", name, (), max(changes), 0.0)

    def _losses(self) -> Iterator[Row]:
        for step in range(self.steps):
            expected = self.reference.losses[step]
            parts = [part for rank in self.ranks for part in rank.losses[step]]
            if not parts or math.isnan(expected):
                continue
            weighed = [(loss, 1.0 if labels is None else labels) for loss, labels in parts]
            total = sum(labels for _, labels in weighed)
            measured = sum(loss * labels for loss, labels in weighed if labels) / max(total, 1.0)
            difference = relative(abs(measured - expected), abs(expected))
            yield self._row("loss", THE_STEP, (), difference, self.tolerance.relative, step)

    def _counts(self) -> Iterator[Row]:
        for step in range(self.steps):
            for name in self.first.experts:
                expected = self.reference.counts[step][name]
                counted = sum((rank.counts[step][name] for rank in self.ranks), torch.zeros_like(expected))
                difference = float((counted - expected).abs().max())
                if difference and expected.sum():
                    self.count_ratios.append(float(counted.sum()) / float(expected.sum()))
                yield self._row("count", name, expected.shape, difference, 0.0, step)

    def _gradients(self) -> Iterator[Row]:
        for step, expected in enumerate(self.reference.gradients):
            floor = self.tolerance.noise * self._largest_gradient[step]
            of_replicas = [rank.gradients[step] for rank in self.ranks if len(rank.gradients) > step]
            for name in sorted(set(expected).union(*of_replicas)):
                right = expected.get(name)
                found = [gradients[name] for gradients in of_replicas if name in gradients]
                like = right if right is not None else found[0]
                right = torch.zeros_like(like) if right is None else right
                found = found or [torch.zeros_like(like)]
                size = max(float(right.abs().max()), floor) if right.numel() else floor
                differences = [relative(_distance(gradient, right), size) for gradient in found]
                row = self._row("gradient", name, right.shape, max(differences), self.tolerance.relative, step)
                if name not in self.gradients or (row.is_wrong and not self.gradients[name].is_wrong):
                    self.gradients[name] = self._described(name, row.is_wrong, right, found, differences, size)
                yield row

    def _described(
        self, name: str, is_wrong: bool, right: Tensor, found: Sequence[Tensor], differences: Sequence[float],
        size: float,
    ) -> Gradient:  # fmt: skip
        worst = found[max(range(len(found)), key=lambda number: differences[number])]
        is_expert = any(name.startswith(f"{experts}.") for experts in self.first.experts)
        limit = self.tolerance.relative
        return Gradient(
            name=name,
            is_expert=is_expert,
            is_wrong=is_wrong,
            ratio=_ratio(worst, right, at_most=max(MIN_RATIO_SHARE, limit)) if is_wrong else 1.0,
            missing_experts=_missing_rows(worst, right, limit * size) if is_wrong and is_expert else (),
            right_on_some_replicas=is_wrong and min(differences) <= limit,
        )

    def _parameters(self) -> Iterator[Row]:
        noise: dict[str, Tensor] = {}
        is_aligned = len(self.reference.gradients) == self.steps
        for step, expected in enumerate(self.reference.parameters):
            for name, right in expected.items():
                gradient = self.reference.gradients[step].get(name) if is_aligned else None
                if gradient is not None:
                    largest = float(gradient.abs().max()) if gradient.numel() else 0.0
                    limit = 10 * self.tolerance.relative * max(
                        largest, self.tolerance.noise * self._largest_gradient[step]
                    )  # fmt: skip
                    # A step like Adam's makes as much of a rounding error as of a gradient. What is exactly 0 is none,
                    # but where all cancels but for rounding errors (the bias of a key).
                    small = (gradient.abs() < limit) & ((gradient != 0) | (0 < largest < limit))
                    noise[name] = noise[name] | small if name in noise else small
                found = [rank.parameters[step][name] for rank in self.ranks if name in rank.parameters[step]]
                size = float(right.abs().max()) if right.numel() else 0.0
                worst = max((_distance(mine, right, noise.get(name)) for mine in found), default=math.inf)
                yield self._row("parameter", name, right.shape, relative(worst, size), self.tolerance.relative, step)

    def _replicas(self) -> Iterator[Row]:
        for step in range(self.steps):
            for name in self.reference.parameters[step]:
                bits: dict[tuple[int, ...], set[str]] = {}
                for rank in self.ranks:
                    shard, digest = rank.digests[step][name]
                    bits.setdefault(shard, set()).add(digest)
                num_versions = max(map(len, bits.values()), default=1)
                shape = self.reference.parameters[step][name].shape
                yield self._row("replica", name, shape, float(num_versions - 1), 0.0, step)


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def _distance(one: Tensor, other: Tensor, left_out: Tensor | None = None) -> float:
    """The largest difference of an element; infinite where one is not finite."""
    if not one.numel():
        return 0.0
    difference = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
    return float((difference if left_out is None else difference.masked_fill(left_out, 0.0)).max())


def _ratio(found: Tensor, right: Tensor, *, at_most: float) -> float | None:
    one, other = found.double().flatten(), right.double().flatten()
    square = float(other @ other)
    if not square or not math.isfinite(float(one.sum())):
        return None
    ratio = float(one @ other) / square
    left = float((one - ratio * other).norm()) / math.sqrt(square)
    return ratio if left < at_most * max(1.0, abs(ratio)) else None


def _missing_rows(found: Tensor, right: Tensor, limit: float) -> tuple[int, ...]:
    """Experts (dim 0) whose part is wrong and smaller than it should be, where that of another is right."""
    difference_E = (found.double() - right.double()).flatten(1).abs().amax(1)
    is_wrong_E = difference_E > limit
    is_smaller_E = found.double().flatten(1).norm(dim=1) < right.double().flatten(1).norm(dim=1)
    if not bool(is_wrong_E.any()) or bool(is_wrong_E.all()) or not bool(is_smaller_E[is_wrong_E].all()):
        return ()
    return tuple(is_wrong_E.nonzero()[:, 0].tolist())
