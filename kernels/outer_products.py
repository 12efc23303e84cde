"""Weight gradients of a grouped product, added to FP32 accumulators.

Shapes: R rows sorted by expert, M and N the two sizes of a weight, E experts of this rank.
"""

from torch import Tensor

from lightning_moe_strategy.kernels.on_cuda import HALF, triton_on_cuda


@triton_on_cuda("triton_outer_products", dtypes=HALF)
def add_outer_products(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor, accumulated_EMN: Tensor) -> None:
    """Per expert, ``accumulated_EMN += left^T right`` over its rows, in place.

    Products are exact and add up in FP32, `accumulated_EMN`'s dtype; ``F.grouped_mm`` would round each sum to the
    dtype of the rows before it is added. Expert e owns the rows ``offsets_E[e-1]:offsets_E[e]`` (int32); rows from
    ``offsets_E[-1]`` on are never read, and an expert without rows is left as it is.
    """
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        dtype = accumulated_EMN.dtype
        accumulated_EMN[expert].addmm_(left_RM[start:end].to(dtype).t(), right_RN[start:end].to(dtype))
        start = end
