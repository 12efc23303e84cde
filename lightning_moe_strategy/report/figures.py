"""Plotly dictionaries of the kinds of figure that a report has.

A colour is ``@name``, a name of the planner's ``THEMES``: the page fills in those of the reader's theme.
"""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_moe_strategy.plan.figures import Figure, layout_axis, plain_layout
from lightning_moe_strategy.report.expert_series import Counts

COLORS = ("@blue", "@orange", "@green", "@red", "@muted", "@pale", "@ink")
DIGITS = 6
"""Of a number that is drawn: more would be invisible and are half of a page's size."""
# Red for nothing at all, then from the faintest on the page to the strongest; 1 of the scale is FULL_PERCENT.
FULL_PERCENT = 400
_LOAD_SCALE = [
    [0.0, "@red"],
    [0.002, "@red"],
    [0.002, "@grid"],
    [0.25, "@pale"],
    [0.6, "@blue"],
    [1.0, "@ink"],
]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one trace of a figure shows."""

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]


def line_figure(lines: Sequence[Line], *, y_title: str, x_title: str = "step") -> Figure:
    """Lines over steps; a value that is not finite is a gap."""
    traces = [
        _trace(line) | {"mode": _mode(line), "line": {"color": COLORS[index % len(COLORS)], "width": 2}}
        for index, line in enumerate(lines)
    ]
    layout = _layout(x_title=x_title, y_title=y_title)
    layout["showlegend"] = len(lines) > 1
    return {"data": traces, "layout": layout}


def stacked_figure(lines: Sequence[Line], *, y_title: str, x_title: str = "step") -> Figure:
    """Areas one above the other: the top is the sum."""
    traces = [
        _trace(line)
        | {
            "mode": "lines",
            "stackgroup": "all",
            "line": {"color": COLORS[index % len(COLORS)], "width": 1},
            "hoveron": "points",
        }
        for index, line in enumerate(lines)
    ]
    layout = _layout(x_title=x_title, y_title=y_title)
    layout.update(showlegend=True, hovermode="x unified")
    layout_axis(layout, "yaxis")["rangemode"] = "tozero"
    return {"data": traces, "layout": layout}


def bar_figure(bars: Line, *, y_title: str, x_title: str, marks: Line | None = None, highest: float) -> Figure:
    """Bars, and over each a mark; the same height in every position of a slider."""
    place = {"x": list(bars.x), "y": _rounded(bars.y), "name": bars.name}
    hover = "%{x}: %{y:.4g}<extra></extra>"
    traces: list[Figure] = [{"type": "bar", **place, "marker": {"color": "@blue"}, "hovertemplate": hover}]
    if marks is not None:
        dash = {"symbol": "line-ew-open", "size": 12, "color": "@orange", "line": {"width": 3, "color": "@orange"}}
        traces.append(_trace(marks) | {"mode": "markers", "marker": dash})
    layout = _layout(x_title=x_title, y_title=y_title)
    layout["showlegend"] = marks is not None
    layout_axis(layout, "yaxis")["range"] = [0, 1.08 * max(highest, 1e-9)]
    return {"data": traces, "layout": layout}


def load_figure(percent: Sequence[Counts], names: Sequence[str], *, ep: int, unit: str = "expert") -> Figure:
    """Layers x experts; ``percent``: [E] of each layer, its load over the layer's mean, in whole percent."""
    width = max(len(row) for row in percent)
    z: object
    if all(len(row) == width for row in percent):
        values = np.minimum(np.stack(percent), 65535).astype("<u2")
        z = {"bdata": base64.b64encode(values.tobytes()).decode(), "dtype": "u2", "shape": f"{len(percent)}, {width}"}
    else:
        z = [[*map(int, row), *[None] * (width - len(row))] for row in percent]
    heat: Figure = {
        "type": "heatmap",
        "z": z,
        "y": _labels(names),
        "zmin": 0,
        "zmax": FULL_PERCENT,
        "colorscale": _LOAD_SCALE,
        "colorbar": _colorbar("of the mean", [0, 100, 200, 300, 400], ["0", "1 x", "2 x", "3 x", "4 x +"]),
        "hovertemplate": f"layer %{{y}}, {unit} %{{x}}: %{{z}} % of the mean<extra></extra>",
    }
    layout = _heat_layout(x_title=unit, num_rows=len(percent))
    if 1 < ep <= 64 and width % ep == 0:
        line = {"color": "@muted", "width": 0.7}
        edges = [rank * width / ep - 0.5 for rank in range(1, ep)]
        layout["shapes"] = [
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line} for x in edges
        ]
    return {"data": [heat], "layout": layout}


def skew_figure(skews: Sequence[Sequence[float]], names: Sequence[str], steps: Sequence[int]) -> Figure:
    """Layers x steps; ``skews`` has a row for every layer."""
    highest = max(2.0, *(max(row) for row in skews))
    heat: Figure = {
        "type": "heatmap",
        "z": [[round(value, 3) for value in row] for row in skews],
        "x": [f"{step:,}" for step in steps],
        "y": _labels(names),
        "zmin": 1,
        "zmax": highest,
        "colorscale": [[0.0, "@grid"], [0.3, "@pale"], [0.7, "@blue"], [1.0, "@ink"]],
        "colorbar": _colorbar("skew", None, None),
        "hovertemplate": "layer %{y}, to step %{x}: skew %{z:.2f}<extra></extra>",
    }
    layout = _heat_layout(x_title="step", num_rows=len(names))
    layout_axis(layout, "xaxis").update(type="category", nticks=6)
    return {"data": [heat], "layout": layout}


def num_plot_pixels(num_rows: int) -> int:
    """Height of a figure with so many rows."""
    return min(900, max(300, 120 + 9 * num_rows))


def plain(text: str) -> str:
    """A user's word as plotly shows it: it takes tags for markup."""
    return html.escape(text, quote=False)


def axis_of(figure: Figure, name: str) -> Figure:
    """``"xaxis"`` or ``"yaxis"`` of a figure, to set more of it."""
    layout = figure["layout"]
    assert isinstance(layout, dict)
    return layout_axis(layout, name)


def _trace(line: Line) -> Figure:
    return {
        "type": "scatter",
        "name": plain(line.name),
        "x": list(line.x),
        "y": _rounded(line.y),
        "hovertemplate": "%{x}: %{y:.5g}<extra>%{fullData.name}</extra>",
    }


def _mode(line: Line) -> str:
    # A line needs two points; validation often has few, which would vanish in one.
    return "lines+markers" if len(line.x) <= 12 else "lines"


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


def _labels(names: Sequence[str]) -> list[str]:
    """Categories, the same name never twice."""
    return [plain(name) if names.count(name) == 1 else f"{plain(name)} ({index})" for index, name in enumerate(names)]


def _colorbar(title: str, ticks: Sequence[float] | None, texts: Sequence[str] | None) -> Figure:
    bar: Figure = {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0, "xpad": 4}
    return bar if ticks is None else bar | {"tickvals": ticks, "ticktext": texts}


def _heat_layout(*, x_title: str, num_rows: int) -> Figure:
    layout = _layout(x_title=x_title, y_title="layer")
    layout["margin"] = {"l": 48, "r": 8, "t": 12, "b": 48}
    layout_axis(layout, "xaxis").update(showgrid=False)
    layout_axis(layout, "yaxis").update(type="category", autorange="reversed", showgrid=False, nticks=min(num_rows, 24))
    return layout


def _layout(*, x_title: str, y_title: str) -> Figure:
    layout = plain_layout(x_title=x_title, y_title=y_title)
    layout["margin"] = {"l": 56, "r": 16, "t": 34, "b": 48}
    return layout
