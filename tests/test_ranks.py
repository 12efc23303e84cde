"""The pool itself: results come back in rank order, an error names its rank."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total) * 10 + dist.get_rank()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")


def test_results_come_back_in_rank_order(ranks4):
    assert ranks4(sum_of_ranks) == [60, 61, 62, 63]


def test_an_error_names_its_rank_and_the_pool_recovers(ranks2):
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*rank one says no"):
        ranks2(fail_on_rank_one)
    assert ranks2(sum_of_ranks) == [10, 11]


def threads_with_two_meshes() -> int:
    before = len(os.listdir("/proc/self/task"))
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")) for shape in ((2, 1), (1, 2))]
    held = {"meshes": meshes}
    held["itself"] = held
    assert len(os.listdir("/proc/self/task")) > before
    return before


def test_a_functions_process_groups_end_with_it(ranks2):
    assert ranks2(threads_with_two_meshes) == ranks2(threads_with_two_meshes)
