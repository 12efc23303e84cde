"""All dispatchers that send a token once to each rank: one arithmetic, the bytes it saves, and what it keeps.

Shapes: T tokens of a rank, K experts per token, E experts, D hidden size, I intermediate size, P ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy import collectives
from lightning_moe_strategy.expert_parallel import local_math
from lightning_moe_strategy.expert_parallel.all_gather import AllGatherDispatcher
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.assumed_copies import assumed_copies
from lightning_moe_strategy.expert_parallel.assumed_routing import RecordedRouting, assumed_counts
from lightning_moe_strategy.expert_parallel.chunks import Chunking
from lightning_moe_strategy.expert_parallel.deduplicated import CopyDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach
from lightning_moe_strategy.expert_parallel.one_sided import OneSidedDispatcher
from lightning_moe_strategy.expert_parallel.splits import SplitMemory
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.models.moe import Experts
from lightning_moe_strategy.plan.workload import distinct_ranks
from lightning_moe_strategy.recompute import recompute_blocks
from tests.test_expert_dispatch import (
    HIDDEN,
    NUM_EXPERTS,
    ROUTINGS,
    assert_equal_to_reference,
    inputs_of_rank,
    run_layer,
    weights,
)

BY_COLLECTIVES: dict[str, type[CopyDispatcher]] = {"all_to_all": AllToAllDispatcher, "all_gather": AllGatherDispatcher}
KINDS: dict[str, Any] = BY_COLLECTIVES | {"symm_mem": OneSidedDispatcher}


def layer_on_ranks(kind: str, routing: str) -> dict[str, Tensor]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return run_layer(KINDS[kind](NUM_EXPERTS, dist.group.WORLD), inputs_of_rank(routing, rank, num_ranks), rank)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_kinds_agree_bit_by_bit_and_with_one_process(request: Any, num_ranks: int, routing: str):
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    exchanged, gathered, written = (ranks(layer_on_ranks, kind, routing) for kind in KINDS)
    assert_equal_to_reference(gathered, routing)
    for one, *others in zip(exchanged, gathered, written, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one for other in others)


LARGE = 1e8
"""FP32 cannot tell it from 1e8 + 1, so a sum with both says in which order it was added."""

FACTORS_OF_EXPERTS = {
    0: (-LARGE, 0.0, 1.0),
    1: (1.0, 0.0, 0.0),
    2: (LARGE, 1.0, -LARGE),
    4: (0.0, LARGE, LARGE),
    8: (0.0, -LARGE, 0.0),
}
"""By which an expert multiplies its row of three."""


def order_of_sums(kind: str) -> tuple[list[float], list[float]]:
    """The result of one token with five rows, and its gradient, on rank 0; the other ranks have no token."""
    dispatcher = KINDS[kind](16, dist.group.WORLD)
    ids_TK = torch.tensor([[8, 4, 2, 0, 1]])[: int(dist.get_rank() == 0)]
    factors_ED = torch.zeros(16, 3)
    for expert, factors in FACTORS_OF_EXPERTS.items():
        factors_ED[expert] = torch.tensor(factors)
    x_TD = torch.ones(len(ids_TK), 3, requires_grad=True)
    plan = dispatcher.plan(ids_TK)
    rows_RD, _, offsets_L = dispatcher.dispatch(x_TD, torch.ones(ids_TK.shape), plan)
    expert_of_row_R = torch.searchsorted(offsets_L, torch.arange(len(rows_RD), dtype=torch.int32), right=True)
    y_TD = dispatcher.combine(rows_RD * factors_ED.chunk(4)[dist.get_rank()][expert_of_row_R], plan)
    y_TD.sum().backward()
    return y_TD.flatten().tolist(), x_TD.grad.flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_summed_on_each_rank_by_k_and_then_by_rank(ranks4: Any, kind: str):
    # Rank 0 adds experts 2, 0 and 1, rank 1 has 4, rank 2 has 8. The first number is 0 where rank 0 adds by expert,
    # the second 1 where ranks do not ascend, the third 1 where all five are added by k.
    assert ranks4(order_of_sums, kind)[0] == ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])


def bytes_sent_by_layer(kind: str, top_k: int, num_experts: int) -> tuple[int, CopyDispatcher, int]:
    """Numbers of 4 bytes that leave this rank in a layer's forward and backward, and its tokens."""
    rank, num_tokens, hidden, sent = dist.get_rank(), 256, 256, []
    exchange = collectives._exchange

    def spy(rows: Tensor, send_counts: list[int], *args: Any) -> Tensor:
        sent.append(rows[0:1].numel() * (sum(send_counts) - send_counts[rank]))
        return exchange(rows, send_counts, *args)

    collectives._exchange = spy
    try:
        dispatcher = KINDS[kind](num_experts, dist.group.WORLD)
        generator = torch.Generator().manual_seed(rank)
        ids_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices
        x_TD, probs_TK = torch.randn(num_tokens, hidden), torch.rand(num_tokens, top_k)
        plan = dispatcher.plan(ids_TK)
        rows_RD, probs_R, _ = dispatcher.dispatch(x_TD.requires_grad_(), probs_TK.requires_grad_(), plan)
        dispatcher.combine(rows_RD * probs_R[:, None], plan).sum().backward()
    finally:
        collectives._exchange = exchange
    dispatcher.group = None  # type: ignore[assignment]  # a process group does not travel to the test
    return sum(sent), dispatcher, num_tokens


def test_top_4_of_16_experts_on_two_ranks_sends_half_of_the_rows(ranks2: Any):
    results = ranks2(bytes_sent_by_layer, "all_to_all", 4, 16)
    copies = sum(dispatcher.sent.copies for _, dispatcher, _ in results)
    # Hidden states of 256 four times, probabilities of all K experts twice and their ids; and counts.
    assert sum(sent for sent, _, _ in results) == copies * (4 * 256 + 3 * 4) + 2 * (8 + 1)
    for sent, dispatcher, num_tokens in results:
        rows = dispatcher.sent.rows
        assert 1.8 * num_tokens < rows < 2.2 * num_tokens
        assert dispatcher.sent.copies == pytest.approx(distinct_ranks(4, 2, 16) / 2 * num_tokens, rel=0.05)
        assert sent < 0.52 * 4 * 256 * rows
        assert dispatcher.sent.bytes_saved == (rows - dispatcher.sent.copies) * 256 * 4
        assert dispatcher.sent.share_saved == 1 - dispatcher.sent.copies / rows


def test_even_routing_of_k_8_and_256_experts_saves_a_third_at_ep_8_and_little_at_ep_64():
    assert [round(100 * (1 - distinct_ranks(8, ep, 256) / 8), 1) for ep in (8, 64)] == [33.8, 4.1]
    ids_TK = torch.rand(4096, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    for ep in (8, 64):
        counted = sum(len(ranks.unique()) for ranks in ids_TK // (256 // ep)) / len(ids_TK)
        assert counted == pytest.approx(distinct_ranks(8, ep, 256), rel=0.01)


def counts_on_ranks(ids_TK: Tensor) -> Any:
    plan = AllToAllDispatcher(8, dist.group.WORLD).plan(ids_TK)
    return plan.splits.copies_sent, plan.splits.num_sent, plan.way.num_copies


def test_a_token_is_sent_once_to_a_rank_also_where_it_names_an_expert_twice(ranks2: Any):
    ids_TK = torch.tensor([[0, 1, 3], [0, 0, 0], [7, 0, 6]])
    assert ranks2(counts_on_ranks, ids_TK) == [([3, 1], [7, 2], 6), ([3, 1], [7, 2], 2)]


def gradients_of_probs(kind: str) -> float:
    """Largest difference of a probability's gradient to ``<grad, expert(x)>``, which needs no dispatcher."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x_TD, probs_TK, ids_TK, grad_TD = inputs_of_rank("random", rank, num_ranks)
    result = run_layer(KINDS[kind](NUM_EXPERTS, dist.group.WORLD), (x_TD, probs_TK, ids_TK, grad_TD), rank)
    gate_up, down = (w.double() for w in weights())
    worst = 0.0
    for token, ids_K in enumerate(ids_TK.tolist()):
        for k, expert in enumerate(ids_K):
            gate, up = (gate_up[expert] @ x_TD[token].double()).chunk(2)
            exact = down[expert] @ (nn.functional.silu(gate) * up) @ grad_TD[token].double()
            worst = max(worst, float((result["probs"][token, k] - exact).abs()))
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_probabilities_are_exact(ranks2: Any, kind: str):
    assert max(ranks2(gradients_of_probs, kind)) < 2e-6


def experts_on_ranks(kind: str, chunking: Chunking | None = None) -> nn.Module:
    dispatcher, experts = KINDS[kind](NUM_EXPERTS, dist.group.WORLD), Experts(NUM_EXPERTS, HIDDEN, 8)
    for name, whole in zip(("gate_up_proj", "down_proj"), weights(), strict=True):
        local = whole.chunk(dist.get_world_size())[dist.get_rank()]
        setattr(experts, name, nn.Parameter(local.clone()))
    attach(experts, dispatcher, chunking)
    return experts


class Block(nn.Module):
    def __init__(self, kind: str, chunking: Chunking | None) -> None:
        super().__init__()
        self.experts = experts_on_ranks(kind, chunking)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
        y_TD: Tensor = self.experts(torch.tanh(x_TD), ids_TK, probs_TK)
        return y_TD


def block_on_ranks(kind: str, routing: str, recompute: bool, num_chunks: int) -> tuple[dict[str, Tensor], list[str]]:
    x_TD, probs_TK, ids_TK, grad_TD = inputs_of_rank(routing, dist.get_rank(), dist.get_world_size())
    block = Block(kind, Chunking(chunks=num_chunks))
    if recompute:
        recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": block.experts})
    x_TD, probs_TK = x_TD.requires_grad_(), probs_TK.requires_grad_()
    exchange, integers = collectives._exchange, []

    def spy(rows: Tensor, *args: Any) -> Tensor:
        if not rows.is_floating_point():
            integers.append("counts" if rows.dim() == 1 else "ids")
        return exchange(rows, *args)

    collectives._exchange = spy
    try:
        y_TD = block(x_TD, ids_TK, probs_TK)
        y_TD.backward(grad_TD)
    finally:
        collectives._exchange = exchange
    grads = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, "probs": probs_TK.grad, **grads}, integers


@pytest.mark.parametrize("routing", ["random", "all_to_one", "no_tokens_but_one"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_changes_no_bit_and_agrees_on_nothing_again(ranks4: Any, kind: str, routing: str):
    for num_chunks in (1, 2):
        kept = ranks4(block_on_ranks, kind, routing, False, num_chunks)
        for (one, exchanged), (other, again) in zip(
            kept, ranks4(block_on_ranks, kind, routing, True, num_chunks), strict=True
        ):
            assert all(torch.equal(one[name], other[name]) for name in one)
            assert again == exchanged
            if kind in BY_COLLECTIVES:
                assert exchanged == ["counts", *["ids"] * num_chunks * (kind == "all_to_all")]


def other_experts_in_a_replay(kind: str) -> str:
    dispatcher, memory = KINDS[kind](4, dist.group.WORLD), SplitMemory()
    ids_TK = torch.zeros(3, 1, dtype=torch.int64)
    with dispatcher.remember_splits(memory, replaying=False):
        dispatcher.plan(ids_TK)
    try:
        with dispatcher.remember_splits(memory, replaying=True):
            dispatcher.plan(ids_TK + 1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_that_chose_other_experts_is_an_error(ranks2: Any, kind: str):
    assert all("A recompute chose other experts" in error for error in ranks2(other_experts_in_a_replay, kind))


def in_bf16(kind: str, routing: str) -> dict[str, float]:
    """Relative errors of a layer in bf16, to the same bf16 numbers in FP32."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x_TD, probs_TK, ids_TK, grad_TD = inputs_of_rank(routing, rank, num_ranks)
    dispatcher = KINDS[kind](NUM_EXPERTS, dist.group.WORLD)

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        local = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
        numbers = (x_TD, *(w[local] for w in weights()))
        x, gate_up, down = (t.bfloat16().to(dtype).requires_grad_() for t in numbers)
        probs = probs_TK.clone().requires_grad_()
        plan = dispatcher.plan(ids_TK)
        rows, probs_R, offsets = dispatcher.dispatch(x, probs, plan)
        y = dispatcher.combine(expert_mlp(rows, probs_R, gate_up, down, offsets), plan)
        grads = torch.autograd.grad(y, (x, probs, gate_up, down), grad_TD.bfloat16().to(dtype))
        return dict(zip(("y", "x", "probs", "gate_up", "down"), (y.detach(), *grads), strict=True))

    half, exact = run(torch.bfloat16), run(torch.float32)
    assert half["probs"].dtype == torch.float32
    return {name: float((half[name].float() - t).norm() / t.norm().clamp(min=1e-9)) for name, t in exact.items()}


@pytest.mark.parametrize("routing", ["random", "skewed", "no_tokens_on_some"])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_fp32_to_a_few_roundings(ranks4: Any, kind: str, routing: str):
    # Eight bits; rounded are the two products, the sum of a rank and the sum over ranks.
    for errors in ranks4(in_bf16, kind, routing):
        assert max(errors.values()) < 1.5e-2, errors


def kept_by_experts(recompute: bool) -> tuple[int, int, int]:
    """Rows that the experts save for their backward, tokens that they were gathered from, and rows in all."""
    found: list[tuple[int, int]] = []
    run = local_math.expert_mlp

    def spy(rows_RD: Tensor, *args: Any, gathered_from: tuple[Tensor, Tensor] | None) -> Tensor:
        if gathered_from is not None:
            assert torch.equal(gathered_from[0][gathered_from[1]], rows_RD)
        found.append((len(rows_RD), len(rows_RD) if gathered_from is None else len(gathered_from[0])))
        return run(rows_RD, *args, gathered_from=gathered_from)

    local_math.expert_mlp = spy
    try:
        block_on_ranks("all_to_all", "random", recompute, 1)
    finally:
        local_math.expert_mlp = run
    return found[-1] + (len(found),)


def test_what_is_kept_of_received_tokens_is_kept_once_and_not_in_a_recompute(ranks2: Any):
    for num_rows, num_kept, num_runs in ranks2(kept_by_experts, False):
        assert num_kept < num_rows and num_runs == 1
    # Its backward pass is next: tokens beside rows would only take more.
    assert all(num_kept == num_rows and num_runs == 2 for num_rows, num_kept, num_runs in ranks2(kept_by_experts, True))


def collectives_of_a_step(kind: str, x_needs_grad: list[bool], constant_experts_on: list[int]) -> list[str]:
    rank, calls = dist.get_rank(), list[str]()
    names = ("_exchange", "_all_gather")
    originals = {name: getattr(collectives, name) for name in names}

    def spy(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {args[0].dim()}-D {args[0].dtype}")
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(collectives, name, spy(name))
    try:
        dispatcher = KINDS[kind](NUM_EXPERTS, dist.group.WORLD)
        x_TD, probs_TK, ids_TK, grad_TD = inputs_of_rank("nobody_here", rank, 2)
        x_TD.requires_grad_(x_needs_grad[rank])
        plan = dispatcher.plan(ids_TK)
        rows_RD, *_ = dispatcher.dispatch(x_TD, probs_TK, plan)
        y_RD = torch.zeros(rows_RD.shape) if rank in constant_experts_on else rows_RD * 2
        dispatcher.combine(y_RD, plan).backward(grad_TD)
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)
    return calls


@pytest.mark.parametrize("x_needs_grad", [[True, False], [False, False]])
@pytest.mark.parametrize("constant_experts_on", [[], [0], [0, 1]])
@pytest.mark.parametrize("kind", BY_COLLECTIVES)
def test_every_rank_runs_every_collective_whatever_needs_a_gradient(
    ranks2: Any, kind: str, x_needs_grad: list[bool], constant_experts_on: list[int]
):
    one, other = ranks2(collectives_of_a_step, kind, x_needs_grad, constant_experts_on)
    assert one == other and len(one) == 8  # counts, ids; x, probabilities, results; and the gradients of these


def test_assumed_copies_are_the_mean_of_tokens_that_choose_as_recorded():
    num_tokens, top_k, num_ranks, local = 20_000, 3, 4, 3
    chances_E = torch.tensor([9.0, 5, 5, 1, 2, 6, 2, 4, 4, 7, 1, 2])
    generator = torch.Generator().manual_seed(0)
    # Independent choices, of which those of K experts count.
    draws = torch.rand(400_000, 12, generator=generator) < chances_E * top_k / chances_E.sum()
    chosen = draws[draws.sum(1) == top_k][:num_tokens]
    assert len(chosen) == num_tokens
    counted = chosen.view(num_tokens, num_ranks, local).any(2).sum(0)
    routing = RecordedRouting(tuple(chances_E.tolist()))
    where = dict(rank=1, num_local_experts=local)
    rows_sent, received = assumed_counts(routing, num_tokens, top_k, num_ranks=num_ranks, **where)
    sent, arrived = assumed_copies(routing, num_tokens, rows_sent, [sum(rows) for rows in received], **where)
    assert sent == pytest.approx(counted.tolist(), rel=0.02)
    assert arrived == [sent[1]] * num_ranks


@pytest.mark.parametrize("routing", ["balanced", "worst", RecordedRouting((1.0,) * 16)])
def test_assumed_copies_of_even_routing_are_the_planners(routing: Any):
    num_tokens, where = 1000, dict(rank=0, num_local_experts=4)
    rows_sent, received = assumed_counts(routing, num_tokens, 4, num_ranks=4, **where)
    sent, arrived = assumed_copies(routing, num_tokens, rows_sent, [sum(rows) for rows in received], **where)
    assert sum(sent) == 4 * round(num_tokens * distinct_ranks(4, 4, 16) / 4)
    assert arrived == ([num_tokens] * 4 if routing == "worst" else sent)
    assert assumed_copies(routing, 0, [0] * 4, [0] * 4, **where) == ([0] * 4, [0] * 4)
