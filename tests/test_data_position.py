"""A position that was saved is gone on from, or what is in its way is said; random states come back as they were."""

import io
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_moe_strategy.data_position import LoaderPosition, Loop, Position
from lightning_moe_strategy.indexed_reader import rest_in_global_order
from lightning_moe_strategy.random_states import (
    RandomState,
    derived_state,
    random_state,
    random_state_of,
    set_random_state,
)


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Numbers(torch.utils.data.Dataset):
    """``loaded`` keeps what was asked for."""

    def __init__(self, length: int = 24) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def position_of(loader: Any, said: list[str], dp: int = 1) -> LoaderPosition:
    loop = Loop(
        num_done=lambda: 0, num_accumulated=lambda: 1, random=random_state, reading=lambda before: nullcontext(),
        say=said.append,
    )  # fmt: skip
    return LoaderPosition(loader, name="train_dataloader", dp=dp, loop=loop)


def after(loader: Any, num_batches: int, dp: int = 1) -> Position:
    """Where it stands after so many batches, as a checkpoint has it."""
    position = position_of(loader, [], dp)
    batches = position.batches()
    for _ in range(num_batches):
        next(batches)
    buffer = io.BytesIO()
    torch.save(position.at(num_batches).as_plain(), buffer)
    buffer.seek(0)
    return Position.of_plain(torch.load(buffer, weights_only=True))


def rest_of(loader: Any, saved: Position, dp: int = 1) -> tuple[list[Any], list[str]]:
    said: list[str] = []
    position = position_of(loader, said, dp)
    position.go_on_at(saved)
    return [batch.tolist() for batch in position.batches()], said


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def test_no_sample_is_loaded_that_came_before():
    torch.manual_seed(3)
    saved = after(shuffled(), 4)
    torch.manual_seed(3)
    expected = [batch.tolist() for batch in shuffled()][4:]
    loader = shuffled()
    rest, said = rest_of(loader, saved)
    assert rest == expected and not said
    assert loader.dataset.loaded == [index for batch in expected for index in batch]


def test_reading_leaves_the_loader_as_the_user_made_it():
    loader = shuffled()
    before = dict(vars(loader))
    assert len(list(position_of(loader, []).batches())) == 6
    assert vars(loader) == before


def test_a_stream_without_a_state_says_how_much_is_dropped():
    rest, said = rest_of(DataLoader(Stream(), batch_size=4), after(DataLoader(Stream(), batch_size=4), 4))
    assert rest == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert len(said) == 1 and "4 batches were read and dropped" in said[0]


def test_a_dataset_that_grew_is_said():
    saved = after(shuffled(generator=torch.Generator().manual_seed(1)), 3)
    grown = DataLoader(Numbers(32), batch_size=4, shuffle=True, generator=torch.Generator())
    (said,) = rest_of(grown, saved)[1]
    assert "The first 3 batches of train_dataloader are other samples now" in said


class DrawsEachBatch:
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield torch.randint(24, (4,)).tolist()


def test_a_sampler_that_draws_where_training_draws_is_said():
    loader = DataLoader(Numbers(), batch_sampler=DrawsEachBatch())
    (said,) = rest_of(loader, after(loader, 3))[1]
    assert "draws from the random numbers of the process at every batch" in said


def share(dp: int, rank: int, batch_size: int, *, drop_last: bool = False) -> DataLoader:
    sampler = DistributedSampler(Numbers(22), num_replicas=dp, rank=rank, seed=5, drop_last=drop_last)
    return DataLoader(Numbers(22), batch_size=batch_size, sampler=sampler)


@pytest.mark.parametrize("dp", [1, 3, 4, 8])
def test_other_ranks_read_the_rest_of_the_global_order(dp):
    order = list(DistributedSampler(Numbers(22), num_replicas=1, rank=0, seed=5))
    saved = after(share(2, 0, 2), 3, dp=2)
    assert saved.num_samples == 12
    rests = [rest_of(share(dp, rank, 2), saved, dp)[0] for rank in range(dp)]
    own = [[index for batch in rest for index in batch] for rest in rests]
    in_order = [index for of_one_place in zip(*own, strict=True) for index in of_one_place]
    assert in_order[:10] == order[12:] and len(in_order) < 10 + dp


def test_the_rest_is_repeated_or_dropped_as_a_distributed_sampler_does():
    padded = [rest_in_global_order(share(4, rank, 4), 12) for rank in range(4)]
    dropped = [rest_in_global_order(share(4, rank, 4, drop_last=True), 12) for rank in range(4)]
    assert [len(rest[0]) for rest in padded] == [3] * 4 and [len(rest[0]) for rest in dropped] == [2] * 4


@pytest.mark.parametrize("batch_size", [2, 4])
def test_a_sampler_whose_share_is_not_known_is_refused_on_other_ranks(batch_size):
    def own() -> DataLoader:
        return DataLoader(Numbers(), batch_size=batch_size, sampler=RandomSampler(range(24)))

    message = rf"after 2 batches of {batch_size} on each of d_rep \* fsdp = 2 shares.*order of the samples over all"
    with pytest.raises(ValueError, match=message):
        position_of(own(), [], dp=4).go_on_at(after(own(), 2, dp=2))


def test_random_states_come_back_through_a_checkpoint():
    plain = random_state().as_plain()
    expected = draws()
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    state = RandomState.of_plain(torch.load(buffer, weights_only=True))
    later = draws()
    with random_state_of(state):
        assert draws() == expected
    set_random_state(state)
    assert draws() == expected and later != expected


def test_derived_streams_differ_from_each_other_and_are_the_same_again():
    state = random_state()

    def of(number: int) -> tuple[float, float, float]:
        with random_state_of(derived_state(state, number)):
            return draws()

    assert of(2) == of(2)
    assert len({*of(2), *of(3), *of(4)}) == 9
