"""One process as the reference, a Trainer on gloo ranks as the claim: the same samples, the same optimizer."""

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from tests.flavour import Callback, LightningDataModule, LightningModule, Trainer

QUIET: dict[str, Any] = dict(
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(prefix="trainer-"),
)

# fsdp, cp, d_rep, e_fsdp, ep, e_rep in {1, 2, 4}; ep < cp, ep > cp, ep = world, both kinds of replicas, two-step cp.
LAYOUTS_OF_4: list[dict[str, int]] = [
    dict(fsdp=4, cp=1, e_fsdp=1, ep=4),
    dict(fsdp=4, cp=1, e_fsdp=4, ep=1),
    dict(fsdp=2, cp=2, e_fsdp=2, ep=2),
    dict(fsdp=1, cp=4, e_fsdp=2, ep=2),
    dict(fsdp=1, cp=4, e_fsdp=1, ep=4),
    dict(fsdp=1, cp=4, e_fsdp=4, ep=1),
    dict(d_rep=2, fsdp=1, cp=2, e_fsdp=1, ep=4),
    dict(d_rep=2, fsdp=2, cp=1, e_fsdp=2, ep=2),
    dict(d_rep=4, fsdp=1, cp=1, e_rep=2, e_fsdp=2, ep=1),
    dict(d_rep=2, fsdp=1, cp=2, e_rep=2, e_fsdp=1, ep=2),
    dict(d_rep=1, fsdp=2, cp=2, e_rep=4, e_fsdp=1, ep=1),
    dict(d_rep=4, fsdp=1, cp=1, e_rep=1, e_fsdp=1, ep=4),
    dict(fsdp=1, cp=4, cp_inter=2, e_fsdp=2, ep=2),
]


class KeepGradients(Callback):
    """Whole gradients of every step, as the optimizer would use them but before clipping."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.steps.append(
            {name: whole(p.grad).clone() for name, p in pl_module.named_parameters() if p.grad is not None}
        )


class InOrder(LightningDataModule):
    """This rank's share of a loader's samples without the shuffling that Lightning's own sampler does in training."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        share: Any = self.trainer.strategy
        sampler = DistributedSampler(self.loader.dataset, shuffle=False, **share.distributed_sampler_kwargs)
        return DataLoader(self.loader.dataset, batch_size=self.loader.batch_size, sampler=sampler)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fit(
    degrees: dict[str, int],
    make_model: Callable[[], LightningModule],
    make_loader: Callable[[int], DataLoader],
    *,
    callbacks: tuple[Callback, ...] = (),
    shift: str = "auto",
    callback_options: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[Trainer, LightningModule, KeepGradients]:
    """Train on this rank. ``make_loader(dp)`` gives batches ``1 / dp`` of the reference's."""
    torch.manual_seed(0)
    model = make_model()
    strategy = FSDPCPEPStrategy(**degrees)  # also other arguments of the strategy
    keep = KeepGradients()
    dp = degrees.get("d_rep", 1) * degrees.get("fsdp", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=torch.distributed.get_world_size(),
            strategy=strategy,
            callbacks=[keep, ZigZagContextParallel(shift=shift, **(callback_options or {})), *callbacks],
            **(QUIET | dict(max_steps=1, use_distributed_sampler=False) | options),
        )
        trainer.fit(model, datamodule=InOrder(make_loader(dp)), ckpt_path=ckpt_path)
    return trainer, model, keep


def reference(
    make_model: Callable[[], LightningModule], loader: DataLoader, *, num_steps: int = 1, clip: float | None = None
) -> tuple[LightningModule, list[dict[str, Tensor]], list[float]]:
    """A plain loop in one process; loss is the mean over all tokens of the whole batch."""
    torch.manual_seed(0)
    model = make_model().train()
    optimizer: Any = model.configure_optimizers()
    gradients, losses = [], []
    for index, batch in zip(range(num_steps), loader, strict=False):
        optimizer.zero_grad()
        loss = _loss(model, batch, index)
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss))
    return model, gradients, losses


def _loss(model: LightningModule, batch: Any, index: int) -> Tensor:
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return model.training_step(batch, index)


def worst_difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference over the parameters, and its parameter."""
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    rows = {name: float((gradients[name] - e).norm() / (e.norm() + 1e-12)) for name, e in expected.items()}
    name = max(rows, key=lambda key: rows[key])
    return rows[name], name
