"""A decoder-only transformer with mixture-of-experts layers, written for one process.

Nothing here knows of ranks, meshes or Lightning: parallelism is attached from outside, to the attention's calls of
kernels and to the ``experts`` modules.

Shapes: B batch, S sequence (of this process), D hidden, K keys per query (sparse attention), V vocabulary, M depths of
multi-token prediction.
"""

import torch
from torch import Tensor, nn

from lightning_moe_strategy.models.attention import GroupedQueryAttention, MultiHeadLatentAttention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import Embedding, RMSNorm, SwiGLU
from lightning_moe_strategy.models.moe import MixtureOfExperts
from lightning_moe_strategy.models.multi_token_prediction import Head, MultiTokenPrediction
from lightning_moe_strategy.models.sparse_attention import SparseLatentAttention


class Block(nn.Module):
    """One layer: attention, then experts or a plain MLP, each on a normalised copy of the residual.

    Layers from ``config.layers`` on are those of multi-token prediction: always with experts, and with an indexer of
    their own where attention is sparse.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        is_dense = layer < min(config.dense_first_layers, config.layers)
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

    With ``targets_BS``, what each token is to predict (-100 where nothing), a model with ``mtp_layers`` returns the
    logits and losses_M: per depth, the sum of ``-log p(target)`` over the tokens that count there, in FP32.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden)
        block = SparseBlock if config.is_dsa else Block
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.mtp_layers = nn.ModuleList(
            MultiTokenPrediction(config, block(config, config.layers + depth), distance=depth + 1)
            for depth in range(config.mtp_layers)
        )
        self.head = Head(config.hidden, config.vocab_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the head to the embedding if the model does so: moving off the meta device parts them."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, input_ids_BS: Tensor, position_ids_BS: Tensor | None = None, targets_BS: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if position_ids_BS is None:
            position_ids_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        x_BSD, key_ids_BSK = self.embed(input_ids_BS), None
        looks_further = targets_BS is not None and bool(self.mtp_layers)
        embedded_BSD = x_BSD if looks_further else None
        for block in self.layers:
            if self.config.is_dsa:
                x_BSD, key_ids_BSK = block(x_BSD, position_ids_BS, key_ids_BSK)
            else:
                x_BSD = block(x_BSD, position_ids_BS)
        hidden_BSD = self.norm(x_BSD)
        if not looks_further:
            logits_BSV: Tensor = self.head(hidden_BSD)
            return logits_BSV
        further, deeper_BSD = [], hidden_BSD
        for layer in self.mtp_layers:
            deeper_BSD, further_BS = layer(deeper_BSD, embedded_BSD, targets_BS, position_ids_BS)
            further.append((deeper_BSD, further_BS))
        logits_and_losses: tuple[Tensor, Tensor] = self.head(hidden_BSD, further)
        return logits_and_losses


def _attention(config: ModelConfig, layer: int) -> nn.Module:
    if config.is_dsa:
        has_indexer = layer in config.indexer_layers or layer >= config.layers
        return SparseLatentAttention(config, has_indexer=has_indexer)
    return MultiHeadLatentAttention(config) if config.attention == "mla" else GroupedQueryAttention(config)
