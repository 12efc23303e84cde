"""What a save beside the training writes: copies of tensors in host memory that is used again.

Most are taken at once. What an optimizer's step alone changes (its state, two thirds of the bytes with AdamW) can be
left for later: it is copied in the thread of the save while the next batch is computed, and the step waits for that.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_strategy._torch_compat import num_changes
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.sharding import local_tensor

Key = tuple[object, ...]


class _Late(NamedTuple):
    """A tensor that is not copied yet."""

    key: Key
    value: Tensor
    buffer: Tensor
    num_changes: int


class HostCopy:
    """Copies of nested dicts of tensors. One is taken at a time; ``finish`` ends it before the next."""

    def __init__(self) -> None:
        self._buffers: dict[Key, Tensor] = {}
        self._late: list[_Late] = []
        self._taken: torch.cuda.Event | None = None
        self._is_whole = threading.Event()
        self._is_whole.set()

    @torch.no_grad()
    def take(self, tree: Mapping[str, Any], is_late: Callable[[Key], bool] = lambda key: False) -> dict[str, Any]:
        """The same dicts and lists with copies of the tensors: valid until the next call.

        Those whose key ``is_late`` are filled by ``finish``. On a GPU the others are on their way until then too, in
        the order of the stream: what changes a tensor afterwards comes after its copy.
        """
        used: dict[Key, Tensor] = {}
        self._late = []
        copy: dict[str, Any] = self._copied(tree, (), used, is_late)
        self._buffers = used
        if any(local_tensor(buffer).is_pinned() for buffer in used.values()):
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            self._taken.record()
        self._is_whole.clear()
        return copy

    @torch.no_grad()
    def finish(self) -> None:
        """Copy what was left, in any thread.

        Raises:
            CheckpointError: such a tensor was changed before.
        """
        late, self._late = self._late, []
        try:
            with _after(self._taken):
                for _, value, buffer, _ in late:
                    local_tensor(buffer).copy_(local_tensor(value), non_blocking=True)
            changed = [key for key, value, _, before in late if _num_changes(value) != before]
        finally:
            self._is_whole.set()
        if changed:
            raise CheckpointError(
                f"{'.'.join(map(str, changed[0]))} was changed outside its optimizer's step, while async_save copied "
                "it: part of it is new. Change an optimizer's state inside step() or in a hook of it, or save with "
                "async_save=False."
            )

    def give_up(self) -> None:
        """No save will ``finish`` this copy: nothing waits for it."""
        self._late = []
        self._is_whole.set()

    def hold_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before an optimizer's step, for ``register_step_pre_hook``: it waits until all is copied.

        A closure computes the gradients before it changes anything, so it is waited after that.
        """
        if self._is_whole.is_set():
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._is_whole.wait()
            return None

        def closure_then_wait() -> Any:
            result = closure()
            self._is_whole.wait()
            return result

        if len(args) > 1:
            return (args[0], closure_then_wait, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_then_wait}

    def _copied(self, value: Any, key: Key, used: dict[Key, Tensor], is_late: Callable[[Key], bool]) -> Any:
        if isinstance(value, Mapping):
            return {name: self._copied(item, (*key, name), used, is_late) for name, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, (*key, index), used, is_late) for index, item in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        buffer = self._buffers.get(key)
        if buffer is None or not _is_alike(buffer, value):
            # Through empty_like a DTensor stays on the mesh of the GPUs, its part lies in host memory.
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        if is_late(key):
            self._late.append(_Late(key, value, buffer, _num_changes(value)))
        else:
            local_tensor(buffer).copy_(local_tensor(value), non_blocking=True)
        used[key] = buffer
        return buffer


@contextmanager
def _after(taken: torch.cuda.Event | None) -> Generator[None, None, None]:
    """What is issued inside runs beside the training, after ``taken``, and is done at the end."""
    if taken is None:
        yield
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    stream.wait_event(taken)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _num_changes(tensor: Tensor) -> int:
    """Of a DTensor and of its part: optimizers change either."""
    return num_changes(tensor) + num_changes(local_tensor(tensor))


def _is_alike(buffer: Tensor, value: Tensor) -> bool:
    if isinstance(buffer, DTensor) or isinstance(value, DTensor):
        if not (isinstance(buffer, DTensor) and isinstance(value, DTensor)):
            return False
        if (buffer.device_mesh, buffer.placements) != (value.device_mesh, value.placements):
            return False
    return buffer.shape == value.shape and buffer.dtype == value.dtype
