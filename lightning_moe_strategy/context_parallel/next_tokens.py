"""The next tokens of a sequence that is spread over the cp ranks: each segment reads on in the one that follows it.

Every rank gathers the first tokens of all segments, as many as are read ahead: ``2 * cp * distance`` under a zig-zag
layout, however long the sequence is. A segment that is shorter than that is gathered whole.

Shapes: B batch, L tokens of this rank, W first tokens of all segments.
"""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.document_parts import check_documents
from lightning_moe_strategy.context_parallel.gather import gather_sequence
from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout
from lightning_moe_strategy.context_parallel.scope import LocalSequence
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.next_tokens import check_next_tokens, keep_where


def next_tokens_of_sequence(
    x_BL: Tensor,
    distance: int,
    fill: float,
    *,
    sequence: LocalSequence,
    group: AnyGroup,
    documents: Documents = ONE_DOCUMENT,
) -> Tensor:
    """``next_tokens`` of this rank's tokens [B, L, ...], wherever those are; the gradient goes back to their rank.

    Padding and the layout's dummies are past the end of their document, and get ``fill`` themselves.
    """
    check_next_tokens(x_BL, distance)
    check_documents(documents, x_BL.shape[0])
    local = sequence.layout.for_local_length(x_BL.shape[1])
    num_dummies = local.tail_tokens_per_rank
    real = local.for_local_length(local.tokens_per_rank - num_dummies)
    owned = real.segments[group.rank()]
    pieces = torch.split(x_BL, [*(segment.length for segment in owned), num_dummies], 1)
    # Split and not sliced: the gradient of many slices would be as many whole tensors of zeros.
    cut = [torch.split(piece, _cut(segment, distance), 1) for piece, segment in zip(pieces[:-1], owned, strict=True)]
    heads_layout, place_after = _heads(real, distance)
    heads_BW = gather_sequence(torch.cat([head for head, _ in cut], 1), 1, heads_layout, group)
    past_end = x_BL.new_full((x_BL.shape[0], distance, *x_BL.shape[2:]), fill)
    read = []
    for segment, (_, rest) in zip(owned, cut, strict=True):
        place = place_after[segment.end]
        following = torch.cat([heads_BW[:, place : place + distance], past_end], 1)
        read += [rest, following[:, max(0, distance - segment.length) : distance]]
    moved_BL = torch.cat([*read, torch.full_like(pieces[-1], fill)], 1)
    goes_on_BL = _goes_on(sequence, real, group.rank(), distance, documents)
    if goes_on_BL is None:
        return moved_BL
    goes_on_BL = F.pad(goes_on_BL, (0, num_dummies))
    return keep_where(goes_on_BL.to(x_BL.device), moved_BL, fill)


def _cut(segment: Segment, distance: int) -> list[int]:
    """Tokens that the segment before reads, and those after them."""
    num_read = min(distance, segment.length)
    return [num_read, segment.length - num_read]


def _heads(layout: SequenceLayout, distance: int) -> tuple[SequenceLayout, dict[int, int]]:
    """The first tokens of all segments as a sequence of their own, and where in it a reader goes on who has come to
    the end of a segment.

    In natural order, what stands there are the ``distance`` tokens that follow: a head that is shorter is a whole
    segment, and the next one goes on.
    """
    in_order = sorted((segment for owned in layout.segments for segment in owned), key=lambda segment: segment.start)
    places = list(accumulate((_cut(segment, distance)[0] for segment in in_order), initial=0))
    place_of = {segment.start: place for segment, place in zip(in_order, places, strict=False)}
    heads = tuple(
        tuple(Segment(place_of[segment.start], _cut(segment, distance)[0]) for segment in owned)
        for owned in layout.segments
    )
    return SequenceLayout(segments=heads), place_of | {in_order[-1].end: places[-1]}


def _goes_on(
    sequence: LocalSequence, layout: SequenceLayout, rank: int, distance: int, documents: Documents
) -> Tensor | None:
    """Whether the document of each token goes on for ``distance`` tokens: bool [B or 1, L]; None where the end of the
    whole sequence is all that has to be seen to."""
    has_padding = sequence.is_token_P is not None or sequence.num_tokens < layout.num_tokens
    if documents == ONE_DOCUMENT and not has_padding:
        return None
    ids_L = layout.token_ids(rank)
    end = layout.num_tokens if sequence.is_token_P is not None else sequence.num_tokens
    read_L = ids_L + distance
    rows = []
    for starts in documents:
        ends = torch.tensor([*(start for start in starts[1:] if start < end), end])
        rows.append(read_L < ends[torch.bucketize(ids_L, ends, right=True).clamp(max=len(ends) - 1)])
    goes_on_BL = torch.stack(rows)
    if sequence.is_token_P is None:
        return goes_on_BL
    return goes_on_BL & sequence.is_token_P[read_L.clamp(max=end - 1)]
