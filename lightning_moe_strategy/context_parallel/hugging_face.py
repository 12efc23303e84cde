"""Context parallel for Hugging Face models, through what transformers offers for it.

Two hooks of transformers carry it: an attention function in its registry, and a forward pre-hook that hands over
positions, labels and a ``cache`` that remembers nothing. Masks stay away because the attention function's name is
absent from the mask registry. Latent, sparse and linear attention, for which there is no hook, have files of their own.

Shapes: B batch, L tokens of this rank, H query heads, G key heads, D and E channels.
"""

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_moe_strategy.context_parallel.hugging_face_language_part import (
    find_language_part,
    leave_whole,
    split_inputs,
)
from lightning_moe_strategy.context_parallel.hugging_face_limits import (
    refuse_call,
    refuse_inputs,
    refuse_model,
)
from lightning_moe_strategy.context_parallel.hugging_face_linear import (
    adapt_linear_attention,
    is_linear_attention,
)
from lightning_moe_strategy.context_parallel.hugging_face_sparse import (
    adapt_sparse_attention,
    attend_sparsely,
    is_sparse_attention,
    no_mask,
)
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.softmax import causal_attention
from lightning_moe_strategy.context_parallel.unexpanded import KeysOfSequence, adapt_latent_attention

ATTENTION = "fsdp_cp_ep"
"""Name of the attention function in transformers' registry."""

_SITE = "_context_parallel_site"
_INPUTS = "_context_parallel_inputs"
_STOCK = "_context_parallel_stock_attention"

Role = Literal["text", "wrapper", "language part"]
"""Of a model: one of text alone; one that reads images too; and in it what its tokens go through."""


def adapt_pretrained_model(
    model: PreTrainedModel, name: str, block_of: Mapping[nn.Module, str], cp: ContextParallel
) -> set[nn.Module]:
    """Let an unchanged Hugging Face causal model work on this rank's part of every sequence.

    ``model`` is an outermost one, called ``name`` in the module tree; ``block_of`` names the block that
    holds a module. ValueError for what cannot be split exactly, naming the module and its setting. May be
    called again.

    Of a model that reads images too, that is its language part; the rest computes what it would in one process.
    Returns the modules of that rest, which run whole.
    """
    part, whole = find_language_part(model) if cp.degree > 1 else None, set[nn.Module]()
    if part is not None:
        for wrapper in part.wrappers:
            if isinstance(wrapper, PreTrainedModel):
                _hook_inputs(wrapper, cp, role="wrapper")
        for tower in part.towers:
            leave_whole(tower, cp)
            whole.update(tower.modules())
        model, name = part.model, f"{name}.{part.path}"
    refuse_model(model, name)
    # The class, not an instance, carries the registry: every family sees the name.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    # Of the first call: a second one finds ours.
    stock = model.__dict__.setdefault(_STOCK, _chosen_attention(model))
    cp.stock_attention[model] = partial(_with_attention, stock)
    model.set_attn_implementation(ATTENTION)
    for path, module in model.named_modules():
        where = block_of.get(module, f"{name}.{path}" if path else name)
        if isinstance(module, PreTrainedModel):
            _refuse_if_without_registry(module, where)
            _hook_inputs(module, cp, role="language part" if part is not None and module is model else "text")
        elif isinstance(module, GradientCheckpointingLayer):
            # Our cache remembers nothing, so a recompute may call it a second time.
            module._can_checkpoint_with_cache = True
        module.__dict__[_SITE] = _Site(where, cp)
        if is_sparse_attention(module):
            adapt_sparse_attention(module, where, cp)
        elif _is_latent_attention(module):
            has_window = getattr(module.config, "sliding_window", None) is not None
            adapt_latent_attention(module, "expand_kv", "kv_b_proj", cp, has_window=has_window)
        elif is_linear_attention(module):
            adapt_linear_attention(module, where, cp)
    return whole


class _Site:
    """What the attention function has to know about the module that calls it."""

    def __init__(self, block: str, cp: ContextParallel) -> None:
        self.block, self.cp = block, cp


class _NoCache:
    """Stands where a model expects its key-value cache; holds nothing, and what is handed to it passes unchanged."""

    is_compileable = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_indexer(self, key_states: Tensor, layer_idx: int) -> Tensor:
        return key_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


class _Inputs:
    """The forward pre-hook: what a rank's part of the sequence adds to, or takes from, a model's arguments."""

    def __init__(self, names: tuple[str, ...], cp: ContextParallel, role: Role, *, is_sparse: bool) -> None:
        self.names, self.cache, self.cp, self.role = names, _NoCache(), cp, role
        self.is_sparse = is_sparse

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        inputs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.cp.is_off:
            # With a cache, which changes nothing else, no mask would keep packed documents apart.
            return (), inputs | ({"use_cache": False} if "use_cache" in self.names else {})
        if isinstance(inputs.get("cache"), _NoCache):
            return (), inputs  # an inner model: its outer one was here
        sequence = self.cp.current
        if self.role == "language part":
            inputs = split_inputs(inputs, sequence, self.cp.rank, type(module).__name__)
        refuse_inputs(module, inputs, sequence)
        ours: dict[str, Any] = {"use_cache": False}
        if self.role != "wrapper":
            mask = no_mask(sequence.position_ids_BL.device) if self.is_sparse else None
            ours |= {"cache": self.cache, "attention_mask": mask}
            if "position_ids" in self.names:
                ours["position_ids"] = self._position_ids(inputs, type(module).__name__)
                self.cp.note_positions()
        inputs |= {name: value for name, value in ours.items() if name in self.names}
        is_shifted = sequence.shift_labels_BL is not None and inputs.get("labels") is not None
        if is_shifted and inputs.get("shift_labels") is None and self.cp.degree > 1:
            inputs["shift_labels"] = sequence.shift_labels_BL
        return (), inputs

    def _position_ids(self, inputs: dict[str, Any], model: str) -> Tensor:
        """The caller's, or those of this rank's tokens."""
        embeds, given = inputs.get("inputs_embeds"), inputs.get("position_ids")
        tokens: Tensor = inputs["input_ids"] if embeds is None else embeds
        ours = self.cp.current.position_ids_BL[:, : tokens.shape[1]]
        if given is None:
            return ours
        # A language part's are cut from the whole sequence's, whatever they count.
        if self.role == "text" and self.cp.guard is not None and bool((given != ours).any()):
            raise ValueError(
                f"{model} was given position_ids that are not those of this rank's tokens (counted from 0?). Pass "
                "batch['position_ids'], or none."
            )
        assert isinstance(given, Tensor)
        return given


def _hook_inputs(module: PreTrainedModel, cp: ContextParallel, role: Role) -> None:
    inputs = module.__dict__.get(_INPUTS)
    if inputs is None:
        names = tuple(inspect.signature(module.forward).parameters)
        inputs = module.__dict__[_INPUTS] = _Inputs(
            names, cp, role, is_sparse=any(map(is_sparse_attention, module.modules()))
        )
        module.register_forward_pre_hook(inputs, with_kwargs=True)
    inputs.cp, inputs.role = cp, role


def _attention(
    module: nn.Module,
    query_BHLD: Tensor,
    key: Tensor | KeysOfSequence,
    value: Tensor | KeysOfSequence,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Signature and result, [B, L, H, E], of transformers' functions. ``key`` is this rank's, [B, G, L, D]."""
    site: _Site | None = module.__dict__.get(_SITE)
    if site is None:
        raise RuntimeError(
            f"{type(module).__name__} asks for attention {ATTENTION!r} but was not adapted. Use model."
            "set_attn_implementation('sdpa') outside of a Trainer with strategy 'fsdp_cp_ep'."
        )
    cp = site.cp
    sequence, is_sparse = cp.current, is_sparse_attention(module)
    if is_sparse and attention_mask is no_mask(query_BHLD.device):
        attention_mask = None
    refuse_call(site.block, module, sequence, mask=attention_mask, dropout=dropout, is_causal=is_causal, options=kwargs)
    cp.note_attention(site.block)
    if is_sparse:
        assert isinstance(key, Tensor), "latents that adapt_sparse_attention keeps"
        scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_sparsely(module, query_BHLD, key, kwargs["indices"], scale, cp).contiguous(), None
    sight: dict[str, Any] = dict(
        documents=sequence.documents,
        window=kwargs.get("sliding_window"),
        sinks_H=kwargs.get("s_aux"),
        scale=scaling,
    )
    if isinstance(key, KeysOfSequence):
        out = key.attend(query_BHLD, **sight)
    else:
        assert isinstance(value, Tensor), "one object stands for both"
        sight |= {"layout": cp.layout, "group": cp.group, "kernel": cp.attention_kernel}
        out = causal_attention(query_BHLD, key, value, **sight)
    return out.transpose(1, 2).contiguous(), None


def _chosen_attention(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str]]:
    """The attention that the settings of a model, and of the models in it, name."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in configs:
        inner = (getattr(config, name, None) for name in config.sub_configs)
        configs += [config for config in inner if config is not None]
    return [(config, config._attn_implementation_internal) for config in configs]


@contextmanager
def _with_attention(chosen: Sequence[tuple[PreTrainedConfig, str]]) -> Generator[None, None, None]:
    """These choices inside, masks included: they are made for the attention that is named."""
    ours = [(config, config._attn_implementation_internal) for config, _ in chosen]
    try:
        for config, name in chosen:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, name in ours:
            config._attn_implementation_internal = name


def _is_latent_attention(module: nn.Module) -> bool:
    return callable(getattr(module, "expand_kv", None))


def _refuse_if_without_registry(model: PreTrainedModel, where: str) -> None:
    if model.config._attn_implementation != ATTENTION:
        raise ValueError(
            f"{where} ({type(model).__name__}) does not take its attention from transformers' registry "
            f"(it stays at {model.config._attn_implementation!r}). Choose cp=1, or a model that supports "
            "set_attn_implementation."
        )
