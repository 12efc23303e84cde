"""What tensor parallelism inside the experts (ETP) would do to the load. A what-if: it is refused as a layout.

Seed, "TP": every GPU takes the mean load of its group, so the skew never rises; a token has to reach all of them.
"""

from collections.abc import Sequence

from lightning_moe_strategy.plan.errors import PlanError

DEGREES = (2, 4, 8)
"""Those that reports ask about."""


def degrees_of(ep: int) -> list[int]:
    """Of ``DEGREES`` those into which ``ep`` ranks can be grouped."""
    return [etp for etp in DEGREES if ep % etp == 0]


def skew(loads: Sequence[float]) -> float:
    """Largest load over the mean one; 1 is perfect balance."""
    return max(loads) * len(loads) / sum(loads)


def grouped_loads(loads: Sequence[float], etp: int) -> list[float]:
    """Load of each group of ``etp`` neighbouring ep ranks that share their experts: the mean of its ranks' loads."""
    if etp < 1 or len(loads) % etp:
        raise PlanError(f"etp({etp}) must divide ep({len(loads)}). Choose a divisor.")
    return [sum(loads[start : start + etp]) / etp for start in range(0, len(loads), etp)]


def traffic_factor(etp: int) -> int:
    """Dispatch and combine bytes compared with none: every token travels to ``etp`` GPUs."""
    return etp


def price(etps: Sequence[int]) -> str:
    """What the seed derives of each degree against its lower skew, as half a sentence."""
    times = ", ".join(map(str, etps))
    return (
        f"{times} times the traffic of ep and the rows in memory, products as many times narrower, a reduce-scatter "
        "and an all-reduce more to wait for in every layer"
    )
