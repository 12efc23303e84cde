"""What is gathered and reduced, how often, in which order, and what is left in memory (INVARIANTS C1-C3)."""

from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe_strategy.expert_parallel import local_math
from lightning_moe_strategy.prefetch_order import backward_prefetch, forward_prefetch, group_units
from lightning_moe_strategy.sharding import unsharded_units
from tests.modules import HuggingFaceLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit

LAYERS = 3
NUM_STEPS = 3
"""The first step of a stage shows the order of the units and runs without prefetch."""

Event = tuple[str, str]


@contextmanager
def recorded_events(events: list[Event]) -> Any:
    """Every gather that starts, every reduction, and every start of the experts' own computation."""
    unshard, post_backward = FSDPParamGroup.unshard, FSDPParamGroup.post_backward
    run = local_math.expert_mlp

    def watched_unshard(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        pending = group._all_gather_result is not None
        unshard(group, *args, **kwargs)
        if group._all_gather_result is not None and not pending:
            events.append(("gather", group._module_fqn or ""))

    def watched_post_backward(group: FSDPParamGroup, *unused: Any) -> None:
        has_gradients = any(param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None
                            for param in group.fsdp_params if hasattr(param, "_unsharded_param"))  # fmt: skip
        post_backward(group, *unused)
        if has_gradients:
            events.append(("reduce", group._module_fqn or ""))

    def watched_run(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        events.append(("compute", "forward"))
        out = run(rows, *args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda grad: events.append(("compute", "backward")))
        return out

    FSDPParamGroup.unshard, FSDPParamGroup.post_backward = watched_unshard, watched_post_backward
    local_math.expert_mlp = watched_run
    try:
        yield
    finally:
        FSDPParamGroup.unshard, FSDPParamGroup.post_backward = unshard, post_backward
        local_math.expert_mlp = run


class Watch(L.Callback):
    """The events of each training step: (forward, backward), and what is unsharded after it."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.steps: list[tuple[list[Event], list[Event]]] = []
        self.left_over: list[str] = []
        self.after_validation: list[str] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.events.clear()

    def on_before_backward(self, *args: Any) -> None:
        self.forward = list(self.events)
        self.events.clear()

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.steps.append((self.forward, list(self.events)))
        self.left_over += unsharded_units(trainer.strategy.units)

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self.after_validation += unsharded_units(trainer.strategy.units)


class Checkpointed(HuggingFaceLanguageModel):
    """Recomputes every block in its backward pass, and before its experts' turn: the shared experts come first."""

    def __init__(self) -> None:
        super().__init__("deepseek_v3", num_hidden_layers=LAYERS, first_k_dense_replace=0)
        for layer in self.model.model.layers:
            forward = layer.forward
            layer.forward = partial(checkpoint, forward, use_reentrant=False)


def train(degrees: dict[str, int], make_model: Any, precision: str = "32-true") -> dict[str, Any]:
    events: list[Event] = []
    watch = Watch(events)
    with recorded_events(events):
        trainer, model, _ = fit(
            degrees, make_model, lambda dp: loader(8 * NUM_STEPS, 24, 8 // dp), callbacks=(watch,),
            max_steps=NUM_STEPS, precision=precision,
        )  # fmt: skip
        trainer.validate(model, loader(4, 24, 2), verbose=False)
    units = {unit.name: unit.kind for unit in trainer.strategy.units}
    with_parameters = [name for name in units if name]  # the root holds none of its own
    return {
        "steps": watch.steps,
        "left": watch.left_over,
        "validated": watch.after_validation,
        "units": with_parameters,
    }


def count(events: list[Event], kind: str) -> dict[str, int]:
    names = [name for event, name in events if event == kind]
    return {name: names.count(name) for name in names}


LOOKUPS = ("embed", "embed_tokens", "embedding")
"""Modules of torch's own embedding, by their last name: their backward passes do not read their weights."""


def assert_gathered_and_reduced_once(step: tuple[list[Event], list[Event]], units: Iterable[str]) -> None:
    """In each pass that reads a unit's weights they are gathered, and its gradients are reduced, once."""
    forward, backward = step
    once = dict.fromkeys(units, 1)
    assert count(forward, "gather") == once and count(forward, "reduce") == {}
    assert count(backward, "reduce") == once
    assert count(backward, "gather") == {name: 1 for name in once if name.rpartition(".")[2] not in LOOKUPS}
    assert len(count(backward, "gather")) == len(once) - 1


make_plain = partial(HuggingFaceLanguageModel, num_hidden_layers=LAYERS)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make_model", [make_plain, Checkpointed], ids=["kept", "recomputed"])
def test_each_unit_is_gathered_once_in_each_pass_that_reads_it_and_reduced_once(make_model, precision, ranks4):
    for result in ranks4(train, LAYOUTS_OF_4[2], make_model, precision):
        for step in result["steps"]:
            assert_gathered_and_reduced_once(step, result["units"])


@pytest.mark.parametrize("make_model", [make_plain, Checkpointed], ids=["kept", "recomputed"])
def test_nothing_stays_unsharded_after_a_step_or_a_validation(make_model, ranks4):
    for result in ranks4(train, LAYOUTS_OF_4[2], make_model):
        assert result["left"] == [] and result["validated"] == []


def test_all_ranks_issue_the_same_collectives_in_the_same_order(ranks4):
    first, *others = (result["steps"] for result in ranks4(train, LAYOUTS_OF_4[4], make_plain))
    assert all(other == first for other in others)


def all_reduces_of_replicas(degrees: dict[str, int], accumulate: int) -> int:
    """Gradient all-reduces over replicas in one step; the strategy's own are single numbers."""
    sizes: list[int] = []
    all_reduce = torch.distributed.all_reduce

    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = watched
    try:
        fit(degrees, make_plain, lambda dp: loader(8, 24, 8 // dp // accumulate), accumulate_grad_batches=accumulate,
            callbacks=(ExpertLoadMonitor(plot=False),))  # fmt: skip
    finally:
        torch.distributed.all_reduce = all_reduce
    return sum(size > 8 * LAYERS for size in sizes)


def test_replicas_are_reduced_once_per_step_and_not_per_micro_batch(ranks4):
    once = ranks4(all_reduces_of_replicas, LAYOUTS_OF_4[9], 1)
    assert once[0] > 0 and ranks4(all_reduces_of_replicas, LAYOUTS_OF_4[9], 2) == once


def experts(layer: int) -> str:
    return f"model.model.layers.{layer}.mlp.experts"


def computes_before(events: list[Event], name: str) -> int:
    """How many expert layers have started to compute when the unit's gather starts."""
    return [kind for kind, _ in events[: events.index(("gather", name))]].count("compute")


@pytest.mark.parametrize("make_model", [make_plain, Checkpointed], ids=["kept", "recomputed"])
def test_the_next_layers_experts_are_on_their_way_before_this_layers_compute(make_model, ranks4):
    result = ranks4(train, LAYOUTS_OF_4[2], make_model)[0]
    for forward, backward in result["steps"][1:]:
        for layer in range(1, LAYERS):
            assert computes_before(forward, experts(layer)) <= layer - 1
        for steps_back, layer in enumerate(range(LAYERS - 2, -1, -1)):
            # In a recompute each layer computes forward and backward.
            done = [event for event in backward[: backward.index(("gather", experts(layer)))] if event[0] == "compute"]
            assert done.count(("compute", "backward")) <= steps_back
            assert done.count(("compute", "forward")) <= steps_back


def test_prefetch_lists_walk_the_groups_in_order():
    kinds = {
        "e": "outer",
        "b0": "block",
        "b0.x": "experts",
        "b1": "block",
        "b1.r": "router",
        "b1.x": "experts",
        "h": "outer",
    }
    groups = group_units(["", "e", "b0", "b0.x", "b1", "b1.r", "b1.x", "h"], kinds)
    assert groups == [["e"], ["b0", "b0.x"], ["b1", "b1.r", "b1.x"], ["h"]]
    assert forward_prefetch(groups) == {
        "": ["e"],
        "e": ["b0", "b0.x"],
        "b0": ["b0.x", "b1"],
        "b0.x": ["b1", "b1.r", "b1.x"],
        "b1": ["b1.r", "b1.x", "h"],
        "b1.x": ["h"],
        "h": [],
    }
    assert backward_prefetch(groups)["b1"] == ["b1.x", "b1.r", "b0", "b0.x"]
    assert backward_prefetch(groups)["h"] == ["b1", "b1.x", "b1.r"]


def test_a_step_in_which_no_unit_runs_prefetches_nothing():
    assert forward_prefetch(group_units([""], {})) == backward_prefetch([]) == {}
