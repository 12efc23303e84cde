"""Every layout of a world, ranked. Both meshes are priced once per side and every pair is an addition."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.evaluate import Arithmetic, DensePrice, ExpertPrice, Figures, Times
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide, divisors, ranks_per_domain
from lightning_moe_strategy.plan.memory import Peak
from lightning_moe_strategy.plan.workload import Workload

EQUAL_SPEED = 0.01
"""Relative difference of speed below which the arithmetic does not tell two layouts apart."""

ROOM = 0.1
"""Share of the memory that a layout should leave: planned and simulated peaks differ by 1 %, uneven routing by more."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees a user fixed; None is open."""

    d_rep: int | None = None
    fsdp: int | None = None
    cp: int | None = None
    cp_inter: int | None = None
    e_rep: int | None = None
    e_fsdp: int | None = None
    ep: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One layout of one workload."""

    arithmetic: Arithmetic
    dense: DensePrice
    experts: ExpertPrice

    @cached_property
    def peak(self) -> Peak:
        """Memory of the busiest GPU."""
        return self.arithmetic.peak(self.dense, self.experts)

    @cached_property
    def peak_bytes(self) -> float:
        """The total of ``peak``."""
        return self.arithmetic.peak_bytes(self.dense, self.experts)

    @cached_property
    def times(self) -> Times:
        """Seconds of a step."""
        return self.arithmetic.times(self.dense, self.experts)

    @cached_property
    def figures(self) -> Figures:
        """All other values."""
        return self.arithmetic.figures(self.dense, self.experts)

    @property
    def fits(self) -> bool:
        """The peak is at most the device's memory."""
        return self.peak_bytes <= self.arithmetic.workload.cluster.memory_bytes

    @property
    def is_hidden(self) -> bool:
        """Compute covers the prefetched traffic of a layer."""
        return self.dense.tokens >= self.figures.min_tokens_to_hide

    @property
    def rdma_bytes_per_token(self) -> float:
        """What one GPU receives over RDMA in a step, for each of its tokens."""
        shape = self.arithmetic.workload.model
        total = 0.0
        for transfer in (*self.dense.transfers, *self.experts.transfers):
            layers = shape.moe_layers if transfer.only_moe_layers else shape.layers
            total += transfer.rdma * (1 if transfer.per_step else layers)
        return total / self.dense.tokens


def price(arithmetic: Arithmetic, dense: DenseSide, experts: ExpertSide) -> Evaluation:
    """One layout."""
    priced = arithmetic.dense(dense)
    return Evaluation(arithmetic=arithmetic, dense=priced, experts=arithmetic.experts(experts, priced.tokens))


@lru_cache(maxsize=4)
def ranked(arithmetic: Arithmetic, degrees: Degrees) -> tuple[Evaluation, ...]:
    """All layouts with the given degrees, best first.

    Raises:
        PlanError: no layout has those degrees.
    """
    work = arithmetic.workload
    expert_sides = expert_candidates(work, degrees)
    priced: dict[int, list[ExpertPrice]] = {}
    found = []
    for side in dense_candidates(work, degrees):
        dense = arithmetic.dense(side)
        if dense.tokens not in priced:
            priced[dense.tokens] = [arithmetic.experts(experts, dense.tokens) for experts in expert_sides]
        found += [Evaluation(arithmetic=arithmetic, dense=dense, experts=experts) for experts in priced[dense.tokens]]
    fastest = max((each.times.tokens_per_second for each in found if each.fits), default=1.0)
    return tuple(sorted(found, key=lambda each: _rank(each, fastest)))


def _rank(evaluation: Evaluation, fastest: float) -> tuple[float, ...]:
    """Smaller is better: what fits by speed, the rest by peak.

    Speeds within ``EQUAL_SPEED`` of one another, counted from the fastest, are told apart by whether they leave
    ``ROOM`` of the memory, by what they ask of RDMA and then by their peak: neither routing nor overlap is ever as
    even as the arithmetic has it.
    """
    if not evaluation.fits:
        return (1, 0, 0, evaluation.peak_bytes)
    lag = math.log(fastest / evaluation.times.tokens_per_second)
    is_tight = evaluation.peak_bytes > (1 - ROOM) * evaluation.arithmetic.workload.cluster.memory_bytes
    return (0, lag // EQUAL_SPEED, is_tight, evaluation.rdma_bytes_per_token, evaluation.peak_bytes)


def best(arithmetic: Arithmetic, degrees: Degrees) -> Evaluation:
    """The first of ``ranked``."""
    return ranked(arithmetic, degrees)[0]


def dense_candidates(work: Workload, degrees: Degrees) -> list[DenseSide]:
    """(d_rep, fsdp, cp) of the world; a cp beyond one NVLink domain both flat and in two dimensions."""
    check_degrees(work, degrees, ("d_rep", "fsdp", "cp"))
    domain = ranks_per_domain(work.gpus, work.cluster)
    sides = []
    for cp in _choices(work.gpus, degrees.cp):
        if not divides_context(work.context, cp):
            continue
        for d_rep in _choices(work.gpus // cp, degrees.d_rep):
            fsdp = work.gpus // cp // d_rep
            if degrees.fsdp not in (None, fsdp):
                continue
            sides += [
                DenseSide(d_rep=d_rep, fsdp=fsdp, cp=cp, cp_inter=cp_inter)
                for cp_inter in _inter_choices(cp, domain, degrees.cp_inter)
            ]
    if not sides:
        raise PlanError(_no_layout(work, degrees, ("d_rep", "fsdp", "cp", "cp_inter")))
    return sides


def expert_candidates(work: Workload, degrees: Degrees) -> list[ExpertSide]:
    """(e_rep, e_fsdp, ep) of the world; ep divides the number of experts."""
    check_degrees(work, degrees, ("e_rep", "e_fsdp", "ep"))
    num_experts = work.model.num_experts
    if degrees.ep is not None and num_experts % degrees.ep:
        near = [d for d in divisors(num_experts) if work.gpus % d == 0]
        raise PlanError(
            f"ep({degrees.ep}) does not divide num_experts({num_experts}). Choose one of {', '.join(map(str, near))}."
        )
    sides = [
        ExpertSide(e_rep=e_rep, e_fsdp=work.gpus // ep // e_rep, ep=ep)
        for ep in _choices(math.gcd(work.gpus, num_experts), degrees.ep)
        for e_rep in _choices(work.gpus // ep, degrees.e_rep)
        if degrees.e_fsdp in (None, work.gpus // ep // e_rep)
    ]
    if not sides:
        raise PlanError(_no_layout(work, degrees, ("e_rep", "e_fsdp", "ep")))
    return sides


def divides_context(context: int, cp: int) -> bool:
    """Every rank holds two equal chunks of the zig-zag."""
    return cp == 1 or context % (2 * cp) == 0


def check_degrees(work: Workload, degrees: Degrees, names: tuple[str, ...]) -> None:
    """Raise unless the given degrees of one mesh multiply to the world, or to a divisor of it if some are open."""
    given = {name: getattr(degrees, name) for name in names if getattr(degrees, name) is not None}
    product = math.prod(given.values())
    holds = product == work.gpus if len(given) == len(names) else work.gpus % product == 0
    if holds:
        return
    text = " * ".join(f"{name}({degree})" for name, degree in given.items())
    total = f" = {product}" if len(given) > 1 else ""
    verb = "is not" if len(given) == len(names) else "does not divide"
    repairs = [
        f"{name} to {work.gpus // (product // degree)}"
        for name, degree in given.items()
        if work.gpus % (product // degree) == 0
    ]
    remedy = f"Set {' or '.join(repairs[-2:])}." if repairs else f"Choose divisors of {work.gpus}."
    raise PlanError(f"{text}{total} {verb} gpus({work.gpus}). {remedy}")


def _choices(number: int, fixed: int | None) -> tuple[int, ...]:
    if fixed is None:
        return divisors(number)
    return (fixed,) if number % fixed == 0 else ()


def _inter_choices(cp: int, domain: int, fixed: int | None) -> tuple[int, ...]:
    if fixed is not None:
        return (fixed,) if cp % fixed == 0 else ()
    smallest = cp // math.gcd(cp, domain)
    return (1,) if smallest == 1 else (1, smallest)


def _no_layout(work: Workload, degrees: Degrees, names: tuple[str, ...]) -> str:
    given = ", ".join(f"{name}({getattr(degrees, name)})" for name in names if getattr(degrees, name) is not None)
    cp, inter = degrees.cp, degrees.cp_inter
    if cp is not None and not divides_context(work.context, cp):
        lower = max(d for d in divisors(work.gpus) if d < cp and divides_context(work.context, d))
        return (
            f"context({work.context}) is not divisible by 2 * cp({cp}): every rank holds two equal chunks. "
            f"Lower cp to {lower} or pad the context to {math.ceil(work.context / (2 * cp)) * 2 * cp}."
        )
    if cp is not None and inter is not None and cp % inter:
        return f"cp_inter({inter}) does not divide cp({cp}). Choose one of {', '.join(map(str, divisors(cp)))}."
    return f"{given or 'no degree'} leaves no layout of gpus({work.gpus}). Leave a degree out, or choose divisors."


def with_workload(arithmetic: Arithmetic, **changes: object) -> Arithmetic:
    """The same arithmetic for another workload."""
    work = dataclasses.replace(arithmetic.workload, **changes)  # type: ignore[arg-type]
    return type(arithmetic)(workload=work)  # type: ignore[call-arg]
