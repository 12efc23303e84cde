"""Attention: causal, by position, through one replaceable call."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_moe_strategy.models.attention import GroupedQueryAttention, MultiHeadLatentAttention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import RMSNorm, rotary_angles, rotate
from lightning_moe_strategy.models.transformer import Block

# Sizes that differ from one another wherever they may: H != S != N, key and value heads of unequal width.
GQA = ModelConfig(hidden=48, heads=6, kv_heads=2, head_dim=10, qk_norm=True, intermediate=56)
MLA = ModelConfig(
    hidden=48,
    attention="mla",
    heads=3,
    q_lora=20,
    kv_lora=12,
    nope_head_dim=14,
    rope_head_dim=6,
    v_head_dim=22,
    scoring="sigmoid",
    shared_experts=1,
)
MLA_PLAIN_QUERY = ModelConfig.resolve({**vars(MLA), "q_lora": None})
KINDS = pytest.mark.parametrize("config", [GQA, MLA, MLA_PLAIN_QUERY], ids=["gqa", "mla", "mla_plain_query"])
NUM_TOKENS = 7


def attention_and_input(config):
    torch.manual_seed(0)
    kind = MultiHeadLatentAttention if config.attention == "mla" else GroupedQueryAttention
    x_BSD = torch.randn(2, NUM_TOKENS, config.hidden)
    return kind(config), x_BSD, torch.arange(NUM_TOKENS)[None]


@KINDS
def test_a_later_token_changes_nothing_before_it(config):
    torch.manual_seed(0)
    block = Block(config, layer=0)
    x_BSD, positions = torch.randn(2, NUM_TOKENS, config.hidden), torch.arange(NUM_TOKENS)[None]
    before_BSD = block(x_BSD, positions)
    changed_BSD = x_BSD.clone()
    changed_BSD[:, 4:] += 1.0
    after_BSD = block(changed_BSD, positions)
    torch.testing.assert_close(after_BSD[:, :4], before_BSD[:, :4], rtol=1e-6, atol=1e-6)
    assert (after_BSD[:, 4:] - before_BSD[:, 4:]).abs().min(dim=-1).values.max() > 1e-4


@KINDS
def test_every_parameter_and_the_input_get_a_gradient(config):
    attention, x_BSD, positions = attention_and_input(config)
    out_BSD = attention(x_BSD.requires_grad_(), positions)
    assert out_BSD.shape == x_BSD.shape
    out_BSD.square().sum().backward()
    for name, tensor in [("x", x_BSD), *attention.named_parameters()]:
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.abs().sum() > 0, name


@KINDS
def test_only_differences_of_positions_matter(config):
    attention, x_BSD, positions = attention_and_input(config)
    torch.testing.assert_close(attention(x_BSD, positions + 13), attention(x_BSD, positions), rtol=1e-4, atol=1e-6)
    shuffled = positions.flip(-1)
    assert not torch.allclose(attention(x_BSD, shuffled), attention(x_BSD, positions), atol=1e-5)


@KINDS
def test_attention_is_one_causal_call_without_a_mask(config, monkeypatch):
    attention, x_BSD, positions = attention_and_input(config)
    calls = []

    def record(query, key, value, **options):
        calls.append((query.shape, key.shape, value.shape, options))
        return sdpa(query, key, value, **options)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    attention(x_BSD, positions)
    ((query_shape, key_shape, value_shape, options),) = calls
    assert options["is_causal"] is True
    assert set(options) <= {"is_causal", "enable_gqa"}
    if config.attention == "gqa":
        assert (query_shape, key_shape, value_shape) == ((2, 6, 7, 10), (2, 2, 7, 10), (2, 2, 7, 10))
    else:
        assert (query_shape, key_shape, value_shape) == ((2, 3, 7, 20), (2, 3, 7, 20), (2, 3, 7, 22))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_each_pair_by_position_times_frequency(interleaved):
    positions = torch.tensor([[0, 3, 5]])
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    out = rotate(x, rotary_angles(positions, 4, 100.0), interleaved=interleaved)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for place, position in enumerate([0, 3, 5]):
        for index, (first, second) in enumerate(pairs):
            angle = position * 100.0 ** (-2 * index / 4)
            turned = (x[0, 1, place, first] + 1j * x[0, 1, place, second]) * complex(math.cos(angle), math.sin(angle))
            assert out[0, 1, place, index].item() == pytest.approx(turned.real.item(), abs=1e-6)
            assert out[0, 1, place, index + 2].item() == pytest.approx(turned.imag.item(), abs=1e-6)


def test_angles_at_a_million_tokens_do_not_depend_on_the_models_precision():
    positions = torch.tensor([[1_000_003]])
    expected = rotary_angles(positions, 8, 1e4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        in_bfloat16 = rotary_angles(positions, 8, 1e4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert in_bfloat16[0].dtype == torch.float32
    torch.testing.assert_close(in_bfloat16, expected, rtol=0, atol=0)
    assert expected[0][0, 0, 0, 0].item() == pytest.approx(math.cos(1_000_003), abs=1e-6)


def test_rms_norm_takes_its_statistic_in_fp32():
    # 300 squared overflows nothing in bf16, but its mean over 257 channels is off by far more than the input.
    x = torch.full((1, 257), 300.0, dtype=torch.bfloat16)
    norm = RMSNorm(257, 1e-6).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), torch.ones_like(x), rtol=0, atol=0)
