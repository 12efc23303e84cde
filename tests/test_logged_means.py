"""What ``self.log`` and torchmetrics say on every layout: means per label, samples counted once."""

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flavour import L
from tests.modules import IGNORED, PlainLanguageModel, RandomTokens
from tests.parity import LAYOUTS_OF_4, QUIET, fit

NUM_SAMPLES, LENGTH = 16, 24
CP2, CP4, FSDP2 = LAYOUTS_OF_4[2], LAYOUTS_OF_4[4], LAYOUTS_OF_4[7]


class LongPrompts(RandomTokens):
    """Every third sample has labels at its last three tokens alone: most of a cp group's ranks hold none of them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        if index % 3 == 0:
            item["labels"] = torch.where(torch.arange(LENGTH) < LENGTH - 3, IGNORED, item["input_ids"])
        return item


def samples(batch_size: int) -> DataLoader:
    return DataLoader(LongPrompts(NUM_SAMPLES, LENGTH), batch_size=batch_size)


class Logging(PlainLanguageModel):
    """Learns nothing, so that every loss can be computed beforehand."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0)
        self.steps: list[float] = []
        self.samples = torchmetrics.SumMetric()

    def setup(self, stage: str) -> None:
        if hasattr(self.trainer.strategy, "sample_group"):
            self.samples.process_group = self.trainer.strategy.sample_group

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(float(self.trainer.callback_metrics["train_step"]))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)
        self.log("own_weight", torch.tensor(float(batch_idx)), sync_dist=True, batch_size=1)
        self.samples.update(len(batch["input_ids"]))
        self.log("samples", self.samples)


def logged(degrees: dict[str, int]) -> tuple[dict[str, float], list[float]]:
    dp = degrees.get("d_rep", 1) * degrees.get("fsdp", 1)
    trainer, model, _ = fit(
        degrees, Logging, lambda _: samples(4 // dp), shift="module", max_steps=-1, max_epochs=1,
    )  # fmt: skip
    metrics = {"train_epoch": float(trainer.callback_metrics["train_epoch"])}
    (validated,) = trainer.validate(model, _sharded(samples(4 // dp), trainer), verbose=False)
    return metrics | validated, model.steps


def _sharded(loader: DataLoader, trainer: L.Trainer) -> DataLoader:
    share: Any = trainer.strategy.distributed_sampler_kwargs
    sampler = torch.utils.data.DistributedSampler(loader.dataset, shuffle=False, **share)
    return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)


def expected_means() -> tuple[float, list[float]]:
    """Per label: of all samples, and of each batch of four."""
    torch.manual_seed(0)
    model = Logging()
    means, counts = [], []
    with torch.no_grad():
        for batch in samples(4):
            means.append(float(model.loss(batch)))
            counts.append(int((batch["labels"][:, 1:] != IGNORED).sum()))
    total = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    return total, means


@pytest.mark.parametrize("degrees", [CP2, CP4, FSDP2], ids=["cp2", "cp4", "d_rep2"])
def test_logged_means_are_per_label_on_every_layout(degrees, ranks4):
    total, means = expected_means()
    for metrics, steps in ranks4(logged, degrees):
        assert steps == pytest.approx(means, rel=1e-5)
        assert metrics["train_epoch"] == pytest.approx(total, rel=1e-5)
        assert metrics["val"] == pytest.approx(total, rel=1e-5)
        assert metrics["own_weight"] == pytest.approx(1.5)  # four batches on every rank
        assert metrics["samples"] == NUM_SAMPLES


class Worsening(PlainLanguageModel):
    """From its third epoch on, a validation loss that rises, far from equal on the ranks."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rises = 100.0 * max(0, self.current_epoch - 1)
        self.log("val", self.loss(batch) + rises * (1 + self.global_rank), sync_dist=True)


class Validated(L.LightningDataModule):
    def __init__(self, dp: int) -> None:
        super().__init__()
        self.dp = dp

    def train_dataloader(self) -> DataLoader:
        return _sharded(samples(8 // self.dp), self.trainer)

    val_dataloader = train_dataloader


def stopped(degrees: dict[str, int], folder: str) -> tuple[int, str]:
    from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel

    torch.manual_seed(0)
    best = L.callbacks.ModelCheckpoint(folder, monitor="val", filename="{epoch}-{val:.3f}")
    options: dict[str, Any] = QUIET | dict(max_epochs=6, use_distributed_sampler=False, enable_checkpointing=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=4, strategy=FSDPCPEPStrategy(**degrees),
        callbacks=[best, L.callbacks.EarlyStopping("val", patience=0), ZigZagContextParallel(shift="module")],
        **options,
    )  # fmt: skip
    trainer.fit(Worsening(), datamodule=Validated(degrees.get("fsdp", 1)))
    return trainer.current_epoch, best.best_model_path


def test_early_stopping_and_the_best_checkpoint_are_the_same_on_all_ranks(ranks4, tmp_path):
    results = ranks4(stopped, CP2, str(tmp_path))
    assert len(set(results)) == 1
    epoch, best = results[0]
    assert epoch == 3 and "epoch=1" in best


def test_a_batch_without_labels_per_token_weighs_its_samples(ranks4):
    assert ranks4(mean_of_indices) == [pytest.approx(7.5)] * 4


class Indices(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.float().mean(), sync_dist=True)


def mean_of_indices() -> float:
    """Batches of 3 and 1 on each of four ranks."""
    from lightning_moe_strategy import FSDPCPEPStrategy

    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=FSDPCPEPStrategy(fsdp=4), **QUIET)
    data = torch.arange(16).unsqueeze(1)
    share: Any = dict(num_replicas=4, rank=torch.distributed.get_rank())
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False, **share)
    (metrics,) = trainer.validate(Indices(), DataLoader(data, batch_size=3, sampler=sampler), verbose=False)
    return metrics["mean"]
