"""Shapes: B batch, L queries, S latents, H heads, M channels of a latent, C of its value, K latents per query."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_moe_strategy._torch_compat import fake_tensors
from lightning_moe_strategy.kernels import sparse_attention as kernel
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention
from tests.test_key_selection import Sizes

BATCH, QUERIES, LATENTS, HEADS, CHANNELS, VALUES, WIDTH, SCALE = 2, 7, 11, 3, 6, 4, 5, 0.37

# fp32: products are summed in another order than in float64. bf16: 8 bits of mantissa, one rounding of each result,
# and the output that the backward reads is a rounded one.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, QUERIES, HEADS, CHANNELS, generator=generator).to(dtype)
    latent = torch.randn(BATCH, LATENTS, CHANNELS, generator=generator).to(dtype)
    order = torch.rand(BATCH, QUERIES, LATENTS, generator=generator).argsort(-1)
    ids = order[..., :WIDTH].int()
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    ids[0, 2] = ids[1, 0] = -1  # queries without a key
    return query.requires_grad_(), latent.requires_grad_(), ids


def naive(query: Tensor, latent: Tensor, ids: Tensor) -> Tensor:
    """One query at a time, over the keys it has."""
    rows = []
    for b, i in ((b, i) for b in range(BATCH) for i in range(QUERIES)):
        chosen = latent[b][[s for s in ids[b, i].tolist() if s >= 0]]
        probs = (query[b, i] @ chosen.T * SCALE).softmax(-1)
        rows.append(probs @ chosen[:, :VALUES])
    return torch.stack(rows).view(BATCH, QUERIES, HEADS, VALUES)


def results(attend, query: Tensor, latent: Tensor, ids: Tensor) -> list[Tensor]:
    out = attend(query, latent, ids)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), (query, latent))]


def attend(query: Tensor, latent: Tensor, ids: Tensor) -> Tensor:
    return sparse_attention(query, latent, ids, VALUES, SCALE)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gathered_per_block", [1, 4 * WIDTH * CHANNELS, 2**24])
def test_output_and_gradients_equal_a_float64_loop(dtype, gathered_per_block, monkeypatch):
    monkeypatch.setattr(kernel, "GATHERED_PER_BLOCK", gathered_per_block)
    query, latent, ids = inputs(dtype)
    found = results(attend, query, latent, ids)
    expected = results(naive, query.detach().double().requires_grad_(), latent.detach().double().requires_grad_(), ids)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert error(ours, theirs) < TOLERANCE[dtype]


def test_gradcheck():
    query, latent, ids = inputs()
    assert torch.autograd.gradcheck(lambda q, c: attend(q, c, ids), (query, latent))


def test_a_query_without_a_key_is_exactly_zero_and_so_are_its_gradients():
    query, latent, ids = inputs(torch.float32)
    out, grad_query, _ = results(attend, query, latent, ids)
    empty = (ids < 0).all(-1)
    assert empty.sum() >= 2
    for x in (out, grad_query):
        assert (x[empty] == 0).all() and (x[~empty] != 0).any() and x.isfinite().all()
    nothing = torch.full_like(ids, -1)
    out, grad_query, grad_latent = results(attend, query, latent, nothing)
    assert not (out.any() or grad_query.any() or grad_latent.any())


def test_the_gradient_of_a_latent_adds_up_in_fp32():
    """256 queries of one latent: in bf16 every sum above 256 loses its ones."""
    query = torch.zeros(1, 300, 1, 2, dtype=torch.bfloat16)
    latent = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    ids = torch.zeros(1, 300, 1, dtype=torch.int32)
    out, lse = torch.ops.lightning_moe.sparse_attention(query, latent, ids, 2, 1.0)
    assert lse.dtype == torch.float32
    ones = torch.ones_like(out)
    grad_query, grad_latent = torch.ops.lightning_moe.sparse_attention_backward(ones, query, latent, ids, out, lse, 1.0)
    assert (grad_query.dtype, grad_latent.dtype) == (torch.bfloat16, torch.float32)
    assert grad_latent.tolist() == [[[300.0, 300.0]]]


def test_autocast_changes_no_digit():
    query, latent, ids = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(query, latent, ids)
    assert torch.equal(found, attend(query, latent, ids))


def test_inputs_output_and_lse_are_all_that_is_kept():
    query, latent, ids = inputs(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(query, latent, ids)
    assert [tuple(x.shape) for x in kept] == [
        (BATCH, QUERIES, HEADS, CHANNELS),
        (BATCH, LATENTS, CHANNELS),
        (BATCH, QUERIES, WIDTH),
        (BATCH, QUERIES, HEADS, VALUES),
        (BATCH, QUERIES, HEADS),
    ]


def test_no_tensor_has_every_gathered_latent_or_score(monkeypatch):
    num_queries, num_latents, width, channels, heads = 64, 256, 16, 8, 4
    monkeypatch.setattr(kernel, "GATHERED_PER_BLOCK", 2 * width * channels)
    query = torch.randn(1, num_queries, heads, channels)
    latent = torch.randn(1, num_latents, channels)
    ids = torch.rand(1, num_queries, num_latents).argsort(-1)[..., :width].int()
    with Sizes() as sizes:
        out, lse = kernel._attend_by_blocks(query, latent, ids, channels, 1.0)
        kernel._attend_backward_by_blocks((out, out, lse), query, latent, ids, 1.0)
    assert sizes.largest == num_latents * channels == query.numel()
    assert sizes.largest < num_queries * width * heads < num_queries * width * channels


def test_no_value_is_read_where_there_are_only_shapes():
    with fake_tensors(), Sizes() as sizes:
        query, latent = torch.empty(1, 64, 4, 8, requires_grad=True), torch.empty(1, 300, 8, requires_grad=True)
        ids = torch.empty(1, 64, 32, dtype=torch.int32)
        sparse_attention(query, latent, ids, 6, 1.0).sum().backward()
    assert query.grad.shape == query.shape and latent.grad.shape == latent.shape
    assert sizes.largest == latent.numel() < 64 * 4 * 32


def test_flops_are_those_of_the_pairs():
    query, latent, ids = inputs(torch.float32)
    pairs = BATCH * QUERIES * WIDTH
    with FlopCounterMode(display=False) as counter:
        out = attend(query, latent, ids)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * pairs * HEADS * (CHANNELS + VALUES)
    assert counter.get_total_flops() - forward == 2 * pairs * HEADS * (3 * CHANNELS + 2 * VALUES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent": torch.zeros(BATCH, LATENTS, 5)}, r"query \(2, 7, 3, 6\), latent \(2, 11, 5\).*\[B, S, M\]"),
        ({"ids": torch.zeros(BATCH, QUERIES, WIDTH, dtype=torch.int64)}, r"key_ids \(torch.int64\) must be int32"),
        ({"ids": torch.zeros(BATCH, 3, WIDTH, dtype=torch.int32)}, r"must be int32 \[B, L, K\], a row for each"),
        ({"values": 7}, r"value_channels\(7\) must be 1 to 6"),
        ({"latent": torch.zeros(BATCH, LATENTS, CHANNELS)}, r"query is torch.float64, latent torch.float32: cast"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    query, latent, ids = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(query, change.get("latent", latent), change.get("ids", ids), change.get("values", VALUES), 1.0)
