"""All ranks agree on their data before any of them computes: who has a batch, who failed, whose samples it holds.

What one rank alone does differently (its data end, its batch cannot be split, its step returns no loss) would leave
the others in a collective until the timeout. The methods stand in the order in which a Trainer calls them.
"""

from collections.abc import Callable
from typing import Any

import torch

from lightning_moe_strategy._lightning_compat import (
    agree_on_validation_by_time,
    is_param_in_hook_signature,
    rank_zero_warn,
    show_loaders,
)
from lightning_moe_strategy.agreed_loader import AgreedLoader, num_batches_of, own_loader
from lightning_moe_strategy.host_agreement import raise_everywhere, raise_together, ranks_that, sum_over_hosts
from lightning_moe_strategy.resuming import Resuming
from lightning_moe_strategy.shared_samples import (
    are_alike,
    check_first_batch,
    parts_number,
    require_share,
    unlike_parts,
)

BatchTransform = Callable[[Any, str], Any]
"""A function of (batch, stage) that returns the batch the user's step gets."""

_STEP_OF_LOADER = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}


class DataAgreement(Resuming):
    """A strategy under which ranks stop together, fail together and hold the samples they should."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._batch_transforms: list[BatchTransform] = []
        self._compared: set[tuple[str, int]] = set()
        self._unlike: set[str] = set()
        self._last_validation = 0.0

    def register_batch_transform(self, transform: BatchTransform) -> None:
        """Apply ``transform(batch, stage)`` to every batch, after the user's own transfer hooks."""
        if transform not in self._batch_transforms:
            self._batch_transforms.append(transform)

    def process_dataloader(self, dataloader: object) -> object:
        """A loader as Lightning's loops get it. Every rank calls it, for each of its loaders in order."""
        loader = own_loader(super().process_dataloader(dataloader))
        name = f"{self._loader_prefix}_dataloader"
        self._compared.clear()
        position, error = None, None
        try:
            self._refuse_dataloader_iter()
            require_share(loader, name=name, dims=self.dims, rank=self.global_rank)
            num_batches_of(loader)
            if self._loader_prefix == "train":
                position = self.reading_position(loader, name)
        except Exception as reason:
            error = reason
        raise_together(error, self._hosts, f"setting up {name}")
        agreed = AgreedLoader(
            loader, name=name, group=self._hosts, before_iteration=self._before_iteration, position=position,
            batches=self.evaluation_batches,
        )  # fmt: skip
        self._refuse_empty(agreed)
        return agreed

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        stage = self._trainer.state.stage
        stage_name = stage.value if stage is not None else "train"
        name = f"{self._loader_prefix}_dataloader" + (f" {dataloader_idx}" if dataloader_idx else "")
        error: Exception | None = None
        try:
            batch = super().batch_to_device(batch, device, dataloader_idx)
        except Exception as reason:
            error = reason
        if (stage_name, dataloader_idx) not in self._compared:
            raise_together(error, self._hosts, f"moving the first batch of {name}")
            self._compared.add((stage_name, dataloader_idx))
            if warning := check_first_batch(batch, name=name, dims=self.dims, group=self._hosts):
                rank_zero_warn(warning)
        if error is None:
            try:
                for transform in self._batch_transforms:
                    batch = transform(batch, stage_name)
            except Exception as reason:
                error = reason
        self._agree_on_batch(batch, error, name)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._last_validation = agree_on_validation_by_time(self._trainer, self._last_validation, self._says_rank_0)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            (num_without,) = sum_over_hosts([output is None], self._hosts)
            if num_without and self.world_size > 1:
                ranks = ranks_that(output is None, self._hosts)
                raise RuntimeError(
                    f"training_step returned None on rank {', '.join(map(str, ranks))} of {self.world_size}. The "
                    "backward pass needs every rank, so Lightning skips no step that is distributed. Return a loss; "
                    "where there is nothing to learn, 0 * the sum of the output."
                )
        return output

    def teardown(self) -> None:
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            self.keep_last_position()
            show_loaders(self.lightning_module.trainer, own_loader, to_loops=True)
        super().teardown()

    @property
    def _loader_prefix(self) -> str:
        stage = self._trainer.state.stage
        return "train" if stage is None else str(stage.dataloader_prefix)

    def _says_rank_0(self, is_so: bool) -> bool:
        return bool(sum_over_hosts([self.is_global_zero and is_so], self._hosts)[0])

    def _before_iteration(self) -> None:
        """Users find the loaders they gave at the Trainer: a callback of one rank may read from those by itself."""
        self.hold_random_state()
        show_loaders(self._trainer, own_loader, to_loops=False)

    def _refuse_dataloader_iter(self) -> None:
        step = _STEP_OF_LOADER[self._loader_prefix]
        if is_param_in_hook_signature(getattr(self.lightning_module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step}(dataloader_iter) reads batches by itself, and the strategy could neither split nor count "
                f"them. Write {step}(batch, batch_idx); a DataLoader with num_workers reads ahead."
            )

    def _refuse_empty(self, agreed: AgreedLoader) -> None:
        """One rank without any batch would silently end the stage of all."""
        module, data = self.lightning_module, getattr(self._trainer, "datamodule", None)
        flag = "allow_zero_length_dataloader_with_multiple_devices"
        if getattr(module, flag) or getattr(data, flag, False) or num_batches_of(agreed) != 0:
            return
        empty = ranks_that(num_batches_of(agreed.loader) == 0, self._hosts)
        if len(empty) < self.world_size:
            raise RuntimeError(
                f"{agreed.name} has no batch on rank {', '.join(map(str, empty))} and some on the others, which cannot "
                f"go on alone. Give every rank a batch, or set {flag}=True on the module: no rank then reads any."
            )

    def _agree_on_batch(self, batch: Any, error: Exception | None, name: str) -> None:
        parts = 0 if error is not None else parts_number(batch)
        counts = [error is not None, error is None and batch is None, parts, parts**2, *self.signals_here()]
        num_failed, num_none, total, total_of_squares, *signals = sum_over_hosts(counts, self._hosts)
        if num_failed:
            raise_everywhere(error, self._hosts, f"preparing a batch of {name}")
        if 0 < num_none < self.world_size:
            ranks = ranks_that(batch is None, self._hosts)
            raise RuntimeError(
                f"{name} gave None on rank {', '.join(map(str, ranks))} and a batch on the others. Lightning skips a "
                "batch that is None, and the others would wait: give a batch on every rank, or None on all."
            )
        if name not in self._unlike and not are_alike(self.world_size, total, total_of_squares):
            self._unlike.add(name)
            rank_zero_warn(unlike_parts(batch, name=name, group=self._hosts))
        self.obey_signals(signals)
