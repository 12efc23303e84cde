"""The shared expert runs while tokens travel: when it runs, and that nothing else changes.

Shapes: B batch, S sequence, T = B * S tokens, D hidden size, K experts per token.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy import MoELanguageModel, placement
from lightning_moe_strategy._torch_compat import OperationMode, is_asynchronous
from lightning_moe_strategy.collectives import observed_waits
from lightning_moe_strategy.expert_parallel.all_gather import AllGatherDispatcher
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.chunks import Chunking
from lightning_moe_strategy.expert_parallel.dispatch import RowDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, find_experts
from lightning_moe_strategy.expert_parallel.redundant import RedundantDispatcher
from lightning_moe_strategy.expert_parallel.shared_expert import SharedExpert, run_shared_experts_ahead
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.moe import MixtureOfExperts
from lightning_moe_strategy.plan.cluster import CLUSTERS
from lightning_moe_strategy.plan.layout import ranks_per_domain
from lightning_moe_strategy.plan.model import shared_parameters
from lightning_moe_strategy.plan.planner import PlanRequest, parse_layout, plan
from lightning_moe_strategy.plan.time import behind_shared_experts, transfer_seconds
from lightning_moe_strategy.plan.traffic import sent_tokens
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.simulation.report import Simulation
from tests.modules import VOCABULARY, HuggingFaceLanguageModel, PlainLanguageModel, StackedExperts, loader
from tests.moe_blocks import HIDDEN, NUM_EXPERTS, call, found_blocks, make_block
from tests.parity import LAYOUTS_OF_4, fit
from tests.test_moe_blocks import REFUSED

SIZES = {"preset": "tiny", "hidden": HIDDEN, "num_experts": NUM_EXPERTS, "top_k": 2, "shared_experts": 1}


class WithoutMeanwhile(AllToAllDispatcher):
    """A user's, written before there was anything to do meanwhile."""

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, plan: Any) -> Any:  # type: ignore[override]
        return super().dispatch(x_TD, probs_TK, plan)


KINDS = {
    "all_to_all": AllToAllDispatcher,
    "all_gather": AllGatherDispatcher,
    "rows": RowDispatcher,
    "redundant": RedundantDispatcher,
}
OF_A_USER = {"without meanwhile": WithoutMeanwhile}
CP2_EP2, EP4 = LAYOUTS_OF_4[2], LAYOUTS_OF_4[0]


class GatedAfter(nn.Module):
    """A shared expert with a gate, behind the experts; ``change`` is done to the input in between."""

    def __init__(self, change: Callable[[Any, Tensor, Tensor], Tensor | None] | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = StackedExperts(NUM_EXPERTS, HIDDEN, 16)
        self.shared_expert = nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)
        self.change, self.num_forwards = change, 0

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, ids_TK = self.gate(x_TD).softmax(-1).topk(2)
        y_TD = self.experts(x_TD, ids_TK, weights_TK)
        given: Tensor | None = x_TD
        if self.change is not None:
            given, self.num_forwards = self.change(self, x_TD, y_TD), self.num_forwards + 1
        if given is not None:
            y_TD = y_TD + self.shared_expert_gate(x_TD).sigmoid() * self.shared_expert(given)
        return y_TD.view_as(x_BSD)


def make_ours() -> nn.Module:
    return MixtureOfExperts(ModelConfig.resolve(SIZES))


def make_hugging_face(name: str) -> nn.Module:
    return make_block(*next(block for block in found_blocks() if block[1] == name))


def spread_block(
    make: Callable[[], nn.Module], kind: str = "all_to_all", chunking: Chunking | None = None, ahead: bool = True
) -> tuple[nn.Module, list[SharedExpert]]:
    """A block whose experts are on all ranks, equal on each, and what watches its shared expert."""
    torch.manual_seed(3)
    block, group = make().train(), dist.group.WORLD
    experts = find_experts(block)
    for module in experts.values():
        attach(module, (KINDS | OF_A_USER)[kind](NUM_EXPERTS, group), chunking)
        for name, p in list(module.named_parameters(recurse=False)):
            local = p.data.chunk(group.size())[group.rank()].clone()
            setattr(module, name, nn.Parameter(local))
    with watchers() as found:
        names = run_shared_experts_ahead(block, experts) if ahead else []
    assert len(names) == len(found)
    return block, found


@contextmanager
def watchers() -> Iterator[list[SharedExpert]]:
    """Those that are made inside."""
    found: list[SharedExpert] = []
    make = SharedExpert.__init__

    def noted(self: SharedExpert, **options: Any) -> None:
        make(self, **options)
        found.append(self)

    SharedExpert.__init__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        SharedExpert.__init__ = make  # type: ignore[method-assign]


def hidden_states() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(2, 5, HIDDEN, generator=generator)


class Events(OperationMode):
    """Exchanges of rows with D channels as they start and are read, and the shared expert in between."""

    def __init__(self, shared: nn.Module, channels: int = HIDDEN) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.channels = channels
        self.running: dict[int, str] = {}
        shared.register_forward_hook(lambda *_: self.seen.append("shared expert"))
        for parameter in shared.parameters():
            parameter.register_hook(self._note_gradient)

    def _note_gradient(self, gradient: Tensor) -> None:
        if self.seen[-1:] != ["gradient of shared expert"]:
            self.seen.append("gradient of shared expert")

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        if operation.namespace == "c10d" and args[0].dim() == 2 and args[0].shape[1] == self.channels:
            assert is_asynchronous(args)
            self.running[id(args[0])] = "rows"
            self.seen.append("start")
        return result

    def waited(self, result: Tensor) -> None:
        if self.running.pop(id(result), None):
            self.seen.append("read")


AHEAD = ["start", "shared expert", "read", "start", "read"]
AS_WRITTEN = ["start", "read", "start", "read", "shared expert"]
# Gradients of the results are spread, then those of the tokens collected.
BACKWARD_AHEAD = ["start", "read", "start", "gradient of shared expert", "read"]
BACKWARD_AS_WRITTEN = ["gradient of shared expert", "start", "read", "start", "read"]


def events_of_steps(make: Callable[[], nn.Module], kind: str, recompute: bool, num_steps: int = 2) -> list[list[str]]:
    """Forward and backward of each step."""
    block, _ = spread_block(make, kind)
    (shared,) = (child for name, child in block.named_children() if name in ("shared_expert", "shared_experts"))
    if recompute:
        recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": block.experts})  # type: ignore[dict-item]
    found = []
    events = Events(shared)
    with events, observed_waits(events.waited):
        for _ in range(num_steps):
            events.seen = []
            y_BSD = block(hidden_states().requires_grad_())
            found.append(events.seen)
            events.seen = []
            y_BSD.square().sum().backward()
            found.append(events.seen)
    assert not events.running
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [make_ours, GatedAfter, partial(make_hugging_face, "DeepseekV3MoE")])
def test_the_shared_expert_runs_between_issue_and_wait_in_both_passes(ranks2: Any, make: Any, kind: str):
    for events in ranks2(events_of_steps, make, kind, False):
        assert events == [AS_WRITTEN, BACKWARD_AS_WRITTEN, AHEAD, BACKWARD_AHEAD]


def test_a_recompute_goes_the_way_of_its_first_pass(ranks2: Any):
    for events in ranks2(events_of_steps, make_ours, "all_to_all", True):
        # torch stops the recompute where the backward pass needs nothing more.
        assert events == [
            AS_WRITTEN, [*AS_WRITTEN[:4], *BACKWARD_AS_WRITTEN],
            AHEAD, [*AHEAD, *BACKWARD_AHEAD],
        ]  # fmt: skip


def test_on_a_fake_group_it_runs_between_issue_and_wait_too():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        block = make_ours()
        attach(block.experts, AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD, "balanced"))
        for name, p in list(block.experts.named_parameters()):
            setattr(block.experts, name, nn.Parameter(p.data[:1].clone()))
        run_shared_experts_ahead(block, {"experts": block.experts})
        events = Events(block.shared_experts)
        block(hidden_states())
        events.seen = []
        with events, observed_waits(events.waited):
            y_BSD = block(hidden_states().requires_grad_())
            y_BSD.sum().backward()
        assert events.seen == AHEAD + BACKWARD_AHEAD
    finally:
        dist.destroy_process_group()


def without(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``run`` where every shared expert runs where its block calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "run_shared_experts_ahead", lambda *_: [])
        return run(*args, **options)


class GatedLanguageModel(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__(width=HIDDEN)
        for block in self.decoder.blocks:
            block.sparse = GatedAfter()


OURS = {"preset": "tiny", "vocab_size": VOCABULARY, "hidden": HIDDEN, "layers": 2, "shared_experts": 1}
MODELS = {
    "ours": (partial(MoELanguageModel, OURS, warmup_steps=0), "module"),
    "gate": (GatedLanguageModel, "module"),
    "deepseek_v3": (partial(HuggingFaceLanguageModel, "deepseek_v3"), "model"),
    "glm4_moe": (partial(HuggingFaceLanguageModel, "glm4_moe"), "model"),
}


def trained(model: str, degrees: dict[str, Any], options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], int]:
    """Gradients of three steps, and how many layers ran ahead."""
    make_model, shift = MODELS[model]
    with watchers() as found:
        _, _, keep = fit(degrees, make_model, lambda dp: loader(24, 24, 8 // dp), shift=shift, max_steps=3, **options)
    return keep.steps, sum(bool(each.learned.get(True)) for each in found)


def unequal_gradients(model: str, degrees: dict[str, Any], options: dict[str, Any]) -> tuple[list[str], int]:
    as_written, none = without(trained, model, degrees, options)
    ahead, num_ahead = trained(model, degrees, options)
    assert len(as_written) == len(ahead) == 3 and none == 0
    pairs = [(one, other) for one, other in zip(as_written, ahead, strict=True)]
    return [name for one, other in pairs for name in one if not torch.equal(one[name], other[name])], num_ahead


@pytest.mark.parametrize(
    ("model", "degrees", "options"),
    [
        ("ours", CP2_EP2, {}),
        ("ours", CP2_EP2 | {"recompute": "block"}, {"accumulate_grad_batches": 2, "max_epochs": 2}),
        ("ours", EP4 | {"recompute": "block"}, {"precision": "bf16-mixed"}),
        ("gate", EP4 | {"recompute": "block"}, {}),
        ("deepseek_v3", CP2_EP2 | {"recompute": "block"}, {}),
        pytest.param("deepseek_v3", EP4, {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        ("glm4_moe", EP4 | {"recompute": "block"}, {"precision": "bf16-mixed"}),
        pytest.param("glm4_moe", CP2_EP2, {}, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_bitwise_those_of_blocks_as_written(ranks4: Any, model: str, degrees: Any, options: Any):
    for unequal, num_ahead in ranks4(unequal_gradients, model, degrees, options):
        assert unequal == [] and num_ahead > 0


def outputs_and_gradients(block: nn.Module, forwards: int = 3, **context: Any) -> list[Tensor]:
    """Of each of several forwards and its backward pass."""
    found = []
    torch.manual_seed(5)
    for number in range(forwards):
        block.zero_grad()
        x_BSD = (hidden_states() + number).requires_grad_()
        y_BSD = call(block, x_BSD)
        y_BSD.square().sum().backward()
        found += [y_BSD.detach(), x_BSD.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
    return found


def same_for_blocks(make: Callable[[], nn.Module], kind: str) -> tuple[bool, list[str | None]]:
    block, found = spread_block(make, kind)
    expected = outputs_and_gradients(spread_block(make, kind, ahead=False)[0])
    actual = outputs_and_gradients(block)
    assert len(actual) == len(expected) > 9
    return all(map(torch.equal, expected, actual)), [each.learned.get(True) for each in found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make", "source"),
    [
        (make_ours, "argument 0"),
        (GatedAfter, "the experts' input"),
        (partial(make_hugging_face, "DeepseekV3MoE"), "argument 0"),
        (partial(make_hugging_face, "FlintSparseMoeBlock"), "the experts' input"),
        (partial(make_hugging_face, "NemotronHMoE"), "argument 0"),
        (partial(make_hugging_face, "InklingMoE"), None),
        (partial(make_hugging_face, "Qwen2MoeSparseMoeBlock"), None),
    ],
)
def test_outputs_and_gradients_are_those_of_the_block_as_written(ranks2: Any, make: Any, source: str | None, kind: str):
    assert ranks2(same_for_blocks, make, kind) == [(True, [source])] * 2


def sources_of_transformers() -> dict[str, str | None]:
    """Of every block that has a shared expert below itself: the tensor it is called with, behind the experts."""
    sources = {}
    for family, name in found_blocks():
        if name not in REFUSED:
            block, found = spread_block(partial(make_block, family, name))
            call(block, hidden_states())
            for each in found:
                sources[name] = each.learned.get(True)
    return sources


@pytest.mark.slow
def test_which_blocks_of_transformers_run_theirs_ahead(ranks2: Any):
    sources, others = ranks2(sources_of_transformers)
    assert sources == others
    left_alone = {name for name, source in sources.items() if source is None}
    assert len(sources) - len(left_alone) >= 29
    assert {"Qwen2MoeSparseMoeBlock", "AfmoeSparseMoeBlock", "InklingMoE"} <= left_alone and len(left_alone) <= 14


def evaluations(mode: Callable[[], Any]) -> tuple[bool, list[list[str]]]:
    """Whether outputs are those as written, and the events of each forward."""
    blocks = [spread_block(make_ours, ahead=ahead)[0].eval() for ahead in (True, False)]
    events, seen = Events(blocks[0].shared_experts), []
    with mode():
        expected = [blocks[1](hidden_states()) for _ in range(2)]
        with events, observed_waits(events.waited):
            for wanted in expected:
                events.seen = []
                equal = torch.equal(blocks[0](hidden_states()), wanted)
                seen.append(events.seen)
                assert equal
    return True, seen


def test_an_evaluation_runs_ahead_too_and_one_in_inference_mode_as_written(ranks2: Any):
    """Tensors of inference mode do not tell whether they were changed in between."""
    assert ranks2(evaluations, torch.no_grad) == [(True, [AS_WRITTEN, AHEAD])] * 2
    assert ranks2(evaluations, torch.inference_mode) == [(True, [AS_WRITTEN, AS_WRITTEN])] * 2


def hooks_of_forwards() -> list[str]:
    block, (watcher,) = spread_block(make_ours)
    calls: list[str] = []
    block.shared_experts.register_forward_pre_hook(lambda *_: calls.append("before"))
    block.shared_experts.register_forward_hook(lambda *_: calls.append("after"))
    block.shared_experts.register_full_backward_hook(lambda *_: calls.append("backward"))
    for _ in range(3):
        block(hidden_states().requires_grad_()).sum().backward()
    assert watcher.learned == {True: "argument 0"} and watcher.now is None
    return calls


def test_hooks_of_the_shared_expert_run_once(ranks2: Any):
    assert ranks2(hooks_of_forwards) == [["before", "after", "backward"] * 3] * 2


def two_forwards_before_two_backwards(ahead: bool) -> list[Tensor]:
    """The second forward runs ahead, the first did not; their recomputes come last first."""
    block, _ = spread_block(make_ours, ahead=ahead)
    recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": block.experts})  # type: ignore[dict-item]
    inputs = [(hidden_states() + number).requires_grad_() for number in range(2)]
    losses = [block(x_BSD).square().sum() for x_BSD in inputs]
    for loss in reversed(losses):
        loss.backward()
    return [x_BSD.grad for x_BSD in inputs] + [p.grad for p in block.parameters()]


def test_a_recompute_of_a_forward_as_written_is_as_written_though_later_ones_are_ahead(ranks2: Any):
    both = (ranks2(two_forwards_before_two_backwards, way) for way in (True, False))
    for ahead, as_written in zip(*both, strict=True):
        assert all(map(torch.equal, ahead, as_written))


def of_own_checkpoint(ahead: bool, use_reentrant: bool) -> tuple[list[Tensor], list[list[str]]]:
    block, _ = spread_block(make_ours, ahead=ahead)
    events, seen, grads = Events(block.shared_experts), [], []
    with events, observed_waits(events.waited):
        for _ in range(3):
            events.seen = []
            x_BSD = hidden_states().requires_grad_()
            y_BSD = checkpoint(block, x_BSD, use_reentrant=use_reentrant)
            seen.append([*events.seen])
            y_BSD.square().sum().backward()
            grads += [x_BSD.grad, *(p.grad.clone() for p in block.parameters())]
    return grads, seen


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_a_checkpoint_of_the_user_blocks_stay_as_written(ranks2: Any, use_reentrant: bool):
    ahead, as_written = (ranks2(of_own_checkpoint, way, use_reentrant) for way in (True, False))
    for (grads, seen), (expected, _) in zip(ahead, as_written, strict=True):
        assert seen == [AS_WRITTEN] * 3 and all(map(torch.equal, grads, expected))


def double_the_third_time(block: GatedAfter, x_TD: Tensor, y_TD: Tensor) -> Tensor | None:
    return x_TD if block.num_forwards < 2 else 2 * x_TD


def skip_the_third_time(block: GatedAfter, x_TD: Tensor, y_TD: Tensor) -> Tensor | None:
    return x_TD if block.num_forwards < 2 else None


def change_in_place_the_third_time(block: GatedAfter, x_TD: Tensor, y_TD: Tensor) -> Tensor | None:
    with torch.no_grad():
        return x_TD if block.num_forwards < 2 else x_TD.add_(1)


def otherwise(change: Any, recompute: bool) -> tuple[bool, list[str], dict[bool, str | None]]:
    """Whether every number is that as written, the warnings, and what was learned."""
    results = []
    for ahead in (False, True):
        block, found = spread_block(partial(GatedAfter, change), ahead=ahead)
        if recompute:
            recompute_blocks(nn.ModuleDict({"block": block}), {"block": block}, {"block.experts": block.experts})  # type: ignore[dict-item]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if change is change_in_place_the_third_time:
                with torch.no_grad():  # of what was saved, autograd refuses a change
                    results.append([block.eval()(hidden_states()) for _ in range(4)])
            else:
                results.append(outputs_and_gradients(block, 4))
    return all(map(torch.equal, *results)), [str(w.message) for w in caught], found[0].learned


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("change", [double_the_third_time, skip_the_third_time, change_in_place_the_third_time])
def test_a_block_that_goes_another_way_gets_its_own_result_and_a_warning(ranks2: Any, change: Any, recompute: bool):
    if recompute and change is not double_the_third_time:
        return  # a recompute counts a forward more
    for equal, messages, learned in ranks2(otherwise, change, recompute):
        assert equal and learned == {True: None, False: None}
        assert messages and all("shared_expert was computed while tokens travelled" in message for message in messages)


def test_a_dispatcher_of_a_user_that_does_nothing_meanwhile_runs_as_before(ranks2: Any):
    assert ranks2(same_for_blocks, make_ours, "without meanwhile") == [(True, [])] * 2
    for events in ranks2(events_of_steps, make_ours, "without meanwhile", False):
        assert events == [AS_WRITTEN, BACKWARD_AS_WRITTEN] * 2


class Dropping(MixtureOfExperts):
    """Draws random numbers in its shared expert."""

    def __init__(self) -> None:
        super().__init__(ModelConfig.resolve(SIZES))
        assert self.shared_experts is not None
        self.shared_experts = nn.Sequential(self.shared_experts, nn.Dropout(0.5))  # type: ignore[assignment]


class Unaware(MixtureOfExperts):
    """Its shared expert runs in another precision than its experts."""

    def __init__(self) -> None:
        super().__init__(ModelConfig.resolve(SIZES))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        _, weights_TK, expert_ids_TK = self.router(x_TD)
        with torch.autocast("cpu", enabled=False):
            y_BSD = self.experts(x_TD, expert_ids_TK, weights_TK).view_as(x_BSD)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert self.shared_experts is not None
            return y_BSD + self.shared_experts(x_BSD)


@pytest.mark.parametrize("make", [Dropping, Unaware])
def test_one_that_draws_random_numbers_or_runs_in_another_precision_is_left_alone(ranks2: Any, make: Any):
    assert ranks2(same_for_blocks, make, "all_to_all") == [(True, [None])] * 2


def in_chunks(num_chunks: int) -> tuple[bool, list[list[str]]]:
    chunking = Chunking(chunks=num_chunks)
    block, _ = spread_block(make_ours, chunking=chunking)
    expected = outputs_and_gradients(spread_block(make_ours, chunking=chunking, ahead=False)[0])
    same = all(map(torch.equal, expected, outputs_and_gradients(block)))
    events = Events(block.shared_experts)
    with events, observed_waits(events.waited):
        block(hidden_states())
    return same, [events.seen]


def test_of_several_chunks_none_waits_for_the_shared_expert(ranks2: Any):
    for same, (events,) in ranks2(in_chunks, 2):
        assert same and events == ["start", "read"] * 4 + ["shared expert"]


def of_a_copy() -> tuple[bool, bool]:
    block, _ = spread_block(make_ours)
    outputs_and_gradients(block)
    twin = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in twin.shared_experts.parameters():
            parameter.zero_()
    events = Events(twin.shared_experts)
    with events, observed_waits(events.waited):
        routed = twin(hidden_states().requires_grad_())
    return events.seen == AHEAD, torch.equal(routed, block(hidden_states().requires_grad_()))


def test_a_deep_copy_runs_its_own_shared_expert_ahead(ranks2: Any):
    assert ranks2(of_a_copy) == [(True, False)] * 2


def failed_meanwhile() -> tuple[int, bool]:
    """Errors while tokens travel, and whether the next forward is right."""
    block, (watcher,) = spread_block(make_ours)
    expected = [block(hidden_states().requires_grad_()) for _ in range(2)][1]

    def fail(*_: Any) -> None:
        raise FloatingPointError("in the shared expert")

    handle, num_errors = block.shared_experts.register_forward_pre_hook(fail), 0
    for _ in range(3):
        try:
            block(hidden_states().requires_grad_())
        except FloatingPointError:
            num_errors += 1
    handle.remove()
    return num_errors, watcher.now is None and torch.equal(block(hidden_states().requires_grad_()), expected)


def test_an_error_while_tokens_travel_leaves_nothing_behind(ranks2: Any):
    assert ranks2(failed_meanwhile) == [(3, True)] * 2


def simulated() -> Simulation:
    """Of a step, with experts that take long to reach."""
    cluster = dataclasses.replace(CLUSTERS["h200-nvl8"], nvlink_bytes_per_second=1e9)
    ids_BS = torch.zeros(2, 256, dtype=torch.int64)
    return simulate(
        partial(MoELanguageModel, OURS | {"layers": 3}), ParallelDims(**EP4),
        {"input_ids": ids_BS, "labels": ids_BS.clone()}, world_size=4, local_world_size=4, precision="32-true",
        recompute="block", shift="module", cluster=cluster,
    )  # fmt: skip


def test_a_simulation_has_half_of_the_exchanges_behind_the_shared_expert():
    ahead, as_written = simulated(), without(simulated)
    assert ahead.num_bytes == as_written.num_bytes
    assert ahead.seconds is not None and as_written.seconds is not None
    # Tokens out, forward and in the recompute, and their gradients back; not results, nor their gradients.
    saved = as_written.seconds.exposed["ep"] - ahead.seconds.exposed["ep"]
    shared_flops = sum(flops for (_, module, _), flops in ahead.flops.items() if "shared_experts" in module)
    assert ahead.cluster is not None and saved == pytest.approx(shared_flops / ahead.cluster.achieved_flops, rel=1e-6)


def behind(model: str, layout: str, **options: Any) -> tuple[float, float, float]:
    """Planned seconds of a layer's dispatch that the shared experts hide, of one way, and of the shared experts."""
    made = plan(PlanRequest(model=model, **parse_layout(layout), **options))
    work, side, tokens = made.workload, made.evaluation.experts.side, made.evaluation.dense.tokens
    one_way = sent_tokens(work, side, tokens, ranks_per_domain(work.gpus, work.cluster))
    seconds = 2 * shared_parameters(work.model) * tokens / work.achieved_flops
    return behind_shared_experts(work, side, tokens, one_way), transfer_seconds(one_way, work.cluster), seconds


def test_the_planner_hides_one_way_of_dispatch_in_every_pass():
    hidden, one_way, shared = behind("glm-5.2", "4,1,64/4,64")
    assert 0 < one_way < shared and hidden == pytest.approx(3 * one_way)
    assert behind("glm-5.2", "4,1,64/4,64", recompute="none")[0] == pytest.approx(2 * one_way)
    # Over RDMA: as long as the shared experts run, twice as long in the backward pass.
    hidden, one_way, shared = behind("glm-5.2", "4,1,64/1,256")
    assert one_way > 2 * shared and hidden == pytest.approx(4 * shared)


def test_the_planner_hides_nothing_in_chunks_nor_behind_shared_experts_that_run_first():
    assert behind("glm-5.2", "4,1,64/4,64", ep_chunks=2)[0] == 0
    assert behind("glm-5.2", "4,1,64/256,1")[0] == 0
    assert behind("qwen3.5-397b-a17b", "4,1,64/4,64")[0] == 0
