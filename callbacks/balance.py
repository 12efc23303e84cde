"""Keep experts evenly loaded during a fit: the balance bias after every step, router losses in every backward pass."""

from typing import Any

from torch import Tensor

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_moe_strategy.expert_parallel.balance import BalanceBias, BalanceOptions
from lightning_moe_strategy.expert_parallel.router_losses import RouterLosses
from lightning_moe_strategy.token_mean import loss_weight


class ExpertBalance(Callback):
    """What ``FSDPCPEPStrategy(balance=..., ..._loss=...)`` asks for. Added by the strategy.

    Logs ``router_loss/sequence_balance``, ``router_loss/batch_balance`` and ``router_loss/z`` after every optimizer
    step, those that have a coefficient: means over its tokens and the layers, without the coefficient.
    """

    def __init__(self, options: BalanceOptions) -> None:
        self.options = options
        self._bias: BalanceBias | None = None
        self._losses: RouterLosses | None = None
        self._logged_step = 0
        self._has_warned = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        strategy: Any = trainer.strategy
        options, experts = self.options, strategy.experts
        if options.balance == "bias":
            self._bias = BalanceBias(pl_module, experts, rate=options.bias_rate, device=strategy.root_device)
        if options.has_losses:
            self._losses = RouterLosses(pl_module, experts, options, strategy.context_parallel.group)
        self._logged_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        # Where Lightning sets gradients to zero; with manual optimization the user does, and steps when he likes.
        is_first = pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0
        for part in self._parts:
            if is_first:
                part.start_step()
            part.start_micro_batch(strategy.micro_batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._bias is not None:
            self._bias.before_backward()
        if self._losses is not None:
            strategy: Any = trainer.strategy
            self._losses.before_backward(loss_weight(strategy.micro_batch), is_mean=strategy.backward_is_of_mean)

    def after_optimizer_step(self) -> None:
        """Called by the strategy: no hook of a callback comes after a step, and a training batch may take several."""
        if self._bias is None:
            return
        self._bias.update()
        if not (self._bias.has_seen_tokens or self._has_warned):
            self._has_warned = True
            rank_zero_warn(
                "balance='bias' saw no token in the first step: no layer with experts ran with gradients. Under "
                "use_reentrant=True none does: use recompute='block' of the strategy in its place."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for part in self._parts:
            part.end_micro_batch()
        if self._losses is None or trainer.global_step == self._logged_step:
            return
        self._logged_step = trainer.global_step
        for name, value in self._losses.take_values(pl_module.device).items():
            pl_module.log(f"router_loss/{name}", value.float(), batch_size=1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @property
    def _parts(self) -> tuple[BalanceBias | RouterLosses, ...]:
        return tuple(part for part in (self._bias, self._losses) if part is not None)

    def _close(self) -> None:
        for part in self._parts:
            part.close()
        self._bias = self._losses = None
