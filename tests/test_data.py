"""Text becomes rows of tokens: nothing lost, nothing leaked, nothing made twice."""

import json
import math
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lightning_moe_strategy.models import corpus as corpus_module
from lightning_moe_strategy.models import token_store
from lightning_moe_strategy.models.corpus import Corpus
from lightning_moe_strategy.models.data import TextDataModule
from lightning_moe_strategy.models.loss import IGNORE_INDEX, shift_labels
from lightning_moe_strategy.models.token_store import END_OF_TEXT, END_OF_TEXT_ID, open_store, split_documents

DOCUMENTS = [f"Document {i}: " + " ".join(f"word{i * j % 17}" for j in range(5 + 7 * i)) for i in range(40)]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(f"\n{END_OF_TEXT}\n".join(DOCUMENTS), encoding="utf-8")
    return path


def data_module(path, tmp_path, **options):
    defaults = {"vocab_size": 300, "sequence_length": 16, "batch_size": 2, "validation_fraction": 0.2}
    return TextDataModule([str(path)], cache_dir=str(tmp_path / "cache"), **(defaults | options))


def documents_of(data, split):
    tokens, starts = data.store.tokens(split), data.store.document_starts(split)
    assert all(tokens[stop - 1] == END_OF_TEXT_ID for stop in starts[1:])
    pairs = zip(starts[:-1], starts[1:], strict=True)
    return [data.tokenizer.decode(tokens[a : b - 1].tolist()) for a, b in pairs]


def test_tokens_decode_to_the_text_whatever_is_in_it(text_file, tmp_path):
    tokenizer = data_module(text_file, tmp_path).tokenizer
    for text in ["plain", "  spaces\n\ttabs ", "naïve 漢字 🙂", "\x00\x1f", DOCUMENTS[7]]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_each_document_is_in_exactly_one_split(text_file, tmp_path):
    data = data_module(text_file, tmp_path)
    train, validation = documents_of(data, "train"), documents_of(data, "validation")
    assert len(validation) == 8
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(DOCUMENTS)


def test_copies_of_a_document_stay_together_and_the_split_ignores_order():
    train, validation = split_documents(DOCUMENTS * 3, 0.2)
    assert not set(train) & set(validation)
    assert Counter(Counter(validation).values()) == {3: 8}
    assert set(split_documents(DOCUMENTS[::-1], 0.2)[1]) == set(validation)
    with pytest.raises(ValueError, match="holds 1 different documents"):
        split_documents(["the same"] * 5, 0.2)


def test_text_that_spells_the_end_of_text_token_is_text(tmp_path):
    path = tmp_path / "corpus.jsonl"
    texts = [f"about {END_OF_TEXT} number {i}" for i in range(6)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pytest.importorskip("datasets")
    data = data_module(path, tmp_path)
    assert sorted(documents_of(data, "train") + documents_of(data, "validation")) == texts
    tokens = np.concatenate([data.store.tokens("train"), data.store.tokens("validation")])
    assert (tokens == END_OF_TEXT_ID).sum() == 6


def test_packed_rows_are_the_stream_of_tokens_cut_at_equal_lengths(text_file, tmp_path):
    data = data_module(text_file, tmp_path)
    tokens = data.store.tokens("validation")
    rows = [row for batch in data.val_dataloader() for row in batch["input_ids"].tolist()]
    assert len(rows) == len(tokens) // 16
    assert sum(rows, []) == tokens[: 16 * len(rows)].tolist()
    assert tokens.dtype == np.uint16


def test_both_label_conventions_agree(text_file, tmp_path):
    for packing in ("packed", "per_document"):
        for batch in data_module(text_file, tmp_path, packing=packing).train_dataloader():
            assert torch.equal(batch["shift_labels"], shift_labels(batch["labels"]))
            assert (batch["shift_labels"][:, -1] == IGNORE_INDEX).all()
            real = batch["labels"] != IGNORE_INDEX
            assert torch.equal(batch["labels"][real], batch["input_ids"][real])
            assert all(tensor.dtype == torch.int64 and tensor.shape == (2, 16) for tensor in batch.values())
            assert ("attention_mask" in batch) is (packing == "per_document")


def test_per_document_rows_are_cut_or_padded_on_the_right(text_file, tmp_path):
    data = data_module(text_file, tmp_path, packing="per_document", sequence_length=100)
    starts, tokens = data.store.document_starts("validation"), data.store.tokens("validation")
    rows = [
        dict(zip(batch, row, strict=True))
        for batch in data.val_dataloader()
        for row in zip(*batch.values(), strict=True)
    ]
    assert len(rows) == len(starts) - 1
    lengths = []
    for row, start, stop in zip(rows, starts[:-1], starts[1:], strict=True):
        length = min(100, stop - start)
        lengths.append(stop - start)
        assert row["input_ids"][:length].tolist() == tokens[start : start + length].tolist()
        assert row["attention_mask"].tolist() == [1] * length + [0] * (100 - length)
        assert (row["labels"][length:] == IGNORE_INDEX).all()
    assert min(lengths) < 100 < max(lengths)


def test_training_rows_are_shuffled_by_the_seed(text_file, tmp_path):
    def order(seed):
        loader = data_module(text_file, tmp_path, seed=seed).train_dataloader()
        return [batch["input_ids"].tolist() for batch in loader]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_unigram_entropy_is_that_of_the_validation_tokens(text_file, tmp_path):
    data = data_module(text_file, tmp_path)
    counts = Counter(data.store.tokens("validation").tolist())
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert data.unigram_entropy() == pytest.approx(expected, rel=1e-12)


def test_a_store_is_found_by_content_and_remade_when_content_or_options_change(text_file, tmp_path, monkeypatch):
    first = data_module(text_file, tmp_path).store.folder
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(text_file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "train_tokenizer", lambda *_: pytest.fail("made again"))
        assert data_module(moved, tmp_path, sequence_length=32, packing="per_document", seed=5).store.folder == first
    others = [
        data_module(text_file, tmp_path, vocab_size=301),
        data_module(text_file, tmp_path, validation_fraction=0.5),
        data_module(text_file, tmp_path, max_documents=20),
    ]
    moved.write_text(moved.read_text() + "!")
    others.append(data_module(moved, tmp_path))
    folders = {first, *(data.store.folder for data in others)}
    assert len(folders) == 5
    assert not [path for path in (tmp_path / "cache").iterdir() if path not in folders]


def test_processes_that_make_the_same_store_at_once_all_get_it(text_file, tmp_path):
    corpus = Corpus(files=[text_file])

    def make(_):
        return open_store(tmp_path / "cache", corpus, vocab_size=300, validation_fraction=0.2)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(make, range(4)))
    assert len({store.folder for store in stores}) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [stores[0].folder.name]
    assert len(stores[0].tokens("train")) > 0


def test_a_store_that_failed_leaves_nothing_behind(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "_write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        data_module(text_file, tmp_path).prepare_data()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_jsonl_and_parquet_are_documents(suffix, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / f"corpus.{suffix}"
    table = datasets.Dataset.from_dict({"body": DOCUMENTS, "id": list(range(40))})
    table.to_json(path) if suffix == "jsonl" else table.to_parquet(path)
    assert list(Corpus(files=[path], text_column="body").documents()) == DOCUMENTS
    assert list(Corpus(files=[path], text_column="body", max_documents=3).documents()) == DOCUMENTS[:3]
    with pytest.raises(ValueError, match=r"text_column\('text'\) is not a column of text.*'body'"):
        list(Corpus(files=[path]).documents())


def test_without_datasets_the_error_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-moe-strategy\[data\]"):
        list(Corpus(files=[path]).documents())


def test_the_default_corpus_is_the_same_each_time_and_holds_long_documents(monkeypatch):
    documents = list(Corpus().documents())
    assert documents == list(Corpus().documents())
    assert Corpus().digest() == Corpus().digest()
    assert any("The language reference" in text or "statement" in text for text in documents)
    num_characters = sum(map(len, documents))
    assert 2_000_000 < num_characters < corpus_module.STANDARD_LIBRARY_BYTES + 600_000
    assert max(map(len, documents)) > 50_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, r"sequence_length\(1\) must be at least 2"),
        ({"vocab_size": 256}, r"vocab_size\(256\) must be at least 257"),
        ({"batch_size": 0}, r"batch_size\(0\) must be at least 1"),
        ({"packing": "tight"}, r"packing\(tight\) must be 'packed' or 'per_document'"),
        ({"validation_fraction": 1.0}, r"validation_fraction\(1.0\) must be in \[0, 1\)"),
        ({"max_documents": 0}, r"max_documents\(0\) must be at least 1"),
        ({"num_workers": -1}, r"num_workers\(-1\) must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused_before_any_work(options, message, text_file, tmp_path):
    with pytest.raises(ValueError, match=message):
        data_module(text_file, tmp_path, **options)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"missing.txt' is not a file. Check the path"),
        ("corpus.csv", "a,b", r"ends in '.csv', not in one of .txt, .jsonl, .parquet"),
        ("empty.txt", "", r"hold no text. Give at least one file"),
    ],
)
def test_files_that_cannot_be_read_are_refused_before_any_work(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        TextDataModule([str(tmp_path / name)], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="hold no text"):
        TextDataModule([])


def test_text_too_small_for_its_splits_says_what_to_change(text_file, tmp_path):
    with pytest.raises(ValueError, match=r"sequence_length\(9999\) is larger than the train split of \d+ tokens"):
        data_module(text_file, tmp_path, sequence_length=9999).train_dataloader()
    with pytest.raises(ValueError, match=r"batch_size\(9999\) is larger than the \d+ rows"):
        data_module(text_file, tmp_path, batch_size=9999).train_dataloader()
    one = tmp_path / "one.txt"
    one.write_text("a single document")
    with pytest.raises(ValueError, match=r"holds 1 different documents and validation_fraction\(0.2\) takes 1"):
        data_module(one, tmp_path).prepare_data()
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n ")
    with pytest.raises(ValueError, match="holds 0 different documents"):
        data_module(blank, tmp_path).prepare_data()


def test_without_a_validation_split_everything_trains(tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("a single document " * 20)
    data = data_module(one, tmp_path, validation_fraction=0.0, batch_size=1)
    assert len(documents_of(data, "train")) == 1
    assert data.val_dataloader() == []
    assert len(data.train_dataloader()) > 0
