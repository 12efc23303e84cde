"""A simulated step as plain values, for programs."""

from collections.abc import Mapping
from typing import Any

from lightning_moe_strategy.simulation.memory import Piece, thinned
from lightning_moe_strategy.simulation.report import GB, Simulation, flops_by_module, flops_by_phase

AXES = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep")

MAX_POINTS = 500
"""Of the timeline: a file that a person can still open."""


def to_json(simulation: Simulation) -> dict[str, Any]:
    """Plain values under the documented keys; ``units`` in the order in which they are first gathered."""
    return {
        "world": simulation.dims.world_size,
        "rank": simulation.rank,
        "layout": {axis: simulation.dims.degree(axis) for axis in AXES},
        "routing": simulation.routing,
        "recompute": simulation.recompute,
        "cluster": None if simulation.cluster is None else simulation.cluster.name,
        **_memory(simulation),
        "bytes_gb": _bytes_by_axis(simulation),
        "units": {
            name: {
                "all_gathers": unit.all_gathers,
                "all_gather_gb": unit.all_gather_bytes / GB,
                "reduce_scatters": unit.reduce_scatters,
                "reduce_scatter_gb": unit.reduce_scatter_bytes / GB,
                "order": list(unit.order),
            }
            for name, unit in simulation.units.items()
        },
        "flops": {
            "total": sum(simulation.flops.values()),
            **flops_by_phase(simulation.flops),
            "modules": flops_by_module(simulation.flops),
        },
        "seconds": _seconds(simulation),
        "timeline": _timeline(simulation),
        "notes": list(simulation.notes),
    }


def _memory(simulation: Simulation) -> dict[str, Any]:
    peak = simulation.peak
    return {
        "peak_gb": simulation.peak_bytes / GB,
        "peak_phase": simulation.peak_phase,
        "peak_operation": peak.operation,
        "peak_unit": peak.unit,
        "peak_tensor": None if peak.cause is None else _piece(peak.cause),
        "peak_tensors": [_piece(piece) for piece in peak.largest],
        "resident_gb": simulation.resident_bytes / GB,
        "activations_gb": simulation.activation_bytes / GB,
        "phases": {
            name: {"peak_gb": phase.peak_bytes / GB, "buckets_gb": _in_gb(phase.buckets)}
            for name, phase in simulation.phases.items()
        },
        "buckets_gb": _in_gb(peak.buckets),
    }


def _bytes_by_axis(simulation: Simulation) -> dict[str, dict[str, float]]:
    by_axis: dict[str, dict[str, float]] = {}
    for (axis, collective), size in sorted(simulation.num_bytes.items()):
        by_axis.setdefault(axis, {})[collective] = size / GB
    return by_axis


def _seconds(simulation: Simulation) -> dict[str, Any] | None:
    seconds = simulation.seconds
    if seconds is None:
        return None
    return {
        "step": seconds.step,
        "compute": seconds.compute,
        "exposed": dict(seconds.exposed),
        "busy": dict(seconds.busy),
        "tokens_per_second_per_gpu": seconds.tokens_per_second_per_gpu,
    }


def _timeline(simulation: Simulation) -> dict[str, Any]:
    """Memory over the step in columns, one entry per point: in order of allocation, the peak included."""
    points = thinned(simulation.memory, MAX_POINTS)
    buckets = {bucket: None for point in points for bucket in point.buckets}
    return {
        "phase": [point.phase for point in points],
        "seconds": simulation.times_of(points),
        "total_gb": [point.num_bytes / GB for point in points],
        "buckets_gb": {bucket: [point.buckets.get(bucket, 0) / GB for point in points] for bucket in buckets},
    }


def _piece(piece: Piece) -> dict[str, Any]:
    return {
        "gb": piece.num_bytes / GB,
        "bucket": piece.bucket,
        "operation": piece.operation,
        "shape": list(piece.shape),
        "dtype": piece.dtype,
        "unit": piece.unit,
    }


def _in_gb(buckets: Mapping[str, int]) -> dict[str, float]:
    return {bucket: size / GB for bucket, size in buckets.items()}
