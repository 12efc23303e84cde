"""Linear attention over a sequence that is spread over the cp ranks, in whatever layout: no token is moved.

The state behind a segment is affine in the state before it, ``M @ state + b``, and M and b depend on the segment's
tokens alone: every segment is a rank of its own. A first pass of the unchanged kernel finds M and b, one all-gather
makes them known to every rank, and a second pass starts each segment from the state before it. What a segment sends in
each direction, D * (D + E) numbers of FP32 per head, does not grow with the sequence: 4.2 MB for 32 heads of 128 x 128.

Two passes, and not one whose output is corrected afterwards: nothing is rounded that one process would not round.

Shapes: B batch, L tokens of this rank, G key heads, H value heads (G divides H), D channels of a key, E channels of a
value, N segments of this rank, X = E + D.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy.collectives import AnyGroup, all_gather_in_steps
from lightning_moe_strategy.context_parallel.document_parts import (
    Part,
    check_documents,
    first_tokens,
    join,
    of_one_size,
    parts_of,
)
from lightning_moe_strategy.context_parallel.gather import as_delivered
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents


class Scan(Protocol):
    """An op along the tokens whose states [B, H, D, E] are affine in its initial one: a gated delta rule, for one.

    Called as flash-linear-attention and transformers call theirs; gates, [B, tokens, H, ...], go by name. Returns the
    output [B, tokens, H, E] and the state behind the last token.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        /,
        *,
        initial_state: Tensor,
        output_final_state: bool,
        **gates: Tensor,
    ) -> tuple[Tensor, Tensor | None]: ...


def affine_over_chunks(
    scan: Scan,
    query_BLGD: Tensor,
    key_BLGD: Tensor,
    value_BLHE: Tensor,
    *,
    gates: Mapping[str, Tensor],
    layout: SequenceLayout,
    group: AnyGroup,
    documents: Documents = ONE_DOCUMENT,
) -> Tensor:
    """Output [B, L, H, E] of ``scan`` over every token of a document up to the own one.

    No state passes the start of a document. States are gathered, combined and differentiated in FP32 (FP64 stays FP64).
    The layout's dummies get zeros: nobody looks at them, but what a model makes of them must be finite.
    """
    _check(query_BLGD, key_BLGD, value_BLHE, gates, documents)
    local = layout.for_local_length(query_BLGD.shape[1])
    num_dummies = local.tail_tokens_per_rank
    real = local.for_local_length(local.tokens_per_rank - num_dummies)
    segments = real.segments[group.rank()]
    parts = parts_of(segments, documents)
    tokens = _Tokens(query_BLGD, key_BLGD, value_BLHE, gates, first_tokens(segments))

    affine_NBHDX = _affine_maps(scan, tokens, parts)
    before_NBHDE: Tensor = _StatesBefore.apply(affine_NBHDX, _Chain.of(real, group, documents))  # type: ignore[no-untyped-call]

    def initial_state(part: Part) -> Tensor:
        state = before_NBHDE[part.segment, part.rows]
        # Where a document starts with a segment that state is zero, but is taken: then all ranks gather its gradient.
        return torch.zeros_like(state) if part.offset else state

    outputs = {part: output for part, (output, _) in _scanned(scan, tokens, parts, initial_state).items()}
    return join(outputs, parts, 1, num_dummies)


@dataclass(frozen=True)
class _Tokens:
    """This rank's."""

    query_BLGD: Tensor
    key_BLGD: Tensor
    value_BLHE: Tensor
    gates: Mapping[str, Tensor]
    firsts: Sequence[int]
    """Place of each segment's first token."""

    def of(self, parts: Sequence[Part], x: Tensor) -> Tensor:
        """Parts of one size, along the batch."""
        firsts = [self.firsts[part.segment] + part.offset for part in parts]
        return torch.cat([x[part.rows, at : at + part.length] for part, at in zip(parts, firsts, strict=True)])


def _scanned(
    scan: Scan, tokens: _Tokens, parts: Sequence[Part], initial_state: Callable[[Part], Tensor]
) -> dict[Part, tuple[Tensor, Tensor]]:
    """Output and final state of each part."""
    found: dict[Part, tuple[Tensor, Tensor]] = {}
    for same in of_one_size(parts, lambda part: (part.length,)):
        output, state = scan(
            *(tokens.of(same, x) for x in (tokens.query_BLGD, tokens.key_BLGD, tokens.value_BLHE)),
            initial_state=torch.cat([initial_state(part) for part in same]),
            output_final_state=True,
            **{name: tokens.of(same, gate) for name, gate in tokens.gates.items()},
        )
        assert state is not None, "asked for"
        found |= zip(same, zip(output.chunk(len(same)), state.chunk(len(same)), strict=True), strict=True)
    return found


def _affine_maps(scan: Scan, tokens: _Tokens, parts: Sequence[Part]) -> Tensor:
    """What each segment makes of the state before it, [N, B, H, D, X]: b, and M behind it.

    D more channels, whose values are zero, start from the identity and end as M. The last document of a segment is all
    that counts; where that starts inside of the segment, M is not used.
    """
    value = tokens.value_BLHE
    channels, value_channels, num_heads = tokens.key_BLGD.shape[-1], value.shape[-1], value.shape[2]
    wide = torch.promote_types(value.dtype, torch.float32)
    initial_DX = F.pad(torch.eye(channels, dtype=wide, device=value.device), (value_channels, 0))
    with_room = _Tokens(tokens.query_BLGD, tokens.key_BLGD, F.pad(value, (0, channels)), tokens.gates, tokens.firsts)
    last = [*{(part.row, part.segment): part for part in parts}.values()]
    found = _scanned(scan, with_room, last, lambda part: initial_DX.repeat(value[part.rows].shape[0], num_heads, 1, 1))
    return torch.stack(
        [
            torch.cat([found[part][1].to(wide) for part in last if part.segment == segment])
            for segment in range(len(tokens.firsts))
        ]
    )


@dataclass(frozen=True)
class _Link:
    """One segment in the chain of all."""

    place: int
    """Where a gather delivers it."""
    own: int | None
    """Its place among this rank's own."""
    starts: Sequence[bool]
    """Whether a document starts with it, per row of the batch; one for all rows alike."""
    cuts: Sequence[bool]
    """Whether a document starts anywhere in it: its state is then none of the state before."""


@dataclass(frozen=True)
class _Chain:
    """All segments in natural order."""

    group: AnyGroup
    links: Sequence[_Link]

    @classmethod
    def of(cls, layout: SequenceLayout, group: AnyGroup, documents: Documents) -> "_Chain":
        delivered = [segment for owned in as_delivered(layout, group).segments for segment in owned]
        own = {segment: index for index, segment in enumerate(layout.segments[group.rank()])}
        links = []
        for place, segment in sorted(enumerate(delivered), key=lambda item: item[1].start):
            nexts = [next(iter(starts[bisect_left(starts, segment.start) :]), segment.end) for starts in documents]
            links.append(
                _Link(
                    place=place,
                    own=own.get(segment),
                    starts=[start == segment.start for start in nexts],
                    cuts=[start < segment.end for start in nexts],
                )
            )
        return cls(group, links)


class _StatesBefore(torch.autograd.Function):
    """The state before each segment of this rank, [N, B, H, D, E], from what every segment makes of one.

    The gradient runs through the chain the other way round: what it needs of the other ranks is their states' gradients
    and M, again one gather.
    """

    @staticmethod
    def forward(ctx: Any, affine_NBHDX: Tensor, chain: _Chain) -> Tensor:
        channels = affine_NBHDX.shape[-2]
        sizes = [affine_NBHDX.shape[-1] - channels, channels]
        everyones = all_gather_in_steps(affine_NBHDX, chain.group)
        state = affine_NBHDX.new_zeros((*affine_NBHDX.shape[1:-1], sizes[0]))
        before = [state] * len(affine_NBHDX)
        with _full_precision(affine_NBHDX):
            for link in chain.links:
                if link.own is not None:
                    before[link.own] = _cleared(state, link.starts)
                added, transition = torch.split(everyones[link.place], sizes, -1)
                state = added + _cleared(transition @ state, link.cuts)
        before_NBHDE = torch.stack(before)
        ctx.save_for_backward(affine_NBHDX[..., sizes[0] :], before_NBHDE)
        ctx.chain, ctx.sizes = chain, sizes
        return before_NBHDE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_before_NBHDE: Tensor) -> tuple[Tensor, None]:
        transition_NBHDD, before_NBHDE = ctx.saved_tensors
        everyones = all_gather_in_steps(torch.cat([grad_before_NBHDE, transition_NBHDD], -1), ctx.chain.group)
        # Of the state behind a segment, which is added as b is.
        grad_state = torch.zeros_like(before_NBHDE[0])
        grads = [grad_state] * len(before_NBHDE)
        with _full_precision(grad_state):
            for link in reversed(ctx.chain.links):
                if link.own is not None:
                    grad_transition = _cleared(grad_state @ before_NBHDE[link.own].mT, link.cuts)
                    grads[link.own] = torch.cat([grad_state, grad_transition], -1)
                grad, transition = torch.split(everyones[link.place], ctx.sizes, -1)
                grad_state = _cleared(transition.mT @ grad_state, link.cuts) + _cleared(grad, link.starts)
        return torch.stack(grads), None


def _cleared(x_BHDE: Tensor, rows: Sequence[bool]) -> Tensor:
    """Zeros in these rows. Not a product with zero: a state that overflowed must stay in its document."""
    if not any(rows):
        return x_BHDE
    if all(rows):
        return torch.zeros_like(x_BHDE)
    return torch.cat(
        [torch.zeros_like(x) if clear else x for x, clear in zip(torch.split(x_BHDE, 1), rows, strict=True)]
    )


def _full_precision(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _check(query: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor], documents: Documents) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    shapes += "".join(f", {name} {tuple(gate.shape)}" for name, gate in gates.items())
    if query.dim() != 4 or query.shape != key.shape or value.dim() != 4 or value.shape[2] % key.shape[2]:
        raise ValueError(
            f"{shapes}: linear attention wants query and key [batch, tokens, key heads, channels] and value [batch, "
            "tokens, heads, channels], where key heads divide heads."
        )
    if any(x.shape[:2] != query.shape[:2] for x in (value, *gates.values())):
        raise ValueError(f"{shapes}: pass this rank's tokens of all of them.")
    check_documents(documents, query.shape[0])
