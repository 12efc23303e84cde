"""The small files that callbacks write beside the logs: what the run is, and what its steps waited for."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RUN_FILE = "run.json"
RECEIPT_FILE = "receipt.jsonl"


def read_description(run: Path) -> Mapping[str, object]:
    """What ``run.json`` says; empty where it is not there or cannot be read."""
    try:
        values = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True, kw_only=True)
class ReceiptLine:
    """Steps that were measured, as their mean."""

    step: int
    """The last of them."""
    num_steps: int = 1
    seconds: float
    """Of a step."""
    exposed: Mapping[str, float]
    """Seconds in which compute waited, by what it waited for."""
    first_layer: str | None = None
    """The first that was not hidden."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """What the planner says of ``exposed``, where a cluster is known."""


@dataclass(frozen=True, kw_only=True)
class ReceiptLog:
    """Steps ascending; of a step that was measured twice the later line."""

    lines: tuple[ReceiptLine, ...]

    @property
    def seconds(self) -> float:
        """All that were measured."""
        return sum(line.num_steps * line.seconds for line in self.lines)

    @property
    def exposed_seconds(self) -> Mapping[str, float]:
        """By what was waited for, the longest first; nothing that never was."""
        totals: dict[str, float] = {}
        for line in self.lines:
            for name, seconds in line.exposed.items():
                totals[name] = totals.get(name, 0.0) + line.num_steps * seconds
        return {name: totals[name] for name in sorted(totals, key=lambda name: -totals[name]) if totals[name] > 0}

    @property
    def exposed_share(self) -> float:
        """Of all measured seconds."""
        return sum(self.exposed_seconds.values()) / self.seconds if self.seconds else 0.0

    @property
    def first_layer(self) -> str | None:
        """The layer that was most often the first not hidden."""
        named = Counter(line.first_layer for line in self.lines if line.first_layer)
        return named.most_common(1)[0][0] if named else None

    @property
    def planned(self) -> Mapping[str, float]:
        """Seconds of a step; empty without a prediction."""
        return next((line.planned for line in reversed(self.lines) if line.planned), {})

    def averaged(self, max_lines: int) -> "ReceiptLog":
        """At most so many lines, neighbours averaged; the shares stay as they are."""
        size = -(-len(self.lines) // max_lines)
        groups = [ReceiptLog(lines=self.lines[start : start + size]) for start in range(0, len(self.lines), size)]
        return ReceiptLog(lines=tuple(_average(group) for group in groups)) if size > 1 else self


def read_receipt(run: Path) -> ReceiptLog | None:
    """The lines of ``receipt.jsonl`` that are whole; None without any."""
    path = run / RECEIPT_FILE
    if not path.is_file():
        return None
    by_step: dict[int, ReceiptLine] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                values = json.loads(text)
                line = ReceiptLine(
                    step=int(values["step"]),
                    seconds=float(values["seconds"]),
                    num_steps=max(1, int(values.get("num_steps", 1))),
                    exposed=_seconds_by_name(values["exposed"]),
                    planned=_seconds_by_name(values.get("planned")),
                    first_layer=None if values.get("first_layer") is None else str(values["first_layer"]),
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            by_step[line.step] = line
    return ReceiptLog(lines=tuple(by_step[step] for step in sorted(by_step))) if by_step else None


def _average(group: ReceiptLog) -> ReceiptLine:
    num_steps = sum(line.num_steps for line in group.lines)
    return ReceiptLine(
        step=group.lines[-1].step,
        num_steps=num_steps,
        seconds=group.seconds / num_steps,
        exposed={name: seconds / num_steps for name, seconds in group.exposed_seconds.items()},
        first_layer=group.first_layer,
        planned=group.planned,
    )


def _seconds_by_name(values: Mapping[str, float] | None) -> dict[str, float]:
    return {str(name): float(seconds) for name, seconds in (values or {}).items()}
