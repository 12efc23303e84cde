"""How evenly tokens fell on experts: the numbers, the table and the picture.

Shapes: E experts of a layer, P ranks of the ep axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from torch import Tensor

from lightning_moe_strategy.plan.tensor_parallel import degrees_of, grouped_loads, price
from lightning_moe_strategy.report.layer_names import short_names

# A table of more lines than this scrolls the rest of the log away.
MAX_TABLE_LAYERS = 16
MAX_LAYER_LABELS = 32
IMAGE_TAG = "expert_load/train"
OF_BALANCING = ("rank_skew_at_home", "rank_skew_computed", "moved_experts")
"""How the figures begin that tell what balancing by redundant experts did."""


def skew(load: Tensor) -> float:
    """max / mean, the seed's definition: 1 is even, and the step waits for this many mean loads. 1 without tokens."""
    total = float(load.sum())
    return float(load.max()) * load.numel() / total if total else 1.0


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Tokens of one layer, all ranks together."""

    name: str
    tokens_E: Tensor
    ep: int

    @property
    def num_tokens(self) -> int:
        """Routed rows: tokens times experts per token."""
        return int(self.tokens_E.sum())

    @property
    def expert_skew(self) -> float:
        return skew(self.tokens_E)

    @property
    def rank_skew(self) -> float:
        """Skew over the ranks of the ep axis, rank r holding the r-th contiguous block of experts."""
        return skew(self.tokens_E.view(self.ep, -1).sum(1))

    def grouped_skew(self, etp: int) -> float:
        """The same if every ``etp`` neighbouring ranks shared their experts (tensor parallelism inside of experts)."""
        loads = self.tokens_E.view(self.ep, -1).sum(1).tolist()
        return skew(torch.tensor(grouped_loads(loads, etp), dtype=torch.float64))

    @property
    def num_dead_experts(self) -> int:
        return int((self.tokens_E == 0).sum())


def summarize(layers: Sequence[LayerLoad]) -> dict[str, float]:
    """The numbers worth a line in a logger: mean over layers and the worst of them."""
    expert_skews = [layer.expert_skew for layer in layers]
    rank_skews = [layer.rank_skew for layer in layers]
    grouped = {etp: fmean(layer.grouped_skew(etp) for layer in layers) for etp in degrees_of(layers[0].ep)}
    return {
        "skew": fmean(expert_skews),
        "skew_worst_layer": max(expert_skews),
        "rank_skew": fmean(rank_skews),
        "rank_skew_worst_layer": max(rank_skews),
        "dead_experts": float(sum(layer.num_dead_experts for layer in layers)),
        **{f"rank_skew_etp{etp}": each for etp, each in grouped.items()},
    }


def load_table(layers: Sequence[LayerLoad], *, caption: str | None = None) -> Table:
    """The layers with the highest skew, in the order of the model, and the mean over all.

    Columns ``etp`` are a what-if: the skew of groups of ranks that share their experts. Their price is in the caption,
    under the one that is given.
    """
    worst = sorted(layers, key=lambda layer: layer.expert_skew, reverse=True)[:MAX_TABLE_LAYERS]
    title = "Expert load" if len(worst) == len(layers) else f"Expert load, {len(worst)} worst of {len(layers)} layers"
    ep, etps = layers[0].ep, degrees_of(layers[0].ep)
    if etps:
        what_if = (
            f"etp, a what-if that no layout offers: ranks share experts and take the mean load. Price: {price(etps)}."
        )
        caption = what_if if caption is None else f"{caption}\n{what_if}"
    table = Table(title=title, caption=caption)
    table.add_column("layer")
    for header in ("rows", "skew", f"skew of ep={ep}", *(f"etp={etp}" for etp in etps), "dead", "busiest"):
        table.add_column(header, justify="right", no_wrap=True)
    for layer in layers:
        if layer in worst:
            table.add_row(
                layer.name,
                f"{layer.num_tokens:,}",
                f"{layer.expert_skew:.2f}",
                f"{layer.rank_skew:.2f}",
                *(f"{layer.grouped_skew(etp):.2f}" for etp in etps),
                str(layer.num_dead_experts),
                str(int(layer.tokens_E.argmax())),
            )
    mean = summarize(layers)
    skews = [mean[name] for name in ("skew", "rank_skew", *(f"rank_skew_etp{etp}" for etp in etps))]
    table.add_section()
    table.add_row("mean", "", *(f"{each:.2f}" for each in skews), f"{mean['dead_experts']:.0f} in all", "")
    return table


def load_figure(layers: Sequence[LayerLoad], skews: Sequence[tuple[int, Sequence[float]]]) -> Figure:
    """Layers x experts, the colour a layer's load over its mean, and beside it each layer's skew over the steps.

    Lines separate the ranks of ep. ``skews``: (step, skew of each layer), a column each; empty leaves them out.
    """
    num_experts = max(layer.tokens_E.numel() for layer in layers)
    width = min(18.0, max(6.0, 2.5 + 0.12 * num_experts))
    height = min(16.0, max(2.6, 1.6 + 0.24 * len(layers)))
    figure = Figure(figsize=(width + (4.5 if skews else 0.0), height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if not skews:
        _draw_loads(figure, figure.add_subplot(), layers)
        return figure
    loads, over_time = figure.subplots(1, 2, width_ratios=(width, 4.5))
    _draw_loads(figure, loads, layers)
    _draw_skews(figure, over_time, skews)
    return figure


def show_in_loggers(figure: Figure, loggers: Sequence[object], *, step: int) -> None:
    """Give the figure to every logger whose experiment takes pictures. On the rank whose loggers write."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_figure"):
            experiment.add_figure(IMAGE_TAG, figure, global_step=step, close=False)
        elif hasattr(experiment, "add_image"):
            canvas: Any = FigureCanvasAgg(figure)
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())[..., :3]
            experiment.add_image(IMAGE_TAG, pixels, global_step=step, dataformats="HWC")


def _draw_loads(figure: Figure, axes: Axes, layers: Sequence[LayerLoad]) -> None:
    num_experts = max(layer.tokens_E.numel() for layer in layers)
    relative = torch.full((len(layers), num_experts), float("nan"))
    for row, layer in zip(relative, layers, strict=True):
        row[: layer.tokens_E.numel()] = layer.tokens_E / layer.tokens_E.double().mean().clamp(min=1e-12)
    # 2 is where the busiest rank takes twice its share; above it one colour would hide how much.
    highest = max(2.0, float(relative.nan_to_num(0).max()))
    image = axes.imshow(relative.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=highest)
    figure.colorbar(image, ax=axes, label="tokens / mean of the layer")
    every = -(-len(layers) // MAX_LAYER_LABELS)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(0, len(layers), every), short_names([layer.name for layer in layers])[::every])
    axes.set(xlabel="expert", ylabel="layer", title=f"Expert load, mean skew {summarize(layers)['skew']:.2f}")
    ep = layers[0].ep
    if all(layer.tokens_E.numel() == num_experts for layer in layers):
        for rank in range(1, ep):
            axes.axvline(rank * num_experts / ep - 0.5, color="white", linewidth=0.8)


def _draw_skews(figure: Figure, axes: Axes, skews: Sequence[tuple[int, Sequence[float]]]) -> None:
    columns = np.array([each for _, each in skews], dtype=float).T
    image = axes.imshow(
        columns, aspect="auto", interpolation="nearest", cmap="magma", vmin=1, vmax=max(2, columns.max())
    )
    figure.colorbar(image, ax=axes, label="max / mean")
    places = sorted({round(place) for place in np.linspace(0, len(skews) - 1, 4)})
    axes.set_xticks(places, [f"{skews[place][0]:,}" for place in places])
    axes.set_yticks([])
    axes.set(xlabel="step", title="Skew of each layer")


def layer_loads(tokens: Mapping[str, Tensor], ep: int) -> list[LayerLoad]:
    """One `LayerLoad` for each layer's count of tokens per expert."""
    return [LayerLoad(name=name, tokens_E=tokens_E, ep=ep) for name, tokens_E in tokens.items()]
