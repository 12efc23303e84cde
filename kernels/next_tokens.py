"""The token that stands some places further on in the same document: what multi-token prediction reads.

Shapes: B batch, S sequence (of this process); any dims may follow.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def next_tokens(x_BS: Tensor, distance: int, fill: float, *, position_ids_BS: Tensor | None = None) -> Tensor:
    """``x_BS[:, i + distance]`` at every place i, and ``fill`` where the document ends before that: [B, S, ...].

    ``x_BS`` holds ids, or vectors, whose gradient goes back to the token they were read from. ``position_ids_BS``
    [B or 1, S] tell packed documents apart: one starts wherever positions do not count up by one. Without them a row
    is one document.

    Under context parallel it reads from whichever rank owns the token, inside the forward of a repeated block (an item
    of a ``ModuleList``); elsewhere it is refused there.

    Raises:
        ValueError: a distance below 1, or shapes that do not go together.
    """
    inputs = (x_BS,)
    if has_torch_function(inputs):
        read: Tensor = handle_torch_function(next_tokens, inputs, x_BS, distance, fill, position_ids_BS=position_ids_BS)
        return read
    check_next_tokens(x_BS, distance, position_ids_BS)
    past_end = x_BS.new_full((x_BS.shape[0], min(distance, x_BS.shape[1]), *x_BS.shape[2:]), fill)
    moved_BS = torch.cat([x_BS[:, distance:], past_end], 1)
    if position_ids_BS is None:
        return moved_BS
    return keep_where(_ends_later(position_ids_BS, distance), moved_BS, fill)


def keep_where(is_kept_BS: Tensor, x_BS: Tensor, fill: float) -> Tensor:
    """``x_BS`` [B, S, ...], and ``fill`` wherever ``is_kept_BS``, bool [B or 1, S], is false."""
    return x_BS.masked_fill(~is_kept_BS.view(*is_kept_BS.shape, *[1] * (x_BS.dim() - 2)), fill)


def check_next_tokens(x_BS: Tensor, distance: int, position_ids_BS: Tensor | None = None) -> None:
    """ValueError for what ``next_tokens`` cannot read."""
    if distance < 1:
        raise ValueError(f"distance({distance}) must be at least 1: the next token. The token itself needs no reading.")
    if x_BS.dim() < 2:
        raise ValueError(f"x {tuple(x_BS.shape)} must be [batch, tokens, ...]. Add a batch dim of 1.")
    if position_ids_BS is not None and position_ids_BS.shape not in (x_BS.shape[:2], (1, x_BS.shape[1])):
        raise ValueError(
            f"position_ids {tuple(position_ids_BS.shape)} must be [{x_BS.shape[0]} or 1, {x_BS.shape[1]}]: pass those "
            f"of the tokens of x {tuple(x_BS.shape)}."
        )


def _ends_later(position_ids_BS: Tensor, distance: int) -> Tensor:
    """Whether the document of each token goes on for ``distance`` tokens: bool [B, S]."""
    is_start_BS = F.pad(position_ids_BS.diff(dim=1) != 1, (1, 0))
    document_BS = is_start_BS.cumsum(1)
    later_BS = F.pad(document_BS[:, distance:], (0, min(distance, document_BS.shape[1])), value=-1)
    return document_BS == later_BS
