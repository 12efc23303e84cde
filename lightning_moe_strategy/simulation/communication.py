"""Bytes of every collective by axis, and by the unit that FSDP issued it for."""

from collections import Counter, defaultdict
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a group of more than one rank."""

    name: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``."""
    axis: str
    num_bytes: int
    """Of the larger of its two buffers: what a gather leaves, a reduction takes, an all-to-all receives or sends."""
    group: str
    """Name of the process group: its collectives run one after the other."""
    unit: str | None
    """The unit FSDP issued it for; None for those of attention, experts and the strategy, which wait for the result."""
    is_read_by_host: bool
    """Counts of rows, which the host needs before it can issue anything else."""


class CommunicationWatch:
    """Counts collectives. Groups of one rank exchange nothing and are left out."""

    def __init__(self, axes: dict[str, str]) -> None:
        """``axes`` names the axis of each group by the group's name."""
        self.axes = axes
        self.unit: str | None = None
        """Of FSDP's own collectives, the unit; None for those of attention, experts and the strategy."""
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """By (axis, collective): the larger of a collective's two buffers."""
        self.of_units: Counter[tuple[str, str]] = Counter()
        """Number of collectives by (unit, collective)."""
        self.bytes_of_units: Counter[tuple[str, str]] = Counter()
        self.order_of_units: defaultdict[str, list[int]] = defaultdict(list)
        """By unit, in the order of issue: the positions of its collectives among those of all units."""
        self._num_of_units = 0

    def observe(self, operation: Any, args: tuple[Any, ...]) -> Collective | None:
        """What an operation exchanges, if it is a collective."""
        namespace, name = operation.namespace, operation._opname
        if namespace != "c10d" or name not in COLLECTIVES:
            return None
        group = group_of_collective(args)
        if group.size() == 1:
            return None
        collective = Collective(
            name=COLLECTIVES[name],
            axis=self.axes.get(group.group_name, "world"),
            num_bytes=max(_num_bytes(args[0]), _num_bytes(args[1])),
            group=group.group_name,
            unit=self.unit,
            is_read_by_host=name == "alltoall_base_" and not args[0].is_floating_point(),
        )
        self._count(collective)
        return collective

    def _count(self, collective: Collective) -> None:
        self.num_bytes[collective.axis, collective.name] += collective.num_bytes
        if collective.unit is not None:
            self.of_units[collective.unit, collective.name] += 1
            self.bytes_of_units[collective.unit, collective.name] += collective.num_bytes
            self.order_of_units[collective.unit].append(self._num_of_units)
            self._num_of_units += 1


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
