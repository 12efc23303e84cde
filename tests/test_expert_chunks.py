"""Shapes: T tokens of a rank, K experts per token, E experts, D hidden size."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_moe_strategy import FSDPCPEPStrategy, collectives
from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.expert_parallel import chunks
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.chunks import Chunking, bytes_of_row, joined
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach
from lightning_moe_strategy.expert_parallel.splits import piece_bounds
from lightning_moe_strategy.models.moe import Experts
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.simulation.memory import MemoryWatch

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 16, 8
# A token's result and gradient come from its own rows alone, but a GEMM of other sizes may round otherwise; a weight's
# gradient is a sum over tokens that chunks group otherwise. FP32, relative to the largest number.
TOLERANCE = 2e-6
ROUTINGS = ("random", "all_to_one", "nobody_here", "no_tokens_on_some", "no_tokens_but_one")


class LinearExperts(nn.Module):
    """Of whole numbers every sum is exact, so that its order does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, k = torch.where(ids == expert)
            rows = hidden[token] @ self.weight[expert].T
            out = out.index_add(0, token, rows * weights[token, k, None].to(hidden))
        return out


class NoisyExperts(LinearExperts):
    """Draws from the global generator."""

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden * torch.rand(len(hidden), 1).round(), ids, weights)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: Experts(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
    "linear": LinearExperts,
    "noisy": NoisyExperts,
}


def make(kind: str) -> nn.Module:
    experts, generator = MAKERS[kind](), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * 0.3 if kind == "ours" else (2 * values).round())
    return experts


def inputs_of_rank(kind: str, routing: str, rank: int, num_ranks: int, num_tokens: int) -> tuple[Tensor, ...]:
    """hidden_TD, expert_ids_TK, weights_TK and the gradient that comes back."""
    generator = torch.Generator().manual_seed(10 + rank)
    num_tokens += rank
    ids_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    local = NUM_EXPERTS // num_ranks
    if routing == "all_to_one":
        ids_TK = torch.rand(num_tokens, local, generator=generator).topk(TOP_K).indices
    elif routing == "nobody_here":
        ids_TK = ids_TK % local + (num_ranks - 1) * local
    elif routing == "no_tokens_on_some":
        ids_TK = ids_TK[: 0 if rank % 2 else None]
    elif routing == "no_tokens_but_one":
        ids_TK = ids_TK[: 0 if rank else None]
    values = [torch.randn(len(ids_TK), size, generator=generator) for size in (HIDDEN, TOP_K, HIDDEN)]
    hidden_TD, weights_TK, grad_TD = values if kind == "ours" else [(2 * value).round() for value in values]
    return hidden_TD, ids_TK, weights_TK, grad_TD


def run(experts: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs
    hidden_TD, weights_TK = (t.clone().requires_grad_() for t in (hidden_TD, weights_TK))
    torch.manual_seed(5)
    y_TD = experts(hidden_TD, ids_TK, weights_TK)
    y_TD.backward(grad_TD)
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y_TD.detach(), "hidden": hidden_TD.grad, "weights": weights_TK.grad, **grads}


def spread(experts: nn.Module, mesh: Any) -> None:
    for name, parameter in list(experts.named_parameters()):
        local = parameter.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
        setattr(experts, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))


def experts_on_ranks(kind: str, chunking: Chunking | None) -> tuple[nn.Module, AllToAllDispatcher]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts, dispatcher = make(kind), AllToAllDispatcher(NUM_EXPERTS, mesh.get_group())
    attach(experts, dispatcher, chunking)
    spread(experts, mesh)
    return experts, dispatcher


def layer_on_ranks(kind: str, routing: str, chunking: Chunking | None, num_tokens: int) -> dict[str, Tensor]:
    experts, _ = experts_on_ranks(kind, chunking)
    result = run(experts, inputs_of_rank(kind, routing, dist.get_rank(), dist.get_world_size(), num_tokens))
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in result.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        scale = tensor.abs().max() if tensor.numel() else 1.0
        assert actual[name].shape == tensor.shape
        assert not tensor.numel() or (actual[name] - tensor).abs().max() <= TOLERANCE * scale, name


ROW_BYTES = bytes_of_row(HIDDEN, list(Experts(1, HIDDEN, INTERMEDIATE).parameters()))
TIGHT = Chunking(chunks="adaptive", max_bytes=12 * ROW_BYTES)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("chunking", [Chunking(chunks=3), TIGHT], ids=["static", "adaptive"])
def test_a_layer_in_chunks_is_the_layer_at_once(ranks4: Any, routing: str, chunking: Chunking):
    expected = ranks4(layer_on_ranks, "ours", routing, None, 7)
    for one, other in zip(expected, ranks4(layer_on_ranks, "ours", routing, chunking, 7), strict=True):
        assert_close(other, one)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_where_sums_are_exact_it_is_so_bit_by_bit(ranks4: Any, routing: str):
    """A module's own math on whole numbers: results, gradients of tokens and of weights."""
    expected = ranks4(layer_on_ranks, "linear", routing, None, 7)
    for one, other in zip(expected, ranks4(layer_on_ranks, "linear", routing, Chunking(chunks=4), 7), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert routing != "all_to_one" or one is expected[0] or other["weight"].eq(0).all()


def test_noise_that_experts_draw_is_the_same_in_the_backward_pass():
    experts = make("noisy")
    attach(experts, LocalDispatcher(NUM_EXPERTS), Chunking(chunks=3))
    inputs = inputs_of_rank("noisy", "random", 0, 1, 12)
    result = run(experts, inputs)
    _, _, weights_TK, grad_TD = inputs
    # y is linear in the weights of its own token.
    assert torch.equal((weights_TK * result["weights"]).sum(1), (result["y"] * grad_TD).sum(1))
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(experts(*inputs[:3]), result["y"])


def test_weight_gradients_of_many_chunks_are_added_in_fp32():
    num_tokens = 17
    experts = LinearExperts().bfloat16()
    torch.nn.init.ones_(experts.weight)
    attach(experts, LocalDispatcher(NUM_EXPERTS), Chunking(chunks=num_tokens))
    ones_TD, ones_T1 = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16), torch.ones(num_tokens, 1)
    hidden_TD = ones_TD.clone()
    hidden_TD[0] = 256
    run(experts, (hidden_TD, torch.zeros(num_tokens, 1, dtype=torch.int64), ones_T1, ones_TD))
    # In bf16, 256 + 1 is 256.
    assert experts.weight.grad[0].eq(256 + 16).all() and experts.weight.grad.dtype == torch.bfloat16


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(NUM_EXPERTS, HIDDEN, generator=generator))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        logits_TE = self.router(hidden_TD)
        weights_TK, ids_TK = logits_TE.softmax(1).topk(TOP_K)
        return hidden_TD + self.experts(torch.tanh(hidden_TD), ids_TK, weights_TK)


def block_on_ranks(recompute: bool, chunking: Chunking) -> tuple[dict[str, Tensor], list[str]]:
    """Results of one step, and this rank's exchanges in order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    experts, _ = experts_on_ranks("ours", chunking)
    block = Block(experts)
    if recompute:
        recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": experts})
    hidden_TD, _, _, grad_TD = inputs_of_rank("ours", "no_tokens_on_some", rank, num_ranks, 9)
    with noted_exchanges() as calls:
        hidden_TD.requires_grad_()
        y_TD = block(hidden_TD)
        y_TD.backward(grad_TD)
    grads = {name: p.grad for name, p in block.named_parameters()}
    result = {"y": y_TD.detach(), "hidden": hidden_TD.grad, **grads}
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in result.items()}, calls


@contextmanager
def noted_exchanges() -> Generator[list[str], None, None]:
    calls: list[str] = []
    exchange = collectives._exchange

    def spy(rows: Tensor, *args: Any) -> Tensor:
        calls.append("counts" if rows.dim() == 1 else f"rows of {rows.shape[1]}")
        return exchange(rows, *args)

    collectives._exchange = spy
    try:
        yield calls
    finally:
        collectives._exchange = exchange


@pytest.mark.parametrize("chunking", [Chunking(chunks=3), TIGHT], ids=["static", "adaptive"])
def test_a_recomputed_block_has_the_same_gradients_and_agrees_on_chunks_once(ranks4: Any, chunking: Chunking):
    expected, actual = ranks4(block_on_ranks, False, chunking), ranks4(block_on_ranks, True, chunking)
    for (one, _), (other, _) in zip(expected, actual, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for results in (expected, actual):
        exchanges = [calls for _, calls in results]
        assert exchanges[1:] == exchanges[:-1]
    before, after = expected[0][1], actual[0][1]
    assert before.count("counts") == after.count("counts") >= 1
    # A chunk: forward 3 (hidden states, probabilities, results), again in its backward, 3 backward; and once more.
    num_chunks = before.count("rows of 16") // 6
    assert num_chunks > 1 and after.count("rows of 16") == 8 * num_chunks


def collectives_of_a_step(x_needs_grad: list[bool], constant_experts_on: list[int]) -> list[str]:
    rank = dist.get_rank()
    experts, _ = experts_on_ranks("linear", Chunking(chunks=2))
    if rank in constant_experts_on:
        experts.weight.requires_grad_(False)
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank("linear", "nobody_here", rank, 2, 5)
    with noted_exchanges() as calls:
        experts(hidden_TD.requires_grad_(x_needs_grad[rank]), ids_TK, weights_TK).backward(grad_TD)
    return calls


@pytest.mark.parametrize("x_needs_grad", [[True, False], [False, False]])
@pytest.mark.parametrize("constant_experts_on", [[], [0], [0, 1]])
def test_every_rank_runs_every_exchange_whatever_needs_a_gradient(
    ranks2: Any, x_needs_grad: list[bool], constant_experts_on: list[int]
):
    calls = ranks2(collectives_of_a_step, x_needs_grad, constant_experts_on)
    # Counts; in each chunk ids, and three exchanges forward, forward again and backward.
    assert calls[0] == calls[1] and len(calls[0]) == 1 + 2 * 10


def chosen_on_ranks(routing: str, chunking: Chunking, num_tokens: int) -> tuple[list[int], list[int], int]:
    """Rows received in each chunk, tokens of each, and how often numbers came to the host."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
    ids_TK = inputs_of_rank("ours", routing, rank, num_ranks, num_tokens)[1]

    class Count(torch.overrides.TorchFunctionMode):
        total = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.total += getattr(function, "__name__", "") in ("tolist", "item", "__int__", "__bool__", "cpu")
            return function(*args, **(kwargs or {}))

    with Count():
        chosen = chunking.choose(dispatcher, ids_TK, bytes_per_row=ROW_BYTES)
    tokens = [chunk.tokens.stop - chunk.tokens.start for chunk in chosen]
    assert sum(tokens) == len(ids_TK)
    for chunk in chosen:
        # The counts of a chunk are those that its tokens have by themselves.
        plan = dispatcher.plan(ids_TK[chunk.tokens])
        for name in ("num_received", "num_sent", "copies_received", "copies_sent"):
            assert getattr(plan.splits, name) == getattr(chunk.splits, name)
        again = dispatcher.plan(ids_TK[chunk.tokens], chunk.splits)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.routing, plan.routing, strict=True))
    return [sum(chunk.splits.num_received) for chunk in chosen], tokens, Count.total


@pytest.mark.parametrize("routing", ROUTINGS)
def test_adaptive_chunks_keep_below_the_budget_and_even_routing_has_one(ranks4: Any, routing: str):
    limit = 12
    tight = ranks4(chosen_on_ranks, routing, TIGHT, 9)
    assert len({len(rows) for rows, _, _ in tight}) == 1
    assert max(max(rows) for rows, _, _ in tight) <= limit
    roomy = ranks4(chosen_on_ranks, routing, Chunking(chunks="adaptive"), 9)
    assert [(len(rows), num_syncs) for rows, _, num_syncs in roomy] == [(1, 1)] * 4


def test_the_default_budget_is_one_and_a_half_times_even_routing(ranks4: Any):
    chosen = ranks4(chosen_without_floor, "all_to_one")
    # 4 ranks of 60 to 63 tokens send both rows of every token to the first: 492 rows, in pieces of a third.
    rows = chosen[0][0]
    assert max(rows) <= 1.5 * TOP_K * 63 and len(rows) == 3 and sum(rows) == 492
    assert [num_syncs for _, _, num_syncs in chosen] == [1] * 4
    assert [len(rows) for rows, _, _ in ranks4(chosen_without_floor, "random")] == [1] * 4


def chosen_without_floor(routing: str) -> tuple[list[int], list[int], int]:
    floor, chunks.FLOOR_BYTES = chunks.FLOOR_BYTES, 0
    try:
        return chosen_on_ranks(routing, Chunking(chunks="adaptive"), 60)
    finally:
        chunks.FLOOR_BYTES = floor


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 20])
def test_so_many_chunks_never_bring_more_than_their_share_of_the_worst(ranks4: Any, num_chunks: int):
    chosen = ranks4(chosen_on_ranks, "all_to_one", Chunking(chunks=num_chunks, max_bytes=10**9), 9)
    share = -(-12 // num_chunks)  # of the rank with most tokens
    for rows, tokens, num_syncs in chosen:
        assert len(rows) == len(tokens) == num_chunks and num_syncs == 1
        assert max(rows) <= 4 * share * TOP_K


def errors_on_ranks(chunking: Chunking) -> str:
    try:
        chosen_on_ranks("all_to_one", chunking, 9)
    except ValueError as error:
        return str(error)
    return ""


def test_what_has_no_room_is_refused_on_all_ranks_alike(ranks4: Any):
    for chunking, words in (
        (Chunking(chunks="adaptive", max_bytes=7 * ROW_BYTES), "in one of 12 chunks"),
        (Chunking(chunks="adaptive", max_bytes=1), "in one of 12 chunks"),
        (Chunking(chunks=2, max_bytes=20 * ROW_BYTES), "raise ep_chunks"),
        (Chunking(chunks="none", max_bytes=83 * ROW_BYTES), "84 rows"),
    ):
        errors = set(ranks4(errors_on_ranks, chunking))
        (error,) = errors
        assert re.match(rf"ep_chunk_bytes\({chunking.max_bytes}\) must have room for the \d+ rows", error)
        assert words in error and "Raise it to" in error
    assert set(ranks4(errors_on_ranks, Chunking(chunks="none", max_bytes=84 * ROW_BYTES))) == {""}


@pytest.mark.parametrize(
    "chunking, words",
    [
        ({"chunks": 0}, r"^ep_chunks\(0\) must be"),
        ({"chunks": True}, r"^ep_chunks\(True\) must be"),
        ({"chunks": "some"}, r"^ep_chunks\('some'\) must be 'none', 'adaptive' or a whole number"),
        ({"max_bytes": 0}, r"^ep_chunk_bytes\(0\) must be at least 1"),
    ],
)
def test_errors_name_the_setting(chunking: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Chunking(**chunking)


def test_the_strategy_takes_both_settings_and_refuses_what_it_cannot_read():
    strategy = FSDPCPEPStrategy(ep_chunks="adaptive", ep_chunk_bytes=10**9)
    assert strategy._chunking == Chunking(chunks="adaptive", max_bytes=10**9)
    assert FSDPCPEPStrategy()._chunking.is_off
    with pytest.raises(ValueError, match=r"^ep_chunks\(-1\) must be"):
        FSDPCPEPStrategy(ep_chunks=-1)


class PeakMode(OperationMode):
    """Bytes of tensors that are made inside, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryWatch()

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        self.memory.observe(operation, args, result)
        return result


def workspace_of_rank(routing: str, num_chunks: int, top_k: int) -> int:
    """Peak of a layer's forward and backward in bytes, beside its inputs, parameters and results."""
    num_ranks, num_tokens, hidden, inner = dist.get_world_size(), 256, 64, 64
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    experts = Experts(num_ranks * top_k, hidden, inner)
    attach(experts, AllToAllDispatcher(num_ranks * top_k, mesh.get_group()), Chunking(chunks=num_chunks))
    spread(experts, mesh)
    ids_TK = torch.arange(top_k).expand(num_tokens, top_k)  # all at the first rank
    if routing == "balanced":
        ids_TK = (ids_TK * num_ranks + torch.arange(num_tokens)[:, None]) % (num_ranks * top_k)
    hidden_TD, weights_TK = torch.randn(num_tokens, hidden), torch.rand(num_tokens, top_k)
    with PeakMode() as mode, mode.memory.opened(), mode.memory.phase("forward"):
        mode.memory.adopt([hidden_TD, weights_TK, ids_TK], "other")
        mode.memory.adopt((parameter.to_local() for parameter in experts.parameters()), "parameters")
        before = mode.memory.num_bytes
        y_TD = experts(hidden_TD.requires_grad_(), ids_TK, weights_TK)
        y_TD.backward(torch.ones_like(y_TD))
    return mode.memory.peaks["forward"].num_bytes - before


def test_the_worst_routing_in_chunks_works_in_the_memory_of_even_routing(ranks4: Any):
    balanced = max(ranks4(workspace_of_rank, "balanced", 1, 4))
    assert max(ranks4(workspace_of_rank, "worst", 1, 4)) > 2.5 * balanced
    assert max(ranks4(workspace_of_rank, "worst", 4, 4)) <= 1.25 * balanced
    assert max(ranks4(workspace_of_rank, "worst", 8, 4)) <= balanced


@pytest.mark.parametrize("assumed, num_chunks", [("balanced", 1), ("worst", 22)])
def test_on_fake_tensors_a_fake_group_of_64_has_the_chunks_of_glm(assumed: Any, num_chunks: int):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        dispatcher = AllToAllDispatcher(256, dist.group.WORLD, assumed_routing=assumed)
        with FakeTensorMode():
            ids_TK = torch.empty(16_384, 8, dtype=torch.int64)
            chosen = Chunking(chunks="adaptive").choose(dispatcher, ids_TK, bytes_per_row=61_440)
        assert len(chosen) == num_chunks
        assert max(sum(chunk.splits.num_received) for chunk in chosen) <= 1.5 * 8 * 16_384
        assert sum(sum(chunk.splits.num_received) for chunk in chosen) == (8 if num_chunks == 1 else 256) * 16_384
    finally:
        dist.destroy_process_group()


def test_pieces_are_joined_up_to_the_limit():
    assert joined([3, 3, 3, 9, 1, 1], 6) == [0, 2, 3, 4, 6]
    assert joined([7], 6) == [0, 1]
    assert piece_bounds(5, 2) == [0, 2, 5] and piece_bounds(1, 3) == [0, 0, 0, 1] and piece_bounds(0, 2) == [0, 0, 0]


def test_a_row_of_glm_takes_61_kb():
    """The planner's figure, at the last product of the experts' backward and with its gradient there."""
    parameters = [torch.empty(4, 4096, 6144, dtype=torch.bfloat16), torch.empty(4, 6144, 2048, dtype=torch.bfloat16)]
    assert bytes_of_row(6144, parameters) == 61_440
