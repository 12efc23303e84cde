"""Write docs/models.md: the Hugging Face families that are tested, and what context parallel gathers for each.

    python -m docs.models > docs/models.md

Sizes go by the names of a configuration. What is tested is a tiny model of the same classes (tests/families.py).
"""

from collections.abc import Iterator

import torch
import transformers
from transformers import AutoModelForCausalLM

from lightning_moe_strategy.context_parallel.hugging_face_limits import LAYERS_WITH_CAUSAL_SOFTMAX
from lightning_moe_strategy.context_parallel.hugging_face_linear import is_linear_attention
from lightning_moe_strategy.context_parallel.hugging_face_sparse import is_sparse_attention
from lightning_moe_strategy.expert_parallel.experts import find_experts, unknown_experts
from lightning_moe_strategy.expert_parallel.local_math import is_gated_swiglu
from tests.families import FAMILIES, MORE_FAMILIES, NOT_SPLIT, make_config
from tests.moe_blocks import found_blocks, make_block

HEADER = """\
# Models

Unchanged Hugging Face causal language models whose loss and every parameter's gradient equal one process, with and
without packed documents, FP32, on the cp ranks listed; relative error below 1e-6 on 2 and 4 ranks, where recompute is
tested too, below 2e-6 on 2; a few sums that cancel are looser and named
([tests/test_context_parallel_families.py](../tests/test_context_parallel_families.py)). Written by `docs/models.py`.

Bytes are those that one rank gathers for one token of the sequence in one layer, in bf16: forward, and again in the
recompute or backward pass; gradients travel back in FP32, twice as many. In a layer with a sliding window the last
`window - 1` tokens of every chunk are gathered instead, where no chunk is shorter; in a layer with linear attention a
state per chunk, however long the sequence is. `ep` says whether the experts are spread over ranks; why some are not
stands below.

| family | cp | ep | gathered, bytes for a token |
|---|---|---|---|
"""

MIXING = """\

## Other ways from token to token

Multi-token prediction is trained by `MoELanguageModel` with `mtp_layers` and `mtp_loss` (DeepSeek-V3; GLM-5.2 publishes
one such layer): a depth reads the embedding of a later token with `kernels.next_tokens.next_tokens`, which cp ranks
answer from wherever that token is, in its document. So may any module, inside the forward of an item of a `ModuleList`.
Of transformers {version} no causal model computes its multi-token prediction in training: published layers are left out
when weights are loaded, and `MtpModel`, which drafts tokens in `generate`, is refused with cp > 1.

With cp > 1 the first step of every stage is watched. Inside the blocks of a model that is not from transformers `roll`,
`flip`, cumulated sums, sorts, top-k, pooling and softmax along dim 1 of a tensor [batch, tokens, ...] are refused;
elsewhere `roll`, `flip` and cumulated sums along it, and token ids that are cut, padded or joined to stand beside their
neighbours (an n-gram embedding). What hides its tokens is not seen: a product with a transposed tensor, a flattened
one, slices of hidden states, a kernel of its own. `ZigZagContextParallel(verify_cp=True)` compares such a model with
one process.
"""

BLOCKS = """\

## Experts

Every module with experts in transformers {version}: the block on two ep ranks has the output and the gradients of one
process ([tests/test_moe_blocks.py](../tests/test_moe_blocks.py)), or is refused. `kernel`: the package's expert MLP.
`own`: the module's own math, on the rows a rank was sent. {spread} of {found} are spread.

| block | ep |
|---|---|
"""

GROUPED = "keys and values: `4 * num_key_value_heads * head_dim`"
LATENT = "latent and rope key: `2 * (kv_lora_rank + qk_rope_head_dim)`, 1,152 in DeepSeek-V3"
WITH_INDEX = "the same and, in a layer with an indexer, its key: `2 * index_head_dim` more, 1,408 in DeepSeek-V3.2"
WINDOW = "in sliding layers the tails of chunks"
SINKS = "its sparse attention has sinks (`s_aux`)"
LINEAR = "in linear layers states, and the tails of chunks for the convolution"


def text() -> str:
    """The whole page."""
    blocks = {block: experts_of(*block) for block in found_blocks()}
    can_spread = {family for (family, _), verdict in blocks.items() if not verdict.startswith("no")}
    rows = []
    for family in sorted(FAMILIES | MORE_FAMILIES | NOT_SPLIT):
        ep = "yes" if family.removesuffix("_text") in can_spread else "no"
        if family in NOT_SPLIT:
            rows.append(f"| `{family}` | no | {ep} | {why_not_split(family)} |\n")
        else:
            degrees = "2, 4" if family in FAMILIES else "2"
            rows.append(f"| `{family}` | {degrees} | {ep} | {'; '.join(gathered(family))} |\n")
    spread = sum(not verdict.startswith("no") for verdict in blocks.values())
    version = ".".join(transformers.__version__.split(".")[:2])
    header = MIXING.format(version=version) + BLOCKS.format(version=version, spread=spread, found=len(blocks))
    lines = (f"| `{family}` {name} | {verdict} |\n" for (family, name), verdict in blocks.items())
    return HEADER + "".join(rows) + header + "".join(lines)


def experts_of(family: str, name: str) -> str:
    """Who computes a block's experts, or why they are not spread."""
    block = make_block(family, name)
    for experts in find_experts(block).values():
        return "kernel" if is_gated_swiglu(experts) else "own"
    ((_, reason), *_) = unknown_experts(block)
    return f"no: {reason}"


def why_not_split(family: str) -> str:
    """The setting that cp > 1 refuses."""
    config = make_config(family)
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS_WITH_CAUSAL_SOFTMAX)
    return f"layers of other kinds: {', '.join(f'`{kind}`' for kind in unknown)}" if unknown else SINKS


def gathered(family: str) -> Iterator[str]:
    """Of each kind of layer."""
    config = make_config(family)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        modules = list(AutoModelForCausalLM.from_config(config).modules())
    yield LATENT if any(callable(getattr(module, "expand_kv", None)) for module in modules) else GROUPED
    if any(map(is_sparse_attention, modules)):
        yield WITH_INDEX
    if getattr(config, "sliding_window", None) is not None:
        yield WINDOW
    if any(map(is_linear_attention, modules)):
        yield LINEAR


if __name__ == "__main__":
    print(text(), end="")
