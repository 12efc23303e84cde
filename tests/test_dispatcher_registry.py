"""Names of dispatchers: what a user may ask for, what is refused and why, and a dispatcher of one's own."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_moe_strategy
from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel, register_dispatcher
from lightning_moe_strategy.expert_parallel import registry
from lightning_moe_strategy.expert_parallel.all_gather import AllGatherDispatcher
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of
from lightning_moe_strategy.expert_parallel.one_sided import OneSidedDispatcher
from lightning_moe_strategy.expert_parallel.registry import make_dispatcher, require_dispatcher
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.simulate import simulate
from tests.modules import VOCABULARY, loader
from tests.parity import LAYOUTS_OF_4, fit

LAYERS, EXPERTS = 2, 8
SIZES = {"preset": "tiny", "vocab_size": VOCABULARY, "hidden": 64, "layers": LAYERS, "num_experts": EXPERTS}
make_ours = partial(MoELanguageModel, SIZES, learning_rate=1e-2, warmup_steps=0)
CP2_EP2 = LAYOUTS_OF_4[2]
KINDS = {"all_to_all": AllToAllDispatcher, "all_gather": AllGatherDispatcher, "symm_mem": OneSidedDispatcher}


class Halving(AllToAllDispatcher):
    """A user's: half of every result."""

    def combine(self, rows_RD: Tensor, plan: Any) -> Tensor:
        return super().combine(rows_RD, plan) / 2


def kinds_on_ranks() -> list[str]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    made = [make_dispatcher(name, 8, dist.group.WORLD) for name in ("auto", "all_to_all", "all_gather", "symm_mem")]
    made += [make_dispatcher(name, 8, alone) for name in ("auto", "local", "all_to_all", "all_gather", "symm_mem")]
    try:
        make_dispatcher("local", 8, dist.group.WORLD)
    except ValueError as error:
        return [*(type(dispatcher).__name__ for dispatcher in made), str(error)]
    return []


def test_names_make_the_dispatchers_they_say(ranks2: Any):
    for *kinds, error in ranks2(kinds_on_ranks):
        assert kinds[:4] == [kind.__name__ for kind in (AllToAllDispatcher, *KINDS.values())]
        assert kinds[4:] == [LocalDispatcher.__name__] * 5
        assert "dispatcher('local') needs every expert on every rank, but ep is 2. Set ep=1" in error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "all2all",
            r"dispatcher\('all2all'\) is not known\. Choose among "
            r"'auto', 'local', 'all_to_all', 'all_gather', 'symm_mem'",
        ),
        ("deepep", r"dispatcher\('deepep'\) is not offered: it needs GPUs on NVLink.*not been tested"),
        ("moonep", r"dispatcher\('moonep'\) is not offered: it needs GPUs on NVLink.*not been tested"),
    ],
)
def test_a_name_that_is_not_offered_is_refused_when_the_strategy_is_built(name: str, words: str):
    with pytest.raises(ValueError, match=words):
        FSDPCPEPStrategy(dispatcher=name)


def test_redundant_experts_go_by_all_to_all_alone():
    for name in ("all_gather", "symm_mem"):
        with pytest.raises(ValueError, match=rf"dispatcher\('{name}'\) cannot move experts as balance='redundant'"):
            FSDPCPEPStrategy(dispatcher=name, balance="redundant")
    require_dispatcher("all_to_all", balance="redundant")


def test_a_name_is_registered_once(monkeypatch: Any):
    monkeypatch.setattr(registry, "_registered", {})
    register_dispatcher("halving", Halving)
    FSDPCPEPStrategy(dispatcher="halving")
    for taken in ("halving", "all_to_all", "symm_mem", "auto", "deepep"):
        with pytest.raises(ValueError, match=rf"dispatcher\('{taken}'\) cannot be registered: the name is taken"):
            register_dispatcher(taken, Halving)
    assert "register_dispatcher" in lightning_moe_strategy.__all__


def trained(dispatcher: str, options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], str]:
    if dispatcher == "halving" and dispatcher not in registry.known_dispatchers():
        register_dispatcher("halving", Halving)
    degrees = CP2_EP2 | options | {"dispatcher": dispatcher}
    trainer, _, keep = fit(degrees, make_ours, lambda dp: loader(16, 24, 8 // dp), shift="module", max_steps=2)
    (kind,) = {type(dispatcher_of(module)).__name__ for module in trainer.strategy.experts.values()}
    return keep.steps, kind


@pytest.mark.parametrize("options", [{}, {"recompute": "block", "ep_chunks": 2}], ids=["kept", "recomputed in chunks"])
def test_a_trainer_has_the_same_gradients_bit_by_bit_whatever_brings_the_tokens(ranks4: Any, options: dict[str, Any]):
    expected = ranks4(trained, "auto", options)
    for name in ("all_gather", "symm_mem"):
        for (one, _), (other, kind) in zip(expected, ranks4(trained, name, options), strict=True):
            assert kind == KINDS[name].__name__
            for step, other_step in zip(one, other, strict=True):
                assert all(torch.equal(step[parameter], other_step[parameter]) for parameter in step)


def test_a_trainer_takes_a_dispatcher_that_the_user_registered(ranks4: Any):
    (plain, _), (halved, kind) = ranks4(trained, "auto", {})[0], ranks4(trained, "halving", {})[0]
    assert kind == Halving.__name__
    name = f"model.layers.{LAYERS - 1}.mlp.experts.down_proj"
    assert 0.3 < float(halved[0][name].norm() / plain[0][name].norm()) < 0.7


def test_a_simulation_counts_what_an_all_gather_brings():
    ids = torch.zeros(2, 32, dtype=torch.int64)
    simulated = simulate(
        make_ours, ParallelDims(**LAYOUTS_OF_4[0]), {"input_ids": ids, "labels": ids.clone()}, world_size=4,
        local_world_size=4, precision="32-true", shift="module", dispatcher="all_gather",
    )  # fmt: skip
    copies, hidden, top_k = 4 * 2 * 32, 64, make_ours().model.layers[0].mlp.router.top_k
    # Tokens, probabilities and ids out, and gradients of results; results, and gradients of the first two, back.
    assert simulated.num_bytes["ep", "all_gather"] == LAYERS * copies * 4 * (2 * hidden + 2 * top_k)
    back = LAYERS * copies * 4 * (2 * hidden + top_k)
    assert simulated.num_bytes["ep", "all_to_all"] == back + LAYERS * 4 * (EXPERTS + 4)


def test_a_simulation_cannot_count_what_is_written_into_the_memory_of_others():
    ids = torch.zeros(2, 32, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"dispatcher\('symm_mem'\) cannot be simulated.*Simulate 'all_to_all'"):
        simulate(
            make_ours, ParallelDims(**LAYOUTS_OF_4[0]), {"input_ids": ids, "labels": ids.clone()}, world_size=4,
            local_world_size=4, precision="32-true", shift="module", dispatcher="symm_mem",
        )  # fmt: skip
