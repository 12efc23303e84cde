"""Parameters are counted exactly, from a name, a config.json or a YAML of ours."""

import dataclasses
import json
from importlib.resources import files

import pytest
import torch

from lightning_moe_strategy.models.config import PRESETS as CONFIGS
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.model import ModelShape
from lightning_moe_strategy.plan.model_files import from_hugging_face, from_sizes, load_model
from lightning_moe_strategy.plan.presets import MODELS

# Billions, counted on the modeling code of transformers 5.24: total, experts, expert share in %.
PUBLISHED = {
    "glm-5.2": (743.377, 724.776, 97.50),
    "deepseek-v3": (671.026, 653.909, 97.45),
    "kimi-k2": (1026.408, 1014.686, 98.86),
    "qwen3-235b-a22b": (235.094, 227.096, 96.60),
    "qwen3.5-397b-a17b": (396.346, 386.547, 97.53),
    "gpt-oss-120b": (116.829, 114.702, 98.18),
    "qwen3-30b-a3b": (30.532, 28.991, 94.95),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    counts = MODELS[name].counts
    found = (round(counts.total / 1e9, 3), round(counts.experts / 1e9, 3), round(100 * counts.expert_share, 2))
    assert found == PUBLISHED[name]


def test_glm_counts_by_kind():
    glm = MODELS["glm-5.2"]
    counts = glm.counts
    assert counts.total == counts.experts + counts.dense
    assert counts.embedding == counts.head == 154880 * 6144
    # Each layer with experts: 9877.4 M with its indexer of 9.4 M, of which 9663.7 M are experts.
    assert glm.expert_layer_parameters == 256 * 3 * 6144 * 2048
    assert round((glm.expert_layer_parameters + glm.dense_layer_parameters) / 1e6, 1) == 9877.4
    assert round(counts.indexer / 21 / 1e6, 1) == 9.4
    assert round(glm.active_layer_parameters / 1e9, 3) == 0.504
    assert round((counts.total + counts.mtp) / 1e9, 2) == 753.33


@pytest.mark.parametrize("name", sorted(set(CONFIGS) & set(MODELS)))
def test_a_shared_preset_counts_as_our_transformer_does(name):
    config = CONFIGS[name]
    with torch.device("meta"):
        parameters = dict(MoETransformer(config).named_parameters())
    experts = sum(p.numel() for key, p in parameters.items() if ".experts." in key)
    total = sum(p.numel() for p in parameters.values())
    assert (MODELS[name].counts.total, MODELS[name].counts.experts) == (total, experts)
    # The same sizes, written out as a YAML of ours would hold them.
    written_out = from_sizes(dataclasses.asdict(config), name=name)
    assert dataclasses.replace(written_out, mtp_layers=MODELS[name].mtp_layers).counts == MODELS[name].counts


FAMILIES = [
    ("Qwen3MoeConfig", {}),
    ("Qwen3MoeConfig", {"decoder_sparse_step": 2, "attention_bias": True}),
    ("DeepseekV3Config", {"num_hidden_layers": 5}),
    ("DeepseekV3Config", {"num_hidden_layers": 4, "q_lora_rank": None}),
    ("GlmMoeDsaConfig", {"num_hidden_layers": 8, "index_topk_freq": 4, "index_skip_topk_offset": 3}),
    ("GptOssConfig", {}),
    ("Qwen3_5MoeTextConfig", {"num_hidden_layers": 4}),
    ("Qwen3NextConfig", {"num_hidden_layers": 4}),
    ("MixtralConfig", {}),
    ("Glm4MoeConfig", {"use_qk_norm": True}),
    ("Qwen3MoeConfig", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("config_class", "changes"), FAMILIES)
def test_a_config_json_counts_as_the_hugging_face_model(tmp_path, config_class, changes):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(**{"num_hidden_layers": 2, **changes})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    shape = load_model(str(tmp_path))
    assert shape == load_model(str(tmp_path / "config.json"))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert (shape.counts.total, shape.counts.experts) == (sum(p.numel() for p in model.parameters()), experts)


def test_a_vision_language_config_is_planned_by_its_text_part():
    text = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert from_hugging_face({"text_config": text, "vision_config": {}}, name="x") == from_hugging_face(text, name="x")


@pytest.mark.parametrize(
    ("config", "total"),
    [
        ("glm52_1m_256gpu.yaml", MODELS["glm-5.2"].counts.total),
        ("tiny_cpu.yaml", None),
        ("tiny_hf_qwen3_moe.yaml", None),
    ],
)
def test_every_kind_of_our_yaml_is_read(config, total):
    shape = load_model(str(files("lightning_moe_strategy.configs") / config))
    assert isinstance(shape, ModelShape)
    if total is None:
        assert (shape.hidden, shape.layers, shape.num_experts, shape.top_k, shape.vocab_size) == (128, 2, 8, 2, 1024)
    else:
        assert shape.counts.total == total


def test_sizes_change_a_base(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {preset: glm-5.2, layers: 10, moe_intermediate: 1024}\n")
    shape = load_model(str(path))
    assert (shape.layers, shape.shared_intermediate, shape.indexer_layers, shape.name) == (10, 1024, 4, "mine")


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ('{"hidden_size": 64}', "json", r"has no experts: none of n_routed_experts.*Plan a mixture of experts"),
        ('{"num_experts": 8}', "json", r"says no num_hidden_layers. Write it"),
        ("[1, 2]", "json", r"holds no mapping"),
        ("{", "json", r"is not readable JSON"),
        ("model: {hiden: 64}", "yaml", r"\['hiden'\] are not known. Choose from: .*hidden"),
        ("model: {preset: glm-5.1}", "yaml", r"model\('glm-5.1'\) is not known: glm-5.2, "),
        ("model: {hidden: wide}", "yaml", r"hidden\(wide\) must be a whole number"),
        ("model: {top_k: 9}", "yaml", r"top_k\(9\) must be at most num_experts\(8\)"),
        ("model: {dense_first_layers: 2}", "yaml", r"dense_first_layers\(2\) leaves no layer with experts"),
        ("a: [", "yaml", r"is not readable YAML"),
    ],
)
def test_a_model_that_cannot_be_planned_says_why_in_one_line(tmp_path, text, suffix, message):
    path = tmp_path / f"model.{suffix}"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as raised:
        load_model(str(path))
    assert "\n" not in str(raised.value)


def test_an_unknown_name_lists_the_nearest_first():
    with pytest.raises(PlanError, match=r"model\('qwen3-30b'\) is not known: qwen3-30b-a3b"):
        load_model("qwen3-30b")
    with pytest.raises(PlanError, match=r"model\('missing/config.json'\) does not exist"):
        load_model("missing/config.json")


def test_a_config_json_keeps_its_numbers_through_json(tmp_path):
    path = tmp_path / "config.json"
    config = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": "4"}
    path.write_text(json.dumps({**config, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}))
    with pytest.raises(PlanError, match="says no num_attention_heads"):
        load_model(str(path))
