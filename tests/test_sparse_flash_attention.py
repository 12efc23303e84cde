"""The sparse kernel of flash-attn-4: what it is handed, when it is taken, how much of dS is there at a time."""

import sys
import types

import pytest
import torch

from lightning_moe_strategy.kernels import attention, sparse_flash_attention
from lightning_moe_strategy.kernels import sparse_attention as reference
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention

BATCH, QUERIES, LATENTS, HEADS, WIDTH, CHANNELS, VALUES = 2, 7, 11, 3, 5, 576, 512
SCALE = 0.05
CLOSE = 1e-2
"""Norm of the error over norm of the reference: gradients of queries are rounded to 2**-9, in BF16."""


@pytest.fixture
def calls(monkeypatch):
    """A stand-in for the package on a B200: names of its functions, and of the backward pass the chunks."""
    found = []
    module = types.ModuleType("flash_attn.cute.interface")

    def _flash_attn_fwd(
        q,
        k,
        v,
        qv=None,
        softmax_scale=None,
        causal=False,
        return_lse=False,
        gather_kv_indices=None,
        gather_bwd_recompute_p=False,
    ):
        assert return_lse and gather_bwd_recompute_p and not causal
        found.append("forward")
        query, latent = absorbed(q, k, v, qv, gather_kv_indices)
        out, lse = reference._attend_by_blocks(query, latent, gather_kv_indices, VALUES, softmax_scale)
        return out, lse, None, None, None

    def _flash_attn_bwd_sparse_mla(
        q,
        k,
        v,
        qv,
        out,
        dout,
        lse,
        p,
        row_max,
        gather_kv_indices,
        learnable_sink=None,
        softmax_scale=None,
        causal=False,
        deterministic=False,
        recompute_p=False,
        token_chunk=None,
        o_lo=None,
    ):
        assert recompute_p and p is row_max is None and not causal and len(q) == 1
        assert out.shape == dout.shape == (1, QUERIES, HEADS, VALUES) and lse.shape == (1, QUERIES, HEADS)
        assert (out.dtype, dout.dtype, lse.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        found.append(token_chunk)
        query, latent = absorbed(q, k, v, qv, gather_kv_indices)
        grad_query, grad_latent = reference._attend_backward_by_blocks(
            (dout, out, lse), query, latent, gather_kv_indices, softmax_scale
        )
        grad_key, grad_value = grad_latent[:, :, None, VALUES:], grad_latent[:, :, None, :VALUES]
        return grad_query[..., VALUES:], grad_key, grad_value, grad_query[..., :VALUES], None

    vars(module).update(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd_sparse_mla=_flash_attn_bwd_sparse_mla)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    on_gpu(monkeypatch, 10)
    sparse_flash_attention.package.cache_clear()
    yield found
    sparse_flash_attention.package.cache_clear()


def on_gpu(patch, major):
    patch.setattr(sparse_flash_attention, "capability", lambda device: (major, 0))


def absorbed(q, k, v, qv, ids):
    """Query and latents of our own kernel, from parts that have the shapes of the other."""
    batch, length, heads, _ = q.shape
    assert (q.shape[-1], qv.shape) == (CHANNELS - VALUES, (batch, length, heads, VALUES))
    assert k.shape[2:] == (1, CHANNELS - VALUES) and v.shape == (*k.shape[:3], VALUES)
    assert ids.shape == (batch, length, 128) and ids.dtype == torch.int32 and ids.is_contiguous()
    return torch.cat([qv, q], -1), torch.cat([v, k], -1)[:, :, 0]


def inputs(heads=HEADS):
    query = torch.randn(BATCH, QUERIES, heads, CHANNELS).bfloat16().requires_grad_()
    latent = torch.randn(BATCH, LATENTS, CHANNELS).bfloat16().requires_grad_()
    ids = torch.rand(BATCH, QUERIES, LATENTS).argsort(-1)[..., :WIDTH].int()
    ids[0, 2] = -1
    ids[1, :, 3:] = -1
    return query, latent, ids


def results(query, latent, ids, values=VALUES):
    out = sparse_attention(query, latent, ids, values, SCALE)
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), (query, latent))]


def test_the_kernel_is_handed_what_ours_takes(calls, monkeypatch):
    tensors = inputs()
    found = results(*tensors)
    assert calls == ["forward", None, None]
    on_gpu(monkeypatch, 9)
    expected = results(*tensors)
    assert len(calls) == 3
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype and (got - want).norm() < CLOSE * want.norm()


def test_the_gradient_of_a_latent_stays_in_fp32(calls):
    query, latent, ids = (x.detach() for x in inputs())
    out, lse = torch.ops.lightning_moe.sparse_attention(query, latent, ids, VALUES, SCALE)
    _, grad_latent = torch.ops.lightning_moe.sparse_attention_backward(out, query, latent, ids, out, lse, SCALE)
    assert calls == ["forward", None, None] and grad_latent.dtype == torch.float32


def test_score_gradients_are_there_for_as_many_queries_as_fit(calls, monkeypatch):
    monkeypatch.setattr(sparse_flash_attention, "SCORE_GRADIENT_BYTES", 3 * HEADS * 128 * 2 + 1)
    results(*inputs())
    assert calls == ["forward", 3, 3]
    query, latent, ids = (x.detach() for x in inputs())
    out, lse = torch.ops.lightning_moe.sparse_attention(query, latent, ids, VALUES, SCALE)
    for chunk in (2, QUERIES):
        torch.ops.lightning_moe.sparse_attention_backward(out, query, latent, ids, out, lse, SCALE, chunk)
    assert calls[4:] == [2, 2, None, None]


def test_glm_at_its_16384_tokens_has_2048_at_a_time():
    assert sparse_flash_attention.SCORE_GRADIENT_BYTES // (64 * 2048 * 2) == 2048


def test_what_the_kernel_cannot_do_is_left_to_ours(calls, monkeypatch):
    query, latent, ids = inputs()
    results(query.float().detach().requires_grad_(), latent.float().detach().requires_grad_(), ids)
    results(query, latent, ids, 448)
    results(*inputs(heads=129))
    torch.use_deterministic_algorithms(True)
    try:
        results(query, latent, ids)
    finally:
        torch.use_deterministic_algorithms(False)
    for major in (0, 9, 12):
        on_gpu(monkeypatch, major)
        results(query, latent, ids)
    assert calls == []


@pytest.mark.parametrize("missing", ["_flash_attn_fwd", "_flash_attn_bwd_sparse_mla", "flash_attn.cute.interface"])
def test_a_package_that_is_missing_or_too_old_is_left_alone(calls, monkeypatch, missing):
    if missing in sys.modules:
        monkeypatch.setitem(sys.modules, missing, None)  # importing it raises ImportError
    else:
        monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], missing, lambda q, k, v, qv=None: None)
    results(*inputs())
    assert calls == [] and attention.capability(torch.device("cpu")) == (0, 0)
