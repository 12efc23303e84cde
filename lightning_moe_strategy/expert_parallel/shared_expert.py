"""Run a block's shared expert while its tokens travel to the others, from outside of the block.

A block is the smallest module that holds an experts module and, below itself, one child named like a shared expert.
Its first forward runs as it is written and is watched: where the shared expert is called after the experts, with
nothing but the tensor that the block or the experts were called with, later forwards call it earlier, with that same
tensor, and hand its result out where the block asks for it. Every number is that of the block as it is written, and
gradients are added in the same order.

Where a forward turns out otherwise, its shared expert runs where the block calls it: nothing is ever handed out for
another input. Left as they are: blocks that call the shared expert first or give it more than that one tensor, those
that draw random numbers in it, and passes whose recompute would not be told which way the first pass went.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import (
    call_module,
    in_backward,
    in_checkpointed_region,
    is_same_state,
    num_changes,
    random_state,
    take_calls,
)
from lightning_moe_strategy.expert_parallel.chunks import _generators
from lightning_moe_strategy.expert_parallel.dispatch import EPDispatcher
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of, run_beside

_NAME = re.compile(r"shared?_?(experts?|mlp)")
_EXPERTS = "the experts' input"


def run_shared_experts_ahead(root: nn.Module, experts: Mapping[str, nn.Module]) -> list[str]:
    """Let shared experts run while tokens travel. In place, once, after ``experts``, by name, have dispatchers.

    Returns the names of the shared experts that are watched for it. Those beside experts that have nothing to wait for,
    or whose dispatcher offers no ``meanwhile``, are not.
    """
    found = []
    for name, module in experts.items():
        dispatcher = dispatcher_of(module)
        shared = _find_shared(root, name, experts)
        if dispatcher is None or shared is None or not _waits(dispatcher):
            continue
        block_name, shared_name = shared
        SharedExpert(
            name=shared_name,
            block=root.get_submodule(block_name),
            caller=root.get_submodule(name.rpartition(".")[0]),
            experts=module,
            shared=root.get_submodule(shared_name),
        )
        found.append(shared_name)
    return found


def _waits(dispatcher: EPDispatcher) -> bool:
    takes = inspect.signature(dispatcher.dispatch).parameters
    return dispatcher.num_local_experts < dispatcher.num_experts and "meanwhile" in takes


def _find_shared(root: nn.Module, name: str, experts: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """Names of the block and of its shared expert, of the experts module called ``name``."""
    while name:
        name = name.rpartition(".")[0]
        block = root.get_submodule(name)
        if isinstance(block, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            return None
        prefix = f"{name}." if name else ""
        children = [f"{prefix}{child}" for child, _ in block.named_children() if _NAME.fullmatch(child)]
        if children:
            inside = [other for other in experts if other.startswith(prefix)]
            is_dense = not any(f"{other}.".startswith(f"{children[0]}.") for other in inside)
            return (name, children[0]) if len(children) == len(inside) == 1 and is_dense else None
    return None


@dataclass(eq=False)
class _Early:
    """A result before it was asked for."""

    given: Tensor
    num_changes: int
    """Of ``given``, in place, before."""
    result: Any


@dataclass(eq=False)
class _Forward:
    """One forward of a block."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """What the shared expert may be called with, by where it was seen."""
    is_settled: bool = False
    """Its experts, or its shared expert before them, have run or do: what can be decided is decided."""
    is_watched: bool = False
    """Its shared expert runs where the block calls it, and is looked at."""
    state: object = None
    """What the experts found around them: see `_surroundings`."""
    early: _Early | None = None


class SharedExpert:
    """The shared expert of one block: where the block calls it, and what it has returned before."""

    def __init__(
        self, *, name: str, block: nn.Module, caller: nn.Module, experts: nn.Module, shared: nn.Module
    ) -> None:
        """``caller`` is the module whose forward calls ``experts``: ``block`` or a part of it."""
        self.name, self.experts, self.shared = name, experts, shared
        self.learned: dict[bool, str | None] = {}
        """By whether it trains: the input it is called with, behind the experts; None: it runs where it is called."""
        self.now: _Forward | None = None
        # Methods and not closures: a deep copy of the model then has a state of its own.
        caller.__dict__["forward"] = _Within(self.forward_of_caller, caller.forward)
        block.__dict__["forward"] = _Within(self.forward_of_block, block.forward)
        take_calls(experts, self.call_of_experts)
        take_calls(shared, self.call_of_shared)
        run_beside(experts, self.work)

    def work(self, dispatcher: EPDispatcher) -> Callable[[], object] | None:
        """For the experts, once a forward: what is to be run while the rows of ``dispatcher`` travel."""
        now = self.now
        if now is None or now.is_settled:
            return None
        now.is_settled = True
        source = dispatcher.once(lambda: self._source(now, dispatcher))
        if source is None:
            now.is_watched = self.shared.training not in self.learned and not in_backward()
            now.state = _surroundings(now.inputs)
            return None
        given = now.inputs[source]

        def run() -> None:
            now.early = _Early(given, num_changes(given), call_module(self.shared, given))

        return run

    def _source(self, now: _Forward, dispatcher: EPDispatcher) -> str | None:
        source = self.learned.get(self.shared.training)
        given = None if source is None else now.inputs.get(source)
        if given is None or given.is_inference():
            return None  # tensors of inference mode do not tell when they are changed
        # Of a recompute, saved tensors must come in the order of the first pass: it is told, or both leave it alone.
        # Torch's reentrant kind has no gradients in its first pass, and draws random numbers again in the second.
        is_told = bool(getattr(dispatcher, "remembers", False))
        may_be_recomputed = in_checkpointed_region() or (self.shared.training and not torch.is_grad_enabled())
        return source if is_told or not (in_backward() or may_be_recomputed) else None

    def call_of_experts(self, *args: Any, **kwargs: Any) -> Any:
        """In place of calling the experts: FSDP hands their forward other objects of the same tensors."""
        if self.now is not None and args and isinstance(args[0], Tensor):
            self.now.inputs.setdefault(_EXPERTS, args[0])
        return call_module(self.experts, *args, **kwargs)

    def call_of_shared(self, *args: Any, **kwargs: Any) -> Any:
        """In place of calling the shared expert, hooks included: each runs once."""
        now = self.now
        if now is None:
            return call_module(self.shared, *args, **kwargs)
        early, now.early = now.early, None
        if early is not None:
            if _is_only(early.given, args, kwargs) and num_changes(early.given) == early.num_changes:
                return early.result
            self._give_up()
        if not now.is_watched:
            now.is_settled = True
            return call_module(self.shared, *args, **kwargs)
        now.is_watched = False
        sources = [source for source, given in now.inputs.items() if _is_only(given, args, kwargs)]
        is_as_before = now.state == _surroundings(now.inputs)
        before = [(generator, random_state(generator)) for generator in _generators()]
        result = call_module(self.shared, *args, **kwargs)
        draws = not all(is_same_state(state, random_state(generator)) for generator, state in before)
        self.learned[self.shared.training] = sources[0] if sources and is_as_before and not draws else None
        return result

    def _give_up(self) -> None:
        self.learned = {True: None, False: None}
        warnings.warn(
            f"{self.name} was computed while tokens travelled, as its block had asked for it before, and the block "
            "did not ask for it with the same input this time. It runs where the block calls it from now on; results "
            "are those of the block as it is written.",
            stacklevel=2,
        )

    @contextmanager
    def forward_of_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """A forward of the block runs inside. A recompute ends with an error, once it has all it needs."""
        outer, self.now = self.now, _Forward()
        try:
            yield
            if self.now.early is not None:
                self._give_up()
        finally:
            self.now = outer

    @contextmanager
    def forward_of_caller(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """A forward of the module that calls the experts runs inside."""
        if self.now is not None:
            given = {f"argument {key}": value for key, value in (*enumerate(args), *kwargs.items())}
            self.now.inputs |= {key: value for key, value in given.items() if isinstance(value, Tensor)}
        yield


class _Within:
    """A forward that runs inside of a context, which sees its arguments."""

    def __init__(self, context: Callable[..., Any], forward: Callable[..., Any]) -> None:
        self.context, self.forward = context, forward
        update_wrapper(self, forward, updated=())  # forward may be a wrapper with a state of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context(args, kwargs):
            return self.forward(*args, **kwargs)


def _is_only(given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and args[0] is given and not kwargs


def _surroundings(inputs: Mapping[str, Tensor]) -> object:
    """What makes another result of the same input, or another graph of it."""
    devices = {tensor.device.type for tensor in inputs.values()}
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(devices)]
    changes = [None if tensor.is_inference() else num_changes(tensor) for tensor in inputs.values()]
    return torch.is_grad_enabled(), autocast, changes
