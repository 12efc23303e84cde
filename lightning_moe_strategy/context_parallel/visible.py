"""Which keys the queries of a segment see, cut into pieces that a kernel without a mask can compute.

Causal attention inside documents, with or without a window, is a set of rectangles and triangles. A triangle whose
i-th query sees the keys up to the i-th is what every kernel calls causal; one whose i-th query sees the keys from the
i-th on is the same with queries and keys turned round.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_moe_strategy.context_parallel.layout import Segment

Shape = Literal["all", "up to own", "from own"]
"""Of a piece: every query sees every key; the i-th query the keys 0 ... i; or the keys i, i + 1, ..."""

Documents = tuple[tuple[int, ...], ...]
"""Starts of the documents in each sequence of a batch, 0 first; one tuple alone holds for all of them."""

ONE_DOCUMENT: Documents = ((0,),)


@dataclass(frozen=True, order=True)
class Piece:
    """Queries and keys by their positions in the sequence, end excluded."""

    shape: Shape
    queries: tuple[int, int]
    keys: tuple[int, int]
    sequence: int | None = None
    """Of the batch; None is all of them."""

    @property
    def size(self) -> tuple[Shape, int, int]:
        """Pieces of one size can be computed in one call."""
        return self.shape, self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]


def pieces_of_batch(segment: Segment, documents: Documents, window: int | None) -> list[Piece]:
    """The pieces of a segment in every sequence of a batch; own tokens first: no query is left without a key."""
    if len(documents) == 1:
        found = [*visible_pieces(segment, documents[0], window)]
    else:
        found = [
            Piece(piece.shape, piece.queries, piece.keys, sequence)
            for sequence, starts in enumerate(documents)
            for piece in visible_pieces(segment, starts, window)
        ]
    return sorted(found, key=lambda piece: piece.queries != piece.keys)


def visible_pieces(segment: Segment, document_starts: Sequence[int], window: int | None) -> Iterator[Piece]:
    """Every (query, key) of the segment exactly once: keys up to the query, of its document, among the last ``window``.

    ``window`` counts the query's own key, as ``sliding_window`` of a Hugging Face configuration does.
    """
    first = bisect_right(document_starts, segment.start) - 1
    for index in range(first, len(document_starts)):
        document = document_starts[index]
        if document >= segment.end:
            return
        end = document_starts[index + 1] if index + 1 < len(document_starts) else segment.end
        start, end = max(segment.start, document), min(segment.end, end)
        if window is None or window >= end - document:
            yield Piece("up to own", (start, end), (start, end))
            if document < start:
                yield Piece("all", (start, end), (document, start))
        else:
            for block in range(start, end, window):
                yield from _banded(block, min(block + window, end), document, window)


def _banded(start: int, end: int, document: int, window: int) -> Iterator[Piece]:
    """Queries ``start ... end - 1``, at most a window of them."""
    yield Piece("up to own", (start, end), (start, end))
    oldest = max(document, start - window + 1)
    # What the last query sees of the keys before the block, the others see too.
    seen_by_all = max(oldest, end - window)
    if seen_by_all < start:
        yield Piece("all", (start, end), (seen_by_all, start))
    if oldest < seen_by_all:
        # Where the document begins inside the first query's window, several queries still see its first key.
        leaving = start + oldest - (start - window + 1)
        if leaving > start:
            yield Piece("all", (start, leaving), (oldest, seen_by_all))
        yield Piece("from own", (leaving, leaving + seen_by_all - oldest), (oldest, seen_by_all))
