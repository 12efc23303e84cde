"""Tokens, model FLOPs and phases of training steps: the same figures at equal work on every layout (INVARIANTS L2)."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_moe_strategy import ThroughputMonitor
from lightning_moe_strategy.callbacks import phase_clock, throughput
from lightning_moe_strategy.callbacks.phase_clock import PhaseClock
from lightning_moe_strategy.models.lightning_module import MoELanguageModel
from lightning_moe_strategy.plan.model_files import from_sizes
from lightning_moe_strategy.plan.time import model_flops_per_token
from tests.flavour import L
from tests.modules import RandomTokens
from tests.parity import LAYOUTS_OF_4, fit

LENGTH, NUM_SAMPLES, STEPS = 30, 8, 5  # 30: padded under cp


def make_model() -> MoELanguageModel:
    return MoELanguageModel("tiny")


def batches(dp: int) -> DataLoader:
    return DataLoader(RandomTokens(NUM_SAMPLES * STEPS, LENGTH), batch_size=NUM_SAMPLES // dp)


class Noted(ThroughputMonitor):
    """Keeps what a reading is made of."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_steps=2, **options)
        self.logged: dict[str, float] = {}
        self.flops = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        before = self._flops_since_reading
        super().on_train_batch_start(*args)
        self.flops += self._flops_since_reading - before

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logged = {name: float(value) for name, value in trainer.logged_metrics.items()}


def readings(degrees: dict[str, int]) -> tuple[int, float, dict[str, float], float]:
    monitor = Noted(peak_flops=1e12)
    started = time.perf_counter()
    fit(degrees, make_model, batches, callbacks=(monitor,), shift="module", max_steps=STEPS)
    return monitor.tokens_seen, monitor.flops, monitor.logged, time.perf_counter() - started


@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[0], LAYOUTS_OF_4[2], LAYOUTS_OF_4[4]], ids=["fsdp4", "cp2", "cp4"])
def test_tokens_and_flops_are_those_of_the_whole_batch_on_every_layout(degrees, ranks4):
    import dataclasses

    shape = from_sizes(dataclasses.asdict(make_model().config), name="tiny")
    results = ranks4(readings, degrees)
    flops = model_flops_per_token(shape, LENGTH) * NUM_SAMPLES * LENGTH * STEPS
    assert sum(of_rank[1] for of_rank in results) == pytest.approx(flops)
    for tokens_seen, _, logged, elapsed in results:
        assert tokens_seen == NUM_SAMPLES * LENGTH * 4  # two readings of two steps
        assert logged["tokens_per_second_per_gpu"] == pytest.approx(logged["tokens_per_second"] / 4)
        of_a_token = model_flops_per_token(shape, LENGTH)
        assert logged["mfu"] == pytest.approx(logged["tokens_per_second_per_gpu"] * of_a_token / 1e12, rel=1e-5)
        phases = [logged[f"seconds/{phase}"] for phase in phase_clock.PHASES]
        assert min(phases) > 0 and 2 * sum(phases) < elapsed


def test_a_phase_is_the_time_between_two_marks_and_none_belongs_to_no_step(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 15.0])
    monkeypatch.setattr(phase_clock.time, "perf_counter", lambda: next(now))
    clock = PhaseClock(torch.device("cpu"))
    for phase in (None, "data", "forward", None, "forward"):
        clock.mark(phase)
    assert clock.read() == {"data": 1.0, "forward": 6.0, "backward": 0.0, "optimizer": 0.0}
    clock.mark("optimizer")
    assert clock.read() == {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 1.0}


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", 0.989e15), ("NVIDIA H100 80GB HBM3", 0.989e15), ("NVIDIA GB200", 2.5e15), ("NVIDIA A100", None)],
)
def test_the_peak_of_a_gpu_is_the_data_sheets(device, peak):
    assert throughput._known_peak(device) == peak


def test_a_model_the_planner_does_not_know_has_no_mfu_and_that_is_said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(throughput, "rank_zero_info", said.append)
    monitor = ThroughputMonitor(peak_flops=1e12)
    strategy = SimpleNamespace(micro_batch=SimpleNamespace(num_tokens=8, context=8))
    module: Any = torch.nn.Linear(2, 2)
    for _ in range(2):
        monitor.on_train_batch_start(SimpleNamespace(strategy=strategy), module, None, 0)  # type: ignore[arg-type]
    (sentence,) = said
    assert "no mfu" in sentence and "Linear" in sentence and monitor._flops_since_reading == 0


@pytest.mark.parametrize(("option", "value"), [("every_n_steps", 0), ("peak_flops", 0.0)])
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=rf"{option}\({value}\)"):
        ThroughputMonitor(**{option: value})
