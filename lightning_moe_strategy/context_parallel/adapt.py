"""Context parallel for a whole module tree, from outside: its classes and source stay as they are."""

import sys
from collections.abc import Mapping

from torch import nn

from lightning_moe_strategy.context_parallel.functions import adapt_block
from lightning_moe_strategy.context_parallel.scope import ContextParallel


def adapt_attention(root: nn.Module, blocks: Mapping[str, nn.Module], cp: ContextParallel) -> None:
    """Let every block of ``root`` attend over sequences that are spread over ``cp``'s ranks.

    Called before the module is sharded. Blocks inside a Hugging Face model go through transformers' own
    hooks, any other through ``F.scaled_dot_product_attention``. Calling it again (another Trainer, the same
    module) hands over the new ``cp`` and adds nothing. ValueError, naming module and setting, for a model
    that cannot be split exactly.
    """
    if cp.degree == 1:
        return
    block_of = {module: name for name, block in blocks.items() for module in block.modules()}
    in_hugging_face: set[nn.Module] = set()
    # A Hugging Face model exists only where transformers is imported.
    if "transformers" in sys.modules:
        in_hugging_face = _adapt_hugging_face_models(root, block_of, cp)
    for name, block in blocks.items():
        if block not in in_hugging_face:
            adapt_block(block, name, cp)
    cp.expect_every_block_again(tuple(blocks))


def _adapt_hugging_face_models(
    root: nn.Module, block_of: Mapping[nn.Module, str], cp: ContextParallel
) -> set[nn.Module]:
    from transformers import PreTrainedModel

    from lightning_moe_strategy.context_parallel.hugging_face import adapt_pretrained_model

    adapted: set[nn.Module] = set()
    for name, module in root.named_modules():
        if isinstance(module, PreTrainedModel) and module not in adapted:
            adapt_pretrained_model(module, name or type(module).__name__, block_of, cp)
            adapted.update(module.modules())
    return adapted
