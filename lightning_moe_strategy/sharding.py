"""Shard a module: dense units over (d_rep, fsdp x cp), experts over ep and then (e_rep, e_fsdp).

Every gradient is a sum: FSDP neither divides nor averages on any mesh, so dense and expert gradients need no
factors of their own (the strategy divides once, by the number of tokens of the whole step).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_moe_strategy._torch_compat import is_unsharded
from lightning_moe_strategy.kernels.outer_products import pass_fp32_gradients
from lightning_moe_strategy.mesh import DenseMeshes, ExpertMeshes
from lightning_moe_strategy.units import Unit, UnitKind


def shard(
    units: Sequence[Unit], *, dense: DenseMeshes, expert: ExpertMeshes, compute_dtype: torch.dtype | None
) -> None:
    """Shard every unit in place, innermost first. The last unit is the root.

    ``compute_dtype`` None computes in the dtype of the parameters; otherwise parameters are gathered in it and
    gradients are reduced in FP32; those of experts are FP32 before that, and never rounded. One rank
    with one dtype has nothing to gather, cast or reduce: it is left alone.
    """
    if dist.get_world_size() == 1 and compute_dtype is None:
        return
    for unit in sorted(units, key=lambda unit: unit.depth, reverse=True):
        is_experts, is_lookup = unit.kind == "experts", _is_lookup(unit.module)
        if is_experts:
            spread_experts(unit.module, expert.ep_mesh)
        fully_shard(
            unit.module,
            mesh=expert.shard_mesh if is_experts else dense.shard_mesh,
            # True at the root too: nothing stays unsharded after an evaluation.
            reshard_after_forward=True,
            shard_placement_fn=_experts_placement(expert) if is_experts else None,
            mp_policy=mixed_precision_policy(unit.kind, compute_dtype),
        )
        assert isinstance(unit.module, FSDPModule)
        unit.module.set_gradient_divide_factor(1.0)
        unit.module.set_unshard_in_backward(not is_lookup)
        if is_experts and compute_dtype is not None:
            # After FSDP's own hook, so on gathered parameters.
            unit.module.register_forward_pre_hook(_show_local_experts)
        # gloo has no PREMUL_SUM and NCCL's zeroes bf16 in some releases: plain SUM everywhere.
        unit.module.set_force_sum_reduction_for_comms(True)


def spread_experts(experts: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Keep this rank's experts: every parameter becomes a DTensor over ``ep`` whose global shape holds them all."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = parameter.data.chunk(ep_mesh.size())[ep_mesh.get_local_rank()].clone()
        spread = DTensor.from_local(local, ep_mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _is_lookup(module: nn.Module) -> bool:
    """Whether its backward pass reads none of its weights, so that they are not gathered for it.

    An embedding that looks up as torch's does: GLM-5.2's is 1.9 GB of NVLink a micro-batch.
    """
    is_torchs = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return is_torchs and "forward" not in vars(module)


def _show_local_experts(experts: nn.Module, args: object) -> None:
    """Replace gathered parameters by this rank's part of them, until FSDP frees them; gradients get there in FP32.

    FSDP copies a gradient into the FP32 input of its reduce-scatter as soon as the layer's last one is there: twice the
    bytes of a BF16 gradient (GLM-5.2 at ep 64: 0.3 GB more for one layer), no rounding in between.
    """
    for name, parameter in experts._parameters.items():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.grad_dtype = torch.float32
            experts._parameters[name] = _LocalPart.apply(parameter)


class _LocalPart(torch.autograd.Function):
    """``to_local``, whose gradient may be of another dtype than the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        local = parameter.to_local()
        part = local.view_as(local)
        pass_fp32_gradients(ctx, part)
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride)


def mixed_precision_policy(kind: UnitKind, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """FP32 routers and norms; experts get their routing weights in FP32; the root leaves the user's batch as it is."""
    if compute_dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=torch.float32 if kind in ("router", "norm") else compute_dtype,
        reduce_dtype=torch.float32,
        # What follows a norm in its block is no unit, and nobody else would cast what it reads.
        output_dtype=compute_dtype if kind == "norm" else None,
        cast_forward_inputs=kind in ("block", "outer", "router", "norm"),
    )


def synchronize_initial_state(module: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does: ranks may have been seeded differently."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and not isinstance(tensor, DTensor):
                on_device = tensor.detach().to(device)
                dist.broadcast(on_device, src=0)
                tensor.copy_(on_device)


def unsharded_units(units: Sequence[Unit]) -> list[str]:
    """Names of the units whose full parameters are in memory now."""
    return [unit.name for unit in units if isinstance(unit.module, FSDPModule) and is_unsharded(unit.module)]


def _experts_placement(expert: ExpertMeshes) -> Callable[[nn.Parameter], Shard | None]:
    """Whole experts per e_fsdp rank when they divide evenly, else the last dim, else uneven experts.

    The last dim and not dim 1: a gate_up projection packs two matrices along dim 1, and loaders that shard them
    one by one put other rows there than a plain cut does.
    """
    e_fsdp = expert.shard_mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard | None:
        local_experts = parameter.shape[0] // expert.ep_mesh.size()
        last = parameter.dim() - 1
        if local_experts % e_fsdp and last > 1 and parameter.shape[last] % e_fsdp == 0:
            return Shard(last)
        return None

    return place


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
