"""Published sizes give published parameter counts; impossible sizes are refused with a remedy."""

import dataclasses

import pytest
import torch

from lightning_moe_strategy.models.config import PRESETS, ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer

# Billions: total (no multi-token-prediction layer), experts, DSA indexers.
PUBLISHED = {
    "glm-5.2": (743.377, 724.776, 0.197),
    "deepseek-v3": (671.026, 653.909, 0.0),
    "kimi-k2": (1026.408, 1014.686, 0.0),
    "qwen3-235b-a22b": (235.094, 227.096, 0.0),
    "qwen3-30b-a3b": (30.532, 28.991, 0.0),
}


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    with torch.device("meta"):
        parameters = dict(MoETransformer(config).named_parameters())
    experts = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    return sum(p.numel() for p in parameters.values()), experts


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(preset):
    config = PRESETS[preset]
    counts = (*parameter_counts(config), config.indexer_parameters)
    assert tuple(round(count / 1e9, 3) for count in counts) == PUBLISHED[preset]


def test_glm_has_an_indexer_in_21_of_its_78_layers():
    config = PRESETS["glm-5.2"]
    assert config.indexer_layers == (0, 1, *range(2, 78, 4))
    assert len(config.indexer_layers) == 21
    with torch.device("meta"):
        parameters = dict(MoETransformer(config).named_parameters())
    indexers = {name: p.numel() for name, p in parameters.items() if ".indexer." in name}
    assert {int(name.split(".")[1]) for name in indexers} == set(config.indexer_layers)
    assert sum(indexers.values()) == config.indexer_parameters


@pytest.mark.parametrize(
    ("preset", "config_class", "changes"),
    [
        ("deepseek-v3", "DeepseekV3Config", {}),
        ("glm-5.2", "GlmMoeDsaConfig", {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
    ],
)
def test_a_preset_counts_the_same_as_the_hugging_face_model(preset, config_class, changes):
    transformers = pytest.importorskip("transformers")
    # Four layers hold one of each kind: dense and sparse, with and without an indexer.
    hf_config = getattr(transformers, config_class)(num_hidden_layers=5, **changes)
    with torch.device("meta"):
        hf_model = transformers.AutoModelForCausalLM.from_config(hf_config)
    config = dataclasses.replace(PRESETS[preset], layers=5)
    expected = sum(p.numel() for p in hf_model.parameters())
    assert parameter_counts(config)[0] == expected


def test_a_config_resolves_from_a_name_a_mapping_and_itself():
    assert ModelConfig.resolve("qwen3-30b-a3b") is not None
    assert ModelConfig.resolve({"preset": "glm-5.2", "layers": 4}) == dataclasses.replace(PRESETS["glm-5.2"], layers=4)
    assert ModelConfig.resolve({"hidden": 64}) == ModelConfig(hidden=64)
    config = ModelConfig(layers=3)
    assert ModelConfig.resolve(config) is config
    assert ModelConfig.resolve(dataclasses.asdict(PRESETS["kimi-k2"])) == PRESETS["kimi-k2"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, r"kv_heads\(3\) does not divide heads\(4\)"),
        ({"head_dim": 33}, r"head_dim\(33\) is odd"),
        ({"num_experts": 8, "num_groups": 3}, r"num_groups\(3\) does not divide num_experts\(8\)"),
        ({"num_experts": 8, "num_groups": 4, "top_k": 3}, r"top_k\(3\) must be at most .* = 2"),
        ({"top_k": 9}, r"top_k\(9\) must be at most .* = 8"),
        ({"layers": 0}, r"layers\(0\) must be at least 1"),
        ({"attention": "mla"}, r"kv_lora\(0\) must be at least 1 with mla"),
        ({"index_heads": 4}, r"index_heads\(4\) needs mla attention, not 'gqa'"),
        ({"preset": "tiny-dsa", "index_head_dim": 4}, r"index_head_dim\(4\) must be at least rope_head_dim\(8\)"),
        ({"preset": "tiny-dsa", "index_top_k": 0}, r"index_top_k\(0\) must be at least 1 with index_heads\(4\)"),
        ({"preset": "tiny-dsa", "index_skip_first": 0}, r"index_skip_first\(0\) must be at least 1"),
        ({"preset": "gpt-5"}, r"preset 'gpt-5' is not known. Choose one of: glm-5.2"),
        ({"hiden": 64}, r"\['hiden'\] are not known. Choose from: .*hidden"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.resolve(sizes)
