"""Run a layer's experts on some of every rank's tokens at a time, so that rows in memory have a bound.

However skewed the routing, no row is dropped: a chunk that is 1 / C of the tokens can bring a rank no more than
``P * min(K, L) * T / C`` rows. What a chunk computes is dropped, and made again in its backward pass.

Shapes: T tokens of this rank, t tokens of a chunk, K experts per token, D hidden size, L experts of this rank,
P ranks of the ep group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_strategy._torch_compat import is_same_state, random_state
from lightning_moe_strategy.expert_parallel.dispatch import EPDispatcher
from lightning_moe_strategy.expert_parallel.splits import BoundsPieces, Chunk, Splits

EPChunks = int | Literal["none", "adaptive"]

# Rows of the busiest rank over those of even routing, up to which a layer runs in one piece. A chunk more costs the
# layer's experts a forward and a dispatch more (a quarter of their time), so the usual skew of a trained router must
# not ask for one; GLM-5.2's rows at 1M tokens on 256 GPUs then take 12 GB at most, where even routing takes 8.
BALANCED_MULTIPLE = 1.5

# Below this, rows are not worth a chunk: short batches are skewed by chance alone.
FLOOR_BYTES = 2**28

Run = Callable[[Splits | None, Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]
"""From splits, hidden_tD, expert_ids_tK, weights_tK and the experts' local parameters to y_tD."""


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How the tokens of a layer are cut into chunks. See ``FSDPCPEPStrategy``."""

    chunks: EPChunks = "none"
    max_bytes: int | None = None
    """What rows may take at their most, on any rank; None: no limit, or the default one of ``adaptive``."""

    def __post_init__(self) -> None:
        is_count = isinstance(self.chunks, int) and not isinstance(self.chunks, bool) and self.chunks >= 1
        if not is_count and self.chunks not in ("none", "adaptive"):
            raise ValueError(
                f"ep_chunks({self.chunks!r}) must be 'none', 'adaptive' or a whole number of at least 1: the parts in "
                "which a layer's tokens go through its experts."
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(
                f"ep_chunk_bytes({self.max_bytes}) must be at least 1: bytes of expert rows. Leave it out for the "
                "default."
            )

    @property
    def is_off(self) -> bool:
        """All tokens at once, however many rows they bring, and nobody asked for it."""
        return self.chunks == "none" and self.max_bytes is None

    @property
    def is_whole(self) -> bool:
        """All tokens at once, however many rows they bring."""
        return self.chunks in ("none", 1) and self.max_bytes is None

    def check_balance(self, balance: str) -> None:
        """ValueError where chunks and redundant experts are both asked for."""
        if balance == "redundant" and not self.is_whole:
            raise ValueError(
                f"ep_chunks({self.chunks!r}), ep_chunk_bytes({self.max_bytes}) have nothing to bound under "
                "balance='redundant': every rank computes an even share of the rows, whatever the routing. Leave them "
                "out."
            )

    def choose(self, dispatcher: EPDispatcher, expert_ids_TK: Tensor, *, bytes_per_row: int) -> list[Chunk]:
        """The chunks of this rank's tokens, as many on every rank of the group.

        Raises:
            ValueError: on every rank of the group, where one would receive more rows than ``max_bytes`` has room for.
        """
        if self.is_whole and not isinstance(dispatcher, BoundsPieces):
            return [Chunk(tokens=slice(0, len(expert_ids_TK)), splits=None)]
        return dispatcher.once(lambda: self._chosen(dispatcher, expert_ids_TK, bytes_per_row))

    def _chosen(self, dispatcher: EPDispatcher, expert_ids_TK: Tensor, bytes_per_row: int) -> list[Chunk]:
        if self.chunks == "adaptive":
            return self._adapted(dispatcher, expert_ids_TK, bytes_per_row)
        if isinstance(self.chunks, int) and isinstance(dispatcher, BoundsPieces):
            num_chunks, pieces = self.chunks, dispatcher.bound(expert_ids_TK, self.chunks)
        else:
            num_chunks = 1 if self.chunks == "none" else self.chunks
            pieces = dispatcher.count(expert_ids_TK, num_chunks, count_most=self.max_bytes is not None)
        if self.max_bytes is not None:
            self._refuse_more(max(pieces.most_rows_G), bytes_per_row, num_chunks)
        return [pieces.join(chunk, chunk + 1) for chunk in range(num_chunks)]

    def _adapted(self, dispatcher: EPDispatcher, expert_ids_TK: Tensor, bytes_per_row: int) -> list[Chunk]:
        top_k = expert_ids_TK.shape[1]
        num_ranks = dispatcher.num_experts // dispatcher.num_local_experts
        rows_of_a_token = num_ranks * min(top_k, dispatcher.num_local_experts)
        # So many pieces that the default limit has room for one, whatever the routing.
        num_pieces = max(1, -int(-rows_of_a_token // (BALANCED_MULTIPLE * top_k)))
        while True:
            pieces = dispatcher.count(expert_ids_TK, num_pieces, count_most=True)
            limit = self._limit(pieces.most_tokens, top_k, rows_of_a_token, bytes_per_row)
            most = max(pieces.most_rows_G)
            if most <= limit or num_pieces >= pieces.most_tokens:
                break
            num_pieces = min(pieces.most_tokens, num_pieces * -(-most // max(1, limit)))
        self._refuse_more(most, bytes_per_row, num_pieces)
        bounds = [0, num_pieces] if pieces.most_rows <= limit else joined(pieces.most_rows_G, limit)
        return [pieces.join(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]

    def _limit(self, most_tokens: int, top_k: int, rows_of_a_token: int, bytes_per_row: int) -> int:
        """Rows that a chunk may bring: of nothing but numbers that all ranks share."""
        if self.max_bytes is not None:
            return self.max_bytes // bytes_per_row
        return max(int(BALANCED_MULTIPLE * top_k * most_tokens), FLOOR_BYTES // bytes_per_row, rows_of_a_token)

    def _refuse_more(self, most_rows: int, bytes_per_row: int, num_chunks: int) -> None:
        if self.max_bytes is None or most_rows * bytes_per_row <= self.max_bytes:
            return
        remedy = "raise ep_chunks, or take ep_chunks='adaptive'"
        if self.chunks == "adaptive":
            remedy = "or lower ep: one token of each rank is the least that travels together"
        raise ValueError(
            f"ep_chunk_bytes({self.max_bytes}) must have room for the {most_rows} rows of {bytes_per_row} bytes that "
            f"the busiest rank of ep receives in one of {num_chunks} chunks. Raise it to {most_rows * bytes_per_row}, "
            f"{remedy}."
        )


def joined(most_rows_G: Sequence[int], limit: int) -> list[int]:
    """Bounds of chunks of consecutive pieces, each with as many as ``limit`` rows have room for, and one at least."""
    bounds, rows = [0], 0
    for piece, of_piece in enumerate(most_rows_G):
        if piece > bounds[-1] and rows + of_piece > limit:
            bounds.append(piece)
            rows = 0
        rows += of_piece
    return [*bounds, len(most_rows_G)]


def bytes_of_row(hidden_size: int, parameters: Sequence[Tensor]) -> int:
    """Of memory for each row at the most: its hidden state as it arrives, as a result and as a gradient, and twice
    what every product makes of it."""
    stacked = [parameter for parameter in parameters if parameter.dim() >= 3]
    inner = sum(size for parameter in stacked for size in _without(parameter.shape[1:], hidden_size))
    return max(parameter.element_size() for parameter in stacked) * (3 * hidden_size + 2 * inner)


def _without(sizes: Sequence[int], hidden_size: int) -> list[int]:
    left = list(sizes)
    if hidden_size in left:
        left.remove(hidden_size)
    return left


def run_in_chunks(
    run: Run,
    chunks: Sequence[Chunk],
    tokens: tuple[Tensor, Tensor, Tensor],
    parameters: Sequence[Tensor],
) -> Tensor:
    """``y_TD``: ``run`` on each chunk of ``tokens`` (hidden_TD, expert_ids_TK, weights_TK), one after the other.

    Kept for the backward: the tokens and the chunks' counts. Weight gradients of the chunks are added in FP32.
    """
    # As in dispatch.py: every rank's backward runs, whatever needs a gradient there.
    ticket = torch.zeros(0, device=tokens[0].device, requires_grad=torch.is_grad_enabled())
    y_TD: Tensor = _InChunks.apply(ticket, run, chunks, *tokens, *parameters)  # type: ignore[no-untyped-call]
    return y_TD


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, run: Run, chunks: Sequence[Chunk], hidden_TD: Tensor, ids_TK: Tensor, *others: Tensor
    ) -> Tensor:
        weights_TK, *parameters = others
        y_TD = torch.empty_like(hidden_TD)
        random_states = []
        for chunk in chunks:
            before = [(generator, random_state(generator)) for generator in _generators()]
            t = chunk.tokens
            y_TD[t] = run(chunk.splits, hidden_TD[t], ids_TK[t], weights_TK[t], parameters)
            random_states.append([(g, state) for g, state in before if not is_same_state(state, random_state(g))])
        ctx.run, ctx.chunks, ctx.random_states = run, chunks, random_states
        ctx.save_for_backward(hidden_TD, ids_TK, *others)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, ids_TK, weights_TK, *parameters = ctx.saved_tensors
        _, _, _, hidden_needs, _, weights_need, *parameters_need = ctx.needs_input_grad
        grad_hidden_TD = torch.zeros_like(hidden_TD) if hidden_needs else None
        grad_weights_TK = torch.zeros_like(weights_TK) if weights_need else None
        sums = _Sums(parameters)
        for chunk, random_states in zip(ctx.chunks, ctx.random_states, strict=True):
            t = chunk.tokens
            hidden_tD, weights_tK = _leaf(hidden_TD[t], hidden_needs), _leaf(weights_TK[t], weights_need)
            leaves = sums.leaves(parameters_need)
            outside = [(generator, random_state(generator)) for generator, _ in random_states]
            _set_states(random_states)
            with torch.enable_grad():
                y_tD = ctx.run(chunk.splits, hidden_tD, ids_TK[t], weights_tK, leaves)
            _set_states(outside)
            # All of the graph and not what these leaves need: its tickets bring every rank to every exchange.
            torch.autograd.backward(y_tD, grad_TD[t])
            del y_tD
            for whole, part in ((grad_hidden_TD, hidden_tD), (grad_weights_TK, weights_tK)):
                if whole is not None and part.grad is not None:
                    whole[t] = part.grad
            sums.add(leaves)
        return None, None, None, grad_hidden_TD, None, grad_weights_TK, *sums.result()


class _Sums:
    """Gradients of the experts' parameters, added up chunk by chunk in FP32; autograd casts them where it must."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def leaves(self, need_grad: Sequence[bool]) -> list[Tensor]:
        """The parameters for one chunk; a chunk's part of a gradient is not rounded either."""
        leaves = [_leaf(parameter, needs) for parameter, needs in zip(self.parameters, need_grad, strict=True)]
        for leaf in (leaf for leaf in leaves if leaf.requires_grad):
            leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)
        return leaves

    def add(self, leaves: Sequence[Tensor]) -> None:
        """Takes the gradients of ``leaves`` away from them."""
        for index, leaf in enumerate(leaves):
            gradient, leaf.grad = leaf.grad, None
            total = self.sums[index]
            if total is None or gradient is None:
                self.sums[index] = total if gradient is None else gradient
            else:
                total += gradient

    def result(self) -> list[Tensor | None]:
        return self.sums


def _leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(needs_grad)


def _set_states(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _generators() -> list[torch.Generator]:
    """Those a module's own math may draw from: the CPU's, and the current GPU's once CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
