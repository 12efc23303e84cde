"""LoRA on a mixture of experts of Hugging Face, with PEFT: the adapters are trained and nothing else."""

from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator

from tests.projects.tokens import PaddedTexts


class LoRAFineTune(L.LightningModule):
    def __init__(
        self,
        model_name_or_path: str,
        target_modules: Any = ("q_proj", "v_proj", "o_proj"),
        target_parameters: Any = None,
    ) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(model_name_or_path)
        targets = {"target_modules": list(target_modules)}
        if target_parameters:
            targets["target_parameters"] = list(target_parameters)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, **targets)
        self.model = get_peft_model(model, config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=5e-3)


class Texts(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(PaddedTexts(), batch_size=self.batch_size, shuffle=True, collate_fn=default_data_collator)
