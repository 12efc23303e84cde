"""Sparse latent attention (DeepSeek sparse attention, DSA) with an indexer that several layers share.

An indexer picks a few keys for each query; attention then reads their latents and nothing else. Layers without an
indexer attend to the keys the layer before them was given (GLM-5.2: 21 of 78 layers select). Keys are picked by
``select_keys`` and read by ``sparse_attention`` and by no other way: whoever splits the sequence over processes
replaces these two calls. ``announce_keys`` says first what they will read: the index keys, which are read first, and
the latents are computed before any query, so that they can travel meanwhile.

Shapes: B batch, S sequence (of this process), D hidden, Q channels of the query latent, H query heads, N and V
channels of a head without position, C latent, M latent and rope channels, K keys per query; I heads of the indexer, J
channels of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_strategy.kernels.announcement import announce_keys
from lightning_moe_strategy.kernels.key_selection import select_keys
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention
from lightning_moe_strategy.models.attention import MultiHeadLatentAttention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import Linear, rotary_angles, rotate


class Indexer(nn.Module):
    """Pick ``index_top_k`` keys for each query: key_ids_BSK, int32 places in the whole sequence.

    Picking has no gradient, so the parameters are frozen and no optimizer sees them, until the indexer loss trains them
    (``FSDPCPEPStrategy(indexer_loss_weight=1.0)``). What the loss reads leads back to them and no further: hidden
    states and query latent are detached.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.top_k = config.index_head_dim, config.index_top_k
        self.rope_head_dim, self.rope_theta = config.rope_head_dim, config.rope_theta
        self.q_proj = Linear(config.q_lora or config.hidden, config.index_heads * config.index_head_dim)
        self.k_proj = Linear(config.hidden, config.index_head_dim)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = Linear(config.hidden, config.index_heads)
        self.requires_grad_(False)

    def key(self, x_BSD: Tensor, position_ids_BS: Tensor) -> Tensor:
        """The one key of each token, key_BSJ: what ``forward`` needs of other processes."""
        x_BSD = x_BSD.detach()
        angles = rotary_angles(position_ids_BS, self.rope_head_dim, self.rope_theta)
        return announce_keys(self._rotate(self.k_norm(self.k_proj(x_BSD))[:, :, None], angles)[:, :, 0])

    def forward(
        self, x_BSD: Tensor, query_latent_BSQ: Tensor, position_ids_BS: Tensor, key_BSJ: Tensor | None = None
    ) -> Tensor:
        """``key_BSJ``: what ``key`` made of the same tokens before; made here when it is not given."""
        key_BSJ = self.key(x_BSD, position_ids_BS) if key_BSJ is None else key_BSJ
        x_BSD, query_latent_BSQ = x_BSD.detach(), query_latent_BSQ.detach()
        query_BSIJ = self.q_proj(query_latent_BSQ).unflatten(-1, (-1, self.head_dim))
        # FP32, as the router and for its reason: a rounded weight picks other keys.
        with torch.autocast(x_BSD.device.type, enabled=False):
            weights_BSI = F.linear(x_BSD.float(), self.weights_proj.weight.float())
        weights_BSI *= (weights_BSI.shape[-1] * self.head_dim) ** -0.5
        angles = rotary_angles(position_ids_BS, self.rope_head_dim, self.rope_theta)
        return select_keys(self._rotate(query_BSIJ, angles), key_BSJ, weights_BSI, top_k=self.top_k)

    def _rotate(self, x_BSIJ: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """The first ``rope_head_dim`` channels turned by position."""
        turned, kept = torch.split(x_BSIJ, [self.rope_head_dim, self.head_dim - self.rope_head_dim], dim=-1)
        return torch.cat([rotate(turned.transpose(1, 2), angles, interleaved=True).transpose(1, 2), kept], dim=-1)


class SparseLatentAttention(MultiHeadLatentAttention):
    """Latent attention to chosen keys, in absorbed form: heads read the latents themselves.

    Query heads pass through the key half of ``kv_up_proj`` before and the output through its value half after the
    attention, so no token's keys and values are ever expanded. ``has_indexer`` says whether this layer selects; one
    that does not must be given the keys of the layer before.
    """

    def __init__(self, config: ModelConfig, *, has_indexer: bool) -> None:
        super().__init__(config)
        self.indexer = Indexer(config) if has_indexer else None

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, position_ids_BS: Tensor, key_ids_BSK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [B, S, D], and the keys it attended to, for the layers after it."""
        index_key_BSJ = None if self.indexer is None else self.indexer.key(x_BSD, position_ids_BS)
        angles = rotary_angles(position_ids_BS, self.rope_head_dim, self.rope_theta)
        latent_BSC, rope_key_B1SX = self.latent(x_BSD, angles)
        # Autocast leaves the rope key in its dtype, that of the queries, and the norm of the latent in FP32.
        latent_BSM = announce_keys(torch.cat([latent_BSC.to(rope_key_B1SX.dtype), rope_key_B1SX[:, 0]], dim=-1))
        query_latent_BSQ, query_BSHX = self._query(x_BSD)
        if self.indexer is not None:
            key_ids_BSK = self.indexer(x_BSD, query_latent_BSQ, position_ids_BS, index_key_BSJ)
        if key_ids_BSK is None:
            raise ValueError("This layer has no indexer of its own: pass the key_ids_BSK of the layer before it.")
        nope_BSHN, rope_BSHX = torch.split(query_BSHX, [self.nope_head_dim, self.rope_head_dim], dim=-1)
        rope_BSHX = rotate(rope_BSHX.transpose(1, 2), angles, interleaved=True).transpose(1, 2)
        up_key_HNC, up_value_HVC = self._up_projections()
        query_BSHM = torch.cat([torch.einsum("bshn,hnc->bshc", nope_BSHN, up_key_HNC), rope_BSHX], dim=-1)
        query_BSHM = query_BSHM.to(latent_BSM.dtype)
        scale = query_BSHX.shape[-1] ** -0.5
        attended_BSHC = sparse_attention(query_BSHM, latent_BSM, key_ids_BSK, self.kv_lora, scale)
        output_BSD: Tensor = self.o_proj(torch.einsum("bshc,hvc->bshv", attended_BSHC, up_value_HVC).flatten(2))
        return output_BSD, key_ids_BSK

    def _query(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """What the query heads are projected from (the hidden states where there is no query latent), and the heads."""
        query_latent_BSQ, project = x_BSD, self.q_proj
        if isinstance(self.q_proj, nn.Sequential):
            down, norm, project = self.q_proj
            query_latent_BSQ = norm(down(x_BSD))
        return query_latent_BSQ, project(query_latent_BSQ).unflatten(-1, (-1, self.nope_head_dim + self.rope_head_dim))

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        weight_HXC = self.kv_up_proj.weight.view(-1, self.nope_head_dim + self.v_head_dim, self.kv_lora)
        key_HNC, value_HVC = torch.split(weight_HXC, [self.nope_head_dim, self.v_head_dim], dim=1)
        return key_HNC, value_HVC
