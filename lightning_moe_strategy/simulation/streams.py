"""The work of a step and what waits for what, as FSDP2 arranges it on a GPU's streams (torch 2.13, ``_fully_shard``).

* Compute, and the collectives of attention and experts, run one after the other: the program. What attention starts
  ahead, and rows on their way to experts, begins there, runs beside it and is waited for where it is read; of two steps
  the second starts when the first has ended.
* Gathers have a stream of their own. One starts when it is issued: the host runs ahead of the GPU, but counts of rows
  stop it in every layer that dispatches; and buffers of gathers are few, so that a gather issued after a unit was
  waited for starts after that unit's weights are copied out (in a forward pass, after those of the unit before).
* Reductions have another, all-reduces over replicas a third. The inputs of few reductions are held, of one where
  nothing else is set: the next unit's gradients wait for it, and the end of the backward pass for all of them.
* Collectives of one process group run in the order of issue.
"""

from collections.abc import Iterable, Mapping

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import Group
from lightning_moe_strategy.plan.time import INDEXER_RATE, SPARSE_ATTENTION_RATE
from lightning_moe_strategy.simulation.arithmetic import ComputeKind
from lightning_moe_strategy.simulation.communication import Collective
from lightning_moe_strategy.simulation.issue import (
    AheadWait,
    Communicate,
    Compute,
    GatherWait,
    Issue,
    PhaseEnd,
    ReductionWait,
)
from lightning_moe_strategy.simulation.schedule import Lane, Task

# As shares of the linear layers' rate: what the planner takes for dense and for sparse attention.
RATES: dict[ComputeKind, float] = {
    "linear": 1.0,
    "attention": 1.0,
    "sparse_attention": SPARSE_ATTENTION_RATE,
    "indexer": INDEXER_RATE,
}


def tasks_of(issues: Iterable[Issue], cluster: Cluster, links: Mapping[str, Group]) -> list[Task]:
    """The tasks of a step on one GPU of ``cluster``. ``links``: how far each axis reaches."""
    streams = _Streams(cluster, links)
    for issue in issues:
        streams.add(issue)
    return streams.tasks


def transfer_seconds(collective: Collective, link: Group, cluster: Cluster) -> list[tuple[Lane, float]]:
    """Seconds of a collective on each link, in the order in which it takes them.

    A hierarchical collective runs its two steps one after the other: over RDMA first, then inside NVLink, and a
    reduction the other way round. An all-reduce moves its buffer twice.
    """
    num_bytes = collective.num_bytes * (2 if collective.name == "all_reduce" else 1)
    steps: list[tuple[Lane, float]] = [
        ("rdma", num_bytes * link.rdma_share / cluster.rdma_bytes_per_second),
        ("nvlink", num_bytes * link.nvlink_share / cluster.nvlink_bytes_per_second),
    ]
    ordered = steps[::-1] if "reduce" in collective.name else steps
    return [(lane, seconds) for lane, seconds in ordered if seconds > 0]


class _Streams:
    def __init__(self, cluster: Cluster, links: Mapping[str, Group]) -> None:
        self.tasks: list[Task] = []
        self._cluster, self._links = cluster, links
        self._program: int | None = None
        self._gathers: int | None = None
        self._reductions: int | None = None
        self._held: list[int] = []
        """Reductions whose inputs are in memory, oldest first."""
        self._all_reduces: int | None = None
        self._groups: dict[str, int] = {}
        """The last collective of each process group."""
        self._host: int | None = None
        """What the host waited for last."""
        self._gate: int | None = None
        """What frees the buffer of the next gather."""
        self._kept: int | None = None
        """The last copy out of a gathered buffer that is kept."""
        self._pending: dict[str, int] = {}
        self._ahead: dict[int, int] = {}
        """By number, the last transfer of what was started ahead."""

    def add(self, issue: Issue) -> None:
        if isinstance(issue, Compute):
            rate = self._cluster.achieved_flops * RATES[issue.kind]
            self._run(issue, seconds=issue.flops / rate, lane="compute", name=issue.module, amount=issue.flops)
        elif isinstance(issue, Communicate):
            self._communicate(issue)
        elif isinstance(issue, AheadWait):
            self._run(issue, self._ahead.pop(issue.number, None))
        elif isinstance(issue, GatherWait):
            self._run(issue, self._pending.pop(issue.unit, None))
            self._free(issue.is_kept)
        elif isinstance(issue, ReductionWait):
            done = max(0, len(self._held) - issue.max_held + 1)
            self._run(issue, *self._held[:done])
            self._held = self._held[done:]
        elif isinstance(issue, PhaseEnd):
            self._run(issue, *((self._reductions, self._all_reduces) if issue.phase == "backward" else ()))
            self._gate = self._program
            self._kept, self._held = None, []

    def _free(self, is_kept: bool) -> None:
        if is_kept:
            self._gate, self._kept = self._gate if self._kept is None else self._kept, self._program
        else:
            self._gate = self._program

    def _communicate(self, issue: Communicate) -> None:
        collective = issue.collective
        if issue.number is not None:
            before = None if issue.follows is None else self._ahead[issue.follows]
            self._ahead[issue.number] = self._transfer(issue, self._program, before)
        elif collective.unit is None:
            self._program = self._transfer(issue, self._program, is_program=True)
            if collective.is_read_by_host:
                self._host = self._program
        elif collective.name == "all_gather":
            self._gathers = self._transfer(issue, self._gathers, self._host, self._gate)
            self._pending[collective.unit] = self._gathers
        elif collective.name == "reduce_scatter":
            self._reductions = self._transfer(issue, self._program, self._reductions)
            self._held.append(self._reductions)
        else:
            self._all_reduces = self._transfer(issue, self._program, self._reductions, self._all_reduces)

    def _transfer(self, issue: Communicate, *after: int | None, is_program: bool = False) -> int:
        collective = issue.collective
        steps: list[tuple[Lane | None, float]] = [(None, 0.0)]
        steps = [*transfer_seconds(collective, self._links[collective.axis], self._cluster)] or steps
        last = self._groups.get(collective.group)
        for lane, seconds in steps:
            last = self._add(
                Task(
                    lane=lane,
                    seconds=seconds,
                    after=_indices(*after, last),
                    name=f"{collective.name} {collective.unit or ''}".strip(),
                    axis=collective.axis,
                    phase=issue.phase,
                    moment=issue.moment,
                    is_program=is_program,
                    amount=collective.num_bytes,
                )
            )
            after = ()
        assert last is not None
        self._groups[collective.group] = last
        return last

    def _run(
        self,
        issue: Issue,
        *after: int | None,
        seconds: float = 0.0,
        lane: Lane | None = None,
        name: str = "",
        amount: int = 0,
    ) -> None:
        self._program = self._add(
            Task(
                lane=lane,
                seconds=seconds,
                after=_indices(self._program, *after),
                name=name,
                phase=issue.phase,
                moment=issue.moment,
                is_program=True,
                amount=amount,
            )
        )

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _indices(*after: int | None) -> tuple[int, ...]:
    return tuple(sorted({index for index in after if index is not None}))
