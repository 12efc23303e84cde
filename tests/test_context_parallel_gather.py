"""The whole sequence in natural order, and its gradient as an FP32 sum over the ranks."""

import pytest
import torch
import torch.distributed as dist

from lightning_moe_strategy.context_parallel import gather
from lightning_moe_strategy.context_parallel.gather import gather_sequence, restore_sequence
from lightning_moe_strategy.context_parallel.layout import contiguous, zigzag


def gather_and_differentiate(dim, kind, tail):
    group = dist.group.WORLD
    layout = {"zigzag": zigzag, "contiguous": contiguous}[kind](16, group.size())
    layout = layout.with_tail_token() if tail else layout
    whole = torch.randn(2, 3, layout.num_tokens, dtype=torch.float64).movedim(2, dim)
    local = whole.index_select(dim, layout.token_ids(group.rank())).requires_grad_()
    gathered = gather_sequence(local, dim, layout, group)
    weights = torch.randn(*gathered.shape, dtype=torch.float64)  # every rank draws the same
    ((group.rank() + 1) * gathered * weights).sum().backward()
    ranks_sum = group.size() * (group.size() + 1) / 2
    expected = ranks_sum * weights.index_select(dim, layout.token_ids(group.rank()))
    return torch.equal(gathered, whole), torch.allclose(local.grad, expected, rtol=1e-14)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("tail", [False, True])
def test_gather_restores_natural_order_and_sums_gradients(ranks2, kind, dim, tail):
    assert ranks2(gather_and_differentiate, dim, kind, tail) == [(True, True)] * 2


def test_gather_is_right_on_four_ranks(ranks4):
    assert ranks4(gather_and_differentiate, 1, "zigzag", False) == [(True, True)] * 4


def dtypes_on_the_wire():
    seen = []

    def spy(function):
        def call(x, group):
            seen.append(x.dtype)
            return function(x, group)

        return call

    originals = gather.all_gather_along_dim0, gather.reduce_scatter_along_dim0
    gather.all_gather_along_dim0, gather.reduce_scatter_along_dim0 = map(spy, originals)
    try:
        x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
        gather_sequence(x, 0, zigzag(8, 2), dist.group.WORLD).sum().backward()
    finally:
        gather.all_gather_along_dim0, gather.reduce_scatter_along_dim0 = originals
    return seen, x.grad.dtype


def test_values_travel_in_their_dtype_and_gradients_in_fp32(ranks2):
    assert ranks2(dtypes_on_the_wire) == [([torch.bfloat16, torch.float32], torch.bfloat16)] * 2


def restore_odd_length(dtype):
    group = dist.group.WORLD
    layout = zigzag(8, 2).with_tail_token()
    whole = (torch.arange(2 * layout.num_tokens).view(2, -1) % 3).to(dtype)
    local = whole[:, layout.token_ids(group.rank())]
    return torch.equal(restore_sequence(local, 1, layout, group, num_tokens=7), whole[:, :7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_restore_cuts_padding_and_dummies(ranks2, dtype):
    assert ranks2(restore_odd_length, dtype) == [True, True]
