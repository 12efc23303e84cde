"""The four figures of the page as plotly dictionaries.

A colour is ``@name``, a name of ``THEMES``: the page fills in those of the reader's theme. GB is 1e9 bytes.
"""

import math
from collections.abc import Mapping, Sequence

from lightning_moe_strategy.plan.labels import bucket_label, layout_label, mapping, number, tokens_label
from lightning_moe_strategy.plan.search import Evaluation
from lightning_moe_strategy.plan.time import LinkSeconds

Figure = dict[str, object]
Curves = Mapping[str, Sequence[tuple[int, float]]]
"""(context, GB) of a layout, by its label."""

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "ink": "#1c2330",
        "muted": "#56606f",
        "grid": "#e3e7ed",
        "blue": "#3565c4",
        "pale": "#a9bfe8",
        "orange": "#d9731a",
        "green": "#2f8f4e",
        "red": "#c8372d",
        "haze": "rgba(217,115,26,0.10)",
        "clear": "rgba(0,0,0,0)",
    },
    "dark": {
        "ink": "#e7ebf2",
        "muted": "#9aa6b8",
        "grid": "#2c3544",
        "blue": "#7ea6f4",
        "pale": "#40568a",
        "orange": "#f0a355",
        "green": "#6cc788",
        "red": "#f2857b",
        "haze": "rgba(240,163,85,0.12)",
        "clear": "rgba(0,0,0,0)",
    },
}

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def memory_figure(plan: Mapping[str, object]) -> Figure:
    """Waterfall of the peak by bucket, largest first, against the size of the GPU."""
    memory = mapping(plan, "memory_gb")
    buckets = {bucket_label(name): number(mapping(memory, "buckets"), name) for name in mapping(memory, "buckets")}
    total, device = number(memory, "total"), number(memory, "device")
    rows = sorted(((gb, name) for name, gb in buckets.items() if gb >= 0.005 * total), reverse=True)
    small = sum(gb for gb in buckets.values() if gb < 0.005 * total)
    if small:
        rows.append((small, "smaller ones"))
    values = [*(gb for gb, _ in rows), total]
    waterfall = {
        "type": "waterfall",
        "orientation": "h",
        "y": [*(name for _, name in rows), "<b>peak</b>"],
        "x": values,
        "measure": [*("relative" for _ in rows), "total"],
        "text": [f"{gb:,.1f}" for gb in values],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text} GB<extra></extra>",
        "increasing": {"marker": {"color": "@blue"}},
        "totals": {"marker": {"color": "@green" if plan["fits"] else "@red"}},
        "connector": {"line": {"color": "@grid", "width": 1}},
    }
    layout = plain_layout(x_title=f"GB per GPU at the peak ({memory['peak_moment']})", y_title="")
    layout_axis(layout, "xaxis").update(range=[0, 1.14 * max(total, device)])
    layout_axis(layout, "yaxis").update(autorange="reversed", showgrid=False)
    layout["margin"] = {"l": 8, "r": 24, "t": 34, "b": 48}
    layout["shapes"] = [_line(x=device, color="@ink", dash="solid")]
    layout["annotations"] = [_note(f"GPU: {device:,.0f} GB", x=device, xanchor="right", y=1, yref="paper")]
    return {"data": [waterfall], "layout": layout}


def overlap_figure(plan: Mapping[str, object], links: LinkSeconds) -> Figure:
    """Time of each pass of a layer over tokens per GPU: compute grows with them, prefetched traffic does not."""
    efsdp, compute = mapping(plan, "efsdp"), mapping(plan, "compute")
    here, threshold = number(efsdp, "tokens_per_gpu"), number(efsdp, "min_tokens_to_hide")
    low, high = min(here, threshold or here) / 8, max(here, threshold) * 8
    traces = []
    for name, traffic_seconds, dash in (
        ("forward", links.hidden_forward, "dash"),
        ("backward", links.hidden_backward, "solid"),
    ):
        compute_ms, traffic_ms = 1e3 * number(compute, f"{name}_seconds"), 1e3 * traffic_seconds
        at_ends = [compute_ms * tokens / here for tokens in (low, high)]
        traces.append(_trace(f"compute, {name}", [low, high], at_ends, "@blue", unit="ms", dash=dash))
        if traffic_ms > 0:
            traces.append(_trace(f"eFSDP, {name}", [low, high], [traffic_ms] * 2, "@orange", unit="ms", dash=dash))
    at_here = [1e3 * number(compute, f"{name}_seconds") for name in ("forward", "backward")]
    traces.append(_marker([here, here], at_here, "%{x:,} tokens per GPU: %{y:,.1f} ms"))
    layout = plain_layout(x_title="tokens per GPU and micro-batch", y_title="milliseconds per layer")
    for axis in ("xaxis", "yaxis"):
        layout_axis(layout, axis).update(type="log", dtick=1)
    layout["showlegend"] = True
    if threshold > 0:
        layout["shapes"] = [_line(x=threshold, color="@muted", dash="dot"), _band(low, threshold)]
        text = f"hides from {threshold:,.0f} tokens"
        place: Figure = {"x": math.log10(threshold), "xanchor": "left", "xshift": 4, "y": 0, "yref": "paper"}
        layout["annotations"] = [_note(text, **place)]
    return {"data": traces, "layout": layout}


def context_figure(curves: Curves, *, context: int, device_gb: float) -> Figure:
    """Peak memory over context, a curve for each layout (the first is the plan's), against the size of the GPU."""
    traces = []
    for index, (name, points) in enumerate(curves.items()):
        contexts, totals = [context for context, _ in points], [gb for _, gb in points]
        color = "@blue" if index == 0 else ("@green", "@orange", "@muted")[(index - 1) % 3]
        fitting = [tokens for tokens, gb in points if gb <= device_gb]
        reach = f"fits to {tokens_label(max(fitting))}" if fitting else "fits none of these"
        trace = _trace(f"{name}, {reach}", contexts, totals, color, unit="GB")
        trace["mode"] = "lines+markers"
        trace["customdata"] = [tokens_label(tokens) for tokens in contexts]
        trace["hovertemplate"] = f"{name}<br>%{{customdata}} tokens: %{{y:,.1f}} GB<extra></extra>"
        traces.append(trace)
    first = next(iter(curves.values()))
    here = dict(first).get(context)
    if here is not None:
        traces.append(_marker([context], [here], f"{tokens_label(context)} tokens: {here:,.1f} GB"))
    layout = plain_layout(x_title="context, tokens of one sequence", y_title="GB per GPU, peak")
    ticks = sorted({tokens for points in curves.values() for tokens, _ in points})
    layout_axis(layout, "xaxis").update(type="log", tickvals=ticks, ticktext=[tokens_label(tokens) for tokens in ticks])
    top = 1.25 * max(device_gb, here or 0)
    layout_axis(layout, "yaxis").update(range=[0, top])
    layout["showlegend"] = True
    layout["shapes"] = [_level(device_gb)]
    layout["annotations"] = [_note(f"GPU: {device_gb:,.0f} GB", x=0, xref="paper", xanchor="left", y=device_gb)]
    return {"data": traces, "layout": layout}


def ranking_figure(evaluations: Sequence[Evaluation], *, chosen: str) -> Figure:
    """Tokens/s/GPU of layouts that fit, best first; ``chosen`` labels the plan's own."""
    names, speeds, colors, notes = [], [], [], []
    for evaluation in evaluations:
        name = layout_label({**vars(evaluation.dense.side), **vars(evaluation.experts.side)})
        names.append(f"<b>{name}</b>" if name == chosen else name)
        speeds.append(evaluation.times.tokens_per_second)
        colors.append("@blue" if name == chosen else "@pale")
        exposed = evaluation.times.exposed / evaluation.times.step
        notes.append(f"{evaluation.peak.total / 1e9:,.1f} GB, eFSDP shows in {exposed:.1%} of the time")
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": speeds,
        "marker": {"color": colors},
        "text": [f"{speed:,.0f}" for speed in speeds],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": notes,
        "hovertemplate": "%{y}: %{text} tokens/s/GPU<br>%{customdata}<extra></extra>",
    }
    layout = plain_layout(x_title="tokens/s per GPU", y_title="")
    layout_axis(layout, "yaxis").update(autorange="reversed", showgrid=False)
    layout_axis(layout, "xaxis").update(range=[0, 1.18 * max(speeds, default=1.0)])
    layout["margin"] = {"l": 8, "r": 24, "t": 16, "b": 48}
    if not evaluations:
        for axis in ("xaxis", "yaxis"):
            layout_axis(layout, axis).update(visible=False)
        layout["annotations"] = [_note("no layout fits", x=0.5, xref="paper", y=0.5, yref="paper")]
    return {"data": [bars], "layout": layout}


def plain_layout(*, x_title: str, y_title: str) -> Figure:
    """What all figures of a page share; the page puts the colours of its theme in the place of ``@`` names."""
    axis = {"gridcolor": "@grid", "zeroline": False, "linecolor": "@grid", "automargin": True, "fixedrange": True}
    return {
        "xaxis": {**axis, "title": {"text": x_title, "font": {"color": "@muted", "size": 13}}},
        "yaxis": {**axis, "title": {"text": y_title, "font": {"color": "@muted", "size": 13}}},
        "font": {"family": _FONT, "size": 13, "color": "@ink"},
        "paper_bgcolor": "@clear",
        "plot_bgcolor": "@clear",
        "margin": {"l": 64, "r": 24, "t": 34, "b": 48},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": False,
        "hoverlabel": {"font": {"family": _FONT}},
    }


def layout_axis(layout: Figure, name: str) -> Figure:
    """``xaxis`` or ``yaxis``, to be changed."""
    axis = layout[name]
    assert isinstance(axis, dict)
    return axis


def _trace(name: str, x: Sequence[float], y: Sequence[float], color: str, *, unit: str, dash: str = "solid") -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": 2.5, "dash": dash},
        "hovertemplate": f"{name}: %{{y:,.1f}} {unit}<extra></extra>",
    }


def _marker(x: Sequence[float], y: Sequence[float], text: str) -> Figure:
    ring = {"color": "@ink", "size": 11, "symbol": "circle-open", "line": {"width": 3}}
    place: Figure = {"type": "scatter", "mode": "markers", "name": "this plan", "x": list(x), "y": list(y)}
    return {**place, "marker": ring, "hovertemplate": f"{text}<extra></extra>"}


def _line(*, x: float, color: str, dash: str) -> Figure:
    line = {"color": color, "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _level(y: float) -> Figure:
    line = {"color": "@ink", "width": 1.5}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _note(text: str, **place: object) -> Figure:
    return {"text": text, "showarrow": False, "yanchor": "bottom", "font": {"color": "@ink"}, **place}


def _band(low: float, high: float) -> Figure:
    place = {"x0": low, "x1": high, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "rect", **place, "fillcolor": "@haze", "line": {"width": 0}, "layer": "below"}
