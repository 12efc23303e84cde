"""`grouped_products.persistent_products`: as many programs as the GPU runs at once share the tiles of all experts.

Shapes: T tokens, E experts (of a padded number, inside the kernel); of one tile R rows, M deep, N wide.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import IS_INTERPRETED


def _config(r: int, n: int, m: int, *, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_R": r, "BLOCK_N": n, "BLOCK_M": m}, num_warps=warps, num_stages=stages)


# The wide tiles need 2,048 rows and more per expert to fill a GPU's tensor cores, the last are for few rows.
CONFIGS = [
    _config(128, 256, 64, warps=8, stages=3),
    _config(128, 256, 64, warps=8, stages=4),
    _config(128, 128, 64, warps=8, stages=4),
    _config(128, 128, 64, warps=4, stages=3),
    _config(64, 256, 64, warps=4, stages=4),
    _config(64, 128, 64, warps=4, stages=4),
]
# The interpreter takes a millisecond for each program and cannot choose between configurations.
INTERPRETED_CONFIGS = [_config(16, 16, 16, warps=4, stages=1)]

# Tiles of this many row blocks run together: they share a column of the weights while it is in the L2 cache.
ROW_BLOCKS_TOGETHER = 8

# Without a GPU: so few that a program has more than one tile to go through.
NUM_INTERPRETED_PROCESSORS = 2


@triton.autotune(INTERPRETED_CONFIGS if IS_INTERPRETED else CONFIGS, key=["M", "N", "stride_m", "MAX_ROWS"])
@triton.jit(do_not_specialize=["MAX_ROWS"])
def _kernel(
    rows_ptr,
    token_of_row_ptr,
    weights_ptr,
    offsets_ptr,
    out_ptr,
    num_experts,
    M,
    N,
    stride_m,
    stride_n,
    MAX_ROWS,
    IS_GATHERED: tl.constexpr,
    UPCAST: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    experts_E = tl.arange(0, PADDED_EXPERTS)
    is_expert_E = experts_E < num_experts
    ends_E = tl.load(offsets_ptr + experts_E, mask=is_expert_E, other=0)
    starts_E = tl.load(offsets_ptr + experts_E - 1, mask=is_expert_E & (experts_E > 0), other=0)
    # Row blocks up to an expert's last: an expert without rows has none.
    blocks_E = tl.cumsum(tl.cdiv(ends_E - starts_E, BLOCK_R), 0)
    num_row_blocks = tl.max(blocks_E, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_row_blocks * tiles_n, tl.num_programs(0)):
        first_block = tile // (TOGETHER * tiles_n) * TOGETHER
        num_together = tl.minimum(TOGETHER, num_row_blocks - first_block)
        place = tile % (TOGETHER * tiles_n)
        row_block, tile_n = first_block + place % num_together, place // num_together
        expert = tl.sum((blocks_E <= row_block).to(tl.int32), 0)
        blocks_before = tl.max(tl.where(blocks_E <= row_block, blocks_E, 0), 0)
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert)
        rows_R = start + (row_block - blocks_before) * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row_R = rows_R < end
        columns_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column_N = columns_N < N
        depth_M = tl.arange(0, BLOCK_M)
        if IS_GATHERED:
            sources_R = tl.load(token_of_row_ptr + rows_R, mask=is_row_R, other=0).to(tl.int64)
        else:
            sources_R = rows_R.to(tl.int64)
        rows_ptr_RM = rows_ptr + sources_R[:, None] * M + depth_M[None, :]
        # A base of 64 bits, and places of 32 inside one expert's weights: half the registers.
        weights_of_expert = weights_ptr + expert.to(tl.int64) * M * N
        places_MN = depth_M[:, None] * stride_m + columns_N[None, :] * stride_n
        sum_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for depth in range(0, M, BLOCK_M):
            is_inside_M = depth_M < M - depth
            tile_RM = tl.load(rows_ptr_RM + depth, mask=is_row_R[:, None] & is_inside_M[None, :], other=0.0)
            weights_MN = tl.load(
                weights_of_expert + depth * stride_m + places_MN,
                mask=is_inside_M[:, None] & is_column_N[None, :],
                other=0.0,
            )
            if UPCAST:  # the interpreter multiplies the bits of BF16 as if they were integers
                tile_RM, weights_MN = tile_RM.to(tl.float32), weights_MN.to(tl.float32)
            sum_RN = tl.dot(tile_RM, weights_MN, sum_RN)
        out_RN = out_ptr + rows_R[:, None].to(tl.int64) * N + columns_N[None, :]
        tl.store(out_RN, sum_RN.to(out_ptr.dtype.element_ty), mask=is_row_R[:, None] & is_column_N[None, :])


def persistent_products(
    rows_TM: Tensor, weights_EMN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None = None
) -> Tensor:
    """See `grouped_products.persistent_products`."""
    num_experts, m, n = weights_EMN.shape
    assert m * n < 2**31 and (token_of_row_R is None or token_of_row_R.dtype == torch.int32)
    if weights_EMN.stride() not in ((m * n, n, 1), (m * n, 1, m)):
        weights_EMN = weights_EMN.contiguous()
    rows_TM, num_rows = rows_TM.contiguous(), rows_TM.shape[0] if token_of_row_R is None else token_of_row_R.shape[0]
    out_RN = torch.empty((num_rows, n), dtype=rows_TM.dtype, device=rows_TM.device)
    if num_rows == 0:
        return out_RN

    def grid(meta: dict[str, int]) -> tuple[int]:
        # A multiprocessor's shared memory has room for the stages of one wide tile, or of two of the smallest.
        per_processor = 2 if meta["BLOCK_R"] * meta["BLOCK_N"] <= 64 * 128 else 1
        return (per_processor * _num_processors(rows_TM.device),)

    _kernel[grid](
        rows_TM,
        token_of_row_R,
        weights_EMN,
        offsets_E,
        out_RN,
        num_experts,
        m,
        n,
        weights_EMN.stride(1),
        weights_EMN.stride(2),
        triton.next_power_of_2(num_rows),
        IS_GATHERED=token_of_row_R is not None,
        UPCAST=IS_INTERPRETED,
        PADDED_EXPERTS=triton.next_power_of_2(num_experts),
        TOGETHER=ROW_BLOCKS_TOGETHER,
    )
    return out_RN


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return NUM_INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
