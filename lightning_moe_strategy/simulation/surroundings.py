"""What a simulated step needs around it, because its tensors are fake and on the CPU."""

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_moe_strategy import _torch_compat
from lightning_moe_strategy.kernels import ragged_rows, swiglu
from lightning_moe_strategy.simulation.step import class_name


class GroupedProducts(_torch_compat.OperationMode):
    """Shapes of grouped matrix products in FP32, which torch computes on CPU but has no shapes for (2.13)."""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is not torch.ops.aten._grouped_mm.default or args[0].dtype != torch.float32:
            return operation(*args, **kwargs)
        left, right, offsets_E = (*args, kwargs.get("offs"))[:3]
        rows, columns = left.shape[0], right.shape[-1]
        shape = (rows, columns) if right.dim() == 3 else (offsets_E.shape[0], rows, columns)
        return left.new_empty(shape)


@contextmanager
def kernels_of(accelerator: Literal["gpu", "cpu"]) -> Generator[None, None, None]:
    """Fake tensors are on the CPU: what works through blocks takes those of a GPU, or none where a kernel has none."""
    block, add_in_blocks = swiglu.CPU_BLOCK_NUMBERS, ragged_rows.add_in_blocks
    if accelerator == "gpu":
        swiglu.CPU_BLOCK_NUMBERS = swiglu.CUDA_BLOCK_NUMBERS
        ragged_rows.add_in_blocks = _sums_alone
    try:
        yield
    finally:
        swiglu.CPU_BLOCK_NUMBERS, ragged_rows.add_in_blocks = block, add_in_blocks


def _sums_alone(rows_RD: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    return rows_RD.new_empty(len(row_of_slot_TK), rows_RD.shape[1])


@contextmanager
def values_explained(module: nn.Module) -> Generator[None, None, None]:
    """An error about tensors without values, in the words of somebody who wrote a model."""
    try:
        yield
    except _torch_compat.needs_values() as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        package = str(Path(__file__).parents[1])
        own = [frame for frame in frames if not frame.filename.startswith(package)] or frames
        where = f"{own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`"
        raise RuntimeError(
            f"{class_name(module)} cannot be simulated: {where} needs the values of a tensor ({error}), and a "
            "simulation has shapes alone. Compute it without reading values (no .item(), no `if` on a tensor, no "
            "indexing by a mask), or measure this model on real ranks."
        ) from error
