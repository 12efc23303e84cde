"""Hugging Face models without memory, from a folder or the configuration itself."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_moe_strategy.checkpoint.errors import CheckpointError

Config = Any
"""A transformers configuration."""


def read_config(folder: str | Path) -> Config:
    """The configuration in a folder (or the path of a ``config.json``).

    Raises:
        CheckpointError: there is none that transformers knows.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as reason:
        raise CheckpointError(
            f"{folder} has no configuration that transformers knows ({_first_line(reason)}). Give the folder of a "
            "Hugging Face model with its config.json."
        ) from reason


def config_from(values: Mapping[str, Any]) -> Config:
    """The configuration that `plain_config` made plain."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def plain_config(config: Config) -> dict[str, Any]:
    """Everything in a configuration, as JSON has it: what a checkpoint can hold."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def model_on_meta(config: Config, dtype: torch.dtype | None) -> nn.Module:
    """The causal language model of a configuration; tensors that stay in FP32 whatever ``dtype`` says are FP32.

    Raises:
        CheckpointError: it has none, or transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype or torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as reason:
        raise CheckpointError(
            f"The configuration ({getattr(config, 'model_type', '?')}) builds no causal language model "
            f"({_first_line(reason)})."
        ) from reason
    model.tie_weights()  # type: ignore[operator]
    return model


def own_names(model: nn.Module) -> list[str]:
    """Of everything in a model's state dict; one of those that are tied."""
    first = {id(tensor): name for name, tensor in reversed(list(model.state_dict(keep_vars=True).items()))}
    return [name for name in model.state_dict() if name in set(first.values())]


def _first_line(reason: Exception) -> str:
    return str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
