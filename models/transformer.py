"""A decoder-only transformer with mixture-of-experts layers, written for one process.

Nothing here knows of ranks, meshes or Lightning: parallelism is attached from outside, to the attention's one
call and to the ``experts`` modules.

Shapes: B batch, S sequence (of this process), D hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn

from lightning_moe_strategy.models.attention import GroupedQueryAttention, MultiHeadLatentAttention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import Embedding, Linear, RMSNorm, SwiGLU
from lightning_moe_strategy.models.moe import MixtureOfExperts


class Block(nn.Module):
    """One layer: attention, then experts or a plain MLP, each on a normalised copy of the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        is_mla, is_dense = config.attention == "mla", layer < config.dense_first_layers
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = MultiHeadLatentAttention(config) if is_mla else GroupedQueryAttention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config.hidden, config.intermediate) if is_dense else MixtureOfExperts(config)

    def forward(self, x_BSD: Tensor, position_ids_BS: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), position_ids_BS)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class MoETransformer(nn.Module):
    """Logits of the next token from token ids.

    ``position_ids_BS`` says where each token stands in its sequence, 0 to S-1 when it is not given; a process
    that holds a part of a sequence passes the positions of that part.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
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
        x_BSD = self.embed(input_ids_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, position_ids_BS)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV
