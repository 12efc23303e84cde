"""The whole sequence in natural order, and its gradient as an FP32 sum over the ranks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_moe_strategy._torch_compat import (
    OperationMode,
    fake_tensors,
    fake_world,
    group_of_collective,
    tensors_in,
)
from lightning_moe_strategy.collectives import TwoStepGroup
from lightning_moe_strategy.context_parallel import gather
from lightning_moe_strategy.context_parallel.gather import gather_sequence, restore_sequence
from lightning_moe_strategy.context_parallel.layout import contiguous, zigzag
from lightning_moe_strategy.mesh import ParallelDims, build_dense_meshes


def two_steps():
    """The world as 2 domains of 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    return TwoStepGroup(whole=dist.group.WORLD, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))


def gather_and_differentiate(dim, kind, tail, in_two_steps=False):
    group = two_steps() if in_two_steps else dist.group.WORLD
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


@pytest.mark.parametrize("in_two_steps", [False, True])
@pytest.mark.parametrize("tail", [False, True])
def test_gather_is_right_on_four_ranks(ranks4, tail, in_two_steps):
    assert ranks4(gather_and_differentiate, 1, "zigzag", tail, in_two_steps) == [(True, True)] * 4


class BytesReceived(OperationMode):
    """By size of the group: what a rank receives of a gather, what it sends of a reduction."""

    def __init__(self):
        super().__init__()
        self.of_group = []

    def run(self, operation, args, kwargs):
        if operation.namespace == "c10d":
            degree = group_of_collective(args).size()
            whole = max(x.numel() * x.element_size() for x in tensors_in(args[:2]))
            self.of_group.append((degree, whole * (degree - 1) // degree))
        return operation(*args, **kwargs)


def test_two_steps_move_over_each_link_what_the_seed_derives():
    """Seed, "What If There's No NVL72?": 1408 B of 1M tokens, 8 x 8: 161.5 MB over RDMA and 1.292 GB over NVLink."""
    dims = ParallelDims(cp=64, cp_inter=8, ep=8).resolve(64, local_world_size=8)
    with fake_world(64, 13):
        group = build_dense_meshes(dims, "cpu", timedelta(minutes=1)).cp_group
        with fake_tensors(), BytesReceived() as received:
            x = torch.empty(1_048_576 // 64, 1408 // 2, dtype=torch.bfloat16, requires_grad=True)
            gather_sequence(x, 0, zigzag(1_048_576, 64), group).sum().backward()
    (_, rdma), (_, nvlink), (_, nvlink_back), (_, rdma_back) = received.of_group
    assert [degree for degree, _ in received.of_group] == [8, 8, 8, 8]
    assert rdma / 1e6 == pytest.approx(161.5, abs=0.05) and nvlink / 1e9 == pytest.approx(1.292, abs=5e-4)
    assert (rdma_back, nvlink_back) == (2 * rdma, 2 * nvlink)  # FP32


def dtypes_on_the_wire():
    seen = []

    def spy(function):
        def call(x, group):
            seen.append(x.dtype)
            return function(x, group)

        return call

    originals = gather.all_gather_in_steps, gather.reduce_scatter_in_steps
    gather.all_gather_in_steps, gather.reduce_scatter_in_steps = map(spy, originals)
    try:
        x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
        gather_sequence(x, 0, zigzag(8, 2), dist.group.WORLD).sum().backward()
    finally:
        gather.all_gather_in_steps, gather.reduce_scatter_in_steps = originals
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
