"""A run that goes on from a checkpoint is the unbroken one: samples, losses and parameters, bit for bit in FP32.

The unbroken run saves on its way and goes on; the resumed one starts from that checkpoint, with other random numbers
and other weights. Dropout in the model and augmentation in the dataset draw from all three generators.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_moe_strategy import (
    ExpertLoadMonitor,
    MoELanguageModel,
    ShardedEMA,
    ThroughputMonitor,
    ZigZagContextParallel,
)
from lightning_moe_strategy.strategy import FSDPCPEPStrategy
from tests.flavour import L
from tests.modules import VOCABULARY, PlainLanguageModel
from tests.parity import QUIET, whole
from tests.test_data_agreement import with_workers

LAYOUT: dict[str, Any] = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)
WHOLE: dict[str, Any] = dict(fsdp=4, cp=1, e_fsdp=1, ep=4)
LENGTH, NUM_SAMPLES = 8, 24


class Augmented(Dataset):
    """Sample i, with noise from every generator; ``quiet``: none."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (torch.arange(LENGTH) * (index + 1)) % VOCABULARY
        if not self.quiet:
            drawn = int(torch.randint(VOCABULARY, ())) + random.randrange(VOCABULARY) + np.random.randint(VOCABULARY)
            ids = (ids + drawn) % VOCABULARY
        return {"input_ids": ids, "labels": ids.clone(), "index": index}


class Dropped(PlainLanguageModel):
    """Keeps what it was given and what it lost."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__(width=8, num_layers=1, optimizer="adamw", learning_rate=0.02)
        self.decoder.embedding = nn.Sequential(self.decoder.embedding, nn.Dropout(dropout))
        self.seen: list[tuple[tuple[int, ...], int, float]] = []
        self.num_labels: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        other = batch["b"]["index"].tolist() if "b" in batch else []
        batch = batch.get("a", batch)
        strategy: Any = self.trainer.strategy
        self.num_labels.append(int(strategy.micro_batch.num_loss_tokens or 0))
        loss = super().training_step(batch, batch_idx)
        self.seen.append(((*batch["index"].tolist(), *other), int(batch["input_ids"].sum()), float(loss.detach())))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        torch.rand(3)  # as one that samples text
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Data(L.LightningDataModule):
    """``make(strategy)`` builds the training loader."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make(self.trainer.strategy)

    def val_dataloader(self) -> Any:
        return DataLoader(Augmented(), batch_size=4)


class Save(L.Callback):
    """At the end of these batches, counted from the start of the run; ``in_validation``: after validation."""

    def __init__(self, path: str, after: tuple[int, ...], *, in_validation: bool = False) -> None:
        self.path, self.after, self.in_validation = path, after, in_validation
        self.num_done = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.num_done += 1
        if not self.in_validation:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.in_validation:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if self.num_done in self.after:
            trainer.save_checkpoint(f"{self.path}-{self.num_done}")


def trained(
    make: Callable[[Any], Any],
    *,
    degrees: dict[str, Any] = LAYOUT,
    seed: int,
    ckpt_path: str | None = None,
    callbacks: tuple[Any, ...] = (),
    strategy: dict[str, Any] | None = None,
    make_model: Callable[[], Any] = Dropped,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    L.seed_everything(seed, verbose=False)
    model = make_model()
    callbacks = (ZigZagContextParallel(shift="module"), ExpertLoadMonitor(plot=False), *callbacks)
    trainer = L.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=FSDPCPEPStrategy(**degrees, **(strategy or {})),
        callbacks=list(callbacks), **(QUIET | dict(max_epochs=2, limit_val_batches=0) | options),
    )  # fmt: skip
    trainer.fit(model, datamodule=Data(make), ckpt_path=ckpt_path)
    return model, trainer


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def broken_and_unbroken(
    make: Callable[[Any], Any], path: str, after: tuple[int, ...], in_validation: bool, options: dict[str, Any]
) -> list[str]:
    """What is not the same, for each of the batches after which the unbroken run saved."""
    save = Save(path, after, in_validation=in_validation)
    unbroken, trainer = trained(make, seed=1, callbacks=(save,), **options)
    expected = parameters_of(unbroken)
    found = []
    for number in after:
        resumed, again = trained(make, seed=2, ckpt_path=f"{path}-{number}", **options)
        accumulated = options.get("accumulate_grad_batches", 1)
        start = number - number % accumulated
        if resumed.seen != unbroken.seen[start:]:
            found.append(f"after {number}: {resumed.seen} and not {unbroken.seen[start:]}")
        if (trainer.global_step, trainer.current_epoch) != (again.global_step, again.current_epoch):
            found.append(f"after {number}: {again.global_step} steps, {again.current_epoch} epochs")
        if trainer.optimizers[0].param_groups[0]["lr"] != again.optimizers[0].param_groups[0]["lr"]:
            found.append(f"after {number}: learning rate")
        for name, parameter in parameters_of(resumed).items():
            if not torch.equal(parameter, expected[name]):
                found.append(f"after {number}: {name}")
    return found


def shuffled(strategy: Any, **options: Any) -> DataLoader:
    return DataLoader(Augmented(), **(dict(batch_size=2, shuffle=True) | options))


class Stream(IterableDataset):
    """This share's samples in order, without a length; the second of every pair has noise."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.samples, self.start, self.step = Augmented(), rank, num_replicas

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.start, NUM_SAMPLES, self.step):
            yield self.samples[index]


class Stateful:
    """As torchdata's StatefulDataLoader: it says where it stands, and goes on from there."""

    def __init__(self, loader: DataLoader, *, has_length: bool) -> None:
        self.loader, self.num_read, self.start = loader, 0, 0
        if has_length:
            self.length = NUM_SAMPLES // 4

    def __iter__(self) -> Iterator[Any]:
        start, self.num_read, self.start = self.start, self.start, 0
        dataset: Any = self.loader.dataset
        for number in range(start, NUM_SAMPLES // 4):
            first = dataset.start + number * 2 * dataset.step
            self.num_read += 1
            yield torch.utils.data.default_collate([dataset.samples[i] for i in (first, first + dataset.step)])

    def __len__(self) -> int:
        if not hasattr(self, "length"):
            raise TypeError
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["num_read"]


def streamed(strategy: Any, **options: Any) -> DataLoader:
    return DataLoader(Stream(**strategy.distributed_sampler_kwargs), batch_size=2, **options)


def stateful(strategy: Any, has_length: bool) -> Stateful:
    return Stateful(streamed(strategy), has_length=has_length)


def own_sampler(strategy: Any, seed: int | None) -> DataLoader:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    sampler = RandomSampler(Augmented(), num_samples=12, generator=generator)
    return DataLoader(Augmented(), batch_size=2, sampler=sampler)


class Pairs:
    """A batch sampler of a user's, drawn once an epoch."""

    def __init__(self, share: dict[str, int]) -> None:
        self.share = share

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM_SAMPLES).tolist()[self.share["rank"] :: self.share["num_replicas"]]
        return iter([order[i : i + 2] for i in range(0, 12, 2)])


def in_pairs(strategy: Any, **options: Any) -> DataLoader:
    return DataLoader(Augmented(), batch_sampler=Pairs(strategy.distributed_sampler_kwargs), **options)


def combined(strategy: Any) -> Any:
    loaders = {"a": shuffled(strategy), "b": DataLoader(Augmented(), batch_size=4, shuffle=True)}
    return L.utilities.CombinedLoader(loaders, "max_size_cycle")


VALIDATED = dict(limit_val_batches=1, val_check_interval=3)
OWN = dict(use_distributed_sampler=False)
# Six batches an epoch: inside the first, at its end, inside the second.
CASES: dict[str, Any] = {
    "sampler of Lightning": (shuffled, (2, 6, 8), {}),
    "after half of an optimizer step": (shuffled, (3, 6), dict(accumulate_grad_batches=2) | VALIDATED),
    "in validation": (shuffled, (3, 6), dict(in_validation=True) | VALIDATED),
    "workers": (partial(shuffled, num_workers=2), (1, 6, 9), {}),
    "workers that stay": (partial(shuffled, num_workers=2, persistent_workers=True), (3, 6, 9), {}),
    "a generator of the sampler": (partial(own_sampler, seed=3), (2, 6, 8), OWN),
    "no generator of the sampler": (partial(own_sampler, seed=None), (2, 6, 8), OWN),
    "a batch sampler": (in_pairs, (2, 8), OWN),
    "a batch sampler for workers": (partial(in_pairs, num_workers=2), (2, 8), OWN),
    "a stream": (streamed, (2, 8), {}),
    "a stream of workers": (partial(streamed, num_workers=1), (2, 8), {}),
    "a loader with a state": (partial(stateful, has_length=True), (2, 8), {}),
    "a loader with a state and no length": (partial(stateful, has_length=False), (2, 8), {}),
    "two loaders": (combined, (2, 4), dict(degrees=WHOLE)),
}


FAST = ("after half of an optimizer step", "workers")


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_resumed_run_is_the_unbroken_one(case, ranks4, tmp_path):
    make, after, options = CASES[case]
    options = dict(options)
    in_validation = options.pop("in_validation", False)
    path = str(tmp_path / "saved")
    for found in ranks4(with_workers, broken_and_unbroken, make, path, after, in_validation, options):
        assert found == []


# All that a run keeps, saved by ModelCheckpoint


class Sparse(MoELanguageModel):
    """Our transformer with a balance bias, dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__(
            dict(vocab_size=VOCABULARY, hidden=16, heads=2, kv_heads=1, head_dim=8, num_experts=4, moe_intermediate=8,
                 scoring="sigmoid", balance_bias=True, layers=1)
        )  # fmt: skip
        self.model.embed.register_forward_hook(lambda module, args, out: F.dropout(out, 0.3, module.training))
        self.seen: list[tuple[tuple[int, ...], int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index = tuple(batch.pop("index").tolist())
        loss = super().training_step(batch, batch_idx)
        self.seen.append((index, int(batch["input_ids"].sum()), float(loss.detach())))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch.pop("index")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return dict(optimizer=optimizer, lr_scheduler=dict(scheduler=schedule, interval="step"))


def kept(model: Any, trainer: L.Trainer) -> dict[str, Any]:
    """By name, what the rest of a run must not change."""
    of = {type(callback): callback for callback in trainer.callbacks}
    best, stopping = of[L.callbacks.ModelCheckpoint], of[L.callbacks.EarlyStopping]
    state = {f"average of {name}": whole(average).clone() for name, average in of[ShardedEMA].averages.items()}
    state |= parameters_of(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    state |= {f"load of {name}": tokens for name, tokens in of[ExpertLoadMonitor].last_tokens.items()}
    state |= {
        "tokens": of[ThroughputMonitor].tokens_seen,
        "best": (best.best_model_score, best.best_model_path),
        "patience": (stopping.wait_count, stopping.best_score),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped),
    }
    return state


def full_run(path: str, after: int, options: dict[str, Any], seed: int, ckpt_path: str | None = None) -> Any:
    checkpoints = L.callbacks.ModelCheckpoint(
        path, "{step}", monitor="val_loss", save_top_k=-1, every_n_train_steps=after, save_last="link",
        save_on_train_epoch_end=False,
    )  # fmt: skip
    stopping = L.callbacks.EarlyStopping("val_loss", patience=9)
    callbacks = (ShardedEMA(0.7), ThroughputMonitor(3), checkpoints, stopping)
    options = options | dict(
        strategy=dict(balance="bias", balance_bias_rate=0.1) | options.get("strategy", {}), max_epochs=3,
        accumulate_grad_batches=2, enable_checkpointing=True, limit_val_batches=1, log_every_n_steps=2,
    )  # fmt: skip
    model, trainer = trained(
        shuffled, seed=seed, ckpt_path=ckpt_path, callbacks=callbacks, make_model=Sparse, **options
    )
    return model.seen, kept(model, trainer)


def all_that_is_kept(path: str, options: dict[str, Any]) -> list[str]:
    """Three steps an epoch; a checkpoint after the fourth."""
    seen, expected = full_run(path, 4, options, seed=1)
    dist.barrier()
    if dist.get_rank() == 0:  # as if it had ended after that one
        shutil.rmtree(f"{path}/step=8.ckpt")
        os.remove(f"{path}/last.ckpt")
        os.symlink("step=4.ckpt", f"{path}/last.ckpt")
    dist.barrier()
    resumed_seen, resumed = full_run(path, 4, options, seed=2, ckpt_path="last")
    different = [] if resumed_seen == seen[8:] and len(seen) == 18 else [f"{resumed_seen} and not {seen[8:]}"]
    return different + [
        f"{name}: {resumed.get(name)} and not {value}"
        for name, value in expected.items()
        if not (torch.equal(resumed[name], value) if isinstance(value, Tensor) else resumed[name] == value)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(dict(strategy=dict(async_save=True)), marks=pytest.mark.slow)],
    ids=["saved at once", "saved in the background"],
)
def test_everything_a_run_keeps_goes_on(options, ranks4, tmp_path):
    for different in ranks4(with_workers, all_that_is_kept, str(tmp_path), options):
        assert different == []


# Another layout


def in_fours(strategy: Any, batch_size: int | None = None) -> DataLoader:
    """Four samples a step on every layout, unless a size is given."""
    dp = strategy.distributed_sampler_kwargs["num_replicas"]
    return DataLoader(Augmented(quiet=True), batch_size=batch_size or 4 // dp, shuffle=True)


def on_layouts(path: str, after: int, degrees: dict[str, Any], batch_size: int | None) -> Any:
    """Samples and summed losses of the unbroken run, and of one that goes on on another layout."""
    make_model = partial(Dropped, dropout=0.0)
    unbroken, _ = trained(in_fours, seed=1, callbacks=(Save(path, (after,)),), make_model=make_model)
    make = partial(in_fours, batch_size=batch_size)
    resumed, trainer = trained(
        make, seed=1, degrees=degrees, ckpt_path=f"{path}-{after}", make_model=make_model, max_epochs=2
    )
    return [
        [(index, loss * count, count) for (index, _, loss), count in zip(model.seen, model.num_labels, strict=True)]
        for model in (unbroken, resumed)
    ] + [trainer.global_step]


def together(of_ranks: list[Any]) -> list[tuple[set[int], float]]:
    """Samples and mean loss of each batch over all ranks."""
    return [
        ({i for index, _, _ in batch for i in index}, sum(b[1] for b in batch) / sum(b[2] for b in batch))
        for batch in zip(*of_ranks, strict=True)
    ]


@pytest.mark.parametrize("after", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_on_another_layout_the_same_samples_come_in_the_same_steps(after, ranks4, tmp_path):
    answers = ranks4(on_layouts, str(tmp_path / "saved"), after, WHOLE, None)
    expected, got = together([a[0] for a in answers])[after:], together([a[1] for a in answers])
    assert [samples for samples, _ in got] == [samples for samples, _ in expected]
    assert [loss for _, loss in got] == pytest.approx([loss for _, loss in expected], rel=1e-5)


@pytest.mark.parametrize("after", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_with_batches_of_another_size_the_rest_of_the_epoch_comes_once(after, ranks4, tmp_path):
    answers = ranks4(on_layouts, str(tmp_path / "saved"), after, WHOLE, 2)
    unbroken, got = together([a[0] for a in answers]), together([a[1] for a in answers])
    read = set().union(*(samples for samples, _ in unbroken[:after]))
    num_left = -(-(NUM_SAMPLES - 4 * after) // 8)
    rest = [samples for samples, _ in got[:num_left]]
    assert set().union(*rest) == set(range(NUM_SAMPLES)) - read
    assert len(got) == num_left + 3 and set().union(*(samples for samples, _ in got[num_left:])) == set(range(24))
