"""Keys that a window needs: each segment's own, and the last ones of the segment before it.

Instead of the whole sequence, every rank gathers the tails of all segments: ``2 * cp * (window - 1)`` tokens under a
zig-zag layout, however long the sequence is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_moe_strategy.collectives import AnyGroup, all_gather_in_steps, reduce_scatter_in_steps
from lightning_moe_strategy.context_parallel.gather import as_delivered
from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout


class Halo:
    """Where the tokens before each segment of a rank come from. Dummies at the tail of a sequence have none."""

    def __init__(self, layout: SequenceLayout, group: AnyGroup, num_tokens: int) -> None:
        """``num_tokens`` before each segment; see ``fits``."""
        self.group, self.num_tokens = group, num_tokens
        self.dummies = layout.tail_tokens_per_rank
        self.owned: Sequence[Segment] = _real(layout)[group.rank()]
        tails = [segment.end for owned in _real(as_delivered(layout, group)) for segment in owned]
        place = {end: index * num_tokens for index, end in enumerate(tails)}
        self.sources = [place[segment.start] if segment.start else None for segment in self.owned]
        """Per segment, where the tail of the one before it lies among those of all ranks; None for the first."""

    @staticmethod
    def fits(layout: SequenceLayout, num_tokens: int) -> bool:
        """Whether every segment is long enough to be all that the next one needs."""
        return num_tokens <= min(segment.length for owned in _real(layout) for segment in owned)

    @property
    def first_keys(self) -> list[int]:
        """Per segment of this rank, dummies included, the place of its first own token in what ``gather`` returns."""
        places, first = [], 0
        for segment, source in zip(self.owned, self.sources, strict=True):
            first += 0 if source is None else self.num_tokens
            places.append(first)
            first += segment.length
        return [*places, *range(first, first + self.dummies)]

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Own tokens along ``dim``, those of each segment behind its halo. Outside of autograd."""
        if not self.num_tokens:
            return x
        own = self._pieces(x.movedim(dim, 0))
        tails = torch.cat([piece[piece.shape[0] - self.num_tokens :] for piece in own[: len(self.owned)]])
        everyones = all_gather_in_steps(tails, self.group)
        pieces: list[Tensor] = []
        for piece, source in zip(own, [*self.sources, *[None] * self.dummies], strict=True):
            pieces += [piece] if source is None else [everyones[source : source + self.num_tokens], piece]
        return torch.cat(pieces).movedim(0, dim)

    def reduce(self, grad: Tensor, dim: int) -> Tensor:
        """The way back: gradients of what ``gather`` returned, those of the halos summed where their tokens are.

        ``grad`` is at least FP32, because ranks are summed, and is written to.
        """
        if not self.num_tokens:
            return grad
        grad = grad.movedim(dim, 0)
        everyones = grad.new_zeros((self.group.size() * len(self.owned) * self.num_tokens, *grad.shape[1:]))
        own = []
        for segment, source, first in zip(self.owned, self.sources, self.first_keys, strict=False):
            if source is not None:
                everyones[source : source + self.num_tokens] = grad[first - self.num_tokens : first]
            own.append(grad[first : first + segment.length])
        tails = reduce_scatter_in_steps(everyones, self.group).chunk(len(own))
        for piece, tail in zip(own, tails, strict=True):
            piece[piece.shape[0] - self.num_tokens :] += tail
        return torch.cat([*own, grad[grad.shape[0] - self.dummies :]]).movedim(0, dim)

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        return torch.split(x, [*(segment.length for segment in self.owned), *[1] * self.dummies])


def _real(layout: SequenceLayout) -> Sequence[Sequence[Segment]]:
    return [owned[: len(owned) - layout.tail_tokens_per_rank] for owned in layout.segments]
