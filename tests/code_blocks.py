"""The pages of the documentation, the code blocks in them and the names they describe, as tests read them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning_moe_strategy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- not run:(?P<reason>[^\n]*)-->\n\n?)?"
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    language: str
    """Empty where the fence names none."""
    text: str
    line: int
    shown_below: str
    """The text block that follows with nothing in between: what the code prints. Empty where there is none."""
    not_run: str | None
    """The reason that ``<!-- not run: reason -->`` before the block gives; None for a block that is run."""


def blocks_of(page: Path) -> list[Block]:
    return list(_blocks(page.read_text(encoding="utf-8")))


def _blocks(markdown: str) -> Iterator[Block]:
    found = list(_BLOCK.finditer(markdown))
    for index, match in enumerate(found):
        below = found[index + 1] if index + 1 < len(found) else None
        is_adjacent = below is not None and not markdown[match.end() : below.start()].strip()
        shown = below["text"] if below is not None and is_adjacent and below["language"] == "text" else ""
        reason = None if match["reason"] is None else match["reason"].strip()
        line = markdown.count("\n", 0, match.start("language")) + 1
        yield Block(match["language"], match["text"], line, shown, reason)


def prose_of(page: Path) -> str:
    """The page without its blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _BLOCK.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL)


def commands_of(page: Path) -> Iterator[str]:
    """Every command line of the package in a block of the page, continued lines joined."""
    for block in blocks_of(page):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ")
            if block.language in ("", "bash", "shell", "console") and words.startswith("lightning-moe "):
                yield words


def anchors_of(markdown: str) -> set[str]:
    """What GitHub, and this site, make of the headings. A heading that comes again gets a number."""
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE), re.M):
        linked = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", linked).strip().lower().replace(" ", "-")
        copies = (slug, *(f"{slug}-{number}" for number in range(1, 100)))
        anchors.add(next(copy for copy in copies if copy not in anchors))
    return anchors


def public_objects() -> dict[str, Any]:
    """What ``lightning_moe_strategy.__all__`` names, but the version."""
    names = set(lightning_moe_strategy.__all__) - {"__version__"}
    return {name: getattr(lightning_moe_strategy, name) for name in names}
