"""What a rank does with the rows it was sent: our kernel for gated SwiGLU experts, a module's own math otherwise.

Shapes: R rows sorted by local expert, D hidden size, L experts of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy.kernels.expert_mlp import expert_mlp, why_not_grouped_mm
from lightning_moe_strategy.models.moe import Experts


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """The rows of one forward on this rank, every one with the probability its expert applies."""

    rows_RD: Tensor
    probs_R: Tensor
    offsets_L: Tensor
    weights_dtype: torch.dtype
    """Of the router's weights: a module's own math gets the probabilities as it always has."""
    gathered_from: tuple[Tensor, Tensor] | None = None
    """``(x_TD, token_of_row_R)`` where the rows are copies of tokens that are kept in their place."""

    end_early: bool = False
    """Whether rows from ``offsets_L[-1]`` on, if there are any, hold anything, and nobody reads their results."""

    @property
    def expert_of_row_R(self) -> Tensor:
        positions_R = torch.arange(self.rows_RD.shape[0], dtype=torch.int32, device=self.rows_RD.device)
        expert_of_row_R = torch.searchsorted(self.offsets_L, positions_R, right=True)
        return expert_of_row_R.clamp_(max=self.offsets_L.shape[0] - 1) if self.end_early else expert_of_row_R


# Quantized experts keep their own math.
_COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LocalMath = Callable[[nn.Module, LocalRows], Tensor]
"""From a module that shows this rank's parameters and its rows to their results, [R, D]."""


def choose_local_math(experts: nn.Module) -> LocalMath:
    """The fastest math that computes what the module's own forward does."""
    if is_gated_swiglu(experts):
        return _gated_swiglu
    if _is_hugging_face(experts):
        return _hugging_face
    instance_forward = experts.__dict__.get("forward")

    def own(module: nn.Module, rows: LocalRows) -> Tensor:
        return _as_top_1(instance_forward or partial(type(module).forward, module), rows)

    return own


def is_gated_swiglu(experts: nn.Module) -> bool:
    """Whether it computes ``down(silu(gate) * up)`` from ``gate_up_proj`` [E, 2I, D] and ``down_proj`` [E, D, I].

    True for our own experts, and for those of transformers whose flags, gate and activation are the defaults.
    A subclass with another forward is not one.
    """
    if "forward" in experts.__dict__:
        return False
    if isinstance(experts, Experts):
        return type(experts).forward is Experts.forward
    if not _is_hugging_face(experts):
        return False
    gate: Any = type(experts)
    return (
        {name for name, _ in experts.named_parameters()} == {"gate_up_proj", "down_proj"}
        and all((experts.has_gate, experts.is_concatenated))
        and not any((experts.is_transposed, experts.has_bias, experts.has_post_expert_norm))
        and gate._apply_gate.__name__ == "_default_apply_gate"
        and _is_silu(experts.act_fn)
        and all(parameter.dtype in _COMPUTE_DTYPES for parameter in experts.parameters())
    )


def _is_hugging_face(experts: nn.Module) -> bool:
    """Decorated with transformers' ``@use_experts_implementation`` and running the forward that it installed."""
    decorated = hasattr(experts, "_is_expert_parallel") and hasattr(type(experts).forward, "__wrapped__")
    return decorated and "forward" not in experts.__dict__


def _is_silu(activation: object) -> bool:
    is_module = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    return is_module or activation is torch.nn.functional.silu


def _gated_swiglu(experts: nn.Module, rows: LocalRows) -> Tensor:
    # Not get_parameter: while a chunk runs, what stands there is a plain tensor.
    gate_up_LHD, down_LDI = experts._parameters["gate_up_proj"], experts._parameters["down_proj"]
    assert gate_up_LHD is not None and down_LDI is not None
    same_dtype = rows.rows_RD.dtype == gate_up_LHD.dtype
    return expert_mlp(
        rows.rows_RD.to(gate_up_LHD.dtype),
        rows.probs_R,
        gate_up_LHD,
        down_LDI,
        rows.offsets_L,
        gathered_from=rows.gathered_from if same_dtype else None,
    )


def _hugging_face(experts: nn.Module, rows: LocalRows) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    sizes = {size for parameter in experts.parameters() if parameter.dim() == 3 for size in parameter.shape[1:]}
    dtype = next(experts.parameters()).dtype
    forward: Callable[..., Tensor] = grouped_mm_experts_forward
    if why_not_grouped_mm(dtype, *sizes) is not None:
        forward = type(experts).forward.__wrapped__  # type: ignore[attr-defined]  # the loop of the class
    return _as_top_1(partial(forward, experts), rows)


def _as_top_1(forward: Callable[..., Tensor], rows: LocalRows) -> Tensor:
    """Rows as tokens that each chose one expert."""
    rows_RD, ids_R1 = rows.rows_RD, rows.expert_of_row_R.unsqueeze(1)
    probs_R1 = rows.probs_R.to(rows.weights_dtype).unsqueeze(1)
    if rows.end_early and rows_RD.shape[0]:
        # It computes all rows, and what memory happens to hold would reach the gradients of its parameters: zeros in,
        # and zeros for gradients of their results.
        positions_R1 = torch.arange(rows_RD.shape[0], dtype=torch.int32, device=rows_RD.device).unsqueeze(1)
        is_empty_R1 = positions_R1 >= rows.offsets_L[-1]
        rows_RD, probs_R1 = (x.masked_fill(is_empty_R1, 0) for x in (rows_RD, probs_R1))
        return forward(rows_RD, ids_R1, probs_R1).masked_fill(is_empty_R1, 0)
    if rows_RD.shape[0]:
        return forward(rows_RD, ids_R1, probs_R1)
    # A rank without rows runs one row of zeros and drops it: its parameters get a gradient of zeros, not
    # none, and FSDP's reduce-scatter runs as on the other ranks.
    one_row = rows_RD.new_zeros(1, rows_RD.shape[1]), ids_R1.new_zeros(1, 1), probs_R1.new_zeros(1, 1)
    return forward(*one_row)[:0]
