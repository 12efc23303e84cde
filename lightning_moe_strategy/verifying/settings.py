"""What one check runs, the same for the ranks and for the one process they are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_moe_strategy.verifying.layouts import Degree

HORIZON = 1000
"""Optimizer steps that schedules are told of, unless the Trainer's ``max_steps`` says."""

TRAINER_OPTIONS = (
    "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "use_distributed_sampler", "max_steps",
)  # fmt: skip
"""Of a Trainer's arguments, those that a step depends on."""

NOT_CHECKED: Mapping[str, object] = {
    "indexer_loss_weight": 0.0,
    "sequence_balance_loss": 0.0,
    "batch_balance_loss": 0.0,
    "router_z_loss": 0.0,
    "compile_blocks": False,
}
"""Arguments of the strategy that change the training on purpose, and their values without it."""

OF_STRATEGY = (
    "loss_reduction", "gradient_sync", "recompute", "fp32_norms", "ep_chunks", "ep_chunk_bytes", "dispatcher",
    "balance", "max_imbalance", "nvl",
)  # fmt: skip
"""Those that should change nothing, and are checked as they are."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the ranks, and as far as they concern it of the one process."""

    degrees: Mapping[str, Degree]
    world: int
    steps: int
    precision: str
    seed: int
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer, out of ``TRAINER_OPTIONS``."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the strategy that are no degrees, out of ``OF_STRATEGY``."""
    folder: Path = Path()
    """What the processes hand to one another."""

    @property
    def num_accumulated(self) -> int:
        """Micro-batches of a step on every rank."""
        return int(self.trainer.get("accumulate_grad_batches", 1))

    @property
    def horizon(self) -> int:
        given = self.trainer.get("max_steps", -1)
        return given if given > 0 else HORIZON

    @property
    def loss_is_sum(self) -> bool:
        return bool(self.strategy.get("loss_reduction", "mean") == "sum")

    def batch_file(self, dp: int, index: int) -> Path:
        """A micro-batch as the ranks of one cp group read it."""
        return self.folder / f"batch_{dp}_{index}.pt"

    def rank_file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.pt"

    @property
    def reference_file(self) -> Path:
        return self.folder / "one_process.pt"


def quiet_options(settings: Settings) -> dict[str, Any]:
    """Of a Trainer that trains and does nothing else."""
    clipping = {name: settings.trainer[name] for name in TRAINER_OPTIONS if name.startswith("gradient")
                and name in settings.trainer}  # fmt: skip
    return clipping | dict(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=settings.horizon * 8,  # a module that optimizes by hand may step several times a batch
        default_root_dir=str(settings.folder),
    )
