"""Every block with experts in the installed transformers, tiny: found by reading its modeling files."""

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, NUM_EXPERTS = 32, 4

# Names that the families use for the same few sizes. What a config does not know it ignores.
SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=HIDDEN, d_model=HIDDEN, embed_dim=HIDDEN, intermediate_size=48, ffn_hidden_size=48,
    d_ff=48, encoder_ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    num_experts=NUM_EXPERTS, num_local_experts=NUM_EXPERTS, n_routed_experts=NUM_EXPERTS, moe_num_experts=NUM_EXPERTS,
    num_experts_per_tok=2, num_experts_per_token=2, moe_k=2, top_k=2, top_k_experts=2, moe_topk=2, moe_top_k=2,
    moe_intermediate_size=16, expert_ffn_hidden_size=16, moe_ffn_hidden_size=16, shared_expert_intermediate_size=16,
    moe_shared_expert_intermediate_size=16, shared_experts_intermediate_size=16, share_expert_dim=16,
    shared_intermediate_size=16, n_group=1, topk_group=1, n_shared_experts=1, num_shared_experts=1,
    moe_num_shared_experts=1, dense_intermediate_size=48, moe_hidden_size=HIDDEN, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "DbrxFFN": dict(ffn_config=dict(ffn_hidden_size=16, moe_num_experts=NUM_EXPERTS, moe_top_k=2)),
    "Dots3NoteVisionMoE": dict(
        adapter_in_dim=HIDDEN,
        mlp_layer_types=["sparse"] * 2,
        per_layer_config={layer: {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2} for layer in range(2)},
    ),
    "DeepseekV4SparseMoeBlock": dict(num_hidden_layers=4),
    "Ernie4_5_VLMoeSparseMoeBlock": dict(moe_intermediate_size=[16, 16]),
    "GraniteMoeHybridMoE": dict(mamba_n_heads=4),
    "VitPoseBackboneMoeMLP": dict(part_features=16),
    "Step3p7SparseMoeBlock": dict(bos_token_id=0, eos_token_id=0, pad_token_id=0),
    "ZayaSparseMoeBlock": dict(num_experts_per_tok=1, top_k=1),
}

# The part of a family's configuration that a block is built from, where its signature does not say.
_CONFIGS = {
    "DeepseekOcr2TextMoe": "DeepseekOcr2TextConfig",
    "Dots3NoteTextMoE": "Dots3NoteTextConfig",
    "Dots3NoteVisionMoE": "Dots3NoteVisionConfig",
    "Ernie4_5_VLMoeSparseMoeBlock": "Ernie4_5_VLMoeTextConfig",
    "Gemma4TextDecoderLayer": "Gemma4TextConfig",
    "DiffusionGemmaEncoderTextLayer": "DiffusionGemmaTextConfig",
    "DiffusionGemmaDecoderTextLayer": "DiffusionGemmaTextConfig",
    "HYV4VLMoE": "HYV4VLTextConfig",
    "Inkling2SparseMoeBlock": "Inkling2TextConfig",
    "Inkling2LoopSparseMoeBlock": "Inkling2LoopTextConfig",
    "Glm5NextTextMoE": "Glm5NextTextConfig",
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": "Qwen3OmniMoeTextConfig",
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": "Qwen3OmniMoeTalkerTextConfig",
    "DbrxFFN": "DbrxConfig",
    "InklingMoE": "InklingTextConfig",
    "Llama4TextMoe": "Llama4TextConfig",
    "Qwen3_5MoeSparseMoeBlock": "Qwen3_5MoeTextConfig",
    "Qwen4ExpTextSparseMoeBlock": "Qwen4ExpTextConfig",
    "Step3p7SparseMoeBlock": "Step3p7TextConfig",
}
_ARGUMENTS = {
    "layer_idx": 1,
    "layer_index": 1,
    "intermediate_size": 16,
    "ffn_dim": 16,
}

_BLOCK = re.compile(r"^class (\w+)\(.*?(?=^class |\Z)", re.MULTILINE | re.DOTALL)
_HOLDS_EXPERTS = re.compile(r"self\.(?:experts|input_linear) = (\w*Experts|\w*Moe)\(")
_HOLDS_ROUTER = re.compile(r"self\.router = (\w+)\(")


@functools.cache
def found_blocks() -> tuple[tuple[str, str], ...]:
    """Family and class of every module that holds experts."""
    return tuple(
        (family, match[1])
        for family, source in _sources()
        for match in _BLOCK.finditer(source)
        if _HOLDS_EXPERTS.search(match[0])
    )


def make_block(family: str, name: str) -> nn.Module:
    """In FP32, with the same values in every process. Where a whole layer holds the experts: its router and they."""
    modeling = _modeling(family)
    block_class, source = getattr(modeling, name), inspect.getsource(getattr(modeling, name))
    config = _config_class(family, block_class)(**(SIZES | _CHANGES.get(name, {})))
    if name.endswith("Layer"):
        parts = (pattern.search(source) for pattern in (_HOLDS_ROUTER, _HOLDS_EXPERTS))
        block = _RouterAndExperts(*(getattr(modeling, part[1])(config) for part in parts if part))
    else:
        takes = list(inspect.signature(block_class.__init__).parameters)[2:]
        block = block_class(config, **{key: value for key, value in _ARGUMENTS.items() if key in takes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, 0.2, generator=generator)
    return block.float().train()


def call(block: nn.Module, x_BSD: Tensor) -> Tensor:
    """The block's output, [B, S, D], for hidden states; a router that looks token ids up gets some."""
    takes = inspect.signature(block.forward).parameters
    ids = {"input_ids": torch.arange(x_BSD.shape[1])[None].expand(x_BSD.shape[0], -1)} if "input_ids" in takes else {}
    out = block(x_BSD, **ids)
    return (out[0] if isinstance(out, tuple) else out).reshape(x_BSD.shape)


class _RouterAndExperts(nn.Module):
    """What a whole layer does with its experts."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        _, weights_TK, ids_TK = self.router(x_TD)
        out_TD: Tensor = self.experts(x_TD, ids_TK, weights_TK)
        return out_TD


def _sources() -> Iterator[tuple[str, str]]:
    import transformers.models

    root = Path(transformers.models.__path__[0])
    for family in sorted(module.name for module in pkgutil.iter_modules([str(root)]) if module.ispkg):
        path = root / family / f"modeling_{family}.py"
        if path.exists():
            yield family, path.read_text()


def _modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _config_class(family: str, block_class: type) -> Any:
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    annotation = list(inspect.signature(block_class.__init__).parameters.values())[1].annotation
    name = _CONFIGS.get(block_class.__name__) or getattr(annotation, "__name__", "")
    if not hasattr(configuration, name):
        (name,) = (other for other in vars(configuration) if re.fullmatch(r"(?!PreTrained)\w+Config", other))
    return getattr(configuration, name)
