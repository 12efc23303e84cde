"""From a router's logits to each token's experts and their weights, in FP32.

Shapes: T tokens, E experts, K experts per token, G groups of experts.
"""

from typing import Literal

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import triton_on_cuda

# All sigmoid scores of a token can underflow together; softmax sums are never near this.
SMALLEST_SUM = 1e-20


@triton_on_cuda("triton_router", dtypes=(torch.float32,))
def choose_experts(
    logits_TE: Tensor,
    balance_bias_E: Tensor | None,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    normalize_top_k: bool,
    routed_scaling: float = 1.0,
    num_groups: int = 1,
    top_k_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """weights_TK and expert_ids_TK (int64), the best expert first.

    A weight is the expert's score, as a share of the K chosen ones where ``normalize_top_k`` says so, times
    ``routed_scaling``; its gradient reaches the logits. The bias and the groups act on the choice alone.

    Of equal scores Triton takes the lower id. torch promises no order of them, on any device, and where more than K
    are equal not even which ones it takes.
    """
    scores_TE = logits_TE.softmax(dim=-1) if scoring == "softmax" else logits_TE.sigmoid()
    selection_TE = scores_TE.detach()
    if balance_bias_E is not None:
        selection_TE = selection_TE + balance_bias_E.float()
    if top_k_groups < num_groups:
        selection_TE = _close_groups(selection_TE, num_groups, top_k_groups)
    expert_ids_TK = best_experts(selection_TE, top_k)
    weights_TK = scores_TE.gather(1, expert_ids_TK)
    if normalize_top_k:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return weights_TK * routed_scaling, expert_ids_TK


def best_experts(selection_TE: Tensor, top_k: int) -> Tensor:
    """expert_ids_TK"""
    return selection_TE.topk(top_k, dim=-1).indices


def _close_groups(selection_TE: Tensor, num_groups: int, top_k_groups: int) -> Tensor:
    """-inf for the experts outside of each token's best groups."""
    selection_TGE = selection_TE.view(-1, num_groups, selection_TE.shape[1] // num_groups)
    # A group is as good as its two best experts together (DeepSeek-V3).
    group_scores_TG = selection_TGE.topk(min(2, selection_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen_groups = group_scores_TG.topk(top_k_groups, dim=-1).indices
    closed_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(1, chosen_groups, False)
    return selection_TGE.masked_fill(closed_TG[..., None], float("-inf")).flatten(1)
