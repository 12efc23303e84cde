"""Documents to train on: files of the user, or what every Python installation brings along."""

import hashlib
import itertools
import runpy
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENT_SEPARATOR = "<|endoftext|>"
"""A line of its own in a .txt file that ends one document and starts the next."""

SUFFIXES = (".txt", ".jsonl", ".parquet")

STANDARD_LIBRARY_BYTES = 2_500_000
"""Cap on the source files of the default corpus: with the language reference about a million tokens, made in
seconds on one core."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from; ``files=None`` is Python's own reference and library, no download."""

    files: Sequence[Path] | None = None
    text_column: str = "text"
    """The column of .jsonl and .parquet files."""
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"max_documents({self.max_documents}) must be at least 1, or None for all of them.")
        if self.files is None:
            return
        for path in self.files:
            if path.suffix not in SUFFIXES:
                raise ValueError(
                    f"files: {str(path)!r} ends in {path.suffix!r}, not in one of {', '.join(SUFFIXES)}. "
                    "Convert it, or rename it if it is one of these."
                )
            if not path.is_file():
                raise ValueError(f"files: {str(path)!r} is not a file. Check the path; folders are not searched.")
        if not any(path.stat().st_size for path in self.files):
            raise ValueError(
                f"files({[str(path) for path in self.files]}) hold no text. Give at least one file that is "
                "not empty, or files=None for the default corpus."
            )

    def digest(self) -> str:
        """A hash of everything that decides the documents: the bytes of the files, and these options."""
        paths = _standard_library_files() if self.files is None else self.files
        total = hashlib.sha256(repr((self.text_column, self.max_documents)).encode())
        for path in paths:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def documents(self) -> Iterator[str]:
        """Each document that holds more than white space, in a fixed order."""
        if self.files is None:
            found = _standard_library_documents()
        else:
            found = itertools.chain.from_iterable(_read(path, self.text_column) for path in self.files)
        return itertools.islice((text for text in found if text.strip()), self.max_documents)


def _read(path: Path, text_column: str) -> Iterator[str]:
    if path.suffix == ".txt":
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from text.split(f"\n{DOCUMENT_SEPARATOR}\n")
        return
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Reading {path.name} needs datasets: pip install 'lightning-moe-strategy[data]'."
        ) from error
    kind = "json" if path.suffix == ".jsonl" else "parquet"
    for row in load_dataset(kind, data_files=str(path), split="train", streaming=True):
        if not isinstance(row.get(text_column), str):
            raise ValueError(
                f"text_column({text_column!r}) is not a column of text in {path.name}. Name one of {sorted(row)}."
            )
        yield row[text_column]


def _standard_library_documents() -> Iterator[str]:
    for path in _standard_library_files():
        if path.parent.name == "pydoc_data":
            yield from runpy.run_path(str(path))["topics"].values()
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def _standard_library_files() -> list[Path]:
    """The language reference, then source files in a mixed but fixed order until the cap is reached."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
    sources = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    sources.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    taken, total_bytes = [root / "pydoc_data" / "topics.py"], 0
    for path in sources:
        total_bytes += path.stat().st_size
        if total_bytes > STANDARD_LIBRARY_BYTES:
            break
        taken.append(path)
    return taken
