"""Floating-point operations of matrix products and attention, as they are executed.

A multiply and an add count as two. A causal square of attention counts half: that is what a kernel computes.

Shapes: B batch, H heads, L queries, K keys, D channels of a query or key head, E channels of a value head.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from lightning_moe_strategy._torch_compat import in_checkpointed_region

aten = torch.ops.aten

ComputeKind = Literal["linear", "attention", "sparse_attention", "indexer"]
"""What runs at a rate of its own; see ``plan.time``."""

_NAMESPACE = "lightning_moe"
"""Of the package's own operations, whose formulas are in torch's registry."""


class ArithmeticWatch:
    """Counts FLOP by phase, module and operation."""

    def __init__(self) -> None:
        self.phase = ""
        self.flops: Counter[tuple[str, str, str]] = Counter()
        """By (phase, module, operation). What a backward pass computes again has the phase ``recompute``."""

    def observe(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, module: str
    ) -> tuple[str, int]:
        """The phase and FLOP of one operation, which belong to ``module``."""
        flops = _flops(operation, args, kwargs, result)
        if not flops:
            return self.phase, 0
        phase = "recompute" if self.phase == "backward" and in_checkpointed_region() else self.phase
        self.flops[phase, module, operation._opname] += flops
        return phase, flops


def compute_kind(operation: Any) -> ComputeKind:
    """At whose rate an operation runs."""
    name = operation._opname
    if operation.namespace == _NAMESPACE and name.startswith("select_keys"):
        return "indexer"
    if operation.namespace == _NAMESPACE and name.startswith("sparse_attention"):
        return "sparse_attention"
    return "attention" if "attention" in name else "linear"


def _flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = _FORMULAS.get(operation)
    if formula is not None:
        return formula(args)
    if operation.namespace != _NAMESPACE:
        return 0
    registered: Any = flop_registry.get(operation._overloadpacket)
    return 0 if registered is None else int(registered(*args, **kwargs, out_val=result))


def _product(left: int, right: int) -> Callable[[tuple[Any, ...]], int]:
    """[..., M, K] times [..., K, N], of the arguments with these indices."""
    return lambda args: 2 * int(args[left].numel()) * int(args[right].shape[-1])


def _grouped(args: tuple[Any, ...]) -> int:
    """[R, M] times [E, M, N] row by row, or [M, R] times [R, N] into [E, M, N]: R * M * N either way."""
    left, right = args[:2]
    return 2 * int(left.numel()) * int(right.shape[-1])


def _attention(args: tuple[Any, ...]) -> int:
    """scores and output: L * K * (D + E) each."""
    query, key, value = args[:3]
    is_causal = len(args) > 4 and bool(args[4])
    return _pairs(query, key, is_causal) * 2 * int(query.shape[-1] + value.shape[-1])


def _attention_backward(args: tuple[Any, ...]) -> int:
    """Scores again, and the gradients of query and key (D each), of scores and values (E each)."""
    _, query, key, value, _, _, _, is_causal, *_ = args
    return _pairs(query, key, is_causal) * 2 * int(3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query_BHLD: Any, key_BGKD: Any, is_causal: bool) -> int:
    batch, heads, queries = query_BHLD.shape[:3]
    pairs = batch * heads * queries * key_BGKD.shape[2]
    return int(pairs // 2 if is_causal else pairs)


_FORMULAS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten.mm.default: _product(0, 1),
    aten.mm.out: _product(0, 1),
    aten.addmm.default: _product(1, 2),
    aten.bmm.default: _product(0, 1),
    aten.baddbmm.default: _product(1, 2),
    aten._grouped_mm.default: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
