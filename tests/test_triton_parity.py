"""Which implementation of a kernel runs, and that Triton's compute what torch's do.

Kernels are interpreted in a process of their own: Triton takes its environment variable for good when it is imported.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_strategy.kernels import on_cuda
from lightning_moe_strategy.kernels.swiglu import swiglu_prob

ROOT = Path(__file__).parents[1]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "tests",
    [
        ("tests/triton_parity.py",),
        # What callers expect of the references they expect of the kernels; float64 is not interpreted but torch's.
        ("tests/test_expert_mlp.py", "tests/test_models_moe.py", "-k", "not gradcheck and not transformers"),
    ],
    ids=["kernels", "callers"],
)
def test_interpreted_kernels_do_what_their_references_do(tests: tuple[str, ...]):
    pytest.importorskip("triton")
    run = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout[-4000:]
    assert " skipped" not in run.stdout.splitlines()[-1]


def test_without_triton_everything_imports_and_runs_on_torch():
    run = python(
        "-c",
        """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import importlib, pathlib, torch
for path in pathlib.Path("kernels").glob("*.py"):
    if not path.stem.startswith("triton_"):
        importlib.import_module(f"lightning_moe_strategy.kernels.{path.stem}")
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.moe import MixtureOfExperts
MixtureOfExperts(ModelConfig(hidden=16))(torch.randn(1, 4, 16)).sum().backward()
""",
    )
    assert run.returncode == 0, run.stderr


def test_on_a_cpu_the_reference_runs_and_triton_is_not_imported():
    run = python(
        "-c",
        """
import sys, torch
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.moe import MixtureOfExperts
MixtureOfExperts(ModelConfig(hidden=16))(torch.randn(1, 4, 16)).sum().backward()
assert not [name for name in sys.modules if "kernels.triton_" in name]
""",
    )
    assert run.returncode == 0, run.stderr


class Subclass(Tensor):
    pass


def test_the_first_argument_decides(monkeypatch: pytest.MonkeyPatch):
    """The interpreter's flag stands in for a GPU: both make a plain tensor one that Triton takes."""
    monkeypatch.setattr(on_cuda, "_has_triton", lambda: True)
    x = torch.ones(2)
    assert not on_cuda._takes_triton(x, None)
    monkeypatch.setattr(on_cuda, "IS_INTERPRETED", True)
    assert on_cuda._takes_triton(x, None) and on_cuda._takes_triton(nn.Parameter(x), on_cuda.FLOATS)
    assert not on_cuda._takes_triton(x.double(), on_cuda.FLOATS)
    assert not on_cuda._takes_triton(x.as_subclass(Subclass), None)
    with torch._subclasses.FakeTensorMode():
        assert not on_cuda._takes_triton(torch.ones(2), None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not on_cuda._takes_triton(x, None)


def test_the_choice_does_not_break_a_compiled_graph():
    h_RH, probs_R = torch.randn(3, 8), torch.rand(3)
    compiled = torch.compile(swiglu_prob, backend="eager", fullgraph=True)
    assert torch.equal(compiled(h_RH, probs_R), swiglu_prob(h_RH, probs_R))


def test_a_gpu_without_triton_keeps_the_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_cuda, "IS_INTERPRETED", True)
    monkeypatch.setattr(on_cuda, "_has_triton", lambda: False)
    h_RH, probs_R = torch.randn(3, 8), torch.rand(3)
    assert torch.equal(swiglu_prob(h_RH, probs_R), swiglu_prob.__wrapped__(h_RH, probs_R))


def test_the_kernel_of_the_same_name_runs_in_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_cuda, "_takes_triton", lambda x, dtypes: True)
    monkeypatch.setattr(on_cuda, "_kernel", lambda *names: lambda *args: (names, args))
    h_RH, probs_R = torch.randn(3, 8), torch.rand(3)
    assert swiglu_prob(h_RH, probs_R) == (("triton_swiglu", "swiglu_prob"), (h_RH, probs_R))


GPU_CHECK = runpy.run_path(str(ROOT / "benchmarks/gpu_check.py"))
TINY = GPU_CHECK["Shape"](name="tiny", num_tokens=20, hidden=32, intermediate=16, num_experts=8, top_k=2)
LIMITS = {"copy_bytes_per_second": 1e9, "peak_flops": 1e9}


def test_the_check_for_a_gpu_runs_every_case(capsys: pytest.CaptureFixture[str]):
    """On a CPU references are compared with themselves: the script is what is tested."""

    def timer(function: Callable[[], Any]) -> list[float]:
        function()
        return [2e-3, 1e-3, 4e-3]

    differences, figures = GPU_CHECK["check"](TINY, timer, "cpu", LIMITS)
    assert differences == []
    assert {each.milliseconds for each in figures} == {(1.0, 2.0, 4.0)}
    permute = figures[0]
    assert (permute.name, permute.is_met) == ("permute", False)
    # 20 tokens read, 40 rows written, 32 numbers of 2 bytes, in 2 ms of a GPU that copies 1 GB/s.
    assert permute.share_of_copy == pytest.approx(60 * 32 * 2 / 2e-3 / 1e9)
    assert "MISSED" in capsys.readouterr().out


def test_the_check_for_a_gpu_finds_a_difference():
    right, wrong = torch.ones(3), torch.tensor([1.0, 1.0, 1.1])
    case = GPU_CHECK["Case"](name="wrong", run=lambda: wrong, reference=lambda: right, tolerance=1e-3)
    assert "wrong: Tensor-likes are not close" in GPU_CHECK["difference"](case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_a_gpu_ends_well_without_one(tmp_path: Path):
    run = python("benchmarks/gpu_check.py", "--json", str(tmp_path / "figures.json"))
    assert run.returncode == 0 and "No CUDA GPU" in run.stdout
    assert not list(tmp_path.iterdir())
