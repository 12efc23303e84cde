"""The indexers of a model, and the loss that trains them: its weight, whose tokens count, its sum.

Shapes: B batch, L tokens of this rank, K keys per query.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from lightning_moe_strategy.models.sparse_attention import Indexer

# Of transformers, those that return ids and nothing else, without a gradient.
_HUGGING_FACE_INDEXERS = ("DeepseekV32Indexer", "GlmMoeDsaIndexer")


def is_indexer(module: nn.Module) -> bool:
    """Whether ``module`` chooses the keys of a sparse attention (DSA) on latents."""
    return isinstance(module, Indexer) or type(module).__name__ in _HUGGING_FACE_INDEXERS


def train_indexers(root: nn.Module) -> None:
    """Make every indexer of ``root`` trainable. Before it is sharded, and before an optimizer asks what is.

    Raises:
        ValueError: it has none.
    """
    indexers = [module for module in root.modules() if is_indexer(module)]
    if not indexers:
        raise ValueError(
            f"indexer_loss_weight > 0 trains the indexers of sparse attention (DSA), and {type(root).__name__} has "
            "none. Leave it out, or train a model with indexers (tiny-dsa, glm-5.2, deepseek_v32, glm_moe_dsa)."
        )
    for indexer in indexers:
        indexer.requires_grad_(True)


class IndexerLoss:
    """The divergence of index scores from attention: how much it weighs, and what it has come to so far.

    The backward pass adds its gradient to the indexers' and to nobody else's, and its value here; the loss that a user
    sees stays as it is. As all gradients (``token_mean``) it is a sum over the tokens of this rank that are no padding,
    divided by the tokens of the step that have a label; without labels, a mean over the former.
    """

    def __init__(self, weight: float) -> None:
        if not (weight > 0.0 and math.isfinite(weight)):
            raise ValueError(f"indexer_loss_weight({weight}) must be finite and above 0, or 0 for no loss.")
        self.weight = weight
        self._sums: list[Tensor] = []

    def token_weights(
        self, real_tokens_BL: Tensor | None, shape: tuple[int, int], device: torch.device, *, are_counted: bool
    ) -> Tensor:
        """What each token's divergence weighs in the gradient: FP32, 0 for padding.

        Raises:
            ValueError: the attention's tokens are not those of the batch.
        """
        if real_tokens_BL is None:
            real_BL = torch.ones(shape, device=device)
        elif real_tokens_BL.shape == shape:
            real_BL = real_tokens_BL.to(device, torch.float32)
        else:
            raise ValueError(
                f"Attention over {shape} [batch, tokens] in a batch of {tuple(real_tokens_BL.shape)} with padding: "
                "which of them the indexer loss counts is unknown. Give the model the batch as it is."
            )
        return real_BL * (self.weight if are_counted else self.weight / real_BL.sum().clamp(min=1.0))

    def add(self, kl_BL: Tensor, token_weights_BL: Tensor) -> None:
        """One layer's divergence. No host sync."""
        counts_BL = token_weights_BL != 0
        self._sums.append(torch.stack([(kl_BL * counts_BL).sum(dtype=torch.float64), counts_BL.sum().double()]))

    def take_sums(self, device: torch.device) -> Tensor:
        """The divergence in nats and its terms (tokens x layers) on this rank since the last call: float64 [2]."""
        sums, self._sums = self._sums, []
        return torch.stack(sums).sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=device)


# Set and read inside one call of an indexer, so the thread is the same, also that of an activation recompute.
_choice: ContextVar[Tensor | None] = ContextVar("choice", default=None)


@contextmanager
def choice_is(key_ids_BLK: Tensor) -> Iterator[None]:
    """Around an indexer whose keys are chosen already: it computes what it would choose them by, and nothing more."""
    before = _choice.set(key_ids_BLK)
    try:
        yield
    finally:
        _choice.reset(before)


def choice_already_made() -> Tensor | None:
    """The keys of the enclosing ``choice_is``, if there is one."""
    return _choice.get()
