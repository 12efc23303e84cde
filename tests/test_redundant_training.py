"""``balance="redundant"`` under a real Trainer on gloo ranks, against one process and against experts at home."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_strategy import ExpertLoadMonitor, FSDPCPEPStrategy
from lightning_moe_strategy.callbacks import expert_load
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of
from lightning_moe_strategy.expert_parallel.redundant import RedundantDispatcher
from tests import parity
from tests.modules import HuggingFaceLanguageModel
from tests.parity import LAYOUTS_OF_4, InOrder, fit, reference, worst_difference
from tests.test_expert_load import MemoryLogger
from tests.test_router_losses import NUM_SEQUENCES, Ours, PaddedTokens, name_of

TOLERANCE = 1e-6
"""Relative, FP32: a weight's gradient is a sum over rows that other ranks have made parts of."""
AGAINST_ONE_PROCESS = 2e-6
"""As of every layout: sums over ranks come in another order."""
REDUNDANT = dict(balance="redundant")
MAKERS: dict[str, Any] = {
    "ours": partial(Ours, num_experts=8),
    "qwen3_moe": partial(HuggingFaceLanguageModel, "qwen3_moe", num_experts=8),
}
TARGETS = {"ours": "shift_labels", "qwen3_moe": "labels"}


def batches(dp: int, *, targets: str, num_micro_batches: int = 1) -> DataLoader:
    return DataLoader(PaddedTokens(NUM_SEQUENCES * num_micro_batches, targets), batch_size=NUM_SEQUENCES // dp)


class CheckRows(Callback):
    """Every plan of the run was exact, and experts moved."""

    def __init__(self, exact: bool = True) -> None:
        self.exact, self.moved_experts = exact, 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for experts in trainer.strategy.experts.values():
            dispatcher = dispatcher_of(experts)
            assert isinstance(dispatcher, RedundantDispatcher)
            tally = dispatcher.tally
            assert not self.exact or tally.busiest_after == tally.mean_rows < tally.busiest_before
            self.moved_experts += tally.moved_experts


def trained(
    degrees: dict[str, Any], name: str, *, num_micro_batches: int = 1, **options: Any
) -> tuple[dict[str, Tensor], int]:
    """The first step's gradients, and how many experts moved in the run."""
    check = CheckRows() if degrees.get("balance") else None
    loader = partial(batches, targets=TARGETS[name], num_micro_batches=num_micro_batches)
    callbacks = () if check is None else (check,)
    _, _, keep = fit(degrees, MAKERS[name], loader, callbacks=callbacks, **options)
    return keep.steps[0], 0 if check is None else check.moved_experts


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[i] for i in (2, 4)], ids=name_of)
@pytest.mark.parametrize("name", MAKERS)
def test_every_gradient_is_that_of_experts_at_home(name: str, degrees: Any, recompute: str, ranks4: Any):
    degrees = degrees | dict(recompute=recompute)
    _, expected, _ = reference(MAKERS[name], batches(1, targets=TARGETS[name]))
    at_home = ranks4(trained, degrees, name)
    for (gradients, moved), (plain, _) in zip(ranks4(trained, degrees | REDUNDANT, name), at_home, strict=True):
        difference, parameter = worst_difference(gradients, plain)
        assert difference < TOLERANCE, parameter
        difference, parameter = worst_difference(gradients, expected[0])
        assert difference < AGAINST_ONE_PROCESS, parameter
        assert moved


@pytest.mark.parametrize("name", MAKERS)
def test_accumulated_micro_batches_and_replicas_are_balanced_each(name: str, ranks4: Any):
    run = partial(trained, num_micro_batches=2, accumulate_grad_batches=2)
    degrees = LAYOUTS_OF_4[9]  # d_rep, cp, e_rep and ep of 2
    for (gradients, moved), (plain, _) in zip(
        ranks4(run, degrees | REDUNDANT, name), ranks4(run, degrees, name), strict=True
    ):
        difference, parameter = worst_difference(gradients, plain)
        assert difference < TOLERANCE, parameter
        assert moved


def test_under_bf16_gradients_differ_by_its_rounding(ranks4: Any):
    run = partial(trained, precision="bf16-mixed")
    degrees = LAYOUTS_OF_4[2] | dict(recompute="block")
    for (gradients, moved), (plain, _) in zip(
        ranks4(run, degrees | REDUNDANT, "ours"), ranks4(run, degrees, "ours"), strict=True
    ):
        difference, parameter = worst_difference(gradients, plain)
        assert moved and difference < 2e-2, parameter  # 8 bits of a number: 4e-3 for each rounding


def balanced_by_both(degrees: dict[str, Any]) -> int:
    check = CheckRows()
    fit(degrees, MAKERS["ours"], partial(batches, targets="shift_labels"), callbacks=(check,))
    return check.moved_experts


def test_router_losses_go_along(ranks2: Any):
    assert all(ranks2(balanced_by_both, dict(fsdp=2, ep=2, batch_balance_loss=0.1) | REDUNDANT))


def test_on_one_rank_of_ep_there_is_nothing_to_balance(ranks2: Any):
    plain, redundant = (ranks2(trained_at_ep_1, balance) for balance in ("none", "redundant"))
    for one, other in zip(plain, redundant, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def trained_at_ep_1(balance: str) -> dict[str, Tensor]:
    loader = partial(batches, targets="shift_labels")
    _, _, keep = fit(dict(fsdp=2, ep=1, e_fsdp=2, balance=balance), MAKERS["ours"], loader)  # type: ignore[dict-item]
    return keep.steps[0]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_imbalance": 0.5, **REDUNDANT}, r"max_imbalance\(0.5\) must be at least 1"),
        ({"max_imbalance": 1.05}, r"max_imbalance\(1.05\) .* balance is 'none'"),
        ({"ep_chunks": 4, **REDUNDANT}, r"ep_chunks\(4\), ep_chunk_bytes\(None\) have nothing to bound"),
        ({"ep_chunk_bytes": 1024, **REDUNDANT}, r"ep_chunks\('none'\), ep_chunk_bytes\(1024\)"),
        ({"balance": "biases"}, r"balance\('biases'\) must be one of 'none', 'bias', 'redundant'"),
    ],
)
def test_errors_name_the_setting(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        FSDPCPEPStrategy(**options)


def asked_again() -> str:
    loader = partial(batches, targets="shift_labels")
    trainer, model, _ = fit(dict(fsdp=2, ep=2), MAKERS["ours"], loader)
    with pytest.raises(ValueError) as error:
        fit(dict(fsdp=2, ep=2) | REDUNDANT, lambda: model, loader)
    return str(error.value)


def test_a_sharded_model_refuses_a_trainer_that_balances_otherwise(ranks2: Any):
    assert all("max_imbalance of balance='redundant' None, now 1.0" in text for text in ranks2(asked_again))


class Validated(Ours):
    """Validates on one sequence many times over: loads of its own."""

    def __init__(self) -> None:
        super().__init__(num_experts=8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch["input_ids"][:1].expand(4, -1), batch.get("position_ids"))


class InOrderWithValidation(InOrder):
    def val_dataloader(self) -> DataLoader:
        return batches(2, targets="shift_labels")


def monitored(degrees: dict[str, Any], directory: Path) -> tuple[MemoryLogger, list[str | None]]:
    """What was logged, and the captions of the printed tables."""
    logger, captions = MemoryLogger(directory), []
    loader = partial(batches, targets="shift_labels", num_micro_batches=2)
    original, expert_load_table = parity.InOrder, expert_load.load_table

    def noted(layers: Any, *, caption: str | None) -> Any:
        captions.append(caption)
        return expert_load_table(layers, caption=caption)

    parity.InOrder, expert_load.load_table = InOrderWithValidation, noted
    try:
        fit(degrees, Validated, loader, callbacks=(ExpertLoadMonitor(log_every_n_steps=1),), max_steps=2,
            val_check_interval=1, logger=logger, default_root_dir=str(directory))  # fmt: skip
    finally:
        parity.InOrder, expert_load.load_table = original, expert_load_table
    return logger, captions


def test_the_monitor_shows_the_skew_at_home_and_as_computed(ranks2: Any, tmp_path: Path):
    (logger, captions), _ = ranks2(monitored, dict(fsdp=2, ep=2) | REDUNDANT, tmp_path)
    for stage in ("train", "validate"):
        lines = [figures for _, figures in logger.figures(stage)]
        assert len(lines) == 2
        for figures in lines:
            assert figures["rank_skew_computed"] == 1.0 < figures["rank_skew_at_home"]
            assert figures["rank_skew_at_home_etp2"] == figures["rank_skew_etp2"] == 1.0  # one group of both ranks
            assert 0 < figures["moved_experts"] <= 4  # of two ranks with four experts each, one receives
            # Padding is computed too, and is no load of experts: the figures are near each other, not the same.
            assert figures["rank_skew_at_home"] == pytest.approx(figures["rank_skew"], abs=0.2)
    (caption,) = captions
    assert "1.00 with etp=2, 1.00 as computed" in caption and "Experts moved per layer" in caption


def test_without_redundant_experts_the_monitor_says_what_it_did(ranks2: Any, tmp_path: Path):
    (logger, captions), _ = ranks2(monitored, dict(fsdp=2, ep=2), tmp_path)
    assert captions == [None]
    assert all({"moved_experts", "rank_skew_at_home"}.isdisjoint(figures) for _, figures in logger.figures("train"))
    assert all(figures["rank_skew_etp2"] == 1.0 for _, figures in logger.figures("train"))
