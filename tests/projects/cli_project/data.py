"""Named in config.yaml by class path."""

import lightning as L
from torch.utils.data import DataLoader

from tests.projects.tokens import NextTokens


class TokenData(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, length: int = 24) -> None:
        super().__init__()
        self.batch_size, self.length = batch_size, length

    def train_dataloader(self) -> DataLoader:
        return DataLoader(NextTokens(length=self.length), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(NextTokens(16, self.length, seed=9), batch_size=self.batch_size)
