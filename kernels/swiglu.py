"""SwiGLU times the routing probability, and its gradient; FP32 inside, whatever the dtype of the rows.

Shapes: R rows, I intermediate size, H = 2*I (gate first, then up). Neither function records a graph.

``num_rows``, int32 [1] on the device of the rows, says that fewer than R are filled: those from there on are neither
read nor written. The host does not wait for the number.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import FLOATS, triton_on_cuda

# The backward has eight temporaries of R*I numbers. In blocks of this many (512 KiB in FP32) they stay in the
# cache and cause no page faults: 9.1 -> 1.6 ms for R 4096, I 128 on one EPYC core; blocks of 2**15 take 1.9 ms.
CPU_BLOCK_NUMBERS = 2**17

# On a GPU the blocks bound memory: seven FP32 temporaries of 2**24 numbers are 0.47 GB, where GLM-5.2's rows of one
# layer at 1M tokens took 7.5 GB balanced and 240 GB at worst. A block is 1 ms of memory traffic to 0.1 ms of launches.
CUDA_BLOCK_NUMBERS = 2**24


@triton_on_cuda("triton_swiglu", dtypes=FLOATS)
def swiglu_prob(h_RH: Tensor, probs_R: Tensor, *, num_rows: Tensor | None = None) -> Tensor:
    """``silu(gate) * up * prob`` in the dtype of ``h_RH``, rounded once."""
    activated_RI = h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // 2)
    for rows in _blocks(activated_RI, num_rows):
        gate_RI, up_RI = _at_least_fp32(h_RH[rows]).chunk(2, dim=-1)
        block_RI = torch.nn.functional.silu(gate_RI)
        activated_RI[rows] = block_RI.mul_(up_RI).mul_(probs_R[rows].unsqueeze(-1))
    return activated_RI


@triton_on_cuda("triton_swiglu", dtypes=FLOATS)
def swiglu_prob_backward(
    grad_RI: Tensor, h_RH: Tensor, probs_R: Tensor, *, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `swiglu_prob` for ``h_RH`` and ``probs_R``, and its output again.

    The output is made anew from ``h_RH``: the down projection's weight gradient needs it, and keeping it
    would cost R*I numbers more. The gradient of a probability needs no product of the down projection: it is
    the dot product of the incoming row with ``silu(gate) * up``.
    """
    grad_h_RH, activated_RI, grad_probs_R = map(torch.empty_like, (h_RH, grad_RI, probs_R))
    for rows in _blocks(grad_RI, num_rows):
        _backward_of_block(
            (grad_RI[rows], h_RH[rows], probs_R[rows]),
            (grad_h_RH[rows], grad_probs_R[rows], activated_RI[rows]),
        )
    return grad_h_RH, grad_probs_R, activated_RI


def _blocks(rows_RI: Tensor, num_rows: Tensor | None) -> Iterator[slice]:
    """Rows that are worked on together."""
    max_rows, intermediate_size = rows_RI.shape
    length = max(1, (CPU_BLOCK_NUMBERS if rows_RI.is_cpu else CUDA_BLOCK_NUMBERS) // intermediate_size)
    end = max_rows if num_rows is None else _filled(num_rows, max_rows)
    return (slice(start, min(end, start + length)) for start in range(0, end, length))


def _filled(num_rows: Tensor, max_rows: int) -> int:
    """All rows where the number cannot be read for nothing: what comes of the others is nobody's."""
    is_on_host = type(num_rows) is Tensor and num_rows.is_cpu and not torch.compiler.is_compiling()
    return min(max_rows, int(num_rows)) if is_on_host else max_rows


def _backward_of_block(inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    grad_RI, h_RH, probs_R = inputs
    grad_h_RH, grad_probs_R, activated_RI = outputs
    gate_RI, up_RI = _at_least_fp32(h_RH).chunk(2, dim=-1)
    grad_gate_RI, grad_up_RI = grad_h_RH.chunk(2, dim=-1)
    sigmoid_RI = torch.sigmoid(gate_RI)
    silu_RI = gate_RI * sigmoid_RI
    product_RI = silu_RI * up_RI
    grad_RI = _at_least_fp32(grad_RI)
    grad_probs_R.copy_(torch.linalg.vecdot(grad_RI, product_RI))
    activated_RI.copy_(product_RI.mul_(probs_R.unsqueeze(-1)))
    grad_RI = grad_RI * probs_R.unsqueeze(-1)
    # silu' = sigmoid + silu * (1 - sigmoid)
    grad_gate_RI.copy_(sigmoid_RI.addcmul_(silu_RI, 1 - sigmoid_RI).mul_(up_RI).mul_(grad_RI))
    grad_up_RI.copy_(silu_RI.mul_(grad_RI))


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
