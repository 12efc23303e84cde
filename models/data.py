"""Text for language models: from files, or from Python's own documentation and sources without a download.

Shapes: S = ``sequence_length``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe_strategy._lightning_compat import LightningDataModule
from lightning_moe_strategy.models.corpus import Corpus
from lightning_moe_strategy.models.loss import IGNORE_INDEX, shift_labels
from lightning_moe_strategy.models.token_store import (
    END_OF_TEXT_ID,
    SMALLEST_VOCABULARY,
    Split,
    TokenStore,
    open_store,
)

Row = dict[str, Tensor]


class TextDataModule(LightningDataModule):
    """Rows of tokens with their targets, for ``MoELanguageModel``, ``HFCausalLM`` or a model of your own.

    A batch has ``input_ids``, ``labels`` (aligned with the inputs, as Hugging Face wants them) and
    ``shift_labels`` (the target of each token), each [batch_size, S] int64, -100 where no target counts. The
    last token of a row has no target, so both conventions count the same tokens.

    - ``packing="packed"``: documents follow one another, each closed by an end-of-text token, and rows are
      cut every ``sequence_length`` tokens. As in plain GPT packing, attention and targets run across the
      border of two documents in a row. What is left at the end of a split, less than one row, is dropped.
    - ``packing="per_document"``: one document a row, cut off or padded on the right, where the extra
      ``attention_mask`` is 0.

    A byte-level BPE tokenizer is trained on the train split. Tokens are kept and found again by the content of the
    files. Validation documents are chosen by their text, whatever the seed. Test and predict use the validation rows.

    Args:
        files: ``.txt``, ``.jsonl`` or ``.parquet``; None takes what comes with Python, without a download.
        vocab_size: tokens of the tokenizer, its special ones included.
        sequence_length: tokens of a row.
        batch_size: rows of a batch of one data parallel rank.
        packing: see above.
        validation_fraction: share of the documents that is not trained on, from 0 to below 1.
        max_documents: read no more than so many; None reads all.
        text_column: of ``.jsonl`` and ``.parquet``.
        cache_dir: of tokenizer and tokens; None is ``$XDG_CACHE_HOME/lightning_moe_strategy``.
        seed: of the order of the training rows.
        num_workers: processes of each loader.

    Raises:
        ValueError: at once, for a file that does not exist or is of an unknown kind, for files without text,
            for a number out of range; when tokens are made, for a corpus too small for its splits.
    """

    def __init__(
        self,
        files: list[str] | None = None,
        *,
        vocab_size: int = 1024,
        sequence_length: int = 512,
        batch_size: int = 4,
        packing: Literal["packed", "per_document"] = "packed",
        validation_fraction: float = 0.05,
        max_documents: int | None = None,
        text_column: str = "text",
        cache_dir: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        _require("vocab_size", vocab_size, vocab_size >= SMALLEST_VOCABULARY, f"at least {SMALLEST_VOCABULARY}")
        _require("sequence_length", sequence_length, sequence_length >= 2, "at least 2, a token and its target")
        _require("batch_size", batch_size, batch_size >= 1, "at least 1")
        _require("packing", packing, packing in ("packed", "per_document"), "'packed' or 'per_document'")
        _require("validation_fraction", validation_fraction, 0 <= validation_fraction < 1, "in [0, 1)")
        _require("num_workers", num_workers, num_workers >= 0, "at least 0")
        paths = None if files is None else [Path(file).expanduser() for file in files]
        self.corpus = Corpus(files=paths, text_column=text_column, max_documents=max_documents)
        self.vocab_size, self.sequence_length, self.batch_size = vocab_size, sequence_length, batch_size
        self.packing, self.validation_fraction = packing, validation_fraction
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.seed, self.num_workers = seed, num_workers
        self._store: TokenStore | None = None

    @property
    def store(self) -> TokenStore:
        """The tokens on disk, made on first use."""
        if self._store is None:
            self._store = open_store(
                self.cache_dir,
                self.corpus,
                vocab_size=self.vocab_size,
                validation_fraction=self.validation_fraction,
            )
        return self._store

    @property
    def tokenizer(self) -> Tokenizer:
        """Trained on the train split on first use."""
        return self.store.tokenizer()

    def prepare_data(self) -> None:
        _ = self.store

    def train_dataloader(self) -> DataLoader[Row]:
        rows = self._rows("train")
        if len(rows) < self.batch_size:
            raise ValueError(
                f"batch_size({self.batch_size}) is larger than the {len(rows)} rows of the train split. "
                "Lower it, shorten sequence_length or give more text."
            )
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            shuffle=True,
            generator=generator,
            drop_last=True,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> DataLoader[Row] | list[DataLoader[Row]]:
        if not self.validation_fraction:
            return []
        return DataLoader(self._rows("validation"), batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Row] | list[DataLoader[Row]]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Row] | list[DataLoader[Row]]:
        return self.val_dataloader()

    def unigram_entropy(self) -> float:
        """Entropy in nats of single validation tokens: the loss of a model that ignores what came before."""
        counts = np.bincount(self.store.tokens("validation"))
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def _rows(self, split: Split) -> "PackedRows | DocumentRows":
        kind = PackedRows if self.packing == "packed" else DocumentRows
        rows = kind(self.store, split, self.sequence_length)
        if not len(rows):
            raise ValueError(
                f"sequence_length({self.sequence_length}) is larger than the {split} split of "
                f"{len(self.store.tokens(split))} tokens. Shorten it, give more text or change "
                f"validation_fraction({self.validation_fraction})."
            )
        return rows


@dataclass(frozen=True)
class PackedRows(Dataset[Row]):
    """All tokens of a split, cut every ``sequence_length``."""

    store: TokenStore
    split: Split
    sequence_length: int

    def __len__(self) -> int:
        return len(self.store.tokens(self.split)) // self.sequence_length

    def __getitem__(self, index: int) -> Row:
        start = range(len(self))[index] * self.sequence_length
        tokens_S = self.store.tokens(self.split)[start : start + self.sequence_length]
        input_ids_S = torch.from_numpy(tokens_S.astype(np.int64))
        return {"input_ids": input_ids_S, "labels": input_ids_S.clone(), "shift_labels": _shift(input_ids_S)}


@dataclass(frozen=True)
class DocumentRows(Dataset[Row]):
    """One document a row: its first ``sequence_length`` tokens, padded on the right."""

    store: TokenStore
    split: Split
    sequence_length: int

    def __len__(self) -> int:
        return len(self.store.document_starts(self.split)) - 1

    def __getitem__(self, index: int) -> Row:
        starts = self.store.document_starts(self.split)
        start, stop = (int(starts[range(len(self))[index] + step]) for step in (0, 1))
        tokens = self.store.tokens(self.split)[start : min(stop, start + self.sequence_length)]
        input_ids_S = torch.full((self.sequence_length,), END_OF_TEXT_ID, dtype=torch.int64)
        input_ids_S[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        attention_mask_S = (torch.arange(self.sequence_length) < len(tokens)).long()
        labels_S = input_ids_S.masked_fill(attention_mask_S == 0, IGNORE_INDEX)
        return {
            "input_ids": input_ids_S,
            "labels": labels_S,
            "shift_labels": _shift(labels_S),
            "attention_mask": attention_mask_S,
        }


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_moe_strategy"


def _shift(labels_S: Tensor) -> Tensor:
    return shift_labels(labels_S[None])[0]


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}({value}) must be {rule}.")
