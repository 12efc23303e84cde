"""docs/first-hour.md, followed literally: its commands run in an empty folder and print what the page shows.

Numbers may be others, and ``...`` stands for anything.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first-hour.md"
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?```bash\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
NUMBER = r"[-+]?\d[\d.,]*(?:e[-+]\d+)?"


def pattern_of(line: str) -> re.Pattern[str]:
    """What a line of the page matches in the output: any numbers, any widths of columns and rules."""
    parts = re.split(rf"({NUMBER}|\.\.\.|[─━]+|\s+)", line.strip())
    made = [
        ".*" if part == "..." else r"[─━]+" if part[:1] in ("─", "━") else r"\s+" if part.isspace()
        else NUMBER if re.fullmatch(NUMBER, part) else re.escape(part)
        for part in parts if part
    ]  # fmt: skip
    return re.compile("".join(made))


def missing_lines(shown: str, printed: str) -> list[str]:
    """Lines of the page that were not printed, in whatever order: what is no terminal gets the two streams mixed."""
    lines = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    return [line for line in lines if not any(map(pattern_of(line).search, printed.splitlines()))]


def test_a_page_that_shows_what_is_not_printed_is_found():
    printed = "reading x: 3.03 MB in 0.0 s\n│ a │ 12 │\nEqual: 113 numbers"
    assert missing_lines("reading x: 4.1 MB ...\n│ a   │ 7 │\n...\nEqual: 5 numbers", printed) == []
    assert missing_lines("Equal: 5 tensors\n│ a │ 7 │", printed) == ["Equal: 5 tensors"]
    assert missing_lines("reading y: 4.1 MB", printed) == ["reading y: 4.1 MB"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_hour_runs_as_it_is_written(tmp_path):
    """As a clone has it: the page is followed in a folder of its own beside ``configs``."""
    (tmp_path / "hour").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "120"}
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) > 10 and sum(bool(not_run) for not_run, _, _ in blocks) == 1
    for not_run, commands, shown in blocks:
        if not_run:
            continue
        result = subprocess.run(
            ["bash", "-ec", commands], cwd=tmp_path / "hour", env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert result.returncode == 0, (commands, result.stdout[-3000:])
        assert missing_lines(shown, result.stdout) == [], (commands, result.stdout[-6000:])
