"""Shapes: T tokens, K slots per token, D hidden size, R rows."""

import pytest
import torch
from torch import Tensor

from lightning_moe_strategy.kernels import ragged_rows as kernels
from lightning_moe_strategy.kernels.ragged_rows import RaggedRows, gather_ragged_rows, ragged_rows, sum_ragged_rows

NUM_TOKENS, TOP_K, HIDDEN = 40, 4, 16


def some_rows(share: float) -> RaggedRows:
    slots = torch.randperm(NUM_TOKENS * TOP_K, generator=torch.Generator().manual_seed(0))
    return ragged_rows(slots[: int(share * len(slots))].int(), NUM_TOKENS, TOP_K)


def one_by_one(rows_RD: Tensor, rows: RaggedRows) -> Tensor:
    """FP32, k ascending, rounded once."""
    y_TD = torch.zeros(NUM_TOKENS, rows_RD.shape[1], dtype=torch.promote_types(rows_RD.dtype, torch.float32))
    for token, rows_K in enumerate(rows.row_of_slot_TK.tolist()):
        for row in rows_K:
            if row >= 0:
                y_TD[token] += rows_RD[row]
    return y_TD.to(rows_RD.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_sums_and_gradients_add_by_k_bit_by_bit(monkeypatch: pytest.MonkeyPatch, share: float, dtype: torch.dtype):
    rows = some_rows(share)
    x_TD = torch.randn(NUM_TOKENS, HIDDEN).to(dtype).requires_grad_()
    y_RD = (1e3 ** torch.rand(len(rows.slot_of_row_R), HIDDEN)).to(dtype).requires_grad_()
    # One block of channels, and blocks of three with a rest.
    for block_numbers in (kernels.BLOCK_NUMBERS, 3 * max(NUM_TOKENS, len(y_RD))):
        monkeypatch.setattr(kernels, "BLOCK_NUMBERS", block_numbers)
        gathered_RD, summed_TD = gather_ragged_rows(x_TD, rows), sum_ragged_rows(y_RD, rows)
        assert torch.equal(gathered_RD, x_TD[rows.token_of_row_R.long()])
        assert torch.equal(summed_TD, one_by_one(y_RD, rows))
        assert torch.equal(torch.autograd.grad(gathered_RD, x_TD, y_RD.detach())[0], one_by_one(y_RD, rows))
        (grad_RD,) = torch.autograd.grad(summed_TD, y_RD, x_TD.detach())
        assert torch.equal(grad_RD, x_TD[rows.token_of_row_R.long()])


def test_a_row_that_holds_nan_reaches_its_own_token_alone():
    rows = some_rows(0.5)
    y_RD = torch.randn(len(rows.slot_of_row_R), HIDDEN)
    y_RD[0] = torch.nan
    is_nan_T = sum_ragged_rows(y_RD, rows).isnan().all(1)
    assert is_nan_T.nonzero().tolist() == [[int(rows.token_of_row_R[0])]]


def test_both_directions_say_the_same():
    rows = some_rows(0.5)
    flat = rows.row_of_slot_TK.view(-1)
    assert torch.equal(flat[rows.slot_of_row_R.long()], torch.arange(len(rows.slot_of_row_R), dtype=torch.int32))
    assert (flat >= 0).sum() == len(rows.slot_of_row_R) and flat.min() == -1


def test_sums_may_be_changed_in_place():
    rows, y_RD = some_rows(0.5), torch.randn(NUM_TOKENS * TOP_K // 2, HIDDEN, requires_grad=True)
    sum_ragged_rows(y_RD, rows).add_(1.0).sum().backward()
    assert y_RD.grad is not None and y_RD.grad.eq(1).all()
