"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): tokens further on, for training alone.

At depth k every token is given the embedding of the token k places on and predicts the one after that, through one more
block and the model's own head. Nothing here is used at inference; the main prediction stays what it was.

Shapes: B batch, S sequence (of this process), D hidden, T tokens of any shape, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_strategy.kernels.next_tokens import next_tokens
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import Linear, RMSNorm
from lightning_moe_strategy.models.loss import IGNORE_INDEX, cross_entropy_sum

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at a time: 1.3 GB in bf16 with GLM-5.2's vocabulary. Each chunk adds to the gradient of the
head once, so fewer and larger ones than ``cross_entropy_sum`` makes of their FP32 copies."""


class MultiTokenPrediction(nn.Module):
    """One depth: a usual block on the normalised pair of a hidden state and the embedding ``distance`` tokens on."""

    def __init__(self, config: ModelConfig, block: nn.Module, distance: int) -> None:
        super().__init__()
        self.distance = distance
        self.embed_norm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.eh_proj = Linear(2 * config.hidden, config.hidden)
        self.block = block
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(
        self, hidden_BSD: Tensor, embedded_BSD: Tensor, targets_BS: Tensor, position_ids_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states for the head and for the next depth, and this depth's targets.

        ``hidden_BSD`` are the final ones of the depth before, ``embedded_BSD`` the embeddings of the tokens themselves
        and ``targets_BS`` those of the main prediction. A token counts here when it counts there and so does the one
        ``distance`` places on, in the same document: then no process has a loss without a token of the main one, and
        a mean over those adds up over processes.
        """
        # Embeddings are read and not ids: looking those up would gather the table a second time.
        later_BSD = next_tokens(embedded_BSD, self.distance, 0.0, position_ids_BS=position_ids_BS)
        pair_BSX = torch.cat([self.embed_norm(later_BSD), self.hidden_norm(hidden_BSD)], dim=-1)
        x_BSD = self.block(self.eh_proj(pair_BSX), position_ids_BS)
        if isinstance(x_BSD, tuple):
            x_BSD = x_BSD[0]  # a sparse block also says which keys it chose
        later_BS = next_tokens(targets_BS, self.distance, IGNORE_INDEX, position_ids_BS=position_ids_BS)
        return self.norm(x_BSD), later_BS.masked_fill(targets_BS == IGNORE_INDEX, IGNORE_INDEX)


class Head(Linear):
    """Logits of hidden states; of any others, what their cross entropy is.

    Both in one call, because its weight is gathered for each call.
    """

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, others: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> Tensor | tuple[Tensor, Tensor]:
        """logits_BSV; with ``others``, pairs of hidden states [B, S, D] and targets [B, S], also the sum of losses of
        each, FP32 [pairs]."""
        logits_BSV = super().forward(x_BSD)
        if not others:
            return logits_BSV
        sums = [projected_cross_entropy_sum(x.flatten(0, 1), self.weight, ids.flatten()) for x, ids in others]
        return logits_BSV, torch.stack(sums)


def projected_cross_entropy_sum(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """``cross_entropy_sum(x_TD @ weight_VD.T, targets_T)`` without the logits of all tokens at once.

    They exist for ``chunk_tokens`` tokens, forward and, computed again, backward.
    """
    loss: Tensor = _ProjectedCrossEntropySum.apply(x_TD, weight_VD, targets_T, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss


class _ProjectedCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_tokens: int) -> Tensor:
        ctx.save_for_backward(x_TD, weight_VD, targets_T)
        ctx.chunk_tokens = chunk_tokens
        chunks = zip(torch.split(x_TD, chunk_tokens), torch.split(targets_T, chunk_tokens), strict=True)
        return torch.stack([cross_entropy_sum(F.linear(x_CD, weight_VD), ids_C) for x_CD, ids_C in chunks]).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_VD, targets_T = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_x_TD = torch.empty_like(x_TD)
        # Chunks are summed: in bf16 each sum would round the whole again.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))
        for start in range(0, len(x_TD), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits_CV = F.linear(x_TD[chunk], weight_VD).requires_grad_()
            with torch.enable_grad():
                loss = cross_entropy_sum(logits_CV, targets_T[chunk])
            (grad_CV,) = torch.autograd.grad(loss, logits_CV, grad)
            grad_x_TD[chunk] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ x_TD[chunk]
        return grad_x_TD, grad_weight_VD.to(weight_VD.dtype), None, None
