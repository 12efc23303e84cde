"""Which module runs: an attention, router, experts, shared experts or MLP of a block, an embedding, a head.

In the forward pass and a recompute, the one whose forward is open. In the backward pass, the one whose output got its
gradient last: autograd works from outputs to inputs, a module at a time.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import in_backward, tensors_in
from lightning_moe_strategy.units import Unit


class Places:
    """Follows the modules of a placed model while it is open."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.current = ""
        """Name of the module that runs; empty for what the model does between its modules."""
        self._modules = find_places(units)
        self._outer: list[str] = []

    @contextmanager
    def opened(self) -> Generator[None, None, None]:
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            # Always: a recompute stops in the middle of a module, once it has what the backward pass needs.
            handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reset(self) -> None:
        """Between two phases nothing runs."""
        self.current, self._outer = "", []

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._outer.append(self.current)
            self.current = name

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def arrived(gradient: Tensor) -> None:
            self.current = name

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.current = self._outer.pop()
            if in_backward():
                return  # a recompute: the graph is the one of the first pass
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

        return hook


def find_places(units: Sequence[Unit]) -> dict[str, nn.Module]:
    """Modules worth a figure of their own: units, and the parts of a block, those of its MLP where it holds experts."""
    experts = [unit.name for unit in units if unit.kind == "experts"]
    places: dict[str, nn.Module] = {}
    for unit in units:
        if not unit.name:
            continue
        places[unit.name] = unit.module
        if unit.kind != "block":
            continue
        for name, part in _parts(unit.name, unit.module):
            places[name] = part
            if any(expert.startswith(f"{name}.") for expert in experts):
                places |= dict(_parts(name, part))
    return places


def _parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    children = module.named_children()
    return [(f"{name}.{child}", part) for child, part in children if next(part.parameters(), None) is not None]
