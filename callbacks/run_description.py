"""What a run is, in a small file beside its logs: ``run.json``, which ``lightning-moe report`` reads."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lightning_moe_strategy._lightning_compat import FLAVOUR, LightningModule, Trainer, rank_zero_warn
from lightning_moe_strategy.callbacks.balance import ExpertBalance
from lightning_moe_strategy.placement import placement_of

FILE_NAME = "run.json"
_AXES = ("d_rep", "fsdp", "cp", "cp_inter", "e_rep", "e_fsdp", "ep")


def write_run_description(trainer: Trainer, module: LightningModule, directory: Path) -> None:
    """Write ``directory/run.json``: layout, versions, model, precision, recompute. Rank 0 calls it alone.

    A run that resumes into the same folder replaces it. Where the folder cannot be written a warning says so.
    """
    unfinished = directory / f".{FILE_NAME}.{os.getpid()}.unfinished"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(json.dumps(describe_run(trainer, module), indent=1), encoding="utf-8")
            unfinished.replace(directory / FILE_NAME)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        rank_zero_warn(f"{directory / FILE_NAME} cannot be written ({error.strerror or error}): a report lacks it.")


def describe_run(trainer: Trainer, module: LightningModule) -> dict[str, object]:
    """The file's values. No collective: sharded parameters know their global shape."""
    placement = placement_of(module)
    strategy: Any = trainer.strategy
    experts: Mapping[str, Any] = getattr(strategy, "experts", {})
    held = {id(p) for each in experts.values() for p in each.parameters()}
    sizes = [(id(p) in held, p.requires_grad, p.numel()) for p in module.parameters()]
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    balance = next((each.options.balance for each in callbacks if isinstance(each, ExpertBalance)), "none")
    is_redundant = placement is not None and placement.max_imbalance is not None
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": trainer.global_step,
        "max_steps": trainer.max_steps,
        "world": trainer.world_size,
        "device": _device(strategy.root_device),
        "layout": {} if placement is None else {axis: getattr(placement.dims, axis) for axis in _AXES},
        "precision": str(trainer.precision),
        "recompute": "none" if placement is None else placement.recompute,
        "balance": "redundant" if is_redundant else balance,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        # Sharding puts a class of its own in front.
        "model": next(each.__name__ for each in type(module).__mro__ if not issubclass(each, FSDPModule)),
        "parameters": sum(size for _, _, size in sizes),
        "expert_parameters": sum(size for is_expert, _, size in sizes if is_expert),
        "trained_parameters": sum(size for _, is_trained, size in sizes if is_trained),
        "layers_with_experts": len(experts),
        "experts_per_layer": max((int(each.num_experts) for each in experts.values()), default=0),
        "versions": _versions(),
    }


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU, {platform.machine()}" if device.type == "cpu" else device.type
    return torch.cuda.get_device_name(device)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("lightning-moe-strategy", FLAVOUR.replace("_", "-"), "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
