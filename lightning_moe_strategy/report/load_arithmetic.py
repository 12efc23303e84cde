"""How evenly tokens fall, and what another ep would make of it: arithmetic on counts, no model and no rank.

Shapes: E experts of a layer, P ranks of the ep axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_moe_strategy.report.expert_series import Counts

Floats = npt.NDArray[np.float64]


def skew(load: Counts | Floats) -> float:
    """max / mean, the seed's definition: 1 is even, and 1 without tokens."""
    total = float(load.sum())
    return float(load.max()) * load.size / total if total else 1.0


def rank_loads(tokens_E: Counts, ep: int) -> Counts:
    """[P]: rows of each rank of ep, which holds E / ep neighbouring experts."""
    loads_P: Counts = tokens_E.reshape(ep, -1).sum(1)
    return loads_P


def grouped_skew(tokens_E: Counts, ep: int, etp: int) -> float:
    """Skew over ranks if every ``etp`` neighbours cut each of their experts into ``etp`` slices and shared the rows."""
    return skew(rank_loads(tokens_E, ep).reshape(-1, etp).mean(1))


def dead_experts(tokens_E: Counts) -> int:
    """Experts that no token chose."""
    return int((tokens_E == 0).sum())


@dataclass(frozen=True)
class WhatIf:
    """Skew over the ranks of another ep: mean of the layers, and the worst of them."""

    ep: int
    mean: float
    worst: float


def what_if(layers: Sequence[Counts], ep: int) -> list[WhatIf]:
    """One line for ``ep`` and every power of two that divides the experts of all layers, ascending.

    Neighbouring experts stay together, as ranks hold them. Slices of the experts of ``etp`` neighbouring ranks on each
    of them (ETP) have the skew of ``ep / etp``: the line of that ep tells it.
    """
    common = int(np.gcd.reduce([tokens_E.size for tokens_E in layers]))
    candidates = {ep} | {2**power for power in range(1, common.bit_length()) if common % 2**power == 0}
    lines = []
    for degree in sorted(candidates):
        skews = [skew(rank_loads(tokens_E, degree)) for tokens_E in layers]
        lines.append(WhatIf(degree, float(np.mean(skews)), max(skews)))
    return lines
