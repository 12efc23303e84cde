"""How a checkpoint is saved, linked and removed: at once or not at all, with one outcome for all ranks.

A checkpoint is a directory that all ranks write (see ``checkpoint.save``), or one file of rank 0. With ``async_save``
those of ModelCheckpoint are written while the training goes on. The methods stand in the order in which a Trainer
calls them.
"""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe_strategy._lightning_checkpoints import checkpoint_folders, hyperparameters_of, plain_optimizer
from lightning_moe_strategy._lightning_compat import TorchCheckpointIO, Trainer, rank_zero_info, rank_zero_warn
from lightning_moe_strategy.checkpoint.asynchronous import BackgroundSaves
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.named_state import model_state, optimizer_state
from lightning_moe_strategy.checkpoint.plain import require_plain
from lightning_moe_strategy.checkpoint.planner import KnownPlans
from lightning_moe_strategy.checkpoint.publish import clean, link, recover_all, remove
from lightning_moe_strategy.checkpoint.save import agreed, require_replaceable, save_directory, save_file
from lightning_moe_strategy.checkpoint.storage import plain_path, storage_of
from lightning_moe_strategy.host_agreement import host_group
from lightning_moe_strategy.placed_strategy import PlacedStrategy
from lightning_moe_strategy.sharded_state import SHARDED_STATES, names_of_states, whole_states

RANK_STATES = "rank_states"
"""What each rank has alone: by name and rank, ``{"random": {"0": bytes, "1": bytes}}``, as tensors of uint8."""
_AXES = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep")


class Saving(PlacedStrategy):
    """A strategy that saves checkpoints which survive whatever happens meanwhile."""

    _saves: BackgroundSaves | None = None
    _is_in_background = False

    def __init__(self, *, async_save: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._async_save, self._known_plans = async_save, KnownPlans()
        if async_save and not self._save_distributed_checkpoint:
            raise ValueError(
                "async_save(True) needs save_distributed_checkpoint(True): one file is gathered on rank 0 while the "
                "others wait. Leave one of the two out."
            )

    def rank_states(self) -> dict[str, Tensor]:
        """What this rank has alone and gets back when it goes on, as tensors of uint8 on the CPU."""
        return {}

    def restore_interrupted(self, folder: str) -> None:
        """Put checkpoints of ``folder`` back that a save which died had taken away to publish a newer one."""
        with suppress(OSError):  # a folder that cannot be read has no checkpoint to go on from
            recover_all(plain_path(folder))

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Before it trains: tidy up after saves that died, and see that what is to be saved can be.

        Raises:
            CheckpointError: hyperparameters that a checkpoint cannot hold, and checkpoints will be written.
        """
        super().setup_optimizers(trainer)
        folders = checkpoint_folders(trainer)
        if not folders:
            return
        if self._save_distributed_checkpoint:
            for hyperparameters in hyperparameters_of(trainer):
                require_plain({"hyper_parameters": hyperparameters})
        if self.is_global_zero:
            for folder in folders:
                _clean(folder)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning's copies all to the host first. Shards go there one by one as they are written.
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.model is not None
        return model_state(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Of an optimizer that never made a step as well, without the step torch makes to get one."""
        optimizer = plain_optimizer(optimizer)
        assert self.model is not None
        if not self._save_distributed_checkpoint:
            if optimizer.state:
                return super().optimizer_state(optimizer)
            return optimizer.state_dict() if self.is_global_zero else {}
        return optimizer_state(self.model, optimizer)

    @contextmanager
    def in_background(self) -> Generator[None, None, None]:
        """Inside, checkpoints are saved while the training goes on, if ``async_save`` says so."""
        self._is_in_background = self._async_save
        try:
            yield
        finally:
            self._is_in_background = False

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what a Trainer has put together. Every rank calls it.

        Raises:
            CheckpointError: on every rank, if one of them cannot; what was there before stays.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options({storage_options!r}) would be handed to a CheckpointIO, which saves nothing here: "
                "all ranks write a checkpoint together. Leave it out; fsspec reads its own configuration."
            )
        path = plain_path(self.broadcast(filepath))
        if self._placement is None:
            # An error that ended the run so early is what the user has to read, not one of saving.
            rank_zero_warn(f"checkpoint({path!r}) was not saved: the ranks have not started.")
            return
        # Of weights alone nothing resumes.
        states = self.rank_states() if "optimizer_states" in checkpoint else {}
        if not self._save_distributed_checkpoint:
            self._save_one_file(checkpoint, path, states)
            return
        about: dict[str, Any] = {
            "layout": {axis: self.dims.degree(axis) for axis in _AXES} | {"world_size": self.dims.world_size},
            "versions": {
                "lightning-moe-strategy": version("lightning-moe-strategy"),
                "torch": torch.__version__,
                "lightning": str(checkpoint.get("pytorch-lightning_version")),
            },
        }
        sharded = _sharded_part(checkpoint, states, self.global_rank)
        if self._is_in_background:
            self._saves = self._saves or BackgroundSaves(self._mesh_timeout)
            # Lightning takes whatever steps as an optimizer; without torch's hooks it is copied at once.
            plain = enumerate(map(plain_optimizer, self.optimizers))
            hooked = {f"optimizer_{index}": each for index, each in plain if isinstance(each, Optimizer)}
            self._saves.save(path, sharded, checkpoint, **about, optimizers=hooked)
        else:
            self.wait_for_saves()
            save_directory(path, sharded, checkpoint, **about, group=self._files, known=self._known_plans)

    def _save_one_file(self, checkpoint: dict[str, Any], path: str, states: Mapping[str, Tensor]) -> None:
        whole_states(checkpoint, is_kept=self.is_global_zero)
        of_ranks: list[Mapping[str, Tensor]] = [{}] * self.world_size
        dist.all_gather_object(of_ranks, states, group=self._files)
        if states:
            checkpoint[RANK_STATES] = {
                name: {str(rank): of_rank[name] for rank, of_rank in enumerate(of_ranks)} for name in states
            }
        if type(self.checkpoint_io) is TorchCheckpointIO:
            save_file(path, checkpoint, group=self._files)
            return

        def hand_over() -> None:
            require_replaceable(storage_of(path), path)
            if storage_of(path).is_directory(path):
                remove(path)
            self.checkpoint_io.save_checkpoint(checkpoint, path)

        agreed(path, hand_over if self.is_global_zero else _nothing, self._files)

    def is_being_saved(self, filepath: Any) -> bool:
        """Whether a checkpoint ``filepath`` is about to appear."""
        return self._saves is not None and self._saves.path == plain_path(filepath)

    def link_checkpoint(self, filepath: Any, linkpath: Any) -> None:
        """Make ``linkpath`` a symbolic link to the checkpoint ``filepath``, once that is there."""
        target, path = plain_path(filepath), plain_path(linkpath)
        if os.path.abspath(target) != os.path.abspath(path):
            self._once_saved(path, "linked", lambda: link(target, path))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Once what replaces it is there."""
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            super().remove_checkpoint(filepath)
            return
        path = plain_path(filepath)
        self._once_saved(path, "removed", lambda: remove(path))

    def _once_saved(self, path: str, done: str, action: Callable[[], None]) -> None:
        """On rank 0, now or after the save in flight. An error is raised on all ranks, now or when they wait for it."""

        def act() -> None:
            try:
                action()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint({path!r}) was not {done}: {type(error).__name__}: {error}. Look at the rights on its "
                    "directory."
                ) from error

        if self._saves is None or self._saves.path is None:
            agreed(path, act if self.is_global_zero else _nothing, self._files)
        elif self.is_global_zero:
            self._saves.then(act)

    def wait_for_saves(self) -> None:
        """Until a checkpoint that is being saved is there. Every rank calls it.

        Raises:
            CheckpointError: it was not saved.
        """
        if self._saves is not None:
            self._saves.wait()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.wait_for_saves()

    def on_exception(self, exception: BaseException) -> None:
        self._finish_saves()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._finish_saves()
        self._saves = None  # with the memory of its copy
        self._known_plans.forget()
        super().teardown()

    def _finish_saves(self) -> None:
        """Without the other ranks, which may be anywhere: a copy that was taken is a good checkpoint still."""
        timeout: timedelta = self._mesh_timeout
        problem = None if self._saves is None else self._saves.finish_alone(timeout.total_seconds())
        if problem is not None:
            rank_zero_warn(problem)

    @property
    def _files(self) -> dist.ProcessGroup:
        """All ranks, for what they agree on about files."""
        return host_group(self._mesh_timeout)


def _sharded_part(checkpoint: dict[str, Any], states: Mapping[str, Tensor], rank: int) -> dict[str, Any]:
    """Take out of ``checkpoint`` what lies on the ranks. The keys are Lightning's."""
    sharded: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        sharded[f"optimizer_{index}"] = state
    if SHARDED_STATES in checkpoint:
        sharded[SHARDED_STATES] = checkpoint[SHARDED_STATES]
        checkpoint[SHARDED_STATES] = names_of_states(checkpoint)
    if states:
        sharded[RANK_STATES] = {name: {str(rank): state} for name, state in states.items()}
    return sharded


def _clean(folder: str) -> None:
    try:
        names = clean(plain_path(folder))
    except OSError as error:
        rank_zero_warn(f"What interrupted saves left in {folder!r} cannot be removed: {error}.")
        return
    if names:
        rank_zero_info(f"Removed from {folder!r} what interrupted saves left: {', '.join(names)}.")


def _nothing() -> None:
    pass
