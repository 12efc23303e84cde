"""A pool of gloo ranks that starts once per test run and runs functions of the tests.

The workers are forked, so they inherit every imported module, test modules included, and a function is sent
by name. After a failure the pool is thrown away: its ranks may wait in different collectives. So is one whose tests
have left very many process groups behind, each of which has threads. They are not ended one by one, as torch keeps
meshes in caches, and with them the names of their groups.
"""

import datetime
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

SECONDS_TO_OUTLIVE = 5.0
"""How long a rank outlives the test run that started it."""
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)


class Ranks:
    """``ranks(function, *args)`` runs ``function(*args)`` on every rank and returns the results in rank order."""

    def __init__(self, world_size: int) -> None:
        importlib.import_module("transformers.modeling_utils")  # three seconds, which each rank would take for itself
        context = get_context("fork")
        store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        self.world_size = world_size
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, str(store), theirs), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        job = pickle.dumps((function, args))
        for connection in self.connections:
            connection.send_bytes(job)
        answers = [pickle.loads(connection.recv_bytes()) for connection in self.connections]
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(answers) if error]
        if errors:
            raise RankError("\n".join(errors))
        return [result for _, result in answers]

    @property
    def num_threads(self) -> int:
        """Of the rank with most."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return max(len(list(folder.iterdir())) if folder.exists() else 0 for folder in folders)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class RankError(AssertionError):
    """The tracebacks of the ranks that failed."""


def _share_one_device() -> None:
    """Between all of a rank's groups, as gloo allows (torch 2.13 makes one for each).

    A device has a thread that polls a hundred times a second: 25 idle groups take 3.5 % of a core, and 0.3 % so. Types
    are ignored because the class is pybind11's, of whose bases mypy knows nothing.
    """
    gloo = dist.ProcessGroupGloo
    device = gloo.create_device(hostname="127.0.0.1")

    class IsGloo(type(gloo)):  # type: ignore[misc]
        def __instancecheck__(cls, backend: object) -> bool:
            return isinstance(backend, gloo)  # what torch hands out is of its own class

    class OnOneDevice(gloo, metaclass=IsGloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]


def _serve(rank: int, world_size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    _share_one_device()
    # As torchrun would: a Trainer in a rank takes the process group that exists.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="tests",
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    parent = os.getppid()
    while True:
        # Siblings hold the pipe open as well, so that a parent which was killed is not seen at its end.
        while not connection.poll(SECONDS_TO_OUTLIVE):
            if os.getppid() != parent:
                os._exit(1)
        function, args = pickle.loads(connection.recv_bytes())
        torch.manual_seed(0)
        os.environ.pop("PL_GLOBAL_SEED", None)  # seed_everything's, of another test: Lightning's samplers take it
        try:
            payload = pickle.dumps((None, function(*args)))
        except Exception:
            payload = pickle.dumps((traceback.format_exc(), None))
        connection.send_bytes(payload)
