"""The choice of experts in one kernel, and its gradient in another: a token's scores never leave the registers.

Shapes: T tokens (of one program, inside a kernel), E experts, K experts per token, G groups of J experts each; inside
a kernel E, K, G and J are rounded up to powers of two, E is G * J, and what is added is never chosen.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.kernels.router import SMALLEST_SUM

# 256 experts: four tokens a program, one for each warp, eight scores a thread.
SCORES_PER_PROGRAM = 1024

_LOWEST = tl.constexpr(-3.0e38)
_SMALLEST_SUM = tl.constexpr(SMALLEST_SUM)


@triton.jit
def _experts_of_columns(NUM_GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, G: tl.constexpr, J: tl.constexpr):
    """The expert in each of the G * J columns, ascending, and which columns hold one."""
    columns_E = tl.arange(0, G * J)
    if PER_GROUP == J:
        experts_E = columns_E
    else:
        experts_E = columns_E // J * PER_GROUP + columns_E % J
    return experts_E, (columns_E // J < NUM_GROUPS) & (columns_E % J < PER_GROUP)


@triton.jit
def _load_scores(logits_ptr, places_TE, is_logit_TE, is_expert_E, IS_SOFTMAX: tl.constexpr):
    logits_TE = tl.load(logits_ptr + places_TE, mask=is_logit_TE, other=0.0)
    if IS_SOFTMAX:
        logits_TE = tl.where(is_expert_E[None, :], logits_TE, float("-inf"))
        exps_TE = tl.exp(logits_TE - tl.max(logits_TE, axis=1)[:, None])
        return exps_TE / tl.sum(exps_TE, axis=1)[:, None]
    return 1 / (1 + tl.exp(-logits_TE))


@triton.jit
def _open_groups(
    selection_TE,
    NUM_GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,
):
    """Whether each expert is in one of the groups whose two best experts are worth most together."""
    selection_TGJ = tl.reshape(selection_TE, (T, G, J))
    scores_TG, best_TG = tl.max(selection_TGJ, axis=2, return_indices=True)
    if PER_GROUP > 1:
        is_best_TGJ = tl.arange(0, J)[None, None, :] == best_TG[:, :, None]
        scores_TG += tl.max(tl.where(is_best_TGJ, float("-inf"), selection_TGJ), axis=2)
    groups_G = tl.arange(0, G)
    scores_TG = tl.where((groups_G < NUM_GROUPS)[None, :], tl.maximum(scores_TG, _LOWEST), float("-inf"))
    is_open_TG = tl.zeros((T, G), tl.int32)
    for _ in tl.static_range(OPEN_GROUPS):
        _, chosen_T = tl.max(scores_TG, axis=1, return_indices=True)
        is_chosen_TG = groups_G[None, :] == chosen_T[:, None]
        is_open_TG = tl.where(is_chosen_TG, 1, is_open_TG)
        scores_TG = tl.where(is_chosen_TG, float("-inf"), scores_TG)
    return tl.reshape(tl.broadcast_to(is_open_TG[:, :, None], (T, G, J)), (T, G * J)) > 0


# As in triton_rows.py, counts change from step to step.
@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    expert_ids_ptr,
    num_tokens,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,
):
    tokens_T = tl.program_id(0) * T + tl.arange(0, T)
    experts_E, is_expert_E = _experts_of_columns(NUM_GROUPS, PER_GROUP, G, J)
    is_logit_TE = (tokens_T < num_tokens)[:, None] & is_expert_E[None, :]
    places_TE = tokens_T[:, None].to(tl.int64) * (NUM_GROUPS * PER_GROUP) + experts_E[None, :]
    scores_TE = _load_scores(logits_ptr, places_TE, is_logit_TE, is_expert_E, IS_SOFTMAX)
    selection_TE = scores_TE
    if bias_ptr is not None:
        selection_TE += tl.load(bias_ptr + experts_E, mask=is_expert_E, other=0.0).to(tl.float32)[None, :]
    # A NaN counts as the largest, as in torch: an id must be one of an expert whatever the scores are.
    selection_TE = tl.where(selection_TE != selection_TE, float("inf"), selection_TE)
    selection_TE = tl.where(is_expert_E[None, :], selection_TE, float("-inf"))
    if OPEN_GROUPS < NUM_GROUPS:
        is_open_TE = _open_groups(selection_TE, NUM_GROUPS, OPEN_GROUPS, PER_GROUP, T, G, J)
        selection_TE = tl.where(is_open_TE, selection_TE, float("-inf"))
    # Below all experts, closed ones too, are those chosen already: no expert comes twice.
    selection_TE = tl.where(is_expert_E[None, :], tl.maximum(selection_TE, _LOWEST), float("-inf"))

    slots_K = tl.arange(0, BLOCK_K)
    weights_TK = tl.zeros((T, BLOCK_K), tl.float32)
    expert_ids_TK = tl.zeros((T, BLOCK_K), tl.int32)
    columns_E = tl.arange(0, G * J)
    for k in tl.static_range(K):
        _, chosen_T = tl.max(selection_TE, axis=1, return_indices=True)
        is_chosen_TE = columns_E[None, :] == chosen_T[:, None]
        weight_T = tl.sum(tl.where(is_chosen_TE, scores_TE, 0.0), axis=1)
        expert_T = chosen_T // J * PER_GROUP + chosen_T % J
        weights_TK = tl.where((slots_K == k)[None, :], weight_T[:, None], weights_TK)
        expert_ids_TK = tl.where((slots_K == k)[None, :], expert_T[:, None], expert_ids_TK)
        selection_TE = tl.where(is_chosen_TE, float("-inf"), selection_TE)
    if NORMALIZE:
        weights_TK /= tl.sum(weights_TK, axis=1)[:, None] + _SMALLEST_SUM
    places_TK = tokens_T[:, None].to(tl.int64) * K + slots_K[None, :]
    is_slot_TK = (tokens_T < num_tokens)[:, None] & (slots_K < K)[None, :]
    tl.store(weights_ptr + places_TK, weights_TK * scale, mask=is_slot_TK)
    tl.store(expert_ids_ptr + places_TK, expert_ids_TK.to(tl.int64), mask=is_slot_TK)


@triton.jit(do_not_specialize=["num_tokens"])
def _gradient_kernel(
    grad_weights_ptr,
    logits_ptr,
    expert_ids_ptr,
    grad_logits_ptr,
    num_tokens,
    scale,
    K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    T: tl.constexpr,
    E: tl.constexpr,
):
    tokens_T = tl.program_id(0) * T + tl.arange(0, T)
    is_token_T = tokens_T < num_tokens
    experts_E = tl.arange(0, E)
    is_expert_E = experts_E < NUM_EXPERTS
    is_logit_TE = is_token_T[:, None] & is_expert_E[None, :]
    places_TE = tokens_T[:, None].to(tl.int64) * NUM_EXPERTS + experts_E[None, :]
    scores_TE = _load_scores(logits_ptr, places_TE, is_logit_TE, is_expert_E, IS_SOFTMAX)
    grad_TE = tl.zeros((T, E), tl.float32)
    is_chosen_TE = tl.zeros((T, E), tl.int32)
    for k in tl.static_range(K):
        place_T = tokens_T.to(tl.int64) * K + k
        expert_T = tl.load(expert_ids_ptr + place_T, mask=is_token_T, other=0).to(tl.int32)
        grad_T = tl.load(grad_weights_ptr + place_T, mask=is_token_T, other=0.0) * scale
        is_this_TE = experts_E[None, :] == expert_T[:, None]
        grad_TE = tl.where(is_this_TE, grad_T[:, None], grad_TE)
        is_chosen_TE = tl.where(is_this_TE, 1, is_chosen_TE)
    if NORMALIZE:
        # weight = score / sum: its gradient less the weighted mean of all K, over the sum.
        chosen_TE = tl.where(is_chosen_TE > 0, scores_TE, 0.0)
        sum_T = tl.sum(chosen_TE, axis=1) + _SMALLEST_SUM
        mean_T = tl.sum(grad_TE * chosen_TE, axis=1) / sum_T
        grad_TE = tl.where(is_chosen_TE > 0, (grad_TE - mean_T[:, None]) / sum_T[:, None], 0.0)
    if IS_SOFTMAX:
        grad_TE = scores_TE * (grad_TE - tl.sum(grad_TE * scores_TE, axis=1)[:, None])
    else:
        grad_TE = grad_TE * scores_TE * (1 - scores_TE)
    tl.store(grad_logits_ptr + places_TE, grad_TE, mask=is_logit_TE)


class _ChooseExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, balance_bias_E: Tensor | None, rule: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        weights_TK, expert_ids_TK = _choose(logits_TE, balance_bias_E, **rule)
        ctx.save_for_backward(logits_TE, expert_ids_TK)
        ctx.mark_non_differentiable(expert_ids_TK)
        ctx.rule = rule
        return weights_TK, expert_ids_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights_TK: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits_TE, expert_ids_TK = ctx.saved_tensors
        return _gradient(grad_weights_TK.contiguous(), logits_TE, expert_ids_TK, **ctx.rule), None, None


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
    """See `router.choose_experts`. Equal logits give equal bits, every time: a replay chooses the same experts."""
    rule = {
        "top_k": top_k,
        "is_softmax": scoring == "softmax",
        "normalize": normalize_top_k,
        "scale": float(routed_scaling),
        "groups": (num_groups, min(top_k_groups, num_groups)),
    }
    weights_TK, expert_ids_TK = _ChooseExperts.apply(  # type: ignore[no-untyped-call]
        logits_TE, balance_bias_E, rule
    )
    return weights_TK, expert_ids_TK


def _choose(
    logits_TE: Tensor,
    balance_bias_E: Tensor | None,
    *,
    top_k: int,
    is_softmax: bool,
    normalize: bool,
    scale: float,
    groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    (num_tokens, num_experts), (num_groups, open_groups) = logits_TE.shape, groups
    per_group = num_experts // num_groups
    g, j = triton.next_power_of_2(num_groups), triton.next_power_of_2(per_group)
    tokens = max(1, SCORES_PER_PROGRAM // (g * j))
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    expert_ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    _choose_kernel[(triton.cdiv(num_tokens, tokens),)](
        logits_TE,
        balance_bias_E,
        weights_TK,
        expert_ids_TK,
        num_tokens,
        scale,
        K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        IS_SOFTMAX=is_softmax,
        NORMALIZE=normalize,
        NUM_GROUPS=num_groups,
        OPEN_GROUPS=open_groups,
        PER_GROUP=per_group,
        T=tokens,
        G=g,
        J=j,
    )
    return weights_TK, expert_ids_TK


def _gradient(
    grad_weights_TK: Tensor,
    logits_TE: Tensor,
    expert_ids_TK: Tensor,
    *,
    top_k: int,
    is_softmax: bool,
    normalize: bool,
    scale: float,
    groups: tuple[int, int],
) -> Tensor:
    num_tokens, num_experts = logits_TE.shape
    columns = triton.next_power_of_2(num_experts)
    tokens = max(1, SCORES_PER_PROGRAM // columns)
    grad_logits_TE = torch.empty_like(logits_TE)
    _gradient_kernel[(triton.cdiv(num_tokens, tokens),)](
        grad_weights_TK,
        logits_TE,
        expert_ids_TK,
        grad_logits_TE,
        num_tokens,
        scale,
        K=top_k,
        IS_SOFTMAX=is_softmax,
        NORMALIZE=normalize,
        NUM_EXPERTS=num_experts,
        T=tokens,
        E=columns,
    )
    return grad_logits_TE
