"""Lightning's names for the flavour of this process, ``lightning`` or ``pytorch_lightning``.

A process uses one flavour (Lightning itself refuses a mix), so every class of this package that derives from a
Lightning class takes its base from here. Private names, seen in Lightning 2.6, appear in this file only.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_moe_strategy import _autoload

FLAVOUR = _autoload.flavour()
"""``"lightning"`` or ``"pytorch_lightning"``: whose Trainer asked first, else what is imported or installed."""

if TYPE_CHECKING:
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.cli import _InstantiatorFn as CLIInstantiator
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins.precision import Precision
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
    LightningCLI = _take(f"{_root}.cli", "LightningCLI")
    CLIInstantiator = _take(f"{_root}.cli", "_InstantiatorFn")
    DummyLogger = _take(f"{_root}.loggers.logger", "DummyLogger")
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


__all__ = [
    "FLAVOUR",
    "IS_INTERACTIVE",
    "CLIInstantiator",
    "Callback",
    "DummyLogger",
    "LightningCLI",
    "LightningDataModule",
    "LightningModule",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "Precision",
    "Trainer",
    "TrainerFn",
    "add_callbacks",
    "is_overridden",
    "is_param_in_hook_signature",
    "isolate_rng",
    "optimizers_to_device",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "weigh_logged_means",
]
