"""The plan of redundant experts, which is arithmetic: no ranks here.

Shapes: R ranks, E experts in all, L experts of each rank.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from lightning_moe_strategy.expert_parallel.redundancy import RedundancyPlan, plan_redundancy

NUM_MATRICES = 60
# Tokens per expert of a layer of a small model after some hundred steps without a balance loss.
RECORDED = (311, 18, 77, 402, 5, 129, 64, 250, 33, 91, 0, 512, 147, 20, 205, 48)
KINDS = ("uniform", "zipf", "all_to_one", "recorded", "empty_ranks", "few_rows")


def counts(kind: str, seed: int) -> tuple[np.ndarray, int]:
    """A matrix [R, E] of some size, and R."""
    generator = np.random.default_rng(seed)
    num_ranks, num_local = int(generator.choice([1, 2, 3, 4, 8, 16])), int(generator.choice([1, 2, 4]))
    num_experts = num_ranks * num_local
    shares = np.ones(num_experts)
    if kind == "zipf":
        shares = generator.permutation(1 / np.arange(1, num_experts + 1) ** 1.2)
    elif kind == "all_to_one":
        shares = np.eye(num_experts)[generator.integers(num_experts)]
    elif kind == "recorded":
        shares = np.resize(RECORDED, num_experts)
    rows_R = np.full(num_ranks, 96)
    if kind == "empty_ranks":
        rows_R = generator.choice([0, 40, 97], num_ranks)
    elif kind == "few_rows":
        rows_R = generator.integers(0, 3, num_ranks)
    return np.stack([generator.multinomial(rows, shares / shares.sum()) for rows in rows_R]), num_ranks


def matrices(kind: str) -> list[tuple[np.ndarray, int]]:
    return [counts(kind, seed) for seed in range(NUM_MATRICES)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_computes_exactly_the_mean(kind: str):
    for counts_RE, num_ranks in matrices(kind):
        after, (share, rest) = plan_redundancy(counts_RE, num_ranks).rows_after, divmod(int(counts_RE.sum()), num_ranks)
        assert sorted(after) == [share] * (num_ranks - rest) + [share + 1] * rest
        if kind in ("uniform", "zipf", "all_to_one", "recorded"):
            assert set(after) == {96}  # max / mean is 1.0


@pytest.mark.parametrize("max_imbalance", [1.0, 1.05, 1.5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_computed_once_and_no_rank_has_more_than_allowed(kind: str, max_imbalance: float):
    for counts_RE, num_ranks in matrices(kind):
        plan = plan_redundancy(counts_RE, num_ranks, max_imbalance=max_imbalance)
        computed_RE = np.zeros_like(counts_RE)
        np.add.at(computed_RE.T, plan.expert_S, plan.rows_RS.T)
        assert (computed_RE == counts_RE).all()
        mean = counts_RE.sum() / num_ranks
        assert max(plan.rows_after) <= max(np.ceil(mean), max_imbalance * mean)
        assert sum(plan.rows_before) == sum(plan.rows_after)


@pytest.mark.parametrize("max_imbalance", [1.0, 1.05])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_takes_from_one_home_and_at_most_as_many_experts_as_it_has(kind: str, max_imbalance: float):
    for counts_RE, num_ranks in matrices(kind):
        plan, num_local = (
            plan_redundancy(counts_RE, num_ranks, max_imbalance=max_imbalance),
            counts_RE.shape[1] // num_ranks,
        )
        for rank, experts in enumerate(plan.extra_experts):
            homes = {expert // num_local for expert in experts}
            assert len(homes) <= 1 and rank not in homes
            assert len(set(experts)) == len(experts) <= num_local
        for expert, rank, slot in zip(plan.expert_S, plan.rank_S, plan.slot_S, strict=True):
            own = range(rank * num_local, (rank + 1) * num_local)
            assert [*own, *plan.extra_experts[rank]][slot] == expert
        assert max(Counter(zip(plan.rank_S.tolist(), plan.slot_S.tolist(), strict=True)).values()) == 1
        assert plan.num_moved_rows == sum(
            int(rows) for rows, s in zip(plan.rows_RS.sum(0), plan.slot_S, strict=True) if s >= num_local
        )


def test_nothing_moves_when_ranks_differ_by_no_more_than_they_must():
    for counts_RE in (np.full((4, 8), 3), np.array([[1, 2], [2, 2]]), np.zeros((2, 4), dtype=np.int64)):
        plan = plan_redundancy(counts_RE, counts_RE.shape[0])
        assert plan.num_moved_experts == plan.num_moved_rows == 0
        assert plan.rows_after == plan.rows_before


def test_what_may_be_uneven_moves_fewer_experts():
    moved: dict[float, int] = {}
    for max_imbalance in (1.0, 1.05, 1.5):
        plans = [
            plan_redundancy(*m, max_imbalance=max_imbalance) for kind in ("uniform", "zipf") for m in matrices(kind)
        ]
        moved[max_imbalance] = sum(plan.num_moved_experts for plan in plans)
    assert moved[1.5] < 0.7 * moved[1.05] and moved[1.05] < 0.9 * moved[1.0]


def test_a_home_that_gives_too_much_is_given_to_in_turn():
    """Two homes have one row too many each, and the rank that lacks both may take from one alone."""
    plan = plan_redundancy(np.array([[4, 4, 1]]), 3)
    assert plan.rows_after == (3, 3, 3) and plan.extra_experts == ((1,), (), (0,))


def test_rows_go_by_source_rank_and_the_last_ones_first():
    plan = plan_redundancy(np.array([[5, 0], [3, 0]]), 2)
    assert plan.extra_experts == ((), (0,))
    segments = list(zip(plan.expert_S, plan.rank_S, plan.slot_S, plan.rows_RS.T.tolist(), strict=True))
    assert segments == [(0, 0, 0, [4, 0]), (0, 1, 1, [1, 3]), (1, 1, 0, [0, 0])]


def test_a_move_is_of_as_few_experts_as_make_it_up():
    plan = plan_redundancy(np.array([[1, 9, 2, 20, 0, 0, 0, 0]]), 2)
    assert plan.extra_experts == ((), (3,))


def same(one: RedundancyPlan, other: RedundancyPlan) -> bool:
    return all(
        np.array_equal(value, getattr(other, name)) for name, value in vars(one).items() if name != "extra_experts"
    )


def test_the_same_counts_make_the_same_plan_whatever_their_integers():
    counts_RE, num_ranks = counts("zipf", 3)
    plan = plan_redundancy(counts_RE, num_ranks)
    again = plan_redundancy(counts_RE.astype(np.int32), num_ranks)
    assert same(plan, again) and plan.extra_experts == again.extra_experts


@pytest.mark.parametrize(
    "num_ranks, options, words",
    [
        (3, {}, r"num_ranks\(3\) must divide the counts' 8 experts"),
        (2, {"max_imbalance": 0.99}, r"max_imbalance\(0.99\) must be at least 1"),
        (2, {"max_imbalance": float("nan")}, r"max_imbalance\(nan\)"),
    ],
)
def test_errors_name_the_number(num_ranks: int, options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        plan_redundancy(np.ones((num_ranks, 8), dtype=np.int64), num_ranks, **options)
