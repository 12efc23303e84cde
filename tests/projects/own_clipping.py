"""Clips gradients its own way and logs their norms before the step."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader

from tests.projects.nanogpt import GPT, GPTConfig
from tests.projects.tokens import NextTokens


class Clipped(L.LightningModule):
    """Tight at first, through Lightning."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(**(dict(n_layer=2, use_positions=False) | config)))
        self.norms: list[dict[str, float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        _, loss = self.gpt(*batch)
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = grad_norm(self.gpt, norm_type=2)
        self.log_dict(norms)
        self.norms.append({name: float(norm) for name, norm in norms.items()})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        limit = 0.05 if self.global_step < 5 else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ClippedByTorch(Clipped):
    """Directly, and logs what torch returns."""

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.05)
        self.log("grad_norm", norm)


class Pairs(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(NextTokens(), batch_size=self.batch_size, shuffle=True)
