"""The loss that trains an indexer, as a part of the backward pass of the attention to the keys it chose.

There the attention has in its hands all that the loss needs, so the divergence is computed there, once per step and
never in a recompute. Its gradient goes to index query, key and weights and to nothing else. Index keys are gathered
once more for it, and their gradient is reduce-scattered in FP32.

Kept for it, beside what the attention keeps, are index query, key and weights of this rank, in bf16 ``2 * (I + 1) * N +
4 * I`` bytes per token (GLM-5.2: 8.4 kB) in each layer with an indexer, and what their projections keep. With block
recompute a block has them while its backward pass runs, and between the passes there is nothing.

A layer that attends to the keys of an earlier one does not train that one's indexer: the target is the attention of
the layer whose hidden states the indexer reads. The attention of all layers that share a choice would be known only
blocks later, in other units, each of which is gathered, recomputed and freed by itself.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence; I heads of the indexer, N channels of each; H
query heads, M channels of a latent, K keys per query.
"""

from dataclasses import dataclass

from torch import Tensor

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.gather import all_gather_natural, reduce_scatter_natural
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.kernels.indexer_loss import indexer_loss


@dataclass(frozen=True, kw_only=True)
class Index:
    """What an indexer scores the keys of this rank's queries by, with a graph back to its parameters."""

    query_BLIN: Tensor
    key_BLN: Tensor
    weights_BLI: Tensor
    """With every factor that is common to all keys: the loss is one of scores, not of their order."""
    key_ids_BLK: Tensor
    """Its choice: only the attention to this very tensor trains it."""
    token_weights_BL: Tensor
    loss: IndexerLoss

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that the backward pass reads, those that get a gradient first."""
        return self.query_BLIN, self.key_BLN, self.weights_BLI, self.token_weights_BL


def index_to_train(
    query_BLIN: Tensor, key_BLN: Tensor, weights_BLI: Tensor, key_ids_BLK: Tensor, cp: ContextParallel
) -> Index | None:
    """What the attention to ``key_ids_BLK`` shall train; None without the loss, or where nothing is trained."""
    if cp.indexer_loss is None or not query_BLIN.requires_grad:
        return None
    batch, num_tokens = key_ids_BLK.shape[:2]
    token_weights_BL = cp.indexer_loss.token_weights(
        cp.current.real_tokens_BL, (batch, num_tokens), key_ids_BLK.device, are_counted=cp.current.has_labels
    )
    return Index(
        query_BLIN=query_BLIN,
        key_BLN=key_BLN,
        weights_BLI=weights_BLI,
        key_ids_BLK=key_ids_BLK,
        token_weights_BL=token_weights_BL,
        loss=cp.indexer_loss,
    )


def index_gradients(
    tensors: tuple[Tensor, ...],
    loss: IndexerLoss,
    attention: tuple[Tensor, Tensor, Tensor, float],
    *,
    layout: SequenceLayout,
    group: AnyGroup,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """The loss's gradient for each of ``Index.tensors``; its value is added to ``loss``.

    ``attention`` is query [B, L, H, M], all latents [B, S, M], key ids and scale.
    """
    index_query, index_key, index_weights, token_weights_BL = tensors
    query_BLHM, latent_BSM, key_ids_BLK, scale = attention
    kl_BL, grad_query, partial, grad_weights = indexer_loss(
        index_query,
        all_gather_natural(index_key, 1, layout, group),
        index_weights,
        query_BLHM=query_BLHM,
        latent_BSM=latent_BSM,
        key_ids_BLK=key_ids_BLK,
        token_weights_BL=token_weights_BL,
        scale=scale,
    )
    loss.add(kl_BL, token_weights_BL)
    grad_key = reduce_scatter_natural(partial, 1, layout, group).to(index_key.dtype)
    return grad_query, grad_key, grad_weights, None
