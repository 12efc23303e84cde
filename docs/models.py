"""Write docs/models.md: the Hugging Face families that are tested, and what context parallel gathers for each.

    python -m docs.models > docs/models.md

Sizes go by the names of a configuration. What is tested is a tiny model of the same classes (tests/families.py).
"""

from collections.abc import Iterator

from tests.families import FAMILIES, make_config

HEADER = """\
# Models

Unchanged Hugging Face causal language models whose loss and every parameter's gradient equal one process on 2 and 4 cp
ranks, with and without packed documents and recompute, FP32, relative error below 1e-6
([tests/test_context_parallel_families.py](../tests/test_context_parallel_families.py)). Written by `docs/models.py`.

Bytes are those that one rank gathers for one token of the sequence in one layer, in bf16: forward, and again in the
recompute or backward pass; gradients travel back in FP32, twice as many. In a layer with a sliding window the last
`window - 1` tokens of every chunk are gathered instead, where no chunk is shorter; in a layer with linear attention a
state per chunk, however long the sequence is.

| family | gathered |
|---|---|
"""

GROUPED = "keys and values: `4 * num_key_value_heads * head_dim`"
LATENT = "latent and rope key: `2 * (kv_lora_rank + qk_rope_head_dim)`, 1,152 in DeepSeek-V3"
WITH_INDEX = "the same and, in a layer with an indexer, its key: `2 * index_head_dim` more, 1,408 in DeepSeek-V3.2"
WINDOW = "in sliding layers the tails of chunks"
LINEAR = "in linear layers states, and the tails of chunks for the convolution"


def text() -> str:
    """The whole page."""
    return HEADER + "".join(f"| `{family}` | {'; '.join(gathered(family))} |\n" for family in sorted(FAMILIES))


def gathered(family: str) -> Iterator[str]:
    """Of each kind of layer."""
    config = make_config(family)
    kinds = set(getattr(config, "layer_types", None) or ())
    yield LATENT if hasattr(config, "kv_lora_rank") else GROUPED
    if hasattr(config, "index_topk"):
        yield WITH_INDEX
    if getattr(config, "sliding_window", None) is not None:
        yield WINDOW
    if "linear_attention" in kinds:
        yield LINEAR


if __name__ == "__main__":
    print(text(), end="")
