"""Save while the training goes on: a copy in host memory, and a thread that writes it with those of the other ranks.

One save is in flight at most. The memory of the copy, as large as this rank's shards, is kept for the next.
"""

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.host_copy import HostCopy, Key
from lightning_moe_strategy.checkpoint.plain import packed
from lightning_moe_strategy.checkpoint.planner import KnownPlans
from lightning_moe_strategy.checkpoint.save import agreed, explained, write_directory
from lightning_moe_strategy.checkpoint.storage import plain_path


class BackgroundSaves:
    """Saves of all ranks that run beside the training. Every rank calls its methods, in the same order.

    ``timeout``: of what the ranks agree on.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = _own_group(timeout)
        self._copy = HostCopy()
        self._known = KnownPlans()
        self._hooks: list[RemovableHandle] = []
        self._save: _Save | None = None

    @property
    def path(self) -> str | None:
        """Of the save that was not waited for yet; the same on all ranks."""
        return None if self._save is None else self._save.path

    def save(
        self,
        path: str,
        sharded: Mapping[str, Any],
        rest: Mapping[str, Any],
        *,
        layout: Mapping[str, int],
        versions: Mapping[str, str],
        optimizers: Mapping[str, Optimizer] = MappingProxyType({}),
    ) -> None:
        """As ``save_directory``, but return as soon as what is there may change. Waits for the save before.

        ``optimizers``: by the key in ``sharded`` under which their state is. It is copied last, in the thread, and
        their next step waits for that.

        Raises:
            CheckpointError: the save before failed, or ``rest`` cannot be saved.
        """
        path = plain_path(path)
        self.wait()

        def copied() -> tuple[bytes, dict[str, Any]]:
            packed_rest = packed(rest) if self._group.rank() == 0 else b""
            return packed_rest, self._copy.take(sharded, lambda key: _is_state(key, optimizers))

        def write() -> None:
            agreed(path, self._copy.finish, self._group)
            write_directory(
                path, copy, lambda: packed_rest, layout=layout, versions=versions, group=self._group, known=self._known
            )

        try:
            packed_rest, copy = agreed(path, copied, self._group)
            self._hooks = [o.register_step_pre_hook(self._copy.hold_step) for o in optimizers.values()]
            self._save = _Save(path, write)
        except BaseException:
            self._copy.give_up()
            raise

    def then(self, action: Callable[[], None]) -> None:
        """Do it once the save in flight is published, in its thread or here; never, should it fail."""
        if self._save is None:
            action()
        else:
            self._save.then(action)

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        save = self._taken()
        if save is not None:
            save.join()
            agreed(save.path, save.raise_error, self._group)

    def finish_alone(self, seconds: float) -> str | None:
        """Wait without the other ranks, which may be anywhere: why the save failed, or None.

        For the end of a training that failed. The threads of the other ranks go on as long as their processes do.
        """
        save = self._taken()
        if save is None:
            return None
        if not save.join(seconds):
            return f"checkpoint({save.path!r}) was not saved within {seconds:.0f} s, and what was there before stays."
        try:
            save.raise_error()
        except Exception as error:
            return explained(save.path, error, self._group.rank())
        return None

    def _taken(self) -> "_Save | None":
        """The save in flight, which somebody waits for now."""
        for hook in self._hooks:
            hook.remove()
        save, self._save, self._hooks = self._save, None, []
        return save


class _Save:
    """One save in its thread."""

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self.path = path
        self._write = write
        self._error: BaseException | None = None
        self._actions: list[Callable[[], None]] = []
        self._is_over = False
        self._lock = threading.Lock()
        # Not a daemon: a process that ends in order finishes what it has begun.
        self._thread = threading.Thread(target=self._run, name=f"save {path}", daemon=False)
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_over:
                self._actions.append(action)
                return
        self._do([action])

    def join(self, seconds: float | None = None) -> bool:
        """Whether it is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            # Not as it is: what DCP raises on other ranks need not be an Exception.
            self._error = error if isinstance(error, Exception) else CheckpointError(str(error))
        while actions := self._next_actions():
            self._do(actions)

    def _next_actions(self) -> list[Callable[[], None]]:
        with self._lock:
            actions, self._actions = self._actions, []
            self._is_over = not actions
            return actions

    def _do(self, actions: list[Callable[[], None]]) -> None:
        for action in actions:
            if self._error is not None:
                return
            try:
                action()
            except Exception as error:
                self._error = error


def _is_state(key: Key, optimizers: Mapping[str, Optimizer]) -> bool:
    """Options of parameter groups are not: schedulers change them between steps."""
    return key[0] in optimizers and key[1:2] == ("state",)


def _own_group(timeout: timedelta) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return _group_of(world, timeout)


@functools.cache
def _group_of(world: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Made once for a world: what a thread exchanges must not meet what the training exchanges."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    atexit.register(_end, group)
    return group


def _end(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError, AssertionError):  # the user has ended all groups already
        dist.destroy_process_group(group)
