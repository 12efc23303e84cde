"""Every Triton kernel against the torch reference of its name. test_triton_parity.py runs this file interpreted, in a
process of its own; on a machine with a GPU and Triton ``pytest tests/triton_parity.py`` runs the compiled kernels.

Shapes: T tokens, K experts per token, E experts, D hidden, I intermediate, R rows, M and N sizes of a weight, C copies,
J ranks of a token.
"""

import pytest
import torch

from lightning_moe_strategy.kernels import (
    on_cuda,
    triton_outer_products,
    triton_peer_copy,
    triton_router,
    triton_routing,
    triton_rows,
    triton_swiglu,
)
from lightning_moe_strategy.kernels.outer_products import add_outer_products
from lightning_moe_strategy.kernels.peer_copy import Peers, put_copies, put_sums, signal, wait
from lightning_moe_strategy.kernels.ragged_rows import RaggedRows, add_ragged_rows, ragged_rows, spread_ragged_rows
from lightning_moe_strategy.kernels.router import choose_experts
from lightning_moe_strategy.kernels.routing import add_rows, gather_rows, sort_by_expert, spread_rows, sum_rows
from lightning_moe_strategy.kernels.swiglu import swiglu_prob, swiglu_prob_backward

DEVICE = "cpu" if on_cuda.IS_INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# fp32: exp of the GPU is good to two units in the last place, and sums have another order. Halves: one rounding, which
# may fall to the other side, and which the interpreter does not make.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_all_kernels_run_here_and_no_reference():
    """The tests below compare something with itself otherwise."""
    ids_TK = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    assert on_cuda._takes_triton(ids_TK, None)
    for function, module in (
        (sort_by_expert, triton_routing),
        (spread_rows, triton_rows),
        (add_rows, triton_rows),
        (spread_ragged_rows, triton_rows),
        (add_ragged_rows, triton_rows),
        (swiglu_prob, triton_swiglu),
        (swiglu_prob_backward, triton_swiglu),
        (choose_experts, triton_router),
        (add_outer_products, triton_outer_products),
        (put_copies, triton_peer_copy),
        (put_sums, triton_peer_copy),
        (signal, triton_peer_copy),
        (wait, triton_peer_copy),
    ):
        name = function.__wrapped__.__name__
        assert on_cuda._kernel(module.__name__.rpartition(".")[2], name) is getattr(module, name)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(0, 2, 4), (1, 1, 1), (5, 3, 7), (256, 1, 8), (150, 4, 64), (200, 3, 5)]
)
def test_the_sort_by_expert_is_the_stable_one(num_tokens, top_k, num_experts, dtype):
    ids_TK = torch.rand(num_tokens, num_experts, device=DEVICE).argsort(1)[:, :top_k].to(dtype)
    assert_same_routing(ids_TK, num_experts)


def test_all_tokens_to_one_expert_keep_their_order():
    assert_same_routing(torch.full((300, 2), 3, device=DEVICE), 6)


def test_ids_of_no_expert_end_up_behind_the_last_offset():
    ids_TK = torch.randint(0, 9, (200, 2), device=DEVICE)  # of 6 experts
    actual, expected = sort_by_expert(ids_TK, 6), sort_by_expert.__wrapped__(ids_TK, 6)
    num_valid = int(expected.offsets_E[-1])
    assert num_valid < 400
    assert torch.equal(actual.offsets_E, expected.offsets_E)
    assert torch.equal(actual.slot_of_row_R[:num_valid], expected.slot_of_row_R[:num_valid])
    assert torch.equal(actual.slot_of_row_R.sort().values.cpu(), torch.arange(400, dtype=torch.int32))


def assert_same_routing(ids_TK, num_experts):
    actual, expected = sort_by_expert(ids_TK, num_experts), sort_by_expert.__wrapped__(ids_TK, num_experts)
    for name, ours in actual._asdict().items():
        theirs = getattr(expected, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("num_tokens", "top_k", "hidden"), [(0, 2, 8), (7, 3, 1), (9, 1, 20), (33, 4, 1100)])
def test_gathers_and_sums_of_rows_are_bitwise_the_same_both_ways(num_tokens, top_k, hidden, dtype):
    ids_TK = torch.randint(0, 5, (num_tokens, top_k), device=DEVICE)
    _, tokens, rows, _ = sort_by_expert.__wrapped__(ids_TK, 5)
    x_TD = torch.randn(num_tokens, hidden, dtype=dtype, device=DEVICE, requires_grad=True)
    y_RD = torch.randn(num_tokens * top_k, hidden, dtype=dtype, device=DEVICE, requires_grad=True)
    gathered_RD, summed_TD = gather_rows(x_TD, tokens, rows), sum_rows(y_RD, tokens, rows)
    assert torch.equal(gathered_RD, spread_rows.__wrapped__(x_TD, tokens, rows))
    assert torch.equal(summed_TD, sums_of(y_RD, rows))
    (grad_TD,) = torch.autograd.grad(gathered_RD, x_TD, y_RD)
    (grad_RD,) = torch.autograd.grad(summed_TD, y_RD, x_TD)
    assert torch.equal(grad_TD, sums_of(y_RD, rows))
    assert torch.equal(grad_RD, spread_rows.__wrapped__(x_TD, tokens, rows))


def sums_of(rows_RD, row_of_slot_TK):
    if not on_cuda.IS_INTERPRETED or rows_RD.dtype != torch.bfloat16 or row_of_slot_TK.shape[1] == 1:
        return add_rows.__wrapped__(rows_RD, row_of_slot_TK)
    # Where a GPU rounds FP32 to BF16, the interpreter cuts off.
    sums_TD = add_rows.__wrapped__(rows_RD.float(), row_of_slot_TK)
    return (sums_TD.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_tokens", "hidden"), [(0, 3, 8), (40, 33, 1), (50, 33, 1100)])
def test_tokens_with_fewer_rows_than_slots_are_copied_and_summed(num_rows, num_tokens, hidden, dtype):
    slots = torch.randperm(num_tokens * 3, device=DEVICE)[:num_rows].int()
    rows = ragged_rows(slots, num_tokens, 3)
    x_TD, y_RD = (torch.randn(size, hidden, device=DEVICE).to(dtype) for size in (num_tokens, num_rows))
    assert torch.equal(spread_ragged_rows(x_TD, *rows), spread_ragged_rows.__wrapped__(x_TD, *rows))
    expected_TD = add_ragged_rows.__wrapped__(y_RD.float(), *rows)
    assert torch.equal(add_ragged_rows(y_RD, *rows), rounded(expected_TD, dtype))


def test_rows_that_no_slot_has_are_copied_to_nothing_and_added_to_nothing():
    rows = RaggedRows(
        torch.tensor([3, 0, 5, 2, 0, 0], dtype=torch.int32, device=DEVICE),
        torch.tensor([[1, -1], [3, 0], [-1, 2]], dtype=torch.int32, device=DEVICE),
    )
    x_TD, y_RD = torch.randn(3, 8, device=DEVICE), torch.randn(6, 8, device=DEVICE)
    y_RD[4:] = float("nan")
    assert torch.equal(add_ragged_rows(y_RD, *rows), add_ragged_rows.__wrapped__(y_RD, *rows))
    assert torch.equal(spread_ragged_rows(x_TD, *rows)[:4], spread_ragged_rows.__wrapped__(x_TD, *rows)[:4])


def rounded(x_TD, dtype):
    if on_cuda.IS_INTERPRETED and dtype == torch.bfloat16:
        # Where a GPU rounds FP32 to BF16, the interpreter cuts off.
        x_TD = (x_TD.view(torch.int32) & -(2**16)).view(torch.float32)
    return x_TD.to(dtype)


def test_strided_rows_and_expanded_gradients_are_taken():
    ids_TK = torch.randint(0, 5, (6, 2), device=DEVICE)
    _, tokens, rows, _ = sort_by_expert.__wrapped__(ids_TK, 5)
    x_TD = torch.randn(16, 6, device=DEVICE).t()
    assert torch.equal(spread_rows(x_TD, tokens, rows), x_TD.index_select(0, tokens))
    y_RD = torch.randn(12, 16, device=DEVICE, requires_grad=True)
    (grad_RD,) = torch.autograd.grad(sum_rows(y_RD, tokens, rows).sum(), y_RD)
    assert grad_RD.eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "intermediate"), [(0, 8), (5, 7), (3, 1040), (70, 64)])
def test_swiglu_and_its_gradients(num_rows, intermediate, dtype):
    h_RH = (4 * torch.randn(num_rows, 2 * intermediate, device=DEVICE)).to(dtype)
    h_RH[:1] = -100.0  # exp(100) is no FP32 number
    grad_RI = torch.randn(num_rows, intermediate, device=DEVICE).to(dtype)
    probs_R = torch.rand(num_rows, device=DEVICE)
    assert_close(swiglu_prob(h_RH, probs_R), swiglu_prob.__wrapped__(h_RH, probs_R), TOLERANCE[dtype])
    actual = swiglu_prob_backward(grad_RI, h_RH, probs_R)
    expected = swiglu_prob_backward.__wrapped__(grad_RI, h_RH, probs_R)
    assert torch.equal(actual[2], swiglu_prob(h_RH, probs_R))
    for ours, theirs, tolerance in zip(actual, expected, (TOLERANCE[dtype], 1e-5, TOLERANCE[dtype]), strict=True):
        assert_close(ours, theirs, tolerance)


def test_rows_past_those_given_are_neither_read_nor_written():
    """A tile is larger than the rows it is given; behind them lie NaNs, and stay."""
    memory_RH, out_RI = (torch.full((9, width), float("nan"), device=DEVICE) for width in (16, 8))
    memory_RH[:5] = torch.randn(5, 16, device=DEVICE)
    probs_R = torch.rand(5, device=DEVICE)
    out_RI[:5] = swiglu_prob(memory_RH[:5], probs_R)
    assert out_RI[:5].isfinite().all() and out_RI[5:].isnan().all()


@pytest.mark.parametrize("num_filled", [0, 1, 40, 70, 99])
def test_rows_that_are_not_filled_are_not_written(num_filled):
    """What is not written holds the NaNs that torch fills fresh memory with, if asked."""
    h_RH, grad_RI = torch.randn(70, 128, device=DEVICE), torch.randn(70, 64, device=DEVICE)
    probs_R = torch.rand(70, device=DEVICE)
    # The number lies where `offsets_E[-1:]` does: at no multiple of 16 bytes.
    num_rows = torch.tensor([0, num_filled], dtype=torch.int32, device=DEVICE)[-1:]
    whole = (swiglu_prob(h_RH, probs_R), *swiglu_prob_backward(grad_RI, h_RH, probs_R))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for forward, backward in (
            (swiglu_prob, swiglu_prob_backward),
            (swiglu_prob.__wrapped__, swiglu_prob_backward.__wrapped__),
        ):
            activated_RI = forward(h_RH, probs_R, num_rows=num_rows)
            parts = (activated_RI, *backward(grad_RI, h_RH, probs_R, num_rows=num_rows))
            for part, expected in zip(parts, whole, strict=True):
                assert_close(part[:num_filled], expected[:num_filled], 1e-5)
                # The reference on a GPU does not wait for the number.
                assert part[num_filled:].isnan().all() or (DEVICE == "cuda" and forward is swiglu_prob.__wrapped__)
    finally:
        torch.use_deterministic_algorithms(False)


def some_peers(num_bytes=2**18):
    """Memories of three ranks, all on this device, twice: for a kernel and its reference."""
    for _ in range(2):
        memories = tuple(torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(3))
        yield Peers(memories, torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE))


def assert_same_memories(actual, expected):
    assert all(map(torch.equal, actual.memories, expected.memories))
    assert any(memory.ne(0xA5).any() for memory in expected.memories)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.int8])
@pytest.mark.parametrize(("num_tokens", "width"), [(21, 1), (19, 7), (70, 8), (9, 1104), (5, 1101)])
def test_copies_to_other_ranks_are_bitwise_the_same(monkeypatch, num_tokens, width, dtype):
    monkeypatch.setattr(triton_peer_copy, "NUM_PROGRAMS", 2)  # each has several steps to do
    monkeypatch.setattr(triton_peer_copy, "ROWS_PER_STEP", 8)
    x_TD = (100 * torch.randn(num_tokens, width, device=DEVICE)).to(dtype)
    rank_TJ = torch.randint(-1, 3, (num_tokens, 2), dtype=torch.int32, device=DEVICE)
    place_TJ = torch.randperm(2 * num_tokens, device=DEVICE).view(num_tokens, 2).int()
    for first_byte in (0, 8 * x_TD.itemsize, x_TD.itemsize):
        ours, theirs = some_peers()
        put_copies(x_TD, ours, first_byte, rank_TJ, place_TJ)
        put_copies.__wrapped__(x_TD, theirs, first_byte, rank_TJ, place_TJ)
        assert_same_memories(ours, theirs)


def test_copies_of_tokens_that_lie_anywhere():
    """Strided, and at an address that is no multiple of a word."""
    rank_TJ = torch.tensor([[0], [2], [1]], dtype=torch.int32, device=DEVICE)
    for x_TD in (
        torch.randn(8, 3, device=DEVICE).t(),
        torch.randn(25, device=DEVICE).bfloat16()[1:].view(3, 8),
        torch.randn(3, 16, device=DEVICE).bfloat16()[:, 3:9],
    ):
        ours, theirs = some_peers()
        put_copies(x_TD, ours, 16, rank_TJ, rank_TJ)
        put_copies.__wrapped__(x_TD, theirs, 16, rank_TJ, rank_TJ)
        assert_same_memories(ours, theirs)


def test_copies_reach_places_behind_two_gibibytes():
    memory = torch.empty(2**31 + 2**17, dtype=torch.uint8, device=DEVICE)  # untouched memory takes no room
    peers = Peers((memory,), torch.tensor([memory.data_ptr()], device=DEVICE))
    x_TD = torch.randn(1, 1024, device=DEVICE)
    rank_TJ, place_TJ = (torch.full((1, 1), each, dtype=torch.int32, device=DEVICE) for each in (0, 2**19 + 1))
    put_copies(x_TD, peers, 2**16, rank_TJ, place_TJ)
    assert torch.equal(memory[2**31 + 2**16 + 2**12 :][: 2**12].view(torch.float32), x_TD[0])
    put_sums(2 * x_TD, peers, 2**31, torch.zeros_like(rank_TJ), rank_TJ[0], torch.ones_like(rank_TJ[0]))
    assert torch.equal(memory[2**31 + 2**12 :][: 2**12].view(torch.float32), 2 * x_TD[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_copies", "width"), [(30, 200, 1), (50, 33, 7), (40, 50, 1104)])
def test_sums_for_other_ranks_are_bitwise_the_same(monkeypatch, num_rows, num_copies, width, dtype):
    monkeypatch.setattr(triton_peer_copy, "NUM_PROGRAMS", 2)
    rows = ragged_rows(torch.randperm(num_copies * 3, device=DEVICE)[:num_rows].int(), num_copies, 3)
    y_RD = torch.randn(num_rows, width, device=DEVICE).to(dtype)
    rank_C = torch.randint(-1, 3, (num_copies,), dtype=torch.int32, device=DEVICE)
    rank_C[20:150] = -1  # more than are looked at together
    place_C = torch.randperm(num_copies, device=DEVICE).int()
    ours, theirs = some_peers(2**19)
    put_sums(y_RD, ours, 48, rows.row_of_slot_TK, rank_C, place_C)
    sums_CD = add_ragged_rows.__wrapped__(y_RD.float(), *rows)
    put_copies.__wrapped__(rounded(sums_CD, dtype), theirs, 48, rank_C[:, None], place_C[:, None])
    assert_same_memories(ours, theirs)
    if DEVICE == "cuda" or dtype != torch.bfloat16:
        put_sums.__wrapped__(y_RD, theirs, 48, rows.row_of_slot_TK, rank_C, place_C)
        assert_same_memories(ours, theirs)


@pytest.mark.parametrize("num_ranks", [1, 3, 40])
def test_signals_raise_a_flag_everywhere_and_end_the_wait(num_ranks):
    memories = tuple(torch.zeros(256, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks))
    peers = Peers(memories, torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE))
    flags = [memory[32 : 32 + 4 * num_ranks].view(torch.int32) for memory in memories]
    for rank in range(num_ranks):
        signal(flags[rank], peers, 32, rank, 7 + rank)
    for flags_P in flags:
        wait(flags_P, 7, seconds=1.0)
        assert flags_P.tolist() == list(range(7, 7 + num_ranks))
    assert all(memory[:32].eq(0).all() and memory[32 + 4 * num_ranks :].eq(0).all() for memory in memories)


ROUTERS = [
    {"num_experts": 8, "top_k": 2},
    {"num_experts": 20, "top_k": 3},
    {"num_experts": 64, "top_k": 8},
    {"num_experts": 5, "top_k": 5},
    {"num_experts": 16, "top_k": 4, "num_groups": 4, "top_k_groups": 2},
    {"num_experts": 60, "top_k": 6, "num_groups": 3, "top_k_groups": 2},
    {"num_experts": 6, "top_k": 2, "num_groups": 6, "top_k_groups": 3},
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sizes", ROUTERS, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_the_router_chooses_weighs_and_differentiates_alike(sizes, scoring, normalize, has_bias):
    rule = {"scoring": scoring, "normalize_top_k": normalize, "routed_scaling": 2.5, **sizes}
    num_experts = rule.pop("num_experts")
    logits_TE = torch.randn(37, num_experts, device=DEVICE, requires_grad=True)
    bias_E = 0.3 * torch.randn(num_experts, device=DEVICE) if has_bias else None
    weights_TK, ids_TK = choose_experts(logits_TE, bias_E, **rule)
    expected_TK, expected_ids_TK = choose_experts.__wrapped__(logits_TE, bias_E, **rule)
    assert ids_TK.dtype == torch.int64 and torch.equal(ids_TK, expected_ids_TK)
    assert_close(weights_TK, expected_TK, 3e-6)
    grad_TK = torch.randn_like(weights_TK)
    (grad_TE,), (expected_TE,) = (
        torch.autograd.grad(weights, logits_TE, grad_TK) for weights in (weights_TK, expected_TK)
    )
    # A softmax's gradient is a difference: what cancels is as large as the largest of a row.
    torch.testing.assert_close(grad_TE, expected_TE, rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_router_takes_the_lower_ids():
    rule = {"top_k": 3, "scoring": "softmax", "normalize_top_k": True}
    _, ids_TK = choose_experts(torch.zeros(2, 8, device=DEVICE), None, **rule)
    assert ids_TK.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("logit", [float("nan"), float("-inf"), float("inf"), -1e4])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ids_are_those_of_different_experts_whatever_the_logits(scoring, groups, logit):
    rule = {"top_k": 4, "scoring": scoring, "normalize_top_k": True}
    logits_TE = torch.full((3, 6), logit, device=DEVICE)
    logits_TE[1, 2:] = 0.0
    _, ids_TK = choose_experts(logits_TE, None, num_groups=groups[0], top_k_groups=groups[1], **rule)
    for ids in ids_TK.tolist():
        assert len(set(ids)) == 4 and set(ids) <= set(range(6))


def test_a_bias_that_closes_more_experts_than_it_may_closes_no_expert_twice():
    bias_E = torch.tensor([float("-inf"), 0.0, float("-inf"), float("-inf"), 0.0, float("-inf")], device=DEVICE)
    logits_TE = torch.randn(5, 6, device=DEVICE)
    _, ids_TK = choose_experts(logits_TE, bias_E, top_k=4, scoring="sigmoid", normalize_top_k=True)
    for ids in ids_TK.tolist():
        assert set(ids[:2]) == {1, 4} and len(set(ids)) == 4


def test_a_router_without_tokens():
    logits_TE = torch.empty(0, 6, device=DEVICE, requires_grad=True)
    weights_TK, ids_TK = choose_experts(logits_TE, None, top_k=2, scoring="softmax", normalize_top_k=True)
    assert weights_TK.shape == ids_TK.shape == (0, 2)
    weights_TK.sum().backward()
    assert logits_TE.grad.shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outer_products_are_added_in_fp32_and_nothing_else_is_read(dtype):
    offsets_E = torch.tensor([0, 21, 21, 38, 39], dtype=torch.int32, device=DEVICE)
    left_RM, right_RN = (torch.randn(45, size, device=DEVICE).to(dtype) for size in (24, 40))
    left_RM[39:], right_RN[39:] = float("nan"), float("nan")
    before_EMN = torch.randn(5, 24, 40, device=DEVICE)
    actual_EMN, expected_EMN = before_EMN.clone(), before_EMN.clone()
    add_outer_products(left_RM, right_RN, offsets_E, actual_EMN)
    add_outer_products.__wrapped__(left_RM, right_RN, offsets_E, expected_EMN)
    torch.testing.assert_close(actual_EMN, expected_EMN, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual_EMN[[0, 2]], before_EMN[[0, 2]])
    assert not torch.equal(actual_EMN[4], before_EMN[4])


def test_outer_products_of_no_rows_add_nothing():
    accumulated_EMN = torch.ones(2, 8, 8, device=DEVICE)
    no_rows = torch.empty(0, 8, dtype=torch.bfloat16, device=DEVICE)
    add_outer_products(no_rows, no_rows, torch.zeros(2, dtype=torch.int32, device=DEVICE), accumulated_EMN)
    assert accumulated_EMN.eq(1).all()


def assert_close(actual, expected, tolerance):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
