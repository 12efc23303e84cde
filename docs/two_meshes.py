"""Draw ``two_meshes.svg``, the picture at the top of the README: the same eight ranks in both meshes.

Run it from anywhere with the package installed: ``python docs/two_meshes.py``. Who shares a group with whom is asked
of ``ParallelDims``, so the picture shows what the strategy builds.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from lightning_moe_strategy import ParallelDims

RANKS_PER_DOMAIN = 4
NUM_EXPERTS = 8
DIMS = ParallelDims(d_rep=2, fsdp=1, cp=4, e_fsdp=4, ep=2, nvl=RANKS_PER_DOMAIN).resolve(
    8, local_world_size=RANKS_PER_DOMAIN, num_experts=NUM_EXPERTS
)

# An opaque card: the same picture on a light and on a dark page.
CARD, DOMAIN, INK, QUIET = "#ffffff", "#eef1f5", "#1c2330", "#56606f"
DENSE = ("#d3edd3", "#acdcae", "#84c98a", "#5fb568")
EXPERTS = (("#fde6cc", "#fbd0a2", "#f7b878", "#f2a35a"), ("#dde4fa", "#c1cdf6", "#a4b5f0", "#8aa0ea"))

WIDTH, HEIGHT, GAP = 1.0, 0.9, 0.5
DENSE_Y, EXPERT_Y = 4.1, 1.5


def draw(path: Path) -> None:
    """Write the picture as the kind of file that the suffix of ``path`` names."""
    figure = Figure(figsize=(10.4, 6.2), facecolor="none")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-2.3, 8.95)
    axes.set_ylim(-0.1, 6.6)
    axes.axis("off")
    _box(axes, -2.22, -0.03, 11.09, 6.56, CARD, edge="#d5dae1", rounding=0.16)
    _draw_domains_and_ranks(axes)
    _draw_dense_row(axes)
    _draw_expert_row(axes)
    # A fixed salt and no date: drawing it again changes no byte.
    with matplotlib.rc_context({"svg.hashsalt": "two_meshes"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, facecolor="none", dpi=110, metadata=metadata)


def _draw_domains_and_ranks(axes: Axes) -> None:
    for first in range(0, DIMS.world_size, RANKS_PER_DOMAIN):
        left = _x(first) - 0.12
        right = _x(first + RANKS_PER_DOMAIN - 1) + WIDTH + 0.12
        _box(axes, left, 0.18, right - left, 6.14, DOMAIN, rounding=0.12)
        name = f"NVLink domain {first // RANKS_PER_DOMAIN}"
        axes.text((left + right) / 2, 6.04, name, ha="center", va="center", size=12, weight="bold", color=INK)
    for rank in range(DIMS.world_size):
        axes.text(_x(rank) + WIDTH / 2, 5.68, f"rank {rank}", ha="center", va="center", size=11, color=QUIET)


def _draw_dense_row(axes: Axes) -> None:
    _row_title(axes, DENSE_Y, "dense mesh", f"d_rep {DIMS.d_rep}\nfsdp {DIMS.fsdp}\ncp {DIMS.cp}")
    for rank in range(DIMS.world_size):
        shard = DIMS.coordinate("fsdp_cp", rank)
        text = f"dense\nshard {shard}"
        _rank_box(axes, rank, DENSE_Y, DENSE[shard], text)
    for sequence, ranks in enumerate(_groups("cp")):
        _bracket(axes, ranks, DENSE_Y - 0.14, f"cp: shares sequence {sequence}, gathers K and V")
    copies = _groups("d_rep")[0]
    _bracket(axes, copies, DENSE_Y + HEIGHT + 0.14, "d_rep: a shard and its copy sum their gradients", above=True)


def _draw_expert_row(axes: Axes) -> None:
    _row_title(axes, EXPERT_Y, "expert mesh", f"e_rep {DIMS.e_rep}\ne_fsdp {DIMS.e_fsdp}\nep {DIMS.ep}")
    num_local = NUM_EXPERTS // DIMS.ep
    for rank in range(DIMS.world_size):
        ep, shard = DIMS.coordinate("ep", rank), DIMS.coordinate("e_fsdp", rank)
        text = f"experts\n{ep * num_local}–{(ep + 1) * num_local - 1}\npart {shard}"
        _rank_box(axes, rank, EXPERT_Y, EXPERTS[ep][shard], text)
    for ranks in _groups("ep"):
        _bracket(axes, ranks, EXPERT_Y + HEIGHT + 0.14, "ep: tokens to experts", above=True)
    for row, ranks in enumerate(_groups("e_fsdp")):
        first = row * num_local
        label = f"e_fsdp: gathers the parts of experts {first}–{first + num_local - 1}"
        _bracket(axes, ranks, EXPERT_Y - 0.14 - 0.62 * row, label)


def _groups(axis: str) -> list[Sequence[int]]:
    """Every group of the axis once, in the order of its first rank."""
    return list(dict.fromkeys(tuple(DIMS.group_ranks(axis, rank)) for rank in range(DIMS.world_size)))


def _x(rank: int) -> float:
    return rank * WIDTH + rank // RANKS_PER_DOMAIN * GAP


def _row_title(axes: Axes, y: float, name: str, degrees: str) -> None:
    axes.text(-0.42, y + HEIGHT + 0.02, name, ha="right", va="center", size=13, weight="bold", color=INK)
    axes.text(-0.42, y + 0.36, degrees, ha="right", va="center", size=11.5, color=INK, linespacing=1.4)


def _rank_box(axes: Axes, rank: int, y: float, color: str, text: str) -> None:
    _box(axes, _x(rank) + 0.05, y, WIDTH - 0.1, HEIGHT, color, rounding=0.06)
    axes.text(_x(rank) + WIDTH / 2, y + HEIGHT / 2, text, ha="center", va="center", size=10.5, color=INK)


def _bracket(axes: Axes, ranks: Sequence[int], y: float, label: str, *, above: bool = False) -> None:
    """A line with a tick at every rank of a group, and what the group exchanges."""
    tick, outward = (-0.1, 0.2) if above else (0.1, -0.2)
    centers = [_x(rank) + WIDTH / 2 for rank in ranks]
    axes.plot([centers[0], centers[-1]], [y, y], color=QUIET, linewidth=1.4, solid_capstyle="round")
    for center in centers:
        axes.plot([center, center], [y, y + tick], color=QUIET, linewidth=1.4, solid_capstyle="round")
    middle = (centers[0] + centers[-1]) / 2
    axes.text(middle, y + outward, label, ha="center", va="center", size=10.5, color=INK)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, color: str, *, rounding: float, edge: str = "none"
) -> None:
    style = f"round,pad=0,rounding_size={rounding}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge))


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
