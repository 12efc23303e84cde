"""A run as one HTML page, readable offline, in the look of the planner's pages."""

import html
import json
import os
from dataclasses import dataclass
from pathlib import Path

from lightning_moe_strategy.plan.figures import THEMES
from lightning_moe_strategy.plan.page_template import TEMPLATE as PLAN_TEMPLATE
from lightning_moe_strategy.report.blocks import Block
from lightning_moe_strategy.report.expert_series import FILE_NAME, read_series
from lightning_moe_strategy.report.load_blocks import LoadPart, load_part
from lightning_moe_strategy.report.metrics import read_metrics
from lightning_moe_strategy.report.page_template import TEMPLATE
from lightning_moe_strategy.report.run_files import read_description, read_receipt
from lightning_moe_strategy.report.run_folder import ReportError, RunFolder
from lightning_moe_strategy.report.summary import Card, cards, facts, headline
from lightning_moe_strategy.report.training_blocks import training_blocks


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a page shows of a run."""

    run: RunFolder
    headline: str
    is_well: bool
    """The last loss is finite."""
    cards: list[Card]
    training: list[Block]
    load: LoadPart
    facts: list[tuple[str, str]]

    def missing(self) -> dict[str, list[str]]:
        """Titles of the sections that the run has no source for, by what would make them appear."""
        titles: dict[str, list[str]] = {}
        for block in (*self.training, *self.load.blocks):
            if block.missing:
                titles.setdefault(block.missing, []).append(block.title)
        return titles


def read_report(run: RunFolder) -> Report:
    """Read a run's files."""
    metrics, receipt = read_metrics(run.path), read_receipt(run.path)
    series, description = read_series(run.path / FILE_NAME), read_description(run.path)
    words, is_well = headline(metrics, description)
    sources = [("Folder", str(run.path)), ("Metrics", metrics.source or "none")]
    if run.others:
        names = ", ".join(run.others[:8])
        sources.append(("Other runs there", f"{len(run.others)}: {names}{', ...' if len(run.others) > 8 else ''}"))
    return Report(
        run=run,
        headline=words,
        is_well=is_well,
        cards=cards(metrics, series, receipt),
        training=training_blocks(metrics, receipt),
        load=load_part(series, metrics, description),
        facts=facts(description, sources),
    )


def page_html(report: Report) -> str:
    """The page, plotly.js (about 5 MB) included."""
    from plotly.offline import get_plotlyjs

    path = report.run.path.resolve()
    title = f"{path.parent.name}/{path.name}" if path.parent.name else str(path)
    data = {
        "headline": report.headline,
        "well": report.is_well,
        "cards": report.cards,
        "training": [block.to_json() for block in report.training],
        "load": [block.to_json() for block in report.load.blocks],
        "positions": list(report.load.positions),
        "facts": report.facts,
        "themes": THEMES,
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = PLAN_TEMPLATE.partition("<style>\n")[2].partition("</style>")[0]
    filled = TEMPLATE.replace("{{style}}", style).replace("{{title}}", html.escape(title))
    return filled.replace("{{data}}", text).replace("{{plotly}}", get_plotlyjs())


def write_report(report: Report, path: Path) -> None:
    """Write the page; the file appears complete or not at all.

    Raises:
        ReportError: the file cannot be written there.
    """
    refusal = f"out({str(path)!r}) cannot be written: {{reason}}. Give a file in a folder you may write to."
    if path.exists() and not path.is_file():
        raise ReportError(refusal.format(reason="it is a folder" if path.is_dir() else "it is not a plain file"))
    text = page_html(report)
    unfinished = path.parent / f".{path.name}.{os.getpid()}.unfinished"
    try:
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(refusal.format(reason=error.strerror or error)) from None
