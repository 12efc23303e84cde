"""Rows written straight into the memories of other GPUs over NVLink, in 16-byte pieces, and the flags that follow them.

Shapes: T tokens and C copies (of one program, inside a kernel), J ranks of a token, K rows of a copy, W words of a row,
D numbers of a row, P ranks of the group. Places in memory are counted in 64 bits: a memory may hold more than 2 GiB.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe_strategy.kernels.peer_copy import Peers

# NVLink, not an SM, sets the pace: with 24 SMs of SM100 DeepEP moves 643 GB/s, with 64 of them 726 (its README). The
# other SMs multiply meanwhile. A program of 32 warps has an SM to itself, and each of its threads four pieces of 16
# bytes in flight, 1.5 MB in all: 0.9 TB/s times 1.5 microseconds.
NUM_PROGRAMS = 24
WARPS_PER_PROGRAM = 32
PIECES_PER_STEP = 4096
WORDS_PER_ROW_AND_STEP = 1024
ROWS_PER_STEP = 512  # of few words, ids above all

# Sums hold FP32 of all that they add, and read what a copy has only once they know that it goes anywhere: copies that
# may come are many times those that do come.
NUMBERS_PER_STEP = 8192
COPIES_PER_LOOK = 64

BYTES_PER_PIECE = 16
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _row_pointers(addresses_ptr, first_byte, ranks, places, is_put, bytes_per_row, dtype, ALIGNMENT: tl.constexpr):
    """Where the rows begin. Stores are as wide as these are aligned, which only the launcher knows."""
    addresses = tl.load(addresses_ptr + ranks, mask=is_put, other=0)
    pointers = (addresses + first_byte + places.to(tl.int64) * bytes_per_row).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointers, ALIGNMENT)


# As in triton_rows.py, counts change from step to step, and with them where an array begins.
@triton.jit(do_not_specialize=["first_byte", "num_tokens"])
def _put_copies_kernel(
    x_ptr,
    addresses_ptr,
    first_byte: tl.int64,
    rank_ptr,
    place_ptr,
    num_tokens,
    pieces_per_row,
    WORDS_PER_PIECE: tl.constexpr,
    J: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    words_per_row = pieces_per_row * WORDS_PER_PIECE
    bytes_per_word: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    steps_per_row = tl.cdiv(words_per_row, BLOCK_W)
    for step in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T) * steps_per_row, tl.num_programs(0)):
        tokens_T = step // steps_per_row * BLOCK_T + tl.arange(0, BLOCK_T)
        words_W = step % steps_per_row * BLOCK_W + tl.arange(0, BLOCK_W)
        is_token_T = tokens_T < num_tokens
        is_word_W = words_W < words_per_row
        x_TW = tl.load(
            x_ptr + tokens_T[:, None].to(tl.int64) * words_per_row + words_W[None, :],
            mask=is_token_T[:, None] & is_word_W[None, :],
        )
        for j in tl.static_range(J):
            ranks_T = tl.load(rank_ptr + tokens_T * J + j, mask=is_token_T, other=-1)
            is_put_T = ranks_T >= 0
            places_T = tl.load(place_ptr + tokens_T * J + j, mask=is_put_T, other=0)
            rows_T = _row_pointers(
                addresses_ptr,
                first_byte,
                ranks_T,
                places_T,
                is_put_T,
                words_per_row * bytes_per_word,
                x_ptr.dtype.element_ty,
                WORDS_PER_PIECE * bytes_per_word,
            )
            tl.store(rows_T[:, None] + words_W[None, :], x_TW, mask=is_put_T[:, None] & is_word_W[None, :])


@triton.jit
def _put_sums_of_tile(
    rows_ptr,
    addresses_ptr,
    first_byte,
    row_of_slot_ptr,
    rank_ptr,
    place_ptr,
    copies_C,
    num_copies,
    num_channels,
    NUMBERS_PER_PIECE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    bytes_per_number: tl.constexpr = dtype.primitive_bitwidth // 8
    ranks_C = tl.load(rank_ptr + copies_C, mask=copies_C < num_copies, other=-1)
    is_put_C = ranks_C >= 0
    targets_C = _row_pointers(
        addresses_ptr,
        first_byte,
        ranks_C,
        tl.load(place_ptr + copies_C, mask=is_put_C, other=0),
        is_put_C,
        num_channels * bytes_per_number,
        dtype,
        NUMBERS_PER_PIECE * bytes_per_number,
    )
    for start in range(0, num_channels, BLOCK_D):
        channels_D = start + tl.arange(0, BLOCK_D)
        is_inside_CD = is_put_C[:, None] & (channels_D < num_channels)[None, :]
        sums_CD = tl.zeros((copies_C.shape[0], BLOCK_D), tl.float32)
        for k in tl.static_range(K):
            rows_C = tl.load(row_of_slot_ptr + copies_C.to(tl.int64) * K + k, mask=is_put_C, other=-1).to(tl.int64)
            is_row_CD = is_inside_CD & (rows_C >= 0)[:, None]
            places_CD = rows_C[:, None] * num_channels + channels_D[None, :]
            sums_CD += tl.load(rows_ptr + places_CD, mask=is_row_CD, other=0.0).to(tl.float32)
        tl.store(targets_C[:, None] + channels_D[None, :], sums_CD.to(dtype), mask=is_inside_CD)


@triton.jit(do_not_specialize=["first_byte", "num_copies"])
def _put_sums_kernel(
    rows_ptr,
    addresses_ptr,
    first_byte: tl.int64,
    row_of_slot_ptr,
    rank_ptr,
    place_ptr,
    num_copies,
    pieces_per_row,
    NUMBERS_PER_PIECE: tl.constexpr,
    K: tl.constexpr,
    LOOK_C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    for look in range(tl.program_id(0), tl.cdiv(num_copies, LOOK_C), tl.num_programs(0)):
        looked_at_C = look * LOOK_C + tl.arange(0, LOOK_C)
        ranks_C = tl.load(rank_ptr + looked_at_C, mask=looked_at_C < num_copies, other=-1)
        if tl.max(ranks_C, 0) >= 0:
            for first in range(look * LOOK_C, look * LOOK_C + LOOK_C, BLOCK_C):
                _put_sums_of_tile(
                    rows_ptr,
                    addresses_ptr,
                    first_byte,
                    row_of_slot_ptr,
                    rank_ptr,
                    place_ptr,
                    first + tl.arange(0, BLOCK_C),
                    num_copies,
                    pieces_per_row * NUMBERS_PER_PIECE,
                    NUMBERS_PER_PIECE,
                    K,
                    BLOCK_D,
                )


@triton.jit(do_not_specialize=["first_byte", "rank", "number"])
def _signal_kernel(addresses_ptr, first_byte: tl.int64, rank, number, num_ranks, BLOCK_P: tl.constexpr):
    ranks_P = tl.arange(0, BLOCK_P)
    is_rank_P = ranks_P < num_ranks
    flags_P = (tl.load(addresses_ptr + ranks_P, mask=is_rank_P, other=0) + first_byte).to(tl.pointer_type(tl.int32))
    # The puts came from earlier kernels of this stream; a release at system scope shows them, too, to other GPUs.
    tl.debug_barrier()
    tl.atomic_xchg(flags_P + rank, number, mask=is_rank_P, sem="release", scope="sys")


@triton.jit(do_not_specialize=["number"])
def _wait_kernel(flags_ptr, number, num_ranks, BLOCK_P: tl.constexpr):
    ranks_P = tl.arange(0, BLOCK_P)
    is_rank_P = ranks_P < num_ranks
    # All at once, since a look takes a microsecond: one rank after the other would be 64 of them where all are there.
    lowest = number - 1
    while lowest < number:
        seen_P = tl.atomic_add(flags_ptr + ranks_P, 0, mask=is_rank_P, sem="acquire", scope="sys")
        lowest = tl.min(tl.where(is_rank_P, seen_P, number), 0)
    tl.debug_barrier()


def put_copies(x_TD: Tensor, peers: Peers, first_byte: int, rank_TJ: Tensor, place_TJ: Tensor) -> None:
    """See `peer_copy.put_copies`. Goes token by token: each is read once and written to its J ranks."""
    if not x_TD.numel() or not rank_TJ.numel():
        return
    x_TW, words_per_piece = _in_words(x_TD.contiguous(), first_byte)
    num_tokens, words_per_row = x_TW.shape
    block_w = min(WORDS_PER_ROW_AND_STEP, triton.next_power_of_2(words_per_row))
    block_t = min(ROWS_PER_STEP, PIECES_PER_STEP * words_per_piece // block_w)
    num_steps = triton.cdiv(num_tokens, block_t) * triton.cdiv(words_per_row, block_w)
    _put_copies_kernel[(min(NUM_PROGRAMS, num_steps),)](
        x_TW,
        peers.addresses_P,
        first_byte,
        rank_TJ.contiguous(),
        place_TJ.contiguous(),
        num_tokens,
        words_per_row // words_per_piece,
        WORDS_PER_PIECE=words_per_piece,
        J=rank_TJ.shape[1],
        BLOCK_T=block_t,
        BLOCK_W=block_w,
        num_warps=WARPS_PER_PROGRAM,
    )


def put_sums(
    rows_RD: Tensor, peers: Peers, first_byte: int, row_of_slot_CK: Tensor, rank_C: Tensor, place_C: Tensor
) -> None:
    """See `peer_copy.put_sums`."""
    (num_copies, top_k), num_channels = row_of_slot_CK.shape, rows_RD.shape[1]
    if not num_copies or not num_channels:
        return
    numbers_per_piece = _bytes_per_piece(num_channels * rows_RD.itemsize, first_byte) // rows_RD.itemsize
    block_d = min(WORDS_PER_ROW_AND_STEP, triton.next_power_of_2(num_channels))
    _put_sums_kernel[(min(NUM_PROGRAMS, triton.cdiv(num_copies, COPIES_PER_LOOK)),)](
        rows_RD.contiguous(),
        peers.addresses_P,
        first_byte,
        row_of_slot_CK.contiguous(),
        rank_C.contiguous(),
        place_C.contiguous(),
        num_copies,
        num_channels // numbers_per_piece,
        NUMBERS_PER_PIECE=numbers_per_piece,
        K=top_k,
        LOOK_C=COPIES_PER_LOOK,
        BLOCK_C=min(COPIES_PER_LOOK, NUMBERS_PER_STEP // block_d),
        BLOCK_D=block_d,
        num_warps=WARPS_PER_PROGRAM,
    )


def signal(flags_P: Tensor, peers: Peers, first_byte: int, rank: int, number: int) -> None:
    """See `peer_copy.signal`."""
    num_ranks = len(flags_P)
    _signal_kernel[(1,)](
        peers.addresses_P,
        first_byte,
        rank,
        number,
        num_ranks,
        BLOCK_P=triton.next_power_of_2(num_ranks),
        num_warps=1,
    )


def wait(flags_P: Tensor, number: int, *, seconds: float) -> None:
    """See `peer_copy.wait`. The stream waits without end; collectives behind it run into NCCL's own timeout."""
    num_ranks = len(flags_P)
    _wait_kernel[(1,)](flags_P, number, num_ranks, BLOCK_P=triton.next_power_of_2(num_ranks), num_warps=1)


def _in_words(x_TD: Tensor, first_byte: int) -> tuple[Tensor, int]:
    """The rows as words of at most 4 bytes, whatever they hold, and how many words are stored at once."""
    bytes_per_row = x_TD.shape[1] * x_TD.itemsize
    bytes_per_word = math.gcd(bytes_per_row, first_byte, x_TD.data_ptr(), max(WORDS))
    return x_TD.view(WORDS[bytes_per_word]), _bytes_per_piece(bytes_per_row, first_byte) // bytes_per_word


def _bytes_per_piece(bytes_per_row: int, first_byte: int) -> int:
    """How each row is aligned, if memories begin at multiples of 16."""
    return math.gcd(bytes_per_row, first_byte, BYTES_PER_PIECE)
