"""``lightning-moe report``: a run that was logged, as one HTML page. Starts without torch."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_moe_strategy.report.run_folder import ReportError, find_run

_DESCRIPTION = """\
Make one HTML page of a run, readable offline:

  lightning-moe report runs/tiny_cpu
  lightning-moe report lightning_logs/version_3 --out run.html

Loss and metrics, speed, phases and waits of a step, expert load over time, memory planned and measured, layout.
Reads what Lightning's CSVLogger or TensorBoardLogger and this package's callbacks wrote; a section whose source is not
there says what writes it. Exit status: 0 written, 2 bad input.
"""


def run_report(arguments: Sequence[str]) -> int:
    """Write the page and print the summary; the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-moe report", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="default_root_dir (its newest run is taken) or a version_N folder"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the run's folder)")
    options = parser.parse_args(arguments)
    try:
        run = find_run(options.run_dir)
        # What the page takes to draw is not needed to say that there is no run.
        from lightning_moe_strategy.report.page import read_report, write_report

        report = read_report(run)
        out: Path = options.out or run.path / "report.html"
        write_report(report, out)
    except ReportError as error:
        print(f"lightning-moe report: {error}", file=sys.stderr)
        return 2
    among = f" (the newest of {len(run.others) + 1}; also {', '.join(run.others[:4])})" if run.others else ""
    print(f"run: {run.path}{among}")
    print(report.headline)
    for card in report.cards:
        print(f"  {card['name']:<15}{card['value']:>12}  {card['note']}")
    for reason, titles in report.missing().items():
        print(f"  without {', '.join(titles)}: {reason}")
    print(f"page: {out}")
    return 0
