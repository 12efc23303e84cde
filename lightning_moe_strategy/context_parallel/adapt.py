"""Context parallel for a whole module tree, from outside: its classes and source stay as they are."""

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from lightning_moe_strategy.context_parallel.functions import adapt_block
from lightning_moe_strategy.context_parallel.indexers import is_indexer
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.ulysses import adapt_by_heads


def adapt_attention(root: nn.Module, blocks: Mapping[str, nn.Module], cp: ContextParallel) -> None:
    """Let every block of ``root`` attend over sequences that are spread over ``cp``'s ranks.

    Called before the module is sharded. Blocks inside a Hugging Face model go through transformers' own
    hooks, any other through ``F.scaled_dot_product_attention``. Calling it again (another Trainer, the same
    module) hands over the new ``cp`` and adds nothing. ValueError, naming module and setting, for a model
    that cannot be split exactly.

    With one rank there is nothing to do, but where indexers are trained: the loss is a part of this package's sparse
    attention, so blocks and Hugging Face models with an indexer get it there too, and nothing else is touched.
    """
    if cp.degree == 1 and cp.indexer_loss is None:
        return
    block_of = {module: name for name, block in blocks.items() for module in block.modules()}
    in_hugging_face, whole = set[nn.Module](), set[nn.Module]()
    # A Hugging Face model exists only where this is imported, which takes seconds and others may import the package.
    if "transformers.modeling_utils" in sys.modules:
        in_hugging_face, whole = _adapt_hugging_face_models(root, block_of, cp)
    cp.splits_inside = bool(whole)
    for name, block in blocks.items():
        if block not in in_hugging_face and (cp.degree > 1 or _has_indexer(block)):
            if cp.splits_inside:
                raise ValueError(
                    f"{name} ({type(block).__name__}) stands beside a model that reads images and splits the batch at "
                    "its language part, so that it would be given the whole of it. Choose cp=1."
                )
            adapt_block(block, name, cp)
    if cp.degree > 1:
        _adapt_declared_modules(root, blocks, block_of, in_hugging_face, cp)
    cp.expect_every_block_again(tuple(name for name, block in blocks.items() if block not in whole))


def _adapt_declared_modules(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    block_of: Mapping[nn.Module, str],
    in_hugging_face: set[nn.Module],
    cp: ContextParallel,
) -> None:
    """Modules the user wants to see whole sequences. A declared block needs nothing more: its calls are taken over."""
    unknown = set(cp.ulysses_modules)
    for name, module in root.named_modules():
        patterns = {pattern for pattern in cp.ulysses_modules if fnmatchcase(name, pattern)}
        if not patterns:
            continue
        unknown -= patterns
        if module in in_hugging_face or module not in block_of:
            where = "part of a Hugging Face model" if module in in_hugging_face else "in no block"
            raise ValueError(
                f"ulysses_modules: {name} ({type(module).__name__}) is {where}. Name blocks (items of a ModuleList) or "
                "modules in them whose forward takes query, key and value [batch, heads, tokens, channels]."
            )
        if name not in blocks:
            adapt_by_heads(module, name, block_of[module], cp)
    if unknown:
        raise ValueError(
            f"ulysses_modules({sorted(unknown)}) match no module of {type(root).__name__}. Blocks are named "
            f"{', '.join(list(blocks)[:3])}, ...; a module in one after it, as in {next(iter(blocks))}.attention."
        )


def _adapt_hugging_face_models(
    root: nn.Module, block_of: Mapping[nn.Module, str], cp: ContextParallel
) -> tuple[set[nn.Module], set[nn.Module]]:
    """All modules of such models, and those of them that run whole."""
    from transformers import PreTrainedModel

    from lightning_moe_strategy.context_parallel.hugging_face import adapt_pretrained_model

    adapted, whole, of_text = set[nn.Module](), set[nn.Module](), list[str]()
    for name, module in root.named_modules():
        if not isinstance(module, PreTrainedModel) or module in adapted:
            continue
        if cp.degree > 1 or _has_indexer(module):
            name = name or type(module).__name__
            left_whole = adapt_pretrained_model(module, name, block_of, cp)
            adapted.update(module.modules())
            whole |= left_whole
            of_text += [] if left_whole else [name]
    if whole and of_text:
        raise ValueError(
            f"{', '.join(of_text)} read parts of a batch, and stand beside a model that reads images and splits the "
            "batch at its language part. Choose cp=1."
        )
    return adapted, whole


def _has_indexer(module: nn.Module) -> bool:
    return any(map(is_indexer, module.modules()))
