"""``dispatcher="symm_mem"``: its exchanges through shared memory, and that its bits are those of an all-to-all.

Shapes: T tokens of a rank, K experts per token, D hidden size, P ranks.
"""

import datetime
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.expert_parallel import one_sided, one_sided_way, symmetric_memory
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.chunks import Chunking
from lightning_moe_strategy.expert_parallel.experts import attach, dispatcher_of
from lightning_moe_strategy.expert_parallel.one_sided import OneSidedDispatcher
from lightning_moe_strategy.expert_parallel.symmetric_memory import Array, Workspace, workspace_of
from lightning_moe_strategy.kernels import swiglu
from lightning_moe_strategy.kernels.peer_copy import put_copies
from lightning_moe_strategy.models.moe import Experts
from lightning_moe_strategy.recompute import recompute_blocks
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit, reference, worst_difference
from tests.test_expert_chunks import HIDDEN, INTERMEDIATE, NUM_EXPERTS, TIGHT, LinearExperts, inputs_of_rank
from tests.test_expert_modules import hugging_face
from tests.test_triton_parity import python

KINDS: dict[str, Any] = {"all_to_all": AllToAllDispatcher, "symm_mem": OneSidedDispatcher}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: Experts(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
    "linear": LinearExperts,
    "gpt_oss": lambda: hugging_face(
        "gpt_oss", "GptOssExperts", "GptOssConfig", num_local_experts=NUM_EXPERTS, intermediate_size=INTERMEDIATE
    ),
}
ROUTINGS = ("random", "all_to_one", "nobody_here", "no_tokens_on_some", "no_tokens_but_one")
CHUNKINGS = {
    "exact": None,
    "1": Chunking(chunks=1),
    "2": Chunking(chunks=2),
    "3": Chunking(chunks=3),
    "adaptive": TIGHT,
}
CPU = torch.device("cpu")


@contextmanager
def forgetful() -> Generator[None, None, None]:
    """What an exchange brought is gone, and not a number any more, when the next one begins."""
    start = Workspace.start

    def forget_and_start(workspace: Workspace, *args: Any) -> Any:
        if workspace._peers is not None:
            first = workspace._flag_bytes + workspace.number % symmetric_memory.NUM_BUFFERS * workspace.num_bytes
            workspace._peers.memories[workspace.rank][first : first + workspace.num_bytes] = 255
        return start(workspace, *args)

    Workspace.start = forget_and_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        Workspace.start = start  # type: ignore[method-assign]


class Block(nn.Module):
    def __init__(self, dispatcher: str, kind: str, chunking: Chunking | None) -> None:
        super().__init__()
        self.experts, generator = MAKERS[kind](), torch.Generator().manual_seed(3)
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        for name, parameter in list(self.experts.named_parameters()):
            whole = torch.randn(parameter.shape, generator=generator)
            # Of whole numbers every sum is exact: a module's own math may group its products otherwise.
            whole = whole * 0.3 if kind != "linear" else (2 * whole).round()
            setattr(self.experts, name, nn.Parameter(whole.chunk(num_ranks)[rank].clone()))
        attach(self.experts, KINDS[dispatcher](NUM_EXPERTS, dist.group.WORLD), chunking)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
        y_TD: Tensor = self.experts(x_TD * 1.0, ids_TK, probs_TK)
        return y_TD


def recomputed(block: Block) -> Block:
    recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": block.experts})
    return block


def run(block: Block, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    x_TD, ids_TK, probs_TK, grad_TD = inputs
    x_TD, probs_TK = x_TD.clone().requires_grad_(), probs_TK.clone().requires_grad_()
    y_TD = block(x_TD, ids_TK, probs_TK)
    y_TD.backward(grad_TD)
    grads = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, "probs": probs_TK.grad, **grads}


def layers_on_ranks(dispatcher: str, kind: str, chunking: str) -> list[dict[str, Tensor]]:
    """Of every routing; ours once more with a recompute."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results = []
    with forgetful():
        for routing in ROUTINGS:
            for recompute in (False, True)[: 1 + (kind == "ours")]:
                block = Block(dispatcher, kind, CHUNKINGS[chunking])
                block = recomputed(block) if recompute else block
                inputs = inputs_of_rank("linear" if kind == "linear" else "ours", routing, rank, num_ranks, 7)
                results.append(run(block, inputs))
    return results


# Rows that nobody fills are rows of zeros to a module's own math, and a product of other sizes may round otherwise.
OWN_MATH_TOLERANCE = 2e-6


@pytest.mark.parametrize(
    ("num_ranks", "kind", "chunking"),
    [
        *((num_ranks, "ours", chunking) for num_ranks in (2, 4) for chunking in CHUNKINGS),
        *((4, kind, chunking) for kind in ("linear", "gpt_oss") for chunking in ("exact", "2", "adaptive")),
    ],
)
def test_results_and_gradients_are_those_of_an_all_to_all(request: Any, num_ranks: int, kind: str, chunking: str):
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    tolerance = OWN_MATH_TOLERANCE if (kind, chunking) == ("gpt_oss", "2") else 0.0
    expected, actual = (ranks(layers_on_ranks, dispatcher, kind, chunking) for dispatcher in KINDS)
    for rank_expected, rank_actual in zip(expected, actual, strict=True):
        for one, other in zip(rank_expected, rank_actual, strict=True):
            for name, tensor in one.items():
                largest = float(tensor.abs().max()) if tensor.numel() else 0.0
                torch.testing.assert_close(other[name], tensor, rtol=0, atol=tolerance * largest)


def accumulated(dispatcher: str, chunking: str) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Of micro-batches with ever more tokens, and one with few."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    block, results, sizes = recomputed(Block(dispatcher, "ours", CHUNKINGS[chunking])), [], []
    workspace_of(dist.group.WORLD).close()
    with forgetful():
        for num_tokens in (2, 9, 40, 3):
            results.append(run(block, inputs_of_rank("ours", "random", rank, num_ranks, num_tokens)))
            results[-1] = {name: tensor.clone() for name, tensor in results[-1].items()}
            sizes.append(workspace_of(dist.group.WORLD).num_bytes)
    return results, sizes


@pytest.mark.parametrize("chunking", ["exact", "2"])
def test_memory_grows_with_micro_batches_and_gradients_add_up(ranks4: Any, chunking: str):
    expected, actual = ranks4(accumulated, "all_to_all", chunking), ranks4(accumulated, "symm_mem", chunking)
    for (one, _), (other, sizes) in zip(expected, actual, strict=True):
        for step, other_step in zip(one, other, strict=True):
            assert all(torch.equal(step[name], other_step[name]) for name in step)
        assert sizes[0] < sizes[1] < sizes[2] == sizes[3]


def layer_with_few_numbers(last_number: int) -> bool:
    before, symmetric_memory.LAST_NUMBER = symmetric_memory.LAST_NUMBER, last_number
    try:
        written = layers_on_ranks("symm_mem", "ours", "2")
    finally:
        symmetric_memory.LAST_NUMBER = before
    assert workspace_of(dist.group.WORLD).number <= last_number
    expected = layers_on_ranks("all_to_all", "ours", "2")
    return all(torch.equal(e[name], w[name]) for e, w in zip(expected, written, strict=True) for name in e)


def test_numbers_of_exchanges_begin_again_before_they_overflow(ranks2: Any):
    assert all(ranks2(layer_with_few_numbers, 7))


def put_number(workspace: Workspace, number: int) -> Any:
    """An exchange in which every rank writes ``number`` to all others."""
    every_rank_1P = torch.arange(workspace.num_ranks, dtype=torch.int32).unsqueeze(0)
    here_1P, x_11 = torch.full_like(every_rank_1P, workspace.rank), torch.tensor([[number]])
    arrays = [Array(workspace.num_ranks, 1, x_11.dtype)]
    return workspace.start(
        CPU, arrays, lambda peers, begins: put_copies(x_11, peers, begins[0], every_rank_1P, here_1P)
    )


def late_reader(num_buffers: int) -> list[int]:
    """What rank 0 reads of its second exchange, once rank 1 has written for the third."""
    before, symmetric_memory.NUM_BUFFERS = symmetric_memory.NUM_BUFFERS, num_buffers
    try:
        workspace = Workspace(dist.group.WORLD)
        put_number(workspace, 1).wait()
        (arrived_P1,) = put_number(workspace, 2).wait()
        if workspace.rank == 0:
            flags_P = workspace._peers.memories[0][: 4 * workspace.num_ranks].view(torch.int32)  # type: ignore[union-attr]
            deadline = time.monotonic() + 30
            while flags_P[1] < 3 and time.monotonic() < deadline:
                time.sleep(1e-3)
        read = arrived_P1.flatten().tolist()
        put_number(workspace, 3).wait()
    finally:
        symmetric_memory.NUM_BUFFERS = before
    return read


def test_a_rank_that_reads_late_finds_what_was_sent_and_with_one_buffer_would_not(ranks2: Any):
    assert ranks2(late_reader, 2) == [[2, 2], [2, 2]]
    assert ranks2(late_reader, 1)[0] == [2, 3]


def silent_rank() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    workspace = workspace_of(group)
    put_number(workspace, 1).wait()
    try:
        if dist.get_rank() == 0:
            put_number(workspace, 2).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_never_signals_is_named_after_the_timeout_of_the_group(ranks2: Any):
    error, _ = ranks2(silent_rank)
    assert "Ranks [1] of a group of 2 have not signalled exchange 2 within 0.3 s" in error


class CountReads(OperationMode):
    """Numbers that are brought to the host, apart from what the references do on a CPU alone."""

    def __init__(self) -> None:
        super().__init__()
        self.is_kernel, self.reads = False, list[str]()

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(operation)
        if not self.is_kernel and any(word in name for word in ("_local_scalar_dense", "nonzero", "is_nonzero")):
            self.reads.append(name)
        return operation(*args, **kwargs)

    def in_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self.is_kernel = self.is_kernel, True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_kernel = outer

        return run


KERNELS = {
    one_sided: ("put_copies",),
    one_sided_way: ("put_copies", "put_sums", "add_ragged_rows", "spread_ragged_rows"),
    symmetric_memory: ("signal", "wait"),
    swiglu: ("_filled",),
}


class CountLists(torch.overrides.TorchFunctionMode):
    """``tolist``, which is no operation; in the backward pass too."""

    def __init__(self, count: CountReads) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.count.is_kernel and getattr(function, "__name__", "") in ("tolist", "cpu", "numpy"):
            self.count.reads.append(function.__name__)
        return function(*args, **(kwargs or {}))


def reads_of_a_step(chunking: str, recompute: bool) -> list[str]:
    """Of three layers, forward and backward, after a step that has made the memory."""
    blocks = [Block("symm_mem", "ours", CHUNKINGS[chunking]) for _ in range(3)]
    blocks = [recomputed(block) if recompute else block for block in blocks]
    x_TD, ids_TK, probs_TK, grad_TD = inputs_of_rank("ours", "random", dist.get_rank(), dist.get_world_size(), 7)

    def step() -> None:
        hidden_TD = x_TD.clone().requires_grad_()
        for block in blocks:
            hidden_TD = hidden_TD + block(hidden_TD, ids_TK, probs_TK)
        hidden_TD.backward(grad_TD)

    step()
    count = CountReads()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(module, name, count.in_kernel(getattr(module, name)))
        stack.enter_context(count)
        stack.enter_context(CountLists(count))
        step()
    return count.reads


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_with_chunks_the_host_waits_once_a_micro_batch_and_without_once_a_layer(ranks2: Any, recompute: bool):
    assert ranks2(reads_of_a_step, "2", recompute) == [["aten._local_scalar_dense.default"]] * 2
    assert ranks2(reads_of_a_step, "1", recompute) == [["aten._local_scalar_dense.default"]] * 2
    assert ranks2(reads_of_a_step, "exact", recompute) == [["tolist"] * 3] * 2


def order_of_events(needs_grad: bool) -> list[str]:
    """Of a layer whose work beside is a product with a gradient of its own."""
    events = list[str]()
    dispatcher = OneSidedDispatcher(NUM_EXPERTS, dist.group.WORLD)
    x_TD, ids_TK, probs_TK, _ = inputs_of_rank("ours", "random", dist.get_rank(), dist.get_world_size(), 7)
    x_TD.requires_grad_(needs_grad)
    beside_TD = x_TD.detach().requires_grad_()
    start, finish = Workspace.start, Workspace.finish

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            events.append("beside")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append("beside")
            return grad * 2

    products = list[Tensor]()
    plan = dispatcher.plan(ids_TK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "start", lambda *args: (events.append("start"), start(*args))[1])
        patch.setattr(Workspace, "finish", lambda *args: (events.append("wait"), finish(*args))[1])
        rows_RD, _, _ = dispatcher.dispatch(x_TD, probs_TK, plan, lambda: products.append(Noted.apply(beside_TD)))
        y_TD = dispatcher.combine(rows_RD, plan) + products[0]
        y_TD.sum().backward()
    return events


def test_what_runs_meanwhile_runs_between_issue_and_wait_forward_and_backward(ranks2: Any):
    there_and_back = ["start", "beside", "wait"], ["start", "wait"]
    expected = [*there_and_back[0], *there_and_back[1], *there_and_back[1], *there_and_back[0]]
    assert ranks2(order_of_events, True) == ranks2(order_of_events, False) == [expected] * 2


def exchanges_of_a_step(x_needs_grad: list[bool], constant_experts_on: list[int]) -> int:
    rank, group = dist.get_rank(), dist.new_group()
    dispatcher = OneSidedDispatcher(NUM_EXPERTS, group)
    x_TD, ids_TK, probs_TK, grad_TD = inputs_of_rank("ours", "nobody_here", rank, 2, 5)
    plan = dispatcher.plan(ids_TK)
    workspace_of(group).close()  # numbers begin again
    rows_RD, *_ = dispatcher.dispatch(x_TD.requires_grad_(x_needs_grad[rank]), probs_TK, plan)
    y_RD = torch.zeros(rows_RD.shape) if rank in constant_experts_on else rows_RD * 2
    dispatcher.combine(y_RD, plan).backward(grad_TD)
    return workspace_of(group).number


@pytest.mark.parametrize("x_needs_grad", [[True, False], [False, False]])
@pytest.mark.parametrize("constant_experts_on", [[], [0], [0, 1]])
def test_every_rank_makes_every_exchange_whatever_needs_a_gradient(
    ranks2: Any, x_needs_grad: list[bool], constant_experts_on: list[int]
):
    one, other = ranks2(exchanges_of_a_step, x_needs_grad, constant_experts_on)
    assert one == other


def errors_of_memory() -> list[str]:
    """On each rank: too many bytes, bytes that are gone when they are taken, and ranks on two hosts."""
    group, errors = dist.group.WORLD, []

    def attempt() -> None:
        try:
            put_number(Workspace(group), 1)
        except RuntimeError as error:
            errors.append(str(error))

    try:
        Workspace(group).start(CPU, [Array(2**50, 1, torch.uint8)], lambda *args: None)
    except RuntimeError as error:
        errors.append(str(error))
    with pytest.MonkeyPatch.context() as patch:
        reserve = symmetric_memory._reserve_file
        patch.setattr(symmetric_memory, "_reserve_file", lambda *args: reserve(*args) or dist.get_rank() == 1)
        attempt()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_host", lambda: f"host {dist.get_rank()}")
        attempt()
    return errors


def test_what_cannot_be_shared_is_one_error_on_all_ranks(ranks2: Any):
    errors = ranks2(errors_of_memory)
    assert errors[0] == errors[1]
    too_many, gone, hosts = errors[0]
    for error in (too_many, gone):
        assert "dispatcher='symm_mem' needs" in error and "are free" in error and "raise ep_chunks" in error
    assert f"{2 * (2 * 2**50 + 128)} bytes in" in too_many
    assert "but the 2 ranks of ep are on 2. Set an ep inside one host" in hosts
    assert not left_behind()


def left_behind() -> list[Path]:
    return [path for path in Path("/dev/shm").glob(f"{symmetric_memory.FILE_PREFIX}*") if path.is_file()]


def names_while_it_is_used() -> list[Path]:
    put_number(Workspace(dist.group.WORLD), 1).wait()
    return left_behind()


def test_memory_has_no_name_that_a_killed_run_could_leave_behind(ranks2: Any):
    assert ranks2(names_while_it_is_used) == [[], []]


def chunk_that_is_joined_late() -> bool:
    dispatcher = OneSidedDispatcher(NUM_EXPERTS, dist.group.WORLD)
    ids_TK = inputs_of_rank("ours", "random", dist.get_rank(), dist.get_world_size(), 7)[1]
    with forgetful():
        pieces = dispatcher.count(ids_TK, 2, count_most=False)
        early = pieces.join(0, 1).splits
        put_number(dispatcher.workspace, 1).wait()
        late = pieces.join(0, 1).splits
    return torch.equal(early.first_place_P, late.first_place_P) and torch.equal(
        early.end_of_copies_P, late.end_of_copies_P
    )


def test_counts_outlive_the_exchange_that_brought_them(ranks2: Any):
    assert ranks2(chunk_that_is_joined_late) == [True, True]


def errors_of_routing() -> list[str]:
    errors = []
    for num_experts, ids, bound in ((8, [[0, 8], [1, 9]], False), (8, [[0, 8], [1, 9]], True), (2, [[1, 1]] * 2, True)):
        dispatcher = OneSidedDispatcher(num_experts, dist.group.WORLD)
        ids_TK = torch.tensor(ids)
        try:
            pieces = dispatcher.bound(ids_TK, 1) if bound else dispatcher.count(ids_TK, 1, count_most=False)
            dispatcher.plan(ids_TK, pieces.join(0, 1).splits)
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
    return errors


def test_ids_that_no_room_is_made_for_are_errors(ranks2: Any):
    one, other = ranks2(errors_of_routing)
    assert "2 of 4 expert ids are not below num_experts(8)" in one[0]
    assert "Expert ids are not below num_experts(8)" in one[1]
    # Two rows of each of two tokens, from both ranks to rank 1, which has one expert and room for one row of each.
    assert len(one) == 2 and "gave a token the same expert twice" in other[2]


def tokens_of_layers(first: int, second: int) -> str:
    """Two layers of a micro-batch with so many tokens, the second with one more on rank 1."""
    layers = [OneSidedDispatcher(NUM_EXPERTS, dist.group.WORLD) for _ in range(2)]
    for _ in range(2):
        for layer, num_tokens in zip(layers, (first, second), strict=True):
            ids_TK = torch.zeros(num_tokens, 1, dtype=torch.int64)
            try:
                pieces = layer.bound(ids_TK, 2)
            except RuntimeError as error:
                return str(error)
            assert pieces.most_tokens == first
        first, second = first + 3, second + 3
    return ""


def test_a_layer_with_more_tokens_than_the_first_says_so(ranks2: Any):
    assert ranks2(tokens_of_layers, 5, 4) == ["", ""]
    for error in ranks2(tokens_of_layers, 5, 6):
        assert "A layer has 6 tokens, but the first layer of the micro-batch had 5 at the most" in error
        assert "Leave ep_chunks out" in error


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_moe": (partial(HuggingFaceLanguageModel, "qwen3_moe"), "model"),
    "plain": (PlainLanguageModel, "module"),
}
IN_CHUNKS: dict[str, Any] = {"recompute": "block", "ep_chunks": 2}
EP_4, EP_2 = LAYOUTS_OF_4[0], LAYOUTS_OF_4[7]
# As of every layout: sums over ranks come in another order. FP32, relative.
AGAINST_ONE_PROCESS = 2e-6


def trained(degrees: dict[str, Any], name: str) -> dict[str, Tensor]:
    make, shift = MODELS[name]
    trainer, _, keep = fit(
        degrees | {"dispatcher": "symm_mem"}, make, lambda dp: loader(16, 24, 8 // dp, ragged=False), shift=shift
    )
    kinds = {type(dispatcher_of(module)) for module in trainer.strategy.experts.values()}
    assert kinds == {OneSidedDispatcher}
    return keep.steps[0]


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("qwen3_moe", EP_4), ("qwen3_moe", EP_2 | IN_CHUNKS), ("plain", EP_4 | IN_CHUNKS), ("plain", EP_2)],
    ids=["qwen3_moe ep 4", "qwen3_moe ep 2 in chunks", "plain ep 4 in chunks", "plain ep 2"],
)
def test_a_trainer_has_the_gradients_of_one_process(ranks4: Any, name: str, degrees: dict[str, Any]):
    make, _ = MODELS[name]
    _, expected, _ = reference(make, loader(16, 24, 8, ragged=False))
    for gradients in ranks4(trained, degrees, name):
        difference, parameter = worst_difference(gradients, expected[0])
        assert difference < AGAINST_ONE_PROCESS, parameter


def test_two_processes_exchange_through_the_triton_kernels():
    pytest.importorskip("triton")
    run = python("-m", "tests.one_sided_interpreted", TRITON_INTERPRET="1")
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "Triton's kernels ran" in run.stdout
