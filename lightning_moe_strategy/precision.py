"""Precision on two meshes: FSDP's mixed precision instead of autocast, gradient clipping over both meshes."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_strategy._lightning_compat import LightningModule, Precision, rank_zero_warn
from lightning_moe_strategy.sharding import local_tensor

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]


class MeshPrecision(Precision):
    """``Trainer(precision=...)`` for the strategy: ``32-true``, ``bf16-mixed`` or ``bf16-true``.

    ``bf16-mixed`` keeps FP32 master weights and optimizer state, gathers and computes in BF16 and reduces gradients
    in FP32. ``bf16-true`` keeps BF16 weights only: half the memory, and small updates round away.

    Attributes:
        last_gradient_norm: total norm before the last clipping, to be logged; None before the first.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        loss_to_backward: Callable[[Tensor], Tensor] = lambda loss: loss,
        before_clipping: Callable[[], None] = lambda: None,
        error_if_nonfinite: bool = False,
    ) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"precision({precision!r}) must be one of {', '.join(map(repr, get_args(PrecisionName)))} with "
                "strategy 'fsdp_cp_ep'. FP16 needs loss scaling and FP8 its own kernels; neither is offered: use "
                "'bf16-mixed'."
            )
        self.precision = precision
        self.compute_dtype = None if precision == "32-true" else torch.bfloat16
        self.error_if_nonfinite = error_if_nonfinite
        self.last_gradient_norm: Tensor | None = None
        self._loss_to_backward = loss_to_backward
        self._before_clipping = before_clipping
        if precision == "bf16-true":
            rank_zero_warn(
                "precision='bf16-true' keeps no FP32 master weights: updates smaller than 1/256 of a weight are "
                "lost. Use 'bf16-mixed' to train from scratch."
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.precision == "bf16-true":
            for parameter in module.parameters():
                # Buffers keep their dtype: rotary frequencies and balance biases need FP32.
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        return module

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().backward(self._loss_to_backward(tensor), model, optimizer, *args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        self._before_clipping()
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        gradients = _gradients(optimizer)
        self.last_gradient_norm = norm = total_norm(gradients)
        if self.error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total gradient norm is {norm.item()}, so it cannot be clipped to {clip_val}. Look for a loss "
                "or an input that is not finite, or allow it with error_if_nonfinite=False."
            )
        if gradients:
            factor = torch.clamp(clip_val / (norm + 1e-6), max=1.0)
            torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        for gradient in _gradients(optimizer):
            local_tensor(gradient).clamp_(-clip_val, clip_val)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all gradients of all ranks, each element counted once, FP32. One all-reduce.

    Every rank of the world must call it, with or without gradients of its own. Summed in float64, so that squares
    of huge finite FP32 values do not overflow.
    """
    gradients = list(gradients)
    device = local_tensor(gradients[0]).device if gradients else _communication_device()
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack(torch._foreach_norm([local_tensor(g) for g in gradients], dtype=torch.float64))
        replicas = torch.tensor([_num_replicas(g) for g in gradients], dtype=torch.float64, device=device)
        squares = (norms.square() / replicas).sum()
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt().float()


def _num_replicas(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    num_replicas = 1
    for degree, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        if placement.is_replicate():
            num_replicas *= degree
    return num_replicas


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _communication_device() -> torch.device:
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
