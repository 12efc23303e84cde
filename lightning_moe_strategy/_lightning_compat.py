"""Lightning's names for the flavour of this process, ``lightning`` or ``pytorch_lightning``.

A process uses one flavour (Lightning itself refuses a mix), so every class of this package that derives from a
Lightning class takes its base from here. Private names, seen in Lightning 2.6, appear in this file only.
"""

import importlib
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_moe_strategy import _autoload

FLAVOUR = _autoload.flavour()
"""``"lightning"`` or ``"pytorch_lightning"``: whose Trainer asked first, else what is imported or installed."""

if TYPE_CHECKING:
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.cli import _InstantiatorFn as CLIInstantiator
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.seed import isolate_rng
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
else:
    _root, _fabric = {
        "lightning": ("lightning.pytorch", "lightning.fabric"),
        "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
    }[FLAVOUR]

    def _take(module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)

    Callback = _take(_root, "Callback")
    LightningDataModule = _take(_root, "LightningDataModule")
    LightningModule = _take(_root, "LightningModule")
    Trainer = _take(_root, "Trainer")
    BaseFinetuning = _take(f"{_root}.callbacks", "BaseFinetuning")
    LightningThroughputMonitor = _take(f"{_root}.callbacks", "ThroughputMonitor")
    ModelCheckpoint = _take(f"{_root}.callbacks", "ModelCheckpoint")
    ModelPruning = _take(f"{_root}.callbacks", "ModelPruning")
    ModelSummary = _take(f"{_root}.callbacks", "ModelSummary")
    OnExceptionCheckpoint = _take(f"{_root}.callbacks", "OnExceptionCheckpoint")
    StochasticWeightAveraging = _take(f"{_root}.callbacks", "StochasticWeightAveraging")
    WeightAveraging = _take(f"{_root}.callbacks", "WeightAveraging")
    LightningCLI = _take(f"{_root}.cli", "LightningCLI")
    CLIInstantiator = _take(f"{_root}.cli", "_InstantiatorFn")
    DummyLogger = _take(f"{_root}.loggers.logger", "DummyLogger")
    AsyncCheckpointIO = _take(f"{_root}.plugins.io", "AsyncCheckpointIO")
    TorchCheckpointIO = _take(f"{_root}.plugins.io", "TorchCheckpointIO")
    HalfPrecision = _take(f"{_root}.plugins.precision", "HalfPrecision")
    MixedPrecision = _take(f"{_root}.plugins.precision", "MixedPrecision")
    Precision = _take(f"{_root}.plugins.precision", "Precision")
    ModelParallelStrategy = _take(f"{_root}.strategies", "ModelParallelStrategy")
    ParallelStrategy = _take(f"{_root}.strategies", "ParallelStrategy")
    TrainerFn = _take(f"{_root}.trainer.states", "TrainerFn")
    is_overridden = _take(f"{_root}.utilities.model_helpers", "is_overridden")
    isolate_rng = _take(f"{_root}.utilities.seed", "isolate_rng")
    is_param_in_hook_signature = _take(f"{_root}.utilities.signature_utils", "is_param_in_hook_signature")
    rank_zero_info = _take(f"{_fabric}.utilities.rank_zero", "rank_zero_info")
    rank_zero_only = _take(f"{_fabric}.utilities.rank_zero", "rank_zero_only")
    rank_zero_warn = _take(f"{_fabric}.utilities.rank_zero", "rank_zero_warn")
    IS_INTERACTIVE = _take(f"{_fabric}.utilities.imports", "_IS_INTERACTIVE")
    optimizers_to_device = _take(f"{_fabric}.utilities.optimizer", "_optimizers_to_device")


def add_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Append callbacks to a trainer that exists already, checkpoint callbacks kept last as Lightning wants them."""
    connector: Any = trainer._callback_connector
    trainer_any: Any = trainer
    trainer_any.callbacks = connector._reorder_callbacks([*trainer_any.callbacks, *callbacks])


def weigh_logged_means(results: Any, weight: Tensor, logging: Callable[[Tensor], AbstractContextManager[None]]) -> None:
    """Give the means that a step logs without a ``batch_size`` this weight, until Lightning takes up another batch.

    ``logging(weight)`` is entered while such a value is taken up and, with ``on_step`` and ``sync_dist``, reduced. A
    value of weight 0 is a mean over nothing, NaN as a rule, and is taken as 0. ``results``: ``trainer._results``.
    """
    results.batch_size = weight
    if "update_metrics" in results.__dict__:
        return
    update = results.update_metrics

    def weighed(key: str, value: Any, batch_size: Any) -> None:
        if not (isinstance(value, Tensor) and batch_size is results.batch_size and isinstance(batch_size, Tensor)):
            update(key, value, batch_size)
            return
        value = value.where(batch_size.to(value.device) > 0, 0)
        with logging(batch_size):
            update(key, value, batch_size)

    results.update_metrics = weighed


def show_loaders(trainer: Trainer, show: Callable[[object], object], *, to_loops: bool) -> None:
    """What ``trainer.train_dataloader`` and the like return becomes ``show`` of each loader.

    The loops go on with the loaders they have, unless ``to_loops``.
    """
    fit_loop: Any = trainer.fit_loop
    val_loop = fit_loop.epoch_loop.val_loop
    for loop in (fit_loop, val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        combined: Any = loop._combined_loader
        if combined is not None:
            in_use = combined.flattened
            combined.flattened = [show(loader) for loader in in_use]
            if not to_loops:
                combined._flattened = in_use


def agree_on_validation_by_time(trainer: Trainer, last_validation: float, agree: Callable[[bool], bool]) -> float:
    """With ``val_check_interval`` as a time, ``agree`` of "it is due" decides whether validation follows this batch.

    Returns when validation ran last, for the next call. Lightning would ask each rank's clock, and ranks whose clocks
    disagree would wait for each other in different loops.
    """
    clock: Any = trainer
    if clock._val_check_time_interval is None:
        return last_validation
    if math.isfinite(clock._last_val_time):
        last_validation = clock._last_val_time
    is_due = agree(time.monotonic() - last_validation >= clock._val_check_time_interval)
    clock._last_val_time = -math.inf if is_due else math.inf  # Lightning's comparison then comes out as agreed
    return last_validation


def is_compiled(module: LightningModule | None) -> bool:
    """Whether a Trainer was given ``torch.compile(module)``."""
    return getattr(module, "_compiler_ctx", None) is not None


@dataclass(frozen=True, kw_only=True)
class EpochProgress:
    """Where the loop stands in its training epoch."""

    num_begun: int
    """Batches the loop has begun with."""
    num_done: int
    """Batches it is done with."""
    is_over: bool
    """No batch of the epoch is left."""
    num_accumulated: int
    """Batches of an optimizer step; 1 where a module optimizes by hand."""
    num_ahead: int
    """Batches that the loop reads before it needs them: one, where the loaders have no length."""


def epoch_progress(trainer: Trainer) -> EpochProgress:
    """As of now, between two batches or inside of one."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    current = epoch_loop.batch_progress.current
    fetcher: Any = trainer.fit_loop._data_fetcher
    by_hand = trainer.lightning_module is not None and not trainer.lightning_module.automatic_optimization
    return EpochProgress(
        num_begun=current.ready,
        num_done=current.processed,
        is_over=current.processed == current.ready > 0 and epoch_loop._num_ready_batches_reached(),
        num_accumulated=1 if by_hand else trainer.accumulate_grad_batches,
        num_ahead=int(fetcher is not None and fetcher.length is None),
    )


def resumes_inside_epoch(trainer: Trainer) -> bool:
    """Whether a checkpoint was loaded, and the loop is to go on in the middle of an epoch."""
    fit_loop: Any = trainer.fit_loop
    return bool(fit_loop.restarting and epoch_progress(trainer).num_done and not epoch_progress(trainer).is_over)


def set_batches_done(trainer: Trainer, num_done: int) -> None:
    """The loop, which was loaded from a checkpoint, is to go on after so many batches of the epoch."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    change = num_done - progress.current.processed
    if not change:
        return
    if progress.current.completed != progress.current.processed:
        epoch_loop._batches_that_stepped -= int(change < 0)  # Lightning adds the step it had not counted yet
    for tracker in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(tracker, name, getattr(tracker, name) + change)


def know_saved(trainer: Trainer) -> None:
    """The callbacks into whose folder the loaded checkpoint was saved do not save this step again."""
    folder = os.path.dirname(os.path.abspath(trainer.ckpt_path or ""))
    callbacks: Any = trainer.checkpoint_callbacks
    for callback in callbacks:
        if getattr(callback, "dirpath", None) is not None and os.path.abspath(callback.dirpath) == folder:
            callback._last_global_step_saved = trainer.global_step


def loaders_in_use(trainer: Trainer) -> list[Any]:
    """The training loaders as the loop reads them, in their order."""
    combined: Any = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


class DeferredSignals:
    """SIGTERM and SLURM's requeue signal are noted when they come, and obeyed when every rank can.

    Lightning would answer at once, in the middle of whatever a rank computes: with a broadcast, or a checkpoint that
    the others are not ready for.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Before the Trainer registers its handlers; again for each run of it."""
        connector: Any = trainer._signal_connector
        self._connector = connector
        self._requeue = type(connector)._slurm_sigusr_handler_fn
        self.has_term = self.has_requeue = False
        self._signal: int = 0
        connector._sigterm_notifier_fn = self._note_term
        connector._slurm_sigusr_handler_fn = self._note_requeue

    def obey_term(self) -> None:
        """The run ends after the batch. Every rank calls it."""
        self._connector.received_sigterm = True

    def obey_requeue(self) -> None:
        """Save ``hpc_ckpt_N.ckpt`` and have SLURM start the job again. Every rank calls it, at the same batch."""
        self.has_requeue = False
        self._requeue(self._connector, self._signal, None)

    def _note_requeue(self, signal: int, frame: Any) -> None:
        self._signal, self.has_requeue = signal, True

    def _note_term(self, signal: int, frame: Any) -> None:
        launcher = self._connector.trainer.strategy.launcher
        if launcher is not None and not self.has_term:
            launcher.kill(signal)
        self.has_term = True


def check_precision_first(strategy: type[ParallelStrategy], check: Callable[[object], object]) -> None:
    """A Trainer with a ``strategy`` calls ``check`` with its precision, a name or a plugin, before it judges it itself.

    Lightning has other rules for a name than for a plugin and for a strategy's name than for an instance: it imports
    what is to be refused, and takes BF16 for FP16 on a CPU. Once for each class.
    """
    connector = importlib.import_module(f"{Trainer.__module__.rpartition('.')[0]}.connectors.accelerator_connector")
    judge = connector._AcceleratorConnector._check_and_init_precision

    def check_and_init_precision(self: Any) -> Precision:
        if isinstance(self.strategy, strategy):
            check(self._precision_plugin_flag or self._precision_flag)
        made: Precision = judge(self)
        return made

    connector._AcceleratorConnector._check_and_init_precision = check_and_init_precision


def hand_over_weights_only(strategy: type[ParallelStrategy]) -> None:
    """``trainer.fit(weights_only=...)`` and the like are ``strategy.weights_only`` while the Trainer runs.

    Lightning drops them on the way to a strategy that loads after it has sharded. Once for each class.
    """
    run = Trainer._run

    def run_with(self: Any, model: LightningModule, ckpt_path: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(self.strategy, strategy):
            self.strategy.weights_only = weights_only  # type: ignore[attr-defined]
        return run(self, model, ckpt_path=ckpt_path, weights_only=weights_only)

    Trainer._run = run_with  # type: ignore[method-assign]


def take_over_children(strategy: ParallelStrategy) -> list[Popen[Any]]:
    """The ranks that this process has started, in order; Lightning does not look after them any more.

    It would kill this process as well, when it finds that one has ended: at once, whatever is to be said or closed.
    """
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._child_processes = []  # type: ignore[attr-defined]
    return list(getattr(strategy.launcher, "procs", ()))


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Validation, test and prediction run under ``torch.no_grad``, whatever ``inference_mode`` says."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def detects_anomalies(trainer: Trainer) -> bool:
    """``Trainer(detect_anomaly=...)``."""
    return trainer._detect_anomaly


def logs_graph(logger: object) -> bool:
    """Whether it is a logger that traces the model's forward.

    ``DummyLogger``, which ``fast_dev_run`` puts in the place of others, answers every name with a function.
    """
    return getattr(logger, "_log_graph", False) is True


def registry_of(trainer: Trainer) -> str | None:
    """``Trainer(model_registry=...)``."""
    return trainer._model_registry


def wrap_hooks_before_step(precision: Precision, context: Callable[[], AbstractContextManager[object]]) -> None:
    """``on_before_optimizer_step`` and ``configure_gradient_clipping`` of ``precision``'s steps run in ``context()``.

    Of automatic optimization: by hand, a module clips and reads in its own ``training_step``.
    """
    plugin: Any = precision
    after_closure = plugin._after_closure

    def inside(*args: Any) -> None:
        with context():
            after_closure(*args)

    plugin._after_closure = inside


__all__ = [
    "FLAVOUR",
    "IS_INTERACTIVE",
    "AsyncCheckpointIO",
    "BaseFinetuning",
    "CLIInstantiator",
    "Callback",
    "DeferredSignals",
    "DummyLogger",
    "EpochProgress",
    "HalfPrecision",
    "LightningCLI",
    "LightningDataModule",
    "LightningModule",
    "LightningThroughputMonitor",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelParallelStrategy",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ParallelStrategy",
    "Precision",
    "StochasticWeightAveraging",
    "TorchCheckpointIO",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
    "add_callbacks",
    "agree_on_validation_by_time",
    "check_precision_first",
    "detects_anomalies",
    "epoch_progress",
    "evaluate_without_inference_mode",
    "hand_over_weights_only",
    "is_compiled",
    "is_overridden",
    "is_param_in_hook_signature",
    "isolate_rng",
    "know_saved",
    "loaders_in_use",
    "logs_graph",
    "optimizers_to_device",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "registry_of",
    "resumes_inside_epoch",
    "set_batches_done",
    "show_loaders",
    "take_over_children",
    "weigh_logged_means",
    "wrap_hooks_before_step",
]
