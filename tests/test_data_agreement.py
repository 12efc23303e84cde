"""Ranks stop together, fail together and hold the samples they should, whatever one rank's data does.

Ranks 0 and 1 share the samples of the first half, ranks 2 and 3 of the second (fsdp 2, cp 2). A rank that went on alone
would hang until ``TIMEOUT`` and fail its test.
"""

import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from lightning_moe_strategy.agreed_loader import AgreedLoader, own_loader
from lightning_moe_strategy.host_agreement import _gloo_beside as gloo_beside
from lightning_moe_strategy.host_agreement import host_group, raise_together
from tests.flavour import L
from tests.modules import PlainLanguageModel, RandomTokens
from tests.parity import QUIET, whole

logging.getLogger(L.__name__).setLevel(logging.ERROR)

CP2: dict[str, Any] = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)
WHOLE: dict[str, Any] = dict(fsdp=4, cp=1, e_fsdp=1, ep=4)
TIMEOUT = timedelta(seconds=20)
LENGTH = 8
Share = dict[str, int]
MakeLoader = Callable[[str, Share], Any]


class Numbered(RandomTokens):
    """Every sample says which it is."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"index": index}


class Stream(IterableDataset):
    """Samples without a length, or with one that is not true."""

    def __init__(self, samples: Any, length: int | None = None) -> None:
        self.samples = samples
        if length is not None:
            self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(len(self.samples)))

    def __len__(self) -> int:
        if not hasattr(self, "length"):
            raise TypeError
        return self.length


class Recorder(PlainLanguageModel):
    """Keeps which samples each step was given."""

    def __init__(self) -> None:
        super().__init__(width=8, num_layers=1)
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def step(self, stage: str, batch: Any) -> Tensor:
        batch = batch.get("a", batch)
        self.seen.append((stage, tuple(batch["index"].tolist())))
        return self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.step("validate", batch), sync_dist=True, batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step("predict", batch)
        return batch["index"]


class Data(L.LightningDataModule):
    """``make(stage, share)`` builds the loaders, with the share of the samples that the strategy names."""

    def __init__(self, make: MakeLoader) -> None:
        super().__init__()
        self.make = make

    def made(self, stage: str) -> Any:
        strategy = self.trainer.strategy
        return self.make(stage, getattr(strategy, "distributed_sampler_kwargs", dict(num_replicas=1, rank=0)))

    def train_dataloader(self) -> Any:
        return self.made("train")

    def val_dataloader(self) -> Any:
        return self.made("validate")

    def test_dataloader(self) -> Any:
        return self.made("test")

    def predict_dataloader(self) -> Any:
        return self.made("predict")


def trainer_of(degrees: dict[str, Any] | None, **options: Any) -> L.Trainer:
    """On the ranks of the layout, or in one process."""
    if degrees is None:
        return L.Trainer(accelerator="cpu", devices=1, **(QUIET | options))
    strategy = FSDPCPEPStrategy(**degrees, timeout=TIMEOUT)
    callbacks = [ZigZagContextParallel(shift="module"), *options.pop("callbacks", ())]
    world = dist.get_world_size()
    return L.Trainer(accelerator="cpu", devices=world, strategy=strategy, callbacks=callbacks, **(QUIET | options))


def run(
    degrees: dict[str, Any] | None,
    make: MakeLoader,
    function: str = "fit",
    make_model: Callable[[], Any] = Recorder,
    **options: Any,
) -> tuple[Any, L.Trainer, list[str]]:
    """(module, trainer, warnings) after a run on this rank."""
    torch.manual_seed(0)
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(degrees, **(dict(use_distributed_sampler=False) | options))
        getattr(trainer, function)(model, datamodule=Data(make))
    return model, trainer, [str(warning.message) for warning in caught]


def raised(*args: Any, **options: Any) -> str:
    """What a rank is told."""
    try:
        run(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "no error"


def with_workers(function: Callable[..., Any], *args: Any) -> Any:
    """Ranks of the tests are daemons, which may have no children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return function(*args)


# Uneven ends

LONGER, SHORTER, BATCH = 5, 3, 2


def uneven(kind: str, stage: str, share: Share) -> Any:
    """Five batches for the first half of the ranks, three for the second; in one process, three of twice the size."""
    is_whole = share["num_replicas"] == 1
    num_batches = SHORTER if is_whole or share["rank"] else LONGER
    batch_size = 2 * BATCH if is_whole else BATCH
    if stage == "validate" and kind == "train only":
        own = Subset(Numbered(8, LENGTH), range(share["rank"], 8, share["num_replicas"]))
        return DataLoader(own, batch_size=batch_size)
    first = 100 * share["rank"]
    samples = Subset(Numbered(200, LENGTH), range(first, first + num_batches * batch_size))
    options: dict[str, Any] = dict(batch_size=batch_size, num_workers=int("workers" in kind))
    if kind.startswith("stream"):
        return DataLoader(Stream(samples), **options)
    if kind == "false length":
        return DataLoader(Stream(samples, LONGER * batch_size), **options)
    loader = DataLoader(samples, **options)
    if kind.startswith("combined"):
        other = DataLoader(Subset(Numbered(8, LENGTH), range(batch_size * (1 + share["rank"]))), batch_size)
        return L.utilities.CombinedLoader({"a": loader, "b": other}, kind.split()[1])
    return loader


def uneven_run(degrees: dict[str, Any], kind: str, function: str, options: dict[str, Any]) -> Any:
    model, trainer, caught = run(degrees, partial(uneven, kind), function, **options)
    left = [warning for warning in caught if "equally many batches" in warning]
    return trainer.global_step, [stage for stage, _ in model.seen], left


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


FITS: list[Any] = [
    ("sized", dict(max_epochs=2, accumulate_grad_batches=2)),
    ("train only", dict(max_epochs=2, val_check_interval=2)),
    ("stream", dict(max_epochs=2, accumulate_grad_batches=2)),
    ("stream workers", dict(max_epochs=1)),
    slow("sized", dict(max_epochs=2)),
    slow("sized", dict(max_epochs=1, limit_train_batches=0.7, val_check_interval=0.5)),
    slow("stream", dict(max_epochs=2, limit_train_batches=2, val_check_interval=1)),
    slow("false length", dict(max_epochs=2)),
    slow("sized workers", dict(max_epochs=2)),
]


@pytest.mark.parametrize(("kind", "options"), FITS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_uneven_loaders_train_as_if_all_had_as_few_batches(kind, options, ranks4):
    model, trainer, _ = run(None, partial(uneven, kind.removesuffix(" workers")), **options)
    expected = [stage for stage, _ in model.seen]
    assert trainer.global_step and "train" in expected
    answers = ranks4(with_workers, uneven_run, CP2, kind, "fit", options)
    for num_steps, stages, _ in answers:
        assert (num_steps, stages) == (trainer.global_step, expected)
    # On Lightning's rank zero, once for training and once for the validation data.
    left = "4 batches on 2 of 4 ranks" if kind.split()[0] in ("sized", "train") else "at least 2 batches on 2 of 4"
    said = {warning.split()[0] for warning in answers[0][2] if left in warning}
    limited = 0.7 in options.values() or 2 == options.get("limit_train_batches")
    assert len(answers[0][2]) == len(said) and ("train_dataloader" in said) != limited


@pytest.mark.parametrize("mode", ["max_size_cycle", slow("min_size"), slow("max_size")])
def test_uneven_parts_of_a_combined_loader_stop_together(mode, ranks2):
    degrees = dict(fsdp=2, e_fsdp=1, ep=2)
    answers = ranks2(uneven_run, degrees, f"combined {mode}", "fit", dict(max_epochs=2, limit_val_batches=0))
    assert (
        answers[0][:2]
        == answers[1][:2]
        == (dict(max_size_cycle=6, min_size=2, max_size=6)[mode], ["train"] * answers[0][0])
    )


@pytest.mark.parametrize("kind", ["sized", "stream"])
@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_uneven_loaders_of_every_other_stage_stop_together(function, kind, ranks4):
    answers = ranks4(uneven_run, CP2, kind, function, {})
    assert [stages for _, stages, _ in answers] == [[function] * SHORTER] * 4
    assert len(answers[0][2]) == 1 and " batches on 2 of 4 ranks are left out" in answers[0][2][0]


def empty_on_one_rank(stage: str, share: Share) -> DataLoader:
    return DataLoader(Subset(Numbered(8, LENGTH), range(4 * share["rank"])), BATCH)


def test_a_rank_without_any_batch_is_named(ranks4):
    for error in ranks4(raised, CP2, empty_on_one_rank):
        assert "_dataloader has no batch on rank 0, 1 and some on the others" in error


# Errors of one rank


class Broken(Numbered):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise KeyError("sample 13 is broken")
        return super().__getitem__(index)


class ShortLater(Numbered):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {key: x[:3] if isinstance(x, Tensor) and index >= 12 else x for key, x in sample.items()}


def in_halves(dataset: Any, num_workers: int, stage: str, share: Share) -> DataLoader:
    """Samples 0 to 7 for the first half of the ranks, 8 to 15 for the second."""
    rows = range(8 * share["rank"], 8 * share["rank"] + 8)
    return DataLoader(Subset(dataset(16, LENGTH), rows), batch_size=BATCH, num_workers=num_workers)


class FailsOnTheWay(Recorder):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if 12 in batch["index"]:
            raise OSError("disk full")
        return batch


class NoLoss(Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if 12 in batch["index"] else loss


def of_nothing(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return None if 12 in batch["index"] else batch


def some_none(stage: str, share: Share) -> DataLoader:
    loader = in_halves(Numbered, 0, stage, share)
    return DataLoader(loader.dataset, BATCH, collate_fn=of_nothing)


class FailsToStart(Stream):
    def __iter__(self) -> Iterator[Any]:
        raise FileNotFoundError("no such stream")


def failing_start(stage: str, share: Share) -> DataLoader:
    samples = Subset(Numbered(16, LENGTH), range(8 * share["rank"], 8 * share["rank"] + 8))
    return DataLoader((FailsToStart if share["rank"] else Stream)(samples), BATCH)


WHICH_FAIL = "Raised on every rank: rank 2, 3 failed while "
ERRORS = [
    ("dataset", partial(in_halves, Broken, 0), Recorder, "KeyError: ", "reading batch 2 of train_dataloader"),
    ("worker", partial(in_halves, Broken, 1), Recorder, "KeyError: ", "reading batch 2 of train_dataloader"),
    ("start", failing_start, Recorder, "FileNotFoundError: ", "reading batch 0 of train_dataloader"),
    ("split", partial(in_halves, ShortLater, 0), Recorder, "ValueError: ", "preparing a batch of train_dataloader"),
    ("hook", partial(in_halves, Numbered, 0), FailsOnTheWay, "OSError: ", "preparing a batch of train_dataloader"),
]


@pytest.mark.parametrize(("make", "model", "kind", "doing"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_an_error_in_the_data_of_one_rank_is_an_error_of_all(make, model, kind, doing, ranks4):
    answers = ranks4(with_workers, partial(raised, limit_val_batches=0, max_epochs=1), CP2, make, "fit", model)
    others = kind if kind == "ValueError: " else f"RuntimeError: On rank 2: {kind}"
    for rank, error in enumerate(answers):
        assert error.startswith(kind if rank == 2 else others), error
        assert WHICH_FAIL + doing in error and (rank == 2 or "On rank 2: " in error)


@pytest.mark.parametrize("function", ["validate", slow("test"), "predict"])
def test_an_error_in_the_data_of_one_rank_ends_every_stage(function, ranks4):
    for error in ranks4(raised, CP2, partial(in_halves, Broken, 0), function):
        assert WHICH_FAIL in error


def test_a_loss_on_some_ranks_only_is_refused(ranks4):
    make = partial(in_halves, Numbered, 0)
    for error in ranks4(partial(raised, limit_val_batches=0, max_epochs=1), CP2, make, "fit", NoLoss):
        assert "training_step returned None on rank 2, 3 of 4. The backward pass needs every rank" in error


def some_with_images(is_so: bool, stage: str, share: Share) -> DataLoader:
    def collated(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        with_images = is_so and 12 not in batch["index"]
        return batch | {"pixels": torch.ones(len(samples), LENGTH) if with_images else None}

    return DataLoader(in_halves(Numbered, 0, stage, share).dataset, BATCH, collate_fn=collated)


def warnings_of_parts(is_so: bool) -> list[str]:
    _, _, caught = run(CP2, partial(some_with_images, is_so), limit_val_batches=0, max_epochs=2)
    return [warning for warning in caught if "different parts" in warning]


def test_a_part_that_some_ranks_batches_lack_is_warned_of_once(ranks4):
    (warning,) = ranks4(warnings_of_parts, True)[0]
    assert warning.startswith("Batches of train_dataloader have different parts: no 'pixels' on ranks 2-3.")
    assert ranks4(warnings_of_parts, False)[0] == []


def test_a_batch_on_some_ranks_only_is_refused(ranks2):
    degrees = dict(fsdp=2, e_fsdp=1, ep=2)
    for error in ranks2(partial(raised, limit_val_batches=0, max_epochs=1), degrees, some_none):
        assert "train_dataloader gave None on rank 1 and a batch on the others" in error


class Iterating(Recorder):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.step("train", next(dataloader_iter)[0])


def test_a_step_that_reads_batches_by_itself_is_refused(ranks4):
    for error in ranks4(raised, CP2, partial(in_halves, Numbered, 0), "fit", Iterating):
        assert "ValueError: training_step(dataloader_iter) reads batches by itself" in error


# Whose samples


def by_rank(stage: str, share: Share) -> DataLoader:
    """As if cp did not exist."""
    return DataLoader(Subset(Numbered(16, LENGTH), range(dist.get_rank(), 16, 4)), BATCH)


def test_ranks_of_a_cp_group_with_different_batches_are_named(ranks4):
    for error in ranks4(raised, CP2, by_rank):
        assert "ValueError: Ranks 0 and 1 share one sequence (cp=2) but read different batches from " in error
        assert "'input_ids', 'labels', 'index' differ" in error and "distributed_sampler_kwargs" in error


class NoisyLabels(Recorder):
    """Augments on the device, differently on each rank."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.validating:
            batch["labels"] = batch["labels"] + dist.get_rank() % 2
        return batch


def test_every_stage_is_compared_and_only_what_differs_is_named(ranks4):
    options = dict(max_epochs=1, num_sanity_val_steps=0)
    for error in ranks4(partial(raised, **options), CP2, partial(in_halves, Numbered, 0), "fit", NoisyLabels):
        assert "from val_dataloader: 'labels' differ." in error


def unsplit(kind: str, stage: str, share: Share) -> DataLoader:
    samples = Numbered(16, LENGTH)
    if kind == "split stream":
        return DataLoader(Stream(Subset(samples, range(share["rank"], 16, share["num_replicas"]))), BATCH)
    return DataLoader(Stream(samples) if kind == "stream" else samples, BATCH)


def warnings_of_sharing(degrees: dict[str, Any], kind: str, options: dict[str, Any]) -> list[str]:
    _, _, caught = run(degrees, partial(unsplit, kind), limit_val_batches=0, max_epochs=2, **options)
    return [warning for warning in caught if "different first batches" in warning]


@pytest.mark.parametrize(
    ("kind", "options", "num_warnings"),
    [
        ("stream", {}, 1),
        ("split stream", {}, 0),
        ("samples", {}, 1),
        ("samples", dict(use_distributed_sampler=True), 0),
    ],
)
def test_samples_that_are_not_shared_out_are_warned_of_once(kind, options, num_warnings, ranks4):
    caught = ranks4(warnings_of_sharing, CP2, kind, options)[0]
    assert len(caught) == num_warnings
    assert not caught or "the 2 shares of the samples only 1 different first batches" in caught[0]


def own_sampler(num_replicas: int | None, stage: str, share: Share) -> DataLoader:
    """``None``: the share that the strategy names; else as many shares, and this rank's number."""
    samples = Numbered(16, LENGTH)
    if num_replicas is not None:
        share = dict(num_replicas=num_replicas, rank=dist.get_rank() % num_replicas)
    return DataLoader(samples, BATCH, sampler=DistributedSampler(samples, shuffle=False, **share))


@pytest.mark.parametrize("num_replicas", [4, 2])
def test_a_sampler_of_another_share_is_refused_with_the_right_one(num_replicas, ranks4):
    answers = ranks4(raised, CP2, partial(own_sampler, num_replicas))
    for rank, error in enumerate(answers):
        wrong = rank if num_replicas == 4 else 1  # of four shares every number is wrong, of two that of rank 1 first
        words = f"has num_replicas({num_replicas}) and rank({wrong}); on rank {wrong} they must be 2 and {wrong // 2}."
        assert words in error
        assert "Build it with **trainer.strategy.distributed_sampler_kwargs" in error


def samples_read(use_distributed_sampler: bool, num_replicas: int | None) -> list[tuple[int, ...]]:
    options: dict[str, Any] = dict(max_epochs=1, limit_val_batches=0, use_distributed_sampler=use_distributed_sampler)
    make = partial(unsplit, "samples") if use_distributed_sampler else partial(own_sampler, num_replicas)
    model, _, _ = run(CP2, make, **options)
    return [index for _, index in model.seen]


@pytest.mark.parametrize("is_lightnings", [True, False], ids=["Lightning's sampler", "own sampler"])
def test_a_sampler_gives_each_share_its_samples_and_a_cp_group_the_same(is_lightnings, ranks4):
    first, second, third, fourth = ranks4(samples_read, is_lightnings, None)
    assert first == second and third == fourth
    assert sorted(i for batch in first + third for i in batch) == list(range(16))


# The options of a Trainer


def in_order(num_train: int, stage: str, share: Share) -> Any:
    """Batches of four samples over all shares, in order; equally many labels, as a plain Trainer accumulates means."""
    samples = Numbered(num_train if stage == "train" else 8, LENGTH, ragged=False)
    sampler: Any = DistributedSampler(samples, shuffle=False, **share)
    return DataLoader(samples, 4 // share["num_replicas"], sampler=sampler if share["num_replicas"] > 1 else None)


OPTIONS: list[Any] = [
    slow(dict(max_epochs=2)),
    slow(dict(max_steps=7)),
    dict(max_epochs=2, limit_train_batches=3, limit_val_batches=1),
    slow(dict(max_epochs=2, limit_train_batches=0.5, limit_val_batches=0.5)),
    dict(max_epochs=3, overfit_batches=2),
    dict(max_epochs=2, val_check_interval=2),
    slow(dict(max_epochs=2, val_check_interval=0.5)),
    dict(max_steps=7, val_check_interval=3, check_val_every_n_epoch=None),
    slow(dict(max_epochs=3, check_val_every_n_epoch=2)),
    slow(dict(max_epochs=1, num_sanity_val_steps=1)),
    slow(dict(max_epochs=1, num_sanity_val_steps=-1)),
    slow(dict(max_epochs=2, reload_dataloaders_every_n_epochs=1)),
    dict(max_epochs=2, accumulate_grad_batches=3),
    slow(dict(max_epochs=-1, max_time=timedelta(seconds=1))),
    slow(dict(fast_dev_run=2)),
]


def steps_taken(degrees: dict[str, Any] | None, options: dict[str, Any]) -> tuple[Any, int, dict[str, Tensor]]:
    options = dict(use_distributed_sampler=True) | options
    model, trainer, _ = run(degrees, partial(in_order, 24), "fit", Recorder, **options)
    return model.seen, trainer.global_step, {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_trainers_options_take_the_steps_and_samples_of_one_process(options, ranks4):
    answers = ranks4(steps_taken, CP2, options)
    num_steps = answers[0][1]
    is_timed = "max_time" in options
    same = dict(max_epochs=-1, max_steps=num_steps) if is_timed else options
    expected, expected_steps, parameters = steps_taken(None, same)
    assert [answer[1] for answer in answers] == [expected_steps] * 4 and num_steps
    assert answers[0][0] == answers[1][0] and answers[2][0] == answers[3][0]
    together = [
        (stage, tuple(sorted(own + other)))
        for (stage, own), (_, other) in zip(answers[0][0], answers[2][0], strict=True)
    ]
    assert together[: len(expected)] == expected and (is_timed or len(together) == len(expected))
    for _, _, got in answers:
        for name, parameter in parameters.items():
            torch.testing.assert_close(got[name], parameter, rtol=1e-4, atol=1e-5)


class OwnClock(L.Callback):
    """On the last rank validation seems to be due, and on the others it never is."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer._last_val_time -= 1e6 if trainer.global_rank == 3 else 0.0


class SecondIsOver(L.Callback):
    """Rank 0's clock has gone on before the third batch."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 and trainer.global_rank == 0:
            strategy: Any = trainer.strategy
            strategy._last_validation -= 1e6
            if trainer._last_val_time not in (float("inf"), float("-inf")):
                trainer._last_val_time -= 1e6


def validated_by_clock(callback: type[L.Callback]) -> list[str]:
    options = dict(max_epochs=1, val_check_interval=timedelta(hours=1), num_sanity_val_steps=0, callbacks=[callback()])
    return [stage for stage, _ in run(CP2, partial(in_order, 20), **options)[0].seen]


@pytest.mark.parametrize(("callback", "validated_after"), [(OwnClock, []), (SecondIsOver, [3])])
def test_the_clock_of_rank_0_says_when_validation_is_due(callback, validated_after, ranks4):
    stages = ["train"] * 5
    for number in validated_after:
        stages[number:number] = ["validate"] * 2
    assert ranks4(validated_by_clock, callback) == [stages] * 4


# What a user and Lightning find in place of their loader


class LooksAtTheData(L.Callback):
    """On rank 0 alone, as one that logs pictures does."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(type(trainer.train_dataloader))
        if trainer.is_global_zero:
            next(iter(trainer.train_dataloader))

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.found.append(type(trainer.val_dataloaders))
        if trainer.is_global_zero:
            next(iter(trainer.val_dataloaders))


def looked_at() -> set[Any]:
    callback = LooksAtTheData()
    _, trainer, _ = run(CP2, partial(in_order, 8), max_epochs=2, callbacks=[callback])
    return {*callback.found, type(trainer.train_dataloader)}


def test_one_rank_may_read_from_its_own_loader_during_a_run(ranks4):
    assert ranks4(looked_at) == [{DataLoader}] * 4


class Resumable:
    """Batches in order, from where the state says."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.num_read = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        start, self.num_read = self.num_read % len(self.rows), self.num_read % len(self.rows)
        for row in self.rows[start:]:
            self.num_read += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_read = state["num_read"]


def resumable(stage: str, share: Share) -> Resumable:
    return Resumable(list(in_order(24, "train", share)))


class SaveAfterTwo(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def resumed(path: str) -> tuple[Any, Any]:
    options: dict[str, Any] = dict(limit_val_batches=0, max_epochs=1)
    whole_run, _, _ = run(CP2, resumable, callbacks=[SaveAfterTwo(path)], **options)
    model = Recorder()
    trainer_of(CP2, use_distributed_sampler=False, **options).fit(model, datamodule=Data(resumable), ckpt_path=path)
    return whole_run.seen[2:], model.seen


def test_a_stateful_loader_goes_on_where_the_checkpoint_was_taken(ranks4, tmp_path):
    for expected, seen in ranks4(resumed, str(tmp_path / "mid-epoch.ckpt")):
        assert len(expected) == 4 and seen == expected


def stand_in() -> list[bool]:
    from lightning.fabric.utilities.types import _Stateful

    loader = DataLoader(Numbered(8, LENGTH), BATCH)
    agreed: Any = AgreedLoader(loader, name="x", group=dist.group.WORLD, before_iteration=lambda: None)
    stream: Any = AgreedLoader(
        Resumable([1, 2, 3][: 1 + dist.get_rank()]), name="x", group=dist.group.WORLD, before_iteration=lambda: None
    )
    agreed.worker_init_fn = print
    stream.load_state_dict({"num_read": 0})
    return [
        isinstance(agreed, DataLoader) and agreed.dataset is loader.dataset and len(agreed) == 4,
        loader.worker_init_fn is print,
        isinstance(stream, _Stateful) and isinstance(agreed, _Stateful) and not agreed.state_dict(),
        len(stream) == 1 and list(stream) == [1],
        own_loader(agreed) is loader and own_loader(loader) is loader,
    ]


def test_the_stand_in_passes_for_the_loader(ranks2):
    assert ranks2(stand_in) == [[True] * 5] * 2


def beside() -> tuple[list[int], str]:
    world = dist.group.WORLD
    group = gloo_beside(world, TIMEOUT)
    assert group is not world and gloo_beside(world, TIMEOUT) is group and host_group(TIMEOUT) is world
    try:
        raise_together(ZeroDivisionError("x") if dist.get_rank() else None, group, "dividing")
    except Exception as error:
        return [group.size(), group.rank()], f"{type(error).__name__}: {error}"
    return [], "no error"


def test_a_world_of_gpus_agrees_over_a_group_of_its_hosts(ranks2):
    first, second = ranks2(beside)
    assert first == ([2, 0], "RuntimeError: On rank 1: ZeroDivisionError: x")
    assert second == ([2, 1], "ZeroDivisionError: x")
