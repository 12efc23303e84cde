"""One training step as Lightning and the strategy run it."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer

from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.initialization import allocate
from lightning_moe_strategy.placement import Placement, finish
from lightning_moe_strategy.prefetch_order import UnitPrefetch
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.simulation.memory import Phase
from lightning_moe_strategy.simulation.optimizer import ShardOptimizer
from lightning_moe_strategy.simulation.watch import StepWatch
from lightning_moe_strategy.token_mean import TokenMean

ClipGradients = Callable[[Optimizer], None]

_CPU = torch.device("cpu")


class Step:
    """Runs again and again: gradients of the step before live until the backward pass.

    ``module`` is adapted and sharded, on the meta device still; ``batch`` is what this rank holds of it.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        batch: Mapping[str, Tensor],
        micro_batch: MicroBatch,
        *,
        for_gpu: bool,
        clip_gradients: ClipGradients | None,
    ) -> None:
        allocate(module, _CPU)
        finish(module, placement)
        _silence(module)
        register_fsdp_forward_method(module, "training_step")
        self.module, self.placement = module.train(), placement
        self.batch, self.micro_batch = batch, micro_batch
        self.token_mean, self.clip_gradients = TokenMean(), clip_gradients
        self.prefetch = UnitPrefetch(placement.units)
        shards = {p: nn.Parameter(local_tensor(p.data), requires_grad=p.requires_grad) for p in module.parameters()}
        self.trained = [(parameter, shard) for parameter, shard in shards.items() if parameter.requires_grad]
        self.optimizer = ShardOptimizer(module, shards, for_gpu=for_gpu)

    @contextmanager
    def watched(self, watch: StepWatch) -> Generator[None, None, None]:
        """Count what exists already, and watch what runs inside."""
        sequence = self.placement.context_parallel.sequence
        positions = [] if sequence is None else [sequence.position_ids_BL]
        others = [*self.module.buffers(), *self.batch.values(), *positions]
        with watch.opened(parameters=self.module.parameters(), optimizer_state=self.optimizer.state(), others=others):
            yield

    def run(self, watch: StepWatch | None) -> None:
        """Forward, backward, optimizer."""
        self.prefetch.before_batch("train")
        with _phase(watch, "forward"):
            loss = self._loss()
        with _phase(watch, "backward"):
            for parameter, _ in self.trained:
                parameter.grad = None
            self.prefetch.before_backward()
            self.token_mean.as_sum(loss, self.micro_batch).backward()  # type: ignore[no-untyped-call]
            self.prefetch.after_backward()
        del loss
        with _phase(watch, "optimizer"):
            self.token_mean.divide((parameter.grad for parameter, _ in self.trained), _CPU)
            for parameter, shard in self.trained:
                shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
            if self.clip_gradients is not None:
                for optimizer in self.optimizer.optimizers:
                    self.clip_gradients(optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _loss(self) -> Tensor:
        output = self.module.training_step(dict(self.batch), 0)  # type: ignore[operator]
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"{class_name(self.module)}.training_step returned {type(output).__name__}: return the loss, or a "
                "dict with 'loss', for a step with a backward pass."
            )
        return loss


def class_name(module: nn.Module) -> str:
    """The user's name of a sharded module's class."""
    return type(module).__name__.removeprefix("FSDP")


@contextmanager
def _phase(watch: StepWatch | None, name: Phase) -> Generator[None, None, None]:
    if watch is None:
        yield
        return
    with watch.phase(name):
        yield


def _silence(module: nn.Module) -> None:
    """Nothing is logged: there is no Trainer, and metrics look at values."""
    for name in ("log", "log_dict"):
        module.__dict__[name] = _nothing
    for part in module.modules():
        # By name: torchmetrics need not be imported to be absent.
        if any(kind.__module__ == "torchmetrics.metric" for kind in type(part).__mro__):
            part.__dict__["forward"] = part.__dict__["update"] = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
