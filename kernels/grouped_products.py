"""Products of rows sorted by expert with the weights of their experts, and which implementation computes them.

``F.grouped_mm`` does, on CPU and CUDA alike. On a GPU `measure_products` lets `persistent_products` take its place
where it is faster. The two add in another order, so their results differ by FP32 noise before they are rounded: with
measuring on, two runs, two ranks, or two dispatchers that bring other numbers of rows need not agree bit for bit. It is
off unless asked for, and nothing then depends on a stopwatch. Products in FP32 and float64 are never measured.

Shapes: R rows sorted by expert, T tokens, M and N the two sizes of a weight, E experts of this rank.
"""

import functools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import HALF, triton_on_cuda

# F.grouped_mm asks this of every row stride, on CPU and CUDA alike (torch 2.13).
GROUPED_MM_ALIGNMENT_BYTES = 16
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

NUM_TIMED_RUNS = 5

Implementation = Literal["grouped_mm", "persistent"]


@dataclass(frozen=True, kw_only=True)
class ProductKind:
    """Products that are measured once, together."""

    is_gathered: bool
    """Rows are copies of tokens, and could be read there."""
    is_transposed: bool
    """The weights lie in memory as [E, N, M]."""
    dtype: torch.dtype
    num_experts: int
    M: int
    N: int
    max_rows: int
    """The power of two that is not less than R."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Medians of a few runs, taken on this rank's GPU during training."""

    grouped_mm_seconds: float
    persistent_seconds: float

    @property
    def faster(self) -> Implementation:
        return "persistent" if self.persistent_seconds < self.grouped_mm_seconds else "grouped_mm"


class _Choice:
    """The state of this process: one GPU, one choice."""

    is_measured = False
    table: dict[ProductKind, Measurement] = {}


def measure_products(enabled: bool = True) -> None:
    """From now on time both implementations of a BF16 or FP16 product at its first use on a GPU, and keep the faster.

    The first step takes longer by a few runs of each, whose results take memory beside the one in use. False: back to
    ``F.grouped_mm`` for all, with nothing remembered. See the head of this file for what is given up.
    """
    _Choice.is_measured, _Choice.table = enabled, {}


def measured_products() -> dict[ProductKind, Measurement]:
    """What was measured so far, and so chosen."""
    return dict(_Choice.table)


def rows_times_weights(
    rows_RM: Tensor, weights_EMN: Tensor, offsets_E: Tensor, *, gathered_from: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Each row times the weights of its expert: [R, N].

    Expert e owns the rows ``offsets_E[e-1]:offsets_E[e]`` (int32); of rows from ``offsets_E[-1]`` on no result depends,
    and theirs are undefined. ``gathered_from``, ``(x_TM, token_of_row_R)``, says where the rows were copied from.
    Sizes and dtypes that ``F.grouped_mm`` does not take run one product per expert.
    """
    if rows_RM.shape[0] == 0:
        return rows_RM.new_empty(0, weights_EMN.shape[2])
    if _Choice.is_measured and _can_be_measured(rows_RM):
        return _run_the_faster(rows_RM, weights_EMN, offsets_E, gathered_from)
    return _torch_product(rows_RM, weights_EMN, offsets_E)


@triton_on_cuda("triton_grouped_products", dtypes=HALF)
def persistent_products(
    rows_TM: Tensor, weights_EMN: Tensor, offsets_E: Tensor, token_of_row_R: Tensor | None = None
) -> Tensor:
    """`rows_times_weights` in one launch on tensor cores, which reads the offsets on the GPU.

    With ``token_of_row_R`` (int32) row r is ``rows_TM[token_of_row_R[r]]``: no copy of the rows is read.
    """
    rows_RM = rows_TM if token_of_row_R is None else rows_TM.index_select(0, token_of_row_R)
    return _torch_product(rows_RM, weights_EMN, offsets_E)


def outer_products_of_grouped_mm(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Per expert, left^T right over its rows: [E, M, N] in their dtype, exact zeros for an expert without rows."""
    num_rows, num_experts = left_RM.shape[0], offsets_E.shape[0]
    if num_rows and _takes_grouped_mm(left_RM.dtype, left_RM.shape[1], right_RN.shape[1]):
        return torch.nn.functional.grouped_mm(left_RM.t(), right_RN, offs=offsets_E)
    out_EMN = left_RM.new_zeros(num_experts, left_RM.shape[1], right_RN.shape[1])
    if num_rows:
        for expert, (start, end) in enumerate(_spans(offsets_E)):
            torch.mm(left_RM[start:end].t(), right_RN[start:end], out=out_EMN[expert])
    return out_EMN


def why_not_grouped_mm(dtype: torch.dtype, *sizes: int) -> str | None:
    """Why ``F.grouped_mm`` cannot multiply matrices with rows of these sizes, or None."""
    if dtype not in GROUPED_MM_DTYPES:
        return f"F.grouped_mm does not take {dtype}"
    for size in sizes:
        if size * dtype.itemsize % GROUPED_MM_ALIGNMENT_BYTES:
            multiple = GROUPED_MM_ALIGNMENT_BYTES // dtype.itemsize
            return f"{size} {dtype} are no multiple of 16 bytes; F.grouped_mm needs sizes in steps of {multiple}"
    return None


def _can_be_measured(rows_RM: Tensor) -> bool:
    """Only what runs on a GPU now: not what is traced, compiled or captured for later."""
    if type(rows_RM) is not Tensor or rows_RM.dtype not in HALF or torch.compiler.is_compiling():
        return False
    return rows_RM.is_cuda and not torch.cuda.is_current_stream_capturing()


def _run_the_faster(
    rows_RM: Tensor, weights_EMN: Tensor, offsets_E: Tensor, gathered_from: tuple[Tensor, Tensor] | None
) -> Tensor:
    num_experts, m, n = weights_EMN.shape
    kind = ProductKind(
        is_gathered=gathered_from is not None,
        is_transposed=weights_EMN.stride(1) == 1,
        dtype=rows_RM.dtype,
        num_experts=num_experts,
        M=m,
        N=n,
        max_rows=1 << (rows_RM.shape[0] - 1).bit_length(),
    )
    source_TM, token_of_row_R = gathered_from or (rows_RM, None)
    ours = functools.partial(persistent_products, source_TM, weights_EMN, offsets_E, token_of_row_R)
    theirs = functools.partial(_torch_product, rows_RM, weights_EMN, offsets_E)
    if kind not in _Choice.table:
        _Choice.table[kind] = _measured(theirs, ours)
    return ours() if _Choice.table[kind].faster == "persistent" else theirs()


def _measured(theirs: Callable[[], Tensor], ours: Callable[[], Tensor]) -> Measurement:
    runs = theirs, ours
    for run in runs:  # compiles
        run()
    # In turns: whatever else the GPU does meanwhile slows both.
    times = [[_seconds(run) for run in runs] for _ in range(NUM_TIMED_RUNS)]
    grouped_mm, persistent = (statistics.median(column) for column in zip(*times, strict=True))
    return Measurement(grouped_mm_seconds=grouped_mm, persistent_seconds=persistent)


def _seconds(run: Callable[[], Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _torch_product(rows_RM: Tensor, weights_EMN: Tensor, offsets_E: Tensor) -> Tensor:
    num_columns = weights_EMN.shape[2]
    if _takes_grouped_mm(rows_RM.dtype, rows_RM.shape[1], num_columns):
        return torch.nn.functional.grouped_mm(rows_RM, weights_EMN, offs=offsets_E)
    out_RN = rows_RM.new_zeros(rows_RM.shape[0], num_columns)
    for expert, (start, end) in enumerate(_spans(offsets_E)):
        torch.mm(rows_RM[start:end], weights_EMN[expert], out=out_RN[start:end])
    return out_RN


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
