"""Numbers that a user's hook reads off sharded tensors are those of the whole tensors.

``p.grad.norm()`` of a sharded parameter is a DTensor that waits for its reduction: ``float()`` of it is this rank's
part, and no two of them from different meshes can be stacked. Between backward and step users compute exactly such
norms (``grad_norm``, ``torch.nn.utils.clip_grad_norm_``), so there every such number is reduced at once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from lightning_moe_strategy._torch_compat import is_compiled


class WholeScalars(TorchFunctionMode):
    """Inside, a number computed from sharded tensors is a plain tensor [], equal on all ranks.

    Each costs one all-reduce per mesh axis, those of one ``torch._foreach`` call one together, and every rank must
    compute it: no ``if rank == 0`` around it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        if len(lists) == 1 and lists[0] is args[0] and _is_foreach(func) and len(_meshes(lists[0])) > 1:
            return self._mesh_by_mesh(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor):
            return result.full_tensor() if result.dim() == 0 else result
        if isinstance(result, list | tuple) and any(isinstance(item, DTensor) for item in result):
            return _whole_scalars(result)
        return result

    def _mesh_by_mesh(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """``func`` of a list of tensors, whose other arguments hold for all. DTensor takes one mesh at a time."""
        tensors, others = list(args[0]), args[1:]
        results: list[Any] = [None] * len(tensors)
        for mesh in _meshes(tensors):
            places = [i for i, tensor in enumerate(tensors) if _mesh(tensor) == mesh]
            of_mesh = func([tensors[i] for i in places], *others, **kwargs)
            for i, result in zip(places, of_mesh or (), strict=False):
                results[i] = result
        return _whole_scalars(results) if any(result is not None for result in results) else None


def whole_scalars_by_hand(module: nn.Module) -> AbstractContextManager[object]:
    """`WholeScalars` around a training step that steps its optimizers itself; nothing around any other.

    Nor around one with compiled parts, which torch does not run as such inside: there ``self.clip_gradients`` is whole,
    and a norm of one's own needs ``.full_tensor()``.
    """
    if getattr(module, "automatic_optimization", True) or any(map(is_compiled, module.modules())):
        return nullcontext()
    return WholeScalars()


def _whole_scalars(values: Sequence[Any]) -> Sequence[Any]:
    """``values``, each sharded number of which is whole. Those that wait for the same reduction share it."""
    waiting: dict[tuple[DeviceMesh, tuple[Placement, ...], torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, DTensor) and value.dim() == 0:
            waiting.setdefault((value.device_mesh, value.placements, value.dtype), []).append(i)
    whole = list(values)
    for (mesh, placements, _), places in waiting.items():
        local = torch.stack([values[i].to_local() for i in places])
        reduced = DTensor.from_local(local, mesh, placements, run_check=False).full_tensor()
        for i, value in zip(places, reduced.unbind(), strict=True):
            whole[i] = value
    return tuple(whole) if isinstance(values, tuple) else whole


def _is_foreach(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").startswith("_foreach_")


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _meshes(tensors: Sequence[Any]) -> list[DeviceMesh | None]:
    """Each once, in the order in which they first appear, which is the same on all ranks."""
    return list(dict.fromkeys(_mesh(tensor) for tensor in tensors if isinstance(tensor, Tensor)))
