"""What a plan says of a run's peak memory: read from a file, or made for the run as it is."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.parallel_dims import ResolvedDims
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.plan.cluster import CLUSTERS, Cluster
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.evaluate import Exact
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.model import ModelShape
from lightning_moe_strategy.plan.model_files import from_hugging_face, from_sizes
from lightning_moe_strategy.plan.search import Evaluation, price
from lightning_moe_strategy.plan.workload import Dispatcher, Workload
from lightning_moe_strategy.simulation.report import GB

RESERVE = "allocator_reserve"
"""The planner's bucket for what no tensor holds."""

OTHER_PURPOSE = "activations and temporaries"

PURPOSES: Mapping[str, tuple[str, ...]] = {
    "parameters": ("masters",),
    "optimizer": ("optimizer_state",),
    "gradients": (),
    "FSDP buffers": ("gathered_weights", "reduce_buffers", "expert_units", "dense_units", "reduce_scatter_input"),
    OTHER_PURPOSE: (),
}
"""What the planner and the simulator call by names of their own."""


class CannotPlan(Exception):
    """The planner has no figure for this run; the reason is one sentence."""


@dataclass(frozen=True, kw_only=True)
class PlannedPeak:
    """Peak memory of the tensors of one GPU."""

    num_bytes: float
    buckets: Mapping[str, float]
    layout: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Degrees it was planned for."""

    def warn_of_another_run(self, dims: ResolvedDims, warn: Callable[[str], Any]) -> None:
        """Warn where the plan's layout is not the run's: the ratio would compare two different runs."""
        other = [
            f"{axis}({degree}) where the run has {dims.degree(axis)}"
            for axis, degree in self.layout.items()
            if axis != "cp_inter" and dims.degree(axis) != degree
        ]
        if other:
            warn(f"PlanCheck compares with the plan of another layout: {', '.join(other)}.")


def read_planned_peak(path: str | Path) -> PlannedPeak:
    """The peak in a file of ``lightning-moe plan --json`` (``memory_gb``) or ``simulate --json`` (``peak_gb``).

    Called by every rank of the world.

    Raises:
        ValueError: on every rank, when one of them finds no such file, no JSON, or neither of the two.
    """
    planned: PlannedPeak | None = None
    error = ""
    try:
        planned = _read(path)
    except ValueError as reason:
        error = str(reason)
    errors: list[Any] = [error]
    if dist.is_initialized():
        # A rank that went on alone would wait for the others forever.
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    failed = next((f"On rank {rank}: {each}" for rank, each in enumerate(errors) if each), "")
    if failed or planned is None:
        raise ValueError(error or failed)
    return planned


def plan_run(
    module: nn.Module, placement: Placement, optimizers: Sequence[Optimizer], batch: tuple[int, int]
) -> PlannedPeak:
    """The planner's peak for a run as it is; ``batch`` is (sequences, tokens of each on this rank).

    Of even routing; under ``balance="redundant"`` of any, with as many experts sent to a rank as can be.

    Raises:
        CannotPlan: with the reason.
    """
    buckets = price_run(module, placement, optimizers, batch, CLUSTERS["h200-nvl8"]).peak.buckets  # the same on any
    of_tensors = {name: size for name, size in buckets.items() if name != RESERVE}
    return PlannedPeak(num_bytes=sum(of_tensors.values()), buckets=of_tensors)


def price_run(
    module: nn.Module,
    placement: Placement,
    optimizers: Sequence[Optimizer],
    batch: tuple[int, int],
    cluster: Cluster,
) -> Evaluation:
    """What the planner has to say of a run as it is, on ``cluster``; ``batch`` as for `plan_run`.

    Raises:
        CannotPlan: with the reason.
    """
    if placement.precision != "bf16-mixed":
        raise CannotPlan(f"the planner counts precision 'bf16-mixed', and this run has {placement.precision!r}.")
    if not batch[0] * batch[1]:
        raise CannotPlan("the batch has no sequences whose tokens could be counted.")
    dims = placement.dims
    workload = Workload(
        model=shape_of(module),
        cluster=cluster,
        gpus=dims.world_size,
        context=batch[1] * dims.cp,
        micro_batch=batch[0],
        recompute=placement.recompute,
        dispatcher=_dispatcher(placement.dispatcher),
        balance="balanced" if placement.max_imbalance is None else "redundant",
        max_imbalance=placement.max_imbalance or 1.0,
        ep_chunks=placement.chunking.chunks,
        ep_chunk_bytes=placement.chunking.max_bytes,
        optimizer=_optimizer(optimizers),
        fa4_pr_2816=True,
        achieved_flops=cluster.achieved_flops,
    )
    dense = DenseSide(d_rep=dims.d_rep, fsdp=dims.fsdp, cp=dims.cp, cp_inter=dims.cp_inter)
    experts = ExpertSide(e_rep=dims.e_rep, e_fsdp=dims.e_fsdp, ep=dims.ep)
    return price(Exact(workload=workload), dense, experts)


def differences(planned: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Measured minus planned bytes under each of ``PURPOSES``."""
    sizes = dict.fromkeys(PURPOSES, 0.0)
    for sign, buckets in ((1, measured), (-1, planned)):
        for name, size in buckets.items():
            purpose = next((each for each, names in PURPOSES.items() if name in (each, *names)), OTHER_PURPOSE)
            sizes[purpose] += sign * size
    return sizes


def _read(path: str | Path) -> PlannedPeak:
    remedy = "Give a file of 'lightning-moe plan --json' or 'lightning-moe simulate --json'."
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"PlanCheck(plan={str(path)!r}) cannot be read: {error}. {remedy}") from None
    if isinstance(values, list) or (isinstance(values, Mapping) and "rows" in values):
        raise ValueError(
            f"PlanCheck(plan={str(path)!r}) holds several plans. Write one, without --search or --compare."
        )
    try:
        if "memory_gb" in values:
            memory = values["memory_gb"]
            total, buckets = memory["total"] - memory["reserve"], memory["buckets"]
        else:
            total, buckets = values["peak_gb"], values["buckets_gb"]
        return PlannedPeak(
            num_bytes=float(total) * GB,
            buckets={name: float(size) * GB for name, size in buckets.items() if name != RESERVE},
            layout={str(axis): int(degree) for axis, degree in values.get("layout", {}).items()},
        )
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ValueError(f"PlanCheck(plan={str(path)!r}) holds no plan of a peak. {remedy}") from None


def shape_of(module: nn.Module) -> ModelShape:
    """From the first configuration in the module tree, where its parameters are those that are trained."""
    shape: ModelShape | None = None
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        try:
            if isinstance(config, ModelConfig):
                shape = from_sizes(dataclasses.asdict(config), name=type(module).__name__)
            elif hasattr(config, "to_dict") and hasattr(config, "model_type"):  # transformers need not be installed
                shape = from_hugging_face(config.to_dict(), name=str(config.model_type))
        except PlanError as error:
            raise CannotPlan(str(error)) from None
        if shape is not None:
            break
    if shape is None:
        raise CannotPlan(f"{type(module).__name__} holds neither a ModelConfig nor a Hugging Face config.")
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if total != shape.counts.total:
        raise CannotPlan(f"its configuration counts {shape.counts.total:,} parameters, and the module holds {total:,}.")
    if trained not in (total, total - shape.counts.indexer):
        raise CannotPlan(f"the planner trains every parameter, and {total - trained:,} of {total:,} are frozen.")
    return shape


def _dispatcher(name: str) -> Dispatcher:
    """A user's own is taken to need what an all-to-all does."""
    kinds: dict[str, Dispatcher] = {"all_gather": "all_gather", "symm_mem": "symm_mem"}
    return kinds.get(name, "all_to_all")


def _optimizer(optimizers: Sequence[Optimizer]) -> Any:
    names = {type(optimizer).__name__ for optimizer in optimizers}
    if names and names <= {"Adam", "AdamW"}:
        return "adamw"
    if names <= {"Adam", "AdamW", "Muon"} and "Muon" in names:
        return "muon"
    raise CannotPlan(f"the planner counts AdamW and Muon, and this run has {', '.join(sorted(names)) or 'none'}.")
