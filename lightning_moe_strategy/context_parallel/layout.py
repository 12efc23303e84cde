"""Which tokens of a sequence each cp rank owns.

A layout is a list of owned segments per rank and nothing else: attention walks the segments and never asks
how they were chosen. *Natural order* is the order of the sequence; *rank-major order* is rank 0's tokens,
then rank 1's, and so on: the order in which an all-gather delivers them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens: ``start``, ``start + 1``, ... ``end - 1``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The segments that each cp rank owns, in the order in which the rank holds them.

    Every token has one owner and every rank owns equally many.
    """

    segments: tuple[tuple[Segment, ...], ...]
    """Per rank. The rank holds them one after another, in this order."""

    tail_tokens_per_rank: int = 0
    """Dummies that each rank holds behind its own tokens; they stand at the end of the whole sequence."""

    def __post_init__(self) -> None:
        lengths = [sum(segment.length for segment in owned) for owned in self.segments]
        if len(set(lengths)) != 1:
            raise ValueError(f"segments give the ranks {lengths} tokens; every rank must own equally many.")
        next_token = 0
        for segment in sorted((s for owned in self.segments for s in owned), key=lambda s: s.start):
            if segment.start != next_token or segment.length < 1:
                raise ValueError(
                    f"{segment} does not start at token {next_token}, where the segment before it ends. "
                    "Segments must cover the sequence without gap or overlap."
                )
            next_token = segment.end
        # torch.compile cannot take the lock of a cached property: these are there before it asks for them.
        _ = self.num_tokens, self.tail_tokens_per_rank and self._without_tail

    @property
    def degree(self) -> int:
        """The number of cp ranks."""
        return len(self.segments)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence, dummies included."""
        return self.tokens_per_rank * self.degree

    @cached_property
    def tokens_per_rank(self) -> int:
        return sum(segment.length for segment in self.segments[0])

    def token_ids(self, rank: int) -> Tensor:
        """Natural positions of what ``rank`` holds, in the order it holds them: int64 [tokens_per_rank]."""
        return torch.cat([torch.arange(segment.start, segment.end) for segment in self.segments[rank]])

    def rank_major_token_ids(self) -> Tensor:
        """Natural positions in rank-major order: int64 [num_tokens]."""
        return torch.cat([self.token_ids(rank) for rank in range(self.degree)])

    def num_owned_before(self, end: int, rank: int) -> int:
        """How many of the tokens 0 ... ``end - 1`` belong to ``rank``."""
        return sum(max(0, min(segment.end, end) - segment.start) for segment in self.segments[rank])

    def with_tail_token(self) -> "SequenceLayout":
        """This layout and one more token per rank, a dummy at the end of the whole sequence.

        It stands behind every real token, so under causal attention no real token sees it.
        """
        tail = [Segment(self.num_tokens + rank, 1) for rank in range(self.degree)]
        segments = tuple((*owned, dummy) for owned, dummy in zip(self.segments, tail, strict=True))
        return replace(self, segments=segments, tail_tokens_per_rank=self.tail_tokens_per_rank + 1)

    def for_local_length(self, local_length: int) -> "SequenceLayout":
        """The layout of a tensor with ``local_length`` tokens on this rank: this one, or it without dummies.

        ValueError for any other length.
        """
        if local_length == self.tokens_per_rank:
            return self
        without = self.tokens_per_rank - self.tail_tokens_per_rank
        if local_length == without:
            return self._without_tail
        allowed = f"{without} or {self.tokens_per_rank}" if self.tail_tokens_per_rank else f"{without}"
        raise ValueError(
            f"A tensor has {local_length} tokens along its sequence dim, but each of {self.degree} cp ranks "
            f"holds {allowed}. Pass the tokens of the batch as they came, neither cut nor extended."
        )

    def in_order(self, ranks: tuple[int, ...]) -> "SequenceLayout":
        """This layout with its ranks in another order: that of a gather which does not deliver rank 0 first."""
        if ranks not in self._reordered:
            self._reordered[ranks] = replace(self, segments=tuple(self.segments[rank] for rank in ranks))
        return self._reordered[ranks]

    @cached_property
    def _reordered(self) -> "dict[tuple[int, ...], SequenceLayout]":
        return {}

    @cached_property
    def _without_tail(self) -> "SequenceLayout":
        num_real = len(self.segments[0]) - self.tail_tokens_per_rank
        return SequenceLayout(segments=tuple(owned[:num_real] for owned in self.segments))

    @cached_property
    def natural_in_rank_major(self) -> tuple[Segment, ...]:
        """Where the sequence lies in a rank-major tensor: pieces that, concatenated, are in natural order."""
        pieces = []
        for rank, owned in enumerate(self.segments):
            offset = rank * self.tokens_per_rank
            for segment in owned:
                pieces.append((segment.start, Segment(offset, segment.length)))
                offset += segment.length
        return _joined(piece for _, piece in sorted(pieces, key=lambda item: item[0]))

    @cached_property
    def rank_major_in_natural(self) -> tuple[Segment, ...]:
        """The inverse: pieces of a tensor in natural order that, concatenated, are in rank-major order."""
        return _joined(segment for owned in self.segments for segment in owned)


def zigzag(num_tokens: int, degree: int) -> SequenceLayout:
    """Rank r owns the chunks r and ``2 * degree - 1 - r`` of ``2 * degree`` equal ones: equal causal work.

    Chunk i costs ``c * (i * c) + c * (c + 1) / 2`` query-key pairs, so the two chunks of a rank cost
    ``c**2 * (2 * degree - 1) + c * (c + 1)`` together, whatever the rank.
    """
    chunk = _equal_part(num_tokens, 2 * degree, "2 * cp")
    return SequenceLayout(
        segments=tuple(
            (Segment(rank * chunk, chunk), Segment((2 * degree - 1 - rank) * chunk, chunk)) for rank in range(degree)
        )
    )


def contiguous(num_tokens: int, degree: int) -> SequenceLayout:
    """Rank r owns the r-th of ``degree`` equal parts; the last has ``2 - 1 / degree`` times the mean work."""
    part = _equal_part(num_tokens, degree, "cp")
    return SequenceLayout(segments=tuple((Segment(rank * part, part),) for rank in range(degree)))


def per_document(lengths: Sequence[int], degree: int) -> SequenceLayout:
    """Every document zig-zag by itself, one after another: equal causal work inside each of them."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    owned: list[list[Segment]] = [[] for _ in range(degree)]
    for start, length in zip(starts, lengths, strict=True):
        for segments, of_rank in zip(owned, zigzag(length, degree).segments, strict=True):
            segments += [Segment(start + segment.start, segment.length) for segment in of_rank]
    return SequenceLayout(segments=tuple(tuple(segments) for segments in owned))


def take_segments(x: Tensor, dim: int, segments: Iterable[Segment]) -> Tensor:
    """The segments of ``x`` along ``dim``, one after another; ``x`` itself when they are all of it."""
    # Slices, not an index tensor: nothing to build or to copy to the device for every layer and micro-batch.
    pieces = tuple(segments)
    if pieces == (Segment(0, x.shape[dim]),):
        return x
    return torch.cat([x.narrow(dim, piece.start, piece.length) for piece in pieces], dim)


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbours that follow each other as one segment."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].end == segment.start:
            joined[-1] = Segment(joined[-1].start, joined[-1].length + segment.length)
        else:
            joined.append(segment)
    return tuple(joined)


def _equal_part(num_tokens: int, parts: int, name: str) -> int:
    if num_tokens < parts or num_tokens % parts:
        raise ValueError(f"num_tokens({num_tokens}) must be a positive multiple of {name}({parts}). Pad the sequence.")
    return num_tokens // parts
