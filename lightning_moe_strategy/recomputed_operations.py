"""What a replay of a block does not compute: its routing and, if asked for, its attention; and buffers as they were.

The first pass runs in a mode that keeps results, every replay in one that hands them over in the same order. Results of
routing are copies, because models scale and mask them in place. Those of attention are kept as they are: they are
large, and what autograd saves of them for the backward pass must not change anyway.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import (
    OperationMode,
    copy_tensors,
    is_same_state,
    kept_alias,
    memory_of,
    name_of_operation,
    num_changes,
    random_state,
    tensors_in,
    writes,
)

ATTENTION = frozenset(
    {
        "aten::_cudnn_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
        "flash_attn_3::fwd",
        "lightning_moe::context_parallel_attention",
        "lightning_moe::sparse_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Kernels whose backward pass needs no more of the forward than inputs, output and log-sum-exp. Attention that is
written out (softmax of a product) needs its probabilities, which are not kept: it is computed again."""

OVER_CP = "attention over the cp ranks"
"""By its name in messages: the whole of it, see ``context_parallel/attended_once.py``."""

WRITES_UNSAID = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
"""Write to running statistics and do not say so in their schema."""


class RoutingOps:
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


class FirstPass(OperationMode):
    """Keeps routing, attention (``attended`` None: it is computed again) and buffers that are about to change."""

    leaves_graphs_alone = True

    def __init__(
        self, routing: RoutingOps, routed: list[Any], attended: "AttendedOnce | None", buffers: "BuffersBefore"
    ) -> None:
        super().__init__()
        self.routing, self.routed, self.attended, self.buffers = routing, routed, attended, buffers

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.buffers.note(operation, args, kwargs)
        name = name_of_operation(operation)
        if self.attended is not None and name in ATTENTION:
            return self.attended.keep(name, partial(operation, *args, **kwargs))
        result = operation(*args, **kwargs)
        if (operation, args) in self.routing:
            self.routed.append(copy_tensors(result))
        return result


class Replay(OperationMode):
    """The same operations in the same order, what is kept of them that of the first pass."""

    leaves_graphs_alone = True

    def __init__(self, routing: RoutingOps, routed: list[Any], attended: "Attended | None") -> None:
        super().__init__()
        self.routing, self.routed, self.attended = routing, iter(routed), attended

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of_operation(operation)
        if self.attended is not None and name in ATTENTION:
            return self.attended.take(name)
        if (operation, args) not in self.routing:
            return operation(*args, **kwargs)
        return copy_tensors(next_kept(self.routed, operation))


def next_kept(results: Iterator[Any], operation: Any, *, what: str = "routed") -> Any:
    """RuntimeError, naming ``operation``, when there is none left."""
    result = next(results, None)
    if result is None:
        raise RuntimeError(
            f"A recompute {what} more often than the first pass did ({operation}): a block's forward must do the same "
            "work whenever it gets the same input. Make it so, or set recompute='none'."
        )
    return result


@dataclass(frozen=True)
class _Kept:
    """One call of an attention kernel."""

    by: str
    result: Any
    versions: list[int]
    random_states: list[tuple[torch.Generator, Tensor]]
    """Behind it, of generators it drew from (dropout): what is drawn next must not depend on whether it ran."""


class AttendedOnce:
    """What attention returned in the first pass through a block, call by call."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self._is_inside = False

    def keep(self, name: str, attend: Callable[[], Any]) -> Any:
        """``attend()``. Kernels that it calls in turn are parts of it, and not kept."""
        if self._is_inside:
            return attend()
        before, self._is_inside = generator_states(), True
        try:
            result = attend()
        finally:
            self._is_inside = False
        kept = aliases(result)
        versions = [num_changes(tensor) for tensor in tensors_in(kept)]
        drawn = [(generator, after) for generator, _, after in drawn_since(before)]
        self.kept.append(_Kept(name, kept, versions, drawn))
        return result

    def again(self) -> "Attended":
        """For one replay."""
        return Attended(iter(self.kept))


class Attended:
    """Hands over what was kept, in order."""

    def __init__(self, kept: Iterator[_Kept]) -> None:
        self._kept = kept

    def take(self, name: str) -> Any:
        """The result of the next call, which must be one of ``name``."""
        kept: _Kept = next_kept(self._kept, name, what="attended")
        if kept.by != name:
            raise RuntimeError(
                f"A recompute attends by {name} where the first pass did by {kept.by}: choose one kernel "
                "(torch.nn.attention.sdpa_kernel around the whole step), or set recompute='block'."
            )
        if [num_changes(tensor) for tensor in tensors_in(kept.result)] != kept.versions:
            raise RuntimeError(
                f"The output of {name} was changed in place, and recompute='selective' keeps it as it is. Change a "
                "copy (x * gate, not x.mul_(gate)), or set recompute='block'."
            )
        for generator, state in kept.random_states:
            generator.set_state(state)
        return aliases(kept.result)

    def instead(self, attend: Callable[[], Any]) -> Any:
        """What ``attend`` would return: attention over the cp ranks."""
        return self.take(OVER_CP)


def aliases(results: Any) -> Any:
    """The same numbers without their graphs. A tensor that is handed to autograd twice would lead from one graph to
    the other."""
    if isinstance(results, Tensor):
        return kept_alias(results)
    if isinstance(results, tuple | list):
        return type(results)(map(aliases, results))
    return results


class BuffersBefore:
    """Of some modules, the buffers that a forward changes, as they were before it: the replay reads them and, where the
    forward counts or averages, changes what nobody reads any more."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [
            (module, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._copies: dict[int, Tensor] = {}
        self._by_memory = {memory_of(buffer): buffer for _, _, buffer in self._before}
        self._changed: list[tuple[nn.Module, str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._before)

    def note(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies what ``operation`` is about to write to, the first time."""
        if not self._by_memory or not (writes(operation) or name_of_operation(operation) in WRITES_UNSAID):
            return
        for tensor in tensors_in((args, kwargs)):
            memory = memory_of(tensor)
            if memory in self._by_memory and memory not in self._copies:
                self._copies[memory] = self._by_memory[memory].detach().clone()

    def end(self) -> None:
        """At the end of the forward: buffers that were replaced are kept themselves, and the others let go of."""
        for module, name, buffer in self._before:
            copied = self._copies.get(memory_of(buffer))
            if copied is not None or module._buffers.get(name) is not buffer:
                self._changed.append((module, name, buffer if copied is None else copied))
        self._before, self._by_memory, self._copies = [], {}, {}

    @contextmanager
    def put_back(self) -> Generator[None, None, None]:
        """Inside, the modules have what they had before; modules that share a buffer still do."""
        now = [(module, name, module._buffers.get(name)) for module, name, _ in self._changed]
        before = {id(buffer): buffer.clone() for _, _, buffer in self._changed}
        for module, name, buffer in self._changed:
            module._buffers[name] = before[id(buffer)]
        try:
            yield
        finally:
            for module, name, current in now:
                module._buffers[name] = current


def generator_states() -> list[tuple[torch.Generator, Tensor]]:
    """Of those a block may draw from: the CPU's, and the current GPU's once CUDA is in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, random_state(generator)) for generator in generators]


def drawn_since(before: list[tuple[torch.Generator, Tensor]]) -> list[tuple[torch.Generator, Tensor, Tensor]]:
    """Generators that were drawn from, with their states before and now."""
    states = [(generator, state, random_state(generator)) for generator, state in before]
    return [(generator, state, now) for generator, state, now in states if not is_same_state(state, now)]
