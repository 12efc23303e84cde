"""Gather the next layer's weights while this one computes, forward and backward.

FSDP prefetches on its own only as far as the CPU runs ahead of the GPU, and the split sizes of an all-to-all stop
the CPU in every layer. So the order is spelled out; ``prefetch_order.py`` says which.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_moe_strategy import _torch_compat
from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer
from lightning_moe_strategy.prefetch_order import UnitPrefetch
from lightning_moe_strategy.units import Unit


class ExpertPrefetch(Callback):
    """Explicit prefetch for every unit of any module tree. Added by the strategy.

    The first step of each stage runs without it and shows in which order the units run.
    """

    def __init__(self) -> None:
        self._prefetch: UnitPrefetch | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._of(trainer).before_batch("train")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._of(trainer).before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._of(trainer).after_backward()

    def _on_evaluation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        stage = trainer.state.stage
        self._of(trainer).before_batch(stage.value if stage is not None else "validate")

    def _on_evaluation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._of(trainer).after_evaluation_batch()

    # Lightning passes all by position; neither needs more than the Trainer.
    on_validation_batch_start = _on_evaluation_batch_start  # type: ignore[assignment]
    on_test_batch_start = _on_evaluation_batch_start  # type: ignore[assignment]
    on_predict_batch_start = _on_evaluation_batch_start  # type: ignore[assignment]
    on_validation_batch_end = _on_evaluation_batch_end  # type: ignore[assignment]
    on_test_batch_end = _on_evaluation_batch_end  # type: ignore[assignment]
    on_predict_batch_end = _on_evaluation_batch_end  # type: ignore[assignment]

    def _of(self, trainer: Trainer) -> UnitPrefetch:
        if self._prefetch is None or not self._prefetch.units:
            strategy: Any = trainer.strategy
            units: Sequence[Unit] = getattr(strategy, "units", ())
            self._prefetch = UnitPrefetch(units)
            if self._prefetch.units and strategy.root_device.type == "cpu":
                # gloo blocks in a synchronous all-gather; as asynchronous work it overlaps.
                _torch_compat.set_asynchronous_unshard(self._prefetch.units[""], True)
        return self._prefetch
