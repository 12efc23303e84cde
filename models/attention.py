"""Causal self-attention: grouped-query and multi-head latent.

Both reach the tokens before them through ``F.scaled_dot_product_attention(is_causal=True)`` and nothing else:
whoever splits the sequence over processes replaces that one call.

Shapes: B batch, S sequence (of this process), D hidden, H query heads, G key heads, N channels of a query or
key head, V channels of a value head, C latent.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import Linear, RMSNorm, rotary_angles, rotate

LATENT_NORM_EPS = 1e-6
"""DeepSeek and GLM normalise their latents with this value, whatever the block's own epsilon is."""


class GroupedQueryAttention(nn.Module):
    """Attention whose key and value heads each serve several query heads (Qwen3, with ``qk_norm``)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.q_proj = Linear(config.hidden, config.heads * config.head_dim)
        self.k_proj = Linear(config.hidden, config.kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden, config.kv_heads * config.head_dim)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, position_ids_BS: Tensor) -> Tensor:
        angles = rotary_angles(position_ids_BS, self.head_dim, self.rope_theta)
        query_BHSN = self.q_norm(_split_heads(self.q_proj(x_BSD), self.head_dim))
        key_BGSN = self.k_norm(_split_heads(self.k_proj(x_BSD), self.head_dim))
        value_BGSN = _split_heads(self.v_proj(x_BSD), self.head_dim)
        attended_BHSN = F.scaled_dot_product_attention(
            rotate(query_BHSN, angles, interleaved=False),
            rotate(key_BGSN, angles, interleaved=False),
            value_BGSN,
            is_causal=True,
            enable_gqa=query_BHSN.shape[1] != key_BGSN.shape[1],
        )
        output_BSD: Tensor = self.o_proj(_join_heads(attended_BHSN))
        return output_BSD


class MultiHeadLatentAttention(nn.Module):
    """Attention whose keys and values are expanded from one small latent per token (DeepSeek-V3, GLM-5).

    ``latent`` and ``expand`` are separate because the latent and the rope key are all that another process
    needs of a token: ``kv_lora + rope_head_dim`` channels instead of ``heads * (N + V)``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.nope_head_dim, self.rope_head_dim = config.nope_head_dim, config.rope_head_dim
        self.kv_lora, self.v_head_dim = config.kv_lora, config.v_head_dim
        self.rope_theta = config.rope_theta
        head_dim = config.nope_head_dim + config.rope_head_dim
        if config.q_lora is None:
            self.q_proj: nn.Module = Linear(config.hidden, config.heads * head_dim)
        else:
            steps: dict[str, nn.Module] = {
                "down": Linear(config.hidden, config.q_lora),
                "norm": RMSNorm(config.q_lora, LATENT_NORM_EPS),
                "up": Linear(config.q_lora, config.heads * head_dim),
            }
            self.q_proj = nn.Sequential(OrderedDict(steps))
        self.kv_down_proj = Linear(config.hidden, config.kv_lora + config.rope_head_dim)
        self.kv_norm = RMSNorm(config.kv_lora, LATENT_NORM_EPS)
        self.kv_up_proj = Linear(config.kv_lora, config.heads * (config.nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(config.heads * config.v_head_dim, config.hidden)

    def forward(self, x_BSD: Tensor, position_ids_BS: Tensor) -> Tensor:
        angles = rotary_angles(position_ids_BS, self.rope_head_dim, self.rope_theta)
        # First: where other processes want the latents, these travel while the queries are computed.
        key_BHSN, value_BHSV = self.expand(*self.latent(x_BSD, angles))
        query_BHSN = _split_heads(self.q_proj(x_BSD), self.nope_head_dim + self.rope_head_dim)
        nope_BHSN, rope_BHSN = torch.split(query_BHSN, [self.nope_head_dim, self.rope_head_dim], dim=-1)
        query_BHSN = torch.cat([nope_BHSN, rotate(rope_BHSN, angles, interleaved=True)], dim=-1)
        attended_BHSV = F.scaled_dot_product_attention(query_BHSN, key_BHSN, value_BHSV, is_causal=True)
        output_BSD: Tensor = self.o_proj(_join_heads(attended_BHSV))
        return output_BSD

    def latent(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What determines a token's keys and values: latent_BSC and the rotated rope key [B, 1, S, rope]."""
        latent_BSC, rope_BSN = torch.split(self.kv_down_proj(x_BSD), [self.kv_lora, self.rope_head_dim], dim=-1)
        return self.kv_norm(latent_BSC), rotate(rope_BSN[:, None], angles, interleaved=True)

    def expand(self, latent_BSC: Tensor, rope_key_B1SN: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, for as many tokens as there are latents."""
        expanded = _split_heads(self.kv_up_proj(latent_BSC), self.nope_head_dim + self.v_head_dim)
        nope_BHSN, value_BHSV = torch.split(expanded, [self.nope_head_dim, self.v_head_dim], dim=-1)
        rope_BHSN = rope_key_B1SN.expand(-1, nope_BHSN.shape[1], -1, -1)
        return torch.cat([nope_BHSN, rope_BHSN], dim=-1), value_BHSV


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, S, heads * head_dim] -> [B, heads, S, head_dim]."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    """[B, heads, S, head_dim] -> [B, S, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)
