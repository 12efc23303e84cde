"""Packed documents: where they start, told by the marks that a batch carries.

Shapes: B batch, S tokens of the whole sequence.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents

LENGTHS_KEY = re.compile(r"cu_seq_?lens")
"""Of cumulated lengths, int [n + 1]."""
IDS_KEY = re.compile(r"seq_idx|(doc|document|segment|sequence)_ids?$")
"""Of ids of documents [B, S]."""


def find_documents(items: Mapping[Any, Any], *, batch_size: int, num_tokens: int) -> Documents:
    """Starts of the documents in each row; ``ONE_DOCUMENT`` where no row has a second.

    Read from cumulated lengths (``cu_seqlens``, ``cu_seq_lens_q``: int [n + 1], of the rows one after another), from
    ids of documents [B, S] (``seq_idx``, ``document_ids``), or from ``position_ids`` [B, S] that start again.

    Raises:
        ValueError: marks that contradict one another, or positions that jump ahead.
    """
    found: dict[str, Documents] = {}
    for key, mark in items.items():
        if not isinstance(key, str) or not isinstance(mark, Tensor):
            continue
        if LENGTHS_KEY.search(key):
            found[key] = _of_lengths(key, mark, batch_size, num_tokens)
        elif IDS_KEY.search(key) and mark.shape == (batch_size, num_tokens):
            found[key] = _of_changes(mark[:, 1:] != mark[:, :-1])
    positions = items.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2:
        restarts = _of_positions(positions, items.get("attention_mask"))
        # Positions that run through say nothing about documents; those that start again must do so at a mark.
        if restarts != ONE_DOCUMENT or not found:
            found["position_ids"] = restarts
    documents = {*found.values()}
    if len(documents) > 1:
        raise ValueError(
            f"The batch marks packed documents differently under {', '.join(map(repr, found))}. Give one of them, or "
            "marks that agree."
        )
    return documents.pop() if documents else ONE_DOCUMENT


def positions_in_documents(documents: Documents, batch_size: int, num_tokens: int, device: torch.device) -> Tensor:
    """Position of every token in its document: int64 [B, S]."""
    rows = []
    for starts in documents:
        lengths = torch.tensor([*starts[1:], num_tokens]) - torch.tensor(starts)
        rows.append(torch.arange(num_tokens) - torch.tensor(starts).repeat_interleave(lengths))
    return torch.stack(rows).to(device).expand(batch_size, -1)


def _of_lengths(key: str, ends: Tensor, batch_size: int, num_tokens: int) -> Documents:
    values = [int(end) for end in torch.unique(ends)] if ends.dim() == 1 else []
    rows = {row * num_tokens for row in range(batch_size)}
    if not values or values[0] != 0 or values[-1] != batch_size * num_tokens or not rows <= set(values):
        raise ValueError(
            f"{key} of shape {tuple(ends.shape)} must rise from 0 to {batch_size} * {num_tokens} tokens, with every "
            "row's start among them: the cumulated lengths of the documents, one row after another."
        )
    starts = [divmod(value, num_tokens) for value in values[:-1]]
    return _shortened([tuple(start for of, start in starts if of == row) for row in range(batch_size)])


def _of_positions(position_ids_BS: Tensor, mask_BS: Any) -> Documents:
    steps = position_ids_BS[:, 1:] - position_ids_BS[:, :-1]
    if isinstance(mask_BS, Tensor) and mask_BS.shape == position_ids_BS.shape:
        steps = torch.where(mask_BS[:, 1:].bool(), steps, 1)
    if bool((steps > 1).any()):
        raise ValueError(
            "position_ids jump ahead: with cp > 1 they must count up by one, and may start again where a packed "
            "document starts. Give such positions, or choose cp=1."
        )
    return _of_changes(steps != 1)


def _of_changes(changes: Tensor) -> Documents:
    """From [B, S - 1]: whether the next token starts a document."""
    if not bool(changes.any()):
        return ONE_DOCUMENT
    return _shortened([(0, *(int(place) + 1 for place in row.nonzero())) for row in changes.cpu()])


def _shortened(rows: list[tuple[int, ...]]) -> Documents:
    return (rows[0],) if len(set(rows)) == 1 else tuple(rows)
