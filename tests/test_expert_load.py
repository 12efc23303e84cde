"""Shapes: T tokens, K experts per token, E experts, D hidden size."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import RunningStage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_moe_strategy import FSDPCPEPStrategy
from lightning_moe_strategy.callbacks import expert_load_history
from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor, TokensPerExpert
from lightning_moe_strategy.callbacks.expert_load_history import ExpertLoadHistory
from lightning_moe_strategy.callbacks.expert_load_report import (
    LayerLoad,
    layer_loads,
    load_figure,
    load_table,
    show_in_loggers,
    skew,
    summarize,
)
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, find_experts, routing_observers
from lightning_moe_strategy.expert_parallel.redundancy import plan_redundancy
from lightning_moe_strategy.expert_parallel.redundant import Tally
from lightning_moe_strategy.models.moe import Experts
from lightning_moe_strategy.report.expert_series import Series, read_series
from lightning_moe_strategy.report.layer_names import short_names

NUM_EXPERTS, TOP_K, WIDTH, TOKENS = 4, 2, 8, 16


class Layer(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts(NUM_EXPERTS, WIDTH, WIDTH)
        self.recompute = recompute
        self.routed: list[tuple[str, Tensor]] = []
        self.stage = ""

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(TOP_K)
        self.routed.append((self.stage, ids_TK))
        if self.recompute:
            return x_TD + checkpoint(self.experts, x_TD, ids_TK, weights_TK, use_reentrant=False)
        return x_TD + self.experts(x_TD, ids_TK, weights_TK)

    def true_counts(self, stage: str) -> Tensor:
        return torch.cat([ids.flatten() for seen, ids in self.routed if seen == stage]).bincount(minlength=NUM_EXPERTS)


class TwoLayers(LightningModule):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(recompute) for _ in range(2)])

    def step(self, batch: Tensor, stage: str) -> Tensor:
        x_TD = batch.flatten(0, -2)
        for layer in self.layers:
            layer.stage = "sanity" if self.trainer.sanity_checking else stage
            x_TD = layer(x_TD)
        return x_TD.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "validate")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(num: int) -> DataLoader:
    torch.manual_seed(num)
    return DataLoader(torch.randn(num, TOKENS, WIDTH), batch_size=1)


class MemoryLogger(CSVLogger):
    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step or 0, {k: v for k, v in metrics.items() if k.startswith("expert_load")}))

    def figures(self, stage: str) -> list[tuple[int, dict[str, float]]]:
        prefix = f"expert_load/{stage}/"
        return [
            (step, {name.removeprefix(prefix): figure for name, figure in line.items()})
            for step, line in self.lines
            if any(name.startswith(prefix) for name in line)
        ]


def make_trainer(directory: Path, model: TwoLayers, monitor: ExpertLoadMonitor, ep: int = 2, **kwargs: Any) -> Trainer:
    """A one-device Trainer whose strategy answers what the monitor asks."""
    kwargs = {"logger": MemoryLogger(directory)} | kwargs
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.strategy.experts = find_experts(model)
    trainer.strategy.expert_mesh = {"ep": SimpleNamespace(size=lambda: ep)}
    return trainer


def attached(recompute: bool = False) -> TwoLayers:
    torch.manual_seed(0)
    model = TwoLayers(recompute)
    for experts in find_experts(model).values():
        attach(experts, LocalDispatcher(NUM_EXPERTS))
    return model


class Recorder(ExpertLoadMonitor):
    """Remembers the counts of each stage before they are dropped."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_end(trainer, pl_module)
        self.counts = {stage: self.tokens_on_this_rank(stage) for stage in ("train", "validate")}

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_test_end(trainer, pl_module)
        self.counts = {"test": self.tokens_on_this_rank("test")}


def assert_counts(monitor: Recorder, model: TwoLayers, stage: str, num_batches: int) -> None:
    for index, layer in enumerate(model.layers):
        counts_E = monitor.counts[stage][f"layers.{index}.experts"]
        assert torch.equal(counts_E, layer.true_counts(stage))
        assert counts_E.sum() == num_batches * TOKENS * TOP_K


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_counts_are_tokens_times_k_per_stage(tmp_path: Path, recompute: bool, accumulate: int):
    model, monitor = attached(recompute), Recorder(1)
    trainer = make_trainer(
        tmp_path, model, monitor, max_epochs=1, accumulate_grad_batches=accumulate, num_sanity_val_steps=2
    )
    trainer.fit(model, batches(6), batches(3))
    assert_counts(monitor, model, "train", 6)
    assert_counts(monitor, model, "validate", 3)
    assert len(trainer.logger.figures("validate")) == 1
    assert sum(stage == "sanity" for stage, _ in model.layers[0].routed) == 2
    assert [step for step, _ in trainer.logger.figures("train")] == list(range(1, 6 // accumulate + 1))
    trainer = make_trainer(tmp_path, model, monitor)
    trainer.test(model, batches(2), verbose=False)
    assert_counts(monitor, model, "test", 2)


def test_logged_figures_are_of_the_tokens_since_the_last_ones(tmp_path: Path):
    model, monitor = attached(), ExpertLoadMonitor()
    trainer = make_trainer(tmp_path, model, monitor, max_steps=5, log_every_n_steps=2)
    trainer.fit(model, batches(5))
    (step_2, first), (step_4, second) = trainer.logger.figures("train")
    assert (step_2, step_4) == (2, 4)
    for figures, steps in ((first, slice(0, 2)), (second, slice(2, 4))):
        counts = [
            torch.cat([ids.flatten() for _, ids in layer.routed[steps]]).bincount(minlength=4) for layer in model.layers
        ]
        assert figures["skew"] == pytest.approx(sum(map(skew, counts)) / 2)
        assert figures["skew_worst_layer"] == pytest.approx(max(map(skew, counts)))
        rank_skews = [skew(c.view(2, 2).sum(1)) for c in counts]
        assert figures["rank_skew"] == pytest.approx(sum(rank_skews) / 2)
        assert figures["rank_skew_worst_layer"] == pytest.approx(max(rank_skews))
        assert figures["dead_experts"] == sum(int((c == 0).sum()) for c in counts)
    assert monitor.last_skew == second["skew"]
    assert trainer.progress_bar_metrics["skew"] == pytest.approx(second["skew"], abs=1e-3)


def test_a_fit_shorter_than_the_interval_still_has_a_skew(tmp_path: Path):
    model, monitor = attached(), ExpertLoadMonitor(50, plot=False)
    make_trainer(tmp_path, model, monitor, max_steps=3).fit(model, batches(3))
    assert monitor.last_skew == pytest.approx(sum(skew(layer.true_counts("train")) for layer in model.layers) / 2)


def test_the_end_of_fit_leaves_a_heat_map_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, monitor = attached(), ExpertLoadMonitor()
    trainer = make_trainer(tmp_path, model, monitor, max_steps=2)
    trainer.fit(model, batches(2))
    image = matplotlib.image.imread(Path(trainer.log_dir) / "expert_load.png")
    assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.05
    table = capsys.readouterr().out
    assert "layers.1.experts" in table and "skew of ep=2" in table and f"{2 * TOKENS * TOP_K}" in table


def series_of(trainer: Trainer) -> Series:
    series = read_series(Path(trainer.log_dir) / "expert_load.jsonl")
    assert series is not None
    return series


def test_the_file_holds_what_was_routed_in_every_window(tmp_path: Path):
    """The last step is logged by no interval: the end of fit writes it down."""
    model, monitor = attached(), ExpertLoadMonitor(2)
    trainer = make_trainer(tmp_path, model, monitor, max_steps=5)
    trainer.fit(model, batches(5))
    series = series_of(trainer)
    assert series.layers == ("layers.0.experts", "layers.1.experts") and series.num_experts == (4, 4)
    assert [(window.since, window.step, window.ep) for window in series.windows] == [(0, 2, 2), (2, 4, 2), (4, 5, 2)]
    for window in series.windows:
        for layer, tokens_E in zip(model.layers, window.tokens, strict=True):
            routed = [ids.flatten() for _, ids in layer.routed[window.since : window.step]]
            assert tokens_E.tolist() == torch.cat(routed).bincount(minlength=4).tolist()
    described = json.loads((Path(trainer.log_dir) / "run.json").read_text())
    assert described["model"] == "TwoLayers" and described["layers_with_experts"] == 2
    assert described["parameters"] == sum(p.numel() for p in model.parameters()) > described["expert_parameters"] > 0


@pytest.mark.parametrize("options", [dict(logger=False), dict(fast_dev_run=True)], ids=["no-logger", "fast-dev-run"])
def test_a_run_that_logs_nothing_writes_nothing_down(tmp_path: Path, options: dict[str, Any]):
    model = attached()
    options |= dict(max_steps=1, default_root_dir=str(tmp_path))
    make_trainer(tmp_path, model, ExpertLoadMonitor(1), **options).fit(model, batches(1), batches(1))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl", ".png")]
    make_trainer(tmp_path, model, ExpertLoadMonitor(1, plot=True), **options).fit(model, batches(1), batches(1))
    assert (tmp_path / "expert_load.png").exists()


def cumulated(steps: int) -> list[dict[str, Tensor]]:
    """Tokens of two layers after each step, at random."""
    torch.manual_seed(1)
    of_steps = torch.randint(0, 70_000, (steps, 2, 4))
    return [dict(zip(("a", "b"), tokens, strict=True)) for tokens in of_steps.cumsum(0)]


def written(history: ExpertLoadHistory, path: Path, after: list[dict[str, Tensor]], steps: range) -> None:
    history.start(path, {"a": 4, "b": 4}, step=steps.start)
    for step in steps:
        history.add(step + 1, after[step], 2, {"moved_experts": float(step)})


def test_a_long_run_keeps_few_windows_and_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expert_load_history, "MAX_WINDOWS", 8)
    path, after = tmp_path / "expert_load.jsonl", cumulated(101)
    history = ExpertLoadHistory()
    written(history, path, after, range(101))
    history.finish(101, after[-1], 2, {})
    series = read_series(path)
    assert series is not None and 4 <= len(series.windows) <= 8
    assert [window.since for window in series.windows] == [0, *(window.step for window in series.windows[:-1])]
    assert series.windows[-1].step == 101 and [step for step, _ in history.skews][-1] == 101
    for window in series.windows:
        before = after[window.since - 1]["b"] if window.since else torch.zeros(4, dtype=torch.int64)
        assert window.tokens[1].tolist() == (after[window.step - 1]["b"] - before).tolist()
    # Of 16 logs each: the mean of 0 to 15.
    assert series.windows[0].figures == {"moved_experts": 7.5} and series.windows[0].num_logs == 16


def test_a_resume_counts_again_from_its_checkpoint_and_a_torn_line_is_left_out(tmp_path: Path):
    path, after = tmp_path / "expert_load.jsonl", cumulated(6)
    killed = ExpertLoadHistory()
    written(killed, path, after, range(3))
    state = killed.state()
    for step in (3, 4):
        killed.add(step + 1, after[step], 2, {})
    torn = path.read_text().splitlines()[-1]
    path.write_text(path.read_text().removesuffix(torn + "\n") + torn[:40])
    found = read_series(path)
    assert found is not None and [window.step for window in found.windows] == [1, 2, 3, 4]

    resumed = ExpertLoadHistory()
    resumed.load_state(state)
    resumed.start(path, {"a": 4, "b": 4}, step=3)
    resumed.add(6, after[5], 2, {})
    found = read_series(path)
    assert found is not None and [(w.since, w.step) for w in found.windows] == [(0, 1), (1, 2), (2, 3), (3, 6)]
    assert found.windows[-1].tokens[0].tolist() == (after[5]["a"] - after[2]["a"]).tolist()
    assert [step for step, _ in resumed.skews] == [1, 2, 3, 6]
    # A run that begins anew in the same folder keeps nothing of the old one.
    written(ExpertLoadHistory(), path, after, range(1))
    found = read_series(path)
    assert found is not None and [window.step for window in found.windows] == [1]


def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, window: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(expert_load_history, "append_window", full)
    history, after = ExpertLoadHistory(), cumulated(3)
    with pytest.warns(UserWarning, match="expert_load.jsonl cannot be written .No space left") as warned:
        written(history, tmp_path / "expert_load.jsonl", after, range(3))
    assert len(warned) == 1 and [step for step, _ in history.skews] == [1, 2, 3]


class Draws:
    """An experiment that remembers its pictures."""

    def __init__(self, kind: str) -> None:
        self.pictures: list[tuple[str, Any, int]] = []
        setattr(self, kind, self._take)
        self.save = lambda: None

    def _take(self, tag: str, picture: Any, *, global_step: int, **options: Any) -> None:
        self.pictures.append((tag, picture, global_step))


@pytest.mark.parametrize("kind", ["add_figure", "add_image"])
def test_loggers_that_take_pictures_get_them_at_their_steps(tmp_path: Path, kind: str):
    class Pictures(MemoryLogger):
        experiment = Draws(kind)

    model = attached()
    logger = Pictures(tmp_path)
    monitor = ExpertLoadMonitor(1, image_every_n_logs=2)
    make_trainer(tmp_path, model, monitor, max_steps=5, logger=logger).fit(model, batches(5))
    pictures = logger.experiment.pictures
    assert [step for _, _, step in pictures] == [2, 4, 5] and {tag for tag, _, _ in pictures} == {"expert_load/train"}
    if kind == "add_image":
        assert pictures[0][1].shape[2] == 3 and pictures[0][1].std() > 10


def test_tensorboard_gets_the_picture(tmp_path: Path):
    logger = TensorBoardLogger(str(tmp_path))
    figure = load_figure(layer_loads({"a": torch.tensor([1, 2, 3, 4])}, ep=2), [])
    show_in_loggers(figure, [logger, MemoryLogger(tmp_path)], step=7)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (image,) = events.Images("expert_load/train")
    assert image.step == 7 and image.width > 300 and image.encoded_image_string.startswith(b"\x89PNG")


def test_observers_go_when_the_trainer_is_done(tmp_path: Path):
    model, monitor = attached(), Recorder(1, plot=False)
    trainer = make_trainer(tmp_path, model, monitor, max_epochs=1, num_sanity_val_steps=0)
    for epoch in range(2):
        trainer.fit_loop.max_epochs = epoch + 1
        for layer in model.layers:
            layer.routed.clear()
        trainer.fit(model, batches(2), batches(1))
        assert_counts(monitor, model, "train", 2)
        assert all(not routing_observers(layer.experts) for layer in model.layers)


def test_a_model_without_experts_is_left_alone(tmp_path: Path):
    monitor = ExpertLoadMonitor(1)
    trainer = make_trainer(tmp_path, attached(), monitor, max_steps=1)
    trainer.strategy.experts = {}
    model = attached()
    trainer.fit(model, batches(1))
    assert monitor.last_skew is None and not (Path(trainer.log_dir) / "expert_load.png").exists()


def reduce_on_ranks(rank_without_tokens: int) -> tuple[list[dict[str, float]], dict[str, list[int]], int]:
    """Two micro-batches, figures after them; one rank routes nothing."""
    rank, calls, lines = dist.get_rank(), [], []
    experts = Experts(NUM_EXPERTS, WIDTH, WIDTH)
    undo = attach(experts, LocalDispatcher(NUM_EXPERTS))
    logger = SimpleNamespace(log_metrics=lambda metrics, step: lines.append(metrics))
    strategy = SimpleNamespace(
        experts={"layer": experts}, expert_mesh={"ep": SimpleNamespace(size=lambda: 2)}, root_device=torch.device("cpu")
    )
    trainer: Any = SimpleNamespace(
        strategy=strategy,
        global_step=0,
        log_every_n_steps=1,
        loggers=[logger],
        state=SimpleNamespace(stage=RunningStage.TRAINING),
        sanity_checking=False,
    )
    module: Any = SimpleNamespace(log=lambda *args, **kwargs: None)
    monitor = ExpertLoadMonitor()
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        monitor.on_fit_start(trainer, module)
        for micro_batch in range(2):
            if rank != rank_without_tokens:
                ids_TK = torch.full((3, 1), rank)
                experts(torch.randn(3, WIDTH), ids_TK, torch.ones(3, 1))
            trainer.global_step = micro_batch
            monitor.on_train_batch_end(trainer, module, None, None, micro_batch)
    finally:
        dist.all_reduce = original
        monitor.teardown(trainer, module, "fit")
        undo()
    return lines, {name: count.tolist() for name, count in monitor.last_tokens.items()}, len(calls)


def test_ranks_are_summed_once_when_logged(ranks4: Any):
    for lines, tokens, num_collectives in ranks4(reduce_on_ranks, 2):
        assert tokens == {"layer": [6, 6, 0, 6]}
        assert num_collectives == 1
        (figures,) = lines
        assert figures["expert_load/train/skew"] == pytest.approx(6 / 4.5)
        assert figures["expert_load/train/rank_skew"] == pytest.approx(12 / 9)
        assert figures["expert_load/train/dead_experts"] == 1


def test_skew_is_max_over_mean():
    assert skew(torch.tensor([1, 1, 1, 1])) == 1.0
    assert skew(torch.tensor([4, 0, 0, 0])) == 4.0
    assert skew(torch.tensor([0, 0])) == 1.0


def test_counting_adds_ids_of_any_integer_dtype_exactly():
    metric = TokensPerExpert(3)
    metric.update(torch.tensor([[0, 2]], dtype=torch.int32))
    with torch.inference_mode():
        metric.update(torch.tensor([[2, 2]]))
    metric.update(torch.zeros(0, 2, dtype=torch.int64))
    assert metric.compute().tolist() == [1, 0, 3] and metric.tokens_E.dtype == torch.int64


def test_table_shows_the_worst_layers_in_the_order_of_the_model():
    tokens = {f"layers.{i}.experts": torch.tensor([10 + i, 10, 10, 10]) for i in range(40)}
    table = load_table(layer_loads(tokens, ep=2))
    assert "16 worst of 40" in table.title
    names = list(table.columns[0].cells)
    assert names == [f"layers.{i}.experts" for i in range(24, 40)] + ["mean"]


def test_ranks_that_share_their_experts_take_the_mean_load_of_their_group():
    layer = LayerLoad(name="experts", tokens_E=torch.tensor([8, 0, 2, 2, 1, 1, 1, 1]), ep=8)
    assert [layer.grouped_skew(etp) for etp in (2, 4, 8)] == [2.0, 1.5, 1.0]
    assert layer.rank_skew == 4.0 >= layer.grouped_skew(2)  # never higher: seed, "TP"
    assert summarize([layer])["rank_skew_etp4"] == 1.5
    assert LayerLoad(name="experts", tokens_E=torch.zeros(8, dtype=torch.int64), ep=8).grouped_skew(2) == 1.0


def test_the_table_says_what_etp_would_do_and_cost_beside_what_was_moved():
    layers = layer_loads({"a": torch.tensor([8, 0, 2, 2, 1, 1, 1, 1]), "b": torch.ones(8)}, ep=4)
    table = load_table(layers, caption="Experts moved: 3.")
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["skew of ep=4"] == ["2.00", "1.00", "1.50"]
    assert columns["etp=2"] == ["1.50", "1.00", "1.25"] and columns["etp=4"] == ["1.00"] * 3 and "etp=8" not in columns
    moved, price = str(table.caption).split("\n")
    assert moved == "Experts moved: 3." and "2, 4 times the traffic of ep and the rows in memory" in price
    assert "etp=2" not in {str(column.header) for column in load_table(layer_loads({"a": torch.ones(3)}, ep=3)).columns}


def test_a_tally_adds_up_what_groups_of_ranks_would_have_had():
    """Of every plan by itself: two that are each skewed to another rank are not even together."""
    tally = Tally()
    for counts in ([[8, 0, 2, 2]], [[0, 8, 2, 2]]):
        tally.add(plan_redundancy(np.array(counts), 4))
    assert (tally.busiest_before, tally.busiest_etp2, tally.busiest_etp4, tally.busiest_etp8) == (16, 8, 6, 0)
    assert tally.busiest_after == 6


@pytest.mark.parametrize(
    "names, short",
    [
        (["model.layers.3.mlp.experts", "model.layers.12.mlp.experts"], ["3", "12"]),
        (["model.layers.3.mlp.experts"], ["model.layers.3.mlp.experts"]),
        (["encoder.experts", "decoder.experts"], ["encoder", "decoder"]),
        (["a.b", "a.c"], ["b", "c"]),
        (["experts", "layers.0.experts"], ["experts", "layers.0.experts"]),
    ],
)
def test_layer_labels_leave_out_what_all_names_share(names: list[str], short: list[str]):
    assert short_names(names) == short


def test_heat_map_takes_layers_of_unequal_numbers_of_experts_and_none_used(tmp_path: Path):
    layers = [
        LayerLoad(name="a.experts", tokens_E=torch.tensor([1, 2, 3, 0]), ep=2),
        LayerLoad(name="b.experts", tokens_E=torch.zeros(2, dtype=torch.int64), ep=2),
    ]
    load_figure(layers, [(1, (1.5, 1.0))]).savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    assert summarize(layers)["dead_experts"] == 3


def test_error_names_the_interval():
    with pytest.raises(ValueError, match=r"log_every_n_steps\(0\)"):
        ExpertLoadMonitor(0)
    with pytest.raises(ValueError, match=r"image_every_n_logs\(0\)"):
        ExpertLoadMonitor(image_every_n_logs=0)


class SaveAndDie(Callback):
    """Saves after step 2, and ends the run without its end after step 3."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 3:
            raise KeyboardInterrupt


def killed_and_resumed(directory: Path) -> tuple[list[tuple[int, int]], bool]:
    """Windows of the resumed run, and whether each holds what the unbroken run's does."""

    def run(version: int, *callbacks: Callback, steps: int = 5, **options: Any) -> Series:
        torch.manual_seed(0)
        logger = CSVLogger(str(directory), name="logs", version=version)
        monitor = ExpertLoadMonitor(1, plot=False)
        trainer = Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=FSDPCPEPStrategy(fsdp=2, ep=2), logger=logger,
            callbacks=[monitor, *callbacks], max_steps=steps, default_root_dir=str(directory),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with contextlib.suppress(SystemExit):
            trainer.fit(TwoLayers(), batches(12), **options)
        dist.barrier()
        return series_of(trainer)

    unbroken = run(0)
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        run(1, SaveAndDie(directory / "saved"))
    resumed = run(1, ckpt_path=str(directory / "saved"))
    is_same = all(
        np.array_equal(one, other)
        for window, expected in zip(resumed.windows, unbroken.windows, strict=True)
        for one, other in zip(window.tokens, expected.tokens, strict=True)
    )
    return [(window.since, window.step) for window in resumed.windows], is_same


def test_a_killed_run_that_resumes_has_the_windows_of_an_unbroken_one(ranks2: Any, tmp_path: Path):
    for windows, is_same in ranks2(killed_and_resumed, tmp_path):
        assert windows == [(step, step + 1) for step in range(5)]
        assert is_same
