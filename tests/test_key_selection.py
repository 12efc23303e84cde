"""Shapes: B batch, L queries, S keys, H heads, N channels, K keys per query."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_moe_strategy._torch_compat import fake_tensors
from lightning_moe_strategy.kernels import key_selection as kernel
from lightning_moe_strategy.kernels.key_selection import NO_KEY, select_keys

BATCH, QUERIES, HEADS, CHANNELS = 2, 13, 3, 5


def inputs(num_keys: int = QUERIES, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return (
        draw(BATCH, QUERIES, HEADS, CHANNELS),
        draw(BATCH, num_keys, CHANNELS),
        draw(BATCH, QUERIES, HEADS),
    )


def naive(query: Tensor, key: Tensor, weights: Tensor, positions: list[int], top_k: int) -> list[list[list[int]]]:
    """Every key scored in float64 and sorted in Python: best first, of equals the lower id first."""
    query, key, weights = (x.double() for x in (query, key, weights))
    width = min(top_k, key.shape[1])
    rows = []
    for b in range(query.shape[0]):
        rows.append([])
        for i, position in enumerate(positions):
            scores = (weights[b, i, :, None] * (query[b, i] @ key[b].T).clamp(min=0)).sum(0).tolist()
            visible = [s for s in range(key.shape[1]) if s <= position]
            best = sorted(visible, key=lambda s: (-scores[s], s))[:width]  # noqa: B023
            rows[-1].append(best + [NO_KEY] * (width - len(best)))
    return rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 4, QUERIES, 50])
def test_the_best_visible_keys_are_those_of_a_float64_sort(top_k, dtype):
    query, key, weights = inputs(dtype=dtype)
    ids = select_keys(query, key, weights, top_k=top_k)
    assert ids.dtype == torch.int32 and ids.shape == (BATCH, QUERIES, min(top_k, QUERIES))
    assert ids.tolist() == naive(query, key, weights, list(range(QUERIES)), top_k)


@pytest.mark.parametrize("scores_per_block", [1, 60, 2**23])
@pytest.mark.parametrize("products_per_chunk", [1, 40, 2**24])
def test_blocks_and_chunks_change_nothing(scores_per_block, products_per_chunk, monkeypatch):
    monkeypatch.setattr(kernel, "SCORES_PER_BLOCK", scores_per_block)
    monkeypatch.setattr(kernel, "PRODUCTS_PER_CHUNK", products_per_chunk)
    query, key, weights = inputs(num_keys=29)
    # What a rank of a zig-zag holds: an early and a late piece of the sequence, not in order.
    positions = [*range(22, 28), *range(3, 10)]
    ids = select_keys(query, key, weights, torch.tensor(positions), top_k=6)
    assert ids.tolist() == naive(query, key, weights, positions, 6)


def test_where_too_few_keys_are_visible_the_rest_is_no_key():
    query, key, weights = inputs()
    ids = select_keys(query, key, weights, top_k=4)
    assert ids[:, 0].tolist() == [[0, NO_KEY, NO_KEY, NO_KEY]] * BATCH
    positions = torch.full((QUERIES,), -1)
    assert (select_keys(query, key, weights, positions, top_k=4) == NO_KEY).all()


def test_of_equal_scores_the_lower_id_wins_whatever_the_sign_of_zero():
    """All products negative: every score is a plateau of +0.0 or -0.0, as the signs of the weights have it."""
    query, key, _ = inputs(num_keys=40)
    query, key = -query.abs(), key.abs()
    positions = torch.full((QUERIES,), 39)
    for signs in itertools.product([-1.0, 1.0], repeat=HEADS):
        weights = torch.tensor(signs).expand(BATCH, QUERIES, HEADS)
        ids = select_keys(query, key, weights, positions, top_k=7)
        assert ids.tolist() == [[list(range(7))] * QUERIES] * BATCH


def test_a_device_that_sums_to_minus_zero_changes_no_choice(monkeypatch):
    scores = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0, -0.0]])
    monkeypatch.setattr(kernel, "_scores", lambda *args: scores.clone())
    ids = select_keys(torch.ones(1, 1, 1, 1), torch.ones(1, 6, 1), torch.ones(1, 1, 1), torch.tensor([5]), top_k=6)
    assert ids.tolist() == [[[0, 1, 2, 3, 5, 4]]]


def test_a_plateau_between_better_and_worse_keys_is_cut_at_the_lowest_ids():
    """One head and one channel, so that a score is weight * max(0, q * k)."""
    key = torch.tensor([0.0, 3.0, -1.0, 3.0, 0.0, 5.0, 3.0])[None, :, None]
    query = torch.ones(1, 2, 1, 1)
    weights = torch.tensor([[[2.0], [-2.0]]])
    ids = select_keys(query, key, weights, torch.tensor([6, 6]), top_k=4)
    assert ids.tolist() == [[[5, 1, 3, 6], [0, 2, 4, 1]]]


def test_scores_are_fp32_under_autocast_and_for_bf16():
    query, key, weights = inputs(num_keys=64)
    positions = torch.full((QUERIES,), 63)
    expected = select_keys(query, key, weights, positions, top_k=20)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_keys(query, key, weights, positions, top_k=20), expected)


class Sizes(TorchDispatchMode):
    """The most numbers in any tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def test_no_tensor_grows_with_queries_times_keys(monkeypatch):
    monkeypatch.setattr(kernel, "SCORES_PER_BLOCK", 512)
    monkeypatch.setattr(kernel, "PRODUCTS_PER_CHUNK", 512)
    query, key, weights = torch.randn(1, 256, 2, 4), torch.randn(1, 256, 4), torch.randn(1, 256, 2)
    with Sizes() as sizes:
        # The operation's own steps, which are one step to a mode outside of it.
        kernel._select_by_blocks(query, key, weights, None, None, 8)
    assert sizes.largest == 256 * 8 == query.numel()  # the ids; 256 * 256 scores were made


def test_no_value_is_read_where_there_are_only_shapes():
    with fake_tensors():
        query, key, weights = torch.empty(2, 6, 4, 8), torch.empty(2, 100, 8), torch.empty(2, 6, 4)
        with Sizes() as sizes:
            ids = select_keys(query, key, weights, torch.zeros(6, dtype=torch.int64), top_k=32)
    assert ids.shape == (2, 6, 32) and ids.dtype == torch.int32
    assert sizes.largest == ids.numel()


def test_flops_are_products_with_the_half_of_the_keys_that_is_visible():
    query, key, weights = inputs(num_keys=40)
    with FlopCounterMode(display=False) as counter:
        select_keys(query, key, weights, torch.arange(QUERIES) + 20, top_k=4)
    assert counter.get_total_flops() == 2 * BATCH * QUERIES * 40 * HEADS * CHANNELS // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, r"top_k\(0\) must be at least 1"),
        ({"key": torch.zeros(BATCH, 7, 4)}, r"query \(2, 13, 3, 5\), key \(2, 7, 4\).*\[B, S, N\]"),
        ({"key": torch.zeros(BATCH, 7, 5)}, r"13 queries cannot be the first of 7 keys. Pass query_positions_L"),
        ({"positions": torch.arange(3)}, r"query_positions_L \(3,\) must hold one position for each of the 13"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    query, key, weights = inputs()
    with pytest.raises(ValueError, match=message):
        select_keys(query, change.get("key", key), weights, change.get("positions"), top_k=change.get("top_k", 4))


def test_keys_before_the_start_of_a_querys_document_are_not_selected():
    torch.manual_seed(0)
    query, key, weights = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 4)
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0, 6, 6, 6]])
    together = select_keys(query, key, weights, top_k=3, first_keys_BL=starts)
    for row, start, end in ((0, 0, 3), (0, 3, 9), (1, 0, 6), (1, 6, 9)):
        alone = select_keys(*(x[row : row + 1, start:end] for x in (query, key, weights)), top_k=3)
        assert torch.equal(together[row : row + 1, start:end], torch.where(alone < 0, alone, alone + start))
