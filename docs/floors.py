"""Draw ``floors.svg``, the picture of docs/design.md: every room of the package on its floor; imports run downwards.

    python -m docs.floors

The floors are those of tests/test_layering.py, which holds the package to them. Marked are the rooms that a training
step passes on its way from ``Trainer.fit`` to a kernel.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from tests.test_layering import FLOORS, PACKAGE

ROOT = Path(__file__).parents[1]
TITLES = {
    5: ("entry", "programs and their files"),
    4: ("Lightning", "may import Lightning"),
    3: ("parallelism", "may communicate"),
    2: ("models", "know of no rank"),
    1: ("ground", "meshes and arithmetic"),
    0: ("kernels", "tensors in, tensors out"),
}
# docs/design.md walks through them in this order.
WALK = ("strategy", "callbacks", "context_parallel", "expert_parallel", "collectives", "kernels")

# An opaque card: the same picture on a light and on a dark page.
CARD, BAND, ROOM, ON_THE_WAY, INK, QUIET = "#ffffff", "#eef1f5", "#ffffff", "#acdcae", "#1c2330", "#56606f"
WIDTH, LEFT, FONT_SIZE = 11.4, 2.5, 9.5
LETTER = 0.0915  # of the monospaced font at that size, in units of the axes, which are inches
ROOM_HEIGHT, GAP = 0.3, 0.1


class Room(NamedTuple):
    name: str
    x: float
    line: int


def draw(path: Path) -> None:
    """Write the picture as the kind of file that the suffix of ``path`` names."""
    floors = {floor: list(_placed(_rooms(floor))) for floor in sorted(TITLES)}
    heights = {floor: (rooms[-1].line + 1) * (ROOM_HEIGHT + GAP) + GAP + 0.16 for floor, rooms in floors.items()}
    height = sum(heights.values()) + GAP * (len(heights) + 1) + 0.5
    figure = Figure(figsize=(WIDTH, height), facecolor="none")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, height)
    axes.axis("off")
    _box(axes, (0.06, 0.06, WIDTH - 0.12, height - 0.12), CARD, edge="#d5dae1", rounding=0.14)
    y = 0.5
    for floor, rooms in floors.items():
        _draw_floor(axes, floor, rooms, y, heights[floor])
        y += heights[floor] + GAP
    caption = "imports run downwards; green: the way of a training step from Trainer.fit to a kernel"
    axes.text(WIDTH / 2, 0.28, caption, ha="center", va="center", size=FONT_SIZE, color=QUIET)
    # A fixed salt and no date: drawing it again changes no byte.
    with matplotlib.rc_context({"svg.hashsalt": "floors"}):
        figure.savefig(path, facecolor="none", dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def _rooms(floor: int) -> list[str]:
    """Names of the floor, folders with a slash and first."""
    names = [name for name, own in FLOORS.items() if own == floor]
    folders = sorted(f"{name}/" for name in names if (ROOT / PACKAGE / name.replace(".", "/")).is_dir())
    return folders + sorted(name for name in names if f"{name}/" not in folders)


def _placed(names: list[str]) -> Iterator[Room]:
    """From left to right, as many lines as they need."""
    x, line = LEFT, 0
    for name in names:
        if x + _width(name) > WIDTH - 0.25:
            x, line = LEFT, line + 1
        yield Room(name, x, line)
        x += _width(name) + GAP


def _width(name: str) -> float:
    return len(name) * LETTER + 0.2


def _draw_floor(axes: Axes, floor: int, rooms: list[Room], y: float, height: float) -> None:
    title, rule = TITLES[floor]
    _box(axes, (0.2, y, WIDTH - 0.4, height), BAND, rounding=0.08)
    axes.text(0.4, y + height - 0.2, f"{floor}  {title}", ha="left", va="center", size=12, weight="bold", color=INK)
    axes.text(0.4, y + height - 0.4, rule, ha="left", va="top", size=9, color=QUIET, linespacing=1.3)
    for room in rooms:
        top = y + height - 0.08 - GAP - room.line * (ROOM_HEIGHT + GAP)
        color = ON_THE_WAY if room.name.rstrip("/") in WALK else ROOM
        _box(axes, (room.x, top - ROOM_HEIGHT, _width(room.name), ROOM_HEIGHT), color, edge="#d5dae1", rounding=0.06)
        middle = room.x + _width(room.name) / 2
        style = {"family": "monospace", "size": FONT_SIZE, "color": INK}
        axes.text(middle, top - ROOM_HEIGHT / 2, room.name, ha="center", va="center", **style)


def _box(
    axes: Axes, place: tuple[float, float, float, float], color: str, *, rounding: float, edge: str = "none"
) -> None:
    x, y, width, height = place
    style = f"round,pad=0,rounding_size={rounding}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge))


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
