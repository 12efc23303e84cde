"""Bytes of every collective by axis, and by the unit that FSDP issued it for."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_moe_strategy._torch_compat import group_of_collective, tensors_in
from lightning_moe_strategy.placement import Placement

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
}
"""By torch's name of the operation."""


class CommunicationWatch:
    """Counts collectives. Groups of one rank exchange nothing and are left out."""

    def __init__(self, axes: dict[str, str]) -> None:
        """``axes`` names the axis of each group by the group's name."""
        self.axes = axes
        self.unit: str | None = None
        """Of FSDP's own collectives, the unit; None for those of attention, experts and the strategy."""
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """By (axis, collective): the larger of a collective's two buffers, so what a gather leaves, what a reduction
        takes, and what an all-to-all receives or sends."""
        self.of_units: Counter[tuple[str, str]] = Counter()
        """Number of collectives by (unit, collective)."""
        self.bytes_of_units: Counter[tuple[str, str]] = Counter()

    def observe(self, operation: Any, args: tuple[Any, ...], result: Any) -> None:
        namespace, name = operation.namespace, operation._opname
        if namespace != "c10d" or name not in COLLECTIVES:
            return
        group = group_of_collective(args)
        if group.size() == 1:
            return
        collective, axis = COLLECTIVES[name], self.axes.get(group.group_name, "world")
        size = max(_num_bytes(args[0]), _num_bytes(args[1]))
        self.num_bytes[axis, collective] += size
        if self.unit is not None:
            self.of_units[self.unit, collective] += 1
            self.bytes_of_units[self.unit, collective] += size


def axes_of_groups(placement: Placement) -> dict[str, str]:
    """The axis of every process group of a placement, by the group's name."""
    assert placement.expert is not None
    meshes = [placement.dense.mesh, placement.dense.shard_mesh, placement.expert.mesh, placement.expert.shard_mesh]
    if placement.dense.cp_mesh is not None:
        meshes.append(placement.dense.cp_mesh)
    groups: dict[str, str] = {}
    for mesh in meshes:
        for axis in mesh.mesh_dim_names or ():
            group: ProcessGroup = mesh.get_group(axis)
            groups.setdefault(group.group_name, axis)
    return groups


def _num_bytes(tensors: Any) -> int:
    return sum(_size(tensor) for tensor in tensors_in(tensors))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
