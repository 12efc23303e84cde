"""Precision on two meshes: FSDP's mixed precision instead of autocast, gradient clipping over both meshes."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_strategy._lightning_compat import (
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    Precision,
    rank_zero_warn,
    wrap_hooks_before_step,
)
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.whole_scalars import WholeScalars

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]

_ALIASES = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed", "64": "64-true"}


class MeshPrecision(Precision):
    """``Trainer(precision=...)`` for the strategy: ``32-true``, ``bf16-mixed`` or ``bf16-true``.

    ``bf16-mixed`` keeps FP32 master weights and optimizer state, gathers and computes in BF16 and reduces gradients
    in FP32. ``bf16-true`` keeps BF16 weights only: half the memory, and small updates round away. Routers compute in
    FP32 in both, and under ``bf16-mixed`` norms do, if ``fp32_norms`` says so (see the strategy).

    A user's own precision derives from this class and is given as ``Trainer(plugins=[...])``.

    Attributes:
        last_gradient_norm: total norm before the last clipping, to be logged; None before the first.

    Raises:
        ValueError: a precision that is not offered, or FP32 norms among BF16 weights.
    """

    def __init__(
        self,
        precision: PrecisionName | str = "32-true",
        *,
        loss_to_backward: Callable[[Tensor], Tensor] = lambda loss: loss,
        before_clipping: Callable[[], None] = lambda: None,
        error_if_nonfinite: bool = False,
        fp32_norms: bool = False,
    ) -> None:
        self.precision = precision_name(precision)
        self.compute_dtype = None if self.precision == "32-true" else torch.bfloat16
        self.last_gradient_norm: Tensor | None = None
        self.fp32_norms = self.error_if_nonfinite = False
        self._serve(loss_to_backward, before_clipping, error_if_nonfinite=error_if_nonfinite, fp32_norms=fp32_norms)
        wrap_hooks_before_step(self, WholeScalars)
        if self.precision == "bf16-true":
            rank_zero_warn(
                "precision='bf16-true' keeps no FP32 master weights: updates smaller than 1/256 of a weight are "
                "lost. Use 'bf16-mixed' to train from scratch."
            )

    @classmethod
    def taken_from(cls, plugin: Precision, **options: Any) -> "MeshPrecision":
        """What a Trainer's plugin asks for; one of this class goes on itself. ``options`` are those of the class.

        Raises:
            ValueError: it asks for what is not offered.
        """
        name = precision_name(plugin)
        if not isinstance(plugin, cls):
            return cls(name, **options)
        plugin._serve(**options)
        return plugin

    def _serve(
        self,
        loss_to_backward: Callable[[Tensor], Tensor],
        before_clipping: Callable[[], None],
        *,
        error_if_nonfinite: bool,
        fp32_norms: bool,
    ) -> None:
        self._loss_to_backward, self._before_clipping = loss_to_backward, before_clipping
        self.error_if_nonfinite |= error_if_nonfinite
        self.fp32_norms |= fp32_norms
        if self.fp32_norms and self.precision == "bf16-true":
            raise ValueError(
                "fp32_norms(True) needs FP32 weights to keep norms in, and precision is 'bf16-true'. Use 'bf16-mixed', "
                "or leave fp32_norms out."
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


def precision_name(asked: object) -> PrecisionName:
    """The name of what ``Trainer(precision=...)`` (a name, an alias) or ``Trainer(plugins=[...])`` asks for.

    Raises:
        ValueError: the strategy does not offer it; or a plugin of another kind, whose hooks would not run.
    """
    name = str(getattr(asked, "precision", asked))
    name = _ALIASES.get(name, name)
    offered: tuple[PrecisionName, ...] = get_args(PrecisionName)
    if name not in offered:
        raise ValueError(
            f"precision({name!r}) must be one of {', '.join(map(repr, offered))} with strategy 'fsdp_cp_ep'. FP16 "
            "needs loss scaling, FP64 and FP8 kernels of their own; none of them is offered: use 'bf16-mixed'."
        )
    known = (Precision, MixedPrecision, HalfPrecision)
    if isinstance(asked, Precision) and not isinstance(asked, MeshPrecision) and type(asked) not in known:
        raise ValueError(
            f"plugins: {type(asked).__name__} would be asked for its name ({name!r}) and nothing else, because "
            "strategy 'fsdp_cp_ep' casts, clips and steps on two meshes itself. Say precision="
            f"{name!r}, or derive your plugin from lightning_moe_strategy.precision.MeshPrecision."
        )
    return next(each for each in offered if each == name)


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
