"""Memory over a simulated step as a picture: what it is for, the device's limit, and what makes the peak."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_moe_strategy.simulation.memory import MemoryPoint, Piece
from lightning_moe_strategy.simulation.report import GB, Simulation

COLORS = {
    "parameters": "#1f3b57",
    "optimizer": "#3a6ea5",
    "gradients": "#7fa8d1",
    "other": "#b9bfc6",
    "activations": "#e0a030",
    "gathered_weights": "#3f9a6b",
    "reduce_buffers": "#8fcaa4",
    "expert_rows": "#c0504d",
    "temporary": "#e39a8a",
}
"""From the bottom up: what is always there, what a step keeps, what comes and goes."""

_LIMIT_COLOR = "#8c1d1d"
_LABELS = {"gathered_weights": "gathered weights", "reduce_buffers": "reduce buffers", "expert_rows": "expert rows"}


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """What is drawn: points by position, in GB or MB."""

    positions: list[float]
    points: list[MemoryPoint]
    end: float
    scale: float
    unit: str

    @property
    def totals(self) -> list[float]:
        return [point.num_bytes / self.scale for point in self.points]


def draw_memory(simulation: Simulation, path: Path) -> None:
    """Write a PNG of memory by purpose over the step, in seconds or, without a cluster, in order of allocation."""
    curve = _curve(simulation)
    figure = Figure(figsize=(11, 5.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    _stack(axes, curve)
    limit = 0.0 if simulation.cluster is None else simulation.cluster.memory_bytes / curve.scale
    highest = max(curve.totals)
    if simulation.cluster is not None and limit < 3 * highest:
        _mark_limit(axes, limit, f"{simulation.cluster.gpu}: {limit:,.0f} {curve.unit}")
        highest = max(highest, limit)
    axes.set_ylim(0, 1.18 * highest)
    axes.set_xlim(curve.positions[0], curve.end)
    _mark_phases(axes, curve)
    _mark_peak(axes, curve, simulation.peak.cause)
    axes.set_ylabel(curve.unit)
    axes.set_xlabel("allocations and frees, in order" if simulation.seconds is None else "seconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(simulation), loc="left", fontsize=11, pad=22)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _curve(simulation: Simulation) -> _Curve:
    """Of points at the same time, the highest: what needs no time is over before it can be seen."""
    scale, unit = (GB, "GB") if simulation.peak_bytes >= GB else (1e6, "MB")
    times = simulation.times_of(simulation.memory)
    if times is None or simulation.seconds is None:
        moments = [float(point.moment - simulation.memory[0].moment) for point in simulation.memory]
        return _Curve(positions=moments, points=list(simulation.memory), end=moments[-1] + 1, scale=scale, unit=unit)
    highest: dict[float, MemoryPoint] = {}
    for time, point in zip(times, simulation.memory, strict=True):
        if time not in highest or point.num_bytes > highest[time].num_bytes:
            highest[time] = point
    return _Curve(
        positions=list(highest), points=list(highest.values()), end=simulation.seconds.step, scale=scale, unit=unit
    )


def _stack(axes: Axes, curve: _Curve) -> None:
    names = [name for name in COLORS if any(point.buckets.get(name, 0) for point in curve.points)]
    # The last point lasts until the end.
    points = [*curve.points, curve.points[-1]]
    axes.stackplot(
        [*curve.positions, curve.end],
        [[point.buckets.get(name, 0) / curve.scale for point in points] for name in names],
        labels=[_LABELS.get(name, name) for name in names],
        colors=[COLORS[name] for name in names],
        linewidth=0,
        step="post",
    )


def _mark_limit(axes: Axes, limit: float, label: str) -> None:
    axes.axhline(limit, color=_LIMIT_COLOR, linewidth=1.2, linestyle=(0, (6, 3)))
    axes.annotate(
        label,
        (0, limit),
        (6, -4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="top",
        color=_LIMIT_COLOR,
        fontsize=9,
    )


def _mark_phases(axes: Axes, curve: _Curve) -> None:
    phases = [point.phase for point in curve.points]
    names = list(dict.fromkeys(phases))
    starts = [curve.positions[phases.index(name)] for name in names]
    for index, (name, start, end) in enumerate(zip(names, starts, [*starts[1:], curve.end], strict=True)):
        if index:
            axes.axvline(start, color="#444444", linewidth=0.8)
        if end - start > 0.05 * (curve.end - curve.positions[0]):
            axes.annotate(
                name,
                ((start + end) / 2, 1),
                (0, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color="#444444",
                fontsize=10,
            )


def _mark_peak(axes: Axes, curve: _Curve, cause: Piece | None) -> None:
    totals = curve.totals
    index = totals.index(max(totals))
    what = ["at the start of the phase"]
    if cause is not None:
        what = [f"{cause.operation} {list(cause.shape)} {cause.dtype}", f"in {cause.unit or 'the model'}"]
    is_right = curve.positions[index] > (curve.positions[0] + curve.end) / 2
    axes.annotate(
        "\n".join([f"peak {totals[index]:,.1f} {curve.unit}", *what]),
        (curve.positions[index], totals[index]),
        (-24 if is_right else 24, 18),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom",
        fontsize=9,
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 0.8, "shrinkB": 3},
        bbox={"boxstyle": "square,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
    axes.plot([curve.positions[index]], [totals[index]], marker="o", markersize=4, color="black")


def _title(simulation: Simulation) -> str:
    dims = simulation.dims
    dense = tuple(dims.degree(axis) for axis in ("d_rep", "fsdp", "cp"))
    expert = tuple(dims.degree(axis) for axis in ("e_rep", "e_fsdp", "ep"))
    return (
        f"Memory of rank {simulation.rank} of {dims.world_size} over one step: dense {dense}, expert {expert}, "
        f"{simulation.routing} routing, recompute {simulation.recompute}"
    )
