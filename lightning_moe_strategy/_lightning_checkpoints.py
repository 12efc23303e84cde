"""How Lightning's ModelCheckpoint is led to a strategy that saves, links and removes itself.

Private names, seen in Lightning 2.6, appear here and in ``_lightning_compat`` only.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from lightning_moe_strategy._lightning_compat import ModelCheckpoint, ParallelStrategy, Trainer


def hand_over_checkpoints(strategy: type[ParallelStrategy]) -> None:
    """Of a Trainer with a ``strategy``, ModelCheckpoint saves inside ``strategy.in_background()``, links by
    ``strategy.link_checkpoint(...)``, and takes a name that ``strategy.is_being_saved(...)`` for taken. Where it looks
    for the last checkpoint, ``strategy.restore_interrupted(folder)`` is called before. Once for each class.
    """
    save, link = ModelCheckpoint._save_checkpoint, ModelCheckpoint._link_checkpoint
    exists, find_last = ModelCheckpoint.file_exists, ModelCheckpoint._find_last_checkpoints

    def save_checkpoint(self: Any, trainer: Any, filepath: str) -> None:
        with _background(trainer.strategy, strategy):
            save(self, trainer, filepath)

    def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        if isinstance(trainer.strategy, strategy):
            trainer.strategy.link_checkpoint(filepath, linkpath)  # type: ignore[attr-defined]
        else:
            link(trainer, filepath, linkpath)

    def file_exists(self: Any, filepath: Any, trainer: Any) -> bool:
        is_ours = isinstance(trainer.strategy, strategy)
        return (is_ours and trainer.strategy.is_being_saved(filepath)) or exists(self, filepath, trainer)

    def find_last_checkpoints(self: Any, trainer: Any) -> set[str]:
        if isinstance(trainer.strategy, strategy):
            trainer.strategy.restore_interrupted(_folder_of(self, trainer))  # type: ignore[attr-defined]
        return find_last(self, trainer)

    changed: Any = ModelCheckpoint
    changed._save_checkpoint, changed._link_checkpoint = save_checkpoint, staticmethod(link_checkpoint)
    changed.file_exists, changed._find_last_checkpoints = file_exists, find_last_checkpoints


def checkpoint_folders(trainer: Trainer) -> list[str]:
    """Where the callbacks of a Trainer that is about to fit write checkpoints; empty where none will be written."""
    callbacks: Any = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [_folder_of(callback, trainer) for callback in callbacks if callback.save_top_k != 0 or callback.save_last]


def hyperparameters_of(trainer: Trainer) -> list[dict[str, Any]]:
    """What ``save_hyperparameters`` has of the module and the datamodule: part of every checkpoint."""
    holders: Any = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    return [dict(holder.hparams) for holder in holders if holder is not None and holder.hparams]


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Without Lightning's wrapper, whose state is a copy."""
    plain: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return plain


def _background(strategy: Any, kind: type[ParallelStrategy]) -> AbstractContextManager[None]:
    if not isinstance(strategy, kind):
        return nullcontext()
    inside: AbstractContextManager[None] = strategy.in_background()  # type: ignore[attr-defined]
    return inside


def _folder_of(checkpoints: Any, trainer: Trainer) -> str:
    return str(checkpoints._ModelCheckpoint__resolve_ckpt_dir(trainer))
