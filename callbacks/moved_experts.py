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
from lightning_moe_strategy.plan.tensor_parallel import degrees_of


class MovedExperts:
    """Tallies of all layers, by stage. Without redundant experts there is nothing to say, and no collective."""

    def __init__(self, experts: Mapping[str, nn.Module]) -> None:
        dispatchers = map(dispatcher_of, experts.values())
        self._dispatchers = [d for d in dispatchers if isinstance(d, RedundantDispatcher)]
        self._noted: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}
        self._etps = degrees_of(self._dispatchers[0].num_ranks) if self._dispatchers else []
        self._seen_N = self._tallies()

    def note(self, stage: str) -> None:
        """What the layers did since the last call was of ``stage``. No collective, nothing waits for the device."""
        now_N = self._tallies()
        self._noted[stage] = self._noted.get(stage, 0) + now_N - self._seen_N
        self._seen_N = now_N

    def take_figures(self, stage: str, device: torch.device) -> dict[str, float]:
        """Of ``stage`` since they were last taken, over all ranks; every rank calls it.

        ``rank_skew_at_home`` and ``rank_skew_computed``: rows of the busiest rank over the mean, padding included, of
        each layer and micro-batch, as the step waits for them; ``rank_skew_at_home_etp2`` and so on: the first, if so
        many ranks shared their experts; ``moved_experts``: of a layer and micro-batch, over the ranks of ep.
        """
        if not self._dispatchers:
            return {}
        self.note(stage)
        numbers_N = self._noted.pop(stage).to(device)
        dist.all_reduce(numbers_N)
        numbers_N = numbers_N.cpu()
        self._taken[stage] = self._taken.get(stage, 0) + numbers_N
        return self._figures(numbers_N)

    def summary(self, stage: str) -> str | None:
        """One line on all figures that were taken of ``stage``."""
        if stage not in self._taken:
            return None
        figures = self._figures(self._taken[stage])
        grouped = [f"{figures[f'rank_skew_at_home_etp{etp}']:.2f} with etp={etp}" for etp in self._etps]
        skews = [f"{figures['rank_skew_at_home']:.2f} with every expert at home", *grouped]
        return (
            f"Skew of ranks in a micro-batch: {', '.join(skews)}, {figures['rank_skew_computed']:.2f} as computed. "
            f"Experts moved per layer and micro-batch: {figures['moved_experts']:.1f}."
        )

    def _tallies(self) -> Tensor:
        """All layers together, since their dispatchers were made."""
        tallies = [astuple(Tally()), *(astuple(dispatcher.tally) for dispatcher in self._dispatchers)]
        return torch.tensor(tallies, dtype=torch.float64).sum(0)

    def _figures(self, numbers_N: Tensor) -> dict[str, float]:
        total = Tally(**dict(zip(vars(Tally()), numbers_N.tolist(), strict=True)))
        busiest = {"rank_skew_at_home": total.busiest_before, "rank_skew_computed": total.busiest_after}
        busiest |= {f"rank_skew_at_home_etp{etp}": getattr(total, f"busiest_etp{etp}") for etp in self._etps}
        skews = {name: rows / total.mean_rows if total.mean_rows else 1.0 for name, rows in busiest.items()}
        return skews | {"moved_experts": total.moved_experts / max(1, total.num_plans)}
