"""What steps waited for: the numbers of all ranks, the table, and the sentence that says what helps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from lightning_moe_strategy.callbacks.receipt_prediction import PlannedWaits
from lightning_moe_strategy.waits import CATEGORIES, Category, StepWaits, Wait

NAMES: Mapping[Category, str] = {
    "dense_gather": "dense gathers",
    "expert_gather": "expert gathers",
    "reduce_scatter": "reduce-scatters",
    "cp_gather": "cp gathers",
    "ep_dispatch": "EP dispatch",
    "ep_combine": "EP combine",
    "expert_move": "moved experts",
    "optimizer": "optimizer",
    "copies": "FSDP's copies",
}

# A layer counts as hidden while it makes compute wait for less than this much of its share of a step: below, on a CPU
# that others use too, a wait cannot be told from the scheduler's.
HIDDEN_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class ReceiptRow:
    """Seconds of a step that one layer made compute wait, mean over ranks."""

    layer: str
    """Name of the block, or of the unit where it is in none; empty for the root."""
    category: Category
    forward_seconds: float
    backward_seconds: float
    """Recompute included."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class StepReceipt:
    """What an optimizer step waited for: a mean over steps and ranks."""

    step: int
    """The last of the steps."""
    num_steps: int
    step_seconds: float
    """Of one step, without what runs between its micro-batches."""
    rows: tuple[ReceiptRow, ...]
    """In the order of the model."""
    most: Mapping[Category, float]
    """Seconds of the rank that waited most, by category."""
    most_exposed_seconds: float
    """Of the rank that waited most in all."""
    layers: tuple[str, ...]
    """All of them, in the order of the model."""
    blocks: tuple[str, ...]
    """Of these, the repeated blocks."""
    planned: PlannedWaits | None = None
    """None without a cluster, or where the run cannot be planned."""

    @property
    def exposed(self) -> dict[Category, float]:
        """Seconds by category, those that were waited for at all."""
        seconds: defaultdict[Category, float] = defaultdict(float)
        for row in self.rows:
            seconds[row.category] += row.seconds
        return {category: seconds[category] for category in CATEGORIES if category in seconds}

    @property
    def exposed_seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def worst(self) -> Category | None:
        """The category that is waited for most; None where nothing was."""
        exposed = self.exposed
        return max(exposed.items(), key=lambda item: item[1])[0] if exposed else None

    def first_layer(self, category: Category) -> str | None:
        """The first layer, in the order of the model, that was not hidden; None where all were, and for copies.

        What nothing can hide is left out: gathers of the first block and what is before it, in the forward pass, and of
        what is behind the last in the backward pass; reductions of the first block and what is before it.
        """
        blocks = self.blocks or self.layers
        limit = HIDDEN_SHARE * self.step_seconds / len(blocks) if blocks else 0.0
        for row in self.rows:
            if row.category == category != "copies" and self._hideable(row) > limit:
                return row.layer
        return None

    def _hideable(self, row: ReceiptRow) -> float:
        if row.category not in ("dense_gather", "expert_gather", "reduce_scatter") or not self.blocks:
            return row.seconds
        place = self.layers.index(row.layer)
        is_behind_first = place > self.layers.index(self.blocks[0])
        if row.category == "reduce_scatter":
            return row.seconds if is_behind_first else 0.0
        is_last_or_before = place <= self.layers.index(self.blocks[-1])
        return row.forward_seconds * is_behind_first + row.backward_seconds * is_last_or_before

    def figures(self) -> dict[str, float]:
        """What loggers get."""
        figures = {
            "receipt/exposed_seconds": self.exposed_seconds,
            "receipt/exposed_share": self.exposed_share,
            "receipt/exposed_seconds_worst_rank": self.most_exposed_seconds,
            **{f"receipt/{category}_seconds": seconds for category, seconds in self.exposed.items()},
        }
        if self.planned is not None:
            figures["receipt/planned_exposed_seconds"] = self.planned.exposed_seconds
        return figures

    def line(self) -> dict[str, object]:
        """One line of ``receipt.jsonl``."""
        worst = self.worst
        line: dict[str, object] = {
            "step": self.step,
            "num_steps": self.num_steps,
            "seconds": round(self.step_seconds, 6),
            "exposed": _rounded(self.exposed),
            "most_exposed_seconds": round(self.most_exposed_seconds, 6),
            "worst": worst,
            "first_layer": None if worst is None else self.first_layer(worst),
        }
        if self.planned is not None:
            line["planned"] = _rounded(self.planned.seconds)
        return line


def _rounded(seconds: Mapping[Category, float]) -> dict[str, float]:
    return {category: round(each, 6) for category, each in seconds.items()}


class WaitSums:
    """Steps of this rank added up."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.waits: defaultdict[Wait, float] = defaultdict(float)

    def add(self, step: StepWaits) -> None:
        self.num_steps += 1
        self.seconds += step.seconds
        for what, seconds in step.waits.items():
            self.waits[what] += seconds

    def numbers(self, layers: Sequence[str], *, rank: int, num_ranks: int) -> list[float]:
        """The mean step as a vector whose sum over all ranks `receipt_of` reads; every rank's has the same length."""
        num_steps = max(1, self.num_steps)
        by_layer = [self.waits.get(what, 0.0) / num_steps for what in _keys(layers)]
        of_category = [
            sum(seconds for what, seconds in self.waits.items() if what.category == category) / num_steps
            for category in CATEGORIES
        ]
        of_ranks = [0.0] * (num_ranks * (len(CATEGORIES) + 1))
        start = rank * (len(CATEGORIES) + 1)
        of_ranks[start : start + len(CATEGORIES) + 1] = [*of_category, sum(of_category)]
        return [float(self.num_steps > 0), float(self.num_steps), self.seconds / num_steps, *by_layer, *of_ranks]


def receipt_of(
    numbers: Sequence[float],
    layers: tuple[str, ...],
    blocks: tuple[str, ...],
    *,
    step: int,
    planned: PlannedWaits | None,
) -> StepReceipt | None:
    """From the sum of all ranks' numbers. None where no rank has measured a step."""
    num_with_steps, num_steps, seconds, *rest = numbers
    if not num_with_steps:
        return None
    keys = _keys(layers)
    waits = {what: each / num_with_steps for what, each in zip(keys, rest, strict=False)}
    rows = []
    for layer in layers:
        for category in CATEGORIES:
            forward, backward = (waits[Wait(layer, category, in_backward)] for in_backward in (False, True))
            if forward or backward:
                rows.append(
                    ReceiptRow(layer=layer, category=category, forward_seconds=forward, backward_seconds=backward)
                )
    width, of_ranks = len(CATEGORIES) + 1, rest[len(keys) :]
    *most, most_exposed = (max(of_ranks[column::width]) for column in range(width))
    return StepReceipt(
        step=step,
        num_steps=round(num_steps / num_with_steps),
        step_seconds=seconds / num_with_steps,
        rows=tuple(rows),
        most={category: each for category, each in zip(CATEGORIES, most, strict=True) if each},
        most_exposed_seconds=most_exposed,
        layers=layers,
        blocks=blocks,
        planned=planned,
    )


def _keys(layers: Sequence[str]) -> list[Wait]:
    return [
        Wait(layer, category, in_backward)
        for layer in layers
        for category in CATEGORIES
        for in_backward in (False, True)
    ]


def receipt_table(receipt: StepReceipt, num_ranks: int) -> Table:
    """Seconds by category, what is waited for most first, beside what the planner says."""
    exposed, planned = receipt.exposed, receipt.planned
    title = f"Receipt: what a step of {_figure(receipt.step_seconds)} s waited for"
    caption = f"Means over {receipt.num_steps} steps and {num_ranks} ranks."
    if planned is not None:
        caption += f" Planned on {planned.cluster}: a step of {_figure(planned.step_seconds)} s."
    table = Table(title=title, caption=caption)
    table.add_column("waited for", no_wrap=True)
    for header in ("s / step", "share", "worst rank"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("first layer not hidden", max_width=24)
    if planned is not None:
        table.add_column("planned", justify="right", no_wrap=True)
    for category, most in sorted(receipt.most.items(), key=lambda item: -exposed.get(item[0], 0.0)):
        layer = receipt.first_layer(category)
        cells = [NAMES[category], *_cells(exposed.get(category, 0.0), most, receipt)]
        cells.append("" if layer is None else layer or "the model itself")
        if planned is not None:
            cells.append(_figure(planned.seconds[category]) if category in planned.seconds else "")
        table.add_row(*cells)
    table.add_section()
    total = ["all", *_cells(receipt.exposed_seconds, receipt.most_exposed_seconds, receipt), ""]
    if planned is not None:
        total.append(_figure(planned.exposed_seconds))
    table.add_row(*total)
    return table


def _cells(seconds: float, most: float, receipt: StepReceipt) -> list[str]:
    share = seconds / receipt.step_seconds if receipt.step_seconds else 0.0
    return [_figure(seconds), f"{share:.1%}", _figure(most)]


def _figure(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds >= 1e-3 or not seconds else f"{seconds:.1e}"


def warning(receipt: StepReceipt, warn_above: float, *, on_gpu: bool) -> str:
    """What is waited for too long, and what helps."""
    worst = receipt.worst
    assert worst is not None
    layer = receipt.first_layer(worst)
    where = "" if layer is None else f", not hidden from {layer or 'the model itself'} on"
    return (
        f"Receipt: compute waits for {receipt.exposed_share:.0%} of a step ({receipt.exposed_seconds:.3g} of "
        f"{receipt.step_seconds:.3g} s up to step {receipt.step}), more than warn_above({warn_above}). Most is for "
        f"{NAMES[worst]}, {receipt.exposed[worst]:.3g} s{where}. {_remedy(worst, receipt.planned, on_gpu=on_gpu)}"
    )


def _remedy(category: Category, planned: PlannedWaits | None, *, on_gpu: bool) -> str:
    if category in ("dense_gather", "expert_gather", "reduce_scatter"):
        axes = {"expert_gather": "e_fsdp", "dense_gather": "fsdp x cp"}.get(category, "fsdp x cp and e_fsdp")
        if planned is None:
            tokens = "`lightning-moe plan` says how many hide it"
        else:
            tokens = f"this run has {planned.tokens:,}, the planner hides it above {planned.min_tokens_to_hide:,.0f}"
        hint = f"More tokens per GPU and micro-batch hide more ({tokens}). With {axes} in an NVLink domain less has to."
        if category == "reduce_scatter" and not on_gpu:
            hint += " On a CPU no reduction overlaps: gloo's block."
        return hint
    if category == "cp_gather":
        return "Keep cp inside an NVLink domain, split it with cp_inter where it is wider, or choose a smaller cp."
    if category in ("ep_dispatch", "ep_combine"):
        return (
            "Keep ep inside an NVLink domain. Ranks also wait here for the one with most rows: look at expert_load's "
            "rank_skew, and at balance."
        )
    if category == "expert_move":
        return "Raise max_imbalance: fewer experts move."
    if category == "optimizer":
        return "Larger steps (accumulate_grad_batches) exchange as much once."
    return "More tokens per GPU and micro-batch copy the same weights for more work."
