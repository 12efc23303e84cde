"""A simulated step as the planner tells it: the same moments, and buckets that mean the same.

Neither side knows the other. Moments are told apart by the operations that run, what a tensor is for by the
simulator's bucket where it says so and by its shape elsewhere.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

import lightning_moe_strategy.simulate as simulating
from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy._torch_compat import in_checkpointed_region, unit_name
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.plan import presets
from lightning_moe_strategy.plan.cluster import CLUSTERS
from lightning_moe_strategy.plan.planner import Plan, PlanRequest, parse_layout, plan
from lightning_moe_strategy.simulation.memory import MemoryWatch, Peak, Phase, Piece
from lightning_moe_strategy.simulation.report import Simulation
from lightning_moe_strategy.simulation.watch import StepWatch

BUCKETS = {
    "masters": "parameters",
    "optimizer_state": "optimizer",
    "gradients": "gradients",
    "block_inputs": "saved",
    "dsa_topk": "saved",
    "router_state": "saved",
    "saved_activations": "saved",
    "expert_units": "weights",
    "dense_units": "weights",
    "reduce_scatter_input": "weights",
    "ep_buffers": "rows",
    "expert_rows": "rows",
    "recompute_backward": "layer",
    "gathered_kv": "keys and values",
    "head_and_logits": "head",
    "optimizer_temporaries": "layer",
}
"""The planner's buckets by common name. ``weights``: gathered, and whole gradients on their way. ``rows``: of experts.
``layer``: what else the layer that runs holds."""


ATTENTION_BACKWARD = (
    "sparse_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax_backward_data",
)
"""In a layer without a router, the last of them is that of an attention the CPU has no kernel for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that both are asked about."""

    model: str
    cluster: str
    gpus: int
    context: int
    layout: str
    """As ``plan --compare`` takes it."""
    micro_batch: int = 1
    layers: int | None = None
    """Of the model's, so many; all by default."""
    recompute: str = "block"
    routing: str = "balanced"
    ep_chunks: int | str = "none"


@dataclass(frozen=True, kw_only=True)
class Witnesses:
    """What both say: bytes by moment and common bucket."""

    planned: Mapping[str, Mapping[str, float]]
    simulated: Mapping[str, Mapping[str, float]]
    plan: Plan
    simulation: Simulation


def ask(case: Case) -> Witnesses:
    """Plan and simulate one case."""
    made, (simulation, watch) = _plan(case), _simulate(case)
    layers, first = made.workload.model.layers, made.workload.model.dense_first_layers
    # Of a first layer without experts, the simulator's operations do not tell where its MLP ends.
    stages = {
        "experts in the forward": f"forward {max(first, layers - 2)}",
        "head in the forward": "forward head",
        "head and loss": "head",
        "last layer's experts": f"{layers - 1} experts",
        "last layer's expert gradients": f"{layers - 1} expert gradients",
        "last layer's MLP norm": f"{layers - 1} norm",
        "last layer's attention": f"{layers - 1} attention",
        "experts before the last": f"{max(first, layers - 2)} experts",
        "experts after the first": f"{min(first + 1, layers - 1)} experts",
        "first layer's experts": f"{first} experts",
        "first layer's expert gradients": f"{first} expert gradients",
        "second layer's attention": "1 attention",
        "first layer's attention": "0 attention",
        "embedding's gradient": "embed",
        "embedding reduced": "embed reduced",
        "optimizer": "optimizer",
    }
    planned = {moment: _planned(made, moment) for moment in stages}
    sizes = _Sizes(made, case)
    simulated = {moment: sizes.buckets(moment, watch.memory, stage) for moment, stage in stages.items()}
    return Witnesses(planned=planned, simulated=simulated, plan=made, simulation=simulation)


def differences(
    witnesses: Witnesses,
    *,
    tolerance: float = 0.05,
    least_share: float = 0.005,
    unplanned: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Buckets that differ by more than ``tolerance`` and by more than ``least_share`` of their moment's bytes.

    ``unplanned``: bytes by bucket that the planner is known to leave out.
    """
    found = []
    for moment, simulated in witnesses.simulated.items():
        planned, total = witnesses.planned[moment], sum(simulated.values())
        for bucket in sorted({*planned, *simulated}):
            ours, theirs = planned.get(bucket, 0.0), simulated.get(bucket, 0.0)
            if abs(ours - theirs) > max(tolerance * theirs, least_share * total, unplanned.get(bucket, 0.0)):
                found.append(f"{moment}, {bucket}: planned {ours / 1e9:.3f} GB, simulated {theirs / 1e9:.3f} GB")
    return found


def _plan(case: Case) -> Plan:
    shape = presets.preset(case.model)
    if case.layers is not None:
        config = ModelConfig.resolve({"preset": case.model, "layers": case.layers})
        indexers = len(config.indexer_layers)
        shape = dataclasses.replace(shape, layers=case.layers, indexer_layers=indexers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.MODELS, case.model, shape)
        return plan(
            PlanRequest(
                model=case.model,
                cluster=case.cluster,
                gpus=case.gpus,
                context=case.context,
                micro_batch=case.micro_batch,
                recompute=case.recompute,  # type: ignore[arg-type]
                balance=case.routing,  # type: ignore[arg-type]
                ep_chunks=case.ep_chunks,  # type: ignore[arg-type]
                **parse_layout(case.layout),
            )
        )


def _planned(made: Plan, moment: str) -> dict[str, float]:
    sizes: Counter[str] = Counter()
    for part in (made.evaluation.dense.moments[moment], made.evaluation.experts.moments[moment]):
        for name, size in part.items():
            sizes[BUCKETS[name]] += size  # type: ignore[assignment]
    return _told_apart(moment, sizes)


def _told_apart(moment: str, sizes: Mapping[str, float]) -> dict[str, float]:
    """At the head, what is kept for it, its weights and its logits are one bucket on both sides."""
    if moment not in ("head and loss", "head in the forward"):
        return dict(sizes)
    together = ("head", "saved", "weights", "layer", "rows", "keys and values")
    apart = {name: size for name, size in sizes.items() if name not in together}
    return apart | {"head and saved": sum(sizes.get(name, 0.0) for name in together)}


def _simulate(case: Case) -> "tuple[Simulation, _StageWatch]":
    sizes: dict[str, Any] = {"preset": case.model} | ({} if case.layers is None else {"layers": case.layers})
    cluster = CLUSTERS[case.cluster]
    ids_BS = torch.zeros(case.micro_batch, case.context, dtype=torch.int64)
    degrees = parse_layout(case.layout)
    watches: list[_StageWatch] = []

    def watched(placement: Placement, **options: Any) -> _StageWatch:
        watches.append(_StageWatch(placement, **options))
        return watches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulating, "StepWatch", watched)
        simulation = simulating.simulate(
            partial(MoELanguageModel, sizes),
            ParallelDims(**degrees, nvl=cluster.nvl),  # type: ignore[arg-type]
            {"input_ids": ids_BS, "labels": ids_BS.clone(), "shift_labels": ids_BS.clone()},
            world_size=case.gpus,
            local_world_size=min(case.gpus, cluster.gpus_per_host),
            recompute=case.recompute,
            routing=case.routing,
            ep_chunks=case.ep_chunks,
        )
    return simulation, watches[-1]


class _Sizes:
    """What a tensor is for, by its shape."""

    def __init__(self, made: Plan, case: Case) -> None:
        shape, side = made.workload.model, made.evaluation.dense.side
        self.hidden, self.vocabulary, self.inner = shape.hidden, shape.vocab_size, shape.moe_intermediate
        self.local_experts = shape.num_experts // made.evaluation.experts.side.ep
        whole, cp = case.context, side.cp
        self.whole = {whole, whole - whole // (2 * cp)} if cp > 1 else set()
        """Lengths of tensors of a whole sequence, and of the keys before the last segment of this rank."""

    def buckets(self, moment: str, memory: "_StageMemory", stage: str) -> dict[str, float]:
        sizes: Counter[str] = Counter()
        for piece in memory.largest(memory.stages[stage].moment, 1_000_000):
            sizes[self._bucket(moment, piece, memory.row_counts)] += piece.num_bytes
        del sizes["other"]
        return _told_apart(moment, sizes)

    def _bucket(self, moment: str, piece: Piece, row_counts: Collection[int]) -> str:
        if piece.bucket in ("gathered_weights", "reduce_buffers"):
            return "weights"
        if piece.bucket not in ("activations", "temporary", "expert_rows"):
            return piece.bucket
        if moment == "optimizer":
            return "layer"
        if self.vocabulary in piece.shape:
            return "head"
        if piece.bucket == "activations":
            return "saved"
        if len(piece.shape) == 3 and piece.shape[0] == self.local_experts:
            return "weights"
        if self._is_rows(piece, row_counts):
            return "rows"
        return "keys and values" if self.whole & set(piece.shape) else "layer"

    def _is_rows(self, piece: Piece, row_counts: Collection[int]) -> bool:
        length, width = piece.shape[0] if piece.shape else 0, piece.shape[-1] if len(piece.shape) == 2 else 1
        if len(piece.shape) == 2 and piece.dtype == "float32" and width in (self.inner, 2 * self.inner):
            return True  # temporaries of the activation, of all rows or of a block of them
        widths = (self.hidden, self.inner, 2 * self.inner, 1)
        return len(piece.shape) in (1, 2) and length in row_counts and width in widths


class _StageMemory(MemoryWatch):
    """Finds the peak of every stage of the backward pass, and of the optimizer."""

    def __init__(self, experts_units: Collection[str]) -> None:
        super().__init__(experts_units)
        self.stage, self.stages = "", dict[str, Peak]()

    def _note_peak(self, operation: str, unit: str) -> None:
        super()._note_peak(operation, unit)
        best = self.stages.get(self.stage)
        if best is None or self.num_bytes > best.num_bytes:
            self.stages[self.stage] = Peak(num_bytes=self.num_bytes, moment=self.moment, operation=operation, unit=unit)


class _StageWatch(StepWatch):
    """Tells the stages of a layer's backward pass apart.

    Its experts: from their first product to the reduction of their gradients. The norm: from the reduction of the
    router's gradients to the next product, which begins with the attention's output projection. In a layer without
    experts only the attention is told apart, from the first operation that is its backward on.
    """

    def __init__(self, placement: Placement, **options: Any) -> None:
        super().__init__(placement, **options)
        self.memory: _StageMemory = _StageMemory({unit.name for unit in placement.units if unit.kind == "experts"})
        self.num_products, self.layer = 0, ""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.arithmetic.phase == "forward":
            self._enter_layer()
            self.memory.stage = f"forward {self.layer}"
        if self.arithmetic.phase == "backward":
            self._enter_layer()
            self._enter_stage(operation._opname)
        return super().run(operation, args, kwargs)

    @contextmanager
    def phase(self, name: Phase) -> Generator[None, None, None]:
        self.memory.stage, self.layer = name, ""
        with super().phase(name):
            yield

    def _enter_layer(self) -> None:
        parts = self.memory.unit.split(".")
        layer = parts[parts.index("layers") + 1] if "layers" in parts else parts[-1]
        if layer != self.layer:
            self.layer, self.num_products = layer, 0
            self.memory.stage = layer if "layers" not in parts else f"{layer} recompute"

    def _enter_stage(self, operation: str) -> None:
        if operation == "_grouped_mm":
            self.num_products += 1
            # A recompute runs the products of the forward once more.
            if self.memory.stage == f"{self.layer} recompute" and not in_checkpointed_region():
                self.memory.stage = f"{self.layer} experts"
        elif self.memory.stage == f"{self.layer} norm":
            self.memory.stage = f"{self.layer} attention" if operation == "mm" else self.memory.stage
        elif operation in ATTENTION_BACKWARD and self.num_products == 0:
            self.memory.stage = f"{self.layer} attention"

    @contextmanager
    def _around(self, step: str, group: Any) -> Generator[None, None, None]:
        is_reduction, name = step == "post_backward", unit_name(group)
        if is_reduction and name.endswith("embed"):
            self.memory.stage = "embed reduced"
        if is_reduction and name.endswith("experts"):
            self.memory.stage = f"{self.layer} expert gradients"
        with super()._around(step, group):
            yield
        if is_reduction and name.endswith("experts"):
            self.memory.stage = f"{self.layer} router"
        if is_reduction and name.endswith("router"):
            self.memory.stage = f"{self.layer} norm"
