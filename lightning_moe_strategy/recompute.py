"""Keep a block's input in place of its activations, and compute the block again in the backward pass.

Routing is not computed again. A router's logits, what it picks from them and the split sizes of the all-to-all are
those of the first pass, so a rounding difference in the second one cannot send a token elsewhere. Kept per token and
sparse block, beside the block's input: ``4 * E + 12 * K`` bytes, and ``4 * K`` more where ep > 1.

Nor are keys selected again: the ids an indexer has picked (int32) are kept as they are, in one tensor that the blocks
which share them hold as their input. A replay runs no part of an indexer and gathers none of its keys. Where indexers
are trained, it computes what the loss reads, and still selects nothing.

``selective`` keeps the output of each attention as well, and its log-sum-exp (``recomputed_operations.ATTENTION``): the
replay makes queries, keys and values again, gathers those of the sequence for the backward pass as ``block`` does, and
runs no attention kernel. It keeps ``2 V + 4`` bytes a token and head more. What came back from the experts is not kept:
nothing in the backward pass reads it but a residual sum, and what went out to them is ``2 D`` bytes a copy.

A replay draws the random numbers of the first pass, under its autocast, and sees the buffers that this found: what a
forward changes in them (counters, running statistics) is changed once.

Shapes: T tokens, E experts, K experts per token, D hidden size, V channels of a value head.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy.context_parallel.attended_once import attending_by
from lightning_moe_strategy.context_parallel.indexers import choice_is, is_indexer
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of
from lightning_moe_strategy.expert_parallel.splits import RemembersSplits, SplitMemory
from lightning_moe_strategy.models.sparse_attention import Indexer
from lightning_moe_strategy.recomputed_operations import (
    OVER_CP,
    AttendedOnce,
    BuffersBefore,
    FirstPass,
    Replay,
    RoutingOps,
    drawn_since,
    generator_states,
    next_kept,
)
from lightning_moe_strategy.units import find_routers

Recompute = Literal["none", "block", "selective"]


def recompute_blocks(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    experts: Mapping[str, nn.Module],
    *,
    indexers_are_trained: bool = False,
    keep_attention: bool = False,
) -> None:
    """Recompute every block of ``root`` in its backward pass. In place, once, after the experts have dispatchers.

    ``keep_attention`` keeps what the attention of each block returns, and the replay does not attend.
    Only the blocks' own forward changes: hooks, FSDP's among them, stay outside, and whatever is wrapped around that
    forward already (context parallel attention) runs in both passes. Without gradients nothing is kept at all.

    Raises:
        ValueError: a module checkpoints its activations itself.
    """
    _refuse_own_checkpointing(root, "selective" if keep_attention else "block")
    _keep_no_cache(root)
    routers = find_routers(root, experts)
    for name, block in blocks.items():
        inside = [module for path, module in experts.items() if path.startswith(f"{name}.")]
        weights = [p.shape for path, m in routers.items() if path.startswith(f"{name}.") for p in m.parameters()]
        routing = RoutingOps(
            router_shapes=frozenset((shape[1], shape[0]) for shape in weights if len(shape) == 2),
            nums_experts=frozenset(_num_experts(module) for module in inside),
        )
        found = [module for module in block.modules() if is_indexer(module)]
        indexers = [_SelectingOnce.wrap(module, is_trained=indexers_are_trained) for module in found]
        block.__dict__["forward"] = _RecomputedForward(
            block.forward, routing, inside, indexers, modules=list(block.modules()), keep_attention=keep_attention
        )


class _RecomputedForward:
    """A block's forward, run again for its backward pass."""

    def __init__(
        self,
        forward: Callable[..., Any],
        routing: RoutingOps,
        experts: list[nn.Module],
        indexers: "list[_SelectingOnce]",
        *,
        modules: list[nn.Module],
        keep_attention: bool,
    ) -> None:
        self.forward, self.routing, self.experts, self.indexers = forward, routing, experts, indexers
        self.modules, self.keep_attention = modules, keep_attention
        update_wrapper(self, forward, updated=())  # forward may be a wrapper with a state of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(
            partial(self.forward, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # _BlockCall does, where the block draws
            context_fn=_BlockCall(self).passes,
        )


class _BlockCall:
    """What one call of a block keeps from its first pass for the replays."""

    def __init__(self, block: _RecomputedForward) -> None:
        dispatchers: list[object] = [dispatcher_of(module) for module in block.experts]
        self.dispatchers = [d for d in dispatchers if isinstance(d, RemembersSplits)]
        self.routing, self.indexers = block.routing, block.indexers
        self.results: list[Any] = []
        self.selected: list[list[Tensor]] = [[] for _ in block.indexers]
        self.splits = [SplitMemory() for _ in self.dispatchers]
        self.attended = AttendedOnce() if block.keep_attention else None
        self.buffers = BuffersBefore(block.modules)
        self.has_operations = bool(block.routing.nums_experts or block.keep_attention or len(self.buffers))
        """Without any that may be kept, no operation is looked at."""
        self.random_states: list[tuple[torch.Generator, Tensor]] = []

    def passes(self) -> "tuple[_Pass, _Pass]":
        return _Pass(self._first), _Pass(self._replay)

    @contextmanager
    def _first(self) -> Generator[None, None, None]:
        before = generator_states()
        keep = None if self.attended is None else partial(self.attended.keep, OVER_CP)
        mode = FirstPass(self.routing, self.results, self.attended, self.buffers)
        with self._memories(replaying=False), attending_by(keep), self._looking_through(mode):
            yield
        self.buffers.end()
        # Most blocks draw nothing: they need no state kept, and their replay leaves the generators alone.
        self.random_states = [(generator, state) for generator, state, _ in drawn_since(before)]

    @contextmanager
    def _replay(self) -> Generator[None, None, None]:
        outside = generator_states() if self.random_states else []
        for generator, state in self.random_states:
            generator.set_state(state)
        attended = None if self.attended is None else self.attended.again()
        mode = Replay(self.routing, self.results, attended)
        try:
            with (
                self.buffers.put_back(),
                self._memories(replaying=True),
                attending_by(None if attended is None else attended.instead),
                self._looking_through(mode),
            ):
                yield
        finally:
            for generator, state in outside:
                generator.set_state(state)

    def _looking_through(self, mode: FirstPass | Replay) -> AbstractContextManager[object]:
        return mode if self.has_operations else nullcontext()

    @contextmanager
    def _memories(self, *, replaying: bool) -> Generator[None, None, None]:
        with ExitStack() as stack:
            for dispatcher, memory in zip(self.dispatchers, self.splits, strict=True):
                stack.enter_context(dispatcher.remember_splits(memory, replaying=replaying))
            for indexer, selected in zip(self.indexers, self.selected, strict=True):
                stack.enter_context(indexer.remember(selected, self.results, replaying=replaying))
            yield


class _SelectingOnce:
    """An indexer's forward: it selects in the first pass through its block, and a replay is given the same tensors."""

    def __init__(self, forward: Callable[..., Tensor], *, is_trained: bool) -> None:
        self.forward, self.is_trained = forward, is_trained
        self.selected: list[Tensor] | None = None
        """None outside of both passes: without gradients nothing is kept."""
        self.routed: list[Any] = []
        self.replayed: Iterator[Tensor] | None = None
        update_wrapper(self, forward, updated=())

    @classmethod
    def wrap(cls, indexer: nn.Module, *, is_trained: bool) -> "_SelectingOnce":
        wrapper = indexer.__dict__["forward"] = cls(indexer.forward, is_trained=is_trained)
        if isinstance(indexer, Indexer):
            indexer.__dict__["key"] = wrapper.in_first_pass(indexer.key)
        return wrapper

    def in_first_pass(self, key: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``key`` without its products among the routing; a replay, which selects nothing, makes and gathers none."""

        def made_once(x: Tensor, *args: Any) -> Tensor:
            if self.replayed is not None and not self.is_trained:
                return x.new_empty(0)
            if self.replayed is not None:
                with choice_is(x.new_empty(0)):  # which one, ``forward`` is told
                    return key(x, *args)
            num_routed = len(self.routed)
            made = key(x, *args)
            if self.selected is not None and not self.is_trained:
                del self.routed[num_routed:]
            return made

        return made_once

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.replayed is not None:
            replayed: Tensor = next_kept(self.replayed, "select_keys")
            if self.is_trained:
                with choice_is(replayed):
                    self.forward(*args, **kwargs)
            return replayed
        num_routed = len(self.routed)
        key_ids = self.forward(*args, **kwargs)
        if self.selected is not None:
            self.selected.append(key_ids)
            # A product in there that looks like a router's was kept by its shape; no replay would come for it.
            if not self.is_trained:
                del self.routed[num_routed:]
        return key_ids

    @contextmanager
    def remember(self, selected: list[Tensor], routed: list[Any], *, replaying: bool) -> Generator[None, None, None]:
        """Keep what is selected inside in ``selected``; when ``replaying``, take it from there, in order.

        ``routed`` is what has been kept of the block's routing so far.
        """
        outer = (self.selected, self.routed, self.replayed)
        self.selected, self.routed, self.replayed = selected, routed, iter(selected) if replaying else None
        try:
            yield
        finally:
            self.selected, self.routed, self.replayed = outer


class _Pass:
    """A context that can be entered more than once: a graph that is retained is replayed by every backward."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.entered = make, list[Any]()

    def __enter__(self) -> None:
        self.entered.append(self.make())
        self.entered[-1].__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.entered.pop().__exit__(*error)


def _refuse_own_checkpointing(root: nn.Module, recompute: Recompute) -> None:
    for name, module in root.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{name or type(module).__name__} has gradient_checkpointing on and recompute is {recompute!r}: every "
                "block would be computed three times. Call gradient_checkpointing_disable(), or set recompute='none'."
            )


def _keep_no_cache(root: nn.Module) -> None:
    """A Hugging Face model in training fills a cache of keys by default, which a replay would fill a second time."""
    for module in root.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True and hasattr(module, "gradient_checkpointing_enable"):
            config.use_cache = False  # type: ignore[union-attr]


def _num_experts(experts: nn.Module) -> int:
    return int(experts.num_experts)  # type: ignore[arg-type]
