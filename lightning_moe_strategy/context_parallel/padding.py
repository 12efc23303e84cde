"""Tokens that are added so that every cp rank owns equally many, and how the sequence is then shared out.

Shapes: B batch, S tokens of the whole sequence, P of them and the padding.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_moe_strategy.context_parallel.layout import SequenceLayout, contiguous, per_document, zigzag
from lightning_moe_strategy.context_parallel.visible import Documents

LayoutName = Literal["zigzag", "contiguous", "per_document"]


@dataclass(frozen=True, kw_only=True)
class PaddedSequence:
    """A layout, and where the tokens stand in the padded sequence that it shares out."""

    layout: SequenceLayout
    documents: Documents
    """Of the padded sequence."""
    num_at_end: int
    places_P: Tensor | None = None
    """Of every token of the padded sequence, the token it repeats; those of the padding repeat the one before. None:
    padding stands at the end alone."""
    is_token_P: Tensor | None = None
    """Which are no padding, where it does not stand at the end alone."""

    def pad(self, x: Tensor, fill: int | None) -> Tensor:
        """``x`` [B, S, ...] with padding: ``fill``, or the token before it."""
        if self.places_P is None or self.is_token_P is None:
            return torch.cat([x, filler(x, self.num_at_end, fill)], 1) if self.num_at_end else x
        padded = x.index_select(1, self.places_P.to(x.device))
        if fill is not None:
            padded[:, ~self.is_token_P.to(x.device)] = fill
        return padded


def share_out(name: LayoutName, documents: Documents, num_tokens: int, degree: int) -> PaddedSequence:
    """Pad ``num_tokens`` as a layout needs it.

    ``zigzag`` and ``contiguous`` cut the whole sequence, whatever documents it packs, and pad its end. ``per_document``
    cuts every document by itself into ``2 * degree`` chunks: equal attention for every rank, for which each document is
    padded to a multiple of that.

    Raises:
        ValueError: ``per_document`` for rows whose documents differ.
    """
    if name == "per_document":
        return _each_document(documents, num_tokens, degree)
    multiple = 2 * degree if name == "zigzag" else degree
    num_at_end = -num_tokens % multiple
    make = zigzag if name == "zigzag" else contiguous
    return PaddedSequence(layout=make(num_tokens + num_at_end, degree), documents=documents, num_at_end=num_at_end)


def filler(x: Tensor, length: int, fill: int | None) -> Tensor:
    """``length`` tokens like those of ``x``: ``fill``, or its last one."""
    last = x[:, -1:].expand(-1, length, *x.shape[2:])
    return last if fill is None else torch.full_like(last, fill)


def _each_document(documents: Documents, num_tokens: int, degree: int) -> PaddedSequence:
    if len(documents) > 1:
        raise ValueError(
            "layout='per_document' cuts the documents of a row, and the rows of this batch pack different ones. Give "
            "batches of one row, or choose layout='zigzag'."
        )
    (starts,) = documents
    ends = (*starts[1:], num_tokens)
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    padded = [-(-length // (2 * degree)) * 2 * degree for length in lengths]
    offsets = torch.cat([torch.arange(length) for length in padded])
    document_P = torch.arange(len(lengths)).repeat_interleave(torch.tensor(padded))
    last_P = torch.tensor(lengths)[document_P] - 1
    padded_starts = [sum(padded[:index]) for index in range(len(padded))]
    return PaddedSequence(
        layout=per_document(padded, degree),
        documents=(tuple(padded_starts),),
        num_at_end=0,
        places_P=torch.tensor(starts)[document_P] + offsets.minimum(last_P),
        is_token_P=offsets <= last_P,
    )
