"""Models a user could have written: nothing in them knows of ranks, meshes or this package."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.flavour import LightningModule

VOCABULARY = 61
IGNORED = -100


class RandomTokens(Dataset):
    """Sequences of random tokens; in ``ragged`` ones a share of the labels, another for each sequence, is ignored."""

    def __init__(self, num_samples: int, length: int, *, ragged: bool = True, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
        self.labels = self.input_ids.clone()
        if ragged:
            share = torch.rand((num_samples, 1), generator=generator)
            self.labels[torch.rand((num_samples, length), generator=generator) < share] = IGNORED

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class StackedExperts(nn.Module):
    """A hand-written experts module: weights stacked on dim 0, a loop over experts."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, inner, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, inner))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.2)
        nn.init.normal_(self.down, std=0.2)

    def forward(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        for expert in range(self.num_experts):
            token, choice = torch.where(expert_ids_TK == expert)
            h = F.linear(F.gelu(F.linear(x_TD[token], self.up[expert])), self.down[expert])
            y_TD = y_TD.index_add(0, token, h * weights_TK[token, choice, None].to(h.dtype))
        return y_TD


class SparseLayer(nn.Module):
    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = StackedExperts(num_experts, width, 2 * width)
        self.top_k = top_k

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, ids_TK = self.router(x_TD).float().softmax(-1).topk(self.top_k)
        return self.experts(x_TD, ids_TK, weights_TK).view_as(x_BSD)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.sparse_norm = nn.LayerNorm(width)
        self.sparse = SparseLayer(width, num_experts, top_k)

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x_BSD)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BSD = x_BSD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BSD + self.sparse(self.sparse_norm(x_BSD))


class PlainDecoder(nn.Module):
    def __init__(self, width: int = 16, num_layers: int = 2, num_experts: int = 4, top_k: int = 2, length: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, num_experts, top_k) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids_BS: Tensor, position_ids_BS: Tensor | None = None) -> Tensor:
        if position_ids_BS is None:
            position_ids_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        x_BSD = self.embedding(input_ids_BS) + self.positions(position_ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))


class PlainLanguageModel(LightningModule):
    """Shifts the labels itself, as many projects do."""

    def __init__(self, learning_rate: float = 0.1, optimizer: str = "sgd", **decoder: Any) -> None:
        super().__init__()
        self.decoder = PlainDecoder(**decoder)
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch.get("position_ids"))
        labels = batch["labels"][:, 1:]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[self.optimizer]
        return kind(self.parameters(), lr=self.learning_rate)


def tiny_hf_config(model_type: str, **changes: Any) -> Any:
    """A config of a transformers model small enough for any test."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, num_experts=4, num_local_experts=4,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if model_type == "deepseek_v3":
        sizes |= dict(
            q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1,
            topk_group=1, num_key_value_heads=4, first_k_dense_replace=1,
        )  # fmt: skip
    return AutoConfig.for_model(model_type, **(sizes | changes))


class HuggingFaceLanguageModel(LightningModule):
    """A transformers model in the shortest LightningModule there is."""

    def __init__(self, model_type: str = "qwen3_moe", learning_rate: float = 0.1, **changes: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(tiny_hf_config(model_type, **changes))
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def loader(num_samples: int, length: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(RandomTokens(num_samples, length, **options), batch_size=batch_size)
