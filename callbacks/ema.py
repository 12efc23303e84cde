"""An exponential moving average of the weights, on the shards of both meshes."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe_strategy._lightning_compat import (
    Callback,
    LightningModule,
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_moe_strategy.optimizers.shards import like_shards
from lightning_moe_strategy.sharded_state import SHARDED_STATES, keys_of_state, read_state
from lightning_moe_strategy.sharding import local_tensor

_NAME = "ema"


class ShardedEMA(Callback):
    """``average = decay * average + (1 - decay) * weights`` after optimizer steps; evaluation runs with the averages.

    Validation, test and prediction see the averages, training and the checkpoint's ``state_dict`` the weights. Every
    rank averages its own shards, nothing is communicated, and the numbers are those of one process. The checkpoint
    holds the averages beside the model (``<checkpoint>/ema``) and resumes them on any layout. Steps count as in
    Lightning's ``EMAWeightAveraging``: from 0, and the first average is the weights.

    Memory: 4 bytes for each trained parameter of the rank (averages of BF16 weights are FP32), said once, and while
    averages are swapped in one more copy of the largest shard (of every shard, where weights are BF16).

    Args:
        decay: what stays of the average at an update, between 0 and 1.
        update_every: optimizer steps from one update to the next.
        start_step: the first step that may update.
        use_buffers: average floating-point buffers too; otherwise evaluation sees those of training.
    """

    def __init__(
        self, decay: float = 0.999, *, update_every: int = 1, start_step: int = 0, use_buffers: bool = False
    ) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay({decay}) must be between 0 and 1: it is what stays of the average.")
        if update_every < 1:
            raise ValueError(f"update_every({update_every}) must be at least 1 optimizer step.")
        if start_step < 0:
            raise ValueError(f"start_step({start_step}) must be at least 0.")
        self.decay, self.update_every = decay, update_every
        self.start_step, self.use_buffers = start_step, use_buffers
        self._averages: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._is_swapped = False
        self._latest_step = 0

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """By the names of parameters and buffers, sharded as these are; empty before the first update."""
        if self._is_swapped:
            raise RuntimeError("The averages are in the module now, in the place of its weights: read them there.")
        return self._averages

    @contextmanager
    def averaged_weights(self, module: nn.Module) -> Generator[None, None, None]:
        """``module`` with the averages for weights, to save or export it so.

        Raises:
            RuntimeError: there are no averages yet.
        """
        if not self._averages:
            raise RuntimeError(f"ShardedEMA has no averages yet: step {self.start_step} makes the first.")
        was_swapped = self._is_swapped
        self._swap(module, is_in=True)
        try:
            yield
        finally:
            self._swap(module, is_in=was_swapped)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step - 1
        if trainer.global_step <= self._latest_step or step < self.start_step or step % self.update_every:
            return
        self._latest_step = trainer.global_step
        self._update(pl_module)

    @torch.no_grad()
    def _update(self, module: nn.Module) -> None:
        is_first = not self._averages
        live, averages = list[Tensor](), list[Tensor]()
        for name, tensor in self._averaged(module):
            if name not in self._averages:
                self._averages[name] = _average_like(tensor)
                local_tensor(self._averages[name]).copy_(local_tensor(tensor))
                continue
            averages.append(local_tensor(self._averages[name]))
            live.append(local_tensor(tensor.detach()).to(averages[-1].dtype))
        if averages:
            torch._foreach_lerp_(averages, live, 1 - self.decay)
        if is_first:
            self._say_memory()

    def _averaged(self, module: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        """What is trained, and what was once."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or name in self._averages:
                yield name, parameter
        if self.use_buffers:
            yield from ((name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point())

    def _say_memory(self) -> None:
        num_bytes = sum(local_tensor(average).nbytes for average in self._averages.values())
        rank_zero_info(f"ShardedEMA keeps {num_bytes / 1e9:.3g} GB of averages on every rank.")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_in=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_in=False)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_in=True)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_in=False)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_in=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module, is_in=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_swapped:
            self._swap(pl_module, is_in=False)
            for part in pl_module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # a step that did not end left averages gathered

    @torch.no_grad()
    def _swap(self, module: nn.Module, *, is_in: bool) -> None:
        """Averages into the module and its weights into their place, or back."""
        if self._is_swapped == is_in or not self._averages:
            return
        self._is_swapped = is_in
        if is_in:
            tensors = _tensors_of(module)
            self._live = {name: local_tensor(tensors[name].detach()) for name in self._averages}
        for name, average in self._averages.items():
            # Not the module's of now: after an exception a unit may show its gathered weights.
            live, kept = self._live[name], local_tensor(average)
            before = live.clone()
            if live.dtype == kept.dtype:
                live.copy_(kept)
                kept.copy_(before)
            elif is_in:
                # An FP32 average does not survive in BF16 weights: both are kept.
                live.copy_(kept)
                self._held[name] = before
            else:
                live.copy_(self._held.pop(name))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._averages:
            return
        was_swapped = self._is_swapped
        self._swap(pl_module, is_in=False)
        if was_swapped:
            # Lightning has taken the averages for the weights. Copies: on a CPU both state dicts hold live tensors.
            weights = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: like_shards(weight, torch.clone) for name, weight in weights.items()}
        checkpoint.setdefault(SHARDED_STATES, {})[_NAME] = {
            name: like_shards(average, torch.clone) if was_swapped else average
            for name, average in self._averages.items()
        }
        self._swap(pl_module, is_in=was_swapped)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_swapped, self._averages = False, {}
        self._held.clear()
        names = keys_of_state(checkpoint, _NAME)
        if names is None:
            if trainer.global_step > self.start_step:
                rank_zero_warn("The checkpoint has no averages for ShardedEMA: they start from the weights again.")
            return
        tensors = _tensors_of(pl_module)
        if unknown := [name for name in names if name not in tensors]:
            raise ValueError(
                f"The checkpoint has averages of {', '.join(unknown[:5])}, which the module does not have. Load it "
                "into the module it is of, or without ShardedEMA."
            )
        self._averages = {name: _average_like(tensors[name]) for name in names}
        read_state(checkpoint, _NAME, self._averages)

    def state_dict(self) -> dict[str, Any]:
        return {"latest_step": self._latest_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_step = state_dict["latest_step"]


def refuse_other_averages(callbacks: Iterable[object]) -> None:
    """Lightning's weight averaging copies the module before it is sharded, and cannot average what it becomes.

    Raises:
        ValueError: one of the callbacks does that.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the whole module on every rank before it is sharded, which strategy "
                "'fsdp_cp_ep' cannot average: use lightning_moe_strategy.ShardedEMA in its place."
            )


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _average_like(tensor: Tensor) -> Tensor:
    """Not in less than FP32, where the small steps of an average are lost."""
    is_low = tensor.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if is_low else tensor.dtype
    return like_shards(tensor, lambda local: torch.zeros_like(local, dtype=dtype))
