"""PlanCheck in runs: what it measures, plans, logs and refuses."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.callbacks import peak_measurement, plan_check
from lightning_moe_strategy.callbacks.peak_measurement import DevicePeak
from lightning_moe_strategy.callbacks.peak_prediction import PURPOSES, differences, read_planned_peak
from lightning_moe_strategy.callbacks.plan_check import CheckedPlan, PlanCheck
from lightning_moe_strategy.kernels import router
from lightning_moe_strategy.plan.planner import PlanRequest, parse_layout, plan
from tests.modules import VOCABULARY, HuggingFaceLanguageModel, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, QUIET, InOrder, fit

LENGTH, BATCH = 256, 8
SIZES: dict[str, Any] = {"preset": "tiny", "vocab_size": VOCABULARY, "hidden": 64, "layers": 3, "num_experts": 8}
RECOMPUTED = {"recompute": "block"}
ONE_RANK: dict[str, Any] = dict(fsdp=1, e_fsdp=1, ep=1, **RECOMPUTED)

# The planner counts a GPU's kernels; on a CPU an expert's activation goes through blocks, and tiny tensors have index
# tensors and gradients of norms beside them. 1 to 3 % more was measured than planned.
PLAN_TOLERANCE = 0.05


def make_ours(**sizes: Any) -> MoELanguageModel:
    return MoELanguageModel(SIZES | sizes, warmup_steps=0)


def make_frozen() -> MoELanguageModel:
    model = make_ours()
    model.model.head.requires_grad_(False)
    return model


def make_without_config() -> PlainLanguageModel:
    return PlainLanguageModel(length=LENGTH, optimizer="adamw")


class WithSGD(MoELanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_with_sgd() -> MoELanguageModel:
    return WithSGD(SIZES)


def make_with_head_of_its_own() -> MoELanguageModel:
    model = make_ours()
    model.second_head = torch.nn.Linear(4, 4)
    return model


def select_in_turn(scores_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Every expert gets as many tokens of every rank."""
    num_tokens, num_experts = scores_TE.shape
    slots = torch.arange(num_tokens * top_k, device=scores_TE.device)
    chosen = (slots % num_experts).view(num_tokens, top_k)
    return torch.zeros_like(scores_TE).scatter(1, chosen, 1.0).topk(top_k, dim=-1).indices


class CountMeasured(PlanCheck):
    """Which micro-batches were measured, and what was said."""

    def __init__(self, plan: Path | None = None) -> None:
        super().__init__(plan)
        self.measured: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._peak is not None:
            self.measured.append(batch_idx)


Checked = tuple[CheckedPlan | None, list[int], list[str]]


def checked(
    degrees: dict[str, Any],
    options: dict[str, Any],
    make_model: Any = make_ours,
    plan_file: Path | None = None,
    shift: str = "module",
    selects: Any = select_in_turn,
) -> Checked:
    """What PlanCheck found in a run of this rank, the micro-batches it measured, and its lines."""
    callback, lines = CountMeasured(plan_file), list[str]()
    info, warn, select = plan_check.rank_zero_info, plan_check.rank_zero_warn, router.best_experts
    plan_check.rank_zero_info = plan_check.rank_zero_warn = lines.append
    router.best_experts = selects
    try:
        options = {"max_steps": 3, "precision": "bf16-mixed"} | options
        fit(degrees, make_model, lambda dp: loader(4 * BATCH, LENGTH, BATCH // dp), shift=shift,
            callbacks=(callback,), **options)  # fmt: skip
    finally:
        plan_check.rank_zero_info, plan_check.rank_zero_warn, router.best_experts = info, warn, select
    return callback.result, callback.measured, lines


@pytest.mark.parametrize(
    "degrees",
    [LAYOUTS_OF_4[2] | RECOMPUTED, LAYOUTS_OF_4[2], LAYOUTS_OF_4[0] | RECOMPUTED],
    ids=["cp2-ep2-recomputed", "cp2-ep2", "ep4-recomputed"],
)
def test_a_run_plans_itself_and_measures_what_it_planned(degrees, ranks4):
    answers = ranks4(checked, degrees, {})
    results = [result for result, _, _ in answers]
    assert results[0] is not None and results == 4 * results[:1]  # the busiest rank's, on all of them
    assert results[0].ratio == pytest.approx(1, abs=PLAN_TOLERANCE)
    assert all(measured == [1] for _, measured, _ in answers)
    assert "measured / planned" in answers[0][2][0] and "they differ most in" in answers[0][2][0]


def select_the_first(scores_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """All tokens to the experts of one rank."""
    return torch.arange(top_k, device=scores_TE.device).expand(len(scores_TE), top_k)


@pytest.mark.parametrize("select", [select_in_turn, select_the_first], ids=["even", "all-to-one-rank"])
def test_a_run_with_redundant_experts_is_planned_whatever_its_routing(select, ranks4):
    degrees = LAYOUTS_OF_4[0] | RECOMPUTED | {"balance": "redundant"}
    (result, _, lines), *_ = ranks4(checked, degrees, {}, make_ours, None, "module", select)
    assert result is not None and result.planned_bytes is not None and "measured / planned" in lines[0]
    # With as many experts as may move; with none that do, less is measured.
    assert 0.9 < result.ratio < 1 + PLAN_TOLERANCE


def test_the_busiest_rank_counts(ranks2):
    """More tokens on rank 1: both ranks report its peak, and the plan for its batch."""
    results = ranks2(checked_with_a_longer_batch_on_rank_1)
    assert results[0] == results[1] and results[0].rank == 1
    assert results[0].ratio == pytest.approx(1, abs=0.1)


def checked_with_a_longer_batch_on_rank_1() -> CheckedPlan | None:
    length = 2 * LENGTH if torch.distributed.get_rank() else LENGTH
    callback, select = PlanCheck(), router.best_experts
    router.best_experts = select_in_turn
    try:
        fit(dict(fsdp=2, e_fsdp=2, ep=1, **RECOMPUTED), make_ours, lambda dp: loader(8, length, 2), shift="module",
            callbacks=(callback,), max_steps=2, precision="bf16-mixed")  # fmt: skip
    finally:
        router.best_experts = select
    return callback.result


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(accumulate_grad_batches=2), [2, 3]),
        (dict(limit_train_batches=1, max_epochs=3), [0]),
        (dict(limit_train_batches=3, accumulate_grad_batches=2), [2]),  # the epoch ends inside the step
        (dict(max_steps=1), []),
    ],
    ids=["accumulated", "one-batch-epochs", "cut-off-by-the-epoch", "no-second-step"],
)
def test_the_micro_batches_of_the_second_step_are_measured_and_no_other(options, expected, ranks1):
    ((result, measured, lines),) = ranks1(checked, ONE_RANK, options)
    assert measured == expected
    assert (result is None) == (not expected) and len(lines) == bool(expected)


def resumed(folder: str) -> list[int]:
    options = dict(precision="bf16-mixed", enable_checkpointing=False)
    trainer, _, _ = fit(ONE_RANK, make_ours, lambda dp: loader(64, LENGTH, 8), shift="module", max_steps=2, **options)
    trainer.save_checkpoint(f"{folder}/step-2")
    callback = CountMeasured()
    fit(ONE_RANK, make_ours, lambda dp: loader(64, LENGTH, 8), shift="module", max_steps=5, callbacks=(callback,),
        ckpt_path=f"{folder}/step-2", **options)  # fmt: skip
    return callback.measured


def test_a_resumed_run_measures_its_own_second_step(tmp_path, ranks1):
    assert ranks1(resumed, str(tmp_path)) == [[3]]


class ValidatesWithMore(MoELanguageModel):
    """A validation that takes 40 MB."""

    num_validations = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.kept = torch.zeros(10_000_000)
        ValidatesWithMore.num_validations += 1

    def on_validation_end(self) -> None:
        del self.kept


def checked_with_validations() -> tuple[Checked, int]:
    InOrder.val_dataloader = lambda self: loader(8, LENGTH, 8)  # type: ignore[method-assign]
    try:
        options = dict(accumulate_grad_batches=2, val_check_interval=1, num_sanity_val_steps=0)
        found = checked(ONE_RANK, options, lambda: ValidatesWithMore(SIZES))
    finally:
        del InOrder.val_dataloader
    return found, ValidatesWithMore.num_validations


def test_a_validation_inside_the_step_is_not_its_memory(ranks1):
    (((result, measured, _), num_validations),) = ranks1(checked_with_validations)
    assert measured == [2, 3] and num_validations >= 4
    assert result is not None and result.measured_bytes < 40_000_000


@pytest.mark.parametrize(
    ("options", "make_model", "reason"),
    [
        ({"precision": "32-true"}, make_ours, "counts precision 'bf16-mixed', and this run has '32-true'"),
        ({}, make_without_config, "PlainLanguageModel holds neither a ModelConfig nor a Hugging Face config"),
        ({}, make_with_sgd, "counts AdamW and Muon, and this run has SGD"),
        ({}, make_frozen, "trains every parameter, and 3,904 of"),
        ({}, make_with_head_of_its_own, "parameters, and the module holds"),
    ],
    ids=["precision", "no-config", "optimizer", "frozen", "other-parameters"],
)
def test_a_run_that_cannot_be_planned_is_measured_and_says_why_once(options, make_model, reason, ranks1):
    ((result, _, lines),) = ranks1(checked, ONE_RANK, options, make_model)
    assert result is not None and result.measured_bytes > 1_000_000
    assert result.planned_bytes is None and result.ratio is None
    assert len(lines) == 1 and reason in lines[0] and "There is no plan to compare it with" in lines[0]


def test_a_hugging_face_model_is_planned_from_its_config(ranks1):
    ((result, _, _),) = ranks1(checked, ONE_RANK, {}, make_hugging_face_with_adamw, None, "model")
    assert result is not None and result.ratio == pytest.approx(1, abs=0.1)


class HuggingFaceWithAdamW(HuggingFaceLanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def make_hugging_face_with_adamw() -> HuggingFaceLanguageModel:
    return HuggingFaceWithAdamW("qwen3_moe")


def logged(folder: str) -> CheckedPlan | None:
    callback = PlanCheck()
    logger = CSVLogger(folder, name="", version="")
    fit(ONE_RANK, make_ours, lambda dp: loader(32, LENGTH, 8), shift="module", max_steps=3, callbacks=(callback,),
        precision="bf16-mixed", logger=logger, log_every_n_steps=1000)  # fmt: skip
    return callback.result


def test_loggers_get_the_figures_at_the_second_step(tmp_path, ranks1):
    (result,) = ranks1(logged, str(tmp_path))
    header, *rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    (row,) = [dict(zip(header, row, strict=True)) for row in rows if row[header.index("plan_check/ratio")]]
    assert row["step"] == "2"
    assert float(row["plan_check/predicted_gb"]) == pytest.approx(result.planned_bytes / 1e9)
    assert float(row["plan_check/measured_gb"]) == pytest.approx(result.measured_bytes / 1e9)
    assert float(row["plan_check/ratio"]) == pytest.approx(result.ratio)


def plan_file(folder: Path) -> Path:
    request = PlanRequest(model="tiny", gpus=4, cluster="h200-nvl8", context=4096, **parse_layout("1,2,2/2,2"))
    path = folder / "plan.json"
    path.write_text(json.dumps(plan(request).to_json()))
    return path


def test_a_plans_file_counts_without_the_reserve(tmp_path):
    path = plan_file(tmp_path)
    memory = json.loads(path.read_text())["memory_gb"]
    planned = read_planned_peak(path)
    assert planned.num_bytes == pytest.approx(1e9 * (memory["total"] - memory["reserve"]))
    assert planned.num_bytes == pytest.approx(sum(planned.buckets.values())) and memory["reserve"] > 1


def test_a_simulations_file_counts_its_peak(tmp_path):
    path = tmp_path / "simulated.json"
    path.write_text(json.dumps({"peak_gb": 3.0, "buckets_gb": {"parameters": 1.0, "temporary": 2.0}}))
    assert read_planned_peak(path).num_bytes == 3e9
    assert differences(read_planned_peak(path).buckets, {"parameters": 1e9, "activations": 1e9}) == {
        **dict.fromkeys(PURPOSES, 0.0),
        "activations and temporaries": -1e9,
    }


def test_a_run_is_compared_with_its_file_and_another_layout_is_said(tmp_path, ranks1):
    path = plan_file(tmp_path)
    ((result, _, lines),) = ranks1(checked, ONE_RANK, {}, make_ours, path)
    assert result.planned_bytes == int(read_planned_peak(path).num_bytes)
    assert "plan of another layout: fsdp(2) where the run has 1, cp(2) where the run has 1" in lines[0]


BAD_FILES = {
    "missing.json": (None, "cannot be read"),
    "broken.json": ("{", "cannot be read"),
    "search.json": ("[]", "holds several plans"),
    "compare.json": ('{"first": {}, "second": {}, "rows": []}', "holds several plans"),
    "other.json": ('{"a": 1}', "holds no plan of a peak"),
    "number.json": ("3", "holds no plan of a peak"),
    "half.json": ('{"memory_gb": {"total": 3}}', "holds no plan of a peak"),
    "words.json": ('{"peak_gb": "much", "buckets_gb": {}}', "holds no plan of a peak"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_without_a_plan_is_refused_in_one_sentence(name, tmp_path):
    text, message = BAD_FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_planned_peak(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def error_and_batches(folder: str) -> tuple[str, list[int]]:
    """Rank 1 finds no file."""
    name = "nowhere.json" if torch.distributed.get_rank() else "plan.json"
    callback = CountMeasured(Path(folder, name))
    try:
        fit(dict(fsdp=2, e_fsdp=2, ep=1), make_ours, lambda dp: loader(8, LENGTH, 2), callbacks=(callback,))
    except ValueError as error:
        return str(error), callback.measured
    return "", callback.measured


def test_every_rank_refuses_a_file_that_one_does_not_find(tmp_path, ranks2):
    plan_file(tmp_path)
    (first, _), (second, _) = ranks2(error_and_batches, str(tmp_path))
    assert "cannot be read" in second and first == f"On rank 1: {second}"


def test_another_strategy_is_refused():
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[PlanCheck()], max_steps=1, **QUIET)
    with pytest.raises(ValueError, match=r"PlanCheck needs Trainer\(strategy='fsdp_cp_ep'\); this one has Single"):
        trainer.fit(make_ours(), loader(8, LENGTH, 2))


class Boom(Exception):
    pass


class FailsInTheSecondStep(MoELanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise Boom
        return super().training_step(batch, batch_idx)


def modes_after_a_failure() -> int:
    callback = PlanCheck()
    with pytest.raises(Boom):
        fit(ONE_RANK, lambda: FailsInTheSecondStep(SIZES), lambda dp: loader(32, LENGTH, 8), shift="module",
            max_steps=3, callbacks=(callback,))  # fmt: skip
    return torch._C._len_torch_dispatch_stack()


def test_a_failing_step_is_watched_no_longer(ranks1):
    assert ranks1(modes_after_a_failure) == [0]


def test_a_gpus_peak_is_the_allocators_and_of_the_micro_batches_alone(monkeypatch):
    allocator = {"peak": 100}
    monkeypatch.setattr(peak_measurement.torch.cuda, "reset_peak_memory_stats", lambda device: allocator.update(peak=0))
    monkeypatch.setattr(peak_measurement.torch.cuda, "max_memory_allocated", lambda device: allocator["peak"])
    peak = DevicePeak(torch.device("cuda", 0))
    for during, between in ((70, 90), (60, 0)):
        peak.start(torch.nn.Linear(1, 1), [], [])
        allocator["peak"] = max(allocator["peak"], during)
        peak.stop()
        allocator["peak"] = max(allocator["peak"], between)
    assert peak.num_bytes == 70 and not peak.buckets()


def test_a_run_without_a_second_step_says_so_to_the_debug_log(caplog):
    class OneStep:
        global_step = 1

    with caplog.at_level(logging.DEBUG, logger=plan_check.__name__):
        PlanCheck().on_train_end(OneStep(), make_ours())  # type: ignore[arg-type]
    assert "this run has none" in caplog.text
