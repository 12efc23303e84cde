"""Fine-tune a causal language model of Hugging Face on padded texts: AdamW in two groups, linear warm-up."""

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator, get_linear_schedule_with_warmup

from tests.projects.tokens import PaddedTexts


class FineTune(L.LightningModule):
    def __init__(self, model_name_or_path: str, learning_rate: float = 2e-3, warmup_steps: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(model_name_or_path)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss, sync_dist=True)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self(**batch).loss, sync_dist=True)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(**batch).logits

    def configure_optimizers(self) -> Any:
        decayed = [p for n, p in self.named_parameters() if p.requires_grad and "norm" not in n]
        others = [p for n, p in self.named_parameters() if p.requires_grad and "norm" in n]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        scheduler = get_linear_schedule_with_warmup(optimizer, self.hparams.warmup_steps, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Texts(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(PaddedTexts(), batch_size=self.batch_size, shuffle=True, collate_fn=default_data_collator)

    def val_dataloader(self) -> DataLoader:
        # As long as each other: then the mean of the ranks' means is that of all tokens.
        texts = PaddedTexts(16, shortest=24, seed=5)
        return DataLoader(texts, batch_size=self.batch_size, collate_fn=default_data_collator)

    test_dataloader = predict_dataloader = val_dataloader
