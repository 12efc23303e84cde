"""Tokens per second, model FLOPs utilisation and seconds by phase, counted in tokens and not in samples."""

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer, rank_zero_info
from lightning_moe_strategy.callbacks.peak_prediction import CannotPlan, shape_of
from lightning_moe_strategy.callbacks.phase_clock import PHASES, PhaseClock
from lightning_moe_strategy.plan.cluster import CLUSTERS
from lightning_moe_strategy.plan.time import model_flops_per_token


class ThroughputMonitor(Callback):
    """Log how fast training goes. Added by the strategy.

    ``tokens_per_second`` of all ranks together and ``tokens_per_second_per_gpu``; ``tokens_seen``; ``mfu`` where the
    GPU's peak and the model's FLOPs are known; ``seconds/data``, ``seconds/forward``, ``seconds/backward`` and
    ``seconds/optimizer`` of an optimizer step, mean over the ranks. Ranks of one cp group share a sequence and each
    counts its own part, so the figures are the same at equal work for every layout.

    MFU counts the model's FLOPs as the planner does, for the layers as they are and the length of the sequences:
    nothing that is computed again, and attention over the keys that a token sees. It needs a ``ModelConfig`` or a
    Hugging Face config, and every parameter trained.

    Args:
        every_n_steps: steps between two readings; each reading waits for the device and sums over the ranks.
        peak_flops: of one GPU, FLOP/s in the dtype of the products. None: the data sheet's dense BF16 figure of the
            GPUs that the planner knows.

    Attributes:
        tokens_per_second: of the last reading, all ranks together; None before the first.
        mfu: of the last reading, 0 to 1; None where it cannot be told.
        seconds: by phase, of one optimizer step of the last reading.
        tokens_seen: by training so far, all ranks together.
    """

    def __init__(self, every_n_steps: int = 10, peak_flops: float | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps({every_n_steps}) must be at least 1.")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops({peak_flops}) must be above 0: FLOP/s of one GPU. Leave it out if unknown.")
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None
        self.seconds: dict[str, float] = {}
        self.tokens_seen = 0
        self._clock: PhaseClock | None = None
        self._tokens_since_reading = 0
        self._flops_since_reading = 0.0
        self._flops_per_token: dict[int, float | None] = {}
        self._reading_step = 0
        self._reading_time: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = PhaseClock(pl_module.device)
        self._clock.mark(None)
        self._flops_per_token.clear()
        if self.peak_flops is None and pl_module.device.type == "cuda":
            self.peak_flops = _known_peak(torch.cuda.get_device_name(pl_module.device))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._mark("data")
        strategy: Any = trainer.strategy
        num_tokens, context = strategy.micro_batch.num_tokens, strategy.micro_batch.context
        self._tokens_since_reading += num_tokens
        if context not in self._flops_per_token:
            self._flops_per_token[context] = self._count_flops(pl_module, context)
        self._flops_since_reading += num_tokens * (self._flops_per_token[context] or 0.0)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._mark("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mark("optimizer")
        num_steps = trainer.global_step - self._reading_step
        if num_steps >= self.every_n_steps:
            self._read(pl_module, num_steps)
            self._reading_step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Time spent validating is no training time: start a new reading after it.
        self._reading_time = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark(None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Tokens since the last reading are saved as well, those of all ranks together."""
        tokens = torch.tensor(self._tokens_since_reading, device=pl_module.device)
        if dist.is_initialized():
            dist.all_reduce(tokens)
        unread = {"tokens_since_reading": int(tokens), "reading_step": self._reading_step}
        checkpoint["callbacks"][self.state_key] = self.state_dict() | unread

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens_seen = state_dict["tokens_seen"]
        self._reading_step = state_dict.get("reading_step", 0)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._tokens_since_reading = state_dict.get("tokens_since_reading", 0) if is_first else 0

    def _mark(self, phase: Any) -> None:
        if self._clock is not None:
            self._clock.mark(phase)

    def _read(self, pl_module: LightningModule, num_steps: int) -> None:
        assert self._clock is not None
        phases = self._clock.read()
        # One rank's phases are those of the others, apart from who waits where: their mean says how long each takes.
        of_rank = [self._tokens_since_reading, self._flops_since_reading, *(phases[phase] for phase in PHASES)]
        sums = torch.tensor(of_rank, dtype=torch.float64, device=pl_module.device)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks > 1:
            dist.all_reduce(sums)
        tokens, flops, *seconds = sums.tolist()
        now = time.perf_counter()
        self.tokens_seen += int(tokens)
        # The first reading holds compilation and warm-up, so only tokens are counted.
        if self._reading_time is not None:
            elapsed = now - self._reading_time
            self.tokens_per_second = tokens / elapsed
            pl_module.log("tokens_per_second", self.tokens_per_second, prog_bar=True, batch_size=1)
            pl_module.log("tokens_per_second_per_gpu", self.tokens_per_second / num_ranks, batch_size=1)
            if self.peak_flops is not None and flops:
                self.mfu = flops / elapsed / num_ranks / self.peak_flops
                pl_module.log("mfu", self.mfu, prog_bar=True, batch_size=1)
            self.seconds = {phase: total / num_ranks / num_steps for phase, total in zip(PHASES, seconds, strict=True)}
            pl_module.log_dict({f"seconds/{phase}": each for phase, each in self.seconds.items()}, batch_size=1)
        pl_module.log("tokens_seen", float(self.tokens_seen), batch_size=1)
        self._reading_time, self._tokens_since_reading, self._flops_since_reading = now, 0, 0.0

    def _count_flops(self, pl_module: LightningModule, context: int) -> float | None:
        if not context:
            return None
        try:
            return model_flops_per_token(shape_of(pl_module), context)
        except CannotPlan as reason:
            if self.peak_flops is not None and not self._flops_per_token:
                rank_zero_info(f"ThroughputMonitor logs no mfu: {reason}")
            return None


def _known_peak(device_name: str) -> float | None:
    words = device_name.upper().split()
    return next((cluster.peak_flops for cluster in CLUSTERS.values() if cluster.gpu.upper() in words), None)
