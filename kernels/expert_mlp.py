"""The gated MLP of many experts on rows sorted by expert.

Shapes: R rows, D hidden size, I intermediate size, H = 2*I (gate first, then up), E experts of this rank,
M and N the two sizes of a matrix product, T tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.kernels.grouped_products import outer_products_of_grouped_mm, rows_times_weights
from lightning_moe_strategy.kernels.grouped_products import why_not_grouped_mm as why_not_grouped_mm
from lightning_moe_strategy.kernels.outer_products import outer_products, takes_fp32_gradient
from lightning_moe_strategy.kernels.swiglu import swiglu_prob, swiglu_prob_backward


def expert_mlp(
    rows_RD: Tensor,
    probs_R: Tensor,
    gate_up_EHD: Tensor,
    down_EDI: Tensor,
    offsets_E: Tensor,
    *,
    gathered_from: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``y_RD``: every row through its expert's ``down(silu(gate) * up * prob)``.

    Expert e owns the rows ``offsets_E[e-1]:offsets_E[e]`` (int32). Rows from ``offsets_E[-1]`` on are never
    read, and their results and gradients are undefined: whoever pads drops them. R may be 0, and an expert
    without rows gets a gradient of exact zeros. The probability (FP32) is applied before the down projection,
    so that its gradient does not need the product of that projection.

    Kept for the backward: the rows, ``gate_up``'s product and the probabilities, half of what the same
    expression keeps under autograd at I = D/2, K = 4. Where ``rows_RD == x_TD[token_of_row_R]``, pass both as
    ``gathered_from``: the backward gathers again and T*D is kept in place of R*D, 0.31x.

    A BF16 or FP16 weight whose gradient may be FP32 (`takes_fp32_gradient`) gets one that was never rounded.

    Hidden sizes that `F.grouped_mm` does not take, and float64, run one product per expert.
    """
    _check(rows_RD, probs_R, gate_up_EHD, down_EDI, offsets_E)
    x_TD, token_of_row_R = (gathered_from[0].detach(), gathered_from[1]) if gathered_from else (None, None)
    y_RD: Tensor = _ExpertMLP.apply(  # type: ignore[no-untyped-call]
        rows_RD, probs_R, gate_up_EHD, down_EDI, offsets_E, x_TD, token_of_row_R
    )
    return y_RD


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_R: Tensor,
        gate_up_EHD: Tensor,
        down_EDI: Tensor,
        offsets_E: Tensor,
        x_TD: Tensor | None,
        token_of_row_R: Tensor | None,
    ) -> Tensor:
        gathered_from = None if x_TD is None or token_of_row_R is None else (x_TD, token_of_row_R)
        h_RH = rows_times_weights(rows_RD.contiguous(), gate_up_EHD.mT, offsets_E, gathered_from=gathered_from)
        activated_RI = swiglu_prob(h_RH, probs_R, num_rows=offsets_E[-1:])
        y_RD = rows_times_weights(activated_RI, down_EDI.mT, offsets_E)
        # Only the weight gradient of the up projection reads the rows.
        kept_rows = (rows_RD if x_TD is None else x_TD) if ctx.needs_input_grad[2] else None
        ctx.gate_up_in_fp32, ctx.down_in_fp32 = takes_fp32_gradient(gate_up_EHD), takes_fp32_gradient(down_EDI)
        ctx.save_for_backward(kept_rows, token_of_row_R, h_RH, probs_R, gate_up_EHD, down_EDI, offsets_E)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        kept_rows, token_of_row_R, h_RH, probs_R, gate_up_EHD, down_EDI, offsets_E = ctx.saved_tensors
        rows_need, probs_need, gate_up_needs, down_needs, *_ = ctx.needs_input_grad
        # A gradient may come expanded (stride 0), which grouped_mm refuses.
        grad_y_RD = grad_y_RD.contiguous()
        grad_rows_RD = grad_gate_up_EHD = grad_down_EDI = None
        grad_activated_RI = rows_times_weights(grad_y_RD, down_EDI, offsets_E)
        grad_h_RH, grad_probs_R, activated_RI = swiglu_prob_backward(
            grad_activated_RI, h_RH, probs_R, num_rows=offsets_E[-1:]
        )
        if down_needs:
            grad_down_EDI = _weight_gradient(grad_y_RD, activated_RI, None, offsets_E, in_fp32=ctx.down_in_fp32)
        if gate_up_needs:
            grad_gate_up_EHD = _weight_gradient(
                grad_h_RH, kept_rows, token_of_row_R, offsets_E, in_fp32=ctx.gate_up_in_fp32
            )
        if rows_need:
            grad_rows_RD = rows_times_weights(grad_h_RH, gate_up_EHD, offsets_E)
        grad_probs = grad_probs_R.to(probs_R.dtype) if probs_need else None
        return grad_rows_RD, grad_probs, grad_gate_up_EHD, grad_down_EDI, None, None, None


def _weight_gradient(
    left_RM: Tensor, right_TN: Tensor, token_of_row_R: Tensor | None, offsets_E: Tensor, *, in_fp32: bool
) -> Tensor:
    """[E, M, N]; where tokens stand in for rows on the right, `outer_products` reads them in their place."""
    right_TN = right_TN.contiguous()
    if in_fp32:
        sums_EMN: Tensor = outer_products(left_RM, right_TN, offsets_E, token_of_row_R)
        return sums_EMN
    right_RN = right_TN if token_of_row_R is None else right_TN.index_select(0, token_of_row_R)
    return outer_products_of_grouped_mm(left_RM, right_RN, offsets_E)


def _check(rows_RD: Tensor, probs_R: Tensor, gate_up_EHD: Tensor, down_EDI: Tensor, offsets_E: Tensor) -> None:
    num_experts, hidden_size, intermediate_size = down_EDI.shape
    if gate_up_EHD.shape != (num_experts, 2 * intermediate_size, hidden_size):
        raise ValueError(
            f"gate_up {tuple(gate_up_EHD.shape)} does not go with down {tuple(down_EDI.shape)}: "
            "they must be [E, 2*I, D] and [E, D, I]."
        )
    if rows_RD.shape[1:] != (hidden_size,) or probs_R.shape != rows_RD.shape[:1]:
        raise ValueError(
            f"rows {tuple(rows_RD.shape)} and probs {tuple(probs_R.shape)} must be [R, D] and [R] with the "
            f"D({hidden_size}) of the weights."
        )
    if offsets_E.shape != (num_experts,) or offsets_E.dtype != torch.int32:
        raise ValueError(
            f"offsets {tuple(offsets_E.shape)} {offsets_E.dtype} must be int32, one end for each of the "
            f"{num_experts} experts."
        )
    if not rows_RD.dtype == gate_up_EHD.dtype == down_EDI.dtype:
        raise ValueError(
            f"rows are {rows_RD.dtype}, weights {gate_up_EHD.dtype} and {down_EDI.dtype}: cast the rows to "
            "the weights' dtype first."
        )
