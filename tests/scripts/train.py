"""What a user has before they know of the strategy: models (``user_models``), data, a callback, a script.

The strategy's name is the only word of it here. The callback writes down what every rank saw: its loss and its
number of targets in each step, and the weights the run began with.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from user_models import HuggingFaceLanguageModel, PlainLanguageModel, RandomTokens

NUM_STEPS, TOKENS_PER_SEQUENCE, SEQUENCES_PER_STEP = 5, 24, 8


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomTokens(NUM_STEPS * SEQUENCES_PER_STEP, TOKENS_PER_SEQUENCE), batch_size=self.batch_size)


class Record(pl.Callback):
    def __init__(self) -> None:
        self.num_targets: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = {name: p.detach().full_tensor().clone() for name, p in pl_module.named_parameters()}
        if trainer.is_global_zero:
            torch.save(weights, "first_weights.pt")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.num_targets.append(int(trainer.strategy.micro_batch.num_loss_tokens))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        Path(f"rank{trainer.global_rank}.json").write_text(json.dumps([pl_module.losses, self.num_targets]))


if __name__ == "__main__":
    pl.seed_everything(0)
    model = {"plain": PlainLanguageModel, "hugging_face": HuggingFaceLanguageModel}[sys.argv[1]]()
    trainer = pl.Trainer(
        strategy="fsdp_cp_ep",
        accelerator="cpu",
        devices=4,
        max_steps=NUM_STEPS,
        callbacks=[Record()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=Data(batch_size=SEQUENCES_PER_STEP // 4))
