"""Shapes: B batch, L queries, S keys, K keys per query; I index heads of N channels; H heads of M channels."""

import re

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_moe_strategy._torch_compat import fake_tensors
from lightning_moe_strategy.kernels import indexer_loss as kernel
from lightning_moe_strategy.kernels.indexer_loss import indexer_loss
from tests.test_key_selection import Sizes

BATCH, QUERIES, KEYS, WIDTH, INDEX_HEADS, INDEX_CHANNELS, HEADS, CHANNELS, SCALE = 2, 7, 11, 5, 4, 3, 6, 8, 0.37

# fp32: sums in another order than in float64. bf16: one rounding of each gradient; the loss itself is FP32 of the same
# rounded inputs.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3}


def inputs(dtype: torch.dtype = torch.float64, **sizes: int) -> dict[str, Tensor]:
    size = dict(queries=QUERIES, keys=KEYS, width=WIDTH) | sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    ids = torch.rand(BATCH, size["queries"], size["keys"], generator=generator).argsort(-1)[..., : size["width"]].int()
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    ids[0, 2] = ids[1, 0] = -1  # queries without a key
    return dict(
        index_query=normal(BATCH, size["queries"], INDEX_HEADS, INDEX_CHANNELS),
        index_key=normal(BATCH, size["keys"], INDEX_CHANNELS),
        index_weights=normal(BATCH, size["queries"], INDEX_HEADS),
        query=normal(BATCH, size["queries"], HEADS, CHANNELS),
        latent=normal(BATCH, size["keys"], CHANNELS),
        ids=ids,
        token_weights=torch.rand(BATCH, size["queries"], generator=generator),
    )


def run(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return indexer_loss(
        given["index_query"],
        given["index_key"],
        given["index_weights"],
        query_BLHM=given["query"],
        latent_BSM=given["latent"],
        key_ids_BLK=given["ids"],
        token_weights_BL=given["token_weights"],
        scale=SCALE,
    )


def naive(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """One query at a time, over the keys it has, in float64; the gradient by autograd."""
    x = {name: value.double() for name, value in given.items() if name != "ids"}
    trained = [x[name].requires_grad_() for name in ("index_query", "index_key", "index_weights")]
    rows = []
    for b, i in ((b, i) for b in range(BATCH) for i in range(given["ids"].shape[1])):
        chosen = [s for s in given["ids"][b, i].tolist() if s >= 0]
        scores = torch.einsum("h,hs->s", trained[2][b, i], (trained[0][b, i] @ trained[1][b, chosen].T).relu())
        target = (x["query"][b, i] @ x["latent"][b, chosen].T * SCALE).softmax(-1).sum(0)
        target = target / target.sum()
        rows.append((target * (target.log() - scores.log_softmax(-1))).sum())
    kl = torch.stack(rows).view(BATCH, -1)
    return kl.detach(), *torch.autograd.grad((kl * x["token_weights"]).sum(), trained)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gathered_per_block", [1, 3 * WIDTH * (CHANNELS + INDEX_CHANNELS), 2**24])
def test_loss_and_gradients_equal_autograd_in_float64(dtype, gathered_per_block, monkeypatch):
    monkeypatch.setattr(kernel, "GATHERED_PER_BLOCK", gathered_per_block)
    given = inputs(dtype)
    found, expected = run(given), naive(given)
    wide = torch.promote_types(dtype, torch.float32)
    assert [x.dtype for x in found] == [wide, dtype, wide, dtype]
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < TOLERANCE[dtype]


def test_a_query_without_a_key_has_neither_loss_nor_gradient():
    given = inputs(torch.float32)
    kl, grad_query, _, grad_weights = run(given)
    empty = (given["ids"] < 0).all(-1)
    assert empty.sum() >= 2
    for x in (kl, grad_query, grad_weights):
        assert (x[empty] == 0).all() and (x[~empty] != 0).any() and x.isfinite().all()
    given["ids"].fill_(-1)
    assert not any(x.any() for x in run(given))


def test_one_key_leaves_nothing_to_learn():
    given = inputs(torch.float32)
    given["ids"][..., 1:] = -1
    assert all(x.abs().max() < 1e-6 for x in run(given))


def test_scores_that_are_all_equal_and_scores_far_apart_are_finite():
    given = inputs(torch.float32)
    for factor in (0.0, 1e4):
        kl, *gradients = run(given | {"index_query": factor * given["index_query"], "query": 1e4 * given["query"]})
        assert kl.isfinite().all() and (kl >= -1e-6).all() and all(x.isfinite().all() for x in gradients)


def test_a_token_that_weighs_nothing_has_a_loss_and_no_gradient():
    given = inputs(torch.float32)
    given["token_weights"][:, 3] = 0.0
    kl, grad_query, _, grad_weights = run(given)
    assert kl[:, 3].all() and not grad_query[:, 3].any() and not grad_weights[:, 3].any()


def test_the_gradient_of_a_key_adds_up_in_fp32():
    """bf16 keys that 300 queries share: in bf16 every sum above 256 loses its ones."""
    given = inputs(torch.bfloat16, queries=300, keys=2, width=2)
    given["ids"][:] = torch.tensor([0, 1])
    assert error(run(given)[2], naive(given)[2]) < 1e-5


def test_autocast_changes_no_digit():
    given = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(given)
    assert all(torch.equal(x, y) for x, y in zip(found, run(given), strict=True))


def test_no_tensor_has_every_gathered_key_or_score(monkeypatch):
    num_queries, width = 64, 16
    given = inputs(torch.float32, queries=num_queries, keys=256, width=width)
    monkeypatch.setattr(kernel, "GATHERED_PER_BLOCK", 2 * width * (CHANNELS + INDEX_CHANNELS))
    queries = given["index_query"], given["index_weights"], given["query"]
    with Sizes() as sizes:
        # The operation's own steps, which are one step to a mode outside of it.
        kernel._by_blocks(
            queries,
            given["index_key"],
            given["latent"],
            given["ids"],
            token_weights_BL=given["token_weights"],
            scale=SCALE,
        )
    assert sizes.largest == given["query"].numel() < BATCH * num_queries * width * CHANNELS


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones():
    given = inputs(torch.bfloat16)
    with fake_tensors() as mode:
        fake = run({name: mode.from_tensor(x) for name, x in given.items()})
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in run(given)]


def test_arithmetic_is_counted():
    with FlopCounterMode(display=False) as counter:
        run(inputs())
    pairs = BATCH * QUERIES * WIDTH
    per_pair = HEADS * CHANNELS + INDEX_HEADS * (3 * INDEX_CHANNELS + 2)
    assert counter.get_total_flops() == 2 * pairs * per_pair


@pytest.mark.parametrize(
    ("name", "shape"), [("index_key", (2, 12, 3)), ("token_weights", (2, 1)), ("ids", (2, 7)), ("latent", (2, 11, 9))]
)
def test_shapes_that_do_not_go_together_are_refused(name, shape):
    given = inputs()
    given[name] = torch.zeros(shape, dtype=given[name].dtype)
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        run(given)
