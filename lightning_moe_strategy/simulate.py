"""Run the real placement of a model at its real world size in one process without a GPU.

The process group is fake, so collectives return at once, and tensors have shapes and no values. Everything else is
the code that trains: meshes, context parallel attention, dispatch, sharding, prefetch, recompute, the mean over
tokens, clipping. What cannot be simulated is what reads the values of tensors, the routing above all: it is assumed.
"""

import gc
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy import _torch_compat
from lightning_moe_strategy.context_parallel.batch import (
    Key,
    MicroBatch,
    count_whole,
    find_sequences,
    refuse_what_cannot_be_split,
    split_items,
    whole_sequence,
)
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss
from lightning_moe_strategy.context_parallel.scope import ContextParallel, Shift
from lightning_moe_strategy.expert_parallel.assumed_routing import (
    RecordedTokens,
    RoutingName,
    routing_by_layer,
)
from lightning_moe_strategy.expert_parallel.chunks import Chunking, EPChunks
from lightning_moe_strategy.expert_parallel.dispatch import SpreadDispatcher
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of, find_experts, require_experts
from lightning_moe_strategy.mesh import ParallelDims, ResolvedDims, build_dense_meshes
from lightning_moe_strategy.placement import Placement, adapt_and_shard, common_num_experts
from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import group, ranks_per_domain
from lightning_moe_strategy.recompute import Recompute
from lightning_moe_strategy.simulation.report import Simulation, report
from lightning_moe_strategy.simulation.step import ClipGradients, Step
from lightning_moe_strategy.simulation.surroundings import GroupedProducts, kernels_of, values_explained
from lightning_moe_strategy.simulation.timeline import Timeline, time_step
from lightning_moe_strategy.simulation.watch import StepWatch

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(minutes=30)
_IGNORE_INDEX = -100
_AXES = ("d_rep", "fsdp", "cp", "cp_inter", "cp_intra", "fsdp_cp", "e_rep", "e_fsdp", "ep")


def simulate(
    make_module: Callable[[], nn.Module],
    dims: ParallelDims,
    batch: Mapping[str, Tensor],
    *,
    world_size: int,
    local_world_size: int,
    rank: int = 0,
    precision: PrecisionName = "bf16-mixed",
    recompute: Recompute = "none",
    indexer_loss_weight: float = 0.0,
    ep_chunks: EPChunks = "none",
    ep_chunk_bytes: int | None = None,
    dispatcher: str = "auto",
    max_imbalance: float | None = None,
    routing: RoutingName | RecordedTokens = "balanced",
    shift: Shift = "none",
    accelerator: Literal["gpu", "cpu"] = "gpu",
    cluster: Cluster | None = None,
    clip_gradients: ClipGradients | None = None,
) -> Simulation:
    """Memory, traffic, arithmetic and time of one training step on rank ``rank`` of ``world_size``.

    ``make_module`` builds a LightningModule; it is called under the meta device, and its ``training_step(batch, 0)``
    is what runs, without logging, and its own optimizer, without a Trainer. ``batch`` is one micro-batch [B, S] as the
    ranks of a cp group read it; ``shift`` says who shifts its labels. ``routing``: ``"balanced"``; ``"worst"``, where
    all that can be sent to one rank comes to this one; or tokens per expert that a run recorded, by the names of the
    experts modules (``ExpertLoadMonitor.last_tokens``), of which the proportions count. ``accelerator``: ``"cpu"`` is
    a run on gloo, where weights are gathered asynchronously (one gathered copy fewer in the forward pass) and kernels
    work through blocks. ``cluster`` says how fast its GPUs and links are; without one there are no seconds.
    ``max_imbalance``: a number is that of ``balance="redundant"``; None leaves every expert at home.
    ``clip_gradients(optimizer)`` is called before each optimizer's step.

    Raises:
        ValueError: degrees that do not fit, or a model, batch or routing that cannot be spread over them.
        RuntimeError: a process group exists already; or the model reads values of tensors, which are not there.
    """
    _check(world_size, rank, precision, recompute, routing)
    with _torch_compat.fake_world(world_size, rank):
        with torch.device("meta"):
            module = make_module()
        placement = _place_on_meta(
            module,
            dims,
            world_size,
            local_world_size,
            precision,
            recompute,
            routing,
            indexer_loss=IndexerLoss(indexer_loss_weight) if indexer_loss_weight else None,
            chunking=Chunking(chunks=ep_chunks, max_bytes=ep_chunk_bytes),
            dispatcher=dispatcher,
            max_imbalance=max_imbalance,
        )
        local_batch, micro_batch = _local_part(batch, placement, shift)
        with _torch_compat.fake_tensors(), GroupedProducts(), kernels_of(accelerator), values_explained(module):
            for_gpu = accelerator == "gpu"
            step = Step(module, placement, local_batch, micro_batch, for_gpu=for_gpu, clip_gradients=clip_gradients)
            watch, resident_bytes = _second_step(step, placement, for_gpu=for_gpu)
        return report(
            watch,
            dims=placement.dims,
            rank=rank,
            routing=routing if isinstance(routing, str) else "recorded",
            recompute=recompute,
            resident_bytes=resident_bytes,
            cluster=cluster,
            timeline=_timeline(watch, placement.dims, cluster, _tokens_per_gpu(batch, placement)),
            notes=() if step.optimizer.note is None else (step.optimizer.note,),
        )


def _second_step(step: Step, placement: Placement, *, for_gpu: bool) -> tuple[StepWatch, int]:
    """What is seen of a step that finds gradients, optimizer state and prefetches in place, and the bytes before it."""
    if not for_gpu and step.prefetch.units:
        _torch_compat.set_asynchronous_unshard(step.prefetch.units[""], True)
    step.run(None)
    gc.collect()
    watch = StepWatch(placement, reductions_are_copied=not for_gpu)
    with step.watched(watch):
        resident_bytes = watch.memory.num_bytes
        step.run(watch)
    return watch, resident_bytes


def _place_on_meta(
    module: nn.Module,
    requested: ParallelDims,
    world_size: int,
    local_world_size: int,
    precision: PrecisionName,
    recompute: Recompute,
    routing: RoutingName | RecordedTokens,
    *,
    indexer_loss: IndexerLoss | None,
    chunking: Chunking,
    dispatcher: str,
    max_imbalance: float | None,
) -> Placement:
    experts = find_experts(module)
    dims = requested.resolve(world_size, local_world_size=local_world_size, num_experts=common_num_experts(experts))
    require_experts(module, dims.ep)
    if precision == "bf16-true":
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    dense = build_dense_meshes(dims, "cpu", _TIMEOUT)
    placement = Placement(
        dims=dims,
        dense=dense,
        context_parallel=ContextParallel(dense.cp_group, indexer_loss),
        experts=experts,
        precision=precision,
        recompute=recompute,
        chunking=chunking,
        dispatcher=dispatcher,
        max_imbalance=max_imbalance,
        assumed_routing=routing if isinstance(routing, str) else "balanced",
    )
    compute_dtype = None if precision == "32-true" else torch.bfloat16
    # Outside of fake tensors: a mesh looks at the values of its own rank table.
    adapt_and_shard(module, placement, device=_CPU, timeout=_TIMEOUT, compute_dtype=compute_dtype)
    if not isinstance(routing, str):
        _follow(routing, experts)
    return placement


def _follow(tokens: RecordedTokens, experts: Mapping[str, nn.Module]) -> None:
    """Every layer sends its rows as recorded. Where all experts are on this rank, there is nothing to send."""
    num_experts: dict[str, int] = {name: int(module.num_experts) for name, module in experts.items()}  # type: ignore[arg-type]
    by_layer = routing_by_layer(tokens, num_experts)
    for name, module in experts.items():
        dispatcher = dispatcher_of(module)
        if isinstance(dispatcher, SpreadDispatcher):
            dispatcher.assumed_routing = by_layer[name]


def _local_part(
    batch: Mapping[str, Tensor], placement: Placement, shift: Shift
) -> tuple[dict[str, Tensor], MicroBatch]:
    """This rank's part of the batch, as ``ZigZagContextParallel`` would cut it."""
    cp = placement.context_parallel
    items: dict[Key, Any] = {key: item for key, item in batch.items()}
    fields = find_sequences(items, sequence_keys=None, labels_key=None)
    if cp.degree == 1:
        micro_batch = count_whole(items, fields, shift, _IGNORE_INDEX)
        if cp.indexer_loss is not None:
            cp.sequence = whole_sequence(items, fields, micro_batch)
        return dict(batch), micro_batch
    refuse_what_cannot_be_split(items, fields, shift=shift, degree=cp.degree, ignore_index=_IGNORE_INDEX)
    local, cp.sequence, micro_batch = split_items(
        items,
        fields,
        shift=shift,
        degree=cp.degree,
        rank=cp.rank,
        ignore_index=_IGNORE_INDEX,
        pad_token_id=0,
    )
    return {str(key): item for key, item in local.items()}, micro_batch


def _tokens_per_gpu(batch: Mapping[str, Tensor], placement: Placement) -> float:
    items: dict[Key, Any] = {key: item for key, item in batch.items()}
    fields = find_sequences(items, sequence_keys=None, labels_key=None)
    return fields.batch_size * fields.num_tokens / placement.dims.cp


def _timeline(watch: StepWatch, dims: ResolvedDims, cluster: Cluster | None, tokens_per_gpu: float) -> Timeline | None:
    """When everything that was issued runs."""
    if cluster is None:
        return None
    domain = ranks_per_domain(dims.world_size, cluster)
    ranks = {axis: dims.group_ranks(axis, 0) for axis in _AXES} | {"world": range(dims.world_size)}
    links = {axis: group(len(members), members.step, domain) for axis, members in ranks.items()}
    return time_step(watch.issues, cluster=cluster, links=links, tokens_per_gpu=tokens_per_gpu)


def _check(world_size: int, rank: int, precision: str, recompute: str, routing: object) -> None:
    if dist.is_initialized():
        raise RuntimeError("simulate() makes a process group of its own and one exists: call it in a fresh process.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank({rank}) must be in [0, {world_size}), the ranks of the world.")
    for name, value, allowed in (
        ("precision", precision, get_args(PrecisionName)),
        ("recompute", recompute, get_args(Recompute)),
        ("routing", routing if isinstance(routing, str) else "balanced", get_args(RoutingName)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}({value!r}) must be one of {', '.join(map(repr, allowed))}.")
