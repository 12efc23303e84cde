"""The device meshes of a run, built from its degrees: every rank calls the builders, in the same order."""

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_moe_strategy._torch_compat import set_group_timeout
from lightning_moe_strategy.collectives import AnyGroup, TwoStepGroup
from lightning_moe_strategy.parallel_dims import ParallelDims as ParallelDims
from lightning_moe_strategy.parallel_dims import ResolvedDims as ResolvedDims


@dataclass(frozen=True, kw_only=True)
class DenseMeshes:
    """Where dense parameters and sequences live."""

    mesh: DeviceMesh
    """Axes d_rep, fsdp, cp."""
    shard_mesh: DeviceMesh
    """What ``fully_shard`` takes: axes d_rep, fsdp_cp, or fsdp_cp alone when there is one copy."""
    cp_mesh: DeviceMesh | None
    """Axes cp_inter, cp_intra when ``cp_inter > 1``."""
    cp_group: AnyGroup
    """The ranks that share this rank's sequences; they exchange in two steps when ``cp_inter > 1``."""
    dp_rank: int
    """Which share of the samples this rank reads; equal on all ranks of a cp group."""
    dp_size: int
    """Number of shares of the samples."""


@dataclass(frozen=True, kw_only=True)
class ExpertMeshes:
    """Where expert parameters live. The meshes share one root, so FSDP can join them into one DTensor."""

    mesh: DeviceMesh
    """Axes e_rep, e_fsdp, ep."""
    shard_mesh: DeviceMesh
    """What ``fully_shard`` takes: axes e_rep, e_fsdp, or e_fsdp alone when there is one copy."""
    ep_mesh: DeviceMesh
    """Axis ep: expert parameters are DTensors on it before they are sharded."""


def build_dense_meshes(dims: ResolvedDims, device_type: str, timeout: timedelta) -> DenseMeshes:
    """The dense meshes of this rank. Every rank of the world calls it, before ``build_expert_meshes``.

    ``timeout`` holds for every group made here: a mesh's groups ignore the one of ``init_process_group``.
    """
    mesh = _init_mesh(dims, ("d_rep", "fsdp", "cp"), device_type, timeout)
    shard_axes = ("d_rep", "fsdp_cp") if dims.d_rep > 1 else ("fsdp_cp",)
    cp_mesh, whole = None, mesh.get_group("cp")
    cp_group: AnyGroup = whole
    if dims.cp_inter > 1:
        cp_mesh = _init_mesh(dims, ("dp", "cp_inter", "cp_intra"), device_type, timeout)["cp_inter", "cp_intra"]
        inter, intra = (cp_mesh.get_group(axis) for axis in ("cp_inter", "cp_intra"))
        cp_group = TwoStepGroup(whole=whole, inter=inter, intra=intra)
    return DenseMeshes(
        mesh=mesh,
        shard_mesh=_init_mesh(dims, shard_axes, device_type, timeout),
        cp_mesh=cp_mesh,
        cp_group=cp_group,
        dp_rank=dims.coordinate("dp", dist.get_rank()),
        dp_size=dims.dp,
    )


def build_sample_group(dims: ResolvedDims, device_type: str, timeout: timedelta) -> dist.ProcessGroup:
    """This rank and those that hold other samples, one of every cp group. Every rank of the world calls it."""
    return _init_mesh(dims, ("dp", "cp"), device_type, timeout).get_group("dp")


def build_expert_meshes(dims: ResolvedDims, device_type: str, timeout: timedelta) -> ExpertMeshes:
    """The expert meshes of this rank. Every rank of the world calls it, after ``build_dense_meshes``."""
    mesh = _init_mesh(dims, ("e_rep", "e_fsdp", "ep"), device_type, timeout)
    shard_mesh = mesh["e_rep", "e_fsdp"] if dims.e_rep > 1 else mesh["e_fsdp"]
    return ExpertMeshes(mesh=mesh, shard_mesh=shard_mesh, ep_mesh=mesh["ep"])


def _init_mesh(dims: ResolvedDims, axes: tuple[str, ...], device_type: str, timeout: timedelta) -> DeviceMesh:
    shape = tuple(dims.degree(axis) for axis in axes)
    world = dist.group.WORLD
    assert world is not None
    return _mesh_of_this_world(world, shape, axes, device_type, timeout)


@functools.cache
def _mesh_of_this_world(
    world: dist.ProcessGroup, shape: tuple[int, ...], axes: tuple[str, ...], device_type: str, timeout: timedelta
) -> DeviceMesh:
    """Made once: every group has threads and buffers of its own, and a process may build many Trainers."""
    # An axis over the whole world would reuse the world's group: cp, ep and the shards would queue behind
    # each other on one communicator and no prefetch could overlap. Naming the backend gives it its own group.
    own_groups: dict[int | str, Any] = {
        axis: dist.get_backend() for axis, degree in zip(axes, shape, strict=True) if degree == world.size()
    }
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes, backend_override=own_groups)
    for group in mesh.get_all_groups():
        set_group_timeout(group, timeout)
    return mesh
