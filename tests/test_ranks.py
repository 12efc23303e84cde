"""The pool itself: results come back in rank order, an error names its rank."""

import pytest
import torch
import torch.distributed as dist


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
