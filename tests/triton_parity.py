"""Every Triton kernel against the torch reference of its name. test_triton_parity.py runs this file interpreted, in a
process of its own; on a machine with a GPU and Triton ``pytest tests/triton_parity.py`` runs the compiled kernels.

Shapes: T tokens, K experts per token, E experts, D hidden, I intermediate, R rows, M and N sizes of a weight.
"""

import pytest
import torch

from lightning_moe_strategy.kernels import (
    on_cuda,
    triton_outer_products,
    triton_router,
    triton_routing,
    triton_rows,
    triton_swiglu,
)
from lightning_moe_strategy.kernels.outer_products import add_outer_products
from lightning_moe_strategy.kernels.ragged_rows import add_ragged_rows, ragged_rows, spread_ragged_rows
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
    if on_cuda.IS_INTERPRETED and dtype == torch.bfloat16:
        # Where a GPU rounds FP32 to BF16, the interpreter cuts off.
        expected_TD = (expected_TD.view(torch.int32) & -(2**16)).view(torch.float32)
    assert torch.equal(add_ragged_rows(y_RD, *rows), expected_TD.to(dtype))


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
