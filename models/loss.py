"""Cross entropy of next tokens over a large vocabulary.

Shapes: T tokens, V vocabulary, C tokens of one chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Target of a token that does not count (the value Hugging Face and torch use)."""


def cross_entropy_sum(logits_TV: Tensor, targets_T: Tensor, *, chunk_tokens: int = 1024) -> Tensor:
    """Sum of ``-log p(target)`` in nats over the tokens whose target is not ``IGNORE_INDEX``, in FP32.

    FP32 copies exist for ``chunk_tokens`` tokens at a time, forward and backward; a whole one would be 10 GB
    at 16,384 tokens and GLM-5.2's vocabulary. No counted target at all gives zero, with a zero gradient.
    """
    loss: Tensor = _CrossEntropySum.apply(logits_TV, targets_T, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, chunk_tokens: int) -> Tensor:
        chunks = torch.split(logits_TV, chunk_tokens)
        lse_T = torch.cat([_upcast(chunk_CV).logsumexp(dim=-1) for chunk_CV in chunks])
        counted_T = targets_T != IGNORE_INDEX
        target_logits_T = logits_TV.gather(1, targets_T.where(counted_T, 0)[:, None])[:, 0]
        ctx.save_for_backward(logits_TV, targets_T, lse_T)
        ctx.chunk_tokens = chunk_tokens
        return (lse_T - target_logits_T).masked_fill(~counted_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """softmax - one-hot(target), written chunk by chunk in the dtype of the logits."""
        logits_TV, targets_T, lse_T = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_TV = torch.empty_like(logits_TV)
        for start in range(0, len(logits_TV), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad_CV = (_upcast(logits_TV[chunk]) - lse_T[chunk, None]).exp_()
            counted_C1 = (targets_T[chunk] != IGNORE_INDEX)[:, None]
            target_ids_C1 = targets_T[chunk, None].where(counted_C1, 0)
            grad_CV.scatter_add_(1, target_ids_C1, torch.full_like(target_ids_C1, -1, dtype=grad_CV.dtype))
            grad_TV[chunk] = grad_CV.mul_(grad * counted_C1)
        return grad_TV, None, None


def shift_labels(labels_BS: Tensor) -> Tensor:
    """Targets from labels aligned with the inputs: a token's target is the next label, the last has none."""
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)


def _upcast(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
