"""The whole model: equal to the published implementations, buildable on the meta device."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_moe_strategy.models.config import PRESETS, ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer

TINY = pytest.mark.parametrize("preset", ["tiny", "tiny-mla", "tiny-dsa"])

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
OURS = ModelConfig(vocab_size=97, hidden=48, intermediate=56, layers=3, heads=6, moe_intermediate=24, top_k=3)

QWEN3_NAMES = {
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "norm.": "model.norm.",
    ".attention_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".router.": ".gate.",
}
DEEPSEEK_NAMES = QWEN3_NAMES | {
    ".q_proj.down.": ".q_a_proj.",
    ".q_proj.norm.": ".q_a_layernorm.",
    ".q_proj.up.": ".q_b_proj.",
    ".kv_down_proj.": ".kv_a_proj_with_mqa.",
    ".kv_norm.": ".kv_a_layernorm.",
    ".kv_up_proj.": ".kv_b_proj.",
    ".balance_bias": ".e_score_correction_bias",
}


def published_name(name, renamed):
    if not name.startswith("layers."):
        prefix = name.split(".")[0] + "."
        return name.replace(prefix, renamed[prefix], 1)
    for ours, theirs in renamed.items():
        if ours.startswith("."):
            name = name.replace(ours, theirs)
    return f"model.{name}"


def assert_equal_to_hugging_face(config, hf_config_name, hf_sizes, renamed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    hf_config = getattr(transformers, hf_config_name)(**SIZES, **hf_sizes)
    published = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    published.set_experts_implementation("eager")
    ours = MoETransformer(config)
    for tensor in ours.state_dict().values():
        tensor.normal_(std=0.2)
    state = {published_name(name, renamed): tensor for name, tensor in ours.state_dict().items()}
    assert set(state) == set(published.state_dict())
    published.load_state_dict(state)

    input_ids_BS = torch.randint(97, (2, 19))
    # A gap, for a common offset changes nothing; the mask keeps transformers from reading it as two documents.
    position_ids_BS = torch.stack([torch.arange(19), torch.arange(19) + 9 * (torch.arange(19) > 11)])
    logits = ours(input_ids_BS, position_ids_BS)
    expected = published(
        input_ids=input_ids_BS,
        position_ids=position_ids_BS,
        attention_mask=torch.ones_like(input_ids_BS),
        use_cache=False,
    ).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), input_ids_BS[:, 1:].flatten()).backward()
    expected_grads = {name: parameter.grad for name, parameter in published.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected_grad = expected_grads[published_name(name, renamed)]
        if not parameter.requires_grad:
            assert parameter.grad is None and expected_grad is None, name
            continue
        error = (parameter.grad - expected_grad).norm() / expected_grad.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_gqa_and_softmax_equal_qwen3_moe_with_every_gradient():
    assert_equal_to_hugging_face(
        dataclasses.replace(OURS, kv_heads=2, head_dim=10, qk_norm=True, num_experts=8, rope_theta=1e6),
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 10,
            "num_experts": 8,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        QWEN3_NAMES,
    )


def test_mla_sigmoid_groups_and_shared_experts_equal_deepseek_v3_with_every_gradient():
    config = dataclasses.replace(
        PRESETS["deepseek-v3"],
        **{name: getattr(OURS, name) for name in ("vocab_size", "hidden", "intermediate", "layers", "heads")},
        moe_intermediate=24,
        top_k=3,
        dense_first_layers=1,
        q_lora=20,
        kv_lora=12,
        nope_head_dim=14,
        rope_head_dim=6,
        v_head_dim=22,
        num_experts=8,
        shared_experts=2,
        num_groups=4,
        top_k_groups=2,
    )
    sizes = {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 22,
    }
    assert_equal_to_hugging_face(config, "DeepseekV3Config", sizes, DEEPSEEK_NAMES)


@TINY
def test_positions_default_to_the_whole_sequence(preset):
    model, input_ids_BS = MoETransformer(PRESETS[preset]), torch.randint(1024, (2, 11))
    positions = torch.arange(11).expand(2, 11)
    torch.testing.assert_close(model(input_ids_BS, positions), model(input_ids_BS), rtol=0, atol=0)


@TINY
def test_a_later_token_changes_no_earlier_logits(preset):
    torch.manual_seed(0)
    model, input_ids_BS = MoETransformer(PRESETS[preset]), torch.randint(1024, (2, 11))
    changed_BS = input_ids_BS.clone()
    changed_BS[:, 7] = (changed_BS[:, 7] + 1) % 1024
    before_BSV, after_BSV = model(input_ids_BS), model(changed_BS)
    torch.testing.assert_close(after_BSV[:, :7], before_BSV[:, :7], rtol=1e-6, atol=1e-6)
    assert (after_BSV[:, 7:] - before_BSV[:, 7:]).abs().amax(dim=-1).min() > 1e-5


@pytest.mark.parametrize("tied", [False, True])
@TINY
def test_a_model_built_on_meta_gets_all_its_values_module_by_module(preset, tied):
    config = dataclasses.replace(PRESETS[preset], tie_embeddings=tied)
    with torch.device("meta"):
        model = MoETransformer(config)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name
    assert (model.head.weight is model.embed.weight) is tied
    assert 0.018 < model.embed.weight.std() < 0.022
    for name, buffer in model.named_buffers():
        assert name.endswith("balance_bias") and buffer.abs().sum() == 0
    assert model(torch.randint(1024, (1, 5))).isfinite().all()


@TINY
def test_resetting_a_module_touches_its_own_tensors_only(preset):
    model = MoETransformer(PRESETS[preset])
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    for owner in owners:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)):
            tensor.data.fill_(7.0)
        owner.reset_parameters()
        own = {id(t) for t in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) in own:
                assert not (tensor == 7.0).any(), name
            else:
                torch.testing.assert_close(tensor.data, before[name], rtol=0, atol=0)


def test_tied_embeddings_are_one_parameter():
    model = MoETransformer(ModelConfig(tie_embeddings=True))
    assert "head.weight" not in dict(model.named_parameters())
    model(torch.randint(1024, (1, 5))).sum().backward()
    assert model.head.weight.grad is model.embed.weight.grad


@TINY
def test_the_model_trains_in_bf16_with_a_balance_bias_that_stays_fp32(preset):
    model = MoETransformer(PRESETS[preset])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    logits_BSV = model(torch.randint(1024, (2, 9)))
    assert logits_BSV.dtype == torch.bfloat16
    logits_BSV.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


def test_blocks_are_a_module_list_and_experts_keep_their_protocol():
    model = MoETransformer(PRESETS["tiny-mla"])
    assert isinstance(model.layers, nn.ModuleList)
    dense, sparse = model.layers
    assert not hasattr(dense.mlp, "experts")
    experts = sparse.mlp.experts
    assert (experts.num_experts, experts.act) == (8, "silu")
    assert experts.gate_up_proj.shape == (8, 128, 128)
    assert experts.down_proj.shape == (8, 128, 64)
