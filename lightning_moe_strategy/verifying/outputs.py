"""What modules compute for the tokens of a batch, kept on a rank and compared with one process, token by token.

Shapes: R sequences of the batch, L tokens of this rank, T tokens of the whole sequence, N kept tokens, C kept channels.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import in_backward, tensors_in
from lightning_moe_strategy.context_parallel.batch import SequenceFields
from lightning_moe_strategy.context_parallel.scope import LocalSequence
from lightning_moe_strategy.token_watch import TokenPlaces

MAX_TOKENS, MAX_CHANNELS = 1024, 2048
"""Of one output that are kept, spread evenly: some GB for the largest models that a machine can hold so often."""


INPUT = " (input)"
"""Behind a module's name: what it is called with."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A part of one module's output, or of its input."""

    shape: tuple[int, ...]
    """Of the whole output, as this process has it."""
    dtype: torch.dtype
    row_N: Tensor | None
    """The sequence each kept token is of. None: not tokens, but rows of an output as they come."""
    place_N: Tensor | None
    """Where in its sequence."""
    values_NC: Tensor


def split_places(sequence: LocalSequence, rank: int, fields: SequenceFields, real_RT: Tensor) -> TokenPlaces:
    """Where the tokens stand that a cp rank holds, by the layout alone: its values have no say in it."""
    ids_L = sequence.layout.token_ids(rank)
    place_L = torch.where(ids_L < sequence.num_tokens, ids_L, -1)
    if sequence.is_token_P is not None:
        is_token = sequence.is_token_P
        inside = ids_L.clamp(max=len(is_token) - 1)
        is_real = (ids_L < len(is_token)) & is_token[inside]
        place_L = torch.where(is_real, is_token.long().cumsum(0)[inside] - 1, -1)
    return TokenPlaces(place_RL=place_L.expand(fields.batch_size, -1), real_RT=real_RT)


def whole_places(fields: SequenceFields, real_RT: Tensor) -> TokenPlaces:
    """Of a batch that is not split."""
    return TokenPlaces(place_RL=torch.arange(fields.num_tokens).expand(fields.batch_size, -1), real_RT=real_RT)


def real_tokens(items: Any, fields: SequenceFields) -> Tensor:
    """Which tokens of a batch are no padding of the user's: bool [R, T]."""
    shape = fields.batch_size, fields.num_tokens
    mask = items.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.bool()
    return torch.ones(shape, dtype=torch.bool)


@contextmanager
def first_outputs(root: nn.Module, see: Callable[[str, Tensor], None]) -> Generator[None, None, None]:
    """``see(name, output)`` for the first output of every module inside, in the order in which they are done; and
    ``see(name + INPUT, x)`` for what it is first called with.

    Of an output with several tensors the logits, else the first of floating point. What a recompute makes again is not
    seen.
    """
    seen: set[str] = set()

    def take(name: str, given: Any) -> None:
        if name in seen or in_backward():
            return
        found = next((x for x in _tensors_of(given) if x.is_floating_point() and x.dim() and x.numel()), None)
        if found is not None:
            seen.add(name)
            see(name, found.detach())

    def before(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: take(f"{name}{INPUT}", (args, kwargs))

    def after(name: str) -> Callable[..., None]:
        return lambda module, args, output: take(name, output)

    handles = []
    for name, module in root.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep(output: Tensor, places: TokenPlaces | None, *, is_split: bool) -> Kept | None:
    """This rank's part of an output for the tokens it holds. None for what a split output cannot be compared by."""
    shape, dtype = tuple(output.shape), output.dtype
    tokens = None if places is None else as_tokens(output, *places.shape)
    if places is None or tokens is None:
        if is_split:
            return None
        values = _rows(output)[:: _stride(_rows(output).shape[0])]
        return Kept(shape=shape, dtype=dtype, row_N=None, place_N=None, values_NC=_channels(values))
    num_rows, num_tokens = tokens.shape[:2]
    place_RL = places.place_RL[:num_rows, :num_tokens]
    row_RL = torch.arange(num_rows)[:, None].expand_as(place_RL)
    real_RT = places.real_RT if num_rows == len(places.real_RT) else torch.ones_like(places.real_RT[:1])
    is_kept = (place_RL >= 0) & real_RT[row_RL, place_RL.clamp(min=0)]
    whole = places.whole_shape
    is_kept &= (row_RL * whole[1] + place_RL) % _stride(whole.numel()) == 0
    values = _channels(tokens[is_kept])
    return Kept(shape=shape, dtype=dtype, row_N=row_RL[is_kept], place_N=place_RL[is_kept], values_NC=values)


def same_part(whole: Tensor, kept: Kept, places: TokenPlaces | None, first_row: int) -> tuple[Tensor, Tensor] | None:
    """Of an output of one process what a rank has kept, [N, C]; and which N of the rank's these are.

    ``first_row``: of the rank's sequences among those of this process. None where the outputs have no common form.
    """
    if kept.row_N is None or kept.place_N is None:
        if tuple(whole.shape) != kept.shape:
            return None
        values = _channels(_rows(whole)[:: _stride(_rows(whole).shape[0])])
        return values, torch.arange(values.shape[0])
    tokens = None if places is None else as_tokens(whole, *places.whole_shape)
    if tokens is None:
        return None
    inside = (kept.place_N < tokens.shape[1]).nonzero()[:, 0]
    row = kept.row_N[inside] + first_row if tokens.shape[0] > 1 else torch.zeros_like(inside)
    values = _channels(tokens[row, kept.place_N[inside]])
    return (values, inside) if values.shape[1:] == kept.values_NC.shape[1:] else None


def _tensors_of(output: Any) -> Generator[Tensor, None, None]:
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        yield logits
    yield from tensors_in(output)


def as_tokens(x: Tensor, num_rows: int, num_tokens: int) -> Tensor | None:
    """[R or 1, tokens, ...] of an output, flat or not; a module may drop the last token of every row."""
    for length in (num_tokens, num_tokens - 1):
        if x.dim() == 2 and x.shape[0] == num_rows * length:
            return x.reshape(num_rows, length, x.shape[1])
        if x.dim() >= 3 and x.shape[0] in (num_rows, 1) and x.shape[1] == length:
            return x
    return None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _channels(x: Tensor) -> Tensor:
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    every = -(-flat.shape[1] // MAX_CHANNELS)
    return flat[:, ::every].clone() if every > 1 else flat.clone()


def _stride(num_tokens: int) -> int:
    return max(1, -(-num_tokens // MAX_TOKENS))
