"""Tokens per expert over time, as a run writes them down: ``expert_load.jsonl``, a JSON object a line.

The first line names the layers: ``{"layers": [...], "experts": [E of each]}``. Every other is a window of steps:
``{"since": a, "step": b, "logs": n, "ep": P, "width": w, "tokens": "...", "figures": {...}}``, the tokens of steps
a + 1 to b, all ranks together: all layers one after the other, as unsigned integers of w bytes, lowest bytes of all
first, compressed with zlib, in base64. Lines are appended, so that a run which is killed leaves all windows but perhaps
the last; at `MAX_WINDOWS` neighbours are added up two by two, in a file that replaces the old one when it is whole.

Shapes: E experts of a layer.
"""

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

FILE_NAME = "expert_load.jsonl"
MAX_WINDOWS = 256
"""A window takes up to 66 KB at 79 layers of 256 experts, and the file 17 MB."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was counted in the steps ``since + 1`` to ``step``."""

    since: int
    step: int
    num_logs: int
    """Times that it was logged meanwhile; more once windows have been added up."""
    ep: int
    tokens: tuple[Counts, ...]
    """[E] of each layer, in the order of the series' names."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What balancing did: means over the window, under the names of the logged figures."""

    def to_line(self) -> str:
        """One line of the file, its end included."""
        packed, width = _pack(np.concatenate(self.tokens))
        line = {
            "since": self.since,
            "step": self.step,
            "logs": self.num_logs,
            "ep": self.ep,
            "width": width,
            "tokens": packed,
            "figures": dict(self.figures),
        }
        return json.dumps(line, separators=(",", ":")) + "\n"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Windows of one run, in the order of their steps."""

    layers: tuple[str, ...]
    num_experts: tuple[int, ...]
    """Of each layer."""
    windows: tuple[Window, ...] = ()

    def until(self, step: int) -> "Series":
        """Without what came after ``step``: a run that resumes there counts it again."""
        return self._with(tuple(window for window in self.windows if window.step <= step))

    def halved(self) -> "Series":
        """Neighbours added up two by two, where ep is the same."""
        return self._with(merged(self.windows, 2))

    def to_text(self) -> str:
        """The whole file."""
        header = {"layers": self.layers, "experts": self.num_experts}
        return json.dumps(header, separators=(",", ":")) + "\n" + "".join(each.to_line() for each in self.windows)

    def _with(self, windows: tuple[Window, ...]) -> "Series":
        return Series(layers=self.layers, num_experts=self.num_experts, windows=windows)


def merged(windows: Sequence[Window], num_neighbours: int) -> tuple[Window, ...]:
    """Every ``num_neighbours`` windows added up; fewer where ep changes in between, and at the end."""
    groups: list[list[Window]] = []
    for window in windows:
        if groups and len(groups[-1]) < num_neighbours and groups[-1][0].ep == window.ep:
            groups[-1].append(window)
        else:
            groups.append([window])
    return tuple(_sum(group) for group in groups)


def read_series(path: Path) -> Series | None:
    """The series in a file; None without a readable header. Lines that a kill tore are left out."""
    if not path.is_file():
        return None
    series: Series | None = None
    windows: list[Window] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                values = json.loads(line)
                if series is None:
                    names, sizes = tuple(map(str, values["layers"])), tuple(map(int, values["experts"]))
                    series = Series(layers=names, num_experts=sizes)
                else:
                    windows.append(_window(values, series.num_experts))
            except (ValueError, KeyError, TypeError, AttributeError, zlib.error):
                continue
    return None if series is None else series._with(tuple(windows))


def continue_series(path: Path, num_experts: Mapping[str, int], *, step: int) -> Series:
    """Make ``path`` ready for the windows after ``step`` of layers with so many experts, and say what it holds.

    Windows of the same layers up to ``step`` stay; what the file says of later steps goes, since the run counts them
    again. At step 0 it starts anew.
    """
    empty = Series(layers=tuple(num_experts), num_experts=tuple(num_experts.values()))
    found = read_series(path) if step else None
    is_same = found is not None and (found.layers, found.num_experts) == (empty.layers, empty.num_experts)
    series = found.until(step) if found is not None and is_same else empty
    _replace(path, series)
    return series


def append_window(path: Path, window: Window) -> None:
    """One line more at the end of the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(window.to_line())


def halve_series(path: Path) -> None:
    """Add up neighbouring windows of the file; it is the old or the new one at any moment."""
    series = read_series(path)
    if series is not None:
        _replace(path, series.halved())


def _replace(path: Path, series: Series) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(series.to_text(), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _sum(windows: Sequence[Window]) -> Window:
    num_logs = sum(window.num_logs for window in windows)
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    for window in windows:
        for name, figure in window.figures.items():
            sums[name] = sums.get(name, 0.0) + figure * window.num_logs
            weights[name] = weights.get(name, 0) + window.num_logs
    return Window(
        since=windows[0].since,
        step=windows[-1].step,
        num_logs=num_logs,
        ep=windows[0].ep,
        tokens=tuple(np.sum(layer, axis=0) for layer in zip(*(window.tokens for window in windows), strict=True)),
        figures={name: total / weights[name] for name, total in sums.items()},
    )


def _window(values: Mapping[str, object], num_experts: Sequence[int]) -> Window:
    numbers = {name: int(str(values[name])) for name in ("since", "step", "logs", "ep", "width")}
    counts = _unpack(str(values["tokens"]), numbers["width"])
    if len(counts) != sum(num_experts):
        raise ValueError(f"{len(counts)} counts of {sum(num_experts)} experts")
    figures = values.get("figures", {})
    if not isinstance(figures, Mapping):
        raise ValueError("figures must be an object")
    return Window(
        since=numbers["since"],
        step=numbers["step"],
        num_logs=numbers["logs"],
        ep=numbers["ep"],
        tokens=tuple(np.split(counts, np.cumsum(num_experts)[:-1])),
        figures={str(name): float(figure) for name, figure in figures.items()},
    )


def _pack(counts: Counts) -> tuple[str, int]:
    """(text, bytes of one count). Bytes of like weight lie together: the high ones hardly differ."""
    most = int(counts.max(initial=0))
    width = next(size for size in (1, 2, 4, 8) if most < 256**size)
    planes = counts.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T
    return base64.b64encode(zlib.compress(planes.tobytes())).decode(), width


def _unpack(text: str, width: int) -> Counts:
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=np.uint8)
    return np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<u{width}").reshape(-1).astype(np.int64)
