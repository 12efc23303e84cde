"""Keep a block's input in place of its activations, and compute the block again in the backward pass.

Routing is not computed again. A router's logits, what it picks from them and the split sizes of the all-to-all are
those of the first pass, so a rounding difference in the second one cannot send a token elsewhere. Kept per token and
sparse block, beside the block's input: ``4 * E + 12 * K`` bytes, and ``4 * K`` more where ep > 1.

Nor are keys selected again: the ids an indexer has picked (int32) are kept as they are, in one tensor that the blocks
which share them hold as their input. A replay runs no part of an indexer and gathers none of its keys. Where indexers
are trained, it computes what the loss reads, and still selects nothing.

Shapes: T tokens, E experts, K experts per token, D hidden size.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy._torch_compat import OperationMode, copy_tensors, is_same_state, random_state
from lightning_moe_strategy.context_parallel.indexers import choice_is, is_indexer
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of
from lightning_moe_strategy.expert_parallel.splits import RemembersSplits, SplitMemory
from lightning_moe_strategy.models.sparse_attention import Indexer
from lightning_moe_strategy.units import find_routers

Recompute = Literal["none", "block"]


def recompute_blocks(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    experts: Mapping[str, nn.Module],
    *,
    indexers_are_trained: bool = False,
) -> None:
    """Recompute every block of ``root`` in its backward pass. In place, once, after the experts have dispatchers.

    Only the blocks' own forward changes: hooks, FSDP's among them, stay outside, and whatever is wrapped around that
    forward already (context parallel attention) runs in both passes. Without gradients nothing is kept at all.

    Raises:
        ValueError: a module checkpoints its activations itself.
    """
    _refuse_own_checkpointing(root)
    _keep_no_cache(root)
    routers = find_routers(root, experts)
    for name, block in blocks.items():
        inside = [module for path, module in experts.items() if path.startswith(f"{name}.")]
        weights = [p.shape for path, m in routers.items() if path.startswith(f"{name}.") for p in m.parameters()]
        routing = _RoutingOps(
            router_shapes=frozenset((shape[1], shape[0]) for shape in weights if len(shape) == 2),
            nums_experts=frozenset(_num_experts(module) for module in inside),
        )
        found = [module for module in block.modules() if is_indexer(module)]
        indexers = [_SelectingOnce.wrap(module, is_trained=indexers_are_trained) for module in found]
        block.__dict__["forward"] = _RecomputedForward(block.forward, routing, inside, indexers)


class _RecomputedForward:
    """A block's forward, run again for its backward pass."""

    def __init__(
        self,
        forward: Callable[..., Any],
        routing: "_RoutingOps",
        experts: list[nn.Module],
        indexers: "list[_SelectingOnce]",
    ) -> None:
        self.forward, self.routing, self.experts, self.indexers = forward, routing, experts, indexers
        update_wrapper(self, forward, updated=())  # forward may be a wrapper with a state of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        dispatchers: list[object] = [dispatcher_of(module) for module in self.experts]
        call = _BlockCall(
            self.routing, [d for d in dispatchers if isinstance(d, RemembersSplits)], indexers=self.indexers
        )
        return checkpoint(
            partial(self.forward, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # _BlockCall does, where the block draws
            context_fn=call.passes,
        )


class _BlockCall:
    """What one call of a block keeps from its first pass for the replays."""

    def __init__(
        self, routing: "_RoutingOps", dispatchers: list[RemembersSplits], *, indexers: "list[_SelectingOnce]"
    ) -> None:
        self.routing, self.dispatchers, self.indexers = routing, dispatchers, indexers
        self.results: list[Any] = []
        self.selected: list[list[Tensor]] = [[] for _ in indexers]
        self.splits = [SplitMemory() for _ in dispatchers]
        self.random_states: list[tuple[torch.Generator, Tensor]] = []

    def passes(self) -> "tuple[_Pass, _Pass]":
        return _Pass(self._first), _Pass(self._replay)

    @contextmanager
    def _first(self) -> Generator[None, None, None]:
        before = [(generator, random_state(generator)) for generator in _generators()]
        with self._memories(replaying=False), self._mode(_KeepRouting):
            yield
        # Most blocks draw nothing: they need no state kept, and their replay leaves the generators alone.
        self.random_states = [(g, state) for g, state in before if not is_same_state(state, random_state(g))]

    @contextmanager
    def _replay(self) -> Generator[None, None, None]:
        outside = [(generator, random_state(generator)) for generator, _ in self.random_states]
        for generator, state in self.random_states:
            generator.set_state(state)
        try:
            with self._memories(replaying=True), self._mode(_ReplayRouting):
                yield
        finally:
            for generator, state in outside:
                generator.set_state(state)

    @contextmanager
    def _memories(self, *, replaying: bool) -> Generator[None, None, None]:
        with ExitStack() as stack:
            for dispatcher, memory in zip(self.dispatchers, self.splits, strict=True):
                stack.enter_context(dispatcher.remember_splits(memory, replaying=replaying))
            for indexer, selected in zip(self.indexers, self.selected, strict=True):
                stack.enter_context(indexer.remember(selected, self.results, replaying=replaying))
            yield

    @contextmanager
    def _mode(self, kind: "type[_KeepRouting] | type[_ReplayRouting]") -> Generator[None, None, None]:
        if not self.routing.nums_experts:
            yield
            return
        with kind(self.routing, self.results):
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
            replayed: Tensor = _next_kept(self.replayed, "select_keys")
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


class _RoutingOps:
    """Which operations of a block route: products with a router's weight, picks among all experts."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    PICKS = (
        torch.ops.aten.topk.default,
        torch.ops.aten.sort.default,
        torch.ops.aten.sort.stable,
        torch.ops.aten.max.dim,
        torch.ops.aten.argmax.default,
    )

    def __init__(self, *, router_shapes: frozenset[tuple[int, int]], nums_experts: frozenset[int]) -> None:
        self.router_shapes, self.nums_experts = router_shapes, nums_experts

    def __contains__(self, call: tuple[Any, tuple[Any, ...]]) -> bool:
        # By shape: a cast weight is another tensor. A stray match keeps a result too many, and it stays exact.
        operation, args = call
        if operation in self.PRODUCTS:
            weight = args[2 if operation is torch.ops.aten.addmm.default else 1]
            return tuple(weight.shape[-2:]) in self.router_shapes
        return operation in self.PICKS and args[0].dim() > 1 and args[0].shape[-1] in self.nums_experts


class _KeepRouting(OperationMode):
    """The first pass: copies, because models scale and mask these results in place."""

    def __init__(self, routing: _RoutingOps, results: list[Any]) -> None:
        super().__init__()
        self.routing, self.results = routing, results

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        if (operation, args) in self.routing:
            self.results.append(copy_tensors(result))
        return result


class _ReplayRouting(OperationMode):
    """A replay: the same operations in the same order, their results those of the first pass."""

    def __init__(self, routing: _RoutingOps, results: list[Any]) -> None:
        super().__init__()
        self.routing, self.results = routing, iter(results)

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (operation, args) not in self.routing:
            return operation(*args, **kwargs)
        return copy_tensors(_next_kept(self.results, operation))


def _next_kept(results: Iterator[Any], operation: Any) -> Any:
    result = next(results, None)
    if result is None:
        raise RuntimeError(
            f"A recompute routed more often than the first pass did ({operation}): a block's forward must do the same "
            "work whenever it gets the same input. Make it so, or set recompute='none'."
        )
    return result


def _refuse_own_checkpointing(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{name or type(module).__name__} has gradient_checkpointing on and recompute is 'block': every block "
                "would be computed three times. Call gradient_checkpointing_disable(), or set recompute='none'."
            )


def _keep_no_cache(root: nn.Module) -> None:
    """A Hugging Face model in training fills a cache of keys by default, which a replay would fill a second time."""
    for module in root.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True and hasattr(module, "gradient_checkpointing_enable"):
            config.use_cache = False  # type: ignore[union-attr]


def _generators() -> list[torch.Generator]:
    """Those a block may draw from: the CPU's, and the current GPU's once CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def _num_experts(experts: nn.Module) -> int:
    return int(experts.num_experts)  # type: ignore[arg-type]
