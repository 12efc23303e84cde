"""Grouped products and weight gradients, compiled for GPUs that are not there; see test_triton_compiled.py.

Shapes: R rows, T tokens, E experts, D hidden, H twice the intermediate size I.
"""

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from lightning_moe_strategy.kernels import triton_grouped_products, triton_outer_products  # noqa: E402
from tests.test_triton_compiled import (  # noqa: E402
    MATRIX_INSTRUCTION,
    MAX_SHARED_BYTES,
    compile_for,
    launches,
    meta,
    registers_and_spills,
)

INT32 = torch.int32


def up(num_experts: int = 32, hidden: int = 7168, intermediate: int = 2048, *, is_gathered: bool = False) -> None:
    weights_EDH = meta(num_experts, 2 * intermediate, hidden).mT
    rows_TD = meta(16384 if is_gathered else 65536, hidden)
    tokens_R = meta(65536, dtype=INT32) if is_gathered else None
    triton_grouped_products.persistent_products(rows_TD, weights_EDH, meta(num_experts, dtype=INT32), tokens_R)


def gradient_of_rows() -> None:
    triton_grouped_products.persistent_products(meta(65536, 4096), meta(32, 4096, 7168), meta(32, dtype=INT32))


def weight_gradient(*, is_gathered: bool = False) -> None:
    left_RH, right_TD = meta(65536, 4096), meta(16384 if is_gathered else 65536, 7168)
    tokens_R = meta(65536, dtype=INT32) if is_gathered else None
    triton_outer_products.sum_outer_products(left_RH, right_TD, meta(32, dtype=INT32), tokens_R)


CASES: dict[str, Callable[[], None]] = {
    "up, DeepSeek-V3": up,
    "up of gathered tokens, DeepSeek-V3": lambda: up(is_gathered=True),
    "up of gathered tokens, Qwen3-30B": lambda: up(128, 2048, 768, is_gathered=True),
    "gradient of rows": gradient_of_rows,
    "weight gradient": weight_gradient,
    "weight gradient of gathered tokens": lambda: weight_gradient(is_gathered=True),
}


FAST = {("up of gathered tokens, DeepSeek-V3", 90), ("weight gradient of gathered tokens", 100)}
"""One of each kernel and architecture: a case takes many seconds to compile, and its code differs in little."""
RUNS = [
    pytest.param(case, capability, marks=() if (case, capability) in FAST else pytest.mark.slow)
    for case in CASES
    for capability in MATRIX_INSTRUCTION
]


@pytest.mark.parametrize(("case", "capability"), RUNS)
def test_every_configuration_runs_on_tensor_cores_in_registers_and_fits_the_card(case: str, capability: int):
    configurations = launches(CASES[case])
    assert len(configurations) > 1
    for launch in configurations:
        compiled = compile_for(launch, capability)
        assert MATRIX_INSTRUCTION[capability] in compiled.asm["ptx"], launch.name
        assert compiled.metadata.shared <= MAX_SHARED_BYTES, launch.name
        assert registers_and_spills(compiled)[1] == 0, launch.name


@pytest.mark.parametrize(("case", "capability"), RUNS)
def test_operands_are_copied_ahead_16_bytes_at_a_time(case: str, capability: int):
    for launch in launches(CASES[case]):
        ptx = compile_for(launch, capability).asm["ptx"]
        sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, 0x([0-9a-f]+)", ptx))
        # Numbers of a row each (a row's token) are copied one by one; tiles never are.
        assert "10" in sizes and sizes <= {"10", "4"}, (launch.name, sizes)
        assert not re.findall(r"ld\.global[.\w:]*\.[bu]16", ptx), launch.name
