"""A layer whose experts move to the ranks that have room, against the same layer with every expert at home.

Shapes: T tokens of a rank, K experts per token, E experts, D hidden size, R rows.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy import collectives
from lightning_moe_strategy.expert_parallel.dispatch import RowDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, run_beside
from lightning_moe_strategy.expert_parallel.redundant import RedundantDispatcher, Tally
from lightning_moe_strategy.expert_parallel.splits import SplitMemory
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.recompute import recompute_blocks
from tests import test_expert_modules
from tests.test_expert_chunks import HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, Block, inputs_of_rank, make, run, spread

# A GEMM of other sizes may round otherwise, and a weight's gradient is a sum that is grouped otherwise. FP32, relative
# to the largest number.
TOLERANCE = 1e-6
ROUTINGS = ("random", "all_to_one", "nobody_here", "no_tokens_on_some", "no_tokens_but_one")
Make = Callable[..., RowDispatcher]


def experts_on_ranks(kind: str, make_dispatcher: Make) -> tuple[nn.Module, RowDispatcher]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts = make(kind)
    options = {"experts": experts} if make_dispatcher is RedundantDispatcher else {}
    dispatcher = make_dispatcher(NUM_EXPERTS, mesh.get_group(), **options)
    attach(experts, dispatcher)
    spread(experts, mesh)
    return experts, dispatcher


def layer_on_ranks(kind: str, routing: str, make_dispatcher: Make) -> dict[str, Tensor]:
    experts, _ = experts_on_ranks(kind, make_dispatcher)
    result = run(experts, inputs_of_rank(kind, routing, dist.get_rank(), dist.get_world_size(), 7))
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in result.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        scale = tensor.abs().max() if tensor.numel() else 1.0
        assert actual[name].shape == tensor.shape
        assert not tensor.numel() or (actual[name] - tensor).abs().max() <= TOLERANCE * scale, name


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_computes_what_it_does_with_every_expert_at_home(request: Any, num_ranks: int, routing: str):
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    expected = ranks(layer_on_ranks, "ours", routing, RowDispatcher)
    for one, other in zip(expected, ranks(layer_on_ranks, "ours", routing, RedundantDispatcher), strict=True):
        assert_close(other, one)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_where_sums_are_exact_it_is_so_bit_by_bit(ranks4: Any, routing: str):
    """A module's own math on whole numbers: results, gradients of tokens, of routing weights and of experts."""
    expected = ranks4(layer_on_ranks, "linear", routing, RowDispatcher)
    for one, other in zip(expected, ranks4(layer_on_ranks, "linear", routing, RedundantDispatcher), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def module_on_ranks(variant: str, make_dispatcher: Make) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts = test_expert_modules.make(variant)
    attach(experts, make_dispatcher(experts.num_experts, mesh.get_group()))
    test_expert_modules.spread(experts, mesh, True)
    result = test_expert_modules.run(experts, test_expert_modules.inputs_of_rank("last_rank_idle", dist.get_rank()))
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in result.items()}


@pytest.mark.parametrize("variant", test_expert_modules.MAKERS)
def test_experts_of_other_people_move_as_well(ranks2: Any, variant: str):
    expected = ranks2(module_on_ranks, variant, RowDispatcher)
    for one, other in zip(expected, ranks2(module_on_ranks, variant, RedundantDispatcher), strict=True):
        assert_close(other, one)


def ids_of_rank(kind: str, rank: int, num_ranks: int) -> Tensor:
    generator = np.random.default_rng(rank)
    shares = np.ones(NUM_EXPERTS) if kind == "uniform" else 1 / np.arange(1, NUM_EXPERTS + 1) ** 1.2
    if kind == "all_to_one":
        return torch.full((32, TOP_K), 5)
    chosen = [generator.choice(NUM_EXPERTS, TOP_K, replace=False, p=shares / shares.sum()) for _ in range(32)]
    return torch.tensor(np.array(chosen))


def computed_rows(kind: str, max_imbalance: float) -> tuple[int, int, int]:
    """Rows this rank computes, experts it does it with, and experts that moved between any ranks."""
    dispatcher = RedundantDispatcher(NUM_EXPERTS, dist.group.WORLD, max_imbalance=max_imbalance)
    ids_TK = ids_of_rank(kind, dist.get_rank(), dist.get_world_size())
    plan = dispatcher.plan(ids_TK)
    rows_RD, probs_R, offsets_L = dispatcher.dispatch(torch.ones(32, 4), torch.ones(32, TOP_K), plan)
    assert len(rows_RD) == len(probs_R) == offsets_L[-1]
    return len(rows_RD), len(offsets_L), dispatcher.tally.moved_experts


@pytest.mark.parametrize("kind", ["uniform", "zipf", "all_to_one"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_computes_exactly_as_many_rows_as_it_has(request: Any, num_ranks: int, kind: str):
    results = request.getfixturevalue(f"ranks{num_ranks}")(computed_rows, kind, 1.0)
    assert [rows for rows, _, _ in results] == [32 * TOP_K] * num_ranks  # max / mean is 1.0
    num_local = NUM_EXPERTS // num_ranks
    assert all(num_local <= num_here <= 2 * num_local for _, num_here, _ in results)
    assert sum(num_here - num_local for _, num_here, _ in results) == results[0][2]


def test_an_allowed_imbalance_moves_fewer_experts_and_is_kept(ranks4: Any):
    exact, near = ranks4(computed_rows, "uniform", 1.0), ranks4(computed_rows, "uniform", 1.3)
    assert max(rows for rows, _, _ in near) <= 1.3 * 32 * TOP_K
    assert near[0][2] < exact[0][2]


@contextmanager
def noted_exchanges() -> Generator[list[str], None, None]:
    calls: list[str] = []
    exchange, gather = collectives._exchange, collectives._all_gather

    def spy(rows: Tensor, send_counts: list[int], *args: Any) -> Tensor:
        calls.append("rows" if rows.dim() == 2 else f"experts of {rows[:1].numel() if len(rows) else 0}")
        return exchange(rows, send_counts, *args)

    def spy_on_gather(gathered: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append("counts")
        return gather(gathered, *args, **kwargs)

    collectives._exchange, collectives._all_gather = spy, spy_on_gather
    try:
        yield calls
    finally:
        collectives._exchange, collectives._all_gather = exchange, gather


def kinds_of(calls: list[str]) -> list[str]:
    return [call.partition(" ")[0] for call in calls]


def block_on_ranks(recompute: bool, routing: str) -> tuple[dict[str, Tensor], list[str]]:
    """Results of one step, and this rank's exchanges in order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    experts, _ = experts_on_ranks("ours", RedundantDispatcher)
    block = Block(experts)
    if recompute:
        recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": experts})
    hidden_TD, _, _, grad_TD = inputs_of_rank("ours", routing, rank, num_ranks, 9)
    with noted_exchanges() as calls:
        hidden_TD.requires_grad_()
        y_TD = block(hidden_TD)
        y_TD.backward(grad_TD)
    result = {"y": y_TD.detach(), "hidden": hidden_TD.grad, **{name: p.grad for name, p in block.named_parameters()}}
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in result.items()}, calls


@pytest.mark.parametrize("routing", ["random", "no_tokens_on_some"])
def test_a_recomputed_block_has_the_same_gradients_and_plans_once(ranks4: Any, routing: str):
    expected, actual = ranks4(block_on_ranks, False, routing), ranks4(block_on_ranks, True, routing)
    for (one, _), (other, _) in zip(expected, actual, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for results in (expected, actual):
        exchanges = [kinds_of(calls) for _, calls in results]
        assert exchanges[1:] == exchanges[:-1]
    out = ["experts"] * 2 + ["rows"] * 3
    # Weights are fetched twice either way: kept nowhere, and needed in both passes.
    assert kinds_of(expected[0][1]) == ["counts", *out, *["experts"] * 2, "rows", *["experts"] * 2, *["rows"] * 2]
    assert kinds_of(actual[0][1]) == ["counts", *out, *out, "rows", *["experts"] * 2, *["rows"] * 2]


def own_checkpoint_on_ranks(how: str) -> dict[str, Tensor]:
    """A user's own recomputation around the block, of which the dispatcher knows nothing."""
    experts, _ = experts_on_ranks("ours", RedundantDispatcher)
    block = Block(experts)
    hidden_TD, _, _, grad_TD = inputs_of_rank("ours", "random", dist.get_rank(), dist.get_world_size(), 9)
    hidden_TD.requires_grad_()
    y_TD = block(hidden_TD) if how == "none" else checkpoint(block, hidden_TD, use_reentrant=how == "reentrant")
    y_TD.backward(grad_TD)
    result = {"y": y_TD.detach(), "hidden": hidden_TD.grad, **{name: p.grad for name, p in block.named_parameters()}}
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in result.items()}


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_a_users_own_recomputation_changes_nothing(ranks2: Any, how: str):
    for one, other in zip(ranks2(own_checkpoint_on_ranks, "none"), ranks2(own_checkpoint_on_ranks, how), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def backward_twice(kind: str) -> bool:
    experts, _ = experts_on_ranks(kind, RedundantDispatcher)
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank(kind, "nobody_here", dist.get_rank(), 2, 5)
    y_TD = experts(hidden_TD.requires_grad_(), ids_TK, weights_TK)
    y_TD.backward(grad_TD, retain_graph=True)
    first = hidden_TD.grad.clone()
    y_TD.backward(grad_TD)
    return torch.equal(hidden_TD.grad, 2 * first)


def test_a_graph_that_is_retained_fetches_weights_again(ranks2: Any):
    assert all(ranks2(backward_twice, "ours"))


def replay_of_other_ids() -> str:
    dispatcher, memory = RedundantDispatcher(4, dist.group.WORLD), SplitMemory()
    ids_TK = torch.zeros(3, 1, dtype=torch.int64)
    with dispatcher.remember_splits(memory, replaying=False):
        dispatcher.plan(ids_TK)
    with dispatcher.remember_splits(memory, replaying=True):
        dispatcher.plan(ids_TK)
    try:
        with dispatcher.remember_splits(memory, replaying=True):
            dispatcher.plan(ids_TK + 1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_replay_that_chose_other_experts_is_an_error(ranks2: Any):
    assert all("A recompute chose other experts" in error for error in ranks2(replay_of_other_ids))


def exchanges_of_a_step(x_needs_grad: list[bool], constant_experts_on: list[int]) -> list[str]:
    rank = dist.get_rank()
    experts, dispatcher = experts_on_ranks("linear", RedundantDispatcher)
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank("linear", "nobody_here", rank, 2, 5)
    with noted_exchanges() as calls:
        plan = dispatcher.plan(ids_TK)
        rows_RD, *_ = dispatcher.dispatch(hidden_TD.requires_grad_(x_needs_grad[rank]), weights_TK, plan)
        (weight,) = plan.weights_of_rows([experts.weight.to_local()])
        y_RD = torch.zeros(rows_RD.shape) if rank in constant_experts_on else rows_RD @ weight[0]
        dispatcher.combine(y_RD, plan).backward(grad_TD)
    return kinds_of(calls)


@pytest.mark.parametrize("x_needs_grad", [[True, False], [False, False]])
@pytest.mark.parametrize("constant_experts_on", [[], [0], [1], [0, 1]])
def test_every_rank_runs_every_exchange_whatever_needs_a_gradient(
    ranks2: Any, x_needs_grad: list[bool], constant_experts_on: list[int]
):
    calls = ranks2(exchanges_of_a_step, x_needs_grad, constant_experts_on)
    forward = ["counts", "experts", "rows", "rows", "rows"]
    assert calls == [[*forward, "experts", "rows", "experts", "rows", "rows"]] * 2


def events_of_a_step(recompute: bool) -> list[str]:
    """What travels, when it is issued and when it is waited for, and what the block computes meanwhile."""
    experts, dispatcher = experts_on_ranks("ours", RedundantDispatcher)
    block, events = Block(experts), list[str]()
    if recompute:
        recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": experts})
    run_beside(experts, lambda _: lambda: events.append("meanwhile"))
    exchange = collectives._exchange

    def kind(x: Tensor) -> str:
        return "rows" if x.dim() == 2 else "experts"

    def spy(x: Tensor, *args: Any) -> Tensor:
        events.append(f"{'issue' if len(args) == 4 else 'exchange'} {kind(x)}")
        return exchange(x, *args)

    hidden_TD, _, _, grad_TD = inputs_of_rank("ours", "random", dist.get_rank(), dist.get_world_size(), 9)
    collectives._exchange = spy
    try:
        with collectives.observed_waits(lambda x: events.append(f"wait {kind(x)}")):
            y_TD = block(hidden_TD.requires_grad_())
            events.append("backward")
            y_TD.backward(grad_TD)
    finally:
        collectives._exchange = exchange
    return [event for event, _ in groupby(events)]


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_on_their_way_while_rows_travel_and_others_compute(ranks4: Any, recompute: bool):
    events = ranks4(events_of_a_step, recompute)
    assert events[1:] == events[:-1]
    out = ["issue experts", "issue rows", "meanwhile", "wait rows", "wait experts"]
    back, gradients = ["issue rows", "wait rows"], ["exchange experts", "issue rows", "wait rows"]
    if recompute:
        assert events[0] == [*out, *back, "backward", *out, *back, *back, *gradients]
    else:
        assert events[0] == [*out, *back, "backward", "issue experts", *back, "wait experts", *gradients]


def copied_on_ranks(make_dispatcher: Make) -> dict[str, Tensor]:
    """A deep copy of a module with a dispatcher, whose weights are others."""
    experts, _ = experts_on_ranks("ours", make_dispatcher)
    copied = copy.deepcopy(experts)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    result = run(copied, inputs_of_rank("ours", "nobody_here", dist.get_rank(), dist.get_world_size(), 7))
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in result.items()}


def test_a_copy_of_the_module_sends_its_own_weights(ranks2: Any):
    for one, other in zip(
        ranks2(copied_on_ranks, RowDispatcher), ranks2(copied_on_ranks, RedundantDispatcher), strict=True
    ):
        assert_close(other, one)


def frozen_on_ranks(routing: str) -> tuple[bool, list[str]]:
    experts, _ = experts_on_ranks("ours", RedundantDispatcher)
    experts.requires_grad_(False)
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank("ours", routing, dist.get_rank(), 2, 5)
    with noted_exchanges() as calls:
        experts(hidden_TD.requires_grad_(), ids_TK, weights_TK).backward(grad_TD)
    return any(parameter.grad is not None for parameter in experts.parameters()), kinds_of(calls)


def test_frozen_experts_send_no_gradients(ranks2: Any):
    for has_gradients, calls in ranks2(frozen_on_ranks, "nobody_here"):
        assert not has_gradients and calls.count("experts") == 2 * 2


def sizes_of_weights(kind: str) -> tuple[list[int], list[int]]:
    """Bytes of the weights that a module was shown beside its own, after its forward and after its backward."""
    experts, dispatcher = experts_on_ranks(kind, RedundantDispatcher)
    shown: list[Tensor] = []
    plan_of = dispatcher.plan

    def plan_and_note(*args: Any) -> Any:
        plan = plan_of(*args)
        extend = plan.weights_of_rows

        def extend_and_note(parameters: Any) -> list[Tensor]:
            extended = extend(parameters)
            own = {parameter.data_ptr() for parameter in parameters}
            shown.extend(tensor.data for tensor in extended if tensor.data_ptr() not in own)
            return extended

        plan.weights_of_rows = extend_and_note
        return plan

    dispatcher.plan = plan_and_note
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank(kind, "nobody_here", dist.get_rank(), 2, 5)
    y_TD = experts(hidden_TD, ids_TK, weights_TK)
    after_forward = [tensor.untyped_storage().nbytes() for tensor in shown]
    y_TD.backward(grad_TD)
    return after_forward, [tensor.untyped_storage().nbytes() for tensor in shown]


@pytest.mark.parametrize("kind", ["ours", "linear"])
def test_weights_of_others_are_in_memory_only_while_they_compute(ranks2: Any, kind: str):
    (receiver, giver) = ranks2(sizes_of_weights, kind)
    assert giver == ([], [])  # it computes with its own alone, and copies none of them
    assert receiver[0] and set(receiver[0] + receiver[1]) == {0}


def bytes_of_weights(kind: str) -> tuple[int, int]:
    """What this rank is sent in a step, by the operations and by the plan: fetched twice, gradients once."""
    experts, dispatcher = experts_on_ranks("ours", RedundantDispatcher)
    ids_TK = ids_of_rank(kind, dist.get_rank(), dist.get_world_size())
    num_bytes, original = [], collectives._exchange

    def spy(rows: Tensor, *args: Any) -> Tensor:
        received = original(rows, *args)
        num_bytes.append(received.nbytes if rows.dim() == 3 else 0)
        return received

    collectives._exchange = spy
    try:
        experts(torch.randn(32, HIDDEN), ids_TK, torch.rand(32, TOP_K)).sum().backward()
    finally:
        collectives._exchange = original
    return sum(num_bytes), dispatcher.tally.moved_experts


def test_as_many_bytes_move_as_the_plan_says(ranks4: Any):
    of_one_expert = 4 * 3 * INTERMEDIATE * HIDDEN
    results = ranks4(bytes_of_weights, "zipf")
    moved = results[0][1]
    assert moved >= 2 and sum(size for size, _ in results) == 3 * moved * of_one_expert


class ExactProducts(torch.autograd.Function):
    """Rows times the weights of their experts, whose gradients are exact products added up in FP32."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights: Tensor, offsets_L: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights, offsets_L)
        return torch.cat([rows_RD[a:b] @ weight.T for a, b, weight in spans(offsets_L, weights)])

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, weights, offsets_L = ctx.saved_tensors
        of_weights = [grad_RD[a:b].float().T @ rows_RD[a:b].float() for a, b, _ in spans(offsets_L, weights)]
        of_rows = [grad_RD[a:b] @ weight for a, b, weight in spans(offsets_L, weights)]
        return torch.cat(of_rows), torch.stack(of_weights), None


def spans(offsets_L: Tensor, weights: Tensor) -> list[tuple[int, int, Tensor]]:
    ends = offsets_L.tolist()
    return list(zip([0, *ends], ends, weights, strict=False))


def gradient_under_bf16(make_dispatcher: Make, grad_dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """What a parameter of this rank gets, its exact sum in FP64, and how many experts have moved."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(7)
    weights, grad_RD = (torch.randn(NUM_EXPERTS, *size, HIDDEN, generator=generator).bfloat16() for size in ([16], []))
    dispatcher = make_dispatcher(NUM_EXPERTS, dist.group.WORLD)
    own = slice(rank * dispatcher.num_local_experts, (rank + 1) * dispatcher.num_local_experts)
    parameter = weights[own].clone().requires_grad_()
    parameter.grad_dtype = grad_dtype
    ids_TK = ids_of_rank("zipf", rank, dist.get_world_size())
    x_TD = torch.randn(len(ids_TK), HIDDEN, generator=generator.manual_seed(rank)).bfloat16()
    plan = dispatcher.plan(ids_TK)
    rows_RD, _, offsets_L = dispatcher.dispatch(x_TD, torch.ones(ids_TK.shape), plan)
    rows_RD = ExactProducts.apply(rows_RD, *plan.weights_of_rows([parameter]), offsets_L)
    dispatcher.combine(rows_RD, plan).backward(grad_RD[:1].expand(len(ids_TK), -1))
    # All rows have the same gradient, and an expert's is its product with their sum.
    sum_ED = torch.zeros(NUM_EXPERTS, HIDDEN, dtype=torch.float64)
    sum_ED.index_add_(0, ids_TK.reshape(-1), x_TD.double().repeat_interleave(TOP_K, 0))
    dist.all_reduce(sum_ED)
    exact = grad_RD[0].double().view(1, -1, 1) * sum_ED[own].unsqueeze(1)
    return parameter.grad, exact, getattr(dispatcher, "tally", Tally()).moved_experts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_moved_experts_gradient_is_not_rounded_on_its_way_home(request: Any, num_ranks: int):
    """Of BF16 weights whose parameter takes FP32: the sum of exact products, as with every expert at home."""
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    for make_dispatcher in (RowDispatcher, RedundantDispatcher):
        for grad, exact, moved in ranks(gradient_under_bf16, make_dispatcher, torch.float32):
            assert grad.dtype == torch.float32 and bool(moved) == (make_dispatcher is RedundantDispatcher)
            # Where a part is rounded to BF16 on the way, 1e-3 of it is lost.
            assert (grad - exact).abs().max() <= TOLERANCE * exact.abs().max()


def mlp_gradients_under_bf16(make_dispatcher: Make) -> list[Tensor]:
    """Of our own experts' kernel, what parameters of this rank that take FP32 get."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(7)
    dispatcher = make_dispatcher(NUM_EXPERTS, dist.group.WORLD)
    own = slice(rank * dispatcher.num_local_experts, (rank + 1) * dispatcher.num_local_experts)
    sizes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    weights = [torch.randn(NUM_EXPERTS, *size, generator=generator).bfloat16()[own] for size in sizes]
    for weight in weights:
        weight.requires_grad_().grad_dtype = torch.float32
    ids_TK = ids_of_rank("zipf", rank, dist.get_world_size())
    x_TD, grad_TD = (torch.randn(len(ids_TK), HIDDEN, generator=generator).bfloat16() for _ in range(2))
    plan = dispatcher.plan(ids_TK)
    rows_RD, probs_R, offsets_L = dispatcher.dispatch(x_TD, torch.ones(ids_TK.shape), plan)
    y_TD = dispatcher.combine(expert_mlp(rows_RD, probs_R, *plan.weights_of_rows(weights), offsets_L), plan)
    y_TD.backward(grad_TD)
    return [weight.grad for weight in weights]


def test_our_experts_gradients_are_not_rounded_either(ranks4: Any):
    at_home, moved = (ranks4(mlp_gradients_under_bf16, d) for d in (RowDispatcher, RedundantDispatcher))
    for one, other in zip(chain(*at_home), chain(*moved), strict=True):
        assert other.dtype == torch.float32
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


def test_a_parameter_that_takes_bf16_gets_the_sum_rounded_once(ranks4: Any):
    wide, narrow = (ranks4(gradient_under_bf16, RedundantDispatcher, d) for d in (torch.float32, torch.bfloat16))
    for (one, _, moved), (other, _, _) in zip(wide, narrow, strict=True):
        assert moved and other.dtype == torch.bfloat16 and torch.equal(other, one.bfloat16())


def test_frozen_integers_move_as_they_are(ranks2: Any):
    assert all(ranks2(integers_moved))


def integers_moved() -> bool:
    dispatcher, rank = RedundantDispatcher(4, dist.group.WORLD), dist.get_rank()
    plan = dispatcher.plan(torch.zeros(6, 1, dtype=torch.int64))
    dispatcher.dispatch(torch.ones(6, 4), torch.ones(6, 1), plan)
    (weights,) = plan.weights_of_rows([torch.full((2, 3), 10 * rank, dtype=torch.uint8)])
    return weights.tolist() == [[0] * 3] * 2 if rank == 0 else weights.tolist() == [[10] * 3] * 2 + [[0] * 3]


def syncs_of_a_forward() -> int:
    dispatcher = RedundantDispatcher(NUM_EXPERTS, dist.group.WORLD)
    ids_TK = ids_of_rank("zipf", dist.get_rank(), 2)

    class Count(torch.overrides.TorchFunctionMode):
        total = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.total += getattr(function, "__name__", "") in ("tolist", "item", "__int__", "__bool__", "cpu")
            return function(*args, **(kwargs or {}))

    with Count():
        plan = dispatcher.plan(ids_TK)
        rows_RD, *_ = dispatcher.dispatch(torch.randn(32, HIDDEN), torch.rand(32, TOP_K), plan)
        plan.weights_of_rows([torch.randn(NUM_EXPERTS // 2, 4, 4)])
        dispatcher.combine(rows_RD, plan)
    return Count.total


def test_a_layer_waits_once_for_the_device(ranks2: Any):
    assert ranks2(syncs_of_a_forward) == [1, 1]


def test_the_same_layer_can_run_forward_without_gradients(ranks2: Any):
    plain = ranks2(evaluated, RowDispatcher)
    for one, other in zip(plain, ranks2(evaluated, RedundantDispatcher), strict=True):
        assert (one - other).abs().max() <= TOLERANCE * one.abs().max()


@torch.no_grad()
def evaluated(make_dispatcher: Make) -> Tensor:
    experts, _ = experts_on_ranks("ours", make_dispatcher)
    result: Tensor = experts(*inputs_of_rank("ours", "nobody_here", dist.get_rank(), 2, 5)[:3])
    return result


def bad_ids() -> str:
    try:
        RedundantDispatcher(8, dist.group.WORLD).plan(torch.tensor([[0, 8], [1, 9]]))
    except ValueError as error:
        return str(error)
    return ""


def test_ids_of_no_expert_are_an_error(ranks2: Any):
    assert all("2 of 4 expert ids are not below num_experts(8)" in text for text in ranks2(bad_ids))


@pytest.mark.parametrize("assumed, num_extra", [("balanced", 0), ("worst", 1)])
def test_under_assumed_routing_a_fake_group_of_64_computes_even_rows(assumed: Any, num_extra: int):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        dispatcher = RedundantDispatcher(256, dist.group.WORLD, assumed)
        with FakeTensorMode():
            x_TD = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
            gate_up, down = torch.empty(4, 32, 32, dtype=torch.bfloat16), torch.empty(4, 32, 16, dtype=torch.bfloat16)
            parameters = [gate_up.requires_grad_(), down.requires_grad_()]
            plan = dispatcher.plan(torch.empty(64, 8, dtype=torch.int64))
            rows_RD, probs_R, offsets_L = dispatcher.dispatch(x_TD, torch.empty(64, 8), plan)
            here = plan.weights_of_rows(parameters)
            y_TD = dispatcher.combine(expert_mlp(rows_RD, probs_R, *here, offsets_L), plan)
            y_TD.sum().backward()
        assert rows_RD.shape == (64 * 8, 32) and y_TD.shape == (64, 32)
        assert bool(dispatcher.tally.moved_experts) == bool(num_extra)
        assert x_TD.grad.shape == x_TD.shape and gate_up.grad.shape == gate_up.shape
    finally:
        dist.destroy_process_group()
