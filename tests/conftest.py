"""Fixtures shared by all tests: ``ranks1`` ... ``ranks8`` run a function on that many gloo ranks (see ranks.py)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankError, Ranks

torch.set_num_threads(1)  # before any fork: a forked OpenMP team hangs

_pools: dict[int, Ranks] = {}
MOST_THREADS = 200
"""A Trainer leaves some 10; the first one of a new pool takes two seconds more than the next."""


def _pool(world_size: int) -> Callable[..., list[Any]]:
    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        if world_size not in _pools:
            _pools[world_size] = Ranks(world_size)
        try:
            return _pools[world_size](function, *args)
        except (RankError, EOFError, OSError):
            _pools.pop(world_size).close()
            raise

    return run


@pytest.fixture
def ranks1() -> Callable[..., list[Any]]:
    return _pool(1)


@pytest.fixture
def ranks2() -> Callable[..., list[Any]]:
    return _pool(2)


@pytest.fixture
def ranks4() -> Callable[..., list[Any]]:
    return _pool(4)


@pytest.fixture
def ranks8() -> Callable[..., list[Any]]:
    return _pool(8)


@pytest.fixture(autouse=True)
def _renew_pools() -> Iterator[None]:
    yield
    for world_size in [size for size, pool in _pools.items() if pool.num_threads > MOST_THREADS]:
        _pools.pop(world_size).close()


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what long_cases.txt names; a line for which no test is there any more is an error."""
    lines = Path(__file__).with_name("long_cases.txt").read_text().splitlines()
    long_cases = {line for line in lines if line and not line.startswith("#")}
    collected = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in long_cases & set(collected):
        collected[name].add_marker(pytest.mark.slow)
    files = {name.partition("::")[0] for name in collected}
    gone = sorted(name for name in long_cases - set(collected) if name.partition("::")[0] in files)
    if gone and not any("::" in argument for argument in config.args):  # a run that names tests collects only those
        raise pytest.UsageError(f"tests/long_cases.txt names tests that do not exist: {', '.join(gone)}")
