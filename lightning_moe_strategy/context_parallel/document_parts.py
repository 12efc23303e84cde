"""A rank's segments cut where documents start: what an op that runs along the tokens computes from one state on.

A part is one kernel call; parts of one size share it, stacked along the batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from lightning_moe_strategy.context_parallel.layout import Segment
from lightning_moe_strategy.context_parallel.visible import Documents


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one document in one segment."""

    row: int | None
    """Of the batch; None is all of them."""
    segment: int
    """Place of the segment among the rank's own."""
    offset: int
    """Of the first token in its segment. Whatever is behind 0 starts a document."""
    length: int
    tokens_before: int
    """Tokens of the document before the part: 0 where the document starts with it."""

    @property
    def rows(self) -> slice:
        return slice(None) if self.row is None else slice(self.row, self.row + 1)


def parts_of(segments: Sequence[Segment], documents: Documents) -> list[Part]:
    """Every token of the segments once, row by row and in the order in which the rank holds them."""
    parts = []
    for row, starts in enumerate(documents):
        for index, segment in enumerate(segments):
            first = bisect_right(starts, segment.start)
            inside = starts[first : bisect_left(starts, segment.end)]
            tokens_before = segment.start - starts[first - 1]
            for start, end in pairwise([segment.start, *inside, segment.end]):
                offset = start - segment.start
                parts.append(
                    Part(
                        row=None if len(documents) == 1 else row,
                        segment=index,
                        offset=offset,
                        length=end - start,
                        tokens_before=0 if offset else tokens_before,
                    )
                )
    return parts


def first_tokens(segments: Sequence[Segment]) -> list[int]:
    """Place of each segment's first token among those of the rank."""
    return list(accumulate((segment.length for segment in segments[:-1]), initial=0))


def of_one_size(parts: Iterable[Part], size: Callable[[Part], tuple[int, ...]]) -> Iterator[list[Part]]:
    """Parts that share a kernel call."""
    return (list(same) for _, same in groupby(sorted(parts, key=size), key=size))


def join(outputs: Mapping[Part, Tensor], parts: Sequence[Part], dim: int, num_dummies: int) -> Tensor:
    """Outputs of all parts, along the rows and along the tokens (``dim``); zeros for the dummies at the end.

    Nobody looks at a dummy, but what a model makes of it must be finite.
    """
    rows = [torch.cat([outputs[part] for part in same], dim) for _, same in groupby(parts, key=lambda part: part.row)]
    joined = torch.cat(rows)
    if not num_dummies:
        return joined
    shape = list(joined.shape)
    shape[dim] = num_dummies
    return torch.cat([joined, joined.new_zeros(shape)], dim)


def check_documents(documents: Documents, batch_size: int) -> None:
    """ValueError unless there are documents for every sequence of the batch, or for all at once."""
    if len(documents) not in (1, batch_size):
        raise ValueError(f"documents are given for {len(documents)} sequences, but the batch has {batch_size}.")
