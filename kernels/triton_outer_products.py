"""`outer_products` on tensor cores: a tile of one expert's gradient per program.

Shapes: T tokens, E experts; inside the kernel R rows of one step, M and N the two sizes of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import IS_INTERPRETED


def _config(m: int, n: int, r: int, *, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_R": r}, num_warps=warps, num_stages=stages)


# The wide tiles need 2,048 rows and more per expert to fill a GPU's tensor cores, the last is for few rows.
CONFIGS = [
    _config(128, 256, 64, warps=8, stages=3),
    _config(128, 256, 64, warps=8, stages=4),
    _config(128, 128, 64, warps=8, stages=4),
    _config(128, 128, 64, warps=4, stages=4),
    _config(64, 128, 64, warps=4, stages=4),
]
# The interpreter takes a millisecond for each program and cannot choose between configurations.
INTERPRETED_CONFIGS = [_config(16, 16, 16, warps=4, stages=1)]


@triton.jit
def _kernel(
    left_ptr,
    right_ptr,
    token_of_row_ptr,
    offsets_ptr,
    sums_ptr,
    M,
    N,
    IS_GATHERED: tl.constexpr,
    IS_ADDED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # N innermost: programs that run together share the rows on the left.
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    expert = tl.program_id(1)
    left_M = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    right_N = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_left_M, is_right_N = left_M < M, right_N < N
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    if IS_ADDED and start == end:
        return
    # Bases of 64 bits, for which no row is too far, and places of 32 inside a tile: half the registers.
    left_ptr += start.to(tl.int64) * M
    sums_ptr += expert.to(tl.int64) * M * N
    rows_R = tl.arange(0, BLOCK_R)
    left_places_MR = rows_R[None, :] * M + left_M[:, None]
    if IS_GATHERED:
        right_ptr += right_N[None, :]
    else:
        right_ptr += start.to(tl.int64) * N
        right_places_RN = rows_R[:, None] * N + right_N[None, :]
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_R):
        is_row_R = rows_R < end - first
        left_MR = tl.load(left_ptr + left_places_MR, mask=is_row_R[None, :] & is_left_M[:, None], other=0.0)
        is_right_RN = is_row_R[:, None] & is_right_N[None, :]
        if IS_GATHERED:
            tokens_R = tl.load(token_of_row_ptr + first + rows_R, mask=is_row_R, other=0)
            right_RN = tl.load(right_ptr + tokens_R[:, None].to(tl.int64) * N, mask=is_right_RN, other=0.0)
        else:
            right_RN = tl.load(right_ptr + right_places_RN, mask=is_right_RN, other=0.0)
            right_ptr += BLOCK_R * N
        if UPCAST:  # the interpreter multiplies the bits of BF16 as if they were integers
            left_MR, right_RN = left_MR.to(tl.float32), right_RN.to(tl.float32)
        sum_MN = tl.dot(left_MR, right_RN, sum_MN)
        left_ptr += BLOCK_R * M
    # By halves: a whole tile of what was there before, beside the sum, does not fit the registers.
    halves_MN = tl.reshape(sum_MN, (BLOCK_M, 2, BLOCK_N // 2)).permute(0, 2, 1).split()
    for half in tl.static_range(2):
        half_N = tile % tiles_n * BLOCK_N + half * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        places_MN = left_M[:, None] * N + half_N[None, :]
        is_inside_MN = is_left_M[:, None] & (half_N < N)[None, :]
        half_MN = halves_MN[half]
        if IS_ADDED:
            half_MN += tl.load(sums_ptr + places_MN, mask=is_inside_MN, other=0.0)
        tl.store(sums_ptr + places_MN, half_MN, mask=is_inside_MN)


def _autotuned(**options: Any) -> Any:
    configs = INTERPRETED_CONFIGS if IS_INTERPRETED else CONFIGS
    return triton.autotune(configs, key=["M", "N", "IS_GATHERED"], **options)(_kernel)


_summing = _autotuned()
# What is tried runs many times over; a copy of the sums is made for it.
_adding = _autotuned(restore_value=["sums_ptr"])


def sum_outer_products(
    left_RM: Tensor, right_TN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None = None
) -> Tensor:
    """See `outer_products.outer_products`."""
    sizes = offsets_E.shape[0], left_RM.shape[1], right_TN.shape[1]
    sums_EMN = torch.empty(sizes, dtype=torch.float32, device=left_RM.device)
    _launch(left_RM, right_TN, offsets_E, sums_EMN, token_of_row_R=token_of_row_R, is_added=False)
    return sums_EMN


def add_outer_products(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor, accumulated_EMN: Tensor) -> None:
    """See `outer_products.add_outer_products`."""
    assert accumulated_EMN.is_contiguous()
    _launch(left_RM, right_RN, offsets_E, accumulated_EMN, token_of_row_R=None, is_added=True)


def _launch(
    left_RM: Tensor,
    right_TN: Tensor,
    offsets_E: Tensor,
    sums_EMN: Tensor,
    *,
    token_of_row_R: Tensor | None,
    is_added: bool,
) -> None:
    num_experts, m, n = sums_EMN.shape
    assert m * n < 2**31 and (token_of_row_R is None or token_of_row_R.dtype == torch.int32)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), num_experts

    left_RM, right_TN = left_RM.contiguous(), right_TN.contiguous()
    flags = {"IS_GATHERED": token_of_row_R is not None, "IS_ADDED": is_added, "UPCAST": IS_INTERPRETED}
    kernel = _adding if is_added else _summing
    kernel[grid](left_RM, right_TN, token_of_row_R, offsets_E, sums_EMN, m, n, **flags)
