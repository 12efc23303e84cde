"""A ``ModelShape`` from a name, a Hugging Face ``config.json`` or a YAML of ours. Neither torch nor transformers."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.model import ModelShape
from lightning_moe_strategy.plan.presets import MODELS, preset

Sizes = Mapping[str, Any]
"""What a file says: values are what JSON or YAML holds."""

_DEEPSEEK_LIKE = ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
_OUTPUT_BIAS_FOLLOWS = ("gpt_oss", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "qwen3_moe", "qwen3_5_moe_text")
"""Families whose ``attention_bias`` covers the output projection as well."""


def load_model(model: str) -> ModelShape:
    """The shape a user names.

    Args:
        model: a preset's name, a path to a ``config.json`` or the folder it lies in, or to a YAML of ours.

    Raises:
        PlanError: no such name or file, no experts in it, a size missing.
    """
    path = Path(model)
    if model.lower() in MODELS:
        return preset(model)
    if path.is_dir():
        path /= "config.json"
    if path.suffix not in (".json", ".yaml", ".yml"):
        return preset(model)
    if not path.is_file():
        raise PlanError(f"model({model!r}) does not exist. Give the path of a config.json, of a YAML, or a name.")
    if path.suffix == ".json":
        return from_hugging_face(_read_json(path), name=path.parent.name or path.stem)
    return from_yaml(_read_yaml(path), name=path.stem)


def from_hugging_face(config: Sizes, *, name: str) -> ModelShape:
    """The shape of a Hugging Face configuration; a vision-language one by its ``text_config``."""
    if "text_config" in config:
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        return from_hugging_face({**tied, **config["text_config"]}, name=name)
    num_experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    if not num_experts:
        raise PlanError(
            f"model({name!r}) has no experts: none of n_routed_experts, num_local_experts, num_experts is in its "
            "config.json. Plan a mixture of experts."
        )
    layers = _need(config, name, "num_hidden_layers")
    moe_intermediate = _first(config, "moe_intermediate_size") or _need(config, name, "intermediate_size")
    dense = _dense_layers(config, layers)
    is_gpt_oss = config.get("model_type") == "gpt_oss"
    return ModelShape(
        name=name,
        vocab_size=_need(config, name, "vocab_size"),
        hidden=_need(config, name, "hidden_size"),
        layers=layers,
        dense_first_layers=dense,
        intermediate=_need(config, name, "intermediate_size") if dense else 0,
        heads=_need(config, name, "num_attention_heads"),
        num_experts=num_experts,
        top_k=_first(config, "num_experts_per_tok", "moe_k") or _need(config, name, "num_experts_per_tok"),
        moe_intermediate=moe_intermediate,
        expert_bias=is_gpt_oss,
        shared_intermediate=_shared(config, moe_intermediate),
        shared_gate=bool(config.get("shared_expert_intermediate_size")),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        mtp_layers=config.get("num_nextn_predict_layers") or 0,
        **_attention(config, name),
        **_linear_attention(config, layers, name),
        **_indexer(config, layers, name),
        **_windows(config),
    )


def from_yaml(config: Sizes, *, name: str) -> ModelShape:
    """The shape of the ``model:`` section of our configs; a mapping of sizes alone is taken as that section."""
    section = config.get("model", config)
    arguments = section.get("init_args", section) if isinstance(section, Mapping) else {"model": section}
    if "config" in arguments:
        inner = arguments["config"]
        return load_model(inner) if isinstance(inner, str) else from_hugging_face(inner, name=name)
    sizes: Sizes | str = arguments.get("model") or ("tiny" if "class_path" in section else arguments)
    if isinstance(sizes, str):
        return preset(sizes)
    return from_sizes(sizes, name=name)


def from_sizes(sizes: Sizes, *, name: str) -> ModelShape:
    """A shape from the fields of our ``ModelConfig``; ``preset`` names the base, ``tiny`` without it."""
    changes = dict(sizes)
    base = preset(str(changes.pop("preset", "tiny")))
    if "shared_experts" in changes:
        width = changes.get("moe_intermediate", base.moe_intermediate)
        changes["shared_intermediate"] = int(changes.pop("shared_experts")) * width
    elif base.shared_intermediate and "moe_intermediate" in changes:
        changes["shared_intermediate"] = base.shared_intermediate // base.moe_intermediate * changes["moe_intermediate"]
    every, first = changes.pop("index_every", None), changes.pop("index_skip_first", None)
    if changes.get("index_heads", base.index_heads) and {"layers", "index_heads"} & set(changes):
        layers = int(changes.get("layers", base.layers))
        changes["indexer_layers"] = _indexers_by_rhythm(layers, int(every or 4), int(3 if first is None else first))
    for without_effect in _NO_SIZES:
        changes.pop(without_effect, None)
    known = {field.name for field in dataclasses.fields(ModelShape)} - {"name"}
    if strange := sorted(set(changes) - known):
        raise PlanError(f"model sizes {strange} are not known. Choose from: {', '.join(sorted(known))}.")
    return dataclasses.replace(base, name=name, **changes)


_NO_SIZES = (
    "rope_theta",
    "scoring",
    "normalize_top_k",
    "routed_scaling",
    "balance_bias",
    "num_groups",
    "top_k_groups",
    "norm_eps",
    "mtp_loss",
)
"""Fields of ModelConfig that change neither a size nor a cost."""


def _attention(config: Sizes, name: str) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    if all(key in config for key in _DEEPSEEK_LIKE):
        return {
            "attention": "mla",
            "q_lora": config.get("q_lora_rank"),
            "kv_lora": config["kv_lora_rank"],
            "nope_head_dim": _need(config, name, "qk_nope_head_dim"),
            "rope_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
        }
    heads, model_type = _need(config, name, "num_attention_heads"), str(config.get("model_type", ""))
    has_qk_norm = model_type.startswith("qwen3") or bool(config.get("use_qk_norm", False))
    return {
        "attention": "gqa",
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or _need(config, name, "hidden_size") // heads,
        "qk_norm": has_qk_norm,
        "gated_query": model_type.startswith(("qwen3_next", "qwen3_5")),
        "attention_bias": bias,
        "output_bias": bias and model_type in _OUTPUT_BIAS_FOLLOWS,
        "attention_sinks": model_type == "gpt_oss",
    }


def _linear_attention(config: Sizes, layers: int, name: str) -> dict[str, Any]:
    types = config.get("layer_types") or []
    linear = sum(kind == "linear_attention" for kind in types)
    if not types and "linear_num_value_heads" in config:
        linear = layers - layers // int(config.get("full_attention_interval", 4))
    if not linear:
        return {}
    return {
        "linear_layers": linear,
        "linear_key_heads": _need(config, name, "linear_num_key_heads"),
        "linear_value_heads": _need(config, name, "linear_num_value_heads"),
        "linear_key_dim": _need(config, name, "linear_key_head_dim"),
        "linear_value_dim": _need(config, name, "linear_value_head_dim"),
        "linear_conv": _need(config, name, "linear_conv_kernel_dim"),
    }


def _indexer(config: Sizes, layers: int, name: str) -> dict[str, Any]:
    if not config.get("index_n_heads"):
        return {}
    types = config.get("indexer_types")
    if types:
        owners = sum(kind == "full" for kind in types)
    else:
        every = int(config.get("index_topk_freq") or 1)
        owners = _indexers_by_rhythm(layers, every, int(config.get("index_skip_topk_offset") or 0))
    return {
        "index_heads": _need(config, name, "index_n_heads"),
        "index_head_dim": _need(config, name, "index_head_dim"),
        "index_top_k": _need(config, name, "index_topk"),
        "indexer_layers": owners,
    }


def _indexers_by_rhythm(layers: int, every: int, offset: int) -> int:
    """Layers with an indexer: the first ``offset``, then one of every ``every`` (GLM-5.2: 3, then one of 4)."""
    return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))


def _windows(config: Sizes) -> dict[str, Any]:
    sliding = sum(kind == "sliding_attention" for kind in config.get("layer_types") or [])
    return {"sliding_layers": sliding, "sliding_window": int(config["sliding_window"])} if sliding else {}


def _dense_layers(config: Sizes, layers: int) -> int:
    if "mlp_layer_types" in config and config["mlp_layer_types"]:
        return sum(kind == "dense" for kind in config["mlp_layer_types"])
    dense = set(range(int(config.get("first_k_dense_replace") or 0))) | set(config.get("mlp_only_layers") or [])
    step = int(config.get("decoder_sparse_step") or 1)
    dense |= {layer for layer in range(layers) if (layer + 1) % step}
    return len(dense)


def _shared(config: Sizes, moe_intermediate: int) -> int:
    width = config.get("shared_expert_intermediate_size")
    return int(width) if width else int(config.get("n_shared_experts") or 0) * moe_intermediate


def _first(config: Sizes, *names: str) -> int:
    return next((config[name] for name in names if config.get(name)), 0)


def _need(config: Sizes, model: str, name: str) -> int:
    if not isinstance(config.get(name), int):
        raise PlanError(f"model({model!r}) says no {name}. Write it into its config: the planner counts from it.")
    return int(config[name])


def _read_json(path: Path) -> Sizes:
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(
            f"model({str(path)!r}) is not readable JSON: {error}. Give a Hugging Face config.json."
        ) from None
    return _mapping(config, path)


def _read_yaml(path: Path) -> Sizes:
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"model({str(path)!r}) is not readable YAML: {reason}. Give a config of ours.") from None
    return _mapping(config, path)


def _mapping(config: object, path: Path) -> Sizes:
    if not isinstance(config, Mapping):
        raise PlanError(f"model({str(path)!r}) holds no mapping of sizes. Give a config.json or a config of ours.")
    return config
