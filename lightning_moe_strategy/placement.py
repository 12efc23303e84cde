"""Place a module on the ranks: adapt it, shard it, give it values.

This is all that the strategy does to a model, in the order in which it is done; nothing here knows of Lightning.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_moe_strategy import _torch_compat
from lightning_moe_strategy.compiled_blocks import compile_blocks, keep_sparse_layers_eager
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.indexers import train_indexers
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.expert_parallel.chunks import Chunking
from lightning_moe_strategy.expert_parallel.dispatch import AssumedRouting, EPDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach
from lightning_moe_strategy.expert_parallel.low_rank import adapt_low_rank
from lightning_moe_strategy.expert_parallel.redundant import RedundantDispatcher
from lightning_moe_strategy.expert_parallel.registry import make_dispatcher
from lightning_moe_strategy.expert_parallel.shared_expert import run_shared_experts_ahead
from lightning_moe_strategy.host_agreement import host_group
from lightning_moe_strategy.hugging_face_weights.pretrained import load_pending, names_given, pending_weights
from lightning_moe_strategy.initialization import materialize
from lightning_moe_strategy.mesh import (
    DenseMeshes,
    ExpertMeshes,
    ResolvedDims,
    build_expert_meshes,
)
from lightning_moe_strategy.recompute import Recompute, recompute_blocks
from lightning_moe_strategy.sharding import shard, synchronize_initial_state
from lightning_moe_strategy.stale_parameters import remember_parameters
from lightning_moe_strategy.units import Unit, find_blocks, plan_units

_ATTRIBUTE = "_fsdp_cp_ep_placement"


@dataclass(kw_only=True)
class Placement:
    """How one module lies on the ranks. It stays with the module: a second Trainer finds it there."""

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
    settings: Mapping[str, object] = field(default_factory=dict)
    """As the user gave them, by name."""
    fp32_norms: bool = False
    """Whether norms compute in FP32 where the rest does not."""
    recompute: Recompute = "none"
    """What the backward pass computes again."""
    compile_options: Mapping[str, Any] | None = None
    """Arguments of ``torch.compile`` for every block; None leaves them as they are."""
    chunking: Chunking = Chunking()
    """How many of a layer's tokens go through its experts at a time."""
    max_imbalance: float | None = None
    """Rows of the busiest rank of ep over the mean, above which experts move to others. None: they stay at home."""
    dispatcher: str = "auto"
    """What brings tokens to their experts, by its name in the registry."""
    assumed_routing: AssumedRouting | None = None
    """For a simulation: where tokens go, when they have no values that say so."""


def placement_of(module: nn.Module) -> Placement | None:
    """The placement of a module that ``place`` has sharded."""
    return getattr(module, _ATTRIBUTE, None)


def require_same_settings(module: nn.Module, placement: Placement, settings: Mapping[str, object]) -> None:
    """For a module that an earlier Trainer has sharded.

    Raises:
        RuntimeError: parts of it were built anew since.
        ValueError: this Trainer asks for other settings.
    """
    is_sharded = isinstance(module, FSDPModule)
    if any(isinstance(parameter, DTensor) != is_sharded for parameter in module.parameters()):
        raise RuntimeError(
            "configure_model() replaced modules that are sharded already. Lightning calls it before every fit, "
            "validate, test and predict: return early in it when the model exists."
        )
    before = placement.settings
    changed = [f"{name} {before[name]!r}, now {asked!r}" for name, asked in settings.items() if before[name] != asked]
    if changed:
        raise ValueError(
            f"The model was sharded by an earlier Trainer with {'; '.join(changed)}. Use the same, or build the model "
            "anew."
        )


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
    all ranks, is for what was built on the meta device and has no pretrained weights; everything else starts as it is
    on rank 0.

    Raises:
        CheckpointError: pretrained weights that are not the model's.
        ValueError: the model's attention cannot be split exactly under cp, it recomputes its blocks itself, or it has
            no indexer and one is to be trained.
        RuntimeError: a tensor on the meta device has no initialiser and no checkpoint will give its value.
    """
    group = host_group(timeout)
    # A checkpoint that may lack weights is loaded over those of the folder.
    has_all = values_will_be_loaded and getattr(module, "strict_loading", True)
    pretrained = {} if has_all else pending_weights(module, group)
    adapt_and_shard(module, placement, device=device, timeout=timeout, compute_dtype=compute_dtype)
    materialize(
        module,
        device,
        seed=init_seed,
        experts=placement.experts,
        values_will_be_loaded=values_will_be_loaded,
        given=names_given(pretrained),
    )
    load_pending(pretrained, group)
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
    remember_parameters(module)
    dims, dense, blocks = placement.dims, placement.dense, find_blocks(module)
    trains_indexers = placement.context_parallel.indexer_loss is not None
    if trains_indexers:
        train_indexers(module)
    if placement.compile_options is not None:
        compile_blocks(module, blocks, placement.experts, placement.compile_options, cp=placement.context_parallel)
    if dims.cp > 1 or trains_indexers:
        adapt_attention(module, blocks, placement.context_parallel)
    placement.expert = expert = build_expert_meshes(dims, device.type, timeout)
    for experts in placement.experts.values():
        attach(experts, _dispatcher(experts, expert, placement), placement.chunking)
    adapt_low_rank(module, placement.experts, expert.ep_mesh.get_local_rank())
    run_shared_experts_ahead(module, placement.experts)
    if placement.compile_options is not None:
        keep_sparse_layers_eager(module, blocks, placement.experts)
    if placement.recompute != "none":
        recompute_blocks(
            module,
            blocks,
            placement.experts,
            indexers_are_trained=trains_indexers,
            keep_attention=placement.recompute == "selective",
        )
    synchronize_initial_state(module, device)
    # Under one dtype for all, a router needs no gather of its own.
    is_mixed = compute_dtype is not None
    placement.units = plan_units(
        module, placement.experts, separate_routers=is_mixed, separate_norms=is_mixed and placement.fp32_norms
    )
    shard(placement.units, dense=dense, expert=expert, compute_dtype=compute_dtype)


def finish(module: nn.Module, placement: Placement) -> None:
    """The end of ``place``, once every tensor is on its device."""
    if isinstance(module, FSDPModule):
        _torch_compat.initialize_fsdp_root(module)
    # Past nn.Module.__setattr__: the placement holds modules and is no submodule.
    object.__setattr__(module, _ATTRIBUTE, placement)


def _dispatcher(experts: nn.Module, expert: ExpertMeshes, placement: Placement) -> EPDispatcher:
    group: dist.ProcessGroup = expert.ep_mesh.get_group()
    num_experts = _num_experts(experts)
    if placement.max_imbalance is not None and group.size() > 1:
        return RedundantDispatcher(
            num_experts, group, placement.assumed_routing, max_imbalance=placement.max_imbalance, experts=experts
        )
    return make_dispatcher(placement.dispatcher, num_experts, group, placement.assumed_routing)


def _num_experts(experts: nn.Module) -> int:
    return int(experts.num_experts)  # type: ignore[arg-type]
