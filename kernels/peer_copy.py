"""One-sided copies between the ranks of a group: each writes to where the others will read, and tells them when.

Shapes: P ranks of the group, N bytes of each rank's memory, T tokens, J ranks a token may go to, D numbers of a row,
R rows, C copies, K rows a copy may have. Ranks, rows and places are int32.

Each function has a Triton form for CUDA that waits for the device nowhere; the torch one works on shared memory of
processes on one host. Offsets in bytes are multiples of an item's size; where they and a row's bytes are multiples of
16, Triton moves 16 bytes at a time.
"""

import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import FLOATS, triton_on_cuda
from lightning_moe_strategy.kernels.ragged_rows import add_in_blocks

# Between two looks at the flags a process gives its core to those it waits for: tests run more ranks than cores.
SECONDS_BETWEEN_LOOKS = 5e-5


class Peers(NamedTuple):
    """The same bytes on each rank of a group (symmetric memory), which every rank reads and writes."""

    memories: tuple[Tensor, ...]
    """uint8 [N]: each rank's, as this process sees it."""
    addresses_P: Tensor
    """int64, on the device: where each begins, as this process sees it. Multiples of 16."""


@triton_on_cuda("triton_peer_copy")
def put_copies(x_TD: Tensor, peers: Peers, first_byte: int, rank_TJ: Tensor, place_TJ: Tensor) -> None:
    """Token t becomes row ``place_TJ[t, j]`` of the array in the memory of rank ``rank_TJ[t, j]``; no rank: -1.

    The array [*, D] has the dtype of ``x_TD``, which may be any, and begins ``first_byte`` into each memory. Of two
    copies to one place either may stay.
    """
    for rank, memory in enumerate(peers.memories):
        tokens, slots = (rank_TJ == rank).nonzero(as_tuple=True)
        rows_of(memory, first_byte, x_TD)[place_TJ[tokens, slots].long()] = x_TD[tokens]


@triton_on_cuda("triton_peer_copy", dtypes=FLOATS)
def put_sums(
    rows_RD: Tensor, peers: Peers, first_byte: int, row_of_slot_CK: Tensor, rank_C: Tensor, place_C: Tensor
) -> None:
    """A copy's rows, added as by `ragged_rows.sum_ragged_rows`, become one row of a rank's array.

    In FP32, k ascending, cast once; zeros for a copy whose rows are all -1. ``rank_C`` and ``place_C`` say where, as
    in `put_copies`; the array has the dtype of ``rows_RD``.
    """
    slots = (row_of_slot_CK.reshape(-1) >= 0).nonzero().flatten()
    slot_of_row_R = torch.zeros(len(rows_RD), dtype=torch.int64, device=rows_RD.device)
    slot_of_row_R[row_of_slot_CK.reshape(-1)[slots].long()] = slots
    sums_CD = add_in_blocks(rows_RD, slot_of_row_R, row_of_slot_CK)
    put_copies(sums_CD, peers, first_byte, rank_C[:, None], place_C[:, None])


@triton_on_cuda("triton_peer_copy")
def signal(flags_P: Tensor, peers: Peers, first_byte: int, rank: int, number: int) -> None:
    """Tell every rank, this one too, that what ``rank``, this one, has put is there: its flag becomes ``number``.

    The flags, int32 [P], begin ``first_byte`` into each memory; ``flags_P`` are this rank's own. A rank that has seen
    the number sees all that was put before it.
    """
    _keep_order()
    for memory in peers.memories:
        memory[first_byte : first_byte + flags_P.nbytes].view(torch.int32)[rank] = number


@triton_on_cuda("triton_peer_copy")
def wait(flags_P: Tensor, number: int, *, seconds: float) -> None:
    """Until every rank has signalled ``number`` or more: what they put before it can be read.

    On CUDA it is the stream that waits. On a CPU a RuntimeError after ``seconds`` names the ranks that are missing.
    """
    deadline = time.monotonic() + seconds
    while bool((flags_P < number).any()):
        if time.monotonic() > deadline:
            late = (flags_P < number).nonzero().flatten().tolist()
            raise RuntimeError(
                f"Ranks {late} of a group of {len(flags_P)} have not signalled exchange {number} within {seconds:g} s. "
                "All ranks of a group make the same exchanges: look at the output of those ranks for an earlier error, "
                "or raise the timeout of the process group."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)
    _keep_order()


def rows_of(memory: Tensor, first_byte: int, like: Tensor) -> Tensor:
    """The rows of a memory from a byte on, with the dtype and the width of ``like``: [*, D], a view."""
    bytes_per_row = like.shape[1] * like.itemsize
    num_rows = (len(memory) - first_byte) // bytes_per_row if bytes_per_row else 0
    array = memory[first_byte : first_byte + num_rows * bytes_per_row]
    return array.view(like.dtype).view(num_rows, like.shape[1])


_lock = threading.Lock()


def _keep_order() -> None:
    """What this process read and wrote before comes before what it reads and writes after, for all others.

    x86 keeps the order of stores by itself, ARM does not. Neither moves anything past a lock that is taken after it
    was released, and Python has no other fence.
    """
    for _ in range(2):
        with _lock:
            pass
