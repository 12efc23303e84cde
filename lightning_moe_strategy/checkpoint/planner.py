"""Who writes what of a checkpoint: shared out evenly, agreed on once and known until something changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from lightning_moe_strategy.checkpoint.plain import require_plain

_BYTES_AROUND = 1200
"""What ``torch.save`` writes around the numbers of a tensor."""
_AS_BEFORE = SavePlan([], usable=False)


class KnownPlans:
    """What the saves of one training have agreed on: the next one of the same tensors sends none of it again.

    All ranks of a group use one each, in the same saves. torch keeps such plans too (``enable_plan_caching``), for all
    planners of a class, whatever their group, and takes a tensor whose dtype has changed for the same.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """After a save that failed: ranks may know different things."""
        self.own: SavePlan | None = None
        """All that this rank holds."""
        self.to_write: SavePlan | None = None
        """What of it this rank writes."""
        self.everyones: list[SavePlan] = []
        """On rank 0: ``own`` of every rank."""
        self.metadata: Metadata | None = None
        """On rank 0: where every tensor will lie, but for the bytes of the files."""


class PlainPlanner(DefaultSavePlanner):
    """What is no tensor (options of parameter groups) is written so that it loads without pickle; see ``spread``."""

    def __init__(self, known: KnownPlans) -> None:
        super().__init__()
        self._known = known

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        before, self._known.own = self._known.own, plan
        return _AS_BEFORE if plan == before else plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        known, plans = self._known, all_plans
        if any(plan.usable for plan in all_plans):
            before = known.everyones or all_plans
            known.everyones = [new if new.usable else old for new, old in zip(all_plans, before, strict=True)]
            plans, known.metadata = super().create_global_plan(spread(known.everyones))
        assert known.metadata is not None
        return plans, replace(known.metadata)  # the writer adds what it wrote

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self._known.to_write = new_plan
        assert self._known.to_write is not None
        return super().finish_plan(self._known.to_write)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            object = require_plain({write_item.index.fqn: object})[write_item.index.fqn]
        return super().transform_object(write_item, object)


def spread(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave what several ranks hold to one of them each, so that all write about as many bytes.

    torch's own planner does not know yet what a rank alone holds when it gives it a share of what others hold too: on 4
    ranks, the busiest wrote twice what the idlest did.
    """
    ranks_of: dict[MetadataIndex, list[int]] = {}
    bytes_of: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks_of.setdefault(item.index, []).append(rank)
            bytes_of[item.index] = item.tensor_storage_size() or 1
    load = [0] * len(plans)
    writer_of: dict[MetadataIndex, int] = {}
    for index in sorted(ranks_of, key=lambda index: (len(ranks_of[index]), -bytes_of[index])):
        writer_of[index] = min(ranks_of[index], key=lambda rank: load[rank])
        load[writer_of[index]] += bytes_of[index] + _BYTES_AROUND
    return [
        replace(plan, items=[item for item in plan.items if writer_of[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
