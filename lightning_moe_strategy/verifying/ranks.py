"""One rank of the check: a Trainer with the strategy takes the steps, and a callback keeps what is compared."""

import hashlib
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._lightning_compat import Callback, LightningDataModule, LightningModule, Trainer
from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.batch import SequenceFields, find_sequences, items_of
from lightning_moe_strategy.context_parallel.documents import find_documents
from lightning_moe_strategy.expert_parallel.experts import RoutingObserver, routing_observers
from lightning_moe_strategy.rehearsal import without_randomness
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.strategy import FSDPCPEPStrategy
from lightning_moe_strategy.token_watch import RoutingWatch, TokenPlaces
from lightning_moe_strategy.units import find_routers
from lightning_moe_strategy.verifying.leak import probe
from lightning_moe_strategy.verifying.outputs import (
    INPUT,
    first_outputs,
    keep,
    real_tokens,
    split_places,
    whole_places,
)
from lightning_moe_strategy.verifying.recorded import Picks, RankRecord, Tensors
from lightning_moe_strategy.verifying.settings import Settings, quiet_options

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


def environment_of(rank: int, world: int) -> dict[str, str]:
    """As torchrun would set it: a Trainer then takes the process group that exists."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "verify",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_rank(
    rank: int,
    settings: Settings,
    module: LightningModule,
    data: LightningDataModule | None,
    zigzag: ZigZagContextParallel,
) -> None:
    """Train, and write this rank's record. The module is this process's own from here on."""
    store = settings.folder / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=settings.world, timeout=COLLECTIVE_TIMEOUT
    )
    torch.manual_seed(settings.seed)
    degrees: dict[str, Any] = dict(settings.degrees)
    strategy = _WatchedStrategy(**degrees, timeout=COLLECTIVE_TIMEOUT, **settings.strategy)
    strategy.watch = watch = _Watch(settings, zigzag)
    trainer = Trainer(
        strategy=strategy,
        devices=settings.world,
        precision=settings.precision,  # type: ignore[arg-type]  # the strategy refuses what it does not know
        callbacks=[watch, zigzag, ExpertLoadMonitor(plot=False)],
        accumulate_grad_batches=settings.num_accumulated,
        use_distributed_sampler=settings.trainer.get("use_distributed_sampler", True),
        **quiet_options(settings),
    )
    trainer.fit(module, datamodule=data)
    if len(watch.record.parameters) < settings.steps:
        raise ValueError(
            f"The data end after {len(watch.record.parameters)} of {settings.steps} steps on a rank. Lower --steps."
        )
    torch.save(watch.record, settings.rank_file(rank))


class _WatchedStrategy(FSDPCPEPStrategy):
    """The strategy, whose training steps are watched from inside of the Trainer's."""

    watch: "_Watch | None" = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is None:
            return super().training_step(*args, **kwargs)
        with self.watch.inside_step():
            output = super().training_step(*args, **kwargs)
        self.watch.keep_loss(output)
        return output


class _Watch(Callback):
    """Keeps batches, outputs, choices of experts, losses, gradients and parameters of the steps of one rank."""

    def __init__(self, settings: Settings, zigzag: ZigZagContextParallel) -> None:
        self.settings, self.zigzag = settings, zigzag
        self.record = RankRecord(rank=0, dp=0, cp=0)
        self._index = -1
        """Of the micro-batch."""
        self._batch: Any = None
        self._fields: SequenceFields | None = None
        self._places: TokenPlaces | None = None
        self._losses: list[tuple[float, float | None]] = []
        self._counts: Tensors = {}
        self._global_step = 0
        self._running = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Before that of ZigZagContextParallel, which stands behind this callback: it sees whole batches.
        self.strategy = cast(_WatchedStrategy, trainer.strategy)
        self.strategy.register_batch_transform(self._keep_batch)
        self.module = pl_module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = self.strategy
        dims, dense = strategy.dims, strategy.placement.dense
        axes = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep")
        self.record = RankRecord(
            rank=strategy.global_rank,
            dp=dense.dp_rank,
            cp=strategy.context_parallel.rank,
            degrees={axis: dims.degree(axis) for axis in axes},
            units=[(unit.name, unit.kind) for unit in strategy.units],
            routers=list(find_routers(pl_module, strategy.experts)),
            experts=list(strategy.experts),
        )
        for name, experts in strategy.experts.items():
            self._counts[name] = torch.zeros(int(experts.num_experts), dtype=torch.int64)  # type: ignore[arg-type]
            routing_observers(experts).append(self._counting(name))

    def _keep_batch(self, batch: Any, stage: str) -> Any:
        """As the user's hooks have left it, before the split."""
        self._index += 1
        dense = self.strategy.placement.dense
        if self.strategy.context_parallel.rank == 0:
            torch.save(batch, self.settings.batch_file(dense.dp_rank, self._index))
        self._batch, self._fields = batch, self._find_fields(batch)
        return batch

    def _find_fields(self, batch: Any) -> SequenceFields | None:
        try:
            return find_sequences(
                items_of(batch), sequence_keys=self.zigzag.sequence_keys, labels_key=self.zigzag.labels_key
            )
        except ValueError:  # with cp > 1 the split says so
            return None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        cp = self.strategy.context_parallel
        self._places = None
        if self._fields is not None:
            items = items_of(self._batch)
            real_RT = real_tokens(items, self._fields)
            if cp.degree > 1:
                self._places = split_places(cp.current, cp.rank, self._fields, real_RT)
            else:
                self._places = whole_places(self._fields, real_RT)
            if self._index == 0 and cp.degree > 1:  # without cp nothing of the strategy stands between two tokens
                self._look_at_documents(trainer, items, self._fields, batch_idx)
        self._running.enter_context(without_randomness())

    def _look_at_documents(self, trainer: Trainer, items: Any, fields: SequenceFields, batch_idx: int) -> None:
        cp = self.strategy.context_parallel
        documents = find_documents(items, batch_size=fields.batch_size, num_tokens=fields.num_tokens)
        self.record.documents = len(documents[0])
        self.record.first_document = documents[0][1] if len(documents[0]) > 1 else fields.num_tokens
        self.record.first_chunk = cp.current.layout.segments[0][0].length
        if len(documents[0]) > 1 and self.module.automatic_optimization:
            assert self._places is not None
            self.strategy.watch = None
            self.record.leaked = probe(
                trainer, self.module, self._batch, self.zigzag, documents, self._places, batch_idx
            )
            self.strategy.watch = self

    @contextmanager
    def inside_step(self) -> Generator[None, None, None]:
        """Around the forward, and where a module optimizes by hand around all of its step."""
        is_split = self.strategy.context_parallel.degree > 1
        with ExitStack() as stack:
            routing = None
            if self._places is not None and self.strategy.experts:
                routing = RoutingWatch(self.module, self.strategy.experts, self._places)
                stack.enter_context(routing.first_run())
            if self._index == 0:
                stack.enter_context(first_outputs(self.module, lambda name, x: self._keep_output(name, x, is_split)))
            yield
        assert self._places is not None or routing is None
        picks = None if routing is None or self._places is None else Picks(
            place_RL=self._places.place_RL, of_layer=routing.picks
        )  # fmt: skip
        self.record.picks.append(picks)

    def _keep_output(self, name: str, output: Tensor, is_split: bool) -> None:
        if not name.endswith(INPUT):
            self.record.order.append(name)
        kept = keep(output, self._places, is_split=is_split)
        if kept is not None:
            self.record.outputs[name] = kept

    def keep_loss(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            labels = self.strategy.micro_batch.num_loss_tokens
            self._losses.append((float(loss.detach()), None if labels is None else float(labels)))

    def _counting(self, name: str) -> RoutingObserver:
        def count(expert_ids_TK: Tensor) -> None:
            real_T = self.strategy.micro_batch.real_tokens_T(expert_ids_TK.shape[0])
            ids = expert_ids_TK if real_T is None else expert_ids_TK[real_T]
            counts = self._counts[name]
            counts += torch.bincount(ids.flatten(), minlength=len(counts))

        return count

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self.record.gradients.append(self._whole(gradients))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._running.close()
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        if self._index + 1 != self.settings.num_accumulated * (len(self.record.parameters) + 1):
            raise ValueError(
                f"The data of a rank end inside a step of accumulate_grad_batches({self.settings.num_accumulated}): "
                f"its {len(self.record.parameters) + 1}. step has fewer micro-batches. Give more data or fewer --steps."
            )
        parameters = {name: p.detach() for name, p in pl_module.named_parameters()}
        self.record.parameters.append(self._whole(parameters))
        self.record.digests.append({name: _digest(p) for name, p in parameters.items()})
        self.record.losses.append(self._losses)
        self.record.counts.append({name: counts.clone() for name, counts in self._counts.items()})
        self._losses = []
        for counts in self._counts.values():
            counts.zero_()
        trainer.should_stop = len(self.record.parameters) == self.settings.steps

    def _whole(self, tensors: Tensors) -> Tensors:
        """Every rank puts them together; the first rank of each replica keeps them."""
        kept = {}
        for name, tensor in tensors.items():
            replica, shard = _place_on_mesh(tensor)
            self.record.replicas[name] = replica
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            is_first = not any(shard) if isinstance(tensor, DTensor) else self.record.rank == 0
            if is_first:
                kept[name] = full.detach().clone()
        return kept


def _place_on_mesh(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which replica of a parameter this rank holds, and which shard of it."""
    if not isinstance(tensor, DTensor):
        return (), ()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is on both meshes"
    pairs = list(zip(coordinate, tensor.placements, strict=True))
    replica = tuple(at for at, placement in pairs if placement.is_replicate())
    return replica, tuple(at for at, placement in pairs if not placement.is_replicate())


def _digest(parameter: Tensor) -> tuple[tuple[int, ...], str]:
    local = local_tensor(parameter).detach().contiguous().reshape(-1)
    return _place_on_mesh(parameter)[1], hashlib.sha1(local.view(torch.uint8).numpy().tobytes()).hexdigest()
