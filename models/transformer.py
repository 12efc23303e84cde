"""A decoder-only transformer with mixture-of-experts layers, written for one process.

Nothing here knows of ranks, meshes or Lightning: parallelism is attached from outside, to the attention's calls of
kernels and to the ``experts`` modules.

Shapes: B batch, S sequence (of this process), D hidden, K keys per query (sparse attention), V vocabulary.
"""

import torch
from torch import Tensor, nn

from lightning_moe_strategy.models.attention import GroupedQueryAttention, MultiHeadLatentAttention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import Embedding, Linear, RMSNorm, SwiGLU
from lightning_moe_strategy.models.moe import MixtureOfExperts
from lightning_moe_strategy.models.sparse_attention import SparseLatentAttention


class Block(nn.Module):
    """One layer: attention, then experts or a plain MLP, each on a normalised copy of the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        is_dense = layer < config.dense_first_layers
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = _attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config.hidden, config.intermediate) if is_dense else MixtureOfExperts(config)

    def forward(self, x_BSD: Tensor, position_ids_BS: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), position_ids_BS)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class SparseBlock(Block):
    """The same with sparse attention: it takes the keys of the block before and hands its own to the next."""

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, position_ids_BS: Tensor, key_ids_BSK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        attended_BSD, key_ids_BSK = self.attention(self.attention_norm(x_BSD), position_ids_BS, key_ids_BSK)
        x_BSD = x_BSD + attended_BSD
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD, key_ids_BSK


class MoETransformer(nn.Module):
    """Logits of the next token from token ids.

    ``position_ids_BS`` says where each token stands in its sequence, 0 to S-1 when it is not given; a process
    that holds a part of a sequence passes the positions of that part.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden)
        block = SparseBlock if config.is_dsa else Block
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = Linear(config.hidden, config.vocab_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the head to the embedding if the model does so: moving off the meta device parts them."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, input_ids_BS: Tensor, position_ids_BS: Tensor | None = None) -> Tensor:
        if position_ids_BS is None:
            position_ids_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        x_BSD, key_ids_BSK = self.embed(input_ids_BS), None
        for block in self.layers:
            if self.config.is_dsa:
                x_BSD, key_ids_BSK = block(x_BSD, position_ids_BS, key_ids_BSK)
            else:
                x_BSD = block(x_BSD, position_ids_BS)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


def _attention(config: ModelConfig, layer: int) -> nn.Module:
    if config.is_dsa:
        return SparseLatentAttention(config, has_indexer=layer in config.indexer_layers)
    return MultiHeadLatentAttention(config) if config.attention == "mla" else GroupedQueryAttention(config)
