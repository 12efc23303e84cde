"""What redundant experts did for the load of the ranks: skew at home and as computed, experts that moved.

Shapes: N numbers of a `Tally`.
"""

from collections.abc import Mapping
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy.expert_parallel.experts import dispatcher_of
from lightning_moe_strategy.expert_parallel.redundant import RedundantDispatcher, Tally


class MovedExperts:
    """Tallies of all layers, by stage. Without redundant experts there is nothing to say, and no collective."""

    def __init__(self, experts: Mapping[str, nn.Module]) -> None:
        dispatchers = map(dispatcher_of, experts.values())
        self._dispatchers = [d for d in dispatchers if isinstance(d, RedundantDispatcher)]
        self._noted: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}
        self._seen_N = self._tallies()

    def note(self, stage: str) -> None:
        """What the layers did since the last call was of ``stage``. No collective, nothing waits for the device."""
        now_N = self._tallies()
        self._noted[stage] = self._noted.get(stage, 0) + now_N - self._seen_N
        self._seen_N = now_N

    def take_figures(self, stage: str, device: torch.device) -> dict[str, float]:
        """Of ``stage`` since they were last taken, over all ranks; every rank calls it.

        ``rank_skew_at_home`` and ``rank_skew_computed``: rows of the busiest rank over the mean, padding included, of
        each layer and micro-batch, as the step waits for them; ``moved_experts``: of a layer and micro-batch, over the
        ranks of ep.
        """
        if not self._dispatchers:
            return {}
        self.note(stage)
        numbers_N = self._noted.pop(stage).to(device)
        dist.all_reduce(numbers_N)
        numbers_N = numbers_N.cpu()
        self._taken[stage] = self._taken.get(stage, 0) + numbers_N
        return _figures(numbers_N)

    def summary(self, stage: str) -> str | None:
        """One line on all figures that were taken of ``stage``."""
        if stage not in self._taken:
            return None
        at_home, computed, moved = _figures(self._taken[stage]).values()
        return (
            f"Skew of ranks: {at_home:.2f} with every expert at home, {computed:.2f} as computed. "
            f"Experts moved per layer and micro-batch: {moved:.1f}."
        )

    def _tallies(self) -> Tensor:
        """All layers together, since their dispatchers were made."""
        tallies = [astuple(Tally()), *(astuple(dispatcher.tally) for dispatcher in self._dispatchers)]
        return torch.tensor(tallies, dtype=torch.float64).sum(0)


def _figures(numbers_N: Tensor) -> dict[str, float]:
    total = Tally(**dict(zip(vars(Tally()), numbers_N.tolist(), strict=True)))
    if not total.mean_rows:
        return {"rank_skew_at_home": 1.0, "rank_skew_computed": 1.0, "moved_experts": 0.0}
    return {
        "rank_skew_at_home": total.busiest_before / total.mean_rows,
        "rank_skew_computed": total.busiest_after / total.mean_rows,
        "moved_experts": total.moved_experts / total.num_plans,
    }
