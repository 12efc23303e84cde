"""What one-sided copies write, where, and when others may read it, by the torch references.

Shapes: T tokens, J ranks of a token, D numbers of a row, R rows, C copies, K rows of a copy, P ranks.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe_strategy.kernels.peer_copy import Peers, put_copies, put_sums, signal, wait
from lightning_moe_strategy.kernels.ragged_rows import RaggedRows, ragged_rows, sum_ragged_rows

NUM_BYTES = 2**14


def some_peers(num_ranks: int, num_bytes: int = NUM_BYTES) -> Peers:
    """Ranks of one process, whose memories hold a pattern that no copy is likely to write."""
    return peers_of([torch.full((num_bytes,), 0xA5, dtype=torch.uint8) for _ in range(num_ranks)])


def peers_of(memories: list[Tensor]) -> Peers:
    return Peers(tuple(memories), torch.tensor([memory.data_ptr() for memory in memories]))


def bytes_of(row: Tensor) -> Tensor:
    return row.clone().view(torch.uint8)


def int32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.int8])
@pytest.mark.parametrize("width", [1, 7, 8])
def test_copies_arrive_at_their_places_and_nothing_else_changes(dtype: torch.dtype, width: int):
    torch.manual_seed(0)
    num_tokens, num_ranks, first_byte = 13, 3, 40
    x_TD = (100 * torch.randn(num_tokens, width)).to(dtype)
    # Two of a token's three ranks may be the same; every copy has a place of its own.
    rank_TJ = torch.randint(-1, num_ranks, (num_tokens, 3), dtype=torch.int32)
    place_TJ = torch.randperm(num_tokens * 3).view(num_tokens, 3).int()
    peers = some_peers(num_ranks)
    expected = [memory.clone() for memory in peers.memories]
    for token in range(num_tokens):
        for rank, place in zip(rank_TJ[token].tolist(), place_TJ[token].tolist(), strict=True):
            if rank >= 0:
                start = first_byte + place * width * x_TD.itemsize
                expected[rank][start : start + width * x_TD.itemsize] = bytes_of(x_TD[token])
    put_copies(x_TD, peers, first_byte, rank_TJ, place_TJ)
    assert (rank_TJ < 0).any() and all(map(torch.equal, peers.memories, expected))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (5, 8)])
def test_without_tokens_or_ranks_nothing_is_written(shape: tuple[int, int]):
    peers = some_peers(2)
    nowhere_TJ = torch.full((shape[0], 2), -1, dtype=torch.int32)
    put_copies(torch.randn(shape), peers, 0, nowhere_TJ, nowhere_TJ)
    no_rows_CK = torch.full((shape[0], 3), -1, dtype=torch.int32)
    put_sums(torch.randn(shape), peers, 0, no_rows_CK, nowhere_TJ[:, 0], nowhere_TJ[:, 0])
    assert all(memory.eq(0xA5).all() for memory in peers.memories)


def test_two_arrays_lie_side_by_side_in_one_memory():
    """Three rows of bfloat16 take the bytes 0 to 23, those of ids begin right behind."""
    peers = some_peers(2)
    x_TD, ids_TK = torch.randn(3, 4).bfloat16(), torch.arange(6, dtype=torch.int32).view(3, 2)
    rank_TJ, place_TJ = int32([1], [1], [1]), int32([2], [0], [1])
    put_copies(ids_TK, peers, 24, rank_TJ, place_TJ)
    put_copies(x_TD, peers, 0, rank_TJ, place_TJ)
    memory = peers.memories[1]
    assert torch.equal(memory[:24].view(torch.bfloat16).view(3, 4), x_TD[[1, 2, 0]])
    assert memory[24:48].view(torch.int32).view(3, 2).tolist() == [[2, 3], [4, 5], [0, 1]]
    assert memory[48:].eq(0xA5).all() and peers.memories[0].eq(0xA5).all()


def test_an_array_may_begin_behind_two_gibibytes():
    # A memory that is not touched takes no room.
    peers = peers_of([torch.empty(2**31 + 2**12, dtype=torch.uint8)])
    put_copies(torch.ones(1, 4), peers, 2**31 + 16, int32([0]), int32([2]))
    assert peers.memories[0][2**31 + 48 : 2**31 + 64].view(torch.float32).tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_are_those_of_ragged_rows_bit_by_bit(dtype: torch.dtype):
    torch.manual_seed(0)
    num_copies, top_k, width = 30, 4, 6
    slots = torch.randperm(num_copies * top_k)[:50].int()
    rows = ragged_rows(slots, num_copies, top_k)
    y_RD = (1e3 ** torch.rand(50, width)).to(dtype)
    rank_C = torch.randint(-1, 3, (num_copies,), dtype=torch.int32)
    place_C = torch.randperm(num_copies).int()
    ours, theirs = some_peers(3), some_peers(3)
    put_sums(y_RD, ours, 16, rows.row_of_slot_TK, rank_C, place_C)
    put_copies(sum_ragged_rows(y_RD, rows), theirs, 16, rank_C[:, None], place_C[:, None])
    assert (rows.row_of_slot_TK < 0).all(1).any(), "some copy has no rows, and becomes zeros"
    assert all(map(torch.equal, ours.memories, theirs.memories))
    assert not ours.memories[0].eq(0xA5).all()


def test_rows_that_no_slot_has_are_in_no_sum():
    """Of six rows four are filled; the others give slot 0 and hold anything."""
    y_RD = torch.tensor([[1.0], [2.0], [4.0], [8.0], [float("nan")], [float("inf")]])
    rows = RaggedRows(int32(3, 0, 5, 2, 0, 0), int32([1, -1], [3, 0], [-1, 2]))
    assert sum_ragged_rows(y_RD, rows).tolist() == [[2.0], [9.0], [4.0]]
    peers = some_peers(1)
    put_sums(y_RD, peers, 0, rows.row_of_slot_TK, int32(0, 0, 0), int32(2, 1, 0))
    assert peers.memories[0][:12].view(torch.float32).tolist() == [4.0, 9.0, 2.0]


def test_a_signal_reaches_all_ranks_in_the_place_of_its_own():
    peers = some_peers(3)
    flags_P = [memory[32:44].view(torch.int32) for memory in peers.memories]
    for flags in flags_P:
        flags.zero_()
    signal(flags_P[1], peers, 32, 1, 7)
    assert [flags.tolist() for flags in flags_P] == [[0, 7, 0]] * 3
    assert all(memory[:32].eq(0xA5).all() and memory[44:].eq(0xA5).all() for memory in peers.memories)


def test_waiting_ends_when_the_last_rank_has_signalled():
    peers = some_peers(2)
    flags_P = peers.memories[0][:8].view(torch.int32)
    flags_P.copy_(int32(5, 3))
    # The first is ahead, as ranks may be by one exchange.
    late = threading.Timer(0.2, signal, (flags_P, peers, 0, 1, 4))
    begin = time.monotonic()
    late.start()
    wait(flags_P, 4, seconds=10.0)
    assert time.monotonic() - begin >= 0.2 and flags_P.tolist() == [5, 4]
    wait(flags_P, 4, seconds=0.0)


def test_an_error_names_the_ranks_that_did_not_signal():
    with pytest.raises(RuntimeError, match=r"Ranks \[1, 3\] of a group of 4 .* exchange 9 within 0\.05 s"):
        wait(int32(9, 8, 10, 0), 9, seconds=0.05)


NUM_EXCHANGES = 300


def test_processes_read_what_was_put_before_the_signal(tmp_path: Path, ranks2: Any):
    """Two buffers take turns: what came by an exchange has been read before the next but one is put."""
    assert ranks2(exchange, str(tmp_path)) == [NUM_EXCHANGES] * 2


def exchange(folder: str) -> int:
    rank = torch.distributed.get_rank()
    paths = [f"{folder}/{each}" for each in range(2)]
    # The flags and, 64 bytes from the start on, two arrays of two rows of 1,000 numbers.
    size = 64 + 2 * 2 * 4000
    memories = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    torch.distributed.barrier()
    peers, flags_P = peers_of(memories), memories[rank][:8].view(torch.int32)
    num_right = 0
    for number in range(1, NUM_EXCHANGES + 1):
        start = 64 + number % 2 * 8000
        mine = torch.full((1, 1000), 1000 * number + rank, dtype=torch.int32)
        put_copies(mine, peers, start, int32([0, 1]), int32([rank, rank]))
        signal(flags_P, peers, 0, rank, number)
        wait(flags_P, number, seconds=30.0)
        received_PD = memories[rank][start : start + 8000].view(torch.int32).view(2, 1000)
        expected_P1 = torch.tensor([[1000 * number], [1000 * number + 1]], dtype=torch.int32)
        num_right += int(received_PD.eq(expected_P1).all())
    return num_right
