"""``verify``: the user's module under a layout, on CPU ranks of this machine, against one process."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_moe_strategy._lightning_compat import LightningDataModule, LightningModule
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.comparison import TOLERANCES
from lightning_moe_strategy.precision import precision_name
from lightning_moe_strategy.verifying.building import built_on_cpu, bytes_when_built
from lightning_moe_strategy.verifying.causes import likely_cause
from lightning_moe_strategy.verifying.comparing import Compared
from lightning_moe_strategy.verifying.layouts import Degree, describe, world_of
from lightning_moe_strategy.verifying.memory import require_memory
from lightning_moe_strategy.verifying.processes import ForkedProcesses
from lightning_moe_strategy.verifying.ranks import environment_of, run_rank
from lightning_moe_strategy.verifying.recorded import RankRecord, ReferenceRecord, load
from lightning_moe_strategy.verifying.reference import run_reference
from lightning_moe_strategy.verifying.result import Verification, told
from lightning_moe_strategy.verifying.settings import OF_STRATEGY, TRAINER_OPTIONS, Settings

DEFAULT_LAYOUT: Mapping[str, Degree] = {"fsdp": 2, "cp": 2}


def verify(
    module: LightningModule,
    datamodule: LightningDataModule | None = None,
    layout: Mapping[str, Degree] = DEFAULT_LAYOUT,
    *,
    steps: int = 1,
    precision: str = "32-true",
    zigzag: ZigZagContextParallel | None = None,
    strategy: Mapping[str, object] | None = None,
    trainer: Mapping[str, object] | None = None,
    seed: int = 0,
    say: Callable[[str], object] | None = None,
) -> Verification:
    """Whether a module trains under a layout exactly as it does in one process, and where not, which module and why.

    Its ranks are processes of this machine, forked from this one: no GPU, no network. They train ``steps`` steps of a
    Trainer with the strategy; then one process without it takes the same steps on the batches that they read. Compared
    are the loss, outputs of modules token by token, choices of experts and tokens per expert, every parameter's
    gradient before clipping and value after the step, replicas bit by bit, and, of packed batches, whether a document
    sees another. Dropout keeps every element, and noise is its mean. ``module`` and ``datamodule`` stay as they are.

    Args:
        module: on the CPU, on the meta device, or built in ``configure_model``.
        datamodule: None where the module has its own ``train_dataloader``.
        layout: degrees by axis, as the strategy takes them, ``"auto"`` included.
        steps: of the optimizer.
        precision: of the ranks, as ``Trainer(precision=...)``; the one process computes in FP32.
        zigzag: how batches are split, where the default settings do not fit.
        strategy: of the strategy's other arguments, those that should change no number (``recompute``, ``dispatcher``,
            ``ep_chunks``, ``loss_reduction``, ...).
        trainer: of the Trainer's arguments ``accumulate_grad_batches``, ``gradient_clip_val``,
            ``gradient_clip_algorithm``, ``use_distributed_sampler`` and ``max_steps``, which schedules are told.
        seed: of everything that is drawn; also of weights that have no values yet.
        say: called with a line for every stage.

    Raises:
        ValueError: settings or a module that the strategy refuses, or a module that the machine cannot hold so often.
        RuntimeError: a rank ended with an error of its own, which is the message. A difference raises nothing.
    """
    started, say = time.perf_counter(), say or _nothing
    zigzag = zigzag or ZigZagContextParallel()
    settings = Settings(
        degrees=dict(layout),
        world=world_of(layout),
        steps=steps,
        precision=precision_name(precision),
        seed=seed,
        trainer=_only("trainer", trainer, TRAINER_OPTIONS),
        strategy=_only("strategy", strategy, OF_STRATEGY),
    )
    _require_a_start(settings, module)
    require_memory(bytes_when_built(module), settings.world)
    module = built_on_cpu(module, seed)
    records, reference = _run(settings, module, datamodule, zigzag, say)
    result = _judged(settings, type(module).__name__, records, reference)
    say(f"verify: compared; {time.perf_counter() - started:.1f} s in all")
    return result


def _judged(settings: Settings, name: str, records: list[RankRecord], reference: ReferenceRecord) -> Verification:
    is_exact = settings.precision == "32-true"
    compared = Compared(records, reference, TOLERANCES[torch.float32 if is_exact else torch.bfloat16])
    differs = any(row.is_wrong for row in compared.rows)
    notes = []
    if reference.ties[0] and not compared.wrong("routing"):
        notes.append(
            f"{reference.ties[0]:,} of {reference.ties[1]:,} choices of experts were ties within rounding; the same "
            "experts were taken in one process."
        )
    steps = f"{settings.steps} step{'s' if settings.steps > 1 else ''}"
    layout = describe(records[0].degrees)
    return told(
        compared.rows,
        compared.first_wrong_module if differs else None,
        likely_cause(compared.pattern()) if differs else None,
        heading=f"verify: {name} on {settings.world} ranks ({layout}), {steps}, {settings.precision}",
        notes=notes,
    )


def _run(
    settings: Settings,
    module: LightningModule,
    datamodule: LightningDataModule | None,
    zigzag: ZigZagContextParallel,
    say: Callable[[str], object],
) -> tuple[list[RankRecord], ReferenceRecord]:
    """The records of all ranks and of the one process. No process and no file is left of them."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-moe-verify-"))
    settings = replace(settings, folder=folder)
    try:
        with ForkedProcesses(folder) as processes:
            say(f"verify: {settings.world} ranks ({describe(settings.degrees)}) take {settings.steps} step(s)")
            for rank in range(settings.world):
                work = partial(run_rank, rank, settings, module, datamodule, zigzag)
                processes.start(f"rank {rank}", work, environment_of(rank, settings.world))
            processes.wait()
            say("verify: one process takes the same")
            work = partial(run_reference, settings, module, datamodule, zigzag)
            processes.start("one process", work, {"CUDA_VISIBLE_DEVICES": ""})
            processes.wait()
        records = [load(settings.rank_file(rank)) for rank in range(settings.world)]
        return records, load(settings.reference_file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays readable: it is mapped


def _require_a_start(settings: Settings, module: LightningModule) -> None:
    if settings.steps < 1:
        raise ValueError(f"steps({settings.steps}) must be at least 1.")
    if not hasattr(os, "fork"):
        raise RuntimeError("verify forks its ranks, which this operating system cannot. Run it on Linux.")
    elsewhere = {str(p.device) for p in module.parameters()} - {"cpu", "meta"}
    if elsewhere:
        raise ValueError(
            f"The module lies on {', '.join(sorted(elsewhere))}. verify needs it on the CPU: module.cpu()."
        )
    if dist.is_initialized():
        raise RuntimeError(
            "verify starts its own ranks, and this process is a rank already. Call it in a script of one process, "
            "before any Trainer has started others."
        )


def _only(name: str, given: Mapping[str, object] | None, known: tuple[str, ...]) -> dict[str, object]:
    unknown = sorted(set(given or {}) - set(known))
    if unknown:
        raise ValueError(f"{name} has {', '.join(unknown)}, which verify does not take: it takes {', '.join(known)}.")
    return dict(given or {})


def _nothing(line: str) -> None:
    """Nobody wants to hear of the stages."""
