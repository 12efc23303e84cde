"""Where a checkpoint lies: a file system of this machine or cluster, or what fsspec reaches, ``s3://bucket/run``.

A path is whole, with its protocol. The operations are the few that writing aside and publishing need.
"""

import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import IO, Any

from lightning_moe_strategy.checkpoint.manifest import MANIFEST

_BUFFER_BYTES = 1 << 20


def plain_path(path: str | os.PathLike[str]) -> str:
    """As the functions of this room take it: without ``file://`` and without a slash at its end."""
    text = os.fspath(path)
    text = text.removeprefix("file://")
    return text.rstrip("/") or "/"


def storage_of(path: str) -> "Storage":
    """What ``path`` lies on. A protocol other than ``file`` needs fsspec and its package for that protocol."""
    return RemoteStorage(path) if "://" in path else LocalStorage()


class Storage(ABC):
    """Operations on whole paths of one file system."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Also a link that leads nowhere; in a store without directories, a directory that has its manifest."""

    @abstractmethod
    def is_directory(self, path: str) -> bool: ...

    @abstractmethod
    def names(self, directory: str) -> list[str]:
        """What lies in a directory; nothing in one that does not exist."""

    @abstractmethod
    def make_directory(self, path: str) -> None:
        """And those above it."""

    @abstractmethod
    def open(self, path: str, mode: str) -> IO[bytes]: ...

    @abstractmethod
    def rename(self, path: str, new_path: str) -> None: ...

    @abstractmethod
    def remove(self, path: str) -> None:
        """A file, a link or a directory with all that is in it."""

    @abstractmethod
    def sync(self, stream: IO[bytes]) -> None:
        """Have what was written survive a power failure."""

    @abstractmethod
    def begin_sync(self, stream: IO[bytes], offset: int, num_bytes: int) -> None:
        """Have the disk begin with a part of what was written, so that ``sync`` finds little left to do."""

    @abstractmethod
    def sync_directory(self, path: str) -> None:
        """Have the names in a directory survive a power failure."""

    def hold(self, path: str) -> AbstractContextManager[None]:
        """Inside, ``is_held`` is true for other processes, if the file system can lock."""
        return nullcontext()

    def is_held(self, path: str) -> bool:
        return False


class LocalStorage(Storage):
    """A file system that is mounted."""

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def names(self, directory: str) -> list[str]:
        return sorted(os.listdir(directory)) if os.path.isdir(directory) else []

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def open(self, path: str, mode: str) -> IO[bytes]:
        return open(path, mode, buffering=_BUFFER_BYTES)

    def rename(self, path: str, new_path: str) -> None:
        os.rename(path, new_path)

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()
        os.fsync(stream.fileno())

    def begin_sync(self, stream: IO[bytes], offset: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            # Linux begins to write dirty pages back, and frees those that are clean: at this time none.
            os.posix_fadvise(stream.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def hold(self, path: str) -> Generator[None, None, None]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with suppress(OSError):  # not every network file system can lock
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)

    def is_held(self, path: str) -> bool:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False


class RemoteStorage(Storage):
    """What fsspec reaches. Directories may be no more than a prefix of names, and a rename is a copy of each file.

    So the manifest is what makes a directory exist: the last that is copied, the first that is removed.
    """

    def __init__(self, path: str) -> None:
        self._files: Any = import_module("fsspec.core").url_to_fs(path)[0]  # Lightning needs it, and brings it

    def exists(self, path: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.isfile(path) or self._files.isfile(f"{path}/{MANIFEST}"))

    def is_directory(self, path: str) -> bool:
        return bool(self._files.isdir(path))

    def names(self, directory: str) -> list[str]:
        self._files.invalidate_cache()
        if not self._files.isdir(directory):
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in self._files.ls(directory, detail=False))

    def make_directory(self, path: str) -> None:
        self._files.makedirs(path, exist_ok=True)

    def open(self, path: str, mode: str) -> IO[bytes]:
        stream: IO[bytes] = self._files.open(path, mode)
        return stream

    def rename(self, path: str, new_path: str) -> None:
        if self._files.isfile(path):
            self._files.mv(path, new_path)
            return
        if self._files.isdir(new_path):
            self.remove(new_path)
        self.make_directory(new_path)
        for name in self._manifest_last(path):
            self._files.copy(f"{path}/{name}", f"{new_path}/{name}", recursive=self._files.isdir(f"{path}/{name}"))
        self.remove(path)

    def remove(self, path: str) -> None:
        if self._files.isfile(f"{path}/{MANIFEST}"):
            self._files.rm(f"{path}/{MANIFEST}")
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()

    def begin_sync(self, stream: IO[bytes], offset: int, num_bytes: int) -> None:
        """Nothing: parts are on their way as they are written."""

    def sync_directory(self, path: str) -> None:
        """Nothing: a store that says that it has an object keeps it."""

    def _manifest_last(self, path: str) -> list[str]:
        return sorted(self.names(path), key=lambda name: name == MANIFEST)
