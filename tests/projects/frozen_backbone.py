"""Tag every token: a pretrained backbone that stays as it is, and a head that is trained."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoModelForTokenClassification

from tests.projects.tokens import IGNORED, VOCABULARY

NUM_TAGS = 5


class TaggedTexts(Dataset):
    def __init__(self, num_samples: int = 80, length: int = 24) -> None:
        generator = torch.Generator().manual_seed(6)
        self.input_ids = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
        self.labels = (self.input_ids % NUM_TAGS).masked_fill(self.input_ids % 7 == 0, IGNORED)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class Tagger(L.LightningModule):
    def __init__(self, model_name_or_path: str) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained(model_name_or_path)
        self.backbone.requires_grad_(False)
        width = self.backbone.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, NUM_TAGS))

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(input_ids).last_hidden_state
        return self.head(features)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.2, momentum=0.9)


class HuggingFaceTagger(L.LightningModule):
    """All of it is trained, and the model computes the loss."""

    def __init__(self, model_name_or_path: str) -> None:
        super().__init__()
        self.model = AutoModelForTokenClassification.from_pretrained(model_name_or_path, num_labels=NUM_TAGS)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Tagged(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TaggedTexts(), batch_size=self.batch_size, shuffle=True)
