"""A GPT on (x, y) pairs: its own attention, tied embeddings, every second layer a mixture of experts."""

import inspect
import math
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.projects.tokens import VOCABULARY, NextTokens


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = VOCABULARY
    n_layer: int = 4
    n_head: int = 2
    n_embd: int = 16
    n_expert: int = 4
    top_k: int = 2
    bias: bool = False
    use_positions: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.n_expert
        self.c_fc = nn.Parameter(torch.empty(config.n_expert, config.n_embd, 2 * config.n_embd))
        self.c_proj = nn.Parameter(torch.empty(config.n_expert, 2 * config.n_embd, config.n_embd))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.c_fc, std=0.1)
        torch.nn.init.normal_(self.c_proj, std=0.1)

    def forward(self, x, expert_ids, weights):
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            rows, slot = torch.where(expert_ids == e)
            y = F.gelu(x[rows] @ self.c_fc[e]) @ self.c_proj[e]
            out.index_add_(0, rows, y * weights[rows, slot].unsqueeze(1))
        return out


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.n_embd, config.n_expert, bias=False)
        self.experts = Experts(config)

    def forward(self, x):
        flat = x.view(-1, x.size(-1))
        weights, ids = self.router(flat).softmax(dim=-1).topk(self.top_k)
        return self.experts(flat, ids, weights / weights.sum(-1, keepdim=True)).view_as(x)


class Block(nn.Module):
    def __init__(self, config, is_sparse):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MoE(config) if is_sparse else MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                h=nn.ModuleList([Block(config, is_sparse=i % 2 == 1) for i in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        if config.use_positions:
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.1 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.1)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        if self.config.use_positions:
            x = x + self.transformer.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        can_fuse = "fused" in inspect.signature(torch.optim.AdamW).parameters and torch.cuda.is_available()
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=can_fuse)


class LitGPT(L.LightningModule):
    def __init__(self, **config):
        super().__init__()
        self.model = GPT(GPTConfig(**config))

    def training_step(self, batch, batch_idx):
        x, y = batch
        _, loss = self.model(x, y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return self.model.configure_optimizers(weight_decay=0.1, learning_rate=2e-3, betas=(0.9, 0.95))


class Pairs(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(NextTokens(), batch_size=self.batch_size, shuffle=True)
