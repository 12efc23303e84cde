"""Lightning's callbacks and plugins under the strategy: those that work, those that are refused and in which words."""

import csv
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.flavour import L
from tests.test_lightning_table import CP2, InOrder, Small, require_close, require_one_process, run, trainer_of, weights

FOLDER = tempfile.mkdtemp(prefix="checkpoints-")

C = L.callbacks
IO = L.plugins.io


def words_of(degrees: dict[str, Any] | None, options: dict[str, Any], make_model: Any = Small) -> str:
    """What a fit of one step says: its error, or its warnings."""
    try:
        caught = run(degrees, make_model, **dict(max_steps=1) | options)[2]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(caught)


# Refused


class OwnIO(IO.TorchCheckpointIO):
    """A format of its own."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


class AsksForACallback(Small):
    def configure_callbacks(self) -> list[L.Callback]:
        return [C.ModelPruning("l1_unstructured", amount=0.5)]


class Graph(L.loggers.TensorBoardLogger):
    """As with ``log_graph=True``."""

    def __init__(self) -> None:
        super().__init__(FOLDER)
        self._log_graph = True


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pruning": (dict(callbacks=[C.ModelPruning("l1_unstructured", amount=0.5)]), "ModelPruning prunes by comparing"),
    "finetuning": (dict(callbacks=[C.BackboneFinetuning()]), "BackboneFinetuning compares parameters by value"),
    "on exception": (
        dict(callbacks=[C.OnExceptionCheckpoint(FOLDER)], enable_checkpointing=True),
        "OnExceptionCheckpoint saves after an error",
    ),
    "save_on_exception": (
        dict(callbacks=[C.ModelCheckpoint(FOLDER, save_on_exception=True)], enable_checkpointing=True),
        r"ModelCheckpoint\(save_on_exception=True\) saves after an error",
    ),
    "batch size": (dict(callbacks=[C.BatchSizeFinder()]), "Batch size finder is not supported with distributed"),
    "log_graph": (dict(logger=Graph()), r"Graph\(log_graph=True\) runs the model on rank 0 alone"),
    "registry": (dict(model_registry="team/model"), r"model_registry\('team/model'\) uploads checkpoints"),
    "asynchronous": (dict(plugins=[IO.AsyncCheckpointIO()]), "plugins: AsyncCheckpointIO would not be asked to save"),
    "own format": (dict(plugins=[OwnIO()]), "plugins: OwnIO would not be asked to save"),
}


FSDP2: dict[str, Any] = dict(fsdp=2, ep=2)


def refusals() -> dict[str, str]:
    return {kind: words_of(FSDP2, options) for kind, (options, _) in REFUSED.items()}


def test_what_needs_the_whole_module_on_one_rank_is_refused(ranks2):
    for errors in ranks2(refusals):
        for kind, error in errors.items():
            assert re.search(REFUSED[kind][1], error), (kind, error)


def test_callbacks_that_the_module_configures_are_refused_too(ranks2):
    assert all("ModelPruning" in error for error in ranks2(words_of, FSDP2, {}, AsksForACallback))


class WithExample(Small):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.long)


def test_an_example_input_is_refused_where_sequences_are_split(ranks4):
    for error in ranks4(words_of, CP2, dict(enable_model_summary=True), WithExample):
        assert "ValueError: example_input_array runs through the model outside of a step" in error


def test_one_rank_may_save_after_its_error(ranks1):
    options, _ = REFUSED["save_on_exception"]
    assert "Error" not in ranks1(words_of, dict(fsdp=1), options)[0]


def test_the_logger_of_a_fast_run_answers_to_every_name_and_is_taken(ranks1, tmp_path):
    options = dict(logger=L.loggers.CSVLogger(tmp_path), fast_dev_run=1)
    assert "Error" not in ranks1(words_of, dict(fsdp=1), options)[0]


def test_a_whole_module_is_not_compiled_but_its_blocks(ranks2):
    """Lightning's own rule, whose words name other strategies."""
    assert all("torch.compile" in error for error in ranks2(words_of, FSDP2, {}, compiled))


def compiled() -> Any:
    return torch.compile(Small())


def size(batch: dict[str, Tensor]) -> int:
    return len(batch["input_ids"])


def throughput_warnings(degrees: dict[str, Any]) -> str:
    return words_of(degrees, dict(callbacks=[C.ThroughputMonitor(batch_size_fn=size, window_size=2)]))


def test_lightnings_throughput_monitor_is_said_to_count_samples_cp_times(ranks4):
    expected = "counts a batch once for each of the 2 ranks of a cp group"
    assert [expected in words for words in ranks4(throughput_warnings, CP2)] == [True, False, False, False]
    assert not any("counts a batch" in words for words in ranks4(throughput_warnings, dict(fsdp=4)))


# Plugins


def saved_by_plugins(folder: str) -> tuple[list[str], str, bool]:
    """One file, written beside the training and by rank 0, and read again."""
    one_file: dict[str, Any] = CP2 | dict(save_distributed_checkpoint=False)
    checkpoints = C.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
    options: dict[str, Any] = dict(enable_checkpointing=True, plugins=[IO.AsyncCheckpointIO()], max_steps=2)
    model, trainer, _ = run(one_file, callbacks=[checkpoints], **options)
    trainer.strategy.barrier()
    again = Small()
    trainer_of(one_file, max_steps=2).fit(again, datamodule=InOrder(), ckpt_path=checkpoints.best_model_path)
    expected = weights(model)
    is_equal = all(torch.equal(got, expected[name]) for name, got in weights(again).items())
    return sorted(path.name for path in Path(folder).iterdir()), words_of(one_file, dict(plugins=[OwnIO()])), is_equal


def test_a_checkpoint_plugin_writes_one_file_and_one_that_reads_by_itself_is_refused(ranks4, tmp_path):
    for files, words, is_equal in ranks4(saved_by_plugins, str(tmp_path)):
        assert files == ["step=2.ckpt"] and is_equal
        assert "OwnIO has a load_checkpoint of its own, which would not be called" in words


class Normed(Small):
    """Has statistics over samples, of what is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.BatchNorm1d(8)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.normed(torch.arange(16.0).view(2, 8)).sum()


class DoublesNorms(L.plugins.LayerSync):
    """A user's own."""

    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.5
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


def synchronized() -> tuple[bool, float, bool]:
    by_option = run(CP2, Normed, ("validate",), sync_batchnorm=True)[0]
    by_plugin = run(CP2, Normed, ("fit",), plugins=[DoublesNorms()], max_steps=1)[0]
    is_trained = any(p is by_option.normed.weight for p in by_option.parameters())
    return isinstance(by_option.normed, nn.SyncBatchNorm), by_plugin.normed.momentum, is_trained


def test_layers_are_synchronized_before_they_are_sharded(ranks4):
    assert ranks4(synchronized) == [(True, 0.5, True)] * 4
    assert all("input tensor to be on GPU" in words for words in ranks4(words_of, CP2, SYNCHRONIZED, Normed))


SYNCHRONIZED = dict(sync_batchnorm=True)


# Callbacks that work


def under_many_callbacks(degrees: dict[str, Any] | None, folder: str) -> tuple[dict[str, Tensor], int, bool]:
    started: list[bool] = []
    timer = C.Timer("00:01:00:00")
    callbacks: list[L.Callback] = [
        C.GradientAccumulationScheduler({0: 1, 1: 2}),
        C.LearningRateMonitor(),
        C.DeviceStatsMonitor(cpu_stats=True),
        timer,
        C.SpikeDetection(atol=100.0),
        C.LambdaCallback(on_train_start=lambda trainer, module: started.append(isinstance(module, Small))),
        C.RichProgressBar(),
        C.RichModelSummary(max_depth=1),
    ]
    model, trainer, _ = run(
        degrees, callbacks=callbacks, max_epochs=3, log_every_n_steps=1, enable_progress_bar=True,
        enable_model_summary=True, logger=L.loggers.CSVLogger(folder, version=0),
    )  # fmt: skip
    return weights(model), trainer.global_step, started == [True] and timer.time_elapsed("train") > 0


def test_many_callbacks_at_once_do_what_they_do_in_one_process(ranks4, tmp_path):
    """Four steps, then two of twice the samples in each of two epochs."""
    expected, num_steps, _ = under_many_callbacks(None, str(tmp_path / "one"))
    for got, steps, were_called in ranks4(under_many_callbacks, CP2, str(tmp_path / "four")):
        assert steps == num_steps == 8 and were_called
        require_close(got, expected)
    rows = list(csv.DictReader((tmp_path / "four/lightning_logs/version_0/metrics.csv").open()))
    rates = [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]]
    assert rates == pytest.approx([0.1, 0.05, 0.025])  # at the start of every epoch
    assert any(name.startswith("DeviceStatsMonitor") for name in rows[0])


class Spiking(Small):
    """The loss of one rank jumps in its sixth batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 100 * (self.global_rank == 2 and batch_idx == 3)


def spike(folder: str) -> str:
    return words_of(
        CP2, dict(callbacks=[C.SpikeDetection(atol=10.0, warmup=2)], default_root_dir=folder, max_steps=4), Spiking
    )


def test_a_spike_on_one_rank_ends_the_training_of_all(ranks4, tmp_path):
    for error in ranks4(spike, str(tmp_path)):
        assert "TrainingSpikeException: Training spike detected in batch 3" in error
    assert (tmp_path / "skip_batches.json").read_text().split() == ["[", "2,", "3", "]"]


class WithoutScheduler(Small):
    """Only the search adds ``initial_lr`` to the options of its optimizer."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def found_rate(folder: str) -> tuple[float | None, float, int, dict[str, Tensor]]:
    finder = C.LearningRateFinder(num_training_steps=16, max_lr=0.5, early_stop_threshold=None)
    options: dict[str, Any] = dict(enable_checkpointing=True, default_root_dir=folder, max_epochs=10, max_steps=3)
    model, trainer, _ = run(CP2, WithoutScheduler, callbacks=[finder], **options)
    return finder.optimal_lr.suggestion(), model.lr, trainer.global_step, weights(model)


def test_a_learning_rate_is_found_for_all_ranks_and_training_starts_from_the_beginning(ranks4, tmp_path):
    results = ranks4(found_rate, str(tmp_path))
    rate = results[0][0]
    assert rate is not None and all(result[:3] == (rate, rate, 3) for result in results)
    expected = weights(run(None, partial(WithoutScheduler, rate), max_epochs=10, max_steps=3)[0])
    for *_, got in results:
        require_close(got, expected)
    assert not list(tmp_path.glob(".lr_find*"))


class Unfreezing(L.Callback):
    """What fine-tuning does by hand: blocks are frozen at first, trained in the second epoch, and frozen again."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.decoder.blocks.requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.decoder.blocks.requires_grad_(trainer.current_epoch == 1)


def unfreezing() -> dict[str, Any]:
    return dict(callbacks=[Unfreezing()], max_epochs=3)


def test_what_is_frozen_and_unfrozen_in_between_trains_as_in_one_process(ranks4):
    require_one_process(ranks4, unfreezing)


class Writer(C.BasePredictionWriter):
    """Keeps which samples every batch of predictions is of."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[list[int]] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Tensor, indices: Any, *args: Any) -> None:
        assert len(prediction) == len(indices)
        self.batches.append(list(indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = batch_indices


def written() -> list[list[int]]:
    writer = Writer()
    run(CP2, stages=("predict",), callbacks=[writer])
    assert writer.epoch == [writer.batches]
    return writer.batches


def test_a_prediction_writer_is_told_whose_predictions_it_gets(ranks4):
    first, second, third, fourth = ranks4(written)
    assert first == second and third == fourth
    assert sorted(i for batch in first + third for i in batch) == list(range(16))


class Options:
    """A hyperparameter that torch does not unpickle unless it is told to."""

    def __init__(self, width: int) -> None:
        self.width = width


class WithOptions(Small):
    def __init__(self, options: Options | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def loaded_options(path: str) -> tuple[str, int]:
    one_file: dict[str, Any] = CP2 | dict(save_distributed_checkpoint=False)  # a directory would not be saved
    model = WithOptions(Options(8))
    trainer = trainer_of(one_file, max_steps=1)
    trainer.fit(model, datamodule=InOrder())
    trainer.save_checkpoint(path)
    again = trainer_of(one_file, max_steps=2)
    try:
        again.fit(model, datamodule=InOrder(), ckpt_path=path)
        refused = ""
    except Exception as error:
        refused = type(error).__name__
    again = trainer_of(one_file, max_steps=2)
    again.fit(model, datamodule=InOrder(), ckpt_path=path, weights_only=False)
    return refused, again.global_step


def test_a_checkpoint_is_read_with_weights_only_as_the_trainer_is_told(ranks4, tmp_path):
    assert ranks4(loaded_options, str(tmp_path / "options.ckpt")) == [("CheckpointError", 2)] * 4
