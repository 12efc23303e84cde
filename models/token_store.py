"""Documents as flat arrays of tokens on disk, split by document, made once and found again by content.

A store is a folder: ``tokenizer.json``, and for each split ``<split>.npy`` (all tokens, each document closed
by the end-of-text token) and ``<split>_starts.npy`` (where each document starts, and the end).
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_moe_strategy.models.corpus import Corpus

Split = Literal["train", "validation"]
Tokens = npt.NDArray[np.unsignedinteger]

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
SMALLEST_VOCABULARY = 257
"""One token per byte, so that any text can be written, and the end of text."""

TOKENIZER_CHARACTERS = 4_000_000
"""Text the merges are learned from; more changes a small vocabulary little."""

FORMAT = 1
"""Part of every store's name: raise it when the content of a store changes for the same corpus."""


@dataclass(frozen=True)
class TokenStore:
    """A store that is complete on disk; arrays are memory-mapped, so ranks of a node share them."""

    folder: Path

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def tokens(self, split: Split) -> Tokens:
        tokens: Tokens = np.load(self.folder / f"{split}.npy", mmap_mode="r")
        return tokens

    def document_starts(self, split: Split) -> npt.NDArray[np.int64]:
        starts: npt.NDArray[np.int64] = np.load(self.folder / f"{split}_starts.npy", mmap_mode="r")
        return starts


def open_store(cache_dir: Path, corpus: Corpus, *, vocab_size: int, validation_fraction: float) -> TokenStore:
    """The store of this corpus, made now if nobody made it before.

    Safe when several processes ask at once: each writes aside, one rename wins, the others drop theirs.

    Raises:
        ValueError: the corpus holds no document, or too few to fill both splits.
    """
    key = repr((FORMAT, corpus.digest(), vocab_size, validation_fraction))
    folder = cache_dir / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    if folder.is_dir():
        return TokenStore(folder)
    cache_dir.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache_dir))
    try:
        train, validation = split_documents(list(corpus.documents()), validation_fraction)
        tokenizer = train_tokenizer(train, vocab_size)
        tokenizer.save(str(aside / "tokenizer.json"))
        _write(aside, "train", train, tokenizer)
        _write(aside, "validation", validation, tokenizer)
        os.chmod(aside, 0o755)
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return TokenStore(folder)


def split_documents(documents: Sequence[str], validation_fraction: float) -> tuple[list[str], list[str]]:
    """Train and validation documents: a document, and every copy of it, is in one of them only.

    Which one depends on its text alone, not on a seed: continuing with another seed cannot leak.
    """
    digests = [hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in documents]
    ordered = sorted(set(digests))
    num_validation = max(1, round(len(ordered) * validation_fraction)) if validation_fraction else 0
    if not ordered or num_validation >= len(ordered):
        raise ValueError(
            f"The corpus holds {len(ordered)} different documents and validation_fraction"
            f"({validation_fraction}) takes {num_validation} of them, which leaves none to train on. Give "
            f"more documents, separate those of a .txt file by lines {END_OF_TEXT}, or set "
            "validation_fraction to 0."
        )
    held_out = set(ordered[:num_validation])
    pairs = list(zip(documents, digests, strict=True))
    train = [text for text, digest in pairs if digest not in held_out]
    return train, [text for text, digest in pairs if digest in held_out]


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: any text comes back from its tokens unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(documents, TOKENIZER_CHARACTERS), trainer)
    return tokenizer


def _first_characters(documents: Iterable[str], num_characters: int) -> Iterator[str]:
    for text in documents:
        if num_characters <= 0:
            return
        yield text[:num_characters]
        num_characters -= len(text)


def _write(folder: Path, split: Split, documents: list[str], tokenizer: Tokenizer) -> None:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    # Text that spells the end-of-text token is text: only the end of a document may become it.
    tokenizer.encode_special_tokens = True
    pieces, starts, end = [], [0], np.array([END_OF_TEXT_ID], dtype)
    for first in range(0, len(documents), 64):
        for encoding in tokenizer.encode_batch_fast(documents[first : first + 64]):
            pieces += [np.array(encoding.ids, dtype), end]
            starts.append(starts[-1] + len(encoding.ids) + 1)
    np.save(folder / f"{split}.npy", np.concatenate(pieces) if pieces else end[:0])
    np.save(folder / f"{split}_starts.npy", np.array(starts, np.int64))
