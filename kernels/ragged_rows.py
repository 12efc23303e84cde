"""Copies of tokens to their rows and sums of a token's rows, where a token may have fewer than K of them.

Shapes: T tokens, K slots per token, D hidden size, R rows (at most T*K). A slot is one (token, k) pair, numbered
``token * K + k``; it has one row or none. Indices are int32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    num_tokens = len(row_of_slot_TK)
    if not num_tokens:
        return rows_RD.new_empty(0, num_channels)
    add = _adding_in_bags(slot_of_row_R, row_of_slot_TK) if rows_RD.is_cpu else partial(_add_by_k, row_of_slot_TK)
    width = max(1, BLOCK_NUMBERS // max(1, num_rows, num_tokens))
    if width >= num_channels or (rows_RD.is_cpu and rows_RD.dtype == _sum_dtype(rows_RD)):
        return add(rows_RD)
    y_TD = rows_RD.new_empty(num_tokens, num_channels)
    for start in range(0, num_channels, width):
        block = slice(start, start + width)
        y_TD[:, block] = add(rows_RD[:, block])
    return y_TD


def _adding_in_bags(slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Callable[[Tensor], Tensor]:
    """Sums on a CPU, where ``embedding_bag`` adds in the order of its index, of FP32 rows without a copy."""
    num_tokens, top_k = row_of_slot_TK.shape
    row_R = torch.arange(len(slot_of_row_R), device=slot_of_row_R.device)
    is_filled_R = row_of_slot_TK.reshape(-1).index_select(0, slot_of_row_R) == row_R
    # One bag more, behind those of the tokens, takes the rows that no slot has.
    row_in_order_R = torch.where(is_filled_R, slot_of_row_R, num_tokens * top_k).argsort()
    start_of_bag = nn.functional.pad((row_of_slot_TK >= 0).sum(1).cumsum(0), (1, 0))

    def add(rows_RB: Tensor) -> Tensor:
        sums_TB = nn.functional.embedding_bag(row_in_order_R, rows_RB.to(_sum_dtype(rows_RB)), start_of_bag, mode="sum")
        # No view of the others: autograd lets nobody change a view in place that a Function has returned.
        return sums_TB.resize_(num_tokens, rows_RB.shape[1]).to(rows_RB.dtype)

    return add


def _add_by_k(row_of_slot_TK: Tensor, rows_RB: Tensor) -> Tensor:
    """Sums on a device where the order of others is left to chance."""
    y_TB = torch.zeros(len(row_of_slot_TK), rows_RB.shape[1], dtype=_sum_dtype(rows_RB), device=rows_RB.device)
    for row_T in row_of_slot_TK.unbind(1) if len(rows_RB) else ():
        # No row of a token is row 0 for an instant: it may hold anything, and is not added.
        y_TB += rows_RB.index_select(0, row_T.clamp(min=0)).masked_fill((row_T < 0).unsqueeze(1), 0)
    return y_TB.to(rows_RB.dtype)


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


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
