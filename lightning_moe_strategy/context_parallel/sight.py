"""What the queries of one rank see, segment by segment, and where the keys lie.

Shapes: B batch, L tokens of this rank, S tokens that its queries may see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_moe_strategy.context_parallel.layout import Segment
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents, Piece, pieces_of_batch
from lightning_moe_strategy.kernels.attention import AttentionKernelName


@dataclass(frozen=True, kw_only=True)
class Sight:
    segments: Sequence[Segment]
    """Of this rank's queries, in the order it holds them."""
    documents: Documents = ONE_DOCUMENT
    window: int | None = None
    first_keys: Sequence[int] | None = None
    """Per segment, the place of its first own token among the keys; None: keys are those of the whole sequence."""
    kernel: AttentionKernelName = "auto"
    """That looks at them."""

    def parts(self) -> "Iterator[Part]":
        """Each segment with what it sees."""
        first_row = 0
        for index, segment in enumerate(self.segments):
            first_key = segment.start if self.first_keys is None else self.first_keys[index]
            yield Part(segment, first_row, first_key - segment.start, self)
            first_row += segment.length


@dataclass(frozen=True)
class Part:
    """One segment of queries."""

    segment: Segment
    first_row: int
    key_shift: int
    """What is added to a key's position to find its place."""
    sight: Sight

    @property
    def rows(self) -> slice:
        """Its queries among those of the rank."""
        return slice(self.first_row, self.first_row + self.segment.length)

    @cached_property
    def pieces(self) -> list[Piece]:
        return pieces_of_batch(self.segment, self.sight.documents, self.sight.window)
