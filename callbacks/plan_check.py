"""Planned against measured: the peak memory of a run's second step beside what a plan says of it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_moe_strategy.callbacks.peak_measurement import DevicePeak, WatchedPeak
from lightning_moe_strategy.callbacks.peak_prediction import (
    PURPOSES,
    CannotPlan,
    PlannedPeak,
    differences,
    plan_run,
    read_planned_peak,
)
from lightning_moe_strategy.callbacks.trainer_facts import placement_in
from lightning_moe_strategy.context_parallel.batch import find_sequences, items_of
from lightning_moe_strategy.simulation.report import GB

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """What the second step showed; bytes of tensors, without the allocator's reserve."""

    rank: int
    """The rank with most."""
    measured_bytes: int
    planned_bytes: int | None
    """None where there is no plan for the run."""

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        return self.measured_bytes / self.planned_bytes if self.planned_bytes else None

    def figures(self) -> dict[str, float]:
        """What loggers get, in GB (1e9 bytes)."""
        figures = {"plan_check/measured_gb": self.measured_bytes / GB}
        if self.planned_bytes is not None and self.ratio is not None:
            figures |= {"plan_check/predicted_gb": self.planned_bytes / GB, "plan_check/ratio": self.ratio}
        return figures


class PlanCheck(Callback):
    """Log the planned and the measured peak memory of the second optimizer step, and their ratio.

    The second step of a fit: the first one builds the optimizer's state and has no prefetch yet. All its micro-batches
    count. On a GPU the figure is ``torch.cuda.max_memory_allocated`` (the peak statistics are reset for it); on a CPU
    every operation of that one step is watched, which makes it several times as long. Loggers get
    ``plan_check/predicted_gb``, ``plan_check/measured_gb`` and ``plan_check/ratio`` (measured over predicted).

    Args:
        plan: a file that ``lightning-moe plan --json`` or ``lightning-moe simulate --json`` wrote. Without one the run
            plans itself: the module's configuration (ours, or a Hugging Face one), layout, recompute, optimizer and
            the tokens of the batch, with even routing. Where that is not possible one sentence says why, and the
            peak is measured alone.

    Attributes:
        result: the ``CheckedPlan``, on every rank; None before the second step has ended.

    Raises:
        ValueError: when the Trainer starts, on every rank alike: the file holds no such plan, or the strategy is
            another one.
    """

    def __init__(self, plan: str | Path | None = None) -> None:
        self.plan = plan
        self.result: CheckedPlan | None = None
        self._from_file: PlannedPeak | None = None
        self._first_step = self._measured_from = 0
        self._peak: DevicePeak | WatchedPeak | None = None
        self._largest_batch: tuple[int, int] = (0, 0)
        """Sequences and tokens of each on this rank, of the step's largest micro-batch."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy: Any = trainer.strategy
        if getattr(strategy, "strategy_name", None) != "fsdp_cp_ep":
            raise ValueError(f"PlanCheck needs Trainer(strategy='fsdp_cp_ep'); this one has {type(strategy).__name__}.")
        if self.plan is not None:
            self._from_file = read_planned_peak(self.plan)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step, self._peak, self.result = trainer.global_step, None, None
        self._largest_batch = (0, 0)
        if self._from_file is not None:
            self._from_file.warn_of_another_run(placement_in(trainer).dims, rank_zero_warn)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.result is not None or trainer.global_step == self._first_step:
            return
        if self._peak is None:
            self._measured_from = trainer.global_step
            on_gpu = pl_module.device.type == "cuda"
            self._peak = DevicePeak(pl_module.device) if on_gpu else WatchedPeak(placement_in(trainer))
        self._note_size(batch)
        tensors = [item for item in items_of(batch).values() if isinstance(item, Tensor)]
        self._peak.start(pl_module, trainer.optimizers, tensors)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._peak is not None:
            self._peak.enter("backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._peak is not None:
            self._peak.enter("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._peak is None:
            return
        self._peak.stop()
        if trainer.global_step > self._measured_from:
            self._report(trainer, pl_module, self._peak)
            self._peak = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._peak is not None:
            self._peak.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.result is None:
            _logger.debug("PlanCheck measures the second optimizer step, and this run has none.")

    def _note_size(self, batch: Any) -> None:
        try:
            fields = find_sequences(items_of(batch), sequence_keys=None, labels_key=None)
        except ValueError:
            return
        size = (fields.batch_size, fields.num_tokens)
        self._largest_batch = max(self._largest_batch, size, key=lambda each: each[0] * each[1])

    def _report(self, trainer: Trainer, pl_module: LightningModule, peak: DevicePeak | WatchedPeak) -> None:
        planned, reason = self._planned(trainer, pl_module)
        buckets = peak.buckets()
        figures_of_rank = [peak.num_bytes, 0 if planned is None else planned.num_bytes]
        if planned is not None and buckets:
            figures_of_rank += differences(planned.buckets, buckets).values()
        # Every rank fills in its own row: one sum is a gather.
        rows = torch.zeros(dist.get_world_size(), 2 + len(PURPOSES), dtype=torch.int64, device=pl_module.device)
        row = torch.tensor([int(figure) for figure in figures_of_rank], device=rows.device)
        rows[dist.get_rank(), : len(row)] = row
        dist.all_reduce(rows)
        busiest = int(rows[:, 0].argmax())
        measured_bytes, planned_bytes, *by_purpose = rows[busiest].tolist()
        self.result = CheckedPlan(rank=busiest, measured_bytes=measured_bytes, planned_bytes=planned_bytes or None)
        for logger in trainer.loggers:
            logger.log_metrics(self.result.figures(), step=trainer.global_step)
        rank_zero_info(_sentence(self.result, dict(zip(PURPOSES, by_purpose, strict=True)), reason))

    def _planned(self, trainer: Trainer, pl_module: LightningModule) -> tuple[PlannedPeak | None, str]:
        """The plan, or why there is none. Every rank comes to the same, but for the size of its batch."""
        if self._from_file is not None:
            return self._from_file, ""
        try:
            return plan_run(pl_module, placement_in(trainer), trainer.optimizers, self._largest_batch), ""
        except CannotPlan as error:
            return None, str(error)


def _sentence(result: CheckedPlan, by_purpose: Mapping[str, int], reason: str) -> str:
    scale, unit = (GB, "GB") if result.measured_bytes >= GB else (1e6, "MB")
    measured = f"measured peak {result.measured_bytes / scale:,.3f} {unit} on rank {result.rank}"
    if result.planned_bytes is None:
        return f"PlanCheck, second step: {measured}. There is no plan to compare it with: {reason}"
    line = (
        f"PlanCheck, second step: planned peak {result.planned_bytes / scale:,.3f} {unit}, {measured}, "
        f"measured / planned {result.ratio:.3f}"
    )
    purpose, most = max(by_purpose.items(), key=lambda item: abs(item[1]))
    if most:
        line += f"; they differ most in {purpose}, {most / scale:+,.3f} {unit}"
    return line + "."
