"""``Trainer(strategy="fsdp_cp_ep")``: FSDP x CP x EP under an unchanged LightningModule.

The methods stand in the order in which a Trainer calls them.
"""

import atexit
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_strategy._lightning_compat import (
    IS_INTERACTIVE,
    LightningModule,
    ModelParallelStrategy,
    ParallelStrategy,
    Precision,
    Trainer,
    TrainerFn,
    add_callbacks,
    is_overridden,
    optimizers_to_device,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe_strategy.callbacks.prefetch import ExpertPrefetch
from lightning_moe_strategy.callbacks.throughput import ThroughputMonitor
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.expert_parallel.experts import find_experts, require_experts
from lightning_moe_strategy.mesh import ParallelDims, ResolvedDims, build_dense_meshes
from lightning_moe_strategy.placement import Placement, common_num_experts, place, placement_of
from lightning_moe_strategy.precision import MeshPrecision
from lightning_moe_strategy.recompute import Recompute
from lightning_moe_strategy.token_mean import TokenMean
from lightning_moe_strategy.units import Unit

BatchTransform = Callable[[Any, str], Any]
"""A function of (batch, stage) that returns the batch the user's step gets."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_DEFAULT_CALLBACKS = (ZigZagContextParallel, ExpertPrefetch, ExpertLoadMonitor, ThroughputMonitor)


class FSDPCPEPStrategy(ModelParallelStrategy):
    """Train mixture-of-experts models with FSDP x CP x EP, the LightningModule unchanged.

    Args:
        d_rep: copies of the dense parameters.
        fsdp: dense shards with their own samples; ``"auto"`` takes what is left.
        cp: GPUs that share one sequence.
        e_rep: copies of the expert parameters.
        e_fsdp: shards of each expert; ``"auto"`` takes what is left.
        ep: GPUs the experts are spread over; ``"auto"`` is the largest that stays inside an NVLink domain.
        cp_inter: of ``cp``, the number of NVLink domains one sequence is spread over: K and V are exchanged between
            domains first, then inside of each.
        nvl: GPUs of one NVLink domain; ``"auto"`` is the GPUs of one host.
        recompute: ``"block"`` keeps every block's input, routing and selected keys, and computes the rest again;
            ``"none"`` keeps all.
        timeout: of every collective on every mesh axis.
        process_group_backend: ``"nccl"`` or ``"gloo"``; None chooses by device.
        save_distributed_checkpoint: a directory with every rank's shards, or one file from rank 0.
        error_if_nonfinite: raise when the gradient norm to clip is not finite.
        init_seed: of parameters built on the meta device; None takes the seed of ``seed_everything``.
        start_method: only ``"popen"`` (a script, torchrun or SLURM); forked ranks cannot return sharded tensors.

    Raises:
        ValueError: degrees that cannot be laid out on the Trainer's devices, when the Trainer is built.
    """

    strategy_name = "fsdp_cp_ep"

    def __init__(
        self,
        *,
        d_rep: int = 1,
        fsdp: int | Literal["auto"] = "auto",
        cp: int = 1,
        e_rep: int = 1,
        e_fsdp: int | Literal["auto"] = "auto",
        ep: int | Literal["auto"] = "auto",
        cp_inter: int = 1,
        nvl: int | Literal["auto"] = "auto",
        recompute: Recompute = "none",
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        save_distributed_checkpoint: bool = True,
        error_if_nonfinite: bool = False,
        init_seed: int | None = None,
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if start_method != "popen":
            raise ValueError(
                f"start_method({start_method!r}) is not supported: spawned and forked ranks cannot hand sharded "
                "tensors back to the parent. Leave start_method out and run a script with python, torchrun or srun."
            )
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute({recompute!r}) must be one of {', '.join(map(repr, get_args(Recompute)))}.")
        self._recompute = recompute
        self._requested_dims = ParallelDims(
            d_rep=d_rep, fsdp=fsdp, cp=cp, e_rep=e_rep, e_fsdp=e_fsdp, ep=ep, cp_inter=cp_inter, nvl=nvl
        )
        self._mesh_timeout = timeout
        self._error_if_nonfinite = error_if_nonfinite
        self._init_seed = init_seed
        self._batch_transforms: list[BatchTransform] = []
        self._token_mean = TokenMean()
        self._placement: Placement | None = None
        self.micro_batch = MicroBatch(num_tokens=0, num_loss_tokens=None)
        """What the current batch holds on this rank."""

    @property
    def placement(self) -> Placement:
        """How the module lies on the ranks; it exists once the Trainer has started its processes."""
        if self._placement is None:
            raise RuntimeError("The placement exists once the Trainer has started its processes.")
        return self._placement

    @property
    def dims(self) -> ResolvedDims:
        """The degrees in use."""
        return self.placement.dims

    @property
    def context_parallel(self) -> ContextParallel:
        """This rank's place in its cp group."""
        return self.placement.context_parallel

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh with axes e_rep, e_fsdp, ep; it exists once the model is set up."""
        assert self.placement.expert is not None
        return self.placement.expert.mesh

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """Every layer's experts by name; empty before the model is set up."""
        return self.placement.experts

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is gathered and freed together, in the order of ``named_modules``."""
        return self.placement.units

    @property
    def precision_plugin(self) -> Precision:
        if self._precision_plugin is None:
            self.precision_plugin = Precision()
        assert self._precision_plugin is not None
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Lightning builds an autocast plugin from ``Trainer(precision=...)``; keep its name, use the mesh's."""
        self._precision_plugin = plugin and MeshPrecision(
            str(plugin.precision),  # type: ignore[arg-type]
            loss_to_backward=self._sum_over_tokens,
            before_clipping=self._mean_over_tokens,
            error_if_nonfinite=self._error_if_nonfinite,
        )

    def _configure_launcher(self) -> None:
        if IS_INTERACTIVE:
            raise RuntimeError(
                "strategy 'fsdp_cp_ep' cannot start its ranks from a notebook or an interactive session: put the "
                "code into a script and run it with python, torchrun or srun."
            )
        # Degrees are checked before any process is launched; ep="auto" waits for the model.
        self._resolve_dims(num_experts=None)
        super()._configure_launcher()

    def connect(self, model: nn.Module) -> None:
        super().connect(model)  # type: ignore[arg-type]
        trainer = getattr(model, "_trainer", None)
        if trainer is not None:
            missing = [kind for kind in _DEFAULT_CALLBACKS if not any(isinstance(c, kind) for c in trainer.callbacks)]
            add_callbacks(trainer, [kind() for kind in missing])

    def setup_environment(self) -> None:
        # Not ModelParallelStrategy's: it would build a (data_parallel, tensor_parallel) mesh.
        ParallelStrategy.setup_environment(self)
        is_ours = not dist.is_initialized()
        self._setup_distributed()
        if is_ours and dist.get_backend() == "gloo":
            # Lightning does this for NCCL only, and gloo's threads may abort a process that just ends.
            atexit.register(dist.destroy_process_group)
        assert self.lightning_module is not None
        self._placement = placement_of(self.lightning_module) or self._new_placement()
        self._device_mesh = self.lightning_module._device_mesh = self.placement.dense.mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one cp group read the same samples."""
        return {"num_replicas": self.placement.dense.dp_size, "rank": self.placement.dense.dp_rank}

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if placement_of(self.model) is None:
            self._place(self.model, trainer)
        else:
            self._check_placed(self.model)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)

    def _place(self, model: nn.Module, trainer: Trainer) -> None:
        placement, precision = self.placement, self.precision_plugin
        assert isinstance(model, LightningModule) and isinstance(precision, MeshPrecision)
        placement.precision = str(precision.precision)
        placement.experts = find_experts(model)
        placement.dims = self._resolve_dims(num_experts=common_num_experts(placement.experts))
        require_experts(model, placement.dims.ep)
        self._say_layout(placement.dims)
        precision.convert_module(model)
        place(
            model,
            placement,
            device=self.root_device,
            timeout=self._mesh_timeout,
            compute_dtype=precision.compute_dtype,
            init_seed=int(self.broadcast(torch.initial_seed() if self._init_seed is None else self._init_seed)),
            values_will_be_loaded=trainer.ckpt_path is not None,
        )
        for step in _STEPS:
            # The steps are how Lightning runs the module: they gather what it holds itself, as its forward does.
            if is_overridden(step, model, LightningModule):
                register_fsdp_forward_method(model, step)

    def _say_layout(self, dims: ResolvedDims) -> None:
        rank_zero_info(dims.explain())
        for warning in dims.warnings():
            rank_zero_warn(warning)

    def _check_placed(self, model: nn.Module) -> None:
        is_sharded = isinstance(model, FSDPModule)
        if any(isinstance(parameter, DTensor) != is_sharded for parameter in model.parameters()):
            raise RuntimeError(
                "configure_model() replaced modules that are sharded already. Lightning calls it before every fit, "
                "validate, test and predict: return early in it when the model exists."
            )
        placed = self.placement
        asked = (self._requested_dims, str(self.precision_plugin.precision), self._recompute)
        if asked != (placed.requested, placed.precision, placed.recompute):
            raise ValueError(
                f"The model was sharded by an earlier Trainer as {placed.requested} with precision "
                f"{placed.precision!r}, recompute={placed.recompute!r}; this Trainer asks for {asked[0]} with "
                f"{asked[1]!r}, recompute={asked[2]!r}. Use the same arguments, or build the model anew."
            )

    def register_batch_transform(self, transform: BatchTransform) -> None:
        """Apply ``transform(batch, stage)`` to every batch, after the user's own transfer hooks."""
        if transform not in self._batch_transforms:
            self._batch_transforms.append(transform)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        for transform in self._batch_transforms:
            batch = transform(batch, stage.value if stage is not None else "train")
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step("train"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step("validate"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step("test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step("predict"):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _step(self, stage: str) -> Generator[None, None, None]:
        with self.context_parallel.step(stage):
            yield

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """All but the last micro-batch of a step: reduce to shards as always, but leave the replicas for the last.

        Keeping whole gradients instead (no reduction at all) would take the memory that sharding saves.
        """
        modules = [unit.module for unit in self.units if isinstance(unit.module, FSDPModule)]
        for module in modules:
            module.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_all_reduce(True, recurse=False)

    def _sum_over_tokens(self, loss: Tensor) -> Tensor:
        module = self.lightning_module
        assert module is not None
        # Lightning has divided the loss by the number of accumulated micro-batches already.
        undo = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        return self._token_mean.as_sum(loss * undo, self.micro_batch)

    def _mean_over_tokens(self) -> None:
        assert self.model is not None
        self._token_mean.divide((parameter.grad for parameter in self.model.parameters()), self.root_device)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        def closure_then_mean() -> Any:
            result = closure()
            self._mean_over_tokens()
            return result

        return super().optimizer_step(optimizer, closure_then_mean, model, **kwargs)

    def _resolve_dims(self, num_experts: int | None) -> ResolvedDims:
        return self._requested_dims.resolve(
            self.num_nodes * self.num_processes, local_world_size=self.num_processes, num_experts=num_experts
        )

    def _new_placement(self) -> Placement:
        dims = self._resolve_dims(num_experts=None)
        if self._placement is None:
            dense = build_dense_meshes(dims, self.root_device.type, self._mesh_timeout)
        else:
            dense = self._placement.dense  # one Trainer, one module after another: the groups stay
        context_parallel = ContextParallel(dense.cp_group)
        return Placement(
            requested=self._requested_dims,
            dims=dims,
            dense=dense,
            context_parallel=context_parallel,
            recompute=self._recompute,
        )

    def on_exception(self, exception: BaseException) -> None:
        # Other ranks may wait in a collective this one will never join: end now, do not wait for them.
        atexit.unregister(dist.destroy_process_group)
        super().on_exception(exception)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: ``_autoload`` registers the name without importing this module."""
