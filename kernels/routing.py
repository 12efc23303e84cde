"""Where each token's rows go when they are sorted by expert, and the copies that take them there and back.

Shapes: T tokens, K experts per token, E experts, D hidden size, R rows (T*K where nothing leaves the rank).
A slot is one (token, k) pair, numbered ``token * K + k``; a row is a slot after sorting. Indices are int32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe_strategy.kernels.on_cuda import FLOATS, triton_on_cuda


class Routing(NamedTuple):
    """The sort of T*K slots by expert. Stable: within an expert, rows keep the order (token, k)."""

    slot_of_row_R: Tensor
    token_of_row_R: Tensor
    row_of_slot_TK: Tensor
    offsets_E: Tensor
    """End of each expert's rows: expert e owns rows ``offsets_E[e - 1]`` to ``offsets_E[e] - 1``."""


@triton_on_cuda("triton_routing")
def sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> Routing:
    """Rows of every expert side by side, without reading anything on the host.

    ``expert_ids_TK``: any integer dtype, each id in [0, num_experts).
    """
    sorted_ids_R, slot_of_row_R = expert_ids_TK.reshape(-1).int().sort(stable=True)
    experts_E = torch.arange(num_experts, dtype=torch.int32, device=expert_ids_TK.device)
    # Counting by bisection: bincount waits for the device, one_hot makes T*K*E numbers.
    offsets_E = torch.searchsorted(sorted_ids_R, experts_E, right=True, out_int32=True)
    row_of_slot_R = torch.empty_like(sorted_ids_R)
    row_of_slot_R[slot_of_row_R] = torch.arange(slot_of_row_R.shape[0], dtype=torch.int32, device=expert_ids_TK.device)
    slot_of_row_R = slot_of_row_R.int()
    top_k = expert_ids_TK.shape[1]
    return Routing(slot_of_row_R, slot_of_row_R // top_k, row_of_slot_R.view(-1, top_k), offsets_E)


def gather_rows(x_TD: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """``rows_RD = x_TD[token_of_row_R]``, whose gradient sums a token's rows in FP32, k ascending.

    ``row_of_slot_TK`` says the same the other way round: ``token_of_row_R[row_of_slot_TK[t, k]] == t``.
    With K = 1 this is a permutation. Nothing of size D is kept for the backward.
    """
    rows_RD: Tensor = _GatherRows.apply(  # type: ignore[no-untyped-call]
        x_TD, token_of_row_R, row_of_slot_TK
    )
    return rows_RD


def sum_rows(rows_RD: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """``y_TD``: the K rows of each token, added in FP32, k ascending, and cast once.

    The transpose of `gather_rows`.
    """
    y_TD: Tensor = _SumRows.apply(  # type: ignore[no-untyped-call]
        rows_RD, token_of_row_R, row_of_slot_TK
    )
    return y_TD


@triton_on_cuda("triton_rows")
def spread_rows(x_TD: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """`gather_rows` without a gradient."""
    return x_TD.index_select(0, token_of_row_R)


@triton_on_cuda("triton_rows", dtypes=FLOATS)
def add_rows(rows_RD: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """`sum_rows` without a gradient."""
    first, *others = row_of_slot_TK.unbind(1)
    if not others:
        return rows_RD.index_select(0, first)
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    if rows_RD.is_cpu and rows_RD.dtype == dtype:
        # It adds in the order of its index, there alone, and makes no copies of the rows.
        return nn.functional.embedding_bag(row_of_slot_TK, rows_RD, mode="sum")
    # One add per k fixes the order on every device; sum(1) leaves it to the kernel, index_add to chance.
    y_TD = rows_RD.index_select(0, first).to(dtype)
    for row_of_token_T in others:
        y_TD += rows_RD.index_select(0, row_of_token_T)
    return y_TD.to(rows_RD.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot_TK)
        return spread_rows(x_TD, token_of_row_R, row_of_slot_TK)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_of_slot_TK,) = ctx.saved_tensors
        return add_rows(grad_RD, row_of_slot_TK), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row_R, row_of_slot_TK)
        return add_rows(rows_RD, row_of_slot_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return spread_rows(grad_TD, *ctx.saved_tensors), None, None
