"""What each step waited for, logged beside what the planner says, with a warning where it is too much.

``receipt.jsonl`` in the run's folder (``trainer.log_dir``, or ``default_root_dir`` without a logger) gets a line for
each reading; a resumed run appends. Its keys: ``step``, ``num_steps`` (that the means are over), ``seconds`` (of a
step), ``exposed`` (seconds by category), ``most_exposed_seconds`` (of the rank that waited most), ``worst`` (the
category with most), ``first_layer`` (the first that was not hidden, of that category; null where all were) and, with a
cluster, ``planned`` (seconds by category).
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_moe_strategy.callbacks.peak_prediction import CannotPlan
from lightning_moe_strategy.callbacks.receipt_prediction import PlannedWaits, plan_waits
from lightning_moe_strategy.callbacks.receipt_summary import (
    StepReceipt,
    WaitSums,
    receipt_of,
    receipt_table,
    warning,
)
from lightning_moe_strategy.callbacks.trainer_facts import log_every_n_steps, placement_in, run_folder
from lightning_moe_strategy.plan.cluster import Cluster, load_cluster
from lightning_moe_strategy.simulation.communication import axes_of_groups
from lightning_moe_strategy.waits import WaitWatch, layers_of

FILE_NAME = "receipt.jsonl"


class Receipt(Callback):
    """Log the seconds of an optimizer step in which compute waited, by what it waited for.

    Gathers of dense and of expert weights, reductions of gradients, what attention gathers over cp, tokens to experts
    and results back, forward and backward; and FSDP's copies into and out of its buffers, which take the same stream.
    On a GPU they are pairs of timing events on the compute stream, read a step later without a sync; on a CPU the clock
    around what blocks. Numbers, order and memory of a run are those without it.

    Loggers get ``receipt/exposed_seconds``, ``receipt/exposed_share`` (of the step) and ``receipt/<category>_seconds``,
    means over the steps since the last figures and over the ranks, and ``receipt/exposed_seconds_worst_rank``. A table
    follows at the end of fit, and ``receipt.jsonl`` in the run's folder gets a line for each reading. The first step of
    a fit, which shows the order of the units and has no prefetch, counts for nothing; nor does evaluation.

    Args:
        cluster: a preset of the planner ("gb200-nvl72") or a YAML: its prediction for this run stands beside the
            measurement. None: no prediction.
        warn_above: share of a step, 0 to 1, above which one warning says what is waited for, from which layer on, and
            what helps. None: never.
        log_every_n_steps: optimizer steps between two figures, each one small all-reduce; None takes the Trainer's.

    Attributes:
        last: the ``StepReceipt`` last logged, the same on every rank; at the end of fit that of all its steps. None
            before.

    Raises:
        ValueError: a cluster that the planner does not know, or a number out of range; when the Trainer starts, a
            strategy other than ours, or two receipts.
    """

    def __init__(
        self,
        *,
        cluster: str | None = None,
        warn_above: float | None = 0.1,
        log_every_n_steps: int | None = None,
    ) -> None:
        if warn_above is not None and not 0 < warn_above <= 1:
            raise ValueError(f"warn_above({warn_above}) must be a share of a step above 0 and up to 1, or None.")
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps({log_every_n_steps}) must be at least 1, or None for the Trainer's.")
        self.cluster: Cluster | None = None if cluster is None else load_cluster(cluster)
        self.warn_above = warn_above
        self.log_every_n_steps = log_every_n_steps
        self.last: StepReceipt | None = None
        self._watch: WaitWatch | None = None
        self._hooks = ExitStack()
        self._recent, self._all = WaitSums(), WaitSums()
        self._is_warm = self._has_warned = False
        self._step = 0
        self._batch = (0, 0)
        """Sequences, and tokens of each on this rank, of the largest micro-batch."""
        self._planned: PlannedWaits | None = None
        self._is_planned = False
        self._path = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if getattr(strategy, "strategy_name", None) != "fsdp_cp_ep":
            raise ValueError(f"Receipt needs Trainer(strategy='fsdp_cp_ep'); this one has {type(strategy).__name__}.")
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, Receipt) for callback in callbacks) > 1:
            raise ValueError("Trainer(callbacks=...) has two Receipts, which would time each other. Keep one.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        placement, strategy = placement_in(trainer), trainer.strategy
        self.last, self._planned = None, None
        self._recent, self._all = WaitSums(), WaitSums()
        self._is_warm = self._has_warned = self._is_planned = False
        self._step, self._batch = trainer.global_step, (0, 0)
        self._path = run_folder(trainer) / FILE_NAME
        self._watch = WaitWatch(placement.units, device=strategy.root_device, axes=axes_of_groups(placement))
        self._hooks.enter_context(self._watch.opened())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.start()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        strategy: Any = trainer.strategy
        num_tokens, context = strategy.micro_batch.num_tokens, strategy.micro_batch.context
        if context:
            of_each = max(1, context // placement_in(trainer).dims.cp)
            size = (max(1, num_tokens // of_each), of_each)
            self._batch = max(self._batch, size, key=lambda each: each[0] * each[1])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is None:
            return
        self._watch.stop()
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        self._watch.end_step()
        self._take()
        every = self.log_every_n_steps or log_every_n_steps(trainer)
        if every and step % every == 0:
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is None:
            return
        self._take(wait=True)
        receipt = self._reading(trainer, pl_module, self._all)
        self._close()
        if receipt is not None:
            self.last = receipt
            if trainer.is_global_zero:
                Console().print(receipt_table(receipt, _world_size()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._hooks.close()
        self._watch = None

    def _take(self, *, wait: bool = False) -> None:
        assert self._watch is not None
        for step in self._watch.take(wait=wait):
            if self._is_warm:
                self._recent.add(step)
                self._all.add(step)
            self._is_warm = True

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        receipt = self._reading(trainer, pl_module, self._recent)
        self._recent = WaitSums()
        if receipt is None:
            return
        self.last = receipt
        for logger in trainer.loggers:
            logger.log_metrics(receipt.figures(), step=trainer.global_step)
        if trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(receipt.line()) + "\n")
        if self.warn_above is not None and receipt.exposed_share > self.warn_above and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(warning(receipt, self.warn_above, on_gpu=pl_module.device.type == "cuda"))

    def _reading(self, trainer: Trainer, pl_module: LightningModule, sums: WaitSums) -> StepReceipt | None:
        """Of all ranks, each of which calls it."""
        assert self._watch is not None
        units, layers = placement_in(trainer).units, self._watch.layers
        rank = dist.get_rank() if dist.is_initialized() else 0
        numbers = torch.tensor(
            sums.numbers(layers, rank=rank, num_ranks=_world_size()), dtype=torch.float64, device=pl_module.device
        )
        if _world_size() > 1:
            dist.all_reduce(numbers)
        names = layers_of(units)
        blocks = tuple(names[unit.name] for unit in units if unit.kind == "block")
        planned = self._plan(trainer, pl_module)
        return receipt_of(numbers.tolist(), layers, blocks, step=self._step, planned=planned)

    def _plan(self, trainer: Trainer, pl_module: LightningModule) -> PlannedWaits | None:
        if self.cluster is None or self._is_planned:
            return self._planned
        self._is_planned = True
        sequences, tokens = self._largest_batch(pl_module.device)
        try:
            self._planned = plan_waits(
                pl_module,
                placement_in(trainer),
                trainer.optimizers,
                (sequences, tokens),
                cluster=self.cluster,
                num_micro_batches=trainer.accumulate_grad_batches,
            )
        except CannotPlan as reason:
            rank_zero_info(f"Receipt has no prediction: {reason}")
        return self._planned

    def _largest_batch(self, device: torch.device) -> tuple[int, int]:
        """Of any rank, so that all have the same plan."""
        size = torch.tensor(self._batch, device=device)
        if _world_size() > 1:
            dist.all_reduce(size, dist.ReduceOp.MAX)
        sequences, tokens = size.tolist()
        return sequences, tokens


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
