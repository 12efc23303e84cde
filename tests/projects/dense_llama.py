"""A dense decoder with rotary positions, built in ``configure_model``; targets and position ids come with the data."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.projects.tokens import VOCABULARY, NextTokens


class WithPositions(Dataset):
    def __init__(self) -> None:
        self.pairs = NextTokens()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.pairs[index]
        return {"input_ids": x, "targets": y, "position_ids": torch.arange(len(x))}


class Rotary(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        frequencies = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        angles = position_ids[:, None, :, None] * self.frequencies
        return torch.cat([angles, angles], -1)


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q = self.q(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.num_heads // 2, -1)).transpose(1, 3).unbind(2)
        q, k = rotate(q, angles), rotate(k, angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Llama(L.LightningModule):
    def __init__(self, width: int = 16, num_layers: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        width, num_heads = self.hparams.width, self.hparams.num_heads
        self.model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, width),
                "rotary": Rotary(width // num_heads),
                "layers": nn.ModuleList(Layer(width, num_heads) for _ in range(self.hparams.num_layers)),
                "norm": nn.RMSNorm(width),
                "head": nn.Linear(width, VOCABULARY, bias=False),
            }
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x, angles = self.model["embedding"](input_ids), self.model["rotary"](position_ids)
        for layer in self.model["layers"]:
            x = layer(x, angles)
        return self.model["head"](self.model["norm"](x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"], batch["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Texts(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(WithPositions(), batch_size=self.batch_size, shuffle=True)
