"""Tokens per second of the whole run, counted in tokens and not in samples."""

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer


class ThroughputMonitor(Callback):
    """Log ``tokens_per_second`` of all ranks together, and ``tokens_seen``. Added by the strategy.

    Ranks of one cp group share a sequence and each counts its own part, so the figures are the same at equal work
    for every layout.

    Args:
        every_n_steps: steps between two readings; each reading waits for the device and sums over the ranks.

    Attributes:
        tokens_per_second: of the last reading, all ranks together; None before the first.
        tokens_seen: by training so far, all ranks together.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps({every_n_steps}) must be at least 1.")
        self.every_n_steps = every_n_steps
        self.tokens_per_second: float | None = None
        self.tokens_seen = 0
        self._tokens_since_reading = 0
        self._reading_step = 0
        self._reading_time: float | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        self._tokens_since_reading += strategy.micro_batch.num_tokens
        if trainer.global_step - self._reading_step < self.every_n_steps:
            return
        tokens = torch.tensor(self._tokens_since_reading, device=pl_module.device)
        if dist.is_initialized():
            dist.all_reduce(tokens)
        now = time.perf_counter()
        self.tokens_seen += int(tokens)
        # The first reading holds compilation and warm-up, so only tokens are counted.
        if self._reading_time is not None:
            self.tokens_per_second = int(tokens) / (now - self._reading_time)
            pl_module.log("tokens_per_second", self.tokens_per_second, prog_bar=True, batch_size=1)
        pl_module.log("tokens_seen", float(self.tokens_seen), batch_size=1)
        self._reading_time, self._reading_step, self._tokens_since_reading = now, trainer.global_step, 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Time spent validating is no training time: start a new reading after it.
        self._reading_time = None

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens_seen = state_dict["tokens_seen"]
