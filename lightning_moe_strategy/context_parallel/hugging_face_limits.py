"""What of a Hugging Face model context parallel cannot express exactly. Each is refused with the setting to change.

Known before the first batch: the model's settings. Known at a forward: its arguments. Known at an attention
call: what that layer asks of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from lightning_moe_strategy.context_parallel.hugging_face_linear import is_linear_attention
from lightning_moe_strategy.context_parallel.hugging_face_sparse import is_sparse_attention
from lightning_moe_strategy.context_parallel.scope import LOSSES_WITHOUT_SHIFT, LocalSequence
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT

_AUX_LOSS_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")
LAYERS_WITH_CAUSAL_SOFTMAX = frozenset({"full_attention", "attention", "sliding_attention", "indexed_attention"})
_UNSUPPORTED_OPTIONS = {
    "indices": "a sparse choice of keys",
    "softcap": "a cap on attention scores",
    "position_bias": "a bias on attention scores",
}


def refuse_model(model: PreTrainedModel, name: str) -> None:
    """ValueError for a setting of the model that a split sequence would make wrong."""
    if isinstance(model, MtpModel):
        raise ValueError(
            f"{name} (MtpModel) predicts several tokens ahead for generation and shifts its inputs by slices, which a "
            "rank's part of a sequence makes wrong. Choose cp=1, or train mtp_layers of MoELanguageModel."
        )
    linear = [module for module in model.modules() if is_linear_attention(module)]
    for config in _configs(model.config):
        _refuse_config(config, f"{name} ({type(config).__name__})", has_linear_attention=bool(linear))
    taken_over = {child for module in linear for child in module.children()}
    known_indexers = {getattr(module, "indexer", None) for module in model.modules() if is_sparse_attention(module)}
    for path, module in model.named_modules():
        where = f"{name}.{path}" if path else name
        if module not in taken_over:
            _refuse_module(module, where)
        if "Indexer" in type(module).__name__ and module not in known_indexers:
            raise ValueError(
                f"{where} ({type(module).__name__}) chooses keys for an attention that does not read latents; cp > 1 "
                "supports sparse attention (DSA) on latents. Choose cp=1."
            )


def refuse_inputs(model: nn.Module, inputs: Mapping[str, Any], sequence: LocalSequence) -> None:
    """ValueError for arguments of a model's forward that a rank's part of a sequence cannot honour."""
    where = type(model).__name__
    for key in ("cache", "past_key_values"):
        if inputs.get(key) is not None:
            raise ValueError(f"{where} was given {key}: generation with a cache needs the whole sequence. Use cp=1.")
    config: Any = model.config
    if inputs.get("output_router_logits"):
        _refuse_aux_loss(config.get_text_config(), where)
    mask = inputs.get("attention_mask")
    # The mask of the batch was checked on the whole sequence; any other is a part that cannot be judged alone.
    if mask is not None and mask is not sequence.attention_mask_BL and not bool(torch.all(mask == 1)):
        raise ValueError(
            f"{where} was given an attention_mask of its own making. Put the mask into the batch, as "
            "'attention_mask' [batch, tokens], so that it is checked on the whole sequence before it is split."
        )
    shifts = inputs.get("labels") is not None and getattr(model, "loss_type", None) not in LOSSES_WITHOUT_SHIFT
    if shifts and inputs.get("shift_labels") is None and sequence.shift != "model":
        raise ValueError(
            f"{where} was given labels, which it shifts inside its forward, but the batch was split for "
            f"shift={sequence.shift!r}. Say ZigZagContextParallel(shift='model'), or compute the loss yourself."
        )


def refuse_call(
    where: str,
    module: nn.Module,
    sequence: LocalSequence,
    *,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    options: Mapping[str, Any],
) -> None:
    """ValueError for what one layer asks of its attention."""
    remedy = "Choose a model without it, or cp=1."
    if mask is not None:
        raise ValueError(f"{where} builds an attention mask of shape {tuple(mask.shape)}. {remedy}")
    if dropout > 0.0:
        raise ValueError(f"{where} has attention dropout({dropout}) > 0. Set attention_dropout=0.0 in its config.")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise ValueError(f"{where} attends in both directions (is_causal=False). {remedy}")
    for option, meaning in _UNSUPPORTED_OPTIONS.items():
        if options.get(option) is not None and not (option == "indices" and is_sparse_attention(module)):
            raise ValueError(f"{where} uses {meaning} ({option}), which cp > 1 does not support. {remedy}")
    if is_sparse_attention(module):
        others = [name for name in ("s_aux", "sliding_window") if options.get(name) is not None]
        if others or options.get("indices") is None:
            asked = ", ".join(others) or "no chosen keys"
            raise ValueError(f"{where} is sparse attention (DSA) with {asked}, which cp > 1 does not support. {remedy}")
    if options.get("cu_seq_lens_q") is not None and sequence.documents == ONE_DOCUMENT:
        raise ValueError(
            f"{where} is given cu_seq_lens_q that the batch does not have: put the marks of packed documents into the "
            "batch, so that they are known for the whole sequence before it is split."
        )
    expected, window, num_tokens = _window_of(module), options.get("sliding_window"), sequence.num_tokens
    if expected != window and min(expected or num_tokens, window or num_tokens) < num_tokens:
        raise ValueError(
            f"{where} has a sliding window of {expected} in its config, which its mask would say, and asks its "
            f"attention for {window}. {remedy}"
        )


def _refuse_config(config: PreTrainedConfig, where: str, *, has_linear_attention: bool) -> None:
    unsupported = set(getattr(config, "layer_types", None) or ()) - LAYERS_WITH_CAUSAL_SOFTMAX
    if has_linear_attention:
        unsupported.discard("linear_attention")
    if unsupported:
        raise ValueError(
            f"{where} has layer_types {sorted(unsupported)}; cp > 1 supports causal softmax attention and the delta "
            "rules of Qwen3-Next and Kimi Linear. Choose cp=1."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{where} has is_encoder_decoder=True: cross attention cannot be split. Choose cp=1.")
    if getattr(config, "output_router_logits", False):
        _refuse_aux_loss(config, where)
    for kind in _rope_types(config):
        # Their frequencies follow the longest position a rank sees, and ranks see different ones.
        if "dynamic" in kind or kind == "longrope":
            raise ValueError(f"{where} has rope_type {kind!r}, which depends on the length. Use 'yarn' or 'linear'.")


def _refuse_aux_loss(config: PreTrainedConfig, where: str) -> None:
    for name in _AUX_LOSS_COEFFICIENTS:
        coefficient = getattr(config, name, 0.0) or 0.0
        if coefficient > 0.0:
            raise ValueError(
                f"{where} adds a router loss ({name}={coefficient} with output_router_logits=True), whose statistic "
                f"over a part of the sequence is not a part of the statistic. Set output_router_logits=False and "
                f"FSDPCPEPStrategy(batch_balance_loss=...), which is exact: {name} * top_k / layers weighs as much."
            )


def _refuse_module(module: nn.Module, where: str) -> None:
    dropout = getattr(module, "attention_dropout", 0.0)
    dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
    if isinstance(dropout, float | int) and dropout > 0.0:
        raise ValueError(f"{where} has attention_dropout({dropout}) > 0. Set attention_dropout=0.0 in its config.")
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{where} has is_causal=False: it attends in both directions. Choose cp=1.")
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        raise ValueError(f"{where} is a convolution over tokens (linear attention?). Choose cp=1.")


def _window_of(module: nn.Module) -> int | None:
    """The window that the model's own mask would give to this layer."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return window if layer_types[int(module.layer_idx)] == "sliding_attention" else None  # type: ignore[arg-type]
    return window if getattr(config, "use_sliding_window", True) else None


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        sub_config = getattr(config, name, None)
        if sub_config is not None:
            yield from _configs(sub_config)


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and "rope_type" in entry:
            yield str(entry["rope_type"])
