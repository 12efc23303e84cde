"""Answers only: prompt tokens are ignored, and a long prompt leaves no answer in the window at all."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

from tests.projects.tokens import IGNORED, VOCABULARY


class Conversations(Dataset):
    """Two of three samples are cut off before their answer."""

    def __init__(self, num_samples: int = 80, length: int = 24) -> None:
        generator = torch.Generator().manual_seed(12)
        self.input_ids = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
        self.prompt_lengths = torch.randint(4, length - 2, (num_samples,), generator=generator)
        self.prompt_lengths[torch.rand(num_samples, generator=generator) < 2 / 3] = length

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.input_ids[index].clone()
        labels[: self.prompt_lengths[index]] = IGNORED
        return {"input_ids": self.input_ids[index], "labels": labels}


class InstructionTuning(L.LightningModule):
    def __init__(self, model_name_or_path: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_name_or_path)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class MeanOverAnswers(InstructionTuning):
    """Computes the loss itself, as a mask's mean."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        mask = (labels != IGNORED).float()
        losses = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        loss = (losses * mask).sum() / mask.sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss


class Chats(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Conversations(), batch_size=self.batch_size, shuffle=True)
