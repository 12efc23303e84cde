"""The gated MLP of many experts on rows sorted by expert.

Shapes: R rows, D hidden size, I intermediate size, H = 2*I (gate first, then up), E experts of this rank,
M and N the two sizes of a matrix product.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.kernels.swiglu import swiglu_prob, swiglu_prob_backward

# F.grouped_mm asks this of every row stride, on CPU and CUDA alike (torch 2.13).
GROUPED_MM_ALIGNMENT_BYTES = 16
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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

    Hidden sizes that `F.grouped_mm` does not take, and float64, run one product per expert.
    """
    _check(rows_RD, probs_R, gate_up_EHD, down_EDI, offsets_E)
    x_TD, token_of_row_R = (gathered_from[0].detach(), gathered_from[1]) if gathered_from else (None, None)
    y_RD: Tensor = _ExpertMLP.apply(  # type: ignore[no-untyped-call]
        rows_RD, probs_R, gate_up_EHD, down_EDI, offsets_E, x_TD, token_of_row_R
    )
    return y_RD


def why_not_grouped_mm(dtype: torch.dtype, *sizes: int) -> str | None:
    """Why ``F.grouped_mm`` cannot multiply matrices with rows of these sizes, or None."""
    if dtype not in GROUPED_MM_DTYPES:
        return f"F.grouped_mm does not take {dtype}"
    for size in sizes:
        if size * dtype.itemsize % GROUPED_MM_ALIGNMENT_BYTES:
            multiple = GROUPED_MM_ALIGNMENT_BYTES // dtype.itemsize
            return f"{size} {dtype} are no multiple of 16 bytes; F.grouped_mm needs sizes in steps of {multiple}"
    return None


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
        h_RH = _rows_times_weights(rows_RD.contiguous(), gate_up_EHD.mT, offsets_E)
        activated_RI = swiglu_prob(h_RH, probs_R)
        y_RD = _rows_times_weights(activated_RI, down_EDI.mT, offsets_E)
        # Only the weight gradient of the up projection reads the rows.
        kept_rows = (rows_RD if x_TD is None else x_TD) if ctx.needs_input_grad[2] else None
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
        grad_activated_RI = _rows_times_weights(grad_y_RD, down_EDI, offsets_E)
        grad_h_RH, grad_probs_R, activated_RI = swiglu_prob_backward(grad_activated_RI, h_RH, probs_R)
        if down_needs:
            grad_down_EDI = _outer_products(grad_y_RD, activated_RI, offsets_E)
        if gate_up_needs:
            rows_RD = kept_rows if token_of_row_R is None else kept_rows.index_select(0, token_of_row_R)
            grad_gate_up_EHD = _outer_products(grad_h_RH, rows_RD.contiguous(), offsets_E)
        if rows_need:
            grad_rows_RD = _rows_times_weights(grad_h_RH, gate_up_EHD, offsets_E)
        grad_probs = grad_probs_R.to(probs_R.dtype) if probs_need else None
        return grad_rows_RD, grad_probs, grad_gate_up_EHD, grad_down_EDI, None, None, None


def _rows_times_weights(rows_RM: Tensor, weights_EMN: Tensor, offsets_E: Tensor) -> Tensor:
    """Each row times the weights of its expert: [R, N]."""
    num_rows, num_columns = rows_RM.shape[0], weights_EMN.shape[2]
    if num_rows == 0:
        return rows_RM.new_empty(0, num_columns)
    if _takes_grouped_mm(rows_RM.dtype, rows_RM.shape[1], num_columns):
        return torch.nn.functional.grouped_mm(rows_RM, weights_EMN, offs=offsets_E)
    out_RN = rows_RM.new_zeros(num_rows, num_columns)
    for expert, (start, end) in enumerate(_spans(offsets_E)):
        torch.mm(rows_RM[start:end], weights_EMN[expert], out=out_RN[start:end])
    return out_RN


def _outer_products(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Per expert, left^T right over its rows: [E, M, N], exact zeros for an expert without rows."""
    num_rows, num_experts = left_RM.shape[0], offsets_E.shape[0]
    if num_rows and _takes_grouped_mm(left_RM.dtype, left_RM.shape[1], right_RN.shape[1]):
        return torch.nn.functional.grouped_mm(left_RM.t(), right_RN, offs=offsets_E)
    out_EMN = left_RM.new_zeros(num_experts, left_RM.shape[1], right_RN.shape[1])
    if num_rows:
        for expert, (start, end) in enumerate(_spans(offsets_E)):
            torch.mm(left_RM[start:end].t(), right_RN[start:end], out=out_EMN[expert])
    return out_EMN


def _spans(offsets_E: Tensor) -> list[tuple[int, int]]:
    ends: list[int] = offsets_E.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _takes_grouped_mm(dtype: torch.dtype, *sizes: int) -> bool:
    reason = why_not_grouped_mm(dtype, *sizes)
    if reason is not None and dtype in GROUPED_MM_DTYPES:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"Experts run one product per expert, which is slow: {reason}.", stacklevel=2)


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
