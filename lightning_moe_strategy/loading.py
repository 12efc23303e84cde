"""How a Trainer's checkpoint is loaded, on any layout: see ``checkpoint.load``.

A directory of this package or of Lightning's ModelParallelStrategy, or one file of any Trainer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_moe_strategy._lightning_compat import TrainerFn, rank_zero_warn
from lightning_moe_strategy.checkpoint.load import load
from lightning_moe_strategy.checkpoint.storage import plain_path
from lightning_moe_strategy.host_agreement import host_group
from lightning_moe_strategy.placed_strategy import PlacedStrategy
from lightning_moe_strategy.sharded_state import remember_path


class Loading(PlacedStrategy):
    """A strategy that loads what any layout has saved."""

    weights_only: bool | None = None
    """As ``trainer.fit`` and the like were told. False runs the code that a file names; else none is run."""

    def take_rank_states(self, states: Mapping[str, Tensor], saved_world_size: int) -> None:
        """``states``: what this rank had alone among ``saved_world_size``; empty where there was none."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Weights into the model; in ``fit`` the optimizers' states into the optimizers; returned is the rest.

        ``strict_loading`` of the LightningModule decides whether every tensor must be in both.

        Raises:
            CheckpointError: on every rank; names what is missing, damaged, does not fit or would have to run code.
        """
        module, model = self.lightning_module, self.model
        assert module is not None and model is not None
        path = plain_path(self.broadcast(checkpoint_path))
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        loaded = load(
            path,
            model,
            self.optimizers if is_fitting else None,
            group=host_group(self._mesh_timeout),
            strict=module.strict_loading,
            weights_only=(self.weights_only if weights_only is None else weights_only) is not False,
            shows_progress=self.is_global_zero,
        )
        if not loaded.is_verified:
            loaded.notes.append(
                "It has no manifest, so it was not saved by strategy='fsdp_cp_ep', and whether its files are whole "
                "cannot be verified."
            )
        if is_fitting and not loaded.has_optimizers:
            loaded.rest.setdefault("lr_schedulers", [])  # Lightning insists on some
            loaded.notes.append(
                "It holds weights only: optimizers and learning-rate schedulers start anew at step "
                f"{loaded.rest.get('global_step', 0)}."
            )
        for note in loaded.notes:
            rank_zero_warn(f"checkpoint({path!r}): {note}")
        if is_fitting and loaded.rank_states is not None:
            self.take_rank_states(loaded.rank_states, loaded.world_size)
        return remember_path(loaded.rest, Path(path))
