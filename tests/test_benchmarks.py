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
