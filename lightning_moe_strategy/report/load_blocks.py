"""The load of a run's experts as blocks of its page, with a slider over time.

Shapes: E experts of a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_moe_strategy.plan.figures import Figure
from lightning_moe_strategy.plan.tensor_parallel import degrees_of, price
from lightning_moe_strategy.report.blocks import Block, thinning_words
from lightning_moe_strategy.report.expert_series import Counts, Series, Window, merged
from lightning_moe_strategy.report.figures import (
    Line,
    axis_of,
    bar_figure,
    line_figure,
    load_figure,
    num_plot_pixels,
    skew_figure,
)
from lightning_moe_strategy.report.layer_names import short_names
from lightning_moe_strategy.report.load_arithmetic import dead_experts, rank_loads, skew, what_if
from lightning_moe_strategy.report.metrics import Metrics

MAX_POSITIONS = 40
MAX_MAP_BYTES = 1.6e6
"""Of all positions' heat maps together, in base64: a page stays below 10 MB, of which plotly is 5."""
_NO_SERIES = (
    "There is no expert_load.jsonl. ExpertLoadMonitor, which the strategy adds, writes it beside the logs for a model "
    "with experts, where the Trainer has a logger: at every log_every_n_steps steps, and at the end of fit."
)


@dataclass(frozen=True, kw_only=True)
class LoadPart:
    """The expert load of a page: positions of the slider, and blocks whose drawings follow it or do not."""

    positions: Sequence[str]
    blocks: Sequence[Block]


def load_part(series: Series | None, metrics: Metrics, description: Mapping[str, object]) -> LoadPart:
    """From the windows of a run; without them what the metrics say."""
    over_time = _skew_lines_block(series, metrics)
    if series is None or not series.windows:
        missing = _NO_SERIES if series is None else "expert_load.jsonl has no window yet: the run has not logged once."
        return LoadPart(positions=(), blocks=[Block(id="load", title="Expert load", missing=missing), over_time])
    names = short_names(series.layers)
    frames = merged(series.windows, _windows_per_position(series))
    blocks = [
        _heat_block(frames, names),
        _rank_block(frames),
        _dead_block(frames, names),
        over_time,
        _skew_map_block(frames, names),
        _balance_block(series, str(description.get("balance", ""))),
        _what_if_block(frames[-1]),
    ]
    return LoadPart(positions=[steps_of(frame) for frame in frames], blocks=blocks)


def steps_of(window: Window) -> str:
    """The window's steps in words."""
    first, last = window.since + 1, window.step
    return f"step {last:,}" if first >= last else f"steps {first:,} to {last:,}"


def _windows_per_position(series: Series) -> int:
    bytes_of_map = 4 / 3 * 2 * sum(series.num_experts)
    num_positions = max(2, min(MAX_POSITIONS, int(MAX_MAP_BYTES // bytes_of_map)))
    return -(-len(series.windows) // num_positions)


def _heat_block(frames: Sequence[Window], names: Sequence[str]) -> Block:
    drawings = [load_figure([_percent(layer) for layer in each.tokens], names, ep=each.ep) for each in frames]
    caption = (
        "Tokens of every expert over the mean of its layer, in the steps that the slider names. Red got none; lines "
        "separate the ranks of ep. Strong cells are experts that the router prefers."
    )
    return Block(
        id="load",
        title="Tokens by layer and expert",
        caption=caption,
        drawings=drawings,
        pixels=num_plot_pixels(len(names)),
        is_wide=True,
    )


def _percent(tokens_E: Counts) -> Counts:
    """Of the layer's mean; rounded up, so that 0 is nothing at all."""
    total = max(1, int(tokens_E.sum()))
    return -(-tokens_E * 100 * tokens_E.size // total)


def _rank_block(frames: Sequence[Window]) -> Block:
    title = "Rows by rank of ep"
    if all(frame.ep == 1 for frame in frames):
        return Block(id="ranks", title=title, missing="ep is 1: every rank has all experts, and its own tokens' rows.")
    loads = [_relative_loads(frame) for frame in frames]
    highest = max(float(each.max()) for each in loads)
    drawings = [
        bar_figure(
            Line(name="mean of the layers", x=range(each.shape[1]), y=each.mean(0).tolist()),
            marks=Line(name="busiest layer", x=range(each.shape[1]), y=each.max(0).tolist()),
            y_title="rows / mean",
            x_title="rank of ep",
            highest=highest,
        )
        for each in loads
    ]
    for figure, each in zip(drawings, loads, strict=True):
        axis_of(figure, "xaxis")["dtick"] = max(1, each.shape[1] // 8)
    caption = (
        "What each rank computes with every expert at home, over the mean rank: in each layer all wait for the highest."
    )
    return Block(id="ranks", title=title, caption=caption, drawings=drawings)


def _relative_loads(frame: Window) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[layers, ranks] over each layer's mean; ones for a layer without tokens."""
    rows = [rank_loads(layer, frame.ep).astype(np.float64) for layer in frame.tokens]
    return np.stack([row / row.mean() if row.any() else np.ones_like(row) for row in rows])


def _dead_block(frames: Sequence[Window], names: Sequence[str]) -> Block:
    counts = [[dead_experts(layer) for layer in frame.tokens] for frame in frames]
    highest = max(1, max(max(each) for each in counts))
    places = [*range(len(names))]
    drawings: list[Figure] = []
    for each in counts:
        figure = bar_figure(Line(name="experts", x=places, y=each), y_title="experts", x_title="layer", highest=highest)
        every = -(-len(names) // 16)
        axis_of(figure, "xaxis").update(tickvals=places[::every], ticktext=[*names][::every])
        drawings.append(figure)
    caption = "Experts that no token chose in the steps that the slider names. Where they stay, their memory is wasted."
    return Block(id="dead", title="Dead experts by layer", caption=caption, drawings=drawings)


_SKEWS = {
    "expert_load/train/skew": "experts, mean of the layers",
    "expert_load/train/skew_worst_layer": "experts, worst layer",
    "expert_load/train/rank_skew": "ranks of ep, mean",
    "expert_load/train/rank_skew_worst_layer": "ranks of ep, worst layer",
    "expert_load/train/rank_skew_computed": "ranks, as computed",
    "expert_load/validate/skew": "experts, validation",
}


def _skew_lines_block(series: Series | None, metrics: Metrics) -> Block:
    title = "Skew over time"
    found = {words: metrics.curves[name] for name, words in _SKEWS.items() if name in metrics.curves}
    if found:
        thinned = {words: curve.thinned() for words, curve in found.items()}
        lines = [Line(name=words, x=curve.steps, y=curve.values) for words, curve in thinned.items()]
    elif series is not None and series.windows:
        lines = _lines_of(series)
    else:
        missing = metrics.problem or "ExpertLoadMonitor logs it for a model with experts; the strategy adds it."
        return Block(id="skew", title=title, missing=missing)
    words = thinning_words([*found.values()])
    caption = (
        f"Busiest over mean: 1 is even. Experts' skew tells about routing, ranks' how much longer a step takes.{words}"
    )
    return Block(id="skew", title=title, caption=caption, drawings=[line_figure(lines, y_title="max / mean")])


def _lines_of(series: Series) -> list[Line]:
    steps = [window.step for window in series.windows]
    of_experts = [[skew(layer) for layer in window.tokens] for window in series.windows]
    of_ranks = [[skew(rank_loads(layer, window.ep)) for layer in window.tokens] for window in series.windows]
    rows = (
        ("experts, mean of the layers", [float(np.mean(each)) for each in of_experts]),
        ("experts, worst layer", [max(each) for each in of_experts]),
        ("ranks of ep, mean", [float(np.mean(each)) for each in of_ranks]),
        ("ranks of ep, worst layer", [max(each) for each in of_ranks]),
    )
    return [Line(name=name, x=steps, y=values) for name, values in rows]


def _skew_map_block(frames: Sequence[Window], names: Sequence[str]) -> Block:
    skews = [[skew(frame.tokens[index]) for frame in frames] for index in range(len(names))]
    caption = "Skew of each layer's experts over time: a row that stays strong is a router that needs balancing."
    return Block(
        id="layers",
        title="Skew by layer",
        caption=caption,
        drawings=[skew_figure(skews, names, [frame.step for frame in frames])],
        pixels=num_plot_pixels(len(names)),
    )


def _balance_block(series: Series, balance: str) -> Block:
    title, head = "Before and after balancing", ("", "before", "after")
    moved = [window for window in series.windows if "rank_skew_computed" in window.figures]
    if moved:
        last = moved[-1]
        figures = last.figures
        before, after = figures["rank_skew_at_home"], figures["rank_skew_computed"]
        rows = [("skew of ranks", f"{before:.2f}", f"{after:.2f}")]
        rows += [
            (f"etp={etp}, not offered", f"{before:.2f}", f"{figures[f'rank_skew_at_home_etp{etp}']:.2f}")
            for etp in degrees_of(last.ep)
            if f"rank_skew_at_home_etp{etp}" in figures
        ]
        rows.append(("experts moved, of a layer", "0", f"{figures.get('moved_experts', 0.0):.1f}"))
        caption = (
            f"Rows of the busiest rank over the mean, of each layer and micro-batch, {steps_of(last)}: with every "
            "expert at home, and as balance='redundant' had them computed."
        )
        return Block(id="balance", title=title, caption=caption, head=head, rows=rows)
    if balance == "bias":
        first, last = series.windows[0], series.windows[-1]
        rows = [
            (name, _two(start), _two(end))
            for (name, start), (_, end) in zip(_figures(first), _figures(last), strict=True)
        ]
        caption = (
            f"balance='bias' moves what the routers choose, so before is the run's start ({steps_of(first)}) and after "
            f"its end ({steps_of(last)})."
        )
        return Block(id="balance", title=title, caption=caption, head=head, rows=rows)
    missing = (
        "FSDPCPEPStrategy(balance='redundant') moves experts to idle ranks, balance='bias' moves the routers' choice."
    )
    return Block(id="balance", title=title, missing=missing)


def _two(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and value > 100 else f"{value:,.2f}"


def _figures(window: Window) -> list[tuple[str, float]]:
    experts = [skew(layer) for layer in window.tokens]
    ranks = [skew(rank_loads(layer, window.ep)) for layer in window.tokens]
    return [
        ("skew of experts, mean of the layers", float(np.mean(experts))),
        ("skew of experts, worst layer", max(experts)),
        ("skew of ranks, mean of the layers", float(np.mean(ranks))),
        ("dead experts, all layers", float(sum(map(dead_experts, window.tokens)))),
    ]


def _what_if_block(frame: Window) -> Block:
    lines = what_if(frame.tokens, frame.ep)
    rows = [(f"{each.ep}", f"{each.mean:.2f}", f"{each.worst:.2f}", _reached_by(each.ep, frame.ep)) for each in lines]
    etps = degrees_of(frame.ep)
    words = f" ETP is not offered: {price(etps)}." if etps else ""
    caption = (
        f"Skew of ranks if the tokens of {steps_of(frame)} met another ep, or ranks that share each expert in slices "
        f"(ETP). Of one micro-batch it is higher: these are sums over steps.{words}"
    )
    head = ("ep", "mean of layers", "worst layer", "")
    return Block(id="what-if", title="What if: ep and ETP", caption=caption, head=head, rows=rows)


def _reached_by(degree: int, ep: int) -> str:
    if degree == ep:
        return "this run"
    return f"or etp {ep // degree} at ep {ep}" if ep % degree == 0 else ""
