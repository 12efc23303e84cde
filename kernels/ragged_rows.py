"""Copies of tokens to their rows and sums of a token's rows, where a token may have fewer than K of them.

Shapes: T tokens, K slots per token, D hidden size, R rows (at most T*K). A slot is one (token, k) pair, numbered
``token * K + k``; it has one row or none. Indices are int32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import FLOATS, triton_on_cuda

# The reference adds in blocks of channels, for their FP32 copies' sake: 64 MB of rows at a time.
BLOCK_NUMBERS = 2**24


class RaggedRows(NamedTuple):
    """Which slot each row is of, and which row, if any, a slot has.

    Rows may be more than are filled, where nobody knows how many there will be: a row that no slot has gives the index
    of any slot. Copies to it may or may not be made, and sums leave it out, whatever it holds.
    """

    slot_of_row_R: Tensor
    row_of_slot_TK: Tensor
    """-1 for a slot without a row."""

    @property
    def token_of_row_R(self) -> Tensor:
        return self.slot_of_row_R // self.row_of_slot_TK.shape[1]


def ragged_rows(slot_of_row_R: Tensor, num_tokens: int, top_k: int) -> RaggedRows:
    """Both directions of a map of rows to slots, each slot at most once; every row is filled."""
    row_of_slot = torch.full((num_tokens * top_k,), -1, dtype=torch.int32, device=slot_of_row_R.device)
    row_of_slot[slot_of_row_R.long()] = torch.arange(
        slot_of_row_R.shape[0], dtype=torch.int32, device=slot_of_row_R.device
    )
    return RaggedRows(slot_of_row_R, row_of_slot.view(num_tokens, top_k))


def gather_ragged_rows(x_TD: Tensor, rows: RaggedRows) -> Tensor:
    """``rows_RD``: of each row its token, whose gradient sums the token's rows in FP32, k ascending."""
    rows_RD: Tensor = _GatherRows.apply(x_TD, *rows)  # type: ignore[no-untyped-call]
    return rows_RD


def sum_ragged_rows(rows_RD: Tensor, rows: RaggedRows) -> Tensor:
    """``y_TD``: the rows of each token, added in FP32, k ascending, and cast once; zeros for a token without rows."""
    y_TD: Tensor = _SumRows.apply(rows_RD, *rows)  # type: ignore[no-untyped-call]
    return y_TD


@triton_on_cuda("triton_rows")
def spread_ragged_rows(x_TD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """`gather_ragged_rows` without a gradient. A row that no slot has holds another's numbers, on CUDA anything."""
    return x_TD.index_select(0, slot_of_row_R // row_of_slot_TK.shape[1])


@triton_on_cuda("triton_rows", dtypes=FLOATS)
def add_ragged_rows(rows_RD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """`sum_ragged_rows` without a gradient."""
    return add_in_blocks(rows_RD, slot_of_row_R, row_of_slot_TK)


def add_in_blocks(rows_RD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """The reference, which takes memory that a kernel does not."""
    num_rows, num_channels = rows_RD.shape
    num_tokens, top_k = row_of_slot_TK.shape
    if not num_tokens:
        return rows_RD.new_empty(0, num_channels)
    row_in_order_R = slot_of_row_R.argsort()
    slot_in_order_R = slot_of_row_R.index_select(0, row_in_order_R)
    is_filled_R = row_of_slot_TK.reshape(-1).index_select(0, slot_in_order_R) == row_in_order_R
    token_in_order_R = torch.where(is_filled_R, slot_in_order_R // top_k, num_tokens)
    width = max(1, BLOCK_NUMBERS // max(1, num_rows, num_tokens))
    if width >= num_channels:
        return _add_block(rows_RD, row_of_slot_TK, row_in_order_R, token_in_order_R)
    y_TD = rows_RD.new_empty(num_tokens, num_channels)
    for start in range(0, num_channels, width):
        block = slice(start, start + width)
        y_TD[:, block] = _add_block(rows_RD[:, block], row_of_slot_TK, row_in_order_R, token_in_order_R)
    return y_TD


def _add_block(rows_RB: Tensor, row_of_slot_TK: Tensor, row_in_order_R: Tensor, token_in_order_R: Tensor) -> Tensor:
    dtype = torch.promote_types(rows_RB.dtype, torch.float32)
    num_tokens = len(row_of_slot_TK)
    # One token more, behind the others, takes the rows that no slot has.
    y_TB = torch.zeros(num_tokens + 1, rows_RB.shape[1], dtype=dtype, device=rows_RB.device)
    if rows_RB.is_cpu:
        # There, index_add_ goes through its index in order: a quarter of the time of K passes with a mask.
        y_TB.index_add_(0, token_in_order_R, rows_RB.index_select(0, row_in_order_R).to(dtype))
    elif len(rows_RB):
        for row_T in row_of_slot_TK.unbind(1):
            # No row of a token is row 0 for an instant: it may hold anything, and is not added.
            y_TB[:-1] += rows_RB.index_select(0, row_T.clamp(min=0)).masked_fill((row_T < 0).unsqueeze(1), 0)
    # No view of the others: autograd lets nobody change a view in place that a Function has returned.
    return y_TB.resize_(num_tokens, rows_RB.shape[1]).to(rows_RB.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_row_R, row_of_slot_TK)
        return spread_ragged_rows(x_TD, slot_of_row_R, row_of_slot_TK)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return add_ragged_rows(grad_RD, *ctx.saved_tensors), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_row_R, row_of_slot_TK)
        return add_ragged_rows(rows_RD, slot_of_row_R, row_of_slot_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return spread_ragged_rows(grad_TD, *ctx.saved_tensors), None, None
