"""Run the real placement of a model at its real world size in one process without a GPU.

The process group is fake, so collectives return at once, and tensors have shapes and no values. Everything else is
the code that trains: meshes, context parallel attention, dispatch, sharding, prefetch, recompute, the mean over
tokens. What cannot be simulated is what reads the values of tensors, the routing above all: it is assumed.
"""

import gc
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from lightning_moe_strategy import _torch_compat
from lightning_moe_strategy.context_parallel.batch import (
    Key,
    MicroBatch,
    count_whole,
    find_sequences,
    refuse_what_cannot_be_split,
    split_items,
)
from lightning_moe_strategy.context_parallel.scope import ContextParallel, Shift
from lightning_moe_strategy.expert_parallel.dispatch import AssumedRouting
from lightning_moe_strategy.expert_parallel.experts import find_experts, require_experts
from lightning_moe_strategy.initialization import allocate
from lightning_moe_strategy.kernels import swiglu
from lightning_moe_strategy.mesh import ParallelDims, build_dense_meshes
from lightning_moe_strategy.placement import Placement, adapt_and_shard, common_num_experts, finish
from lightning_moe_strategy.prefetch_order import UnitPrefetch
from lightning_moe_strategy.recompute import Recompute
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.simulation.memory import Phase
from lightning_moe_strategy.simulation.report import Simulation, report
from lightning_moe_strategy.simulation.watch import StepWatch
from lightning_moe_strategy.token_mean import TokenMean

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(minutes=30)
_IGNORE_INDEX = -100


def simulate(
    make_module: Callable[[], nn.Module],
    dims: ParallelDims,
    batch: Mapping[str, Tensor],
    *,
    world_size: int,
    local_world_size: int,
    rank: int = 0,
    precision: PrecisionName = "bf16-mixed",
    recompute: Recompute = "none",
    routing: AssumedRouting = "balanced",
    shift: Shift = "none",
    accelerator: Literal["gpu", "cpu"] = "gpu",
) -> Simulation:
    """Memory, traffic and arithmetic of one training step on rank ``rank`` of ``world_size``.

    ``make_module`` builds a LightningModule; it is called under the meta device, and its ``training_step(batch, 0)``
    is what runs, without logging. ``batch`` is one micro-batch [B, S] as the ranks of a cp group read it; ``shift``
    says who shifts its labels. The optimizer is AdamW. ``routing``: ``"balanced"``, or ``"worst"``, where all that
    can be sent to one rank comes to this one. ``accelerator``: ``"cpu"`` is a run on gloo, where weights are gathered
    asynchronously (one gathered copy fewer in the forward pass) and kernels work through blocks.

    Raises:
        ValueError: degrees that do not fit, or a model or batch that cannot be spread over them.
        RuntimeError: a process group exists already; or the model reads values of tensors, which are not there.
    """
    _check(world_size, rank, precision, recompute, routing)
    if dist.is_initialized():
        raise RuntimeError("simulate() makes a process group of its own and one exists: call it in a fresh process.")
    with _torch_compat.fake_world(world_size, rank):
        with torch.device("meta"):
            module = make_module()
        placement = _place_on_meta(module, dims, world_size, local_world_size, precision, recompute, routing)
        local_batch, micro_batch = _local_part(batch, placement, shift)
        with _torch_compat.fake_tensors(), _GroupedProducts(), _kernels_of(accelerator), _values_explained(module):
            step = _Step(module, placement, local_batch, micro_batch)
            if accelerator == "cpu" and step.prefetch.units:
                _torch_compat.set_asynchronous_unshard(step.prefetch.units[""], True)
            step.run(None)
            gc.collect()
            watch = StepWatch(placement)
            with step.watched(watch):
                resident_bytes = watch.memory.num_bytes
                step.run(watch)
        return report(
            watch,
            dims=placement.dims,
            rank=rank,
            routing=routing,
            recompute=recompute,
            resident_bytes=resident_bytes,
        )


def _place_on_meta(
    module: nn.Module,
    requested: ParallelDims,
    world_size: int,
    local_world_size: int,
    precision: PrecisionName,
    recompute: Recompute,
    routing: AssumedRouting,
) -> Placement:
    experts = find_experts(module)
    dims = requested.resolve(world_size, local_world_size=local_world_size, num_experts=common_num_experts(experts))
    require_experts(module, dims.ep)
    if precision == "bf16-true":
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    dense = build_dense_meshes(dims, "cpu", _TIMEOUT)
    placement = Placement(
        requested=requested,
        dims=dims,
        dense=dense,
        context_parallel=ContextParallel(dense.cp_group),
        experts=experts,
        precision=precision,
        recompute=recompute,
        assumed_routing=routing,
    )
    compute_dtype = None if precision == "32-true" else torch.bfloat16
    # Outside of fake tensors: a mesh looks at the values of its own rank table.
    adapt_and_shard(module, placement, device=_CPU, timeout=_TIMEOUT, compute_dtype=compute_dtype)
    return placement


def _local_part(
    batch: Mapping[str, Tensor], placement: Placement, shift: Shift
) -> tuple[dict[str, Tensor], MicroBatch]:
    """This rank's part of the batch, as ``ZigZagContextParallel`` would cut it."""
    cp = placement.context_parallel
    items: dict[Key, Any] = {key: item for key, item in batch.items()}
    fields = find_sequences(items, sequence_keys=None, labels_key=None)
    if cp.degree == 1:
        return dict(batch), count_whole(items, fields, shift, _IGNORE_INDEX)
    refuse_what_cannot_be_split(items, fields, shift=shift, degree=cp.degree, ignore_index=_IGNORE_INDEX)
    local, cp.sequence, micro_batch = split_items(
        items,
        fields,
        shift=shift,
        degree=cp.degree,
        rank=cp.rank,
        ignore_index=_IGNORE_INDEX,
        pad_token_id=0,
    )
    return {str(key): item for key, item in local.items()}, micro_batch


class _Step:
    """A training step as Lightning and the strategy run it: gradients of the step before live until the backward."""

    def __init__(
        self, module: nn.Module, placement: Placement, batch: Mapping[str, Tensor], micro_batch: MicroBatch
    ) -> None:
        allocate(module, _CPU)
        finish(module, placement)
        _silence(module)
        register_fsdp_forward_method(module, "training_step")
        self.module, self.placement = module.train(), placement
        self.batch, self.micro_batch = batch, micro_batch
        self.token_mean = TokenMean()
        self.prefetch = UnitPrefetch(placement.units)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Shards as plain tensors: the same arithmetic, without the whole tensors DTensor makes to find shapes.
        self.shards = [(parameter, nn.Parameter(local_tensor(parameter.data))) for parameter in trained]
        self.optimizer = torch.optim.AdamW([shard for _, shard in self.shards], lr=1e-3, foreach=True)

    @contextmanager
    def watched(self, watch: StepWatch) -> Generator[None, None, None]:
        state = (value for values in self.optimizer.state.values() for value in values.values())
        sequence = self.placement.context_parallel.sequence
        positions = [] if sequence is None else [sequence.position_ids_BL]
        others = [*self.module.buffers(), *self.batch.values(), *positions]
        with watch.opened(parameters=self.module.parameters(), optimizer_state=state, others=others):
            yield

    def run(self, watch: StepWatch | None) -> None:
        self.prefetch.before_batch("train")
        with _phase(watch, "forward"):
            loss = self._loss()
        with _phase(watch, "backward"):
            for parameter, _ in self.shards:
                parameter.grad = None
            self.prefetch.before_backward()
            self.token_mean.as_sum(loss, self.micro_batch).backward()  # type: ignore[no-untyped-call]
            self.prefetch.after_backward()
        del loss
        with _phase(watch, "optimizer"):
            self.token_mean.divide((parameter.grad for parameter, _ in self.shards), _CPU)
            for parameter, shard in self.shards:
                shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _loss(self) -> Tensor:
        output = self.module.training_step(dict(self.batch), 0)  # type: ignore[operator]
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"{_class_name(self.module)}.training_step returned {type(output).__name__}: return the loss, or a "
                "dict with 'loss', for a step with a backward pass."
            )
        return loss


class _GroupedProducts(_torch_compat.OperationMode):
    """Shapes of grouped matrix products in FP32, which torch computes on CPU but has no shapes for (2.13)."""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is not torch.ops.aten._grouped_mm.default or args[0].dtype != torch.float32:
            return operation(*args, **kwargs)
        left, right, offsets_E = (*args, kwargs.get("offs"))[:3]
        rows, columns = left.shape[0], right.shape[-1]
        shape = (rows, columns) if right.dim() == 3 else (offsets_E.shape[0], rows, columns)
        return left.new_empty(shape)


@contextmanager
def _kernels_of(accelerator: Literal["gpu", "cpu"]) -> Generator[None, None, None]:
    """Fake tensors are on the CPU: what works through blocks for its cache takes whole tensors, as on a GPU."""
    block = swiglu.CPU_BLOCK_NUMBERS
    if accelerator == "gpu":
        swiglu.CPU_BLOCK_NUMBERS = sys.maxsize
    try:
        yield
    finally:
        swiglu.CPU_BLOCK_NUMBERS = block


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


@contextmanager
def _values_explained(module: nn.Module) -> Generator[None, None, None]:
    """An error about tensors without values, in the words of somebody who wrote a model."""
    try:
        yield
    except _torch_compat.needs_values() as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        package = str(Path(__file__).parent)
        own = [frame for frame in frames if not frame.filename.startswith(package)] or frames
        where = f"{own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`"
        raise RuntimeError(
            f"{_class_name(module)} cannot be simulated: {where} needs the values of a tensor ({error}), and a "
            "simulation has shapes alone. Compute it without reading values (no .item(), no `if` on a tensor, no "
            "indexing by a mask), or measure this model on real ranks."
        ) from error


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _check(world_size: int, rank: int, precision: str, recompute: str, routing: str) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank({rank}) must be in [0, {world_size}), the ranks of the world.")
    for name, value, allowed in (
        ("precision", precision, get_args(PrecisionName)),
        ("recompute", recompute, get_args(Recompute)),
        ("routing", routing, get_args(AssumedRouting)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}({value!r}) must be one of {', '.join(map(repr, allowed))}.")
