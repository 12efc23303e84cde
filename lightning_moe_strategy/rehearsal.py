"""Run a user's training step so that the training that follows is the one that would have been.

What is kept and brought back: buffers, gradients, metrics, and what modules hold besides their
parameters, as far as it is made of tensors, numbers, lists, dicts and sets.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy._lightning_compat import DummyLogger, LightningModule, Trainer
from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.expert_parallel.experts import routing_observers

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def rehearsal(
    trainer: Trainer, module: LightningModule, experts: Mapping[str, nn.Module]
) -> Generator[None, None, None]:
    """Inside, steps of ``module`` may run: nothing is logged or counted, and nothing is left of them behind it.

    Gradients inside start from none. Dropout and noise are switched off: what is drawn is replaced by its mean (dropout
    keeps every element). States of generators are the caller's to keep: each run starts from the same.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_observers(experts))
        stack.enter_context(_kept_gradients(module))
        stack.enter_context(_kept_attributes(module))
        stack.enter_context(_silent(trainer, module))
        stack.enter_context(_NoRandomness())
        yield


def without_randomness() -> AbstractContextManager[object]:
    """Inside, what is drawn is replaced by its mean, and dropout keeps every element."""
    return _NoRandomness()


@contextmanager
def _without_observers(experts: Mapping[str, nn.Module]) -> Generator[None, None, None]:
    """Tokens per expert are of the training alone."""
    kept = [(observers, list(observers)) for observers in map(routing_observers, experts.values())]
    for observers, _ in kept:
        observers.clear()
    try:
        yield
    finally:
        for observers, before in kept:
            observers[:] = before


@contextmanager
def _kept_gradients(module: nn.Module) -> Generator[None, None, None]:
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def _silent(trainer: Trainer, module: LightningModule) -> Generator[None, None, None]:
    """Nothing reaches the Trainer's results or loggers. What is set on the module, ``_kept_attributes`` takes away."""
    quiet: Any = trainer
    loggers = quiet.loggers
    quiet.loggers = [DummyLogger() for _ in loggers]
    vars(module).update(log=_say_nothing, log_dict=_say_nothing)
    try:
        yield
    finally:
        quiet.loggers = loggers


def _say_nothing(*args: object, **kwargs: object) -> None:
    """In place of ``self.log``."""


@contextmanager
def _kept_attributes(root: nn.Module) -> Generator[None, None, None]:
    """Metrics are modules whose states are such attributes."""
    kept: dict[int, _Contents] = {}
    attributes = []
    for module in root.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        attributes.append((module, own, dict(module._buffers)))
        for value in (*own.values(), *module._buffers.values()):
            _keep(value, kept)
    try:
        yield
    finally:
        for module, own, buffers in attributes:
            for name in [name for name in vars(module) if name not in _OF_EVERY_MODULE and name not in own]:
                del vars(module)[name]
            vars(module).update(own)
            module._buffers.clear()
            module._buffers.update(buffers)
        for contents in kept.values():
            contents.restore()


class _Contents:
    """What is in a tensor or a container, to be put back into the same object."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.version = of._version if isinstance(of, Tensor) and not of.is_inference() else None
        self.before = of.detach().clone() if isinstance(of, Tensor) else of.copy()

    def restore(self) -> None:
        if isinstance(self.of, Tensor):
            if self.version is None or self.of._version != self.version:
                with torch.no_grad():
                    self.of.copy_(self.before)
        elif isinstance(self.of, set) or not _holds_the_same(self.of, self.before):
            self.of.clear()
            fill = self.of.extend if isinstance(self.of, list | deque) else self.of.update
            fill(self.before)


def _holds_the_same(some: Any, other: Any) -> bool:
    pairs = [[*x.items()] if isinstance(x, dict) else [(None, item) for item in x] for x in (some, other)]
    same = (key is key_2 and item is item_2 for (key, item), (key_2, item_2) in zip(*pairs, strict=False))
    return len(pairs[0]) == len(pairs[1]) and all(same)


def _keep(value: Any, kept: dict[int, _Contents]) -> None:
    if id(value) in kept:
        return
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
        kept[id(value)] = _Contents(value)
    elif isinstance(value, list | dict | set | deque):
        kept[id(value)] = _Contents(value)
        for inside in value.values() if isinstance(value, dict) else value:
            _keep(inside, kept)
    elif isinstance(value, tuple):
        for inside in value:
            _keep(inside, kept)


class _NoRandomness(OperationMode):
    """Every draw gives the mean of what is drawn from; every element is kept by dropout."""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mean = _MEANS.get(getattr(operation, "overloadpacket", None))
        return operation(*args, **kwargs) if mean is None else mean(operation, *args, **kwargs)


def _filled_with(value: float) -> Callable[..., Any]:
    def make(operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return operation(*args, **kwargs).fill_(value)

    return make


def _uniform(operation: object, x: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Tensor:
    return x.fill_((low + high) / 2)


def _normal(operation: object, x: Tensor, mean: float = 0.0, *args: Any, **kwargs: Any) -> Tensor:
    return x.fill_(mean)


def _exponential(operation: object, x: Tensor, rate: float = 1.0, **kwargs: Any) -> Tensor:
    return x.fill_(1 / rate)


def _bernoulli_in_place(operation: object, x: Tensor, p: Tensor | float = 0.5, **kwargs: Any) -> Tensor:
    return x.copy_(p >= 0.5) if isinstance(p, Tensor) else x.fill_(float(p >= 0.5))


def _bernoulli(operation: object, x: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
    return (x >= 0.5).to(x.dtype) if p is None else torch.full_like(x, float(p >= 0.5))


def _dropout(operation: object, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    # As the backward pass, which is told the scale, has it.
    scale = 1 / (1 - p) if train and p < 1 else 1.0
    return x * scale, torch.ones_like(x, dtype=torch.bool)


_aten = torch.ops.aten
_MEANS: Mapping[Any, Callable[..., Any]] = {
    _aten.rand: _filled_with(0.5),
    _aten.rand_like: _filled_with(0.5),
    _aten.randn: _filled_with(0.0),
    _aten.randn_like: _filled_with(0.0),
    _aten.uniform_: _uniform,
    _aten.normal_: _normal,
    _aten.exponential_: _exponential,
    _aten.bernoulli_: _bernoulli_in_place,
    _aten.bernoulli: _bernoulli,
    _aten.native_dropout: _dropout,
}
