"""Manual optimization: a language model and a critic of its states take turns, each with optimizer and scheduler."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from tests.projects.nanogpt import GPT, GPTConfig
from tests.projects.tokens import VOCABULARY, NextTokens


class ActorCritic(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = GPT(GPTConfig(n_layer=2, use_positions=False))
        self.critic = nn.Sequential(nn.Linear(VOCABULARY, 16), nn.GELU(), nn.Linear(16, 1))

    def surprise(self, logits: Tensor) -> Tensor:
        """What the critic expects the loss of every token to be."""
        return F.softplus(self.critic(logits)).squeeze(-1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        of_actor, of_critic = self.optimizers()

        self.toggle_optimizer(of_actor)
        logits, loss = self.actor(x, y)
        self.log("train_loss", loss)
        self.manual_backward(loss + 0.1 * self.surprise(logits).mean())
        self.clip_gradients(of_actor, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        of_actor.step()
        of_actor.zero_grad()
        self.untoggle_optimizer(of_actor)

        self.toggle_optimizer(of_critic)
        logits, _ = self.actor(x)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
        critic_loss = F.mse_loss(self.surprise(logits), losses)
        self.log("critic_loss", critic_loss)
        self.manual_backward(critic_loss)
        largest = max(float(p.grad.norm()) for p in self.critic.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm=2.0)
        self.log_dict({"critic_gradient": largest, "gradient_norm": norm})
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)

        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        of_actor = torch.optim.AdamW(self.actor.parameters(), lr=2e-3)
        of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        schedulers = [StepLR(of_actor, 4, 0.5), StepLR(of_critic, 3, 0.7)]
        return [of_actor, of_critic], schedulers


class Pairs(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(NextTokens(seed=13), batch_size=self.batch_size, shuffle=True)
