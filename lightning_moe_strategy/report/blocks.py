"""What a page is made of: a figure or a table with a title, and how to read it, or why it is missing."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_moe_strategy.plan.figures import Figure
from lightning_moe_strategy.report.metrics import Curve


@dataclass(frozen=True, kw_only=True)
class Block:
    """One card of the page."""

    id: str
    title: str
    caption: str = ""
    """How to read it."""
    drawings: Sequence[Figure] = ()
    """One for every position of the slider above, or one for all."""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """Of a table."""
    missing: str = ""
    """What would make it appear; empty where it is there."""
    pixels: int = 300
    is_wide: bool = False

    def to_json(self) -> dict[str, object]:
        """For the script of the page."""
        return {
            "id": self.id,
            "title": self.title,
            "caption": self.caption,
            "drawings": list(self.drawings),
            "head": list(self.head),
            "rows": [list(row) for row in self.rows],
            "missing": self.missing,
            "pixels": self.pixels,
            "wide": self.is_wide,
        }


def thinning_words(curves: Sequence[Curve]) -> str:
    """A sentence where curves have more values than are drawn."""
    most = max(curves, key=lambda curve: len(curve.values), default=None)
    if most is None or most.thinned() is most:
        return ""
    return (
        f" Of {len(most.values):,} values {len(most.thinned().values):,} are drawn, the lowest and highest of every "
        "stretch."
    )
