"""``next_tokens``: in one process what a loop over tokens says; on cp ranks the same, and its gradient.

Shapes: B batch, S tokens of the whole sequence, L tokens of this rank, D channels.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.collectives import TwoStepGroup
from lightning_moe_strategy.context_parallel.next_tokens import next_tokens_of_sequence
from lightning_moe_strategy.kernels.next_tokens import next_tokens
from tests.test_zigzag import attach

FILL = -7
ONE = [[22]]
SAME = [[9, 2, 11], [9, 2, 11]]
DIFFERENT = [[9, 2, 11], [1, 20, 1]]
"""Lengths of the documents in each row."""


def positions_of(lengths):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def by_hand(x_BS, distance, lengths):
    read_BS = torch.full_like(x_BS, FILL)
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            for place in range(start, start + length - distance):
                read_BS[row, place] = x_BS[row, place + distance]
            start += length
    return read_BS


@pytest.mark.parametrize("lengths", [ONE, SAME, DIFFERENT], ids=["one", "same", "different"])
@pytest.mark.parametrize("distance", [1, 2, 10, 22, 40])
def test_each_token_reads_on_in_its_document(distance, lengths):
    positions_BS = positions_of(lengths)
    ids_BS = torch.randint(100, positions_BS.shape)
    vectors_BSD = torch.randn(*positions_BS.shape, 3, dtype=torch.float64, requires_grad=True)
    for x in (ids_BS, vectors_BSD):
        read = next_tokens(x, distance, FILL, position_ids_BS=positions_BS)
        assert read.dtype == x.dtype and torch.equal(read, by_hand(x.detach(), distance, lengths))
    weights = torch.randn_like(vectors_BSD)
    (gradient,) = torch.autograd.grad(read, vectors_BSD, weights)
    expected = torch.zeros_like(weights)
    for row, place in (by_hand(ids_BS + 100, distance, lengths) != FILL).nonzero().tolist():
        expected[row, place + distance] = weights[row, place]
    assert torch.equal(gradient, expected)


def test_without_positions_a_row_is_one_document_and_one_row_of_positions_serves_all():
    x_BS = torch.randint(100, (3, 22))
    assert torch.equal(next_tokens(x_BS, 3, FILL), by_hand(x_BS, 3, ONE * 3))
    shared = next_tokens(x_BS, 3, FILL, position_ids_BS=positions_of(SAME)[:1])
    assert torch.equal(shared, by_hand(x_BS, 3, SAME[:1] * 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 4), 0, 0), r"distance\(0\) must be at least 1"),
        ((torch.zeros(4), 1, 0), r"x \(4,\) must be \[batch, tokens"),
        ((torch.zeros(2, 4), 1, 0, torch.zeros(2, 3)), r"position_ids \(2, 3\) must be \[2 or 1, 4\]"),
    ],
)
def test_what_cannot_be_read_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        next_tokens(*arguments[:3], position_ids_BS=arguments[3] if len(arguments) == 4 else None)


def two_step_group():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    return TwoStepGroup(whole=dist.group.WORLD, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))


def errors_on_ranks(layout, lengths, distance, shift, is_two_step):
    """Whether ids are exact and how far the gradient is off, for this rank."""
    positions_BS = positions_of(lengths)
    num_rows, num_tokens = positions_BS.shape
    generator = torch.Generator().manual_seed(5)
    ids_BS = torch.randint(100, (num_rows, num_tokens), generator=generator)
    vectors_BSD = torch.randn(num_rows, num_tokens, 3, generator=generator, dtype=torch.float64)
    callback = ZigZagContextParallel(layout=layout, shift=shift)
    cp = attach(callback, nn.Identity(), two_step_group() if is_two_step else None).context_parallel
    batch = {"input_ids": ids_BS, "labels": ids_BS, "position_ids": positions_BS, "vectors": vectors_BSD}
    place_BS = torch.arange(num_tokens).expand(num_rows, -1)
    local = callback.split(batch | {"place": place_BS}, "train")
    sequence = cp.current
    real_BL = torch.ones(local["place"].shape, dtype=torch.bool)
    if sequence.real_tokens_BL is not None:
        real_BL = sequence.real_tokens_BL
    rows, places = real_BL.nonzero()[:, 0], local["place"][real_BL]
    options = dict(sequence=sequence, group=cp.group, documents=sequence.documents)

    read_BL = next_tokens_of_sequence(local["input_ids"], distance, FILL, **options)
    expected_BS = by_hand(ids_BS, distance, lengths)
    exact = torch.equal(read_BL[real_BL], expected_BS[rows, places]) and bool((read_BL[~real_BL] == FILL).all())

    local["vectors"].requires_grad_()
    read_BLD = next_tokens_of_sequence(local["vectors"], distance, FILL, **options)
    exact &= torch.equal(read_BLD[real_BL], by_hand(vectors_BSD, distance, lengths)[rows, places])
    weights_BSD = torch.randn(num_rows, num_tokens, 3, generator=generator, dtype=torch.float64)
    (read_BLD[real_BL] * weights_BSD[rows, places]).sum().backward()
    whole = vectors_BSD.clone().requires_grad_()
    (next_tokens(whole, distance, FILL, position_ids_BS=positions_BS) * weights_BSD).sum().backward()
    exact &= torch.equal(local["vectors"].grad[real_BL], whole.grad[rows, places])
    return exact and bool((local["vectors"].grad[~real_BL] == 0).all())


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        *((layout, lengths) for layout in ("zigzag", "contiguous") for lengths in (ONE, SAME, DIFFERENT)),
        *(("per_document", lengths) for lengths in (ONE, SAME)),  # it cuts the documents of all rows alike
    ],
)
def test_ranks_read_what_one_process_reads_and_send_gradients_back(degree, layout, lengths, request):
    ranks = request.getfixturevalue(f"ranks{degree}")
    # Chunks of 3 to 6 tokens, of 1 to 3 where each document is cut: 7 reaches over several, 40 past every end.
    for distance in (1, 2, 7, 40):
        assert ranks(errors_on_ranks, layout, lengths, distance, "none", False) == [True] * degree, distance


def test_the_dummy_of_a_module_that_shifts_is_read_by_nobody(ranks2):
    for distance in (1, 2):
        assert ranks2(errors_on_ranks, "zigzag", SAME, distance, "module", False) == [True] * 2


def test_ranks_in_two_steps_read_the_same(ranks4):
    assert ranks4(errors_on_ranks, "zigzag", SAME, 2, "none", True) == [True] * 4
