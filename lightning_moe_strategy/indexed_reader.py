"""A DataLoader that can begin in the middle of a pass: its sampler's indices are skipped, no sample is loaded.

Workers send their random state with every batch, so that others can go on in their place.
"""

import copy
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_moe_strategy._torch_compat import act_as_worker
from lightning_moe_strategy.random_states import RandomState, random_state, set_random_state

WorkerStates = Mapping[int, RandomState]
"""By the number of a worker."""


def reads_by_index(loader: object) -> bool:
    """Whether samples are asked for by index, so that some can be left out."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


class IndexedReader:
    """Passes over ``loader``, which stays as it is."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.keeps_workers = bool(loader.persistent_workers and loader.num_workers)
        self._indices = _Indices(_index_sampler(loader))
        self._reader: DataLoader[Any] | None = None

    def begin(
        self, *, num_skipped: int = 0, instead: Iterable[Any] | None = None, workers: WorkerStates, adds_seed: bool
    ) -> Iterator[Any]:
        """The batches after ``num_skipped``; ``instead``: indices for this pass in place of the sampler's.

        ``workers``: what their random states are to be. ``adds_seed``: a seed for workers is drawn, as by any new pass.
        """
        num_workers = self.loader.num_workers
        offset = num_skipped % num_workers if num_workers and instead is None else 0
        if self._reader is None or offset:
            reader = self._reading_loader(workers, offset)
            if self.keeps_workers and not offset:
                self._reader = reader
        else:
            reader = self._reader
        self._indices.prepare(num_skipped, instead)
        generator = reader.generator
        if not adds_seed:
            reader.generator = torch.Generator()
        batches = iter(reader)
        reader.generator = generator
        self._indices.skip()
        return batches

    def take(self, item: Any) -> tuple[Any, tuple[int, bytes] | None]:
        """(batch, (worker, its random state after it)) of what an iterator yields."""
        if not self.loader.num_workers:
            return item, None
        batch, (worker, state) = item
        return batch, (worker, state)

    def checksum(self, index: int) -> int | None:
        """Of all indices up to those of batch ``index``, which was read just now."""
        return self._indices.checksums.pop(index, None)

    @property
    def checksum_of_skipped(self) -> int | None:
        return self._indices.checksum_of_skipped

    @property
    def draws_at_every_batch(self) -> bool:
        """Whether the sampler took random numbers that are not its own while indices were skipped."""
        return self._indices.draws_at_every_batch

    def _reading_loader(self, workers: WorkerStates, offset: int) -> DataLoader[Any]:
        reader = copy.copy(self.loader)
        # A DataLoader refuses to have these set, as its iterator may have read them: this one has none yet.
        changes: dict[str, Any] = {"_iterator": None}
        changes["sampler" if self.loader.batch_sampler is None else "batch_sampler"] = self._indices
        if num_workers := self.loader.num_workers:
            changes["collate_fn"] = _WithState(self.loader.collate_fn)
            changes["worker_init_fn"] = _Init(self.loader.worker_init_fn, dict(workers), offset, num_workers)
            if offset:
                changes["persistent_workers"] = False  # their numbers are those of this pass alone
        reader.__dict__.update(changes)
        return reader


def generators_of(loader: object) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, apart from those of the process."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    return list(found.values())


def rest_in_global_order(loader: DataLoader[Any], num_samples: int) -> list[list[int]] | None:
    """This rank's batches of indices, when all ranks together have read the first ``num_samples`` of the epoch.

    None where the order over all ranks is not known: a sampler that is no DistributedSampler, a batch sampler.
    """
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if not isinstance(sampler, DistributedSampler) or type(batch_sampler) is not BatchSampler:
        return None
    everyones = copy.copy(sampler)
    length = len(sampler.dataset)  # type: ignore[arg-type]
    everyones.__dict__.update(num_replicas=1, rank=0, num_samples=length, total_size=length)
    order = list(everyones)
    rest = order[num_samples:]
    left_over = len(rest) % sampler.num_replicas
    if left_over and sampler.drop_last:
        rest = rest[:-left_over]
    elif left_over:
        missing = sampler.num_replicas - left_over
        rest += (order * -(-missing // len(order)))[:missing]
    own = rest[sampler.rank :: sampler.num_replicas]
    return list(BatchSampler(own, batch_sampler.batch_size, batch_sampler.drop_last))


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class _Indices:
    """What an index sampler gives, with a checksum; its next pass may begin later, or be other indices."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.checksums: dict[int, int] = {}
        self.checksum_of_skipped: int | None = None
        self.draws_at_every_batch = False
        self._num_skipped = 0
        self._instead: Iterable[Any] | None = None
        self._current: _Rest | None = None

    def prepare(self, num_skipped: int, instead: Iterable[Any] | None) -> None:
        self._num_skipped, self._instead = num_skipped, instead
        self.checksums, self.checksum_of_skipped, self.draws_at_every_batch = {}, None, False
        self._current = None

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice before it takes any.
        if self._instead is not None:
            return iter(self._instead)
        self._current = _Rest(self, iter(self.sampler), self._num_skipped)
        return self._current

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def skip(self) -> None:
        """Now, where the loader has not asked for indices yet."""
        if self._current is not None:
            self._current.skip()


class _Rest(Iterator[Any]):
    """Skips when it is first asked: after the loader has drawn its seed, as a sampler's first draw comes after it."""

    def __init__(self, indices: _Indices, batches: Iterator[Any], num_skipped: int) -> None:
        self._indices, self._batches, self._num_skipped = indices, batches, num_skipped
        self._number, self._checksum = 0, 0

    def skip(self) -> None:
        while self._number < self._num_skipped:
            self._advance()
            if self._number == 1:
                before = random_state()
            if self._number == self._num_skipped:
                self._indices.checksum_of_skipped = self._checksum
                self._indices.draws_at_every_batch = not _is_same(before, random_state())

    def __next__(self) -> Any:
        self.skip()
        batch = self._advance()
        self._indices.checksums[self._number - 1] = self._checksum
        return batch

    def _advance(self) -> Any:
        batch = next(self._batches)
        self._number += 1
        self._checksum = zlib.crc32(repr(batch).encode(), self._checksum)
        return batch


def _is_same(one: RandomState, other: RandomState) -> bool:
    return (
        torch.equal(one.torch, other.torch)
        and one.python == other.python
        and one.numpy[2:] == other.numpy[2:]
        and np.array_equal(one.numpy[1], other.numpy[1])
    )


class _WithState:
    """Collates, and adds which worker did and its random state afterwards."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Any, tuple[int, bytes]]:
        batch = self.collate(samples)
        info = torch.utils.data.get_worker_info()
        assert info is not None
        # Bytes: pinning memory leaves them alone.
        return batch, (info.id, pickle.dumps(random_state()))


class _Init:
    """Worker k does what worker k + offset did before: that one's number, seeds and random state."""

    def __init__(self, init: Callable[[int], None] | None, states: WorkerStates, offset: int, num: int) -> None:
        self.init, self.states, self.offset, self.num = init, states, offset, num

    def __call__(self, worker: int) -> None:
        number = (worker + self.offset) % self.num
        if self.offset:
            act_as_worker(number)
        if self.init is not None:
            self.init(number)
        if number in self.states:
            set_random_state(self.states[number])
