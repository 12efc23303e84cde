"""Operations that mix tokens and are no attention, told by their arguments: a tensor [B, L, ...] and its dim 1.

With a part of the sequence they return something plausible. What hides its token axis (a transposed tensor in a matrix
product, a flattened one) is not seen here.

Shapes: B batch, L tokens of this rank.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ORDERED = ("roll", "flip", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
_POOLING = ("mean", "sum", "std", "var", "amax", "amin", "logsumexp", "softmax", "log_softmax")
_CHOOSING = ("sort", "argsort", "topk")


def _named(names: Sequence[str]) -> dict[object, str]:
    places = (torch, Tensor, F)
    return {getattr(place, name): name for name in names for place in places if hasattr(place, name)}


ORDERED: Mapping[object, str] = _named(_ORDERED)
"""What depends on the order of tokens, by function."""
MIXING: Mapping[object, str] = _named((*_ORDERED, *_POOLING, *_CHOOSING))
"""And what makes one of many, or picks some of them."""

_CUTTING = _named(("__getitem__", "narrow"))
_JOINING = _named(("cat", "concat", "concatenate"))
_SHIFTING = _named(("pad", "unfold"))

REMEDY = (
    "To read tokens further on, call lightning_moe_strategy.kernels.next_tokens.next_tokens in the forward of a block "
    "(an item of a ModuleList); for anything else choose cp=1."
)


def mixes_tokens(
    operations: Mapping[object, str],
    shapes_BL: Collection[tuple[int, ...]],
    func: object,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> str | None:
    """The operation's name, if it is one of ``operations`` and works along the tokens of its input.

    The input has tokens along dim 1 when its first two dims are in ``shapes_BL`` and no later one is as long. One that
    is reduced along dim 0 too is a statistic of all that there is, which a rank may well make of its own tokens.
    """
    name = operations.get(func)
    if name is None:
        return None
    x = args[0] if args else (kwargs or {}).get("input")
    if not isinstance(x, Tensor) or tuple(x.shape[:2]) not in shapes_BL or x.shape[1] in x.shape[2:]:
        return None
    if name in _POOLING and not x.is_floating_point():
        return None
    dims = _dims(name, args[1:], kwargs or {}, x.dim())
    return name if 1 in dims and 0 not in dims else None


def shifts_ids(
    ids_BL: Tensor, func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, result: object
) -> bool:
    """Whether token ids were cut, padded or joined so that they stand beside their neighbours' (pairs, n-grams)."""
    if func not in _CUTTING and func not in _JOINING and func not in _SHIFTING:
        return False
    if not any(x is ids_BL for x in _inputs(args, kwargs)) or not isinstance(result, Tensor) or result.dim() < 2:
        return False
    num_tokens = ids_BL.shape[1]
    # A few of them, or all, move nothing.
    return func in _SHIFTING or (num_tokens < 2 * result.shape[1] and result.shape[1] != num_tokens)


def cuts_the_end(ids_BL: Tensor, func: object, result: Tensor) -> bool:
    """Whether of token ids, which ``shifts_ids`` has seen, a start was taken: they stand where they stood."""
    return func in _CUTTING and result.storage_offset() == ids_BL.storage_offset()


def _dims(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_dims: int) -> set[int]:
    """The dims along which a call works, counted from the front; none where it works on all of them."""
    if name in ("roll", "topk"):  # shifts, or k, come first
        args = args[1:]
    given = kwargs.get("dim", kwargs.get("dims"))
    if given is None:
        given = args if name == "flip" and args and isinstance(args[0], int) else args[0] if args else None
    if given is None and name in ("sort", "argsort", "topk"):
        given = -1
    dims = given if isinstance(given, tuple | list) else (given,)
    # A bool is no dim: descending, unbiased.
    return {dim % num_dims for dim in dims if isinstance(dim, int) and not isinstance(dim, bool)}


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[object]:
    for value in (*args, *(kwargs or {}).values()):
        yield from value if isinstance(value, tuple | list) else (value,)
