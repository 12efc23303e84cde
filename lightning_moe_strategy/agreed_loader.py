"""A rank's loader as long as every rank has a batch: all stop together, and an error of one is an error of all.

A rank that went on alone would wait in its first collective for those that stopped, until the timeout.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lightning_moe_strategy._lightning_compat import rank_zero_warn
from lightning_moe_strategy.data_position import LoaderPosition
from lightning_moe_strategy.host_agreement import max_over_hosts, raise_everywhere, sum_over_hosts


class AgreedLoader:
    """The batches of ``loader`` for as long as every rank has one.

    It passes for the loader it wraps: ``isinstance``, attributes that are read and set. ``len()`` is the length of the
    shortest over the ranks; TypeError when a rank's loader has no length. A batch that this rank holds and another
    does not is dropped, and one warning says how many were left.

    To Lightning it is a loader with a state, which it need not warn of when it resumes inside an epoch. What it saves
    so is rank 0's, and is loaded where nothing else says where each rank stood.
    """

    loader: Any
    name: str
    group: dist.ProcessGroup
    position: LoaderPosition | None

    def __init__(
        self,
        loader: object,
        *,
        name: str,
        group: dist.ProcessGroup,
        before_iteration: Callable[[], None],
        position: LoaderPosition | None = None,
        batches: Callable[[Any], Iterator[Any]] = iter,
    ) -> None:
        """Every rank builds it.

        ``before_iteration`` is called by each ``iter()``; the batches are those that ``position`` reads, or
        ``batches(loader)``.
        """
        num_batches = num_batches_of(loader)
        num_agreed, num_left, num_longer = _agreed_length(num_batches, group)
        # Not as attributes are set: those belong to the loader.
        self.__dict__.update(
            loader=loader, name=name, group=group, _before_iteration=before_iteration, _num_batches=num_agreed,
            _num_left=num_left, _num_longer=num_longer, _has_warned=False, position=position, _batches=batches,
        )  # fmt: skip

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Lightning asks whether a loader is a DataLoader, or has a state; so do users.
        return type(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.loader, name, value)

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError(f"{self.name} of some rank has no len().")
        return int(self._num_batches)

    def __iter__(self) -> Iterator[Any]:
        self._before_iteration()
        return _AgreedBatches(self, _iterator_of(self._open))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict() if hasattr(self.loader, "state_dict") else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = self.position
        if hasattr(self.loader, "load_state_dict") and state and (position is None or not position.is_resumed):
            self.loader.load_state_dict(state)

    def _open(self) -> Iterator[Any]:
        return self._batches(self.loader) if self.position is None else self.position.batches()

    def say_left(self, num_longer: int) -> None:
        """Warn once that ``num_longer`` ranks have batches that nobody uses."""
        if self._has_warned or not num_longer:
            return
        self.__dict__["_has_warned"] = True
        known = self._num_batches is not None and self._num_longer
        num_left = f"{self._num_left}" if known else f"at least {num_longer}"
        rank_zero_warn(
            f"{self.name} does not yield equally many batches on all ranks. They stop together, and {num_left} batches "
            f"on {self._num_longer if known else num_longer} of {self.group.size()} ranks are left out. Give every "
            "rank equally many: drop what is over, or repeat some samples as DistributedSampler does."
        )

    def say_left_at(self, num_read: int) -> None:
        """Where lengths are known, Lightning does not ask for a batch after the last: say it at the last."""
        if num_read == self._num_batches:
            self.say_left(self._num_longer)


class _AgreedBatches(Iterator[Any]):
    def __init__(self, agreed: AgreedLoader, batches: Iterator[Any]) -> None:
        self._agreed, self._batches = agreed, batches
        self._num_read, self._is_over = 0, False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        batch, error, has_ended = None, None, False
        try:
            batch = next(self._batches)
        except StopIteration:
            has_ended = True
        except Exception as reason:
            error = reason
        agreed = self._agreed
        num_ended, num_failed = sum_over_hosts([has_ended, error is not None], agreed.group)
        self._is_over = bool(num_ended or num_failed)
        if num_failed:
            raise_everywhere(error, agreed.group, f"reading batch {self._num_read} of {agreed.name}")
        if num_ended:
            self._batches = iter(())  # ends the workers of those that go on
            agreed.say_left(agreed.group.size() - num_ended)
            raise StopIteration
        self._num_read += 1
        agreed.say_left_at(self._num_read)
        return batch


def own_loader(loader: object) -> object:
    """What the user handed over."""
    return loader.__dict__["loader"] if type(loader) is AgreedLoader else loader


def num_batches_of(loader: Any) -> int | None:
    """Its length; None when it has none."""
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(loader)
    return None


def _iterator_of(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """An error of ``iter()`` is raised by the first ``next()``, where the other ranks hear of it."""
    try:
        return begin()
    except Exception as error:
        return _failing(error)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _agreed_length(num_batches: int | None, group: dist.ProcessGroup) -> tuple[int | None, int, int]:
    """(batches that every rank has, batches left on all ranks together, ranks with batches left)."""
    own = 0 if num_batches is None else num_batches
    most, minus_fewest, is_unknown = max_over_hosts([own, -own, num_batches is None], group)
    if is_unknown:
        return None, 0, 0
    fewest = -minus_fewest
    if most == fewest:
        return fewest, 0, 0
    num_left, num_longer = sum_over_hosts([own - fewest, own > fewest], group)
    return fewest, num_left, num_longer
