"""The fallback (Ulysses) where neither gathered keys nor states can express attention: whole sequences of some heads.

An all-to-all gives each rank its share of the heads for every token, in natural order and without padding; the user's
own function computes what it always does; a second one brings the rows back. Only where the user asks for it: what
travels grows with the heads, and the heads limit the ranks.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence (T with padding), H heads, D channels, R ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_strategy.collectives import AnyGroup, TwoStepGroup, all_to_all_rows
from lightning_moe_strategy.context_parallel.layout import SequenceLayout, take_segments
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence

_WRAPPER = "_ulysses_forward"


def adapt_by_heads(module: nn.Module, name: str, block: str, cp: ContextParallel) -> None:
    """Let ``module``, whose forward takes query, key and value [B, H, L, D], see whole sequences of some heads.

    A second call only hands over the new names and ``cp``.
    """
    wrapper = module.__dict__.get(_WRAPPER)
    if wrapper is None:
        wrapper = module.__dict__[_WRAPPER] = module.__dict__["forward"] = _ByHeads(module.forward)
    wrapper.name, wrapper.block, wrapper.cp = name, block, cp


class _ByHeads:
    """The forward of a module that was declared."""

    name: str
    block: str
    cp: ContextParallel

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.cp.is_off:
            return self.forward(*args, **kwargs)
        self.cp.note_attention(self.block)
        return attend_by_heads(self.forward, *args, name=self.name, cp=self.cp, **kwargs)


def attend_by_heads(
    function: Callable[..., Tensor], query_BHLD: Tensor, *args: Any, name: str, cp: ContextParallel, **kwargs: Any
) -> Tensor:
    """``function(query, *args, **kwargs)`` of the whole sequence for this rank's share of the heads: [B, H, L, E].

    Tensors [B, heads, L, ...] among the arguments are exchanged like the query; key heads that are fewer than ranks
    are repeated. Everything else is handed over as it is, so a mask or bias must be that of the whole sequence.

    Raises:
        ValueError: naming ``name``, when the ranks do not divide the heads, or an argument has this rank's tokens in
            another place.
    """
    exchange = _Exchange(cp.current, cp.group, query_BHLD.shape[2], name)
    exchange.check_query(query_BHLD)
    query = exchange.to_sequence(query_BHLD)
    args = tuple(exchange.argument(argument) for argument in args)
    kwargs = {key: exchange.argument(value) for key, value in kwargs.items()}
    with _whole_sequence(cp):
        out = function(query, *args, **kwargs)
    if not isinstance(out, Tensor) or out.dim() != 4 or out.shape[:3] != query.shape[:3]:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"{name} returned {shape} for a query {tuple(query.shape)}; under Ulysses it must return [B, heads, "
            "tokens, channels] of the heads it was given. Parameters and biases of all heads do not fit a part of them."
        )
    return exchange.to_heads(out)


@contextmanager
def _whole_sequence(cp: ContextParallel) -> Iterator[None]:
    """What runs inside has every token: nothing is to be taken over, and any attention is right."""
    guarded = nullcontext() if cp.guard is None else cp.guard.token_wise_block()
    with cp.off(), guarded:
        yield


@dataclass(frozen=True)
class _Exchange:
    """Between this rank's tokens of all heads and all tokens of this rank's heads."""

    sequence: LocalSequence
    group: AnyGroup
    num_local: int
    name: str

    @property
    def degree(self) -> int:
        return self.group.size()

    def check_query(self, query_BHLD: Tensor) -> None:
        if query_BHLD.dim() != 4 or query_BHLD.shape[1] % self.degree:
            raise ValueError(
                f"{self.name} has a query {tuple(query_BHLD.shape)}: Ulysses splits [B, heads, tokens, channels] by "
                f"heads, so cp({self.degree}) must divide them. Choose a cp that divides, or causal attention through "
                "F.scaled_dot_product_attention, which has no such limit."
            )

    def argument(self, value: Any) -> Any:
        """What the function is given for one argument."""
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 4 and value.shape[2] == self.num_local:
            return self.to_sequence(self._with_a_head_for_each_rank(value))
        if self.num_local in value.shape[-2:]:
            raise ValueError(
                f"{self.name} is given a tensor {tuple(value.shape)} with this rank's {self.num_local} tokens. Under "
                f"Ulysses it sees all {self._num_seen}: pass [B, heads, tokens, channels], which are exchanged, or a "
                "mask of the whole sequence."
            )
        return value

    def to_sequence(self, x_BHLD: Tensor) -> Tensor:
        """[B, H / R, S, D]"""
        pieces_RBHLD = torch.stack(x_BHLD.chunk(self.degree, 1))
        rank_major_BHTD = self._exchanged(pieces_RBHLD).movedim(0, 2).flatten(2, 3)
        natural_BHTD = take_segments(rank_major_BHTD, 2, self._layout.natural_in_rank_major)
        return self._without_padding(natural_BHTD)

    def to_heads(self, x_BHSE: Tensor) -> Tensor:
        """[B, H, L, E]; zeros where nobody's token is."""
        rank_major_BHTE = take_segments(self._with_padding(x_BHSE), 2, self._layout.rank_major_in_natural)
        pieces_RBHLE = torch.stack(rank_major_BHTE.chunk(self.degree, 2))
        return self._exchanged(pieces_RBHLE).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, pieces: Tensor) -> Tensor:
        """Piece r of dim 0 goes to rank r."""
        whole = self.group.whole if isinstance(self.group, TwoStepGroup) else self.group
        return all_to_all_rows(pieces, [1] * self.degree, [1] * self.degree, whole)

    def _with_a_head_for_each_rank(self, key_BGLD: Tensor) -> Tensor:
        num_heads = key_BGLD.shape[1]
        if num_heads % self.degree == 0:
            return key_BGLD
        if self.degree % num_heads:
            raise ValueError(
                f"{self.name} has {num_heads} key heads; under Ulysses cp({self.degree}) must divide them or be a "
                "multiple of them, so that a rank's query heads find theirs. Choose another cp."
            )
        return key_BGLD.repeat_interleave(self.degree // num_heads, 1)

    @property
    def _layout(self) -> SequenceLayout:
        return self.sequence.layout.for_local_length(self.num_local)

    @property
    def _num_seen(self) -> int:
        return self.sequence.num_tokens

    def _without_padding(self, x_BHTD: Tensor) -> Tensor:
        kept = self._kept(x_BHTD.device)
        return x_BHTD.narrow(2, 0, self._num_seen) if kept is None else x_BHTD.index_select(2, kept)

    def _with_padding(self, x_BHSE: Tensor) -> Tensor:
        kept, num_padded = self._kept(x_BHSE.device), self._layout.num_tokens
        if kept is None:
            return F.pad(x_BHSE, (0, 0, 0, num_padded - self._num_seen))
        return x_BHSE.new_zeros((*x_BHSE.shape[:2], num_padded, x_BHSE.shape[3])).index_copy(2, kept, x_BHSE)

    def _kept(self, device: torch.device) -> Tensor | None:
        """Places of tokens that are no padding, where that does not stand at the end alone."""
        is_token_P = self.sequence.is_token_P
        return None if is_token_P is None else is_token_P.nonzero()[:, 0].to(device)
