"""Place a module on the ranks: adapt it, shard it, give it values.

This is all that the strategy does to a model, in the order in which it is done; nothing here knows of Lightning.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe_strategy import _torch_compat
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.expert_parallel.dispatch import (
    AllToAllDispatcher,
    AssumedRouting,
    EPDispatcher,
    LocalDispatcher,
)
from lightning_moe_strategy.expert_parallel.experts import attach
from lightning_moe_strategy.initialization import materialize
from lightning_moe_strategy.mesh import (
    DenseMeshes,
    ExpertMeshes,
    ParallelDims,
    ResolvedDims,
    build_expert_meshes,
)
from lightning_moe_strategy.recompute import Recompute, recompute_blocks
from lightning_moe_strategy.sharding import shard, synchronize_initial_state
from lightning_moe_strategy.units import Unit, find_blocks, plan_units

_ATTRIBUTE = "_fsdp_cp_ep_placement"


@dataclass(kw_only=True)
class Placement:
    """How one module lies on the ranks. It stays with the module: a second Trainer finds it there."""

    requested: ParallelDims
    """As the user gave the degrees."""
    dims: ResolvedDims
    dense: DenseMeshes
    context_parallel: ContextParallel
    expert: ExpertMeshes | None = None
    """None until the module is placed: ep may depend on its number of experts."""
    experts: Mapping[str, nn.Module] = field(default_factory=dict)
    """Every layer's experts by name."""
    units: tuple[Unit, ...] = ()
    """What is gathered and freed together, in the order of ``named_modules``; the root first."""
    precision: str = ""
    """The name the module was sharded with."""
    recompute: Recompute = "none"
    """What the backward pass computes again."""
    assumed_routing: AssumedRouting | None = None
    """For a simulation: where tokens go, when they have no values that say so."""


def placement_of(module: nn.Module) -> Placement | None:
    """The placement of a module that ``place`` has sharded."""
    return getattr(module, _ATTRIBUTE, None)


def common_num_experts(experts: Mapping[str, nn.Module]) -> int | None:
    """What ep must divide: the number of experts, the greatest common divisor where layers differ."""
    counts = [_num_experts(module) for module in experts.values()]
    return math.gcd(*counts) if counts else None


def place(
    module: nn.Module,
    placement: Placement,
    *,
    device: torch.device,
    timeout: timedelta,
    compute_dtype: torch.dtype | None,
    init_seed: int,
    values_will_be_loaded: bool = False,
) -> None:
    """Make ``module`` run on this rank's share of its parameters, sequences and experts. In place.

    ``placement`` holds the degrees, the dense meshes and the experts; the rest is filled in. ``init_seed``, equal on
    all ranks, is for what was built on the meta device; everything else starts as it is on rank 0.

    Raises:
        ValueError: the model's attention cannot be split exactly under cp, or it recomputes its blocks itself.
        RuntimeError: a tensor on the meta device has no initialiser and no checkpoint will give its value.
    """
    adapt_and_shard(module, placement, device=device, timeout=timeout, compute_dtype=compute_dtype)
    materialize(
        module,
        device,
        seed=init_seed,
        experts=placement.experts,
        values_will_be_loaded=values_will_be_loaded,
    )
    finish(module, placement)


def adapt_and_shard(
    module: nn.Module,
    placement: Placement,
    *,
    device: torch.device,
    timeout: timedelta,
    compute_dtype: torch.dtype | None,
) -> None:
    """All of ``place`` that needs no values: what is on the meta device stays there."""
    dims, dense, blocks = placement.dims, placement.dense, find_blocks(module)
    if dims.cp > 1:
        adapt_attention(module, blocks, placement.context_parallel)
    placement.expert = expert = build_expert_meshes(dims, device.type, timeout)
    for experts in placement.experts.values():
        attach(experts, _dispatcher(experts, expert, placement.assumed_routing))
    if placement.recompute == "block":
        recompute_blocks(module, blocks, placement.experts)
    synchronize_initial_state(module, device)
    # Under one dtype for all, a router needs no gather of its own.
    placement.units = plan_units(module, placement.experts, separate_routers=compute_dtype is not None)
    shard(placement.units, dense=dense, expert=expert, compute_dtype=compute_dtype)


def finish(module: nn.Module, placement: Placement) -> None:
    """The end of ``place``, once every tensor is on its device."""
    if isinstance(module, FSDPModule):
        _torch_compat.initialize_fsdp_root(module)
    # Past nn.Module.__setattr__: the placement holds modules and is no submodule.
    object.__setattr__(module, _ATTRIBUTE, placement)


def _dispatcher(experts: nn.Module, expert: ExpertMeshes, assumed_routing: AssumedRouting | None) -> EPDispatcher:
    group: dist.ProcessGroup = expert.ep_mesh.get_group()
    num_experts = _num_experts(experts)
    if group.size() == 1:
        return LocalDispatcher(num_experts)
    return AllToAllDispatcher(num_experts, group, assumed_routing)


def _num_experts(experts: nn.Module) -> int:
    return int(experts.num_experts)  # type: ignore[arg-type]
