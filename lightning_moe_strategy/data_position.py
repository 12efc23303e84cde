"""Where a training loader stands, and how another run goes on: the next batch is the one that would have come.

An epoch is counted in batches of the loop: a loader that ends before others begins again, and one that is read ahead
has been asked for a batch more than the loop has used.
"""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_moe_strategy.indexed_reader import IndexedReader, generators_of, reads_by_index, rest_in_global_order
from lightning_moe_strategy.random_states import RandomState, random_state, random_state_of


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What decided the order of a pass over a loader when it began."""

    random: RandomState
    generators: list[Tensor]
    """Of the loader and its samplers."""
    starts_workers: bool
    """False where those of the pass before went on."""
    epoch: int | None = None
    """As a DistributedSampler was told; a run that ends inside an epoch has the next tell it another."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a loader stands before a batch."""

    num_batches: int = 0
    """Of the epoch, before it."""
    index: int = 0
    """Of the pass, before it."""
    num_samples: int | None = 0
    """Of the pass, on all ranks; None where batches have no known number of samples."""
    beginning: Beginning | None = None
    """Of the pass; None where the batch is its first."""
    generators: list[Tensor] = field(default_factory=list)
    """Of the loader and its samplers, before a pass."""
    workers: Mapping[int, bytes] = field(default_factory=dict)
    """The pickled random state of each worker that gave a batch; pickled by this process, and never saved so."""
    checksum: int | None = None
    """Of the indices so far."""
    own_state: Any = None
    """What the loader's ``state_dict()`` said."""
    random: RandomState | None = None
    """Of this process before the batch was read, if it was."""
    dp: int = 1
    batch_size: int | None = None
    seed: int | None = None
    """Of a DistributedSampler; Lightning's takes that of ``seed_everything``."""

    def as_plain(self) -> dict[str, Any]:
        """For ``torch.load(weights_only=True)``, as far as the loader's own state is for it."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["workers"] = {number: pickle.loads(state).as_plain() for number, state in self.workers.items()}
        plain["random"] = None if self.random is None else self.random.as_plain()
        if self.beginning is not None:
            plain["beginning"] = dict(vars(self.beginning), random=self.beginning.random.as_plain())
        return plain

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "Position":
        found = dict(plain)
        found["workers"] = {n: pickle.dumps(RandomState.of_plain(state)) for n, state in plain["workers"].items()}
        if plain["random"] is not None:
            found["random"] = RandomState.of_plain(plain["random"])
        if plain["beginning"] is not None:
            random = RandomState.of_plain(plain["beginning"]["random"])
            found["beginning"] = Beginning(**dict(plain["beginning"], random=random))
        return Position(**found)


Reading = Callable[[RandomState | None], AbstractContextManager[None]]
"""Around the reading of a batch; its argument is the random state before it where the saved run had read it ahead."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a loader's position needs to know of the loop that reads it."""

    num_done: Callable[[], int]
    """Batches of the epoch that the loop has begun."""
    num_accumulated: Callable[[], int]
    """Batches of an optimizer step; positions are kept back to the first of them."""
    random: Callable[[], RandomState]
    """What would be drawn now, on the GPU too."""
    reading: Reading
    say: Callable[[str], None]
    """Called with a sentence for the user."""


class LoaderPosition:
    """Reads ``loader`` pass by pass and knows where it stands. ``dp``: how many ranks hold other samples."""

    def __init__(self, loader: Any, *, name: str, dp: int, loop: Loop) -> None:
        self.loader, self.name, self._loop = loader, name, loop
        self._keeps_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._reader = IndexedReader(loader) if reads_by_index(loader) and not self._keeps_state else None
        self._generators = generators_of(loader)
        size = getattr(loader, "batch_size", None)
        sampler = getattr(loader, "sampler", None)
        self._sampler = sampler if isinstance(sampler, DistributedSampler) else None
        seed = None if self._sampler is None else self._sampler.seed
        self._now = self._new = Position(dp=dp, batch_size=size if isinstance(size, int) else None, seed=seed)
        self._before: dict[int, Position] = {}
        self._workers: dict[int, bytes] = {}
        self._resumed: Position | None = None
        self._num_read_by_others: int | None = None
        """Samples of the epoch, where a pass goes on after ranks of another layout."""

    @property
    def is_resumed(self) -> bool:
        """Whether the next batch is the first after a checkpoint."""
        return self._resumed is not None

    def at(self, num_batches: int) -> Position:
        """Where it stood, or stands, after so many batches of the epoch."""
        return self._before.get(num_batches) or self._current()

    def at_end(self) -> Position:
        """Where it stands when an epoch is over, and another pass comes."""
        workers = self._workers if self._reader is not None and self._reader.keeps_workers else {}
        return replace(self._new, generators=self._generator_states(), workers=workers)

    def go_on_at(self, saved: Position) -> int:
        """Begin there; returns the batches of the epoch that count as used. Nothing is read yet.

        Raises:
            ValueError: the rest of the epoch cannot be told, because other ranks share the samples.
        """
        dp, batch_size = self._new.dp, self._new.batch_size
        if self._sampler is not None and saved.seed is not None:
            self._sampler.seed = saved.seed
            self._new = replace(self._new, seed=saved.seed)
        is_same = (saved.dp, saved.batch_size) == (dp, batch_size)
        if is_same and saved.batch_size is not None:
            is_same = saved.num_samples == saved.index * saved.batch_size * saved.dp
        if saved.beginning is None or is_same:
            self._resumed = replace(saved, dp=dp, batch_size=batch_size)
            return self._resumed.num_batches
        num_used = self._used_by_others(saved)
        self._resumed = replace(
            saved, num_batches=num_used, index=num_used, checksum=None, workers={}, random=None, dp=dp,
            batch_size=batch_size,
        )  # fmt: skip
        return num_used

    def batches(self) -> Iterator[Any]:
        """One pass. It begins when its first batch is asked for."""
        batches: Iterator[Any] | None = None
        while True:
            saved, self._resumed = self._resumed, None
            if saved is not None:
                self._now, self._workers = replace(saved, random=None), dict(saved.workers)
            elif batches is None:
                self._start_pass()
            with self._loop.reading(None if saved is None else saved.random):
                self._remember(saved)
                batches = self._begun(saved) if batches is None else batches
                try:
                    item = next(batches)
                except StopIteration:
                    return
            yield self._taken(item)

    def _start_pass(self) -> None:
        is_new_epoch = self._loop.num_done() == 0
        if is_new_epoch:
            self._before.clear()
        self._now = replace(self._new, num_batches=0 if is_new_epoch else self._now.num_batches)

    def _remember(self, saved: Position | None) -> None:
        """Where it stands before the batch that is read next."""
        position = self._current() if saved is None else saved
        self._before[self._now.num_batches] = replace(position, random=self._loop.random())
        num_done = self._loop.num_done()
        oldest = min(num_done - num_done % max(self._loop.num_accumulated(), 1), self._now.num_batches)
        for number in [number for number in self._before if number < oldest]:
            del self._before[number]

    def _current(self) -> Position:
        is_inside = self._now.beginning is not None
        return replace(
            self._now,
            generators=[] if is_inside else self._generator_states(),
            workers=dict(self._workers),
            own_state=copy.deepcopy(self.loader.state_dict()) if self._keeps_state and is_inside else None,
        )

    def _begun(self, saved: Position | None) -> Iterator[Any]:
        if saved is not None and saved.beginning is not None:
            return self._begun_inside(saved, saved.beginning)
        if saved is not None:
            self._set_generators(saved.generators)
        keeps_workers = self._reader is not None and self._reader.keeps_workers
        if not keeps_workers:
            self._workers = {}
        beginning = Beginning(
            random=random_state(), generators=self._generator_states(), starts_workers=not self._workers,
            epoch=None if self._sampler is None else self._sampler.epoch,
        )  # fmt: skip
        self._now = replace(self._now, beginning=beginning, checksum=0)
        return self._opened(0, beginning)

    def _begun_inside(self, saved: Position, beginning: Beginning) -> Iterator[Any]:
        self._set_generators(beginning.generators)
        if self._sampler is not None and beginning.epoch is not None:
            self._sampler.set_epoch(beginning.epoch)
        with random_state_of(beginning.random):
            if self._keeps_state:
                self.loader.load_state_dict(saved.own_state)
                own: Iterator[Any] = iter(self.loader)
                return own
            batches = self._opened(saved.index, beginning)
        reader = self._reader
        if reader is None:
            return batches
        if reader.draws_at_every_batch:
            self._loop.say(
                f"The sampler of {self.name} draws from the random numbers of the process at every batch, where "
                "training draws too: what it gives from here on is not what it would have given. Give it a generator "
                "of its own."
            )
        elif None not in (saved.checksum, reader.checksum_of_skipped) and saved.checksum != reader.checksum_of_skipped:
            self._loop.say(
                f"The first {saved.index} batches of {self.name} are other samples now than they were before the "
                "checkpoint was saved, so some of the epoch may be read twice and others not at all. The dataset has "
                "another length, or its sampler another order: one that counts epochs by itself needs set_epoch(epoch)."
            )
        return batches

    def _opened(self, num_skipped: int, beginning: Beginning) -> Iterator[Any]:
        """The batches of a pass after the first ``num_skipped``."""
        if self._reader is not None:
            num_read, self._num_read_by_others = self._num_read_by_others, None
            # Not earlier: the sampler is told its epoch just before its first batch is asked for.
            instead = None if num_read is None else rest_in_global_order(self.loader, num_read)
            return self._reader.begin(
                num_skipped=0 if instead is not None else num_skipped,
                instead=instead,
                workers={number: pickle.loads(state) for number, state in self._workers.items()},
                adds_seed=beginning.starts_workers,
            )
        batches: Iterator[Any] = iter(self.loader)
        for _ in range(num_skipped):
            next(batches, None)
        if num_skipped:
            self._loop.say(
                f"{self.name} has neither an index nor a state_dict(): {num_skipped} batches were read and dropped on "
                "every rank to come to where the checkpoint was saved. A loader with state_dict() and "
                "load_state_dict(), as torchdata's StatefulDataLoader, goes on at once."
            )
        return batches

    def _taken(self, item: Any) -> Any:
        now, checksum = self._now, None
        if self._reader is not None:
            item, of_worker = self._reader.take(item)
            if of_worker is not None:
                self._workers[of_worker[0]] = of_worker[1]
            checksum = self._reader.checksum(now.index)
        num_samples = None
        if now.num_samples is not None and now.batch_size is not None:
            num_samples = now.num_samples + now.batch_size * now.dp
        self._now = replace(
            now, num_batches=now.num_batches + 1, index=now.index + 1, num_samples=num_samples, checksum=checksum
        )
        return item

    def _used_by_others(self, saved: Position) -> int:
        """Batches of this layout that other ranks, or batches of another size, have used up."""
        dp, size = self._new.dp, self._new.batch_size
        if saved.num_samples is not None and size is not None:
            if self._reader is not None:
                rest = rest_in_global_order(self.loader, saved.num_samples)
                if rest is not None:
                    self._num_read_by_others = saved.num_samples
                    return max(len(self.loader) - len(rest), 0)
            elif not self._keeps_state and saved.num_samples % (dp * size) == 0:
                self._loop.say(
                    f"{self.name} was read by {saved.dp} ranks and is now by {dp}. It goes on after "
                    f"{saved.num_samples} samples, which is right if sample i of the stream goes to "
                    f"rank i % {dp} of them."
                )
                return saved.num_samples // (dp * size)
        kind = "the state of a loader is of its share of the samples"
        if not self._keeps_state:
            kind = "the order of the samples over all ranks is not known, as it is for a DistributedSampler"
        raise ValueError(
            f"The checkpoint was saved inside an epoch, after {saved.index} batches of {saved.batch_size} on each of "
            f"d_rep * fsdp = {saved.dp} shares; {self.name} has batches of {size} on {dp} shares, and {kind}. Resume "
            f"with d_rep * fsdp = {saved.dp} and batch_size = {saved.batch_size} (cp, ep and e_fsdp may change), or "
            "from a checkpoint of the end of an epoch."
        )

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_generators(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)
