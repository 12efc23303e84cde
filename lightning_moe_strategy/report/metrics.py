"""What a run's logger wrote down: curves over steps, from Lightning's metrics.csv or TensorBoard's event files."""

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lightning_moe_strategy.report.run_folder import EVENTS

MAX_POINTS = 1000
"""Drawn of one curve: as many as the wide screens of today have pixels for it."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric, its steps ascending; of a step that was logged twice the later value."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    """May hold NaN and infinities: a run whose loss is NaN has logged just that."""

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def median(self) -> float:
        """Of the finite values; NaN without one."""
        finite = [value for value in self.values if math.isfinite(value)]
        return median(finite) if finite else math.nan

    def thinned(self, max_points: int = MAX_POINTS) -> "Curve":
        """Lowest and highest value of every stretch of steps, so that no peak is lost; the first and the last stay."""
        if len(self.values) <= max_points:
            return self
        kept = {0, len(self.values) - 1}
        num_stretches = max_points // 2 - 1
        for stretch in range(num_stretches):
            start, end = (len(self.values) * edge // num_stretches for edge in (stretch, stretch + 1))
            finite = [index for index in range(start, end) if math.isfinite(self.values[index])]
            if finite:
                kept |= {min(finite, key=self.values.__getitem__), max(finite, key=self.values.__getitem__)}
        order = sorted(kept)
        return Curve(name=self.name, steps=[self.steps[i] for i in order], values=[self.values[i] for i in order])


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """All curves of a run by name."""

    curves: Mapping[str, Curve] = field(default_factory=dict)
    source: str = ""
    """What they were read from, in words."""
    problem: str = ""
    """Why there are none, and what would make them appear."""

    def find(self, *names: str) -> Curve | None:
        """The first of these that was logged."""
        return next((self.curves[name] for name in names if name in self.curves), None)

    @property
    def last_step(self) -> int | None:
        return max((curve.steps[-1] for curve in self.curves.values()), default=None)


def read_metrics(run: Path) -> Metrics:
    """The curves of metrics.csv, or else of the event files; without either ``problem`` says what writes them."""
    table, events = run / "metrics.csv", sorted(run.glob(EVENTS))
    if table.is_file():
        curves = _curves(_points_of_table(table))
        if curves or not events:
            problem = (
                "" if curves else "metrics.csv holds no number yet: the first comes after log_every_n_steps steps."
            )
            return Metrics(curves=curves, source="metrics.csv", problem=problem)
    if events:
        return _of_events(run, len(events))
    return Metrics(
        problem="This run has no metrics.csv and no TensorBoard events: use Trainer(logger=CSVLogger(...)) or "
        "TensorBoardLogger; what other loggers send away cannot be read here."
    )


_Points = Mapping[str, Sequence[tuple[int, float]]]


def _points_of_table(path: Path) -> _Points:
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if "step" not in header:
            return {}
        place = header.index("step")
        for row in rows:
            # A row may be torn, by a run that was killed or is writing it now.
            step = _number(row[place]) if len(row) > place else None
            if step is None or not math.isfinite(step):
                continue
            for name, cell in zip(header, row, strict=False):
                value = _number(cell) if cell else None
                if value is not None and name not in ("step", "epoch"):
                    points[name].append((int(step), value))
    return points


def _of_events(run: Path, num_files: int) -> Metrics:
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped, unused-ignore]
            EventAccumulator,
        )
    except ImportError:
        return Metrics(
            problem=f"This run has TensorBoard events ({num_files} files), and reading them takes the package "
            "tensorboard, which is not installed: pip install tensorboard."
        )
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    points = {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
        if name != "epoch"
    }
    curves = _curves(points)
    problem = "" if curves else "The TensorBoard events hold no scalar yet."
    return Metrics(curves=curves, source="TensorBoard events", problem=problem)


def _curves(points: _Points) -> dict[str, Curve]:
    curves = {}
    for name in sorted(points):
        by_step = sorted(dict(points[name]).items())
        curves[name] = Curve(name=name, steps=[step for step, _ in by_step], values=[value for _, value in by_step])
    return curves


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
