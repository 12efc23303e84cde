"""Other optimizers on shards: those of torch that are element-wise equal one process, the rest is refused or named."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DataLoader

from lightning_moe_strategy import Muon
from lightning_moe_strategy.optimizers.vouched import ELEMENTWISE, home_of_step, is_vouched, unvouched
from tests.modules import PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit, reference, whole

TOLERANCE = 1e-5
"""Relative, FP32, after 3 steps: where squares of gradients are tiny, Adam's quotients enlarge the last digit."""

NUM_STEPS, BATCH, LENGTH = 3, 8, 24

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw-foreach": ("AdamW", dict(lr=1e-2, foreach=True)),
    "adamw-fused": ("AdamW", dict(lr=1e-2, fused=True)),
    "adamw-amsgrad": ("AdamW", dict(lr=1e-2, amsgrad=True)),
    "adam": ("Adam", dict(lr=1e-2)),
    "sgd-momentum": ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "nadam": ("NAdam", dict(lr=1e-2)),
    "radam": ("RAdam", dict(lr=1e-2)),
    "rmsprop": ("RMSprop", dict(lr=1e-3, momentum=0.9, centered=True)),
    "adagrad": ("Adagrad", dict(lr=1e-2)),
    "adadelta": ("Adadelta", dict(lr=1.0)),
    "adamax": ("Adamax", dict(lr=1e-2)),
    "asgd": ("ASGD", dict(lr=1e-2)),
}


class WithOptimizer(PlainLanguageModel):
    kind: tuple[Any, dict[str, Any]] = ("SGD", {})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind, options = self.kind
        return (getattr(torch.optim, kind) if isinstance(kind, str) else kind)(self.parameters(), **options)


def with_optimizer(kind: tuple[Any, dict[str, Any]]) -> WithOptimizer:
    model = WithOptimizer()
    model.kind = kind
    return model


def batches(dp: int) -> DataLoader:
    return loader(NUM_STEPS * BATCH, LENGTH, BATCH // dp)


def trained(degrees: dict[str, int], kinds: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name, kind in kinds.items():
        _, model, _ = fit(
            degrees, lambda kind=kind: with_optimizer(kind), batches, shift="module", max_steps=NUM_STEPS
        )  # fmt: skip
        results[name] = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return results


OFTEN = ("adamw-foreach", "adamw-fused", "sgd-momentum", "nadam", "rmsprop")


@pytest.mark.parametrize("names", [OFTEN, pytest.param([n for n in KINDS if n not in OFTEN], marks=pytest.mark.slow)])
def test_elementwise_optimizers_of_torch_equal_one_process(names, ranks4):
    kinds = {name: KINDS[name] for name in names}
    expected = {
        name: reference(lambda kind=kind: with_optimizer(kind), batches(1), num_steps=NUM_STEPS)[0]
        for name, kind in kinds.items()
    }
    found = {
        (kind, name): float((parameters[name] - p.detach()).norm() / p.detach().norm())
        for results in ranks4(trained, LAYOUTS_OF_4[2], kinds)
        for kind, parameters in results.items()
        for name, p in expected[kind].named_parameters()
    }
    assert {key: difference for key, difference in found.items() if difference > TOLERANCE} == {}


def test_the_table_holds_every_optimizer_that_is_vouched_for():
    homes = {home_of_step(with_optimizer(kind).configure_optimizers()) for kind in KINDS.values()}
    assert homes == {f"torch.optim.{name}" for name in ELEMENTWISE}
    others = {
        name for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    } - {kind for kind, _ in KINDS.values()}  # fmt: skip
    assert others == {"Optimizer", "Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam"}


class Subclass(torch.optim.AdamW):
    """As projects have them: other defaults, the same step."""


class Sign(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class OtherStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_subclass_is_vouched_for_while_it_keeps_its_parents_step():
    weight = [nn.Parameter(torch.ones(2, 2))]
    for optimizer in (Subclass(weight), torch.optim.AdamW(weight), Subclass(weight), Muon(weight)):
        assert is_vouched(home_of_step(optimizer))
    for optimizer in (Sign(weight, 1.0), OtherStep(weight)):
        assert not is_vouched(home_of_step(optimizer))


def said(degrees: dict[str, int], kind: tuple[Any, dict[str, Any]]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "simplefilter", lambda *args: None)  # fit ignores warnings
        try:
            fit(degrees, lambda: with_optimizer(kind), batches, shift="module", max_steps=1)
        except ValueError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught if "optimizer" in str(warning.message).lower()]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (("Adafactor", {}), "Adafactor cannot run on sharded parameters"),
        (("Rprop", {}), "Rprop cannot run on sharded parameters"),
        (("LBFGS", {}), "LBFGS cannot run on sharded parameters"),
        ((Sign, {"lr": 0.1}), "the optimizer Sign (tests.test_optimizers) sees the shards"),
    ],
)
def test_what_is_not_elementwise_is_refused_or_named_once_at_the_start(kind, sentence, ranks2):
    sentences = ranks2(said, dict(fsdp=2, e_fsdp=1, ep=2), kind)[0]
    assert len([s for s in sentences if sentence in s]) == 1, sentences


def sentences_about_torchs_muon() -> list[str]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("one",))
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    return unvouched([torch.optim.Muon([weight]), torch.optim.AdamW([weight]), torch.optim.Muon([weight])])


def test_torchs_muon_is_pointed_to_ours(ranks1):
    (sentence,) = ranks1(sentences_about_torchs_muon)[0]
    assert "lightning_moe_strategy.Muon" in sentence


def test_optimizers_of_parameters_that_are_not_sharded_are_the_users_business():
    assert unvouched([torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))])]) == []
