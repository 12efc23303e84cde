"""Which tensors of a Hugging Face folder make which tensors of a model, and back: transformers' own conversions.

A model keeps the experts of a layer in one tensor, its files have one for each expert; names differ too. Nothing here
reads a value.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.hugging_face_weights.pieces import Mosaic, Piece

Read = Callable[[str], Tensor]
"""A whole tensor by its name."""


@dataclass(frozen=True)
class Made:
    """One tensor that is made of others."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of what it is made of."""
    pieces: tuple[Piece, ...] | None
    """None where it is computed, and no arrangement of parts."""
    compute: Callable[[Read], Tensor]
    """All of it, from whole sources."""


@dataclass
class _Collected:
    """What transformers makes in one go: a renamed tensor, or the sources of one conversion."""

    transform: Any
    keys_of_pattern: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.keys_of_pattern.values() for key in keys)

    def make(self, name: str, model: nn.Module, tensor_of: Callable[[str], Any]) -> dict[str, Any]:
        """Run the conversion on ``tensor_of`` each source."""
        transform = deepcopy(self.transform)
        for pattern, keys in self.keys_of_pattern.items():
            for key in keys:
                transform.add_tensor(name, key, pattern, tensor_of(key))
        made = transform.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def into_model(
    model: nn.Module, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[list[Made], dict[str, str]]:
    """What ``stored`` tensors, by name, make for a transformers model, in the model's names and shapes.

    Also why not, for each tensor of the model whose parts are there and do not fit together. Stored tensors that make
    nothing the model has are left out.
    """
    made: list[Made] = []
    unmade: dict[str, str] = {}
    known = model.state_dict()
    for name, collected in _collect(model, stored).items():
        if name not in known:
            continue
        gap = next(_gaps(collected), None)
        if gap is not None:
            unmade[name] = gap
            continue
        try:
            made += [one for one in _made_by(collected, name, model, stored) if one.name in known]
        except Exception as reason:  # transformers' operations raise whatever torch raises
            unmade[name] = f"{', '.join(collected.keys[:3])}, ... make no {name} ({reason})"
    return made, unmade


def out_of_model(model: nn.Module, names: Sequence[str]) -> list[Made]:
    """What the tensors of a transformers model make for a file that ``from_pretrained`` reads, layer by layer.

    Raises:
        CheckpointError: transformers cannot undo its conversion.
    """
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict(keep_vars=True).items()}
    made: list[Made] = []
    for layer in _by_layer(names):
        try:
            mosaics = _revert(model, {name: Mosaic.of(name, *shapes[name]) for name in layer})
            made += [_made_of_pieces(name, mosaic) for name, mosaic in mosaics.items()]
        except Exception:  # no arrangement of parts
            for name, shape in _shapes_out(model, {name: shapes[name][0] for name in layer}).items():
                made.append(Made(name, shape, tuple(layer), None, _reverted(model, layer, name)))
    return made


def _made_by(
    collected: _Collected, name: str, model: nn.Module, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[Made]:
    try:
        mosaics = collected.make(name, model, lambda key: Mosaic.of(key, *stored[key]))
        return [_made_of_pieces(target, mosaic) for target, mosaic in mosaics.items()]
    except Exception:  # no arrangement of parts, or wrong shapes: then this raises too
        whole = collected.make(name, model, lambda key: torch.empty(stored[key][0], device="meta"))

    def compute(target: str) -> Callable[[Read], Tensor]:
        return lambda read: collected.make(name, model, read)[target]

    return [Made(target, tuple(t.shape), collected.keys, None, compute(target)) for target, t in whole.items()]


def _made_of_pieces(name: str, mosaic: Mosaic) -> Made:
    sources = tuple(dict.fromkeys(piece.key for piece in mosaic.pieces))
    shape = tuple(mosaic.shape)
    assert sum(piece.num_elements for piece in mosaic.pieces) == torch.Size(shape).numel()

    def compute(read: Read) -> Tensor:
        raise AssertionError(f"{name} is put together of its pieces")

    return Made(name, shape, sources, mosaic.pieces, compute)


def _collect(model: nn.Module, stored: Mapping[str, object]) -> dict[str, _Collected]:
    """Which stored tensors go into which conversion, by the name of its first target, as transformers' loader says."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    collected: dict[str, _Collected] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:  # the model's own name already
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if pattern is None:
            transform, pattern = WeightRenaming(key, name), key
        else:
            transform = by_pattern[pattern]
        group = collected.setdefault(name, _Collected(transform))
        group.keys_of_pattern.setdefault(pattern, []).append(key)
    return collected


def _gaps(collected: _Collected) -> Iterator[str]:
    """Experts are stacked in the order of their numbers: without the third, the fourth would take its place."""
    for keys in collected.keys_of_pattern.values():
        numbers = [[int(number) for number in re.findall(r"\d+", key)] for key in keys]
        for place, column in enumerate(zip(*numbers, strict=True)):
            missing = sorted(set(range(len(column))) - set(column)) if len(set(column)) > 1 else []
            if missing:
                lost = [_with_number(keys[0], place, number) for number in missing[:4]]
                yield f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not there, and others that follow are"


def _with_number(key: str, place: int, number: int) -> str:
    parts = re.split(r"(\d+)", key)
    parts[2 * place + 1] = str(number)
    return "".join(parts)


def _by_layer(names: Sequence[str]) -> list[list[str]]:
    """Names that share everything up to their first number, one list for each layer; what is in none stands alone."""
    layers: dict[str, list[str]] = {}
    for name in names:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(numbered[1] if numbered else name, []).append(name)
    return list(layers.values())


def _shapes_out(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What is computed from tensors of these shapes, without their values."""
    try:
        whole = _revert(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    except Exception as reason:  # transformers' operations raise whatever torch raises
        raise CheckpointError(
            f"transformers cannot write {', '.join(list(shapes)[:3])}, ... of {type(model).__name__} ({reason}). Give "
            "the configuration that the model was trained with."
        ) from reason
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}


def _revert(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Any] = revert_weight_conversion(model, tensors)
    return reverted


def _reverted(model: nn.Module, layer: Sequence[str], name: str) -> Callable[[Read], Tensor]:
    return lambda read: _revert(model, {source: read(source) for source in layer})[name]
