"""SwiGLU times the routing probability and its gradient, one pass over memory each; FP32 in registers alone.

Shapes: R rows (of one program, inside a kernel), I intermediate size, H = 2*I (gate first, then up).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

# As in triton_rows.py, and half of it in the backward, which holds six tiles at once.
NUMBERS_PER_PROGRAM = 4096
NUMBERS_PER_BACKWARD_STEP = 2048
CHANNELS_PER_PROGRAM = 1024


@triton.jit
def _load_gate_and_up(h_ptr, rows_R, channels_I, num_channels, is_inside_RI):
    gate_ptr = h_ptr + rows_R[:, None].to(tl.int64) * (2 * num_channels) + channels_I[None, :]
    gate_RI = tl.load(gate_ptr, mask=is_inside_RI, other=0.0).to(tl.float32)
    up_RI = tl.load(gate_ptr + num_channels, mask=is_inside_RI, other=0.0).to(tl.float32)
    return gate_RI, up_RI


@triton.jit
def _rows_up_to(num_rows, num_filled_ptr):
    if num_filled_ptr is not None:
        num_rows = tl.minimum(num_rows, tl.load(num_filled_ptr))
    return num_rows


# As in triton_rows.py, counts change from step to step.
@triton.jit(do_not_specialize=["num_rows", "num_filled_ptr"])
def _forward_kernel(
    h_ptr,
    probs_ptr,
    out_ptr,
    num_filled_ptr,
    num_rows,
    num_channels,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    num_rows = _rows_up_to(num_rows, num_filled_ptr)
    if tl.program_id(0) * BLOCK_R >= num_rows:
        return
    rows_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    channels_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_inside_RI = (rows_R < num_rows)[:, None] & (channels_I < num_channels)[None, :]
    gate_RI, up_RI = _load_gate_and_up(h_ptr, rows_R, channels_I, num_channels, is_inside_RI)
    probs_R = tl.load(probs_ptr + rows_R, mask=rows_R < num_rows, other=0.0).to(tl.float32)
    # The same products in the same order as in the backward, which makes these very numbers again.
    sigmoid_RI = 1 / (1 + tl.exp(-gate_RI))
    out_RI = gate_RI * sigmoid_RI * up_RI * probs_R[:, None]
    places_RI = rows_R[:, None].to(tl.int64) * num_channels + channels_I[None, :]
    tl.store(out_ptr + places_RI, out_RI.to(out_ptr.dtype.element_ty), mask=is_inside_RI)


@triton.jit(do_not_specialize=["num_rows", "num_filled_ptr"])
def _backward_kernel(
    grad_ptr,
    h_ptr,
    probs_ptr,
    grad_h_ptr,
    grad_probs_ptr,
    out_ptr,
    num_filled_ptr,
    num_rows,
    num_channels,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    num_rows = _rows_up_to(num_rows, num_filled_ptr)
    if tl.program_id(0) * BLOCK_R >= num_rows:
        return
    rows_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    probs_R = tl.load(probs_ptr + rows_R, mask=rows_R < num_rows, other=0.0).to(tl.float32)
    # One program owns whole rows: the sum over I needs no atomics and has one order.
    grad_probs_RI = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
    for start in range(0, num_channels, BLOCK_I):
        channels_I = start + tl.arange(0, BLOCK_I)
        is_inside_RI = (rows_R < num_rows)[:, None] & (channels_I < num_channels)[None, :]
        places_RI = rows_R[:, None].to(tl.int64) * num_channels + channels_I[None, :]
        gate_RI, up_RI = _load_gate_and_up(h_ptr, rows_R, channels_I, num_channels, is_inside_RI)
        grad_RI = tl.load(grad_ptr + places_RI, mask=is_inside_RI, other=0.0).to(tl.float32)
        sigmoid_RI = 1 / (1 + tl.exp(-gate_RI))
        silu_RI = gate_RI * sigmoid_RI
        product_RI = silu_RI * up_RI
        grad_probs_RI += grad_RI * product_RI
        tl.store(out_ptr + places_RI, (product_RI * probs_R[:, None]).to(out_ptr.dtype.element_ty), mask=is_inside_RI)
        grad_RI *= probs_R[:, None]
        # silu' = sigmoid + silu * (1 - sigmoid)
        grad_gate_RI = (sigmoid_RI + silu_RI * (1 - sigmoid_RI)) * up_RI * grad_RI
        grad_gate_ptr = grad_h_ptr + rows_R[:, None].to(tl.int64) * (2 * num_channels) + channels_I[None, :]
        dtype = grad_h_ptr.dtype.element_ty
        tl.store(grad_gate_ptr, grad_gate_RI.to(dtype), mask=is_inside_RI)
        tl.store(grad_gate_ptr + num_channels, (silu_RI * grad_RI).to(dtype), mask=is_inside_RI)
    grad_probs_R = tl.sum(grad_probs_RI, axis=1).to(grad_probs_ptr.dtype.element_ty)
    tl.store(grad_probs_ptr + rows_R, grad_probs_R, mask=rows_R < num_rows)


def swiglu_prob(h_RH: Tensor, probs_R: Tensor, *, num_rows: Tensor | None = None) -> Tensor:
    """See `swiglu.swiglu_prob`."""
    max_rows, num_channels = h_RH.shape[0], h_RH.shape[1] // 2
    out_RI = torch.empty(max_rows, num_channels, dtype=h_RH.dtype, device=h_RH.device)
    block_i = min(CHANNELS_PER_PROGRAM, triton.next_power_of_2(num_channels))
    block_r = NUMBERS_PER_PROGRAM // block_i
    _forward_kernel[triton.cdiv(max_rows, block_r), triton.cdiv(num_channels, block_i)](
        h_RH.contiguous(),
        probs_R.contiguous(),
        out_RI,
        num_rows,
        max_rows,
        num_channels,
        BLOCK_R=block_r,
        BLOCK_I=block_i,
    )
    return out_RI


def swiglu_prob_backward(
    grad_RI: Tensor, h_RH: Tensor, probs_R: Tensor, *, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `swiglu.swiglu_prob_backward`."""
    max_rows, num_channels = grad_RI.shape
    grad_RI, h_RH, probs_R = grad_RI.contiguous(), h_RH.contiguous(), probs_R.contiguous()
    grad_h_RH, grad_probs_R, out_RI = (torch.empty_like(x) for x in (h_RH, probs_R, grad_RI))
    block_i = min(CHANNELS_PER_PROGRAM, triton.next_power_of_2(num_channels))
    block_r = NUMBERS_PER_BACKWARD_STEP // block_i
    _backward_kernel[(triton.cdiv(max_rows, block_r),)](
        grad_RI,
        h_RH,
        probs_R,
        grad_h_RH,
        grad_probs_R,
        out_RI,
        num_rows,
        max_rows,
        num_channels,
        BLOCK_R=block_r,
        BLOCK_I=block_i,
    )
    return grad_h_RH, grad_probs_R, out_RI
