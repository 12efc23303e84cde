"""Watch how evenly a run's tokens fall on its experts.

Shapes: E experts of a layer, T tokens of this rank, K experts per token.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torchmetrics import Metric

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer
from lightning_moe_strategy.callbacks.expert_load_history import ExpertLoadHistory
from lightning_moe_strategy.callbacks.expert_load_report import (
    OF_BALANCING,
    LayerLoad,
    layer_loads,
    load_figure,
    load_table,
    show_in_loggers,
    summarize,
)
from lightning_moe_strategy.callbacks.moved_experts import MovedExperts
from lightning_moe_strategy.callbacks.run_description import write_run_description
from lightning_moe_strategy.callbacks.trainer_facts import log_every_n_steps, run_folder
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.expert_parallel.experts import RoutingObserver, routing_observers
from lightning_moe_strategy.report.expert_series import FILE_NAME

Tokens = dict[str, Tensor]
"""Tokens per expert by layer."""


class TokensPerExpert(Metric):
    """Tokens each expert of a layer was chosen for, on this rank; exact, and added without a host sync."""

    full_state_update = False
    tokens_E: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("tokens_E", torch.zeros(num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, expert_ids_TK: Tensor, counts_T: Tensor | None = None) -> None:
        """``counts_T`` (bool) leaves out padding; None counts every token."""
        ids = expert_ids_TK.detach().reshape(-1).long()
        ones = torch.ones_like(ids) if counts_T is None else counts_T.long().repeat_interleave(expert_ids_TK.shape[1])
        self.tokens_E.scatter_add_(0, ids, ones)

    def compute(self) -> Tensor:
        return self.tokens_E


class ExpertLoadMonitor(Callback):
    """Log the skew (max / mean) of every layer's experts, and draw it at the end of fit. Added by the strategy.

    Counts stay on the device and are summed over all ranks only when they are logged: no collective per step.
    Activation recompute, accumulation and padding do not change them, the sanity check is not counted, and training,
    validation and test have statistics of their own. Loggers get, under ``expert_load/<stage>/``:

    * ``skew``, ``skew_worst_layer``: over experts, mean of the layers and the worst of them;
    * ``rank_skew``, ``rank_skew_worst_layer``: over the ranks of ep, whose slowest the step waits for;
    * ``rank_skew_etp2``, ``_etp4``, ``_etp8``, those that divide ep: what ``rank_skew`` would be if so many ranks
      shared their experts, each with a slice of all (a what-if: no layout offers it);
    * ``dead_experts``: experts, of all layers, that no token chose;
    * under ``balance="redundant"``, of each layer and micro-batch: ``rank_skew_at_home`` and ``rank_skew_computed``,
      over the ranks of ep with every expert at home and as it was, ``rank_skew_at_home_etp2`` and so on between them,
      and the number of ``moved_experts``.

    Training figures are of the tokens since the last figures; the progress bar shows the first as ``skew``.

    Beside the logs, where the Trainer has a logger, stand ``expert_load.jsonl``, the tokens behind every training
    figure (report/expert_series.py says how; at most 256 windows of them), and ``run.json``, what the run is:
    ``lightning-moe report`` makes a page of them.

    Args:
        log_every_n_steps: optimizer steps between two figures; None takes the Trainer's.
        plot: at the end of fit, where the Trainer has a logger (None) or in any case (True), write ``expert_load.png``
            next to the logs: layers x experts, tokens since the figures before the last, and every layer's skew over
            the fit. Loggers that take pictures (``add_figure`` or ``add_image`` of their experiment, as TensorBoard
            has) get it as ``expert_load/train``. And print a table of the whole fit with skews, experts that moved,
            and what ETP would do and cost.
        image_every_n_logs: draw that for the loggers at every so many figures too; a second or so each on rank 0,
            which the others wait for. None: at the end alone.

    Attributes:
        last_skew: the ``skew`` last logged in training; None before.
        last_tokens: tokens per expert by layer, all ranks together, of the fit so far when last logged.
    """

    def __init__(
        self, log_every_n_steps: int | None = None, *, plot: bool | None = None, image_every_n_logs: int | None = None
    ) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps({log_every_n_steps}) must be at least 1, or None for the Trainer's.")
        if image_every_n_logs is not None and image_every_n_logs < 1:
            raise ValueError(
                f"image_every_n_logs({image_every_n_logs}) must be at least 1, or None for the end of fit alone."
            )
        self.log_every_n_steps = log_every_n_steps
        self.plot = plot
        self.image_every_n_logs = image_every_n_logs
        self.last_skew: float | None = None
        self.last_tokens: Tokens = {}
        self._metrics: dict[str, dict[str, TokensPerExpert]] = {}
        self._observers: list[tuple[list[RoutingObserver], RoutingObserver]] = []
        self._moved: MovedExperts | None = None
        self._ep = 1
        self._logged_step, self._num_logs = 0, 0
        self._history = ExpertLoadHistory()
        self._last_window: list[LayerLoad] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_counting(trainer, "train")
        self.last_skew, self.last_tokens = None, {}
        self._logged_step, self._num_logs = trainer.global_step, 0
        self._history, self._last_window = ExpertLoadHistory(), []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not before: where a fit resumes its step is known now.
        directory = run_folder(trainer) if _is_logged(trainer) else None
        writes = directory is not None and trainer.is_global_zero
        if "train" in self._metrics:
            num_experts = {name: metric.tokens_E.numel() for name, metric in self._metrics["train"].items()}
            path = directory / FILE_NAME if directory is not None and writes else None
            self._history.start(path, num_experts, step=trainer.global_step)
        if directory is not None and writes:
            write_run_description(trainer, pl_module, directory)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        every = self.log_every_n_steps or log_every_n_steps(trainer)
        if "train" not in self._metrics or not every or step == self._logged_step or step % every:
            return
        self._logged_step = step
        figures = self._log_train_figures(trainer)
        pl_module.log("skew", figures["skew"], prog_bar=True, logger=False, batch_size=1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "train" not in self._metrics:
            return
        if self.last_skew is None:
            self._log_train_figures(trainer)
        tokens, moved = self._summed("train"), self._moved
        assert moved is not None
        figures = moved.take_figures("train", trainer.strategy.root_device)
        is_more = trainer.global_step > self._logged_step
        self._history.finish(trainer.global_step, tokens, self._ep, figures if is_more else {})
        directory = run_folder(trainer)
        draws = _is_logged(trainer) if self.plot is None else self.plot
        if draws and trainer.is_global_zero:
            figure = load_figure(self._last_window or layer_loads(tokens, self._ep), self._history.skews)
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(directory / "expert_load.png")
            show_in_loggers(figure, trainer.loggers, step=trainer.global_step)
            Console().print(load_table(layer_loads(tokens, self._ep), caption=moved.summary("train")))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_moved("train")
        self._start_counting(trainer, "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            self._note_moved("sanity_check")
        else:
            self._log_evaluation(trainer, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_counting(trainer, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_evaluation(trainer, "test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for observers, observer in self._observers:
            observers.remove(observer)
        self._observers, self._metrics, self._moved = [], {}, None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The counts of the fit so far, of all ranks together."""
        if "train" in self._metrics:
            checkpoint["callbacks"][self.state_key] = {
                "tokens": self._summed("train"),
                "last_tokens": self.last_tokens,
                "last_skew": self.last_skew,
                "logged_step": self._logged_step,
                "history": self._history.state(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        for name, metric in self._metrics.get("train", {}).items():
            tokens_E = state_dict["tokens"].get(name)
            if is_first and tokens_E is not None and tokens_E.shape == metric.tokens_E.shape:
                metric.tokens_E.copy_(tokens_E)
        self.last_tokens, self.last_skew = state_dict["last_tokens"], state_dict["last_skew"]
        self._logged_step = state_dict["logged_step"]
        # A checkpoint of a version without one: the history goes on after its last figures.
        here = {"since": self._logged_step, "base": self.last_tokens}
        self._history.load_state(state_dict.get("history", here))

    def tokens_on_this_rank(self, stage: str) -> Tokens:
        """Tokens per expert by layer that this rank routed in ``stage`` ("train", "validate", "test") so far."""
        return {name: metric.tokens_E.clone() for name, metric in self._metrics.get(stage, {}).items()}

    def _start_counting(self, trainer: Trainer, stage: str) -> None:
        """Zeros for every layer, on every rank alike: a rank without batches takes part in the sums."""
        strategy: Any = trainer.strategy
        experts: Mapping[str, Any] = getattr(strategy, "experts", {})
        if not experts:
            return
        self._ep = strategy.expert_mesh["ep"].size()
        self._metrics[stage] = {
            name: TokensPerExpert(int(module.num_experts)).to(strategy.root_device) for name, module in experts.items()
        }
        self._moved = self._moved or MovedExperts(experts)
        if not self._observers:
            self._observers = [
                (routing_observers(module), self._observer(trainer, name)) for name, module in experts.items()
            ]
            for observers, observer in self._observers:
                observers.append(observer)

    def _observer(self, trainer: Trainer, name: str) -> RoutingObserver:
        def observe(expert_ids_TK: Tensor) -> None:
            stage = trainer.state.stage
            if stage is not None and stage.value in self._metrics:
                micro_batch: MicroBatch | None = getattr(trainer.strategy, "micro_batch", None)
                real_T = None if micro_batch is None else micro_batch.real_tokens_T(expert_ids_TK.shape[0])
                self._metrics[stage.value][name].update(expert_ids_TK, real_T)

        return observe

    def _note_moved(self, stage: str) -> None:
        if self._moved is not None:
            self._moved.note(stage)

    def _summed(self, stage: str) -> Tokens:
        """Tokens per expert by layer over all ranks: one all-reduce for all layers."""
        metrics = self._metrics[stage]
        tokens = torch.cat([metric.tokens_E for metric in metrics.values()])
        if dist.is_initialized():
            dist.all_reduce(tokens)
        sizes = [metric.tokens_E.numel() for metric in metrics.values()]
        return dict(zip(metrics, torch.split(tokens.cpu(), sizes), strict=True))

    def _log_train_figures(self, trainer: Trainer) -> dict[str, float]:
        tokens = self._summed("train")
        recent = {name: count - self.last_tokens.get(name, 0) for name, count in tokens.items()}
        self.last_tokens = tokens
        figures = self._log(trainer, "train", recent)
        self.last_skew = figures["skew"]
        self._num_logs += 1
        self._last_window = layer_loads(recent, self._ep)
        of_balancing = {name: figure for name, figure in figures.items() if name.startswith(OF_BALANCING)}
        self._history.add(trainer.global_step, tokens, self._ep, of_balancing)
        every = self.image_every_n_logs
        if every and self._num_logs % every == 0 and trainer.is_global_zero:
            figure = load_figure(self._last_window, self._history.skews)
            show_in_loggers(figure, trainer.loggers, step=trainer.global_step)
        return figures

    def _log_evaluation(self, trainer: Trainer, stage: str) -> None:
        if stage in self._metrics:
            self._log(trainer, stage, self._summed(stage))

    def _log(self, trainer: Trainer, stage: str, tokens: Tokens) -> dict[str, float]:
        assert self._moved is not None
        figures = summarize(layer_loads(tokens, self._ep))
        figures |= self._moved.take_figures(stage, trainer.strategy.root_device)
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"expert_load/{stage}/{name}": figure for name, figure in figures.items()}, step=trainer.global_step
            )
        return figures


def _is_logged(trainer: Trainer) -> bool:
    """Whether the user wants to keep anything of the run."""
    is_trial: int = trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it without declaring it
    return bool(trainer.loggers) and not is_trial
