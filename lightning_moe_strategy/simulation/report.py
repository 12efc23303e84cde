"""What a simulated step says: for people and for programs. GB are 1e9 bytes, all figures those of one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_moe_strategy.parallel_dims import ResolvedDims
from lightning_moe_strategy.simulation.memory import Piece
from lightning_moe_strategy.simulation.watch import StepWatch

GB = 1e9
NUM_LARGEST = 5


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


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """What FSDP moved for one unit in one step."""

    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One training step of one rank, the second: the first shows in which order units run and has no prefetch."""

    dims: ResolvedDims
    rank: int
    routing: str
    recompute: str
    resident_bytes: int
    """Before the step: parameters, optimizer state, batch, and the gradients of the step before."""
    activation_bytes: int
    """Kept by the forward pass for the backward pass."""
    phases: Mapping[str, PhaseMemory]
    num_bytes: Mapping[tuple[str, str], int]
    """By (axis, collective); of the larger of a collective's two buffers."""
    units: Mapping[str, UnitTraffic]
    flops: Mapping[tuple[str, str], int]
    """By (phase, operation)."""
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

    def to_json(self) -> dict[str, Any]:
        """Plain values under the documented keys; ``units`` only where something was moved."""
        by_axis: dict[str, dict[str, float]] = {}
        for (axis, collective), size in sorted(self.num_bytes.items()):
            by_axis.setdefault(axis, {})[collective] = size / GB
        by_phase: dict[str, int] = {}
        for (phase, _), flops in self.flops.items():
            by_phase[phase] = by_phase.get(phase, 0) + flops
        return {
            "world": self.dims.world_size,
            "rank": self.rank,
            "layout": {axis: self.dims.degree(axis) for axis in ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep")},
            "routing": self.routing,
            "recompute": self.recompute,
            "peak_gb": self.peak_bytes / GB,
            "peak_phase": self.peak_phase,
            "peak_operation": self.peak.operation,
            "peak_unit": self.peak.unit,
            "peak_tensors": [_piece(piece) for piece in self.peak.largest],
            "resident_gb": self.resident_bytes / GB,
            "activations_gb": self.activation_bytes / GB,
            "phases": {
                name: {"peak_gb": phase.peak_bytes / GB, "buckets_gb": _inamount(phase.buckets)}
                for name, phase in self.phases.items()
            },
            "buckets_gb": _inamount(self.peak.buckets),
            "bytes_gb": by_axis,
            "units": {
                name: {
                    "all_gathers": unit.all_gathers,
                    "all_gather_gb": unit.all_gather_bytes / GB,
                    "reduce_scatters": unit.reduce_scatters,
                    "reduce_scatter_gb": unit.reduce_scatter_bytes / GB,
                }
                for name, unit in self.units.items()
            },
            "flops": {"total": sum(by_phase.values()), **by_phase},
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        """A page for a terminal."""
        scale, unit = (GB, "GB") if self.peak_bytes >= GB else (1e6, "MB")

        def amount(num_bytes: int) -> str:
            return f"{num_bytes / scale:,.3f}"

        dense = tuple(self.dims.degree(axis) for axis in ("d_rep", "fsdp", "cp"))
        expert = tuple(self.dims.degree(axis) for axis in ("e_rep", "e_fsdp", "ep"))
        lines = [
            f"rank {self.rank} of {self.dims.world_size}: dense (d_rep, fsdp, cp) = {dense}, "
            f"expert (e_rep, e_fsdp, ep) = {expert}, routing {self.routing}, recompute {self.recompute}",
            f"peak {amount(self.peak_bytes)} {unit} in the {self.peak_phase} pass, resident "
            f"{amount(self.resident_bytes)} {unit}, kept by the forward pass {amount(self.activation_bytes)} {unit}",
            "",
            f"memory at the peak of each phase, {unit}",
            *self._memory_lines(amount),
            "",
            f"the peak: {self.peak.operation} in {self.peak.unit or 'the model'}; largest tensors then",
            *(
                f"  {amount(piece.num_bytes)}  {piece.bucket}: {_what(piece)} in {piece.unit or 'the model'}"
                for piece in self.peak.largest
            ),
            "",
            f"bytes of a step by axis, {unit}",
            *(
                f"  {axis:<10}{collective:<16}{amount(size)}"
                for (axis, collective), size in sorted(self.num_bytes.items())
            ),
            "",
            f"{sum(self.flops.values()) / 1e9:,.1f} GFLOP a step on this rank",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def _memory_lines(self, amount: Callable[[int], str]) -> list[str]:
        names = [*self.phases]
        buckets = sorted({bucket for phase in self.phases.values() for bucket in phase.buckets})
        rows = [(bucket, [self.phases[name].buckets.get(bucket, 0) for name in names]) for bucket in buckets]
        rows = [*rows, ("together", [self.phases[name].peak_bytes for name in names])]
        head = "  " + " " * 18 + "".join(f"{name:>12}" for name in names)
        return [head, *(f"  {bucket:<18}" + "".join(f"{amount(size):>12}" for size in sizes) for bucket, sizes in rows)]


def report(
    watch: StepWatch, *, dims: ResolvedDims, rank: int, routing: str, recompute: str, resident_bytes: int
) -> Simulation:
    """The figures of a watched step."""
    memory, communication = watch.memory, watch.communication
    phases = {
        name: PhaseMemory(
            peak_bytes=peak.num_bytes,
            buckets=memory.buckets(peak.moment),
            largest=tuple(memory.largest(peak.moment, NUM_LARGEST)),
            operation=peak.operation,
            unit=peak.unit,
        )
        for name, peak in memory.peaks.items()
    }
    names = sorted({name for name, _ in communication.of_units})
    counts, sizes = communication.of_units, communication.bytes_of_units
    units = {
        name: UnitTraffic(
            all_gathers=counts[name, "all_gather"],
            all_gather_bytes=sizes[name, "all_gather"],
            reduce_scatters=counts[name, "reduce_scatter"],
            reduce_scatter_bytes=sizes[name, "reduce_scatter"],
        )
        for name in names
    }
    return Simulation(
        dims=dims,
        rank=rank,
        routing=routing,
        recompute=recompute,
        resident_bytes=resident_bytes,
        activation_bytes=memory.activation_bytes,
        phases=phases,
        num_bytes=dict(communication.num_bytes),
        units=units,
        flops=dict(watch.arithmetic.flops),
    )


def _piece(piece: Piece) -> dict[str, Any]:
    return {
        "gb": piece.num_bytes / GB,
        "bucket": piece.bucket,
        "operation": piece.operation,
        "shape": list(piece.shape),
        "dtype": piece.dtype,
        "unit": piece.unit,
    }


def _what(piece: Piece) -> str:
    return f"{piece.operation} {list(piece.shape)} {piece.dtype}".strip() if piece.shape else piece.operation


def _inamount(buckets: Mapping[str, int]) -> dict[str, float]:
    return {bucket: size / GB for bucket, size in buckets.items()}
