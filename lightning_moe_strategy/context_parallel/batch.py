"""One batch, as every rank of a cp group read it, cut down to what this rank owns.

Positions are counted, labels shifted and the end padded on the whole sequence, before anything is cut: a rank's
tokens are not consecutive.

Shapes: B batch, S tokens of the whole sequence, L tokens of this rank (padding and dummy included).
"""

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.context_parallel.documents import find_documents, positions_in_documents
from lightning_moe_strategy.context_parallel.layout import contiguous, take_segments
from lightning_moe_strategy.context_parallel.padding import LayoutName, filler, share_out
from lightning_moe_strategy.context_parallel.scope import LocalSequence, Shift

Key = str | int
"""A key of a dict-like batch, or an index into a tuple or list."""

_TOKEN_KEYS = ("input_ids", "inputs_embeds")
SHIFTED_LABEL_KEYS = ("shift_labels", "targets", "target", "y")
"""Keys that hold, for every token, what is to be predicted there: nothing is left to shift."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What this rank holds of one micro-batch, in the unit that work and losses are counted in."""

    num_tokens: int
    """Tokens of this rank; padding that was added by the split does not count."""

    num_loss_tokens: Tensor | None
    """Labels of this rank that count, after the shift: int64, 0-dim, on the batch's device. None without labels."""

    context: int = 0
    """Tokens of the whole sequence that this rank's are part of; 0 where the batch holds no sequence."""

    real_tokens_BL: Tensor | None = None
    """Which of this rank's tokens are no padding, the user's or the split's: bool. None when all are."""

    def real_tokens_T(self, num_tokens: int) -> Tensor | None:
        """Which of ``num_tokens`` tokens that a layer was given are no padding; None when all are, or when they are
        not the batch's tokens."""
        real_BL = self.real_tokens_BL
        if real_BL is None:
            return None
        if real_BL.numel() - real_BL.shape[0] == num_tokens:
            real_BL = real_BL[:, :-1]  # the LightningModule dropped the last token of every row before its model
        return real_BL.reshape(-1) if real_BL.numel() == num_tokens else None


@dataclass(frozen=True, kw_only=True)
class SequenceFields:
    """Where a batch keeps its sequences."""

    keys: tuple[Key, ...]
    """Every tensor with the sequence along dim 1."""

    labels_key: Key | None
    batch_size: int
    num_tokens: int
    device: torch.device


def items_of(batch: Any) -> dict[Key, Any]:
    """A batch's parts by key: of a dict, a BatchEncoding, a tuple, a list; a single tensor has the key 0."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return dict(enumerate(batch))
    return {0: batch}


def with_items(batch: Any, items: Mapping[Key, Any]) -> Any:
    """A batch of the same type with these parts."""
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update(items)
        return changed
    if isinstance(batch, tuple | list):
        values = [items[index] for index in range(len(items))]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return items[0]


def find_sequences(
    items: Mapping[Key, Any], *, sequence_keys: tuple[str, ...] | None, labels_key: str | None
) -> SequenceFields:
    """The sequences among a batch's parts. ValueError when there is none."""
    tensors = {key: item for key, item in items.items() if isinstance(item, Tensor) and item.dim() >= 2}
    missing = [key for key in (*(sequence_keys or ()), *([labels_key] if labels_key else ())) if key not in tensors]
    if missing:
        raise ValueError(f"The batch has no tensor [batch, tokens, ...] under {missing}; it has {_shapes(items)}.")
    labels = labels_key if labels_key is not None else _labels_key(items)
    first = next(iter(sequence_keys or [key for key in _TOKEN_KEYS if key in tensors] or tensors), None)
    if first is None:
        raise ValueError(
            f"No tensor of the batch is [batch, tokens, ...]; it has {_shapes(items)}. Return token ids as a tensor "
            "with two dims, or choose cp=1."
        )
    batch_size, num_tokens = tensors[first].shape[:2]
    keys: tuple[Key, ...] = sequence_keys or tuple(key for key, x in tensors.items() if x.shape[1] == num_tokens)
    known: list[Key] = ["position_ids", "attention_mask", *([] if labels is None else [labels])]
    always = [key for key in known if isinstance(items.get(key), Tensor)]
    return SequenceFields(
        keys=tuple(dict.fromkeys([*keys, *always])),
        labels_key=labels,
        batch_size=batch_size,
        num_tokens=num_tokens,
        device=tensors[first].device,
    )


def count_whole(items: Mapping[Key, Any], fields: SequenceFields, shift: Shift, ignore_index: int) -> MicroBatch:
    """The counts of a batch that is not split. Labels that are not one per token are not counted."""
    labels = None if fields.labels_key is None else items[fields.labels_key]
    if labels is not None and labels.shape[:2] != (fields.batch_size, fields.num_tokens):
        labels = None
    if labels is not None and shift != "none":
        labels = labels[:, 1:]
    return MicroBatch(
        num_tokens=fields.batch_size * fields.num_tokens,
        num_loss_tokens=None if labels is None else (labels != ignore_index).sum(),
        context=fields.num_tokens,
        real_tokens_BL=_as_bool(items.get("attention_mask"), (fields.batch_size, fields.num_tokens)),
    )


def split_items(
    items: Mapping[Key, Any],
    fields: SequenceFields,
    *,
    shift: Shift,
    degree: int,
    rank: int,
    ignore_index: int,
    pad_token_id: int,
    layout: LayoutName = "zigzag",
) -> tuple[dict[Key, Any], LocalSequence, MicroBatch]:
    """This rank's part of a batch's items, of its sequence, and its counts.

    A dict-like batch gets ``position_ids``. With ``shift="module"`` every rank holds one dummy token at its end and
    its labels begin with ``ignore_index``, so that the module's own ``logits[:, :-1]`` against ``labels[:, 1:]``
    pairs every token with its globally next one.
    """
    tail = 1 if shift == "module" else 0
    documents = find_documents(items, batch_size=fields.batch_size, num_tokens=fields.num_tokens)
    shared = share_out(layout, documents, fields.num_tokens, degree)

    def own(x: Tensor, fill: int | None, num_dummies: int = tail) -> Tensor:
        own_BL = take_segments(shared.pad(x, fill), 1, shared.layout.segments[rank])
        return torch.cat([own_BL, filler(x, num_dummies, fill)], 1) if num_dummies else own_BL.contiguous()

    position_ids = items.get("position_ids")
    if position_ids is None:
        position_ids = positions_in_documents(documents, fields.batch_size, fields.num_tokens, fields.device)
    # Padding and dummies repeat a position: nobody sees them, and a table of positions need not grow.
    position_ids_BL = own(position_ids, None)

    local = dict(items)
    for key in fields.keys:
        is_labels = key == fields.labels_key or key == "labels"
        local[key] = own(items[key], ignore_index if is_labels else pad_token_id if key in ("input_ids", 0) else 0)
    if all(isinstance(key, str) for key in items):
        local["position_ids"] = position_ids_BL

    shifted_BL = None
    if fields.labels_key is not None:
        labels = items[fields.labels_key]
        shifted_BL = own(labels if shift == "none" else _shifted(labels, ignore_index), ignore_index, 0)
        if shift == "module":
            local[fields.labels_key] = torch.cat([filler(shifted_BL, 1, ignore_index), shifted_BL], 1)
    sequence = LocalSequence(
        layout=shared.layout.with_tail_token() if tail else shared.layout,
        num_tokens=fields.num_tokens,
        padded=shared,
        position_ids_BL=position_ids_BL,
        documents=shared.documents,
        shift=shift,
        shift_labels_BL=shifted_BL if shift == "model" else None,
        attention_mask_BL=local.get("attention_mask"),
        token_ids_BL=_token_ids(local, fields),
    )
    is_token_L = _is_token(sequence, rank)
    sequence = replace(
        sequence, real_tokens_BL=_real_tokens(fields, sequence, is_token_L), has_labels=shifted_BL is not None
    )
    counts = MicroBatch(
        num_tokens=fields.batch_size * int(is_token_L.sum()),
        num_loss_tokens=None if shifted_BL is None else (shifted_BL != ignore_index).sum(),
        context=fields.num_tokens,
        real_tokens_BL=sequence.real_tokens_BL,
    )
    return local, sequence, counts


def whole_sequence(items: Mapping[Key, Any], fields: SequenceFields, counts: MicroBatch) -> LocalSequence:
    """Of a batch that is not split: this rank holds all of it, and whoever shifts the labels may do so."""
    documents = find_documents(items, batch_size=fields.batch_size, num_tokens=fields.num_tokens)
    position_ids = items.get("position_ids")
    if position_ids is None:
        position_ids = positions_in_documents(documents, fields.batch_size, fields.num_tokens, fields.device)
    return LocalSequence(
        layout=contiguous(fields.num_tokens, 1),
        num_tokens=fields.num_tokens,
        position_ids_BL=position_ids,
        documents=documents,
        shift="model",
        attention_mask_BL=items.get("attention_mask"),
        real_tokens_BL=counts.real_tokens_BL,
        has_labels=counts.num_loss_tokens is not None,
    )


def _is_token(sequence: LocalSequence, rank: int) -> Tensor:
    """Which of this rank's tokens are neither padding nor dummies: bool [L], on the CPU."""
    ids_L = sequence.layout.token_ids(rank)
    if sequence.is_token_P is None:
        return ids_L < sequence.num_tokens
    num_padded = sequence.is_token_P.shape[0]
    return (ids_L < num_padded) & sequence.is_token_P[ids_L.clamp(max=num_padded - 1)]


def _real_tokens(fields: SequenceFields, sequence: LocalSequence, is_token_L: Tensor) -> Tensor | None:
    shape = (fields.batch_size, sequence.layout.tokens_per_rank)
    mask_BL = _as_bool(sequence.attention_mask_BL, shape)
    if sequence.layout.num_tokens == fields.num_tokens:
        return mask_BL
    is_token_L = is_token_L.to(fields.device)
    return is_token_L.expand(shape) if mask_BL is None else is_token_L & mask_BL


def _token_ids(local: Mapping[Key, Any], fields: SequenceFields) -> Tensor | None:
    """Of a dict its ``input_ids``, of a tuple its first part."""
    return next((local[key] for key in ("input_ids", 0) if key in fields.keys and local[key].dim() == 2), None)


def _as_bool(mask: Any, shape: tuple[int, int]) -> Tensor | None:
    return mask.bool() if isinstance(mask, Tensor) and mask.shape == shape else None


def refuse_what_cannot_be_split(
    items: Mapping[Key, Any],
    fields: SequenceFields,
    *,
    shift: Shift,
    degree: int,
    ignore_index: int,
    layout: LayoutName = "zigzag",
) -> None:
    """ValueError for a batch whose split would not be exact."""
    unequal = {
        key: items[key] for key in fields.keys if items[key].dim() < 2 or items[key].shape[1] != fields.num_tokens
    }
    if unequal:
        raise ValueError(
            f"The sequence has {fields.num_tokens} tokens, but the batch has {_shapes(unequal)}. What belongs to the "
            "sequence must be [batch, tokens, ...]; name it in ZigZagContextParallel(sequence_keys=[...])."
        )
    if fields.num_tokens < 2 * degree:
        raise ValueError(
            f"The sequence has {fields.num_tokens} tokens, fewer than 2 * cp({degree}) = {2 * degree} chunks. Use "
            "longer sequences or a smaller cp."
        )
    mask = items.get("attention_mask")
    if isinstance(mask, Tensor):
        if mask.dim() != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; cp > 1 takes [batch, tokens] with padding on the "
                "right, or no mask."
            )
        _refuse_mask(mask.bool(), items, fields, shift, ignore_index)
    documents = find_documents(items, batch_size=fields.batch_size, num_tokens=fields.num_tokens)
    share_out(layout, documents, fields.num_tokens, degree)


def refuse_labels_of_whole_sequences(
    items: Mapping[Key, Any], fields: SequenceFields, *, degree: int, module: str
) -> None:
    """ValueError for labels that are no token's: what is computed from a part of a sequence is not its label."""
    labels = None if fields.labels_key is None else items[fields.labels_key]
    if labels is None or labels.shape[:2] == (fields.batch_size, fields.num_tokens):
        return
    raise ValueError(
        f"{module} trains on {fields.labels_key!r} {tuple(labels.shape)}, which are not one per token of "
        f"{(fields.batch_size, fields.num_tokens)}. With cp({degree}) > 1 a rank holds a part of every sequence, and "
        "would predict from that part what belongs to the whole. Choose cp=1; fsdp and ep work as they are."
    )


def _refuse_mask(
    mask_BS: Tensor, items: Mapping[Key, Any], fields: SequenceFields, shift: Shift, ignore_index: int
) -> None:
    if bool((mask_BS[:, 1:] & ~mask_BS[:, :-1]).any()):
        raise ValueError(
            "attention_mask has a hole or padding on the left; with cp > 1 no mask reaches the attention. Pad on the "
            "right (tokenizer.padding_side='right')."
        )
    if fields.labels_key is None:
        return
    labels = items[fields.labels_key]
    counts = (labels if shift == "none" else _shifted(labels, ignore_index)) != ignore_index
    if bool(counts[~mask_BS].any()):
        raise ValueError(
            f"Labels under {fields.labels_key!r} count at tokens that attention_mask hides. Set them to "
            f"ignore_index({ignore_index})."
        )


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """What each token is to predict: the label of the next one."""
    return torch.cat([labels[:, 1:], filler(labels, 1, ignore_index)], 1)


def _labels_key(items: Mapping[Key, Any]) -> Key | None:
    names: Iterator[Key] = (key for key in (*SHIFTED_LABEL_KEYS, "labels", 1) if isinstance(items.get(key), Tensor))
    return next(names, None)


def _shapes(items: Mapping[Key, Any]) -> str:
    parts = [f"{key!r}: {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}" for key, x in items.items()]
    return "{" + ", ".join(parts) + "}"
