"""The lanes of a step by hand: every collective takes as many seconds as it has bytes, every FLOP one second."""

import dataclasses
from typing import Any

import pytest

from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import Group
from lightning_moe_strategy.plan.time import INDEXER_RATE, SPARSE_ATTENTION_RATE
from lightning_moe_strategy.simulation.communication import Collective
from lightning_moe_strategy.simulation.issue import Communicate, Compute, GatherWait, Issue, PhaseEnd, ReductionWait
from lightning_moe_strategy.simulation.schedule import Task, schedule
from lightning_moe_strategy.simulation.streams import transfer_seconds
from lightning_moe_strategy.simulation.timeline import Timeline, time_step

# Of two ranks, each holds half of what is gathered: links of half a byte per second make bytes seconds.
CLUSTER = Cluster(
    name="by-hand", gpu="H", nvl=8, gpus_per_host=8, memory_bytes=1, nvlink_bytes_per_second=0.5,
    rdma_bytes_per_second=0.5, peak_flops=1, achieved_flops=1,
)  # fmt: skip
NEAR, FAR = Group(degree=2, domains=1), Group(degree=2, domains=2)
LINKS = {"fsdp_cp": NEAR, "ep": NEAR, "cp": NEAR, "e_fsdp": FAR, "d_rep": FAR}


def compute(seconds: int, phase: str = "forward", **of: Any) -> Compute:
    return Compute(**{"phase": phase, "moment": 0, "module": "", "kind": "linear", "flops": seconds} | of)


def collective(name: str, axis: str, seconds: int, unit: str | None = None, **of: Any) -> Communicate:
    made = {"name": name, "axis": axis, "num_bytes": seconds, "group": f"{axis} {name}", "unit": unit}
    return Communicate(phase="", moment=0, collective=Collective(**made | {"is_read_by_host": False} | of))


def gather(unit: str, seconds: int, axis: str = "fsdp_cp", **of: Any) -> Communicate:
    return collective("all_gather", axis, seconds, unit, **of)


def reduce(unit: str, seconds: int, axis: str = "fsdp_cp", **of: Any) -> Communicate:
    return collective("reduce_scatter", axis, seconds, unit, **of)


def wait(unit: str, *, is_kept: bool = False) -> GatherWait:
    return GatherWait(phase="", moment=0, unit=unit, is_kept=is_kept)


def held(max_held: int = 1) -> ReductionWait:
    return ReductionWait(phase="backward", moment=0, max_held=max_held)


def ended(phase: str) -> PhaseEnd:
    return PhaseEnd(phase=phase, moment=0)


def run(*issues: Issue) -> Timeline:
    return time_step(issues, cluster=CLUSTER, links=LINKS, tokens_per_gpu=60)


def start_of(timeline: Timeline, name: str) -> float:
    return next(span.start for span in timeline.spans if span.task.name == name)


def test_a_gather_is_hidden_by_the_unit_before_and_exposed_beyond_it():
    def two_units(seconds_of_second_gather: int) -> Timeline:
        return run(gather("a", 2), wait("a"), gather("b", seconds_of_second_gather), compute(5), wait("b"), compute(4))

    hidden, exposed = two_units(5), two_units(8)
    assert hidden.seconds.step == 2 + 5 + 4
    assert hidden.seconds.exposed == {"fsdp_cp": 2}
    assert exposed.seconds.step == 2 + 8 + 4
    assert exposed.seconds.exposed == {"fsdp_cp": 2 + 3}
    assert exposed.seconds.compute == 9
    assert exposed.seconds.busy == {"compute": 9, "nvlink": 10, "rdma": 0}
    assert exposed.seconds.tokens_per_second_per_gpu == 60 / 14


@pytest.mark.parametrize(("is_kept", "start"), [(True, 1), (False, 6)])
def test_a_gathered_buffer_that_is_kept_lets_the_next_gather_start_a_unit_earlier(is_kept, start):
    timeline = run(
        gather("a", 1), wait("a", is_kept=is_kept), gather("b", 1), compute(5), wait("b", is_kept=is_kept),
        gather("c", 2), compute(5), wait("c", is_kept=is_kept),
    )  # fmt: skip
    # Issued after b was waited for, at 6; b itself is done at 2.
    assert start_of(timeline, "all_gather c") == max(start, 2)


def test_the_host_issues_nothing_before_it_has_the_counts():
    counts = collective("all_to_all", "ep", 1, is_read_by_host=True)
    ahead = run(compute(5), collective("all_to_all", "ep", 1), gather("a", 1, "e_fsdp"))
    behind = run(compute(5), counts, gather("a", 1, "e_fsdp"))
    assert start_of(ahead, "all_gather a") == 0
    assert start_of(behind, "all_gather a") == 6


def test_dispatch_and_attention_stand_in_the_place_of_compute():
    timeline = run(compute(1), collective("all_to_all", "ep", 3), collective("all_gather", "cp", 2), compute(1))
    assert timeline.seconds.step == 7
    assert timeline.seconds.exposed == {"ep": 3, "cp": 2}


def test_one_link_does_one_thing_at_a_time_and_two_links_two():
    def beside(axis: str) -> float:
        return run(gather("a", 4, axis), compute(1), collective("all_to_all", "ep", 2)).seconds.step

    assert beside("fsdp_cp") == 4 + 2
    assert beside("e_fsdp") == 1 + 2 + 1  # NVLink is free at 1, RDMA until 4


def test_a_reduction_runs_beside_compute_until_the_next_unit_needs_its_buffer():
    timeline = run(
        compute(1, "backward"), held(), reduce("b", 5), compute(2, "backward"), held(), reduce("a", 1),
        compute(3, "backward"), ended("backward"),
    )  # fmt: skip
    # 1 + 5 until b is reduced, of which 2 are hidden; 3 hide the reduction of a.
    assert timeline.seconds.step == 1 + 5 + 3
    assert timeline.seconds.exposed == {"fsdp_cp": 3}
    with_two_held = run(
        compute(1, "backward"), held(2), reduce("b", 5), compute(2, "backward"), held(2), reduce("a", 1),
        compute(3, "backward"), ended("backward"),
    )  # fmt: skip
    assert with_two_held.seconds.step == 1 + 5 + 1
    assert with_two_held.seconds.exposed == {"fsdp_cp": 1}


def test_the_backward_pass_ends_with_its_last_reduction_over_replicas():
    timeline = run(
        compute(2, "backward"), held(), reduce("a", 3), collective("all_reduce", "d_rep", 2, "a"), ended("backward"),
        compute(1, "optimizer"),
    )  # fmt: skip
    assert timeline.seconds.step == 2 + 3 + 2 * 2 + 1  # an all-reduce moves its buffer twice
    assert timeline.seconds.exposed == {"d_rep": 7}
    # No unit waits for replicas: only the reduce-scatter's input is held.
    assert run(
        compute(2, "backward"), held(), reduce("b", 3), collective("all_reduce", "d_rep", 9, "b"),
        compute(3, "backward"), held(), compute(5, "backward"),
    ).seconds.exposed == {}  # fmt: skip


def test_gathers_and_reductions_of_one_process_group_take_turns():
    shared = run(compute(1), held(), reduce("b", 6, "e_fsdp", group="g"), gather("a", 1, "fsdp_cp", group="g"))
    apart = run(compute(1), held(), reduce("b", 6, "e_fsdp", group="g"), gather("a", 1, "fsdp_cp", group="h"))
    assert start_of(shared, "all_gather a") == 7
    assert start_of(apart, "all_gather a") == 0


def test_a_collective_over_both_links_takes_one_after_the_other():
    link = Group(degree=4, domains=2)  # of 4 quarters, 2 come over RDMA and 1 over NVLink
    moved = collective("all_gather", "cp", 8).collective
    assert transfer_seconds(moved, link, CLUSTER) == [("rdma", 8.0), ("nvlink", 4.0)]
    reduced = collective("reduce_scatter", "cp", 8).collective
    assert transfer_seconds(reduced, link, CLUSTER) == [("nvlink", 4.0), ("rdma", 8.0)]
    both = time_step([collective("all_gather", "cp", 8)], cluster=CLUSTER, links={"cp": link}, tokens_per_gpu=1)
    assert both.seconds.step == 12 and both.seconds.exposed == {"cp": 12}


def test_each_kind_of_compute_has_its_rate():
    kinds = ("linear", "attention", "sparse_attention", "indexer")
    step = run(*(compute(6, kind=kind) for kind in kinds)).seconds.step
    assert step == pytest.approx(6 + 6 + 6 / SPARSE_ATTENTION_RATE + 6 / INDEXER_RATE)


def test_memory_is_allocated_when_what_needs_it_starts():
    dispatch = dataclasses.replace(collective("all_to_all", "ep", 3), moment=15)
    timeline = run(compute(2, moment=10), dispatch, compute(4, moment=20))
    assert timeline.times_of_moments([1, 10, 11, 15, 16, 20, 21]) == [0, 0, 2, 2, 5, 5, 9]


def test_a_lane_serves_first_what_is_ready_first():
    def task(lane: str | None, seconds: float, *after: int) -> Task:
        return Task(lane=lane, seconds=seconds, after=after, phase="", is_program=False)

    late, early = 2, 3
    spans = schedule([task("compute", 5), task("rdma", 1), task("nvlink", 3, 0), task("nvlink", 3, 1)])
    assert (spans[early].start, spans[late].start) == (1, 5)
    spans = schedule([task("compute", 2), task("rdma", 1), task("nvlink", 3, 0), task("nvlink", 3, 1)])
    assert (spans[early].start, spans[late].start) == (1, 4)
    assert schedule([]) == []
