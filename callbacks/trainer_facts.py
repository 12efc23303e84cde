"""What callbacks ask a Trainer about its run, in types that Lightning leaves open."""

from pathlib import Path
from typing import Any

from lightning_moe_strategy._lightning_compat import Trainer
from lightning_moe_strategy.placement import Placement


def placement_in(trainer: Trainer) -> Placement:
    """How the module lies on the ranks, under the strategy of this package."""
    strategy: Any = trainer.strategy
    placement: Placement = strategy.placement
    return placement


def log_every_n_steps(trainer: Trainer) -> int:
    """0 for never."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it without declaring it
    return every


def run_folder(trainer: Trainer) -> Path:
    """Where the run's logs are. A broadcast: every rank asks."""
    return Path(trainer.log_dir or trainer.default_root_dir)
