"""Hugging Face models that read more than text: the language part is split over cp, at its door, and nothing else.

Every rank of a cp group holds the whole batch. Vision towers, embeddings and what merges them run whole on each of
them, as one process would run them; the language part is handed this rank's tokens. Its gradient of what stands before
it is that of these tokens alone, so that the sum over the ranks, which FSDP takes, is the whole one.

Shapes: B batch, S tokens of the whole sequence, L tokens of this rank, N tokens of images in it, D channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_moe_strategy.context_parallel.layout import take_segments
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence

_TOWER = "_context_parallel_tower"
_MASK_OF_IMAGES, _FEATURES_OF_IMAGES = "visual_pos_masks", "deepstack_visual_embeds"


@dataclass(frozen=True, kw_only=True)
class LanguagePart:
    """The decoder inside a model that has more than it."""

    model: PreTrainedModel
    path: str
    wrappers: list[nn.Module]
    """What it lies in, the outermost first."""
    towers: list[nn.Module]
    """What stands beside it: vision towers, projections, embeddings of their own; not the head."""


def find_language_part(model: PreTrainedModel) -> LanguagePart | None:
    """None where the model is one of text alone."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or model.config.get_text_config() is model.config:
        return None
    path = next(path for path, module in model.named_modules() if module is decoder)
    names = path.split(".") if path else []
    wrappers = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    no_tower = (decoder, model.get_output_embeddings(), *wrappers)
    towers = [child for wrapper in wrappers for child in wrapper.children() if child not in no_tower]
    return LanguagePart(model=decoder, path=path, wrappers=wrappers, towers=towers) if towers else None


def leave_whole(tower: nn.Module, cp: ContextParallel) -> None:
    """What runs whole on every rank may call any attention. A second call only hands over the new ``cp``."""
    forward = tower.__dict__.get(_TOWER)
    if forward is None:
        forward = tower.__dict__[_TOWER] = tower.__dict__["forward"] = _WholeForward(tower.forward)
    forward.cp = cp


class _WholeForward:
    cp: ContextParallel

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.cp.token_wise():
            return self.forward(*args, **kwargs)


def split_inputs(inputs: dict[str, Any], sequence: LocalSequence, rank: int, model: str) -> dict[str, Any]:
    """The language part's arguments for this rank's tokens.

    ValueError for masks that a model makes itself, and for a sequence that is not the batch's.
    """
    embeds: Tensor | None = inputs.get("inputs_embeds")
    tokens: Tensor = inputs["input_ids"] if embeds is None else embeds
    if tokens.shape[1] != sequence.num_tokens:
        raise ValueError(
            f"{model} was given {tokens.shape[1]:,} tokens, and the batch has {sequence.num_tokens:,}. With cp > 1 a "
            "model that reads images splits the batch's own sequence: pass it as it is."
        )
    mask = inputs.get("attention_mask")
    if mask is not None and mask is not sequence.attention_mask_BL and not _hides_nothing(mask):
        raise ValueError(
            f"{model} is given a mask that is not the batch's ({type(mask).__name__}): tokens of an image that see one "
            "another cannot be split. Choose cp=1; fsdp and ep work as they are."
        )
    split = {name: _own(name, item, sequence, rank) for name, item in inputs.items() if name != _FEATURES_OF_IMAGES}
    features = inputs.get(_FEATURES_OF_IMAGES)
    if features is not None:
        chosen_N = _own_rows(inputs[_MASK_OF_IMAGES], split[_MASK_OF_IMAGES], sequence, rank)
        split[_FEATURES_OF_IMAGES] = [features_ND[chosen_N] for features_ND in features]
    split["attention_mask"] = None  # padding at the end of the whole sequence alone, which the callback checked
    return split


def _hides_nothing(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())


def _own(name: str, item: Any, sequence: LocalSequence, rank: int) -> Any:
    """This rank's tokens of what has the whole sequence along a dim, anything else as it is."""
    if not isinstance(item, Tensor) or item.dim() < 2:
        return item
    if name == "position_ids":  # [B, S], or one for each axis of an image before it
        return _take(item.flatten(0, -2), None, sequence, rank).view(*item.shape[:-1], -1)
    return _take(item, 0, sequence, rank) if item.shape[1] == sequence.num_tokens else item


def _own_rows(mask_BS: Tensor, mask_BL: Tensor, sequence: LocalSequence, rank: int) -> Tensor:
    """Which rows of features, one for each token of an image in the batch's order, are of this rank's tokens."""
    row_BS = mask_BS.flatten().cumsum(0).view(mask_BS.shape) - 1
    return _take(row_BS, 0, sequence, rank)[mask_BL]


def _take(x: Tensor, fill: int | None, sequence: LocalSequence, rank: int) -> Tensor:
    assert sequence.padded is not None, "the callback splits every batch"
    return take_segments(sequence.padded.pad(x, fill), 1, sequence.padded.layout.segments[rank])
