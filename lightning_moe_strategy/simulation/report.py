"""What a simulated step says. GB are 1e9 bytes, all figures those of one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_moe_strategy.parallel_dims import ResolvedDims
from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.simulation.memory import MemoryPoint, Piece
from lightning_moe_strategy.simulation.timeline import StepSeconds, Timeline
from lightning_moe_strategy.simulation.watch import StepWatch

GB = 1e9
NUM_LARGEST = 5
MAX_POINTS = 4000
"""Of the memory over a step: some twenty for each pass through a layer of a large model."""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Memory in the forward or backward pass or the optimizer step."""

    peak_bytes: int
    buckets: Mapping[str, int]
    """Bytes by purpose at the peak; see ``simulation.memory.Bucket``."""
    largest: tuple[Piece, ...]
    """The largest allocations at the peak."""
    operation: str
    """The operation that reached it."""
    unit: str
    """The unit that ran."""
    cause: Piece | None
    """The largest tensor that unit had made then; None where the phase began with its peak."""


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """What FSDP moved for one unit in one step."""

    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int
    order: tuple[int, ...]
    """Positions of its collectives among those of all units, in the order of issue; all-reduces of replicas too."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One training step of one rank, the second: the first shows in which order units run and has no prefetch."""

    dims: ResolvedDims
    rank: int
    routing: str
    """``balanced``, ``worst`` or ``recorded``."""
    recompute: str
    resident_bytes: int
    """Before the step: parameters, optimizer state, batch, and the gradients of the step before."""
    activation_bytes: int
    """Kept by the forward pass for the backward pass."""
    phases: Mapping[str, PhaseMemory]
    num_bytes: Mapping[tuple[str, str], int]
    """By (axis, collective); of the larger of a collective's two buffers."""
    units: Mapping[str, UnitTraffic]
    """In the order in which they are first gathered."""
    flops: Mapping[tuple[str, str, str], int]
    """By (phase, module, operation); phases forward, recompute, backward. See ``simulation.places``."""
    memory: tuple[MemoryPoint, ...]
    """Over the step, the peak included; at most ``MAX_POINTS``."""
    cluster: Cluster | None
    """What the seconds are of."""
    timeline: Timeline | None
    """What runs when; None without a cluster."""
    notes: tuple[str, ...] = ()

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].peak_bytes)

    @property
    def peak(self) -> PhaseMemory:
        """The phase with most memory."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors when they are most. The allocator's reserve and the libraries' buffers come on top."""
        return self.peak.peak_bytes

    @property
    def seconds(self) -> StepSeconds | None:
        """Predicted times; None without a cluster."""
        return None if self.timeline is None else self.timeline.seconds

    def times_of(self, points: Sequence[MemoryPoint]) -> list[float] | None:
        """Seconds of points of ``memory``; None without a cluster."""
        moments = [point.moment for point in points]
        return None if self.timeline is None else self.timeline.times_of_moments(moments)

    def to_json(self) -> dict[str, Any]:
        """Plain values under the documented keys; ``units`` only where something was moved."""
        from lightning_moe_strategy.simulation.figures import to_json

        return to_json(self)

    def to_text(self) -> str:
        """A page for a terminal."""
        from lightning_moe_strategy.simulation.page import to_text

        return to_text(self)


def describe(piece: Piece) -> str:
    """A tensor in one line: what made it, its shape and dtype, and where."""
    what = f"{piece.operation} {list(piece.shape)} {piece.dtype}".strip() if piece.shape else piece.operation
    return f"{what} in {piece.unit or 'the model'}"


def flops_by_phase(flops: Mapping[tuple[str, str, str], int]) -> dict[str, int]:
    """FLOP of each phase that computes anything."""
    phases = {phase for phase, _, _ in flops}
    return {phase: sum(n for key, n in flops.items() if key[0] == phase) for phase in _in_order(phases)}


def flops_by_module(flops: Mapping[tuple[str, str, str], int]) -> dict[str, dict[str, int]]:
    """FLOP of each module by phase, in the order of the forward pass."""
    modules: dict[str, dict[str, int]] = {}
    for (phase, module, _), count in flops.items():
        of_module = modules.setdefault(module, {})
        of_module[phase] = of_module.get(phase, 0) + count
    return modules


def report(
    watch: StepWatch,
    *,
    dims: ResolvedDims,
    rank: int,
    routing: str,
    recompute: str,
    resident_bytes: int,
    cluster: Cluster | None,
    timeline: Timeline | None,
    notes: tuple[str, ...],
) -> Simulation:
    """The figures of a watched step."""
    return Simulation(
        dims=dims,
        rank=rank,
        routing=routing,
        recompute=recompute,
        resident_bytes=resident_bytes,
        activation_bytes=watch.memory.activation_bytes,
        phases=_phases(watch),
        num_bytes=dict(watch.communication.num_bytes),
        units=_units(watch),
        flops=dict(watch.arithmetic.flops),
        memory=tuple(watch.memory.timeline(MAX_POINTS)),
        cluster=cluster,
        timeline=timeline,
        notes=notes,
    )


def _phases(watch: StepWatch) -> dict[str, PhaseMemory]:
    memory = watch.memory
    return {
        name: PhaseMemory(
            peak_bytes=peak.num_bytes,
            buckets=memory.buckets(peak.moment),
            largest=tuple(memory.largest(peak.moment, NUM_LARGEST)),
            operation=peak.operation,
            unit=peak.unit,
            cause=memory.cause(peak),
        )
        for name, peak in memory.peaks.items()
    }


def _units(watch: StepWatch) -> dict[str, UnitTraffic]:
    counts, sizes = watch.communication.of_units, watch.communication.bytes_of_units
    return {
        name: UnitTraffic(
            all_gathers=counts[name, "all_gather"],
            all_gather_bytes=sizes[name, "all_gather"],
            reduce_scatters=counts[name, "reduce_scatter"],
            reduce_scatter_bytes=sizes[name, "reduce_scatter"],
            order=tuple(order),
        )
        for name, order in watch.communication.order_of_units.items()
    }


def _in_order(phases: set[str]) -> list[str]:
    order = ("forward", "recompute", "backward", "optimizer")
    return sorted(phases, key=lambda phase: order.index(phase) if phase in order else len(order))
