"""Named in config.yaml by class path."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F

from tests.projects.nanogpt import GPT, GPTConfig


class TokenModel(L.LightningModule):
    def __init__(self, n_layer: int = 2, n_expert: int = 4, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(GPTConfig(n_layer=n_layer, n_expert=n_expert, use_positions=False))
        self.label_smoothing = label_smoothing

    def _loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits, _ = self.gpt(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=self.label_smoothing)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)
