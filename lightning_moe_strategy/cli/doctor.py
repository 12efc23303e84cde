"""``lightning-moe doctor``: would training work here, with what, and what to do where it would not."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_moe_strategy.doctor.diagnose import diagnose
from lightning_moe_strategy.doctor.finding import Finding

_DESCRIPTION = """\
Examine this machine and what is installed: versions, GPUs, NVLink and RDMA, the kernels and attention that would run
and why, the registration of the strategy's name, addresses, shared memory and disk.

  lightning-moe doctor

Exit status: 0 training would work, 1 something it needs is broken; 2 bad input. No GPU is needed; nothing is changed.
"""
_MARKS = {"fine": ("ok", "green"), "advice": ("note", "yellow"), "broken": ("BROKEN", "bold red")}


def run_doctor(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-moe doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="where checkpoints will be written (default: here)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    findings = diagnose(options.dir)
    works = all(finding.status != "broken" for finding in findings)
    if options.json:
        json.dump({"works": works, "findings": [finding.to_json() for finding in findings]}, sys.stdout, indent=1)
        print()
    else:
        _print(findings, works=works)
    return 0 if works else 1


def _print(findings: Sequence[Finding], *, works: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.status]
        table.add_row(Text(mark, style=style), finding.subject, Text(finding.found))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", style=style))
    console = Console(highlight=False)
    console.print(table)
    broken = sum(finding.status == "broken" for finding in findings)
    console.print(
        "Training would work here." if works else f"Training would not work here: {broken} broken, see above."
    )
