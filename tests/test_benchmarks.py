"""The benchmarks are no tests, but what they import exists, and one that judges goals judges them right."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))
MOE_BLOCK = Path(__file__).parent.parent / "benchmarks" / "moe_block.py"
STEP_COST = Path(__file__).parent.parent / "benchmarks" / "step_cost.py"


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_loads_and_has_a_main(path):
    assert callable(runpy.run_path(str(path))["main"])


@pytest.mark.slow
def test_moe_block_measures_every_candidate_in_one_process_and_on_two_ranks(tmp_path):
    tiny = "--tokens 64 --hidden 32 --intermediate 16 --experts 8 --top-k 2 --repeats 1 --json report.json"
    command = [sys.executable, str(MOE_BLOCK), *tiny.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["torch"] == torch.__version__ and report["shape"]["tokens"] == 64
    assert report["refusals"] == {}
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        figures = report["figures"][dtype]
        assert len(figures) == 7
        assert all(len(each["seconds"]) == 1 and 0 < each["seconds"][0] < 5 for each in figures.values())
        ours, theirs = figures["ours, all-to-all"], figures["transformers, AllToAllEP"]
        assert figures["ours"]["saved_bytes"] < ours["saved_bytes"] < theirs["saved_bytes"]
        # The input alone is T * D numbers.
        assert figures["ours"]["saved_bytes"] > 64 * 32 * itemsize
        # Rows go out and come back, as do their gradients. Ours are one for each token and rank, and take ids and FP32
        # probabilities along: of 2 choices among 2 ranks, between half of the rows and all of them.
        rows = (theirs["received_bytes"] - 4 * 8) // (4 * 32 * itemsize)
        assert 0 < rows < 2 * 64 and theirs["received_bytes"] == 4 * 32 * itemsize * rows + 4 * 8
        assert theirs["received_bytes"] / 2 < ours["received_bytes"] < theirs["received_bytes"]
    assert len(report["goals"]) == 10 and all(goal["min"] <= goal["median"] <= goal["max"] for goal in report["goals"])


def test_moe_block_compares_nothing_that_differs():
    require_equal = runpy.run_path(str(MOE_BLOCK))["require_equal"]
    expected = {"output": torch.ones(3), "input": torch.ones(3)}
    require_equal("ours", expected, expected)
    with pytest.raises(RuntimeError, match=r"ours: input is off by 1\.0e-03"):
        require_equal("ours", expected | {"input": torch.tensor([1.0, 1.0, 0.999])}, expected)


def test_moe_block_judges_a_goal_by_the_median_of_its_rounds():
    names = runpy.run_path(str(MOE_BLOCK))
    ours, eager = names["OURS"], names["EAGER"]
    figures = {ours: names["Figures"]([1.0, 1.0, 2.0]), eager: names["Figures"]([2.0, 3.5, 8.0])}
    goals = names["judged"]({"float32": figures, "bfloat16": {}})
    assert [(goal["numerator"], goal["dtype"], goal["at_least"]) for goal in goals] == [(eager, "float32", 3.0)]
    assert (goals[0]["min"], goals[0]["median"], goals[0]["max"], goals[0]["met"]) == (2.0, 3.5, 4.0, True)


@pytest.mark.slow
def test_step_cost_measures_the_strategy_and_its_peers_on_the_same_losses(tmp_path):
    tiny = "--steps 2 --layers 2 --hidden 64 --tokens 64 --json report.json"
    command = [sys.executable, str(STEP_COST), *tiny.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    figures = report["figures"]
    assert len(figures) == 4
    assert all(len(each["seconds"]) == 2 and all(0 < x < 5 for x in each["seconds"]) for each in figures.values())
    # Four heads of 16, two layers of 8 x 3 products and their routers, embedding and head: weight, gradient and two
    # moments of all, half on each rank.
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 2 * 8 + 16 * 64 + 16 * 3 * 64 * 32 + 2 * 64
    resident = 4 * 4 * (2 * layer + 2 * 4096 * 64 + 64) / 2
    peaks = {name: each["peak_bytes"] for name, each in figures.items()}
    assert all(resident < peak < 3 * resident for peak in peaks.values()), (resident, peaks)
    ours = [peak for name, peak in peaks.items() if name.startswith("this strategy")]
    assert len(ours) == 2 and max(ours) < min(peak for name, peak in peaks.items() if peak not in ours)
    assert len(report["goals"]) == 6 and [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_step_cost_compares_nothing_that_trains_differently():
    names = runpy.run_path(str(STEP_COST))
    same = [[8.3, 8.4], [8.2, 8.1]]
    names["require_equal_losses"]({names["LIGHTNING"]: same, names["OURS_EP2"]: same})
    with pytest.raises(RuntimeError, match=r"ep=2: a loss of step 1 is off by 1\.[0-9]e-02"):
        names["require_equal_losses"]({names["LIGHTNING"]: same, names["OURS_EP2"]: [[8.3, 8.4], [8.2, 8.2]]})


def test_step_cost_judges_by_the_better_of_the_others_round_by_round():
    names = runpy.run_path(str(STEP_COST))
    figures = {
        names["OURS_EP2"]: names["Figures"]([1.0, 2.0, 3.3], 90),
        names["OURS_EP1"]: names["Figures"]([2.0, 2.0, 6.0], 110),
        names["LIGHTNING"]: names["Figures"]([1.0, 2.0, 3.0], 100),
        names["TRANSFORMERS"]: names["Figures"]([1.0, 2.5, 3.0], 120),
    }
    (
        ep2,
        *_,
    ) = goals = names["judged"](figures)
    assert (ep2.numerator, ep2.denominator) == (names["OURS_EP2"], names["LIGHTNING"])
    assert (ep2.min, ep2.median, ep2.max) == (1.0, 1.0, 3.3 / 3.0)
    assert [goal.is_met for goal in goals] == [True, True, True, False, False, True]


@pytest.mark.slow
def test_checkpoint_speed_reads_each_byte_once_and_judges_its_goals(tmp_path):
    options = ["--gigabytes", "0.02", "--hidden", "256", "--repeats", "1", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.checkpoint_speed", *options]
    result = subprocess.run(command, cwd=BENCHMARKS[0].parent.parent, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "a load reads each byte 1.0000 times" in result.stdout
    assert result.stdout.count("(<= 1.1)") == 4 and "of a save (<= 10%)" in result.stdout
    assert not list(tmp_path.iterdir())
