"""Two training steps are those of one process, whatever is accumulated, recomputed, rounded and clipped.

INVARIANTS G1, G2, G4, L1, L2, R1, R3, R6, C1-C3 and P1, all at once: dense parameters over (fsdp, cp), experts over
(e_fsdp, ep), sequences that ``2 * cp`` does not divide, another share of ignored labels in each. Everything is trained
in one go.
"""

import copy
from dataclasses import astuple, dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_strategy import ExpertLoadMonitor, MoELanguageModel, ThroughputMonitor
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.prefetch_order import Group, group_units
from lightning_moe_strategy.sharding import unsharded_units
from lightning_moe_strategy.units import find_routers
from tests.flavour import Callback, LightningModule
from tests.modules import VOCABULARY, loader
from tests.parity import LAYOUTS_OF_4, fit, whole
from tests.test_communication import Event, assert_gathered_and_reduced_once, recorded_events

pytestmark = pytest.mark.slow

LAYOUT = LAYOUTS_OF_4[2]  # fsdp 2, cp 2, e_fsdp 2, ep 2
NUM_LAYERS, TOP_K, NUM_STEPS, NUM_SEQUENCES, LENGTH = 2, 2, 2, 4, 21
CLIP = 0.5

Tensors = dict[str, Tensor]

BOUNDS = {
    # Sums over ranks and micro-batches come in another order: 1e-7 for each rounding.
    "32-true": 3e-6,
    # 4e-3 for each rounding to 8 bits. What is added up in BF16 in one process is added up in FP32 over ranks.
    "bf16-mixed": 4e-2,
}
"""Of a parameter's gradient, relative to its norm."""
BOUNDS_OF_STEP = {"32-true": 5e-5, "bf16-mixed": 4e-2}
"""Of what two steps add to a parameter: in FP32 the rounding of the weight counts, which is 100 times as large."""
BOUND_OF_OTHER_ROUTING = 0.5
"""In BF16, of the MLP and its norm in a layer that has sent a token to another expert than one process did: their
scores are equal but for a rounding. One of 21 tokens that an expert has in a sequence is a fifth of its gradient."""
MOST_SENT_ELSEWHERE = 0.01
"""Of a layer's tokens."""


@dataclass(frozen=True)
class Case:
    num_accumulated: int
    recompute: str
    precision: str
    clip: float | None

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


CASES = [Case(*each) for each in product((1, 3), ("none", "block", "selective"), BOUNDS, (None, CLIP))]


@dataclass
class Found:
    """What two steps of one case were, on one rank or in one process."""

    gradients: list[Tensors]
    """Of every step before clipping."""
    parameters: list[Tensors]
    """Before the first step, and after the last."""
    tokens: Tensors
    """By layer, per expert, of all ranks."""
    traffic: list[tuple[list[Event], list[Event]]] = field(default_factory=list)
    """Of every micro-batch, forward and backward."""
    unsharded: list[str] = field(default_factory=list)
    """Units that were, after a micro-batch."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Of the units that hold parameters, by name."""
    tokens_seen: int = 0
    """As the throughput counts them."""
    dtypes_of_routers: set[torch.dtype] = field(default_factory=set)
    """Of all floating-point outputs, recomputed ones too."""


class Model(MoELanguageModel):
    """With an optimizer whose step shows the gradient's size, and remembers the step before."""

    def __init__(self) -> None:
        super().__init__(
            dict(preset="tiny", vocab_size=VOCABULARY, hidden=32, layers=NUM_LAYERS, head_dim=8, num_experts=4,
                 top_k=TOP_K, moe_intermediate=16, shared_experts=1)
        )  # fmt: skip

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(num_accumulated: int, num_parts: int) -> DataLoader:
    """Of ``1 / num_parts`` of a step's sequences."""
    num_samples = NUM_STEPS * NUM_SEQUENCES * num_accumulated
    return loader(num_samples, LENGTH, NUM_SEQUENCES * num_accumulated // num_parts)


def whole_parameters(module: nn.Module) -> Tensors:
    return {name: whole(parameter.detach()).float().clone() for name, parameter in module.named_parameters()}


# The strategy


class Watch(Callback):
    """What a case does on this rank."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.found = Found(gradients=[], parameters=[], tokens={})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.found.parameters.append(whole_parameters(pl_module))
        self.found.kinds = {unit.name: unit.kind for unit in trainer.strategy.units if unit.name}
        for router in find_routers(pl_module, trainer.strategy.experts).values():
            router.register_forward_hook(self.see_dtypes)

    def see_dtypes(self, router: nn.Module, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        self.found.dtypes_of_routers |= {each.dtype for each in outputs if each.is_floating_point()}

    def on_train_batch_start(self, *args: Any) -> None:
        self.events.clear()

    def on_before_backward(self, *args: Any) -> None:
        self.forward = list(self.events)
        self.events.clear()

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        self.found.traffic.append((self.forward, list(self.events)))
        self.found.unsharded += unsharded_units(trainer.strategy.units)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.found.parameters.append(whole_parameters(pl_module))
        monitor = next(each for each in trainer.callbacks if isinstance(each, ExpertLoadMonitor))
        throughput = next(each for each in trainer.callbacks if isinstance(each, ThroughputMonitor))
        self.found.tokens_seen = throughput.tokens_seen
        self.found.tokens = {name: trainer.strategy.reduce(tokens_E, reduce_op="sum")
                             for name, tokens_E in monitor.tokens_on_this_rank("train").items()}  # fmt: skip


def train_all(cases: list[Case]) -> list[Found]:
    """Every case on this rank."""
    return [train(case) for case in cases]


def train(case: Case) -> Found:
    events: list[Event] = []
    watch = Watch(events)
    with recorded_events(events):
        _, _, keep = fit(
            LAYOUT | dict(recompute=case.recompute), Model,
            lambda dp: batches(case.num_accumulated, dp * case.num_accumulated), shift="module",
            callbacks=(watch, ExpertLoadMonitor(plot=False), ThroughputMonitor(every_n_steps=1)),
            max_steps=NUM_STEPS, precision=case.precision,
            accumulate_grad_batches=case.num_accumulated, gradient_clip_val=case.clip,
        )  # fmt: skip
    watch.found.gradients = keep.steps
    return watch.found


_found: dict[Case, list[Found]] = {}


def found_by(ranks4: Any, case: Case) -> list[Found]:
    """On each rank."""
    if not _found:
        of_ranks = ranks4(train_all, CASES)
        _found.update({each: list(ranks) for each, ranks in zip(CASES, zip(*of_ranks, strict=True), strict=True)})
    return _found[case]


# One process


@cache
def one_process(num_accumulated: int, precision: str, clip: float | None) -> Found:
    """A plain loop over whole steps; under ``bf16-mixed`` with FP32 weights, which are rounded and not autocast."""
    torch.manual_seed(0)
    model = Model().train()
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = model.configure_optimizers()
    found = Found(gradients=[], parameters=[whole_parameters(model)], tokens={})
    for index, batch in zip(range(NUM_STEPS), batches(num_accumulated, 1), strict=True):
        optimizer.zero_grad()
        run = model if precision == "32-true" else in_bf16(model)
        counting = [experts.register_forward_pre_hook(counter(found.tokens, name))
                    for name, experts in find_experts(run).items()]  # fmt: skip
        run.training_step(batch, index).backward()
        for hook in counting:
            hook.remove()
        for parameter, computed in zip(model.parameters(), run.parameters(), strict=True):
            assert computed.grad is not None
            parameter.grad = computed.grad.float()
        found.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    found.parameters.append(whole_parameters(model))
    return found


def in_bf16(model: Model) -> Model:
    """A copy that computes in BF16, its routers in FP32; buffers stay FP32."""
    rounded = copy.deepcopy(model)
    routers = find_routers(rounded, find_experts(rounded)).values()
    exact = {id(parameter) for router in routers for parameter in router.parameters()}
    for parameter in rounded.parameters():
        if id(parameter) not in exact:
            parameter.data = parameter.data.bfloat16()
    for router in routers:
        router.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return rounded


def counter(tokens: Tensors, name: str) -> Any:
    def count_tokens(experts: nn.Module, args: tuple[Any, ...]) -> None:
        (ids_TK,) = [each for each in args if not each.is_floating_point()]
        tokens[name] = tokens.get(name, 0) + ids_TK.flatten().bincount(minlength=int(experts.num_experts))

    return count_tokens


# The matrix


def steps_taken(found: Found) -> Tensors:
    before, after = found.parameters
    return {name: after[name] - before[name] for name in before}


def beyond(differences: Tensors, expected: Tensors, bound: float, loose: tuple[str, ...]) -> dict[str, float]:
    """Differences above the bound, relative; parameters that begin with one of ``loose`` have another."""
    relative = {name: float(differences[name].norm() / expected[name].norm()) for name in expected}
    return {name: each for name, each in relative.items()
            if not each < (BOUND_OF_OTHER_ROUTING if name.startswith(loose) else bound)}  # fmt: skip


def parts_of_other_routing(found: Found, expected: Found) -> tuple[str, ...]:
    """Beginnings of the names of parameters in layers that counted other tokens."""
    others = [name for name in found.tokens if not found.tokens[name].equal(expected.tokens[name])]
    return tuple(f"{name.removesuffix('.mlp.experts')}.mlp" for name in others)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_parameters_of_two_steps_are_those_of_one_process(case, ranks4):
    expected = one_process(case.num_accumulated, case.precision, case.clip)
    for found in found_by(ranks4, case):
        loose = () if case.precision == "32-true" else parts_of_other_routing(found, expected)
        assert len(found.gradients) == NUM_STEPS
        for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
            assert ours.keys() == theirs.keys()
            differences = {name: ours[name] - theirs[name] for name in theirs}
            assert beyond(differences, theirs, BOUNDS[case.precision], loose) == {}
        ours, theirs = steps_taken(found), steps_taken(expected)
        differences = {name: ours[name] - theirs[name] for name in theirs}
        assert beyond(differences, theirs, BOUNDS_OF_STEP[case.precision], loose) == {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_sees_the_same_whole_parameters(case, ranks4):
    first, *others = (found.parameters[1] for found in found_by(ranks4, case))
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clipping_bites_where_it_is_on(case, ranks4):
    """Else on and off would be the same test."""
    squares = [sum(float(g.double().square().sum()) for g in gradients.values())
               for gradients in found_by(ranks4, case)[0].gradients]  # fmt: skip
    assert all(square > CLIP**2 for square in squares)


@pytest.mark.parametrize("case", [case for case in CASES if case.recompute != "none"], ids=str)
def test_what_is_recomputed_changes_no_bit(case, ranks4):
    kept = Case(case.num_accumulated, "none", case.precision, case.clip)
    for ours, theirs in zip(found_by(ranks4, case), found_by(ranks4, kept), strict=True):
        for some, others in zip([*ours.gradients, *ours.parameters], [*theirs.gradients, *theirs.parameters],
                                strict=True):  # fmt: skip
            assert [name for name in some if not torch.equal(some[name], others[name])] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_is_counted_once_for_each_of_its_experts(case, ranks4):
    num_tokens = NUM_STEPS * NUM_SEQUENCES * case.num_accumulated * LENGTH
    expected = one_process(case.num_accumulated, case.precision, case.clip)
    for found in found_by(ranks4, case):
        assert len(found.tokens) == NUM_LAYERS
        assert all(int(tokens_E.sum()) == TOP_K * num_tokens for tokens_E in found.tokens.values())
        most = 0 if case.precision == "32-true" else MOST_SENT_ELSEWHERE * num_tokens
        for name, tokens_E in found.tokens.items():
            assert int((tokens_E - expected.tokens[name]).abs().sum()) / 2 <= most


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_counted_once_and_routers_compute_in_fp32(case, ranks4):
    for found in found_by(ranks4, case):
        assert found.tokens_seen == NUM_STEPS * NUM_SEQUENCES * case.num_accumulated * LENGTH
        assert found.dtypes_of_routers == {torch.float32}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_unit_is_gathered_once_in_each_pass_that_reads_it_and_reduced_once(case, ranks4):
    for found in found_by(ranks4, case):
        assert len(found.traffic) == NUM_STEPS * case.num_accumulated
        for step in found.traffic:
            assert_gathered_and_reduced_once(step, found.kinds)
        assert found.unsharded == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_issue_the_same_collectives_in_the_same_order(case, ranks4):
    first, *others = (found.traffic for found in found_by(ranks4, case))
    assert all(other == first for other in others)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_next_layers_experts_are_on_their_way_before_this_layers_compute(case, ranks4):
    found = found_by(ranks4, case)[0]
    for forward, backward in found.traffic[1:]:  # the first one shows the order of the units
        order = [name for event, name in forward if event == "gather"]
        layers = experts_in_order(group_units(order, found.kinds), found.kinds)
        assert len(layers) == NUM_LAYERS
        assert_started_ahead(forward, layers)
        assert_started_ahead(backward, layers[::-1])


def experts_in_order(groups: list[Group], kinds: dict[str, str]) -> list[str]:
    return [name for group in groups for name in group if kinds[name] == "experts"]


def assert_started_ahead(events: list[Event], layers: list[str]) -> None:
    """Layer n + 1 is gathered before layer n computes: when at most n have. A recompute computes each twice."""
    for place, name in enumerate(layers[1:]):
        before = events[: events.index(("gather", name))]
        for direction in ("forward", "backward"):
            assert before.count(("compute", direction)) <= place, (name, direction)
