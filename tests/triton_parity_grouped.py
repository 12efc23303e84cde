"""Grouped products and weight gradients of Triton against their torch references; see triton_parity.py.

test_grouped_products.py runs this file interpreted; on a machine with a GPU ``pytest tests/triton_parity_grouped.py``
runs the compiled kernels. Shapes: R rows, T tokens, M and N the two sizes of a weight, E experts.
"""

import pytest
import torch

from lightning_moe_strategy.kernels import on_cuda, triton_grouped_products, triton_outer_products
from lightning_moe_strategy.kernels.grouped_products import persistent_products
from lightning_moe_strategy.kernels.outer_products import outer_products, sum_outer_products

DEVICE = "cpu" if on_cuda.IS_INTERPRETED else "cuda"
# One rounding of a sum that was added in another order. The interpreter does not round to the nearest.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
ENDS = {
    "empty experts": [0, 21, 21, 38, 39],
    "one expert has all": [0, 0, 23, 23, 23],
    "few rows each": [1, 2, 4, 5, 7],
    "a multiple of the tile": [16, 32, 32, 32, 32],
    "no rows": [0, 0, 0, 0, 0],
}
DTYPES_AND_ENDS = [(torch.bfloat16, ends) for ends in ENDS.values()] + [(torch.float16, ENDS["empty experts"])]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_both_kernels_run_here_and_no_reference():
    """The tests below compare something with itself otherwise."""
    assert on_cuda._takes_triton(torch.zeros(2, dtype=torch.bfloat16, device=DEVICE), on_cuda.HALF)
    for function, module in (
        (persistent_products, triton_grouped_products),
        (sum_outer_products, triton_outer_products),
    ):
        assert on_cuda._kernel(module.__name__.rpartition(".")[2], function.__name__).__module__ == module.__name__


def offsets_of(ends):
    """What lies before them in memory is no offset."""
    return torch.tensor([5, *ends], dtype=torch.int32, device=DEVICE)[1:]


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("dtype", "ends"), DTYPES_AND_ENDS, ids=str)
def test_products_are_those_of_the_reference_and_nothing_else_is_read(dtype, ends, is_transposed, is_gathered):
    offsets_E = offsets_of(ends)
    num_rows, num_tokens, m, n = ends[-1], 10, 24, 40
    rows_TM = torch.randn(num_tokens if is_gathered else num_rows + 3, m, device=DEVICE).to(dtype)
    rows_TM = torch.cat([rows_TM, torch.full((4, m), float("nan"), dtype=dtype, device=DEVICE)])
    tokens_R = None
    if is_gathered:
        tokens_R = torch.randint(0, num_tokens, (num_rows + 3,), dtype=torch.int32, device=DEVICE)
        tokens_R[num_rows:] = num_tokens + 1
    weights_EMN = torch.randn(5, n, m, device=DEVICE).to(dtype).mT if is_transposed else None
    if weights_EMN is None:
        weights_EMN = torch.randn(5, m, n, device=DEVICE).to(dtype)
    actual_RN = persistent_products(rows_TM, weights_EMN, offsets_E, tokens_R)
    expected_RN = persistent_products.__wrapped__(rows_TM, weights_EMN, offsets_E, tokens_R)
    assert actual_RN.shape == expected_RN.shape and actual_RN.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual_RN[:num_rows], expected_RN[:num_rows], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [(15, 7), (16, 8), (33, 17)])
def test_no_size_is_refused(sizes):
    m, n = sizes
    offsets_E = torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    rows_RM, weights_EMN = (torch.randn(*s, device=DEVICE).bfloat16() for s in ((9, m), (2, m, n)))
    expected_RN = torch.cat(
        [rows_RM[:5].float() @ weights_EMN[0].float(), rows_RM[5:].float() @ weights_EMN[1].float()]
    )
    torch.testing.assert_close(
        persistent_products(rows_RM, weights_EMN, offsets_E).float(), expected_RN, rtol=8e-3, atol=8e-3
    )


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize(("dtype", "ends"), DTYPES_AND_ENDS, ids=str)
def test_weight_gradients_are_those_of_the_reference_and_nothing_else_is_read(dtype, ends, is_gathered):
    offsets_E = offsets_of(ends)
    num_rows, num_tokens = ends[-1], 10
    left_RM = torch.randn(num_rows + 3, 24, device=DEVICE).to(dtype)
    right_TN = torch.randn(num_tokens if is_gathered else num_rows, 40, device=DEVICE).to(dtype)
    right_TN = torch.cat([right_TN, torch.full((3, 40), float("nan"), dtype=dtype, device=DEVICE)])
    tokens_R = torch.randint(0, num_tokens, (num_rows + 3,), dtype=torch.int32, device=DEVICE) if is_gathered else None
    left_RM[num_rows:] = float("nan")
    actual_EMN = outer_products(left_RM, right_TN, offsets_E, tokens_R)
    expected_EMN = sum_outer_products.__wrapped__(left_RM, right_TN, offsets_E, tokens_R)
    assert actual_EMN.dtype == torch.float32
    torch.testing.assert_close(actual_EMN, expected_EMN, rtol=1e-6, atol=1e-5)
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    assert actual_EMN[counts_E == 0].eq(0).all() and actual_EMN[counts_E > 0].ne(0).any() == bool(num_rows)
