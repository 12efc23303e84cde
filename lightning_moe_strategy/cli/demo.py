"""``make demo``: the main job end to end, small enough for two cores.

Trains configs/tiny_cpu.yaml on four processes (fsdp 2, cp 2, e_fsdp 2, ep 2) on text that ships with Python. Run
again, it resumes from the last checkpoint and trains as many steps more.
"""

import argparse
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import yaml

from lightning_moe_strategy._lightning_compat import Callback, Trainer, rank_zero_only
from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe_strategy.callbacks.throughput import ThroughputMonitor
from lightning_moe_strategy.cli.training import run
from lightning_moe_strategy.models.data import TextDataModule

AnyCallback = TypeVar("AnyCallback", bound=Callback)

_CHECKPOINT_VARIABLE = "LIGHTNING_MOE_DEMO_CHECKPOINT"


def run_demo(arguments: Sequence[str]) -> None:
    """Train, and print the result as the last line."""
    parser = argparse.ArgumentParser(prog="lightning-moe demo", description=__doc__)
    parser.add_argument("--steps", type=int, help="optimizer steps of this run (default: those of the config)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps({options.steps}) must be at least 1. Leave it out for the steps of the config.")

    config = Path(str(files("lightning_moe_strategy.configs") / "tiny_cpu.yaml"))
    trainer = yaml.safe_load(config.read_text())["trainer"]
    checkpoint = _checkpoint_to_resume(Path(trainer["default_root_dir"]) / "checkpoints")
    done = int(checkpoint.stem.removeprefix("step=")) if checkpoint else 0
    steps = options.steps or trainer["max_steps"]
    command = ["fit", "--config", str(config), *_ending_at(done + steps, trainer["val_check_interval"])]
    if checkpoint:
        command += ["--ckpt_path", str(checkpoint)]
        rank_zero_only(print)(f"demo: resuming from {checkpoint}")
    cli = run(command)
    assert isinstance(cli.datamodule, TextDataModule)
    _report(cli.trainer, cli.datamodule)


def _ending_at(last_step: int, interval: int) -> list[str]:
    """Options that end a fit at ``last_step`` with a validation and a checkpoint, whatever the config's interval."""
    options = ["--trainer.max_steps", str(last_step)]
    if last_step % interval:
        options += ["--trainer.val_check_interval", str(last_step)]
        options += ["--trainer.callbacks.every_n_train_steps", str(last_step)]
    return options


def _checkpoint_to_resume(folder: Path) -> Path | None:
    """The newest checkpoint when the first process looked: the ranks it starts later take the same one."""
    if _CHECKPOINT_VARIABLE not in os.environ:
        found = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))
        os.environ[_CHECKPOINT_VARIABLE] = str(found[-1]) if found else ""
    return Path(os.environ[_CHECKPOINT_VARIABLE]) if os.environ[_CHECKPOINT_VARIABLE] else None


@rank_zero_only
def _report(trainer: Trainer, data: TextDataModule) -> None:
    val_loss = float(trainer.callback_metrics["val_loss"])
    tokens_per_second = _find(trainer, ThroughputMonitor).tokens_per_second or 0.0
    skew = _find(trainer, ExpertLoadMonitor).last_skew or 0.0
    print(
        f"demo: val_loss={val_loss:.3f} unigram_entropy={data.unigram_entropy():.3f} "
        f"tokens_per_second={tokens_per_second:.0f} skew={skew:.2f}"
    )


def _find(trainer: Trainer, kind: type[AnyCallback]) -> AnyCallback:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next(callback for callback in callbacks if isinstance(callback, kind))
