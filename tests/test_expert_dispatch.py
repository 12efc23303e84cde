"""Shapes: T tokens of a rank, K experts per token, E experts, D hidden size."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_moe_strategy import collectives
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.dispatch import EPDispatcher, LocalDispatcher
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 16, 8
# Each rank sums its own rows of a weight gradient, and GEMMs of other sizes round otherwise.
ACROSS_EP_TOLERANCE = 1e-6

# How the tokens of rank r (4 of them, unless said) choose among 8 experts.
ROUTINGS = ("random", "skewed", "all_to_one", "disjoint", "nobody_here", "no_tokens_on_some", "no_tokens_but_one")


def routing_of_rank(routing: str, rank: int, num_ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    num_tokens, local = 4 + rank, NUM_EXPERTS // num_ranks
    ids_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    if routing == "skewed":
        ids_TK[:, 0] = 1
    elif routing == "all_to_one":
        ids_TK[:] = 5  # twice the same expert: a router may do that
    elif routing == "disjoint":
        ids_TK = ids_TK % local + ((rank + 1) % num_ranks) * local
    elif routing == "nobody_here":
        ids_TK = ids_TK % local + (num_ranks - 1) * local
    elif routing == "no_tokens_on_some":
        ids_TK = ids_TK[: 0 if rank % 2 else None]
    elif routing == "no_tokens_but_one":
        ids_TK = ids_TK[: 0 if rank else None]
    return ids_TK


def inputs_of_rank(routing: str, rank: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TD, probs_TK, ids_TK and the gradient that comes back."""
    ids_TK = routing_of_rank(routing, rank, num_ranks)
    generator = torch.Generator().manual_seed(20 + rank)
    x_TD = torch.randn(len(ids_TK), HIDDEN, generator=generator)
    probs_TK = torch.rand(ids_TK.shape, generator=generator)
    return x_TD, probs_TK, ids_TK, torch.randn(x_TD.shape, generator=generator)


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up_EHD = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * 0.3
    return gate_up_EHD, torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * 0.3


def run_layer(dispatcher: EPDispatcher, inputs: tuple[Tensor, ...], rank: int = 0) -> dict[str, Tensor]:
    x_TD, probs_TK, ids_TK, grad_TD = inputs
    local = slice(rank * dispatcher.num_local_experts, (rank + 1) * dispatcher.num_local_experts)
    leaves = [t.clone().requires_grad_() for t in (x_TD, probs_TK, *(w[local] for w in weights()))]
    x_TD, probs_TK, gate_up, down = leaves
    plan = dispatcher.plan(ids_TK)
    rows_RD, probs_R, offsets_L = dispatcher.dispatch(x_TD, probs_TK, plan)
    y_TD = dispatcher.combine(expert_mlp(rows_RD, probs_R, gate_up, down, offsets_L), plan)
    grads = torch.autograd.grad(y_TD, leaves, grad_TD)
    names = ("x", "probs", "gate_up", "down")
    return {"y": y_TD.detach(), **dict(zip(names, grads, strict=True))}


def layer_on_ranks(routing: str) -> dict[str, Tensor]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
    return run_layer(dispatcher, inputs_of_rank(routing, rank, num_ranks), rank)


def reference(routing: str, num_ranks: int) -> list[dict[str, Tensor]]:
    """One process on everybody's tokens, cut into what each rank should have."""
    inputs = [inputs_of_rank(routing, rank, num_ranks) for rank in range(num_ranks)]
    whole = run_layer(LocalDispatcher(NUM_EXPERTS), tuple(torch.cat(parts) for parts in zip(*inputs, strict=True)))
    lengths = [len(x_TD) for x_TD, *_ in inputs]
    cut = {name: whole[name].split(lengths) for name in ("y", "x", "probs")}
    cut |= {name: whole[name].chunk(num_ranks) for name in ("gate_up", "down")}
    return [{name: pieces[rank] for name, pieces in cut.items()} for rank in range(num_ranks)]


def assert_equal_to_reference(results: list[dict[str, Tensor]], routing: str) -> None:
    for rank, (actual, expected) in enumerate(zip(results, reference(routing, len(results)), strict=True)):
        for name, tensor in expected.items():
            assert actual[name].shape == tensor.shape
            scale = tensor.abs().max() if tensor.numel() else 1.0
            error = ((actual[name] - tensor).abs().max() / scale) if tensor.numel() and scale else actual[name].sum()
            assert error <= ACROSS_EP_TOLERANCE, f"{routing}, rank {rank}, {name}: {error:.1e}"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_two_ranks_equal_one_process(ranks2: Any, routing: str):
    assert_equal_to_reference(ranks2(layer_on_ranks, routing), routing)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_four_ranks_equal_one_process(ranks4: Any, routing: str):
    assert_equal_to_reference(ranks4(layer_on_ranks, routing), routing)


def dispatched_rows(ids_TK: Tensor) -> tuple[list[int], list[int]]:
    """Who sent each row (100 * rank + 10 * token + k), and the offsets."""
    dispatcher = AllToAllDispatcher(4, dist.group.WORLD)
    slot = torch.arange(ids_TK.shape[0])[:, None] * 10 + torch.arange(ids_TK.shape[1])
    sender_TK = (100 * dist.get_rank() + slot).float()
    plan = dispatcher.plan(ids_TK)
    _, probs_R, offsets_L = dispatcher.dispatch(torch.zeros(len(ids_TK), 1), sender_TK, plan)
    return probs_R.int().tolist(), offsets_L.tolist()


def test_rows_are_sorted_by_expert_then_rank_then_token_then_k(ranks2: Any):
    (rows_0, offsets_0), (rows_1, offsets_1) = ranks2(dispatched_rows, torch.tensor([[3, 0], [0, 2], [1, 1]]))
    assert (rows_0, offsets_0) == ([1, 10, 101, 110, 20, 21, 120, 121], [4, 8])
    assert (rows_1, offsets_1) == ([11, 111, 0, 100], [2, 4])


def bitwise_on_one_rank() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    inputs = inputs_of_rank("random", dist.get_rank(), 2)
    local = run_layer(LocalDispatcher(NUM_EXPERTS), inputs)
    exchanged = run_layer(AllToAllDispatcher(NUM_EXPERTS, alone), inputs)
    assert all(torch.equal(local[name], exchanged[name]) for name in local)


def test_dispatchers_agree_bitwise_at_ep_1(ranks2: Any):
    ranks2(bitwise_on_one_rank)


def dtypes_under_bf16() -> tuple[torch.dtype, ...]:
    dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
    x_TD, probs_TK, ids_TK, _ = inputs_of_rank("random", dist.get_rank(), 2)
    probs_TK = (1 + probs_TK / 1024).requires_grad_()
    rows_RD, probs_R, _ = dispatcher.dispatch(x_TD.bfloat16(), probs_TK, dispatcher.plan(ids_TK))
    probs_R.square().sum().backward()
    assert torch.equal(probs_TK.grad, 2 * probs_TK.detach())
    return rows_RD.dtype, probs_R.dtype


def test_probabilities_travel_in_fp32_under_bf16(ranks2: Any):
    assert ranks2(dtypes_under_bf16) == [(torch.bfloat16, torch.float32)] * 2


def collectives_of_a_step(x_needs_grad: list[bool], constant_experts_on: list[int]) -> list[str]:
    """The order of this rank's exchanges when its tokens need no gradient or its experts return a constant."""
    rank, calls = dist.get_rank(), []
    original = collectives._exchange

    def spy(rows: Tensor, *args: Any) -> Tensor:
        calls.append(f"{rows.dim()}-D {str(rows.dtype).removeprefix('torch.')}")
        return original(rows, *args)

    collectives._exchange = spy
    try:
        dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
        x_TD, probs_TK, ids_TK, grad_TD = inputs_of_rank("nobody_here", rank, 2)
        x_TD.requires_grad_(x_needs_grad[rank])
        plan = dispatcher.plan(ids_TK)
        rows_RD, *_ = dispatcher.dispatch(x_TD, probs_TK, plan)
        y_RD = torch.zeros(rows_RD.shape) if rank in constant_experts_on else rows_RD * 2
        dispatcher.combine(y_RD, plan).backward(grad_TD)
    finally:
        collectives._exchange = original
    return calls


@pytest.mark.parametrize("x_needs_grad", [[True, False], [False, True], [False, False]])
@pytest.mark.parametrize("constant_experts_on", [[], [0], [1], [0, 1]])
def test_every_rank_runs_every_exchange_whatever_needs_a_gradient(
    ranks2: Any, x_needs_grad: list[bool], constant_experts_on: list[int]
):
    calls = ranks2(collectives_of_a_step, x_needs_grad, constant_experts_on)
    # Counts and ids; hidden states and probabilities out, results back; and the gradients of these three.
    forward = ["1-D int32", "2-D int32", "2-D float32", "2-D float32", "2-D float32"]
    assert calls == [forward + ["2-D float32"] * 3] * 2


def syncs_of_a_forward() -> int:
    """Times a forward brings numbers to the host."""
    dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
    x_TD, probs_TK, ids_TK, _ = inputs_of_rank("random", dist.get_rank(), 2)

    class Count(torch.overrides.TorchFunctionMode):
        total = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.total += getattr(function, "__name__", "") in ("tolist", "item", "__int__", "__bool__", "cpu")
            return function(*args, **(kwargs or {}))

    with Count():
        plan = dispatcher.plan(ids_TK)
        rows_RD, *_ = dispatcher.dispatch(x_TD, probs_TK, plan)
        dispatcher.combine(rows_RD, plan)
    return Count.total


def test_a_layer_waits_once_for_the_device(ranks2: Any):
    assert ranks2(syncs_of_a_forward) == [1, 1]


@pytest.mark.parametrize("assumed, expected_rows", [("balanced", 64 * 4), ("worst", 64 * 64 * 4), (None, None)])
def test_runs_on_fake_tensors_and_a_fake_group_of_64(assumed: Any, expected_rows: int | None):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        dispatcher = AllToAllDispatcher(256, dist.group.WORLD, assumed_routing=assumed)
        with FakeTensorMode():
            x_TD = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
            probs_TK = torch.empty(64, 4, requires_grad=True)
            gate_up, down = torch.empty(4, 32, 32, dtype=torch.bfloat16), torch.empty(4, 32, 16, dtype=torch.bfloat16)
            ids_TK = torch.empty(64, 4, dtype=torch.int64)
            if assumed is None:
                with pytest.raises(Exception, match=r"(?i)data.?dependent|aten._local_scalar_dense"):
                    dispatcher.plan(ids_TK)
                return
            plan = dispatcher.plan(ids_TK)
            rows_RD, probs_R, offsets_L = dispatcher.dispatch(x_TD, probs_TK, plan)
            y_RD = expert_mlp(rows_RD, probs_R, gate_up.requires_grad_(), down.requires_grad_(), offsets_L)
            y_TD = dispatcher.combine(y_RD, plan)
            y_TD.sum().backward()
        assert (rows_RD.shape, y_TD.shape, offsets_L.shape) == ((expected_rows, 32), (64, 32), (4,))
        assert x_TD.grad.shape == (64, 32) and probs_TK.grad.shape == (64, 4) and gate_up.grad.shape == gate_up.shape
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_assumed_routings_of_any_number_of_tokens_fit_their_permutation(num_tokens: int):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        for assumed in ("balanced", "worst"):
            plan = AllToAllDispatcher(12, dist.group.WORLD, assumed).plan(torch.zeros(num_tokens, 2, dtype=torch.int64))
            splits, rows = plan.splits, plan.rows
            assert sum(splits.num_sent) == 2 * num_tokens
            num_rows = sum(splits.num_received)
            assert num_rows == plan.routing.offsets_E[-1] == len(rows.slot_of_row_R)
            assert rows.row_of_slot_TK.shape == (sum(splits.copies_received), 2)
            assert rows.row_of_slot_TK.view(-1)[rows.slot_of_row_R.long()].tolist() == list(range(num_rows))
            for copies, num_rows in zip(splits.copies_sent, splits.num_sent, strict=True):
                assert copies <= num_rows <= 2 * copies
    finally:
        dist.destroy_process_group()


def construction_errors() -> list[str]:
    texts = []
    for num_experts, assumed in ((7, None), (8, "worst")):
        try:
            AllToAllDispatcher(num_experts, dist.group.WORLD, assumed)
        except ValueError as error:
            texts.append(str(error))
    try:
        AllToAllDispatcher(8, dist.group.WORLD).plan(torch.tensor([[0, 8], [1, 9]]))
    except ValueError as error:
        texts.append(str(error))
    return texts


def test_errors_name_the_numbers(ranks2: Any):
    for indivisible, not_fake, bad_ids in ranks2(construction_errors):
        assert "ep(2) must divide num_experts(7)" in indivisible
        assert "assumed_routing('worst')" in not_fake and "'gloo'" in not_fake
        assert "2 of 4 expert ids are not below num_experts(8)" in bad_ids


def test_a_plan_of_local_rows_says_which_token_each_is():
    ids_TK = torch.tensor([[1, 0], [0, 1]])
    plan = LocalDispatcher(2).plan(ids_TK)
    assert plan.token_of_row_R.tolist() == [0, 1, 0, 1]
