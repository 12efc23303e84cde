"""``lightning-moe demo`` as a user types it, in an empty folder: trains, reports, and resumes when typed again."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_moe_strategy.cli import demo

LAST_LINE = re.compile(
    r"demo: val_loss=(\d+\.\d{3}) unigram_entropy=(\d+\.\d{3}) tokens_per_second=(\d+) skew=(\d+\.\d{2})"
)
STEPS = 20
"""The fewest with two readings of the throughput, which is read every 10 steps."""


def run(folder: Path) -> tuple[list[str], str]:
    result = subprocess.run(
        [str(Path(sys.executable).parent / "lightning-moe"), "demo", "--steps", str(STEPS)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout.rstrip().splitlines(), result.stderr


def column(folder: Path, version: int, name: str) -> list[float]:
    with (folder / f"runs/tiny_cpu/logs/version_{version}/metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_trains_reports_and_resumes(tmp_path):
    first_lines, errors = run(tmp_path)
    report = LAST_LINE.fullmatch(first_lines[-1])
    assert report, first_lines[-1]
    val_loss, entropy, tokens_per_second, skew = map(float, report.groups())
    assert 4 < entropy < val_loss < 8 and tokens_per_second > 0 and 1 <= skew <= 8
    assert not any("resuming" in line for line in first_lines)
    assert "LeafSpec" not in errors and "args parameter" not in errors
    checkpoints = tmp_path / "runs/tiny_cpu/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == [f"step={STEPS}.ckpt"]
    assert (tmp_path / "runs/tiny_cpu/logs/version_0/expert_load.png").stat().st_size > 10_000
    assert column(tmp_path, 0, "val_loss") == [pytest.approx(val_loss, abs=1e-3)]

    second_lines, _ = run(tmp_path)
    resumed = [line for line in second_lines if "resuming from" in line]
    assert len(resumed) == 1 and resumed[0].endswith(f"step={STEPS}.ckpt"), resumed
    report = LAST_LINE.fullmatch(second_lines[-1])
    assert report and float(report[1]) < val_loss
    assert (checkpoints / f"step={2 * STEPS}.ckpt").exists()
    steps = column(tmp_path, 1, "step")
    assert min(steps) >= STEPS and max(steps) < 2 * STEPS + 1
    # Training goes on from what it had learnt, it does not start over.
    assert column(tmp_path, 1, "train_loss_step")[0] < column(tmp_path, 0, "train_loss_step")[0] - 0.3


@pytest.mark.parametrize("last_step", [30, 430, 601])
def test_a_run_ends_on_a_validation_and_a_checkpoint_whatever_its_steps(last_step):
    options = demo._ending_at(last_step, 200)
    values = dict(zip(options[::2], options[1::2], strict=True))
    assert set(values.values()) == {str(last_step)} and len(values) == 3
    assert demo._ending_at(400, 200) == ["--trainer.max_steps", "400"]


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_a_run_without_steps_is_refused(steps, capsys):
    with pytest.raises(SystemExit):
        demo.run_demo(["--steps", steps])
    assert f"--steps({steps}) must be at least 1" in capsys.readouterr().err
