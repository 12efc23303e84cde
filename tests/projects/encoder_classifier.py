"""Classify texts: a bidirectional encoder with experts, a mean over its tokens, torchmetrics for accuracy."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from tests.projects.nanogpt import GPTConfig, MoE
from tests.projects.tokens import VOCABULARY

NUM_CLASSES = 3


class LabelledTexts(Dataset):
    def __init__(self, num_samples: int = 80, length: int = 20, seed: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(1, VOCABULARY, (num_samples, length), generator=generator)
        lengths = torch.randint(5, length + 1, (num_samples, 1), generator=generator)
        self.attention_mask = (torch.arange(length) < lengths).long()
        self.labels = (self.input_ids[:, 0] + self.input_ids[:, 1]) % NUM_CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.input_ids[index] * self.attention_mask[index],
            "attention_mask": self.attention_mask[index],
            "labels": self.labels[index],
        }


class EncoderLayer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd)
        self.moe = MoE(config)
        self.num_heads = config.n_head

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None, :].bool())
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm_2(x))


class TextClassifier(L.LightningModule):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        config = GPTConfig()
        self.embedding = nn.Embedding(VOCABULARY, config.n_embd)
        self.positions = nn.Parameter(torch.randn(32, config.n_embd) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(num_layers))
        self.head = nn.Linear(config.n_embd, NUM_CLASSES)
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, attention_mask)
        weights = attention_mask[..., None].to(x.dtype)
        return self.head((x * weights).sum(1) / weights.sum(1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.accuracy(self(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        self.log("val_accuracy", self.accuracy, on_epoch=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.accuracy(self(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        self.log("test_accuracy", self.accuracy)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["input_ids"], batch["attention_mask"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class MaskedLanguageModel(TextClassifier):
    """Predicts the token at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.embedding.embedding_dim, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
        x = self.embedding(batch["input_ids"]) + self.positions[positions]
        for layer in self.layers:
            x = layer(x, batch["attention_mask"])
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss


class MaskedTexts(LabelledTexts):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {
            "attention_mask": torch.ones_like(self.input_ids[index]),
            "labels": self.input_ids[index],
        }


class Labelled(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(LabelledTexts(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(LabelledTexts(16, seed=10), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Masked(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(MaskedTexts(), batch_size=self.batch_size, shuffle=True)
