"""Published models by name.

Sizes are those of each model's config.json. GLM-5.2's indexers (one in every fourth layer after the first three)
come from its implementations, its file was not at hand; the total, 743.38 B, is the one its class counts.
"""

import dataclasses

from lightning_moe_strategy.plan.errors import unknown
from lightning_moe_strategy.plan.model import ModelShape

_DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    vocab_size=129280,
    hidden=7168,
    layers=61,
    dense_first_layers=3,
    intermediate=18432,
    attention="mla",
    heads=128,
    q_lora=1536,
    kv_lora=512,
    nope_head_dim=128,
    rope_head_dim=64,
    v_head_dim=128,
    num_experts=256,
    top_k=8,
    moe_intermediate=2048,
    shared_intermediate=2048,
    mtp_layers=1,
)

_KIMI_K2 = dataclasses.replace(
    _DEEPSEEK_V3,
    name="kimi-k2",
    vocab_size=163840,
    dense_first_layers=1,
    heads=64,
    num_experts=384,
    mtp_layers=0,
)

_GLM_5_2 = dataclasses.replace(
    _DEEPSEEK_V3,
    name="glm-5.2",
    vocab_size=154880,
    hidden=6144,
    layers=78,
    intermediate=12288,
    heads=64,
    q_lora=2048,
    nope_head_dim=192,
    v_head_dim=256,
    index_heads=32,
    index_head_dim=128,
    index_top_k=2048,
    indexer_layers=21,
)

_QWEN3_235B = ModelShape(
    name="qwen3-235b-a22b",
    vocab_size=151936,
    hidden=4096,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    num_experts=128,
    top_k=8,
    moe_intermediate=1536,
)

_QWEN3_30B = dataclasses.replace(
    _QWEN3_235B, name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, moe_intermediate=768
)

_QWEN3_5_397B = ModelShape(
    name="qwen3.5-397b-a17b",
    vocab_size=248320,
    hidden=4096,
    layers=60,
    heads=32,
    kv_heads=2,
    head_dim=256,
    qk_norm=True,
    gated_query=True,
    linear_layers=45,
    linear_key_heads=16,
    linear_value_heads=64,
    linear_key_dim=128,
    linear_value_dim=128,
    linear_conv=4,
    num_experts=512,
    top_k=10,
    moe_intermediate=1024,
    shared_intermediate=1024,
    shared_gate=True,
)

_GPT_OSS_120B = ModelShape(
    name="gpt-oss-120b",
    vocab_size=201088,
    hidden=2880,
    layers=36,
    heads=64,
    kv_heads=8,
    head_dim=64,
    attention_bias=True,
    output_bias=True,
    attention_sinks=True,
    sliding_window=128,
    sliding_layers=18,
    num_experts=128,
    top_k=4,
    moe_intermediate=2880,
    expert_bias=True,
)

_TINY = ModelShape(
    name="tiny",
    vocab_size=1024,
    hidden=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    num_experts=8,
    top_k=2,
    moe_intermediate=64,
)

_TINY_MLA = dataclasses.replace(
    _TINY,
    name="tiny-mla",
    dense_first_layers=1,
    intermediate=256,
    attention="mla",
    q_lora=64,
    kv_lora=32,
    nope_head_dim=24,
    rope_head_dim=8,
    v_head_dim=32,
    shared_intermediate=64,
)

_TINY_DSA = dataclasses.replace(
    _TINY_MLA, name="tiny-dsa", layers=4, index_heads=4, index_head_dim=16, index_top_k=16, indexer_layers=2
)

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _GLM_5_2,
        _DEEPSEEK_V3,
        _KIMI_K2,
        _QWEN3_235B,
        _QWEN3_30B,
        _QWEN3_5_397B,
        _GPT_OSS_120B,
        _TINY,
        _TINY_MLA,
        _TINY_DSA,
    )
}
"""By name, largest questions first. ``tiny``, ``tiny-mla`` and ``tiny-dsa`` are ours."""


def preset(name: str) -> ModelShape:
    """The published model of that name, whatever its case; ``PlanError`` lists the known, nearest first."""
    if name.lower() not in MODELS:
        raise unknown("model", name, MODELS, remedy="Choose one, or give the path of a config.json or a YAML of ours.")
    return MODELS[name.lower()]
