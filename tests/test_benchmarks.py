"""The benchmarks are no tests, but what they import exists."""

import runpy
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_loads_and_has_a_main(path):
    assert callable(runpy.run_path(str(path))["main"])
