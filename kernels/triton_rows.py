"""Copies of tokens to their rows, and sums of a token's rows: each token is read or written once, in 16-byte pieces.

Shapes: T tokens (of one program, inside a kernel), K rows per token, D hidden size, R = T*K rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

# 64 bytes of BF16 for each of 128 threads: four loads of 16 bytes in flight.
NUMBERS_PER_PROGRAM = 4096
CHANNELS_PER_PROGRAM = 1024
TOKENS_PER_PROGRAM = 256  # of few channels, probabilities above all: more would leave most of a GPU idle


# Counts of tokens change from step to step: a kernel for those that 16 divides would be compiled when one first does.
@triton.jit(do_not_specialize=["num_tokens"])
def _spread_kernel(
    x_ptr,
    row_of_slot_ptr,
    rows_ptr,
    num_tokens,
    num_channels,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_token_T = tokens_T < num_tokens
    is_inside_TD = is_token_T[:, None] & (channels_D < num_channels)[None, :]
    x_TD = tl.load(x_ptr + tokens_T[:, None].to(tl.int64) * num_channels + channels_D[None, :], mask=is_inside_TD)
    for k in tl.static_range(K):
        rows_T = tl.load(row_of_slot_ptr + tokens_T * K + k, mask=is_token_T, other=0).to(tl.int64)
        is_row_TD = is_inside_TD & (rows_T >= 0)[:, None]  # of ragged rows, some slots have none
        tl.store(rows_ptr + rows_T[:, None] * num_channels + channels_D[None, :], x_TD, mask=is_row_TD)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_kernel(
    rows_ptr,
    row_of_slot_ptr,
    y_ptr,
    num_tokens,
    num_channels,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_token_T = tokens_T < num_tokens
    is_inside_TD = is_token_T[:, None] & (channels_D < num_channels)[None, :]
    y_TD = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        rows_T = tl.load(row_of_slot_ptr + tokens_T * K + k, mask=is_token_T, other=0).to(tl.int64)
        is_row_TD = is_inside_TD & (rows_T >= 0)[:, None]
        rows_TD = tl.load(rows_ptr + rows_T[:, None] * num_channels + channels_D[None, :], mask=is_row_TD, other=0.0)
        y_TD += rows_TD.to(tl.float32)
    places_TD = tokens_T[:, None].to(tl.int64) * num_channels + channels_D[None, :]
    tl.store(y_ptr + places_TD, y_TD.to(y_ptr.dtype.element_ty), mask=is_inside_TD)


def spread_rows(x_TD: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """See `routing.spread_rows`. Goes token by token: a gather by row would read each token K times from memory."""
    rows_RD = torch.empty(token_of_row_R.shape[0], x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    grid, blocks = _tiles(*x_TD.shape)
    _spread_kernel[grid](
        x_TD.contiguous(), row_of_slot_TK.contiguous(), rows_RD, *x_TD.shape, K=row_of_slot_TK.shape[1], **blocks
    )
    return rows_RD


def add_rows(rows_RD: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """See `routing.add_rows`."""
    num_tokens, top_k = row_of_slot_TK.shape
    y_TD = torch.empty(num_tokens, rows_RD.shape[1], dtype=rows_RD.dtype, device=rows_RD.device)
    grid, blocks = _tiles(*y_TD.shape)
    _add_kernel[grid](rows_RD.contiguous(), row_of_slot_TK.contiguous(), y_TD, *y_TD.shape, K=top_k, **blocks)
    return y_TD


def spread_ragged_rows(x_TD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """See `ragged_rows.spread_ragged_rows`."""
    return spread_rows(x_TD, slot_of_row_R, row_of_slot_TK)


def add_ragged_rows(rows_RD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """See `ragged_rows.add_ragged_rows`."""
    return add_rows(rows_RD, row_of_slot_TK)


def _tiles(num_tokens: int, num_channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and block sizes; tokens on the first axis of the grid, the one that may pass 65,535."""
    channels = min(CHANNELS_PER_PROGRAM, triton.next_power_of_2(num_channels))
    tokens = min(TOKENS_PER_PROGRAM, NUMBERS_PER_PROGRAM // channels)
    return (triton.cdiv(num_tokens, tokens), triton.cdiv(num_channels, channels)), {
        "BLOCK_T": tokens,
        "BLOCK_D": channels,
    }
