"""How far indexers' scores are from the attention they choose keys for, while the indexer loss trains them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss


class IndexerDivergence(Callback):
    """Log ``indexer_kl`` after every optimizer step. Added by the strategy with ``indexer_loss_weight``.

    It is the mean in nats over the tokens of the step that are no padding, of all ranks, and over the layers with an
    indexer; not weighted. One all-reduce per step, for all layers.

    Attributes:
        last_kl: of the last step, a tensor of float64 on the device; None before the first.
    """

    def __init__(self) -> None:
        self.last_kl: Tensor | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # micro-batches of the step are still to come
        self._step = trainer.global_step
        strategy: Any = trainer.strategy
        loss: IndexerLoss | None = strategy.context_parallel.indexer_loss
        if loss is None:
            return
        sums = loss.take_sums(pl_module.device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        self.last_kl = sums[0] / sums[1].clamp(min=1.0)
        pl_module.log("indexer_kl", self.last_kl.float(), batch_size=1)
