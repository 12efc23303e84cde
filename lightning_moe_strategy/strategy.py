"""``Trainer(strategy="fsdp_cp_ep")``: FSDP x CP x EP under an unchanged LightningModule.

The methods stand in the order in which a Trainer calls them.
"""

import atexit
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from lightning_moe_strategy._lightning_checkpoints import hand_over_checkpoints
from lightning_moe_strategy._lightning_compat import (
    IS_INTERACTIVE,
    LightningModule,
    ParallelStrategy,
    Precision,
    Trainer,
    TrainerFn,
    add_callbacks,
    check_precision_first,
    hand_over_weights_only,
    is_overridden,
    optimizers_to_device,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_moe_strategy.callbacks.balance import ExpertBalance
from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe_strategy.callbacks.indexer_divergence import IndexerDivergence
from lightning_moe_strategy.callbacks.prefetch import ExpertPrefetch
from lightning_moe_strategy.callbacks.throughput import ThroughputMonitor
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.compiled_blocks import CompileBlocks, require_compile_options
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.data_agreement import DataAgreement
from lightning_moe_strategy.expert_parallel.balance import Balance, BalanceOptions, biases_as_buffers
from lightning_moe_strategy.expert_parallel.chunks import Chunking, EPChunks
from lightning_moe_strategy.expert_parallel.experts import find_experts, require_experts
from lightning_moe_strategy.expert_parallel.registry import require_dispatcher
from lightning_moe_strategy.failures.neighbours import tie_to_launcher
from lightning_moe_strategy.failures.watch import watch_failures
from lightning_moe_strategy.loading import Loading
from lightning_moe_strategy.logged_means import LoggedMeans
from lightning_moe_strategy.mesh import ParallelDims, ResolvedDims, build_dense_meshes
from lightning_moe_strategy.optimizers.vouched import unvouched
from lightning_moe_strategy.placement import Placement, common_num_experts, place, placement_of, require_same_settings
from lightning_moe_strategy.precision import MeshPrecision, precision_name
from lightning_moe_strategy.recompute import Recompute
from lightning_moe_strategy.saving import Saving
from lightning_moe_strategy.stale_parameters import hand_over_parameters
from lightning_moe_strategy.summed_gradients import GradientSync, SummedGradients
from lightning_moe_strategy.token_mean import LossReduction, TokenMean
from lightning_moe_strategy.trainer_limits import check_trainer
from lightning_moe_strategy.whole_scalars import whole_scalars_by_hand

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_DEFAULT_CALLBACKS = (ZigZagContextParallel, ExpertPrefetch, ExpertLoadMonitor, ThroughputMonitor)


class FSDPCPEPStrategy(DataAgreement, SummedGradients, LoggedMeans, Saving, Loading):
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
        loss_reduction: what ``training_step`` returns over its tokens. Means are weighted by the labels behind them,
            over ranks and accumulated micro-batches; ``"sum"`` adds losses up and never divides.
        gradient_sync: with ``accumulate_grad_batches``, ``"micro_batch"`` reduces every micro-batch's gradients to
            shards; ``"step"`` reduces once, and keeps whole FP32 gradients until then (how much is said at the start).
        recompute: ``"block"`` keeps every block's input, routing and selected keys, and computes the rest again;
            ``"selective"`` keeps the output of the attention too, and runs no attention kernel twice: ``2 V + 4`` bytes
            a token, head and layer more (V channels of its output). ``"none"`` keeps all.
        fp32_norms: under ``precision="bf16-mixed"``, gather norms and compute them in FP32. Each becomes a unit of its
            own: two gathers and a reduction of some KB more for each, mostly latency, and as many casts of its input.
        compile_blocks: ``torch.compile`` each block, True or a dict of its arguments; names of parameters stay as they
            are. Sparse layers (router, experts, their exchange) stay eager. Not for sparse attention (DSA).
        ep_chunks: how many parts of a layer's tokens go through its experts one after the other, each computed again
            in its backward pass. ``"none"`` all at once; a number C bounds the rows in memory to 1 / C of what the
            worst routing can bring; ``"adaptive"`` takes as many as a layer's routing needs, one when it is even.
        ep_chunk_bytes: of expert rows in memory on any rank. ``"adaptive"`` stays below (None: 1.5 times the rows of
            even routing, and at least 0.27 GB); the others raise where a layer needs more (None: they never do).
        dispatcher: what brings tokens to their experts: ``"all_to_all"`` (``"auto"``, where ep > 1), ``"all_gather"``,
            whose shapes do not depend on the routing, ``"symm_mem"``, which writes into the memory of other GPUs over
            NVLink (run on CPUs so far), or a name that ``register_dispatcher`` knows.
        indexer_loss_weight: above 0, the indexers of sparse attention (DSA) are trained, and only by this: the
            divergence of their scores from the attention to the keys they chose (DeepSeek-V3.2, sparse training), in
            each layer that has one. The loss stays as it is; ``indexer_kl`` is logged. Hugging Face models then
            attend with this package's kernels at cp=1 as well. 0 leaves indexers untrained.
        balance: ``"bias"`` moves the balance bias of every router after each step, against its experts' loads;
            ``"redundant"`` leaves the routing alone and has every rank of ep compute as many rows: experts of the
            overloaded are sent to the others with their rows, in each layer as its routing needs it.
        max_imbalance: of ``"redundant"``, rows of the busiest rank over the mean up to which no expert moves.
        balance_bias_rate: how far.
        sequence_balance_loss: coefficient of the balance loss of every sequence (DeepSeek-V3), exact on every layout.
            The loss stays as it is, and the value is logged as ``router_loss/...``.
        batch_balance_loss: the same, over a micro-batch of all ranks (Switch Transformer).
        router_z_loss: the same, of the squared log-sum-exp of router logits (ST-MoE).
        timeout: of every collective on every mesh axis.
        process_group_backend: ``"nccl"`` or ``"gloo"``; None chooses by device.
        save_distributed_checkpoint: a directory with every rank's shards, or one file from rank 0.
        async_save: ModelCheckpoint's directories are written while training goes on. A save stops it only to copy this
            rank's shards (parameters and optimizer) to host memory, where they stay for the next copy. One is in flight
            at most; a failure is raised at the next save or at the end. ``trainer.save_checkpoint`` waits as ever.
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
        loss_reduction: LossReduction = "mean",
        gradient_sync: GradientSync = "micro_batch",
        recompute: Recompute = "none",
        fp32_norms: bool = False,
        compile_blocks: CompileBlocks = False,
        ep_chunks: EPChunks = "none",
        ep_chunk_bytes: int | None = None,
        dispatcher: str = "auto",
        indexer_loss_weight: float = 0.0,
        balance: Balance = "none",
        max_imbalance: float = 1.0,
        balance_bias_rate: float = 1e-3,
        sequence_balance_loss: float = 0.0,
        batch_balance_loss: float = 0.0,
        router_z_loss: float = 0.0,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        init_seed: int | None = None,
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            async_save=async_save,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        _require_popen(start_method)
        self._recompute: Recompute = _one_of("recompute", recompute, Recompute)
        self._compile_options = require_compile_options(compile_blocks)
        require_dispatcher(dispatcher, balance=balance)
        self._dispatcher = dispatcher
        self._chunking = Chunking(chunks=ep_chunks, max_bytes=ep_chunk_bytes)
        self._indexer_loss = IndexerLoss(indexer_loss_weight) if indexer_loss_weight else None
        self._balance_options = BalanceOptions(
            balance=balance,
            max_imbalance=max_imbalance,
            bias_rate=balance_bias_rate,
            sequence_loss=sequence_balance_loss,
            batch_loss=batch_balance_loss,
            z_loss=router_z_loss,
        )
        self._chunking.check_balance(balance)
        self._balance = ExpertBalance(self._balance_options) if self._balance_options.is_on else None
        self._requested_dims = ParallelDims(
            d_rep=d_rep, fsdp=fsdp, cp=cp, e_rep=e_rep, e_fsdp=e_fsdp, ep=ep, cp_inter=cp_inter, nvl=nvl
        )
        self._mesh_timeout = timeout
        self._error_if_nonfinite, self._fp32_norms = error_if_nonfinite, fp32_norms
        self._init_seed = init_seed
        self._gradient_sync = _one_of("gradient_sync", gradient_sync, GradientSync)
        self._token_mean = TokenMean(loss_reduction)
        self.micro_batch = MicroBatch(num_tokens=0, num_loss_tokens=None)

    @property
    def precision_plugin(self) -> Precision:
        if self._precision_plugin is None:
            self.precision_plugin = Precision()
        assert self._precision_plugin is not None
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Lightning builds an autocast plugin from ``Trainer(precision=...)``; keep its name, use the mesh's."""
        self._precision_plugin = plugin and MeshPrecision.taken_from(
            plugin,
            loss_to_backward=self._weigh_loss,
            before_clipping=self._mean_over_tokens,
            error_if_nonfinite=self._error_if_nonfinite,
            fp32_norms=self._fp32_norms,
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
        tie_to_launcher(starts_ranks=self._launcher is not None)

    def connect(self, model: nn.Module) -> None:
        super().connect(model)
        trainer = getattr(model, "_trainer", None)
        if trainer is not None:
            wanted = (*_DEFAULT_CALLBACKS, *([IndexerDivergence] if self._indexer_loss else []))
            missing = [kind for kind in wanted if not any(isinstance(c, kind) for c in trainer.callbacks)]
            add_callbacks(trainer, [kind() for kind in missing])
            if self._balance is not None and self._balance not in trainer.callbacks:
                add_callbacks(trainer, [self._balance])

    def setup_environment(self) -> None:
        check_trainer(self._trainer, cp=self._requested_dims.cp, saves_directories=self._save_distributed_checkpoint)
        # Not ModelParallelStrategy's: it would build a (data_parallel, tensor_parallel) mesh.
        ParallelStrategy.setup_environment(self)
        is_ours = not dist.is_initialized()
        self._setup_distributed()
        if is_ours and dist.get_backend() == "gloo":
            # Lightning does this for NCCL only, and gloo's threads may abort a process that just ends.
            atexit.register(dist.destroy_process_group)
        watch_failures(self, is_new=is_ours)
        assert self.lightning_module is not None
        self._placement = placement_of(self.lightning_module) or self._new_placement()
        self._device_mesh = self.lightning_module._device_mesh = self.placement.dense.mesh

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if placement_of(self.model) is None:
            self._place(self.model, trainer)
        else:
            require_same_settings(self.model, self.placement, self._settings())
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.model is not None
        hand_over_parameters(self.model, self.optimizers)
        for sentence in unvouched(self.optimizers):
            rank_zero_warn(sentence)

    def _place(self, model: nn.Module, trainer: Trainer) -> None:
        if self._indexer_loss is not None:
            self.require_a_divided_step(f"indexer_loss_weight({self._indexer_loss.weight})")
        placement, precision = self.placement, self.precision_plugin
        assert isinstance(model, LightningModule) and isinstance(precision, MeshPrecision)
        placement.precision, placement.settings = str(precision.precision), self._settings()
        placement.fp32_norms = precision.fp32_norms
        placement.experts = find_experts(model)
        placement.dims = self._resolve_dims(num_experts=common_num_experts(placement.experts))
        require_experts(model, placement.dims.ep)
        self._say_layout(placement.dims)
        if self._balance_options.is_on:
            biases_as_buffers(model, placement.experts, required=self._balance_options.balance == "bias")
        precision.convert_module(model)
        if self._layer_sync is not None:
            self._layer_sync.apply(model)
        place(
            model,
            placement,
            device=self.root_device,
            timeout=self._mesh_timeout,
            compute_dtype=precision.compute_dtype,
            init_seed=int(self.broadcast(torch.initial_seed() if self._init_seed is None else self._init_seed)),
            values_will_be_loaded=trainer.ckpt_path is not None and model.strict_loading,
        )
        self.say_price_of_sync()
        for step in _STEPS:
            # The steps are how Lightning runs the module: they gather what it holds itself, as its forward does.
            if is_overridden(step, model, LightningModule):
                register_fsdp_forward_method(model, step)

    def _settings(self) -> dict[str, object]:
        """What a module that is sharded cannot change any more."""
        return {
            "degrees": self._requested_dims,
            "precision": str(self.precision_plugin.precision),
            "recompute": self._recompute,
            "fp32_norms": self._fp32_norms,
            "compile_blocks": self._compile_options,
            "ep_chunks": self._chunking.chunks,
            "ep_chunk_bytes": self._chunking.max_bytes,
            "dispatcher": self._dispatcher,
            "max_imbalance of balance='redundant'": self._balance_options.redundancy,
            "indexer_loss_weight": 0.0 if self._indexer_loss is None else self._indexer_loss.weight,
        }

    def _say_layout(self, dims: ResolvedDims) -> None:
        rank_zero_info(dims.explain())
        for warning in dims.warnings():
            rank_zero_warn(warning)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self._step("train"), whole_scalars_by_hand(self.lightning_module):
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
        self.weigh_logs()
        with self.context_parallel.step(stage):
            yield

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
        context_parallel = ContextParallel(dense.cp_group, self._indexer_loss)
        return Placement(
            dims=dims,
            dense=dense,
            context_parallel=context_parallel,
            recompute=self._recompute,
            compile_options=self._compile_options,
            chunking=self._chunking,
            dispatcher=self._dispatcher,
            max_imbalance=self._balance_options.redundancy,
        )

    def on_exception(self, exception: BaseException) -> None:
        # Other ranks may wait in a collective this one will never join: end now, do not wait for them.
        atexit.unregister(dist.destroy_process_group)
        super().on_exception(exception)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: ``_autoload`` registers the name without importing this module."""


check_precision_first(FSDPCPEPStrategy, precision_name)
hand_over_checkpoints(FSDPCPEPStrategy)
hand_over_weights_only(FSDPCPEPStrategy)


def _one_of(name: str, value: Any, choices: Any) -> Any:
    if value not in get_args(choices):
        raise ValueError(f"{name}({value!r}) must be one of {', '.join(map(repr, get_args(choices)))}.")
    return value


def _require_popen(start_method: str) -> None:
    if start_method != "popen":
        raise ValueError(
            f"start_method({start_method!r}) is not supported: spawned and forked ranks cannot hand sharded tensors "
            "back to the parent. Leave start_method out and run a script with python, torchrun or srun."
        )
