"""What the strategy costs in a world of one: a Trainer's step against the same step of a loop written by hand.

    python benchmarks/step_cost_alone.py [--steps 8]

This package's MoE transformer, AdamW, gradients clipped. Time is process time of one thread, from step to step: loader
and callbacks included. The loop's step follows each of the Trainer's, on a copy of the weights and the same batch, so
that a busy machine slows both, and a ratio is one of two such steps. Losses are compared first. ``auto`` is
Lightning's own strategy for one device: what a Trainer costs without ours.

Shapes: T tokens of a step, V vocabulary.
"""

import argparse
import copy
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.lightning_module import MoELanguageModel
from lightning_moe_strategy.models.loss import cross_entropy_sum

RUNS = (("auto", 2), ("fsdp_cp_ep", 2), ("fsdp_cp_ep", 8))
"""Strategies, and sequences of a step: what the strategy adds is per parameter and batch; many tokens carry it."""

VOCABULARY, WARM_UP = 4096, 3
AT_MOST = 1.03
TOLERANCE = 1e-4
"""Of the losses of the first steps, relative."""


class AgainstPlainLoop(Callback):
    """After every step of the Trainer, one step of a hand-written loop on a copy of the model and the same batch."""

    def __init__(self, model: MoELanguageModel) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.trainer_seconds: list[float] = []
        self.loop_seconds: list[float] = []
        self.last_end = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_end = time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # From the end of the step before: the loop, the loader and every callback included.
        self.trainer_seconds.append(time.process_time() - self.last_end)
        start = time.process_time()
        self.optimizer.zero_grad()
        logits_TV = self.model.model(batch["input_ids"]).flatten(0, 1)
        targets_T = batch["shift_labels"].flatten()
        loss = cross_entropy_sum(logits_TV, targets_T) / len(targets_T)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loop_seconds.append(time.process_time() - start)
        if batch_idx < WARM_UP:
            require_equal_losses(float(outputs["loss"].detach()), float(loss.detach()), batch_idx)
        self.last_end = time.process_time()


class PlainAdamW(MoELanguageModel):
    """With the loop's optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def require_equal_losses(trainer: float, loop: float, step: int) -> None:
    """An error where they are not."""
    if not abs(trainer - loop) < TOLERANCE * abs(loop):
        raise RuntimeError(f"Step {step}: the Trainer's loss is {trainer} and the loop's {loop}: nothing to compare.")


def measure(strategy: str, tokens: int, sequences: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of the Trainer with ``strategy`` on one device and of the loop, step by step in turn."""
    sizes = {"preset": "tiny", "vocab_size": VOCABULARY, "hidden": 256, "layers": 4, "num_experts": 16, "top_k": 4}
    torch.manual_seed(0)
    model = PlainAdamW(ModelConfig.resolve(sizes))
    against = AgainstPlainLoop(copy.deepcopy(model))
    shape = (sequences * (WARM_UP + steps), tokens + 1)
    ids = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    rows: Any = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[against],
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, DataLoader(rows, batch_size=sequences))
    return against.trainer_seconds[WARM_UP:], against.loop_seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="to be timed (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence (%(default)s)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning's launcher takes every core
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, lightning {lightning.__version__}, {machine}, {' '.join(sys.argv)}")
    for strategy, sequences in RUNS:
        seconds = measure(strategy, arguments.tokens, sequences, arguments.steps)
        print(f"Trainer(strategy={strategy!r}, devices=1), {sequences} x {arguments.tokens} tokens: min / median / max")
        for name, each in zip(("Trainer", "plain loop"), seconds, strict=True):
            print(f"  {name:<12}{1e3 * min(each):8.1f} / {1e3 * median(each):8.1f} / {1e3 * max(each):8.1f} ms")
        ratios = [trainer / loop for trainer, loop in zip(*seconds, strict=True)]
        judgement = "met   " if median(ratios) <= AT_MOST else "MISSED"
        spread = f"{min(ratios):.3f} / {median(ratios):.3f} / {max(ratios):.3f}"
        print(f"  {judgement} {spread} <= {AT_MOST}  Trainer / plain loop, step by step", flush=True)


if __name__ == "__main__":
    main()
