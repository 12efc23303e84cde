"""What a check has found, and how it is told: a table, worst first, and two sentences."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

Kind = Literal[
    "loss", "output", "routing", "router dtype", "leak", "count", "gradient", "parameter", "replica"
]  # fmt: skip

WIDTH = 120
MAX_ROWS = 12
"""Of the table; ``Verification.rows`` has all of them."""

MAX_UNIT = 22
"""Characters of a unit's name in the table, its last; the names beside it have the rest."""

_EXPLAINED = {
    "loss": "loss of a step",
    "output": "output of a module",
    "routing": "score lost by the experts chosen",
    "router dtype": "router below FP32",
    "leak": "change in other documents",
    "count": "tokens of an expert",
    "gradient": "gradient",
    "parameter": "parameter after the step",
    "replica": "versions of a replica",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that must be equal."""

    kind: Kind
    name: str
    """Of the parameter or module."""
    shape: tuple[int, ...]
    unit: str
    """The unit it is gathered with; empty for the root's own and for what is in none."""
    difference: float
    """As a share of the largest element in one process; tokens for a count, 1 where bits must be equal and are not."""
    tolerance: float
    step: int = 0

    @property
    def is_wrong(self) -> bool:
        return self.difference > self.tolerance

    @property
    def severity(self) -> float:
        """Difference over tolerance."""
        if self.tolerance:
            return self.difference / self.tolerance
        return math.inf if self.difference else 0.0


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What ``verify`` has found. True when everything is equal."""

    passed: bool
    rows: Sequence[Row]
    """All that was compared, worst first."""
    first_wrong_module: str | None
    """By its qualified name; ``training_step`` for a loss whose outputs are right. None where all is equal."""
    likely_cause: str | None
    """One sentence."""
    text: str
    """The table and what follows from it, at most 120 columns wide."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text


def worst_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.severity, -row.difference))


def told(
    rows: Sequence[Row], module: str | None, cause: str | None, *, heading: str, notes: Sequence[str]
) -> Verification:
    """A finished check; ``rows`` in any order."""
    rows = worst_first(rows)
    wrong = [row for row in rows if row.is_wrong]
    lines = [_table(wrong or _worst_of_kinds(rows), heading, has_steps=any(row.step for row in rows))]
    if wrong:
        kinds = {kind: sum(row.kind == kind for row in wrong) for kind in dict.fromkeys(row.kind for row in wrong)}
        lines.append(
            "Not equal: " + ", ".join(f"{number} x {_EXPLAINED[kind]}" for kind, number in kinds.items()) + "."
        )
        lines.append(f"First wrong module: {module or 'unknown'}.")
        lines.append(f"Likely cause: {cause or 'none of the known ones'}")
    else:
        lines.append(f"Equal: {len(rows):,} numbers and tensors, on the ranks what they are in one process.")
    text = "\n".join([*lines, *notes])
    return Verification(passed=not wrong, rows=tuple(rows), first_wrong_module=module, likely_cause=cause, text=text)


def _worst_of_kinds(rows: Sequence[Row]) -> list[Row]:
    """One of each, where all are equal."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.kind, row)
    return list(first.values())


def _table(rows: Sequence[Row], heading: str, *, has_steps: bool) -> str:
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    table.add_column("of what", no_wrap=True)
    table.add_column("name", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    if has_steps:
        table.add_column("step", justify="right")
    for row in rows[:MAX_ROWS]:
        cells = [_number(row.difference), _number(row.tolerance), row.kind, row.name or "(the module)",
                 " x ".join(map(str, row.shape)), _end_of(row.unit)]  # fmt: skip
        table.add_row(*cells, *([str(row.step)] if has_steps else []))
    if len(rows) > MAX_ROWS:
        table.caption = f"and {len(rows) - MAX_ROWS:,} more"
        table.caption_justify = "left"
    console = Console(width=WIDTH, file=io.StringIO(), force_terminal=False, highlight=False)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _end_of(unit: str) -> str:
    return unit if len(unit) <= MAX_UNIT else f"...{unit[3 - MAX_UNIT :]}"


def _number(x: float) -> str:
    if x == 0:
        return "0"
    return f"{x:.0f}" if x >= 1 and x == round(x) and math.isfinite(x) else f"{x:.1e}"
