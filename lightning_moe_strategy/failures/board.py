"""What ranks tell each other when a run fails, through the store that brought them together.

A store needs no collective, so it still answers when no rank can join one. Nothing is written while a run is well.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_moe_strategy.failures.neighbours import Member
from lightning_moe_strategy.failures.position import Position

Kind = Literal["error", "relayed", "collective", "gone", "hang"]
"""``error``: this rank's own. ``relayed``: another rank's, raised on all. ``collective``: one that others left or never
joined. ``gone``: a process that ended without a word. ``hang``: a collective that waits for as long as it may."""
OWN: tuple[Kind, ...] = ("error", "relayed")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed."""

    rank: int
    kind: Kind
    summary: str
    """``ValueError: loss is nan``."""
    host: str
    seconds: float
    """Unix time."""
    traceback: str = ""
    place: str = ""
    """``step 3, train.py:21 in training_step``."""
    position: Position = Position()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"position": Position.from_json(values["position"])})


class Board:
    """One rank's connection to the store of its run. Used by one thread: a call may wait for as long as the store."""

    def __init__(self, run: str, *, rank: int, world_size: int, timeout: timedelta) -> None:
        """Connects to ``MASTER_ADDR:MASTER_PORT``, where the ranks met. ``run``: a name that no run before had.

        Raises:
            DistError: nobody answers there within ``timeout``.
        """
        self.run, self.rank, self.world_size = run, rank, world_size
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        self._whole_store = store  # torchrun starts ranks again on the same one
        self.start_again(0)

    def start_again(self, generation: int) -> None:
        """Forget all failures; every rank does it."""
        prefix = f"lightning_moe_strategy/failures/{self.run}/{generation}"
        self._store = dist.PrefixStore(prefix, self._whole_store)  # type: ignore[attr-defined]

    def join(self, member: Member) -> None:
        self._store.set(f"member/{self.rank}", json.dumps(asdict(member)))

    def members(self, ranks: Iterable[int]) -> dict[int, Member]:
        """Those of ``ranks`` that have joined so far."""
        texts = {rank: self._read(f"member/{rank}") for rank in ranks}
        return {rank: Member(**json.loads(text)) for rank, text in texts.items() if text is not None}

    def publish(self, failure: Failure) -> None:
        """How a rank failed, and that it has been heard."""
        self._hear(failure.rank)
        if failure.kind in OWN:
            self._store.add("own", 1)
        self._store.set(f"failure/{self._store.add('failures', 1)}", failure.to_json())

    def has_failures(self) -> bool:
        """One small question to the store."""
        return bool(self._store.add("failures", 0))

    def failures(self) -> list[Failure]:
        """In the order in which they were published."""
        numbers = range(1, self._store.add("failures", 0) + 1)
        texts = [self._read(f"failure/{number}") for number in numbers]
        return [Failure.from_json(text) for text in texts if text is not None]

    def stand_at(self, position: Position) -> None:
        """Where this rank stands, as it has not failed itself."""
        self._hear(self.rank)
        text = json.dumps({"rank": self.rank} | position.to_json())
        self._store.set(f"position/{self._store.add('positions', 1)}", text)

    def positions(self) -> dict[int, Position]:
        """Of the ranks that said it."""
        numbers = range(1, self._store.add("positions", 0) + 1)
        found = [json.loads(text) for number in numbers if (text := self._read(f"position/{number}")) is not None]
        return {values.pop("rank"): Position.from_json(values) for values in found}

    def num_heard(self) -> int:
        """Ranks that have said how they failed or where they stand, or of which another said that they are gone."""
        return self._store.add("heard", 0)

    def num_own(self) -> int:
        """Ranks that raised an error of their own."""
        return self._store.add("own", 0)

    def leave(self) -> None:
        """This rank ends as it should."""
        self._store.set(f"left/{self.rank}", "")

    def has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"]))

    def is_first_to(self, do: str) -> bool:
        """Whether no rank asked this before."""
        return self._store.add(f"first/{do}", 1) == 1

    def decide(self) -> None:
        """This rank knows how the run ended."""
        self._store.add("decided", 1)

    def num_decided(self) -> int:
        return self._store.add("decided", 0)

    def _hear(self, rank: int) -> None:
        if self.is_first_to(f"hear/{rank}"):
            self._store.add("heard", 1)

    def _read(self, key: str) -> str | None:
        # ``get`` waits for a key that is not there.
        return self._store.get(key).decode() if self._store.check([key]) else None
