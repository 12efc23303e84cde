"""Memory that every rank of an ep group writes into, and exchanges through it that no host waits for.

In an exchange every rank writes rows to where others will read them, tells all that they are there, and waits until all
have told it so. Exchanges are numbered, alike on all ranks, and exchange n uses buffer n % 2. Two buffers do without a
barrier: a rank writes for exchange n into what exchange n - 2 brought to another. It has waited for that rank's flag of
exchange n - 1 by then, which was raised, in the order of that rank's stream, after all that it had issued before: what
reads exchange n - 2 among it. So what an exchange brings must be read, by work that is issued, before the next begins.

Shapes: P ranks of the group, N bytes of each rank's memory.
"""

import os
import secrets
import socket
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._torch_compat import group_timeout, symmetric_memory
from lightning_moe_strategy.collectives import waited
from lightning_moe_strategy.kernels.peer_copy import Peers, signal, wait

NUM_BUFFERS = 2

# Arrays begin where 16-byte pieces do, and no two ranks write to one cache line.
ALIGNMENT = 128

# Without a bound the most that routing brings creeps up: this much at once, and memory is soon large enough.
GROWTH = 1.25

# Flags are int32. A step of a large model makes some thousand exchanges, so months of training get there.
LAST_NUMBER = 2**31 - 1

FILE_PREFIX = "lightning-moe-"


Message = TypeVar("Message")


class Array(NamedTuple):
    """What each rank gets in an exchange: as many rows at the most, on any rank."""

    num_rows: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.width * self.dtype.itemsize


Put = Callable[[Peers, Sequence[int]], None]
"""Writes this rank's rows, given where each array begins in every memory."""


def workspace_of(group: dist.ProcessGroup) -> "Workspace":
    """The memory of a group, which all layers of the process share. It lives as long as the group does."""
    if group not in _workspaces:
        _workspaces[group] = Workspace(group)
    return _workspaces[group]


class Workspace:
    """Buffers on every rank of a group, and how far its exchanges have come.

    They are made by the first exchange, and anew where one needs more than they have room for. That is decided by
    numbers which are the same on all ranks, as is all that `start` is told.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weak: what is remembered by group would else keep its own key.
        self._group = weakref.ref(group)
        self.rank, self.num_ranks = group.rank(), group.size()
        self.number = 0
        """Of the last exchange since the buffers were made."""
        self.num_bytes = 0
        """Of each buffer."""
        self._peers: Peers | None = None
        self._owner: object = None
        self._stream: torch.cuda.Stream | None = None
        self._is_in_flight = False

    def start(self, device: torch.device, arrays: Sequence[Array], put: Put) -> "Exchange":
        """Begin an exchange: ``put`` is run, on a GPU beside what is issued from now on, until it is waited for.

        Raises:
            RuntimeError: on all ranks alike, where memory cannot be shared or there is not enough.
        """
        assert not self._is_in_flight, "an exchange begins before the one before was waited for"
        begins = _begins(arrays)
        peers = self._reserve(device, begins[-1])
        self.number += 1
        buffer = self._flag_bytes + self.number % NUM_BUFFERS * self.num_bytes
        first_bytes = [buffer + begin for begin in begins[:-1]]
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            put(peers, first_bytes)
            signal(self._flags_P(peers), peers, 0, self.rank, self.number)
        self._is_in_flight = True
        return Exchange(self, peers, arrays, first_bytes, put)

    def finish(self, peers: Peers) -> None:
        """Wait for all ranks' part of the exchange under way."""
        group = self._group()
        assert group is not None
        self._is_in_flight = False
        flags_P = self._flags_P(peers)
        with waited(group):
            if self._stream is not None:
                torch.cuda.current_stream(flags_P.device).wait_stream(self._stream)
            wait(flags_P, self.number, seconds=group_timeout(group, flags_P.device).total_seconds())

    def close(self) -> None:
        """Give the buffers back; the next exchange makes others. Every rank does so after the same exchange."""
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)
        self._peers = self._owner = self._stream = None
        self.number = self.num_bytes = 0

    @property
    def _flag_bytes(self) -> int:
        return _aligned(self.num_ranks * torch.int32.itemsize)

    def _flags_P(self, peers: Peers) -> Tensor:
        return peers.memories[self.rank][: self.num_ranks * torch.int32.itemsize].view(torch.int32)

    def _reserve(self, device: torch.device, num_bytes: int) -> Peers:
        """The memories, with buffers of so many bytes at the least."""
        peers = self._peers
        if peers is not None and num_bytes <= self.num_bytes and self.number < LAST_NUMBER:
            assert peers.addresses_P.device == device, "one device for all layers of a process"
            return peers
        group = self._group()
        assert group is not None
        if num_bytes > self.num_bytes:
            num_bytes = _aligned(max(num_bytes, int(GROWTH * self.num_bytes)))
        else:
            num_bytes = self.num_bytes
        # All that came has been read, and all that was put has arrived: the last exchange was waited for.
        self.close()
        whole = self._flag_bytes + NUM_BUFFERS * num_bytes
        if device.type == "cuda":
            self._peers, self._owner = _on_gpus(group, device, whole)
        else:
            self._peers = _in_files(group, whole)
        self.num_bytes = num_bytes
        return self._peers


class Exchange:
    """An exchange that has begun. Others compute until somebody waits for what it brings."""

    def __init__(
        self, workspace: Workspace, peers: Peers, arrays: Sequence[Array], first_bytes: Sequence[int], put: Put
    ) -> None:
        self._workspace, self._peers, self._arrays, self._first_bytes = workspace, peers, arrays, first_bytes
        self._put: Put | None = put
        """Keeps what is being written where it is."""

    def wait(self) -> list[Tensor]:
        """The arrays [num_rows, width], as all ranks have filled them. Views: what reads them must be issued before
        the next exchange begins.

        Raises:
            RuntimeError: on a CPU, after the timeout of the group, with the ranks that did not write.
        """
        self._workspace.finish(self._peers)
        self._put = None
        own = self._peers.memories[self._workspace.rank]
        return [
            own[first : first + array.num_bytes].view(array.dtype).view(array.num_rows, array.width)
            for array, first in zip(self._arrays, self._first_bytes, strict=True)
        ]


_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace] = weakref.WeakKeyDictionary()


def _begins(arrays: Sequence[Array]) -> list[int]:
    """Of each array in a buffer, and the end of the last."""
    begins = [0]
    for array in arrays:
        begins.append(_aligned(begins[-1] + array.num_bytes))
    return begins


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _on_gpus(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> tuple[Peers, object]:
    try:
        memories, addresses, owner = symmetric_memory(num_bytes, device, group)
    except RuntimeError as error:
        raise RuntimeError(
            f"dispatcher='symm_mem' needs {num_bytes} bytes on each of the {group.size()} GPUs of ep that all of them "
            "can write to over NVLink, and torch could not make them. Set an ep inside one NVLink domain, raise "
            "ep_chunks, which makes them smaller, or leave dispatcher out."
        ) from error
    return Peers(tuple(memories), torch.tensor(addresses, device=device)), owner


def _in_files(group: dist.ProcessGroup, num_bytes: int) -> Peers:
    """Zeros in files that all ranks map, and that have no name any more once they have."""
    directory = Path("/dev/shm")
    directory = directory if directory.is_dir() else Path(tempfile.gettempdir())
    room = os.statvfs(directory)
    mine = (_host(), room.f_bavail * room.f_frsize, secrets.token_hex(8))
    hosts, free, names = zip(*_told_to_all(mine, group), strict=True)
    if len(set(hosts)) > 1:
        raise RuntimeError(
            f"dispatcher='symm_mem' on CPUs shares memory between processes of one host, but the {len(hosts)} ranks of "
            f"ep are on {len(set(hosts))}. Set an ep inside one host, or leave dispatcher out."
        )
    if num_bytes * len(hosts) > min(free):
        raise _no_room(directory, num_bytes, len(hosts), min(free))
    paths = [directory / f"{FILE_PREFIX}{names[0]}-{rank}" for rank in range(len(hosts))]
    own = paths[group.rank()]
    try:
        if any(_told_to_all(_reserve_file(own, num_bytes), group)):
            raise _no_room(directory, num_bytes, len(hosts), min(free))
        memories = tuple(torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths)
        _told_to_all(None, group)
    finally:
        own.unlink(missing_ok=True)
    return Peers(memories, torch.tensor([memory.data_ptr() for memory in memories]))


def _reserve_file(path: Path, num_bytes: int) -> bool:
    """Make a file with all its bytes; true where there is no room, which writing to it would not survive."""
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            return True
    return False


def _no_room(directory: Path, num_bytes: int, num_ranks: int, free: int) -> RuntimeError:
    return RuntimeError(
        f"dispatcher='symm_mem' needs {num_bytes * num_ranks} bytes in {directory}, {num_bytes} for each of the "
        f"{num_ranks} ranks of ep, and {free} are free. Make it larger, raise ep_chunks, which makes them fewer, or "
        "leave dispatcher out."
    )


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def _told_to_all(message: Message, group: dist.ProcessGroup) -> list[Message]:
    """Every rank's message, in rank order."""
    messages: list[Message] = [message] * group.size()
    dist.all_gather_object(messages, message, group=group)
    return messages
