"""Which implementation multiplies rows by their experts' weights, and that ours computes what torch's does.

Shapes: R rows, T tokens, M and N the two sizes of a weight, E experts.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.kernels import grouped_products
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.kernels.grouped_products import (
    measure_products,
    measured_products,
    persistent_products,
    rows_times_weights,
)

ROOT = Path(__file__).parents[1]
OFFSETS_E = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _measuring_is_off_again() -> Iterator[None]:
    yield
    measure_products(False)


class Clock:
    """In place of a GPU: how long each implementation takes, and which one ran last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grouped_mm: float, persistent: float) -> None:
        self.ran: list[str] = []
        self.num_timed = 0
        self.tokens_R: Tensor | None = None
        theirs = grouped_products._torch_product

        def run_ours(rows: Tensor, weights: Tensor, offsets: Tensor, tokens_R: Tensor | None) -> Tensor:
            self.ran.append("persistent")
            self.tokens_R = tokens_R
            return theirs(rows if tokens_R is None else rows[tokens_R], weights, offsets)

        def run_theirs(*args: Tensor) -> Tensor:
            self.ran.append("grouped_mm")
            return theirs(*args)

        def seconds(run: object) -> float:
            self.num_timed += 1
            run()  # type: ignore[operator]
            return {"grouped_mm": grouped_mm, "persistent": persistent}[self.ran[-1]]

        monkeypatch.setattr(grouped_products, "persistent_products", run_ours)
        monkeypatch.setattr(grouped_products, "_torch_product", run_theirs)
        monkeypatch.setattr(grouped_products, "_seconds", seconds)
        monkeypatch.setattr(grouped_products, "_can_be_measured", lambda rows: True)


def product_of(num_rows: int = 5, **options: tuple[Tensor, Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows_RM, weights_EMN = (torch.randn(*s, generator=generator).bfloat16() for s in ((num_rows, 8), (3, 8, 16)))
    return rows_times_weights(rows_RM, weights_EMN, OFFSETS_E, **options)


@pytest.mark.parametrize(("grouped_mm", "persistent", "faster"), [(2.0, 1.0, "persistent"), (1.0, 2.0, "grouped_mm")])
def test_the_faster_one_is_kept(monkeypatch: pytest.MonkeyPatch, grouped_mm: float, persistent: float, faster: str):
    expected = product_of()
    clock = Clock(monkeypatch, grouped_mm, persistent)
    measure_products()
    for _ in range(2):
        assert torch.equal(product_of(), expected)
        assert clock.ran[-1] == faster
    ((kind, measurement),) = measured_products().items()
    assert (kind.num_experts, kind.M, kind.N, kind.max_rows, kind.dtype) == (3, 8, 16, 8, torch.bfloat16)
    assert (measurement.grouped_mm_seconds, measurement.persistent_seconds) == (grouped_mm, persistent)
    assert measurement.faster == faster


def test_a_product_is_measured_once_for_rows_up_to_a_power_of_two(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch, 1.0, 2.0)
    measure_products()
    for num_rows in (5, 8, 7, 9, 16):
        product_of(num_rows)
    assert [kind.max_rows for kind in measured_products()] == [8, 16]
    assert clock.num_timed == 2 * 2 * grouped_products.NUM_TIMED_RUNS


def test_rows_that_are_copies_are_read_where_they_were_copied_from(monkeypatch: pytest.MonkeyPatch):
    tokens_R = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    x_TM, weights_EMN = torch.randn(2, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    rows_RM = x_TM[tokens_R]
    expected_RN = rows_times_weights(rows_RM, weights_EMN, OFFSETS_E)
    clock = Clock(monkeypatch, 2.0, 1.0)
    measure_products()
    actual_RN = rows_times_weights(rows_RM, weights_EMN, OFFSETS_E, gathered_from=(x_TM, tokens_R))
    assert clock.tokens_R is tokens_R and torch.equal(actual_RN, expected_RN)


def test_nothing_is_measured_unless_asked_for(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch, 2.0, 1.0)
    product_of()
    assert clock.ran == ["grouped_mm"] and measured_products() == {}
    measure_products()
    product_of()
    measure_products(False)
    assert measured_products() == {}
    product_of()
    assert clock.ran[-1] == "grouped_mm"


def test_nothing_is_measured_on_a_cpu_among_fake_tensors_or_in_fp32(monkeypatch: pytest.MonkeyPatch):
    from torch._subclasses import FakeTensorMode

    measure_products()
    product_of()
    assert measured_products() == {}
    # What says that a tensor is on a GPU stands in for one.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    rows = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert grouped_products._can_be_measured(rows)
    assert not grouped_products._can_be_measured(rows.float())
    with FakeTensorMode():
        assert not grouped_products._can_be_measured(torch.zeros(2, 2, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not grouped_products._can_be_measured(rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not grouped_products._can_be_measured(rows)


def test_every_product_of_the_experts_but_their_weight_gradients_is_chosen(monkeypatch: pytest.MonkeyPatch):
    Clock(monkeypatch, 2.0, 1.0)
    measure_products()
    weights = [torch.randn(3, *sizes).bfloat16().requires_grad_() for sizes in ((32, 8), (8, 16))]
    x_TD, tokens_R = torch.randn(2, 8).bfloat16(), torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    rows_RD = x_TD[tokens_R].requires_grad_()
    expert_mlp(rows_RD, torch.rand(5), *weights, OFFSETS_E, gathered_from=(x_TD, tokens_R)).sum().backward()
    kinds = [(kind.M, kind.N, kind.is_transposed, kind.is_gathered) for kind in measured_products()]
    assert kinds == [(8, 32, True, True), (16, 8, True, False), (8, 16, False, False), (32, 8, False, False)]


def test_the_reference_of_our_kernel_is_grouped_mm():
    rows_TM, weights_EMN = torch.randn(5, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    tokens_R = torch.tensor([4, 4, 0, 1, 2], dtype=torch.int32)
    assert torch.equal(
        persistent_products(rows_TM, weights_EMN, OFFSETS_E, tokens_R),
        F.grouped_mm(rows_TM[tokens_R], weights_EMN, offs=OFFSETS_E),
    )


def test_interpreted_kernels_do_what_their_references_do():
    pytest.importorskip("triton")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/triton_parity_grouped.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " skipped" not in run.stdout.splitlines()[-1]
