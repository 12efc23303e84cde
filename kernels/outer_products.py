"""Weight gradients of a grouped product in FP32, and which weights take one.

Shapes: R rows sorted by expert, r rows of one expert, T tokens, M and N the two sizes of a weight, E experts of this
rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_moe_strategy.kernels.on_cuda import HALF, triton_on_cuda


def takes_fp32_gradient(weight: Tensor) -> bool:
    """Whether a BF16 or FP16 weight may get a gradient in FP32; autograd rounds it to the weight's dtype otherwise.

    A leaf says so by its ``grad_dtype``, the output of an autograd Function by `pass_fp32_gradients`.
    """
    if weight.dtype not in HALF or not weight.requires_grad or torch.compiler.is_compiling():
        return False
    if weight.is_leaf:
        return weight.grad_dtype == torch.float32
    return getattr(weight.grad_fn, "passes_fp32_gradients", False)


def pass_fp32_gradients(ctx: Any, *outputs: Tensor) -> None:
    """For the forward of an autograd Function: its backward gets gradients of these outputs in FP32, unrounded."""
    ctx.passes_fp32_gradients = True  # ctx is the grad_fn of the outputs, which alone are seen from outside
    for output in outputs:
        output.grad_dtype = torch.float32


@torch.library.custom_op("lightning_moe::outer_products", mutates_args=())
def outer_products(
    left_RM: Tensor, right_TN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None = None
) -> Tensor:
    """Per expert, ``left^T right`` over its rows: [E, M, N] in FP32, exact zeros for an expert without rows.

    Row r on the right is ``right_TN[r]``, or ``right_TN[token_of_row_R[r]]`` (int32): rows that are copies of tokens
    need not be there. Products are exact and add up in FP32; ``F.grouped_mm`` would round each sum to the dtype of the
    rows. Expert e owns the rows ``offsets_E[e-1]:offsets_E[e]`` (int32); rows from ``offsets_E[-1]`` on are never read.
    On a GPU without Triton it runs expert by expert, and the host waits for the offsets.
    """
    return sum_outer_products(left_RM, right_TN, offsets_E, token_of_row_R)


@outer_products.register_fake
def _(left_RM: Tensor, right_TN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None = None) -> Tensor:
    sizes = offsets_E.shape[0], left_RM.shape[1], right_TN.shape[1]
    return left_RM.new_empty(sizes, dtype=torch.float32)


@register_flop_formula(torch.ops.lightning_moe.outer_products)
def _flops(left_shape: Any, right_shape: Any, *args: Any, **kwargs: Any) -> int:
    num_rows, left_size = left_shape
    return int(2 * num_rows * left_size * right_shape[1])


@triton_on_cuda("triton_outer_products", dtypes=HALF)
def sum_outer_products(
    left_RM: Tensor, right_TN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None = None
) -> Tensor:
    """`outer_products`, but no operation of its own: fake tensors need one whose shapes are known."""
    sums_EMN = left_RM.new_zeros((offsets_E.shape[0], left_RM.shape[1], right_TN.shape[1]), dtype=torch.float32)
    _add_expert_by_expert(left_RM, right_TN, offsets_E, token_of_row_R, sums_EMN)
    return sums_EMN


@triton_on_cuda("triton_outer_products", dtypes=HALF)
def add_outer_products(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor, accumulated_EMN: Tensor) -> None:
    """`outer_products` added to ``accumulated_EMN``, in place; an expert without rows is left as it is."""
    _add_expert_by_expert(left_RM, right_RN, offsets_E, None, accumulated_EMN)


def _add_expert_by_expert(
    left_RM: Tensor, right_TN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None, sums_EMN: Tensor
) -> None:
    start, dtype = 0, sums_EMN.dtype
    for expert, end in enumerate(offsets_E.tolist()):
        right_rN = right_TN[start:end] if token_of_row_R is None else right_TN[token_of_row_R[start:end]]
        # The rows of one expert at a time: a copy of all in FP32 would be the largest tensor of the step.
        sums_EMN[expert].addmm_(left_RM[start:end].to(dtype).t(), right_rN.to(dtype))
        start = end
