"""The optimizer of a simulated step is the module's own, or AdamW with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.simulation.optimizer import ShardOptimizer

MODEL = {"preset": "tiny", "vocab_size": 128, "hidden": 64, "layers": 1, "num_experts": 8, "top_k": 2}


class Sign(torch.optim.Optimizer):
    """An optimizer that torch does not have: momentum and its sign."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 0.1)
            self.update(parameter, momentum)

    def update(self, parameter: Tensor, momentum: Tensor) -> None:
        parameter.sub_(momentum.sign(), alpha=0.1)


class ReadsValues(Sign):
    def update(self, parameter: Tensor, momentum: Tensor) -> None:
        parameter.sub_(momentum, alpha=1 / float(momentum.norm()))


class KeepsRows(Sign):
    def update(self, parameter: Tensor, momentum: Tensor) -> None:
        self.state[parameter]["rows"] = momentum.reshape(momentum.shape[0], -1).sum(1)


class Model(MoELanguageModel):
    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__(MODEL)
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def run(configure: Callable[[Any], Any] | None, layers: int = 1, **options: Any) -> Any:
    ids = torch.zeros(4, 64, dtype=torch.int64)
    make_model = (
        (lambda: MoELanguageModel(MODEL | {"layers": layers})) if configure is None else lambda: Model(configure)
    )
    return simulate(
        make_model, ParallelDims(fsdp=2, cp=2, e_fsdp=2, ep=2), {"input_ids": ids, "shift_labels": ids},
        world_size=4, local_world_size=4, **options,
    )  # fmt: skip


def state_and_parameters(simulated: Any) -> tuple[int, int]:
    buckets = simulated.phases["forward"].buckets
    return buckets.get("optimizer", 0), buckets["parameters"]


@pytest.mark.parametrize(
    ("configure", "moments"),
    [
        (lambda module: torch.optim.SGD(module.parameters(), lr=1.0), 0),
        (lambda module: torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9), 1),
        (lambda module: {"optimizer": torch.optim.RAdam(module.parameters())}, 2),
        (lambda module: Sign(module.parameters()), 1),
        (None, 2),
    ],
    ids=["sgd", "momentum", "radam", "unknown", "adamw-with-a-schedule"],
)
def test_the_modules_own_optimizer_keeps_its_moments(configure, moments):
    simulated = run(configure)
    state, parameters = state_and_parameters(simulated)
    assert moments * parameters <= state < moments * parameters + 1000  # and step numbers
    assert simulated.notes == ()


def test_every_optimizer_of_a_list_steps_and_schedules_are_passed_over():
    def configure(module: Any) -> Any:
        decayed = [p for p in module.parameters() if p.ndim > 1]
        rest = [p for p in module.parameters() if p.ndim <= 1]
        optimizers = [torch.optim.AdamW(decayed), torch.optim.SGD(rest, lr=1.0)]
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1.0)]

    state, parameters = state_and_parameters(run(configure))
    assert 1.9 * parameters < state < 2 * parameters


def test_parameters_that_are_frozen_have_no_state():
    def configure(module: Any) -> Any:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])

    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__(configure)
            self.model.head.requires_grad_(False)

    ids = torch.zeros(2, 64, dtype=torch.int64)
    dims = ParallelDims(fsdp=2, cp=1, e_fsdp=1, ep=2)
    simulated = simulate(Frozen, dims, {"input_ids": ids, "shift_labels": ids}, world_size=2, local_world_size=2)
    state, parameters = state_and_parameters(simulated)
    head = 4 * MODEL["vocab_size"] * MODEL["hidden"] // 2  # type: ignore[operator]
    assert 2 * (parameters - head) <= state < 2 * (parameters - head) + 1000


@pytest.mark.parametrize(
    ("configure", "reason"),
    [
        (lambda module: torch.optim.AdamW(module.parameters(), lr=1 / module.trainer.max_epochs), "trainer.max_epochs"),
        (lambda module: torch.optim.Adafactor(module.parameters()), "Adafactor is not an elementwise optimizer"),
        (lambda module: ReadsValues(module.parameters()), "ReadsValues reads values"),
        (lambda module: KeepsRows(module.parameters()), "KeepsRows is not an elementwise optimizer"),
        (lambda module: None, "returned no optimizer"),
    ],
)
def test_adamw_takes_the_place_of_what_cannot_run_here(configure, reason):
    simulated = run(configure)
    state, parameters = state_and_parameters(simulated)
    assert 2 * parameters <= state < 2 * parameters + 1000
    (note,) = simulated.notes
    assert reason in note and note.endswith("the optimizer simulated is AdamW.")


def test_the_module_is_left_as_it_was():
    seen: list[nn.Parameter] = []

    def configure(module: Any) -> Any:
        seen.extend(module.parameters())
        assert module.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(module.parameters(), lr=1.0)

    module = Model(configure)
    shards = {parameter: nn.Parameter(parameter.data.clone()) for parameter in module.parameters()}
    optimizer = ShardOptimizer(module, shards, for_gpu=True)
    assert list(map(id, seen)) == list(map(id, shards.values()))
    assert optimizer.note is None and optimizer.optimizers[0].param_groups[0]["foreach"]
    assert list(map(id, module.parameters())) == list(map(id, shards))
    with pytest.raises(RuntimeError, match="not attached"):
        _ = module.trainer


def test_gradients_are_clipped_before_the_step():
    order: list[str] = []

    class Logged(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            order.append("step")
            return super().step(closure)

    def clip(optimizer: torch.optim.Optimizer) -> None:
        assert all(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        order.append("clip")

    run(lambda module: Logged(module.parameters(), lr=1.0), clip_gradients=clip)
    assert order == ["clip", "step"] * 2


def test_on_a_gpu_updates_run_over_all_tensors_at_once():
    """torch's choice on a GPU: temporaries of all parameters are there together, on a CPU those of one."""
    at_once, one_by_one = (run(None, 3, accelerator=name).phases["optimizer"].buckets for name in ("gpu", "cpu"))
    assert at_once["temporary"] > 0.99 * at_once["parameters"]
    assert one_by_one["temporary"] < 0.5 * one_by_one["parameters"]
