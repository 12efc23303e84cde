"""A piece of a batch, small enough to be computed twice, of which every cp rank owns a part.

Shapes: B batch, S tokens of the whole sequence; R sequences of the piece, T tokens of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.context_parallel.batch import (
    Key,
    MicroBatch,
    SequenceFields,
    count_whole,
    split_items,
)
from lightning_moe_strategy.context_parallel.documents import (
    IDS_KEY,
    LENGTHS_KEY,
    find_documents,
    positions_in_documents,
)
from lightning_moe_strategy.context_parallel.layout import contiguous
from lightning_moe_strategy.context_parallel.padding import LayoutName
from lightning_moe_strategy.context_parallel.scope import LocalSequence, Shift
from lightning_moe_strategy.context_parallel.visible import Documents

MAX_ROWS = 2
MAX_TOKENS = 256
"""Of one sequence, unless ``2 * cp`` chunks of two tokens are more."""

_TOKEN = "token of the piece"


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How a batch is split over the cp ranks."""

    shift: Shift
    ignore_index: int
    pad_token_id: int
    layout: LayoutName


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some tokens of some sequences of a batch, and how the whole of them would be trained on in one process."""

    items: Mapping[Key, Any]
    """A dict-like batch has ``position_ids``, as a split one does."""
    fields: SequenceFields
    documents: Documents
    settings: SplitSettings
    num_counted: int
    """Labels that count."""

    @property
    def whole(self) -> tuple[LocalSequence, MicroBatch]:
        """What one process holds."""
        rows, tokens, device = self.fields.batch_size, self.fields.num_tokens, self.fields.device
        positions = self.items.get("position_ids")
        if positions is None:
            positions = positions_in_documents(self.documents, rows, tokens, device)
        sequence = LocalSequence(
            layout=contiguous(tokens, 1),
            num_tokens=tokens,
            position_ids_BL=positions,
            documents=self.documents,
            shift=self.settings.shift,
            attention_mask_BL=self.items.get("attention_mask"),
        )
        return sequence, count_whole(self.items, self.fields, self.settings.shift, self.settings.ignore_index)

    @property
    def real_tokens_RT(self) -> Tensor:
        """Which tokens are no padding of the user's: bool."""
        mask = self.items.get("attention_mask")
        shape = self.fields.batch_size, self.fields.num_tokens
        if isinstance(mask, Tensor):
            return mask.bool()
        return torch.ones(shape, dtype=torch.bool, device=self.fields.device)

    def split(self, degree: int, rank: int) -> tuple[dict[Key, Any], LocalSequence, MicroBatch, Tensor]:
        """As ``split_items``; and, of each of this rank's tokens, its place in the piece: int64 [R, L], padding -1."""
        rows, tokens = self.fields.batch_size, self.fields.num_tokens
        # Counted from 1: what is padded is padded with zeros.
        places = torch.arange(1, tokens + 1, device=self.fields.device).expand(rows, -1)
        fields = SequenceFields(
            keys=(*self.fields.keys, _TOKEN),
            labels_key=self.fields.labels_key,
            batch_size=rows,
            num_tokens=tokens,
            device=self.fields.device,
        )
        local, sequence, counts = split_items(
            {**self.items, _TOKEN: places},
            fields,
            shift=self.settings.shift,
            degree=degree,
            rank=rank,
            ignore_index=self.settings.ignore_index,
            pad_token_id=self.settings.pad_token_id,
            layout=self.settings.layout,
        )
        return local, sequence, counts, local.pop(_TOKEN) - 1


def cut_piece(
    items: Mapping[Key, Any],
    fields: SequenceFields,
    settings: SplitSettings,
    *,
    degree: int,
    as_one_document: bool = False,
) -> Piece:
    """The first sequences, and of their tokens the first that hold labels; of packed ones, around a document's start.

    Marks of documents are cut along, or, ``as_one_document``, say that there is one.
    """
    documents = find_documents(items, batch_size=fields.batch_size, num_tokens=fields.num_tokens)
    counted_BS = _counted(items, fields, settings)
    rows = _rows_with_labels(counted_BS)
    of_rows = [documents[row if len(documents) > 1 else 0] for row in rows]
    length = piece_length(fields.num_tokens, degree)
    start = _best_start(counted_BS[rows], length, of_rows)
    inside = [tuple(at - start for at in starts if start < at < start + length) for starts in of_rows]
    cut = tuple((0, *starts) for starts in inside) if not as_one_document else ((0,),) * len(rows)
    piece = dict(items)
    window = _Window(rows=rows, start=start, length=length, documents=cut, as_one_document=as_one_document)
    for key, item in items.items():
        piece[key] = window.cut(key, item, fields)
    small = SequenceFields(
        keys=fields.keys,
        labels_key=fields.labels_key,
        batch_size=len(rows),
        num_tokens=length,
        device=fields.device,
    )
    shortened: Documents = cut[:1] if len(set(cut)) == 1 else cut
    if all(isinstance(key, str) for key in piece) and piece.get("position_ids") is None:
        piece["position_ids"] = positions_in_documents(shortened, len(rows), length, fields.device)
    num_counted = int(counted_BS[rows, start : start + length].sum())
    return Piece(items=piece, fields=small, documents=shortened, settings=settings, num_counted=num_counted)


def piece_length(num_tokens: int, degree: int) -> int:
    """Odd where it can be: then no cp divides it, and padding is part of what is checked."""
    longest = 2 * degree * max(2, MAX_TOKENS // (2 * degree)) - 1
    length = min(num_tokens, longest)
    return length - 1 if length % 2 == 0 and length > 2 * degree else length


def _counted(items: Mapping[Key, Any], fields: SequenceFields, settings: SplitSettings) -> Tensor:
    """Which tokens have a label that counts: bool [B, S]."""
    labels = None if fields.labels_key is None else items[fields.labels_key]
    if labels is None or labels.dim() != 2:
        return torch.ones(fields.batch_size, fields.num_tokens, dtype=torch.bool, device=fields.device)
    counted_BS: Tensor = labels != settings.ignore_index
    if settings.shift == "none":
        return counted_BS
    return torch.cat([counted_BS[:, 1:], torch.zeros_like(counted_BS[:, :1])], 1)


def _rows_with_labels(counted_BS: Tensor) -> list[int]:
    rows = counted_BS.any(1).nonzero().flatten().tolist()
    return rows[:MAX_ROWS] or [*range(min(MAX_ROWS, counted_BS.shape[0]))]


def _best_start(counted_RS: Tensor, length: int, documents: list[tuple[int, ...]]) -> int:
    """Of the windows one after another, or of those around the starts of documents, that with the most labels."""
    last = counted_RS.shape[1] - length
    starts = sorted({min(max(0, at - length // 2), last) for row in documents for at in row[1:]})
    if not starts:
        starts = [*range(0, last + 1, length)]
    before = torch.nn.functional.pad(counted_RS.sum(0).cumsum(0), (1, 0))
    at = torch.tensor(starts, device=before.device)
    return starts[int((before[at + length] - before[at]).argmax())]


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Which part of a batch a piece is."""

    rows: list[int]
    start: int
    length: int
    documents: Documents
    """One tuple per row."""
    as_one_document: bool

    def cut(self, key: Key, item: Any, fields: SequenceFields) -> Any:
        """What belongs to these rows and tokens; anything else as it is."""
        if isinstance(key, str) and isinstance(item, Tensor) and LENGTHS_KEY.search(key):
            starts = [row * self.length + at for row, starts in enumerate(self.documents) for at in starts]
            return item.new_tensor([*starts, len(self.rows) * self.length])
        if isinstance(item, list | tuple) and len(item) == fields.batch_size:
            return type(item)(item[row] for row in self.rows) if type(item) in (list, tuple) else item
        if not isinstance(item, Tensor) or not item.dim():
            return item
        if item.shape[0] == fields.batch_size:
            item = item[self.rows]
        if key not in fields.keys:
            return item
        item = item[:, self.start : self.start + self.length]
        if self.as_one_document and isinstance(key, str) and item.dim() == 2:
            if IDS_KEY.search(key):
                return torch.zeros_like(item)
            if key == "position_ids":
                return torch.arange(self.length, dtype=item.dtype, device=item.device).expand(item.shape[0], -1)
        return item.contiguous()
