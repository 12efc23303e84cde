"""Tiny configurations of Hugging Face causal language models with experts, one for each family that is tested."""

from typing import Any

from tests.moe_blocks import SIZES

VOCABULARY = 97

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, num_experts=4, num_local_experts=4,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
_DEEPSEEK: dict[str, Any] = dict(n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
_LATENT: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, num_key_value_heads=4
)
# Many heads: a key that all of them reject scores zero, and of equal scores transformers keeps any.
_INDEXER: dict[str, Any] = dict(index_topk=6, index_head_dim=16, index_n_heads=32)
_DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=4, shared_expert_intermediate_size=16, num_hidden_layers=4,
)  # fmt: skip
_WINDOWS: dict[str, Any] = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": dict(sliding_window=5),
    "olmoe": {},
    "glm4_moe": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK | _LATENT,
    "deepseek_v32": _DEEPSEEK | _LATENT | _INDEXER,
    "glm_moe_dsa": _DEEPSEEK | _LATENT | _INDEXER
    | dict(num_hidden_layers=4, index_topk_freq=2, index_skip_topk_offset=1),
    "gpt_oss": _WINDOWS,
    "minimax_m2": {},
    "dots1": _DEEPSEEK | _WINDOWS,
    "mimo_v2_flash": _WINDOWS
    | dict(
        v_head_dim=8, swa_head_dim=8, swa_v_head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        n_shared_experts=1, n_group=1, topk_group=1,
    ),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1),
    "granitemoe": {},
    "afmoe": dict(num_dense_layers=1, sliding_window=5, global_attn_every_n_layers=2),
    "qwen3_next": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "kimi_linear": _DEEPSEEK | _LATENT
    | dict(
        num_experts_per_token=2, mlp_layer_types=["dense", "sparse"],
        linear_attn_config=dict(
            head_dim=8, num_heads=4, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2]
        ),
    ),
}  # fmt: skip
"""Changes to the sizes above. Windows are shorter than any sequence of a test; top-k is less than its keys."""

_MLA = {name: size for name, size in _LATENT.items() if name != "num_key_value_heads"}
_HYBRID: dict[str, Any] = {name: size for name, size in _DELTA.items() if name.startswith("linear_")}
_HYBRID |= dict(num_hidden_layers=8)

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "aria_text": {},
    "axk1": _MLA,
    "axk2": _MLA | _INDEXER,
    "bailing_hybrid": _HYBRID | _MLA,
    "beam": {},
    "cohere2_moe": dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "deepseek_v2": _MLA | dict(topk_method="greedy"),
    "dots3_note_text": _MLA,
    "exaone_moe": dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "flex_olmo": {},
    "flint": {},
    "gemma4_text": dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, sliding_window=5),
    "glm4_moe_lite": _MLA,
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jetmoe": {},
    "kolibri1": {},
    "laguna": {},
    "lara_mini": _HYBRID,
    "longcat_flash": _MLA,
    "minimax_m3_vl_text": {},
    "phimoe": dict(router_jitter_noise=0.0, input_jitter_noise=0.0),
    "qwen2_moe": {},
    "solar_open": {},
}
"""Changes to the sizes of ``tests.moe_blocks``: families whose gradients are compared at cp 2 only."""

NOT_SPLIT: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "granitemoehybrid": dict(mamba_n_heads=4, layer_types=["mamba", "attention"]),
    "hy_v4": _MLA | _INDEXER,
    "inkling_text": {},
    "inkling2_text": {},
    "inkling2_loop_text": {},
    "jamba": {},
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "llama4_text": {},
    "minimax": {},
    "nemotron_h": {},
    "zaya": dict(num_experts_per_tok=1, top_k=1),
}
"""Families that cp > 1 refuses."""

LINEAR = ("qwen3_next", "qwen3_5_moe_text", "kimi_linear")


def make_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    sizes = _SIZES | FAMILIES[family] if family in FAMILIES else SIZES | (MORE_FAMILIES | NOT_SPLIT)[family]
    return AutoConfig.for_model(family, **(sizes | changes))


def make_model(family: str, **changes: Any) -> Any:
    """In float32, eager attention, the same weights in every process."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = make_config(family, **changes)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, -2)  # a state of linear attention lives longer than a chunk
    return model
