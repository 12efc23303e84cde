"""Bring rows to experts so that every rank of ep computes as many, however skewed the routing.

What a rank has too much of goes to others, and the weights of its experts with it: see `plan_redundancy`. A row's
arithmetic is the same wherever it is computed. Of a weight's gradient, every rank has the part of its own rows; these
travel in FP32, are added at the expert's home, ranks ascending, and rounded once, or not at all where the parameter
takes FP32 (moved_weights.py).

Shapes: T tokens of this rank, K experts per token, D hidden size, E experts in all, L experts of this rank, P ranks of
the ep group, R rows this rank computes, X experts it computes beside its own, S segments of the plan.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import assert_later, in_backward, in_checkpointed_region
from lightning_moe_strategy.collectives import all_gather_along_dim0
from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting, assumed_counts_of_all
from lightning_moe_strategy.expert_parallel.dispatch import Plan, RowDispatcher, _counts, _exchange_plan
from lightning_moe_strategy.expert_parallel.moved_weights import (
    ExpertMove,
    MovedWeights,
    begin_in_backward,
    extend,
    free_until_backward,
)
from lightning_moe_strategy.expert_parallel.redundancy import RedundancyPlan, plan_redundancy
from lightning_moe_strategy.expert_parallel.splits import Chunk, Splits
from lightning_moe_strategy.kernels.routing import Routing, sort_by_expert
from lightning_moe_strategy.plan.tensor_parallel import degrees_of, grouped_loads


@dataclass(frozen=True, kw_only=True)
class RedundantSplits(Splits):
    """``received_PL`` has a column for each of 2 * L slots: of this rank's own experts, and of others'."""

    rows_S: Tensor
    """This rank's rows in each segment; they are in the order of the experts."""
    place_S: Tensor
    """``2 * L * rank + slot`` of each segment."""
    move: ExpertMove | None
    """None where every row is computed at its expert's home."""


@dataclass(kw_only=True)
class RedundantPlan(Plan):
    """A plan under which this rank computes rows of its own experts and of X others."""

    weights: MovedWeights
    fetches_again: bool = False
    """In the backward pass: the same on all ranks."""
    parameters: list[Tensor] = field(default_factory=list)

    def weights_of_rows(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        exchange = self.exchange
        assert exchange is not None and exchange.ticket is not None
        exchange.ticket, extended = extend(exchange.ticket, self.weights, parameters)
        # What a recompute drops needs no freeing, and what it makes again is read by the backward that follows at once.
        is_computed_again = in_checkpointed_region() or in_backward()
        if torch.is_grad_enabled() and not is_computed_again:
            self.fetches_again = True
            self.parameters += parameters
            if self.weights.move.num_extra:
                # Past autograd: filling them again must not look like a change of what it has saved.
                self.weights.extended += [tensor.data for tensor in extended]
        return extended

    def combined(self, combine: Callable[[Tensor], Tensor], rows_RD: Tensor) -> Tensor:
        """What ``combine`` makes of these rows; weights are freed before, and fetched again in the backward pass."""
        if not self.fetches_again:
            return combine(rows_RD)
        exchange = self.exchange
        assert exchange is not None and exchange.ticket is not None
        exchange.ticket, rows_RD = free_until_backward(exchange.ticket, rows_RD, self.weights, self.parameters)
        return begin_in_backward(combine(rows_RD), self.weights, self.parameters)


@dataclass(kw_only=True)
class Tally:
    """What the plans of one group of ranks came to, added up; those of a recompute are not made again."""

    num_plans: int = 0
    mean_rows: float = 0.0
    """Of a rank."""
    busiest_before: int = 0
    """Rows of the home that has most."""
    busiest_etp2: float = 0.0
    """The same if every two neighbours shared their experts (plan/tensor_parallel.py)."""
    busiest_etp4: float = 0.0
    busiest_etp8: float = 0.0
    busiest_after: int = 0
    """Rows of the rank that computes most."""
    moved_rows: int = 0
    """Computed away from home."""
    moved_experts: int = 0
    """Sent to another rank, each time they were."""

    def add(self, plan: RedundancyPlan) -> None:
        self.num_plans += 1
        self.mean_rows += sum(plan.rows_after) / len(plan.rows_after)
        self.busiest_before += max(plan.rows_before)
        for etp in degrees_of(len(plan.rows_before)):
            name = f"busiest_etp{etp}"
            setattr(self, name, getattr(self, name) + max(grouped_loads(plan.rows_before, etp)))
        self.busiest_after += max(plan.rows_after)
        self.moved_rows += plan.num_moved_rows
        self.moved_experts += plan.num_moved_experts


class RedundantDispatcher(RowDispatcher):
    """An all-to-all after which every rank computes as many rows: T * K, where all have as many tokens.

    The ranks gather the counts of all, one host sync, and plan alike. Where an expert moves, its weights travel in one
    all-to-all per parameter, forward and, freed in between, again backward; gradients go the way back. Every rank runs
    the same collectives, whatever its data.

    Args:
        max_imbalance: rows of the busiest rank over the mean, up to which nothing moves; see `plan_redundancy`.
        experts: the module whose rows these are. Its weights are then on their way before the rows, and travel while
            these are made ready and others compute; without it they follow the rows.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        assumed_routing: AssumedRouting | None = None,
        *,
        max_imbalance: float = 1.0,
        experts: nn.Module | None = None,
    ) -> None:
        super().__init__(num_experts, group, assumed_routing)
        self.max_imbalance = max_imbalance
        # Weak: what keeps dispatchers by module would else keep the module.
        self._experts = None if experts is None else weakref.ref(experts)
        self.tally = Tally()

    def plan(self, expert_ids_TK: Tensor, splits: Splits | None = None) -> Plan:
        routing = sort_by_expert(expert_ids_TK, self.num_experts)
        if splits is None:
            whole = slice(0, len(expert_ids_TK))
            (chunk,) = self.once(lambda: [Chunk(tokens=whole, splits=self._agree_on_splits(routing))])
            splits = chunk.splits
        assert isinstance(splits, RedundantSplits)
        if self._is_replaying:
            assert_later(
                (_counts(routing) == splits.sent_E).all(),
                "A recompute chose other experts than the first pass: its router is not deterministic. "
                "Set recompute='none'.",
            )
        exchange = _exchange_plan(splits.received_PL, splits.num_sent, splits.num_received)
        if splits.move is None:
            exchange.offsets_L = exchange.offsets_L[: self.num_local_experts]
            return Plan(routing=routing, exchange=exchange)
        # Sorted by (rank, slot) in place of the expert; stable, so within a segment by (token, k).
        place_R = splits.place_S.repeat_interleave(splits.rows_S, output_size=expert_ids_TK.numel())
        routing = sort_by_expert(place_R[routing.row_of_slot_TK], 2 * self.num_experts)
        exchange.offsets_L = exchange.offsets_L[: self.num_local_experts + splits.move.num_extra]
        return RedundantPlan(routing=routing, exchange=exchange, weights=MovedWeights(splits.move))

    def dispatch(
        self, x_TD: Tensor, probs_TK: Tensor, plan: Plan, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(plan, RedundantPlan):
            plan.weights.begin(self._weights())
        return super().dispatch(x_TD, probs_TK, plan, meanwhile)

    def combine(self, rows_RD: Tensor, plan: Plan) -> Tensor:
        if not isinstance(plan, RedundantPlan):
            return super().combine(rows_RD, plan)
        return plan.combined(lambda rows_RD: super(RedundantDispatcher, self).combine(rows_RD, plan), rows_RD)

    def _weights(self) -> list[Tensor]:
        """This rank's parameters of the experts as they are gathered; none where they are not known, or not there."""
        experts = None if self._experts is None else self._experts()
        if experts is None:
            return []
        with torch.no_grad():
            local = [
                p.to_local() if isinstance(p, DTensor) else p for p in experts._parameters.values() if p is not None
            ]
        is_here = all(len(p) == self.num_local_experts and p.untyped_storage().nbytes() for p in local)
        return local if is_here else []

    def _agree_on_splits(self, routing: Routing) -> RedundantSplits:
        sent_E, (num_tokens, top_k) = _counts(routing), routing.row_of_slot_TK.shape
        gathered_PE = all_gather_along_dim0(sent_E[None], self.group)
        if self.assumed_routing is None:
            # The layer's one host sync.
            counts_PE: npt.NDArray[Any] = gathered_PE.cpu().numpy()
            self._refuse_unknown(num_tokens * top_k, int(counts_PE[self.group.rank()].sum()))
        else:
            counts_PE = np.array(
                assumed_counts_of_all(
                    self.assumed_routing,
                    num_tokens,
                    top_k,
                    rank=self.group.rank(),
                    num_ranks=self.num_ranks,
                    num_local_experts=self.num_local_experts,
                )
            )
        plan = plan_redundancy(counts_PE, self.num_ranks, max_imbalance=self.max_imbalance)
        if not in_backward():  # a user's own recompute plans again
            self.tally.add(plan)
        return self._splits(plan, sent_E)

    def _refuse_unknown(self, num_ids: int, num_counted: int) -> None:
        if num_counted != num_ids:
            raise ValueError(
                f"{num_ids - num_counted} of {num_ids} expert ids are not below num_experts({self.num_experts}): "
                "the router must return ids of this layer's experts."
            )

    def _splits(self, plan: RedundancyPlan, sent_E: Tensor) -> RedundantSplits:
        rank, num_slots = self.group.rank(), 2 * self.num_local_experts
        here_S = plan.rank_S == rank
        received_PL = np.zeros((self.num_ranks, num_slots), dtype=np.int64)
        received_PL[:, plan.slot_S[here_S]] = plan.rows_RS[:, here_S]
        num_sent = np.bincount(plan.rank_S, weights=plan.rows_RS[rank], minlength=self.num_ranks).astype(np.int64)

        def on_device(numbers: npt.NDArray[np.int64]) -> Tensor:
            return torch.tensor(numbers.tolist(), dtype=torch.int32, device=sent_E.device)

        return RedundantSplits(
            sent_E=sent_E,
            received_PL=on_device(received_PL),
            num_sent=num_sent.tolist(),
            num_received=received_PL.sum(1).tolist(),
            rows_S=on_device(plan.rows_RS[rank]),
            place_S=on_device(num_slots * plan.rank_S + plan.slot_S),
            move=self._move(plan.extra_experts) if plan.num_moved_experts else None,
        )

    def _move(self, extra_experts: tuple[tuple[int, ...], ...]) -> ExpertMove:
        rank, num_local_experts = self.group.rank(), self.num_local_experts
        homes = [[expert // num_local_experts for expert in experts] for experts in extra_experts]
        return ExpertMove(
            group=self.group,
            sent=[
                e % num_local_experts for experts in extra_experts for e in experts if e // num_local_experts == rank
            ],
            num_sent=[homes_of_rank.count(rank) for homes_of_rank in homes],
            num_received=[homes[rank].count(home) for home in range(self.num_ranks)],
        )
