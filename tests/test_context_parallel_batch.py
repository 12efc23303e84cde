"""What a rank gets of a batch, value by value, and which batches are refused."""

import pytest
import torch

from lightning_moe_strategy.context_parallel.batch import (
    count_whole,
    find_sequences,
    items_of,
    refuse_what_cannot_be_split,
    split_items,
)
from lightning_moe_strategy.context_parallel.documents import find_documents
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT

IGNORE = -100


def batch_of(num_tokens=8):
    ids = torch.arange(1, num_tokens + 1)[None].repeat(2, 1)
    return {"input_ids": ids, "labels": 10 * ids, "weights": ids.double()[..., None], "name": "kept", "sizes": [1, 2]}


def fields_of(items, sequence_keys=None, labels_key=None):
    return find_sequences(items, sequence_keys=sequence_keys, labels_key=labels_key)


def split(items, shift, rank, degree=2, **keys):
    return split_items(
        items,
        fields_of(items, **keys),
        shift=shift,
        degree=degree,
        rank=rank,
        ignore_index=IGNORE,
        pad_token_id=7,
    )


def refuse(items, shift="model", degree=2, **keys):
    refuse_what_cannot_be_split(items, fields_of(items, **keys), shift=shift, degree=degree, ignore_index=IGNORE)


def test_labels_for_a_model_are_aligned_and_the_shifted_ones_lie_beside_them():
    local, sequence, counts = split(batch_of(), "model", rank=0)
    assert local["input_ids"][0].tolist() == [1, 2, 7, 8]
    assert local["labels"][0].tolist() == [10, 20, 70, 80]
    assert sequence.shift_labels_BL[0].tolist() == [20, 30, 80, IGNORE]
    assert local["position_ids"][0].tolist() == [0, 1, 6, 7]
    assert local["weights"][1, :, 0].tolist() == [1, 2, 7, 8]
    assert local["name"] == "kept" and local["sizes"] == [1, 2]
    assert counts.num_tokens == 8 and int(counts.num_loss_tokens) == 6


def test_labels_for_a_module_pair_with_its_own_shift():
    local, sequence, counts = split(batch_of(), "module", rank=1)
    assert local["input_ids"][0].tolist() == [3, 4, 5, 6, 7]  # the last one a dummy, pad_token_id
    assert local["labels"][0].tolist() == [IGNORE, 40, 50, 60, 70]
    assert local["position_ids"][0].tolist() == [2, 3, 4, 5, 7]
    assert sequence.layout.tokens_per_rank == 5 and sequence.shift_labels_BL is None
    assert counts.num_tokens == 8 and int(counts.num_loss_tokens) == 8


def test_targets_are_split_as_they_are():
    items = {"input_ids": torch.arange(8)[None], "targets": torch.arange(8)[None]}
    local, _, counts = split(items, "none", rank=1)
    assert local["targets"].tolist() == [[2, 3, 4, 5]] and int(counts.num_loss_tokens) == 4


def test_padding_has_no_label_and_is_not_counted():
    local, sequence, counts = split(batch_of(6), "model", rank=0)
    assert local["input_ids"][0].tolist() == [1, 2, 7, 7]
    assert local["labels"][0].tolist() == [10, 20, IGNORE, IGNORE]
    assert sequence.shift_labels_BL[0].tolist() == [20, 30, IGNORE, IGNORE]
    # A table of positions with one row per token stays large enough.
    assert local["position_ids"][0].tolist() == [0, 1, 5, 5]
    assert counts.num_tokens == 4 and int(counts.num_loss_tokens) == 4


def test_parts_of_a_tuple_and_a_single_tensor_are_split():
    x = torch.arange(8)[None]
    local, _, counts = split(items_of((x, x + 1)), "none", rank=0)
    assert local[0].tolist() == [[0, 1, 6, 7]] and local[1].tolist() == [[1, 2, 7, 8]] and set(local) == {0, 1}
    assert int(counts.num_loss_tokens) == 4
    local, _, counts = split(items_of(x), "none", rank=0)
    assert local[0].tolist() == [[0, 1, 6, 7]] and counts.num_loss_tokens is None


def test_only_the_named_keys_are_split():
    items = {"tokens": torch.arange(8)[None], "table": torch.arange(8)[None], "y": torch.arange(8)[None]}
    local, _, _ = split(items, "none", rank=0, sequence_keys=("tokens",))
    assert local["table"].shape == (1, 8) and local["tokens"].shape == local["y"].shape == (1, 4)


@pytest.mark.parametrize(("shift", "expected"), [("model", 12), ("module", 12), ("none", 14)])
def test_a_batch_that_is_not_split_is_counted_the_same_way(shift, expected):
    items = batch_of() | {"attention_mask": torch.ones(2, 1, 8, 8)}  # anything is allowed without cp
    items["labels"][:, 1] = IGNORE
    counts = count_whole(items, fields_of(items), shift, IGNORE)
    assert counts.num_tokens == 16 and int(counts.num_loss_tokens) == expected


def test_labels_of_whole_sequences_are_not_counted_as_tokens():
    items = {"input_ids": torch.ones(2, 8), "labels": torch.ones(2)}
    assert count_whole(items, fields_of(items), "none", IGNORE).num_loss_tokens is None


MASK = torch.ones(2, 8, dtype=torch.int64)
RIGHT, LEFT, HOLE = MASK.clone(), MASK.clone(), MASK.clone()
RIGHT[:, -2:] = 0
LEFT[:, :2] = 0
HOLE[:, 3] = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": LEFT}, "a hole or padding on the left.*padding_side='right'"),
        ({"attention_mask": HOLE}, "a hole or padding on the left"),
        ({"attention_mask": torch.ones(2, 8, 8)}, r"attention_mask has shape \(2, 8, 8\)"),
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, r"8 tokens, but .*attention_mask"),
        ({"attention_mask": RIGHT}, r"'labels' count at tokens that attention_mask hides.*ignore_index\(-100\)"),
        ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9]])}, "position_ids jump ahead"),
        ({"position_ids": torch.arange(8)}, r"position_ids.*\(8,\)"),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, r"cu_seqlens of shape \(3,\) must rise from 0 to 2 \* 8"),
        ({"cu_seqlens": torch.tensor([0, 4, 11, 16])}, "with every row's start among them"),
        (
            {"cu_seqlens": torch.tensor([0, 4, 8, 16]), "seq_idx": torch.tensor([[0] * 3 + [1] * 5, [0] * 8])},
            "differently under 'cu_seqlens', 'seq_idx'",
        ),
        ({"labels": torch.ones(2, 7)}, r"8 tokens, but .*'labels': \(2, 7\)"),
    ],
)
def test_a_batch_that_cannot_be_split_exactly_is_refused(change, message):
    refuse(batch_of())
    with pytest.raises(ValueError, match=message):
        refuse(batch_of() | change)


def test_padding_on_the_right_without_labels_there_is_fine():
    items = batch_of() | {"attention_mask": RIGHT}
    items["labels"][:, -2:] = IGNORE
    refuse(items)


def test_a_short_sequence_names_the_chunks_it_lacks():
    with pytest.raises(ValueError, match=r"7 tokens, fewer than 2 \* cp\(4\) = 8"):
        refuse(batch_of(7), degree=4)


def test_a_batch_without_sequences_says_what_it_has():
    with pytest.raises(ValueError, match=r"No tensor .* \{'image': \(3,\), 'n': int\}"):
        fields_of({"image": torch.ones(3), "n": 1})
    with pytest.raises(ValueError, match=r"under \['tokens'\]"):
        fields_of(batch_of(), sequence_keys=("tokens",))


MARKS = {
    "cu_seqlens": torch.tensor([0, 3, 8, 8 + 5, 16]),
    "document_ids": torch.tensor([[7] * 3 + [9] * 5, [7] * 5 + [9] * 3]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]]),
}


@pytest.mark.parametrize("keys", [["cu_seqlens"], ["document_ids"], ["position_ids"], list(MARKS)])
def test_documents_are_read_from_every_mark(keys):
    items = batch_of() | {key: MARKS[key] for key in keys}
    assert find_documents(items, batch_size=2, num_tokens=8) == ((0, 3), (0, 5))
    _, sequence, _ = split_items(
        items, fields_of(items), shift="model", degree=2, rank=1, ignore_index=IGNORE, pad_token_id=0
    )
    assert sequence.documents == ((0, 3), (0, 5))
    assert torch.equal(sequence.position_ids_BL, MARKS["position_ids"][:, 2:6])


def test_rows_with_the_same_documents_share_them_and_one_document_is_none():
    assert find_documents({"cu_seq_lens_q": torch.tensor([0, 3, 8, 11, 16])}, batch_size=2, num_tokens=8) == ((0, 3),)
    assert find_documents({"cu_seqlens": torch.tensor([0, 8, 16])}, batch_size=2, num_tokens=8) == ONE_DOCUMENT
    assert find_documents({"position_ids": torch.arange(4, 12)[None]}, batch_size=1, num_tokens=8) == ONE_DOCUMENT


def test_positions_of_padding_start_no_document():
    items = {"position_ids": torch.tensor([[0, 1, 2, 1, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    assert find_documents(items, batch_size=1, num_tokens=5) == ONE_DOCUMENT


def split_by_document(shift, rank):
    items = batch_of(12) | {"document_ids": torch.tensor([[0] * 5 + [1] * 7] * 2)}
    items["input_ids"] = torch.arange(12).repeat(2, 1)
    items["labels"] = torch.arange(100, 112).repeat(2, 1)
    return split_items(
        items, fields_of(items), shift=shift, degree=2, rank=rank, ignore_index=IGNORE, pad_token_id=77,
        layout="per_document",
    )  # fmt: skip


def test_documents_that_are_cut_by_themselves_are_padded_by_themselves():
    """5 tokens become 8 in chunks of 2, 7 become 8: rank 0 owns the outer chunks of both, rank 1 the inner ones."""
    outer, sequence, counts = split_by_document("none", 0)
    inner, _, other_counts = split_by_document("none", 1)
    assert outer["input_ids"][0].tolist() == [0, 1, 77, 77, 5, 6, 11, 77]
    assert inner["input_ids"][0].tolist() == [2, 3, 4, 77, 7, 8, 9, 10]
    assert outer["labels"][0].tolist() == [100, 101, IGNORE, IGNORE, 105, 106, 111, IGNORE]
    assert outer["position_ids"][0].tolist() == [0, 1, 4, 4, 0, 1, 6, 6]
    assert sequence.documents == ((0, 8),)
    assert (counts.num_tokens, other_counts.num_tokens) == (2 * 5, 2 * 7)
    assert counts.real_tokens_BL[0].tolist() == [True, True, False, False, True, True, True, False]


def test_labels_are_shifted_before_documents_are_padded():
    _, sequence, _ = split_by_document("model", 0)
    assert sequence.shift_labels_BL[0].tolist() == [101, 102, IGNORE, IGNORE, 106, 107, IGNORE, IGNORE]


def test_rows_that_pack_different_documents_cannot_be_cut_by_document():
    items = batch_of() | {"document_ids": MARKS["document_ids"]}
    with pytest.raises(ValueError, match="layout='per_document' .* rows of this batch pack different ones"):
        refuse_what_cannot_be_split(
            items, fields_of(items), shift="none", degree=2, ignore_index=IGNORE, layout="per_document"
        )
