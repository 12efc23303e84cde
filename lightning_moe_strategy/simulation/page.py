"""A simulated step as a page for a terminal."""

import re
from collections.abc import Callable

from lightning_moe_strategy.simulation.report import GB, Simulation, describe, flops_by_module, flops_by_phase
from lightning_moe_strategy.simulation.schedule import LANE_NAMES

_Amount = Callable[[int], str]


def to_text(simulation: Simulation) -> str:
    """Memory by phase, the peak, bytes by axis, FLOP by module, seconds, notes."""
    scale, unit = (GB, "GB") if simulation.peak_bytes >= GB else (1e6, "MB")

    def amount(num_bytes: int) -> str:
        return f"{num_bytes / scale:,.3f}"

    lines = [
        *_layout(simulation, amount, unit),
        "",
        f"memory at the peak of each phase, {unit}",
        *_memory(simulation, amount),
        "",
        *_peak(simulation, amount),
        "",
        f"bytes of a step by axis, {unit}",
        *(
            f"  {axis:<10}{collective:<16}{amount(size)}"
            for (axis, collective), size in sorted(simulation.num_bytes.items())
        ),
        "",
        *_flops(simulation),
        *_seconds(simulation),
        *(f"note: {note}" for note in simulation.notes),
    ]
    return "\n".join(lines)


def _layout(simulation: Simulation, amount: _Amount, unit: str) -> list[str]:
    dims = simulation.dims
    dense = tuple(dims.degree(axis) for axis in ("d_rep", "fsdp", "cp"))
    expert = tuple(dims.degree(axis) for axis in ("e_rep", "e_fsdp", "ep"))
    return [
        f"rank {simulation.rank} of {dims.world_size}: dense (d_rep, fsdp, cp) = {dense}, "
        f"expert (e_rep, e_fsdp, ep) = {expert}, routing {simulation.routing}, recompute {simulation.recompute}",
        f"peak {amount(simulation.peak_bytes)} {unit} in the {simulation.peak_phase} pass, resident "
        f"{amount(simulation.resident_bytes)} {unit}, kept by the forward pass "
        f"{amount(simulation.activation_bytes)} {unit}",
    ]


def _memory(simulation: Simulation, amount: _Amount) -> list[str]:
    names = [*simulation.phases]
    buckets = sorted({bucket for phase in simulation.phases.values() for bucket in phase.buckets})
    rows = [(bucket, [simulation.phases[name].buckets.get(bucket, 0) for name in names]) for bucket in buckets]
    rows = [*rows, ("together", [simulation.phases[name].peak_bytes for name in names])]
    head = "  " + " " * 18 + "".join(f"{name:>12}" for name in names)
    return [head, *(f"  {bucket:<18}" + "".join(f"{amount(size):>12}" for size in sizes) for bucket, sizes in rows)]


def _peak(simulation: Simulation, amount: _Amount) -> list[str]:
    peak = simulation.peak
    cause = "the start of the phase" if peak.cause is None else describe(peak.cause)
    return [
        f"the peak: {cause}, reached by {peak.operation}; largest tensors then",
        *(f"  {amount(piece.num_bytes)}  {piece.bucket}: {describe(piece)}" for piece in peak.largest),
    ]


def _flops(simulation: Simulation) -> list[str]:
    """The modules of all layers together, most FLOP first."""
    phases = flops_by_phase(simulation.flops)
    total = sum(phases.values())
    scale, unit = (1e12, "TFLOP") if total >= 1e12 else (1e9, "GFLOP")
    kinds: dict[str, dict[str, int]] = {}
    for module, counts in flops_by_module(simulation.flops).items():
        kind = kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) or "the model", {})
        for phase, count in counts.items():
            kind[phase] = kind.get(phase, 0) + count
    width = max([18, *(len(kind) + 2 for kind in kinds)])
    lines = [f"{total / scale:,.1f} {unit} a step on this rank"]
    if len(kinds) > 1:
        lines.append("  " + " " * width + "".join(f"{phase:>12}" for phase in phases))
        for name, counts in sorted(kinds.items(), key=lambda item: -sum(item[1].values())):
            lines.append(f"  {name:<{width}}" + "".join(f"{counts.get(p, 0) / scale:>12,.3f}" for p in phases))
    return lines


def _seconds(simulation: Simulation) -> list[str]:
    seconds, cluster = simulation.seconds, simulation.cluster
    if seconds is None or cluster is None:
        return []
    seen = {axis: wait for axis, wait in seconds.exposed.items() if wait > 1e-4 * seconds.step}
    waits = ", ".join(f"{axis} {_time(wait)}" for axis, wait in seen.items()) or "nothing"
    busy = ", ".join(f"{LANE_NAMES[lane]} {time / seconds.step:.0%}" for lane, time in seconds.busy.items())
    return [
        "",
        f"{_time(seconds.step)} a step on {cluster.name}, {seconds.tokens_per_second_per_gpu:,.0f} tokens/s per GPU: "
        f"compute {_time(seconds.compute)} at {cluster.achieved_flops / 1e12:,.0f} TFLOP/s, waits for {waits}",
        f"busy: {busy} of the step",
    ]


def _time(seconds: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:,.2f} {unit}"
    return f"{1e6 * seconds:,.2f} us"
