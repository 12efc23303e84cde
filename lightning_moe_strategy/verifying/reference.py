"""The same steps in one process, without the strategy: the batches that the ranks read, one forward for each.

A step's gradient is d(sum of token losses) / (tokens that count, over all ranks and micro-batches). Batches of the
ranks stay apart, so that nothing has to be collated again: each is a micro-batch, whose mean is weighed by its labels.
Only a module that optimizes by hand, and steps inside of its training step, gets the batches of all ranks in one.

Shapes: R sequences of a batch, L tokens of a rank, T tokens of the whole sequence, K picks per token, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_strategy._lightning_compat import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    is_param_in_hook_signature,
)
from lightning_moe_strategy._torch_compat import in_backward
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.batch import MicroBatch, find_sequences, items_of, with_items
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.rehearsal import without_randomness
from lightning_moe_strategy.token_mean import loss_weight
from lightning_moe_strategy.token_watch import RoutingWatch, TokenPlaces
from lightning_moe_strategy.units import sparse_layer_of
from lightning_moe_strategy.verifying.outputs import (
    first_outputs,
    real_tokens,
    same_part,
    whole_places,
)
from lightning_moe_strategy.verifying.recorded import OutputDifference, RankRecord, ReferenceRecord, load
from lightning_moe_strategy.verifying.settings import Settings, quiet_options


def run_reference(
    settings: Settings, module: LightningModule, data: LightningDataModule | None, zigzag: ZigZagContextParallel
) -> None:
    """Train, compare outputs with those of the ranks, and write the record. The module is this process's own."""
    torch.manual_seed(settings.seed)
    if settings.precision == "bf16-true":
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    ranks = [load(settings.rank_file(rank)) for rank in range(settings.world)]
    forwards = _forwards(settings, ranks, by_hand=not module.automatic_optimization)
    per_step = len(forwards) // settings.steps
    watch = _Reference(settings, module, _Counter(zigzag, module), ranks, forwards)
    trainer = Trainer(
        devices=1,
        precision="32-true",
        callbacks=[watch],
        accumulate_grad_batches=per_step if module.automatic_optimization else 1,
        use_distributed_sampler=False,
        **quiet_options(settings),
    )
    _read_batches_of_ranks(module, data, forwards)
    module.training_step = watch.watched(module.training_step)  # type: ignore[method-assign]
    if data is None:
        trainer.fit(module)
    else:
        trainer.fit(module, datamodule=data)
    torch.save(watch.finished_record(), settings.reference_file)


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """One call of the training step."""

    batch: Any
    batch_idx: int
    """Of the ranks."""
    step: int
    rows: Mapping[int, int]
    """Per data parallel group whose batch is in it, where its first sequence stands."""


def _forwards(settings: Settings, ranks: Sequence[RankRecord], *, by_hand: bool) -> list[_Forward]:
    groups = sorted({rank.dp for rank in ranks})
    forwards = []
    for index in range(settings.steps * settings.num_accumulated):
        batches = {dp: torch.load(settings.batch_file(dp, index), weights_only=False) for dp in groups}
        step = index // settings.num_accumulated
        if by_hand:
            batch, rows = _in_one([batches[dp] for dp in groups])
            row_of = dict(zip(groups, rows, strict=True))
            forwards.append(_Forward(batch=batch, batch_idx=index, step=step, rows=row_of))
        else:
            forwards += [_Forward(batch=batches[dp], batch_idx=index, step=step, rows={dp: 0}) for dp in groups]
    return forwards


def _in_one(batches: Sequence[Any]) -> tuple[Any, list[int]]:
    """One batch of the sequences of several, and where each of theirs starts."""
    parts = [items_of(batch) for batch in batches]
    together = {}
    for key, first in parts[0].items():
        tensors = [part.get(key) for part in parts]
        shapes = {x.shape[1:] if isinstance(x, Tensor) and x.dim() else None for x in tensors}
        if None in shapes or len(shapes) > 1:
            raise ValueError(
                f"The module optimizes by hand, so that one process needs the batches of all ranks in one, and their "
                f"part {key!r} ({type(first).__name__}) cannot be put together. Give tensors [batch, ...] of one "
                "length, or verify with fsdp=1 and d_rep=1."
            )
        together[key] = torch.cat([cast(Tensor, x) for x in tensors])
    sizes = [len(next(iter(part.values()))) for part in parts]
    return with_items(batches[0], together), [sum(sizes[:number]) for number in range(len(sizes))]


def _read_batches_of_ranks(
    module: LightningModule, data: LightningDataModule | None, forwards: Sequence[_Forward]
) -> None:
    """The user's hooks have seen these batches on the ranks: here the loader only counts them."""
    for part in (module, *([] if data is None else [data])):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
            setattr(part, hook, _unchanged)
    source = module if data is None else data
    source.train_dataloader = lambda: DataLoader(range(len(forwards)))  # type: ignore[method-assign,arg-type]  # counts them


def _unchanged(batch: Any, *args: Any) -> Any:
    return batch


class _OneRank:
    """A cp group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class _Counter:
    """Counts what a whole batch holds, as the callback does without cp."""

    def __init__(self, zigzag: ZigZagContextParallel, module: LightningModule) -> None:
        self.zigzag = zigzag
        self.context_parallel = ContextParallel(cast(Any, _OneRank()))
        self.micro_batch = MicroBatch(num_tokens=0, num_loss_tokens=None)
        zigzag.verify_cp = False
        zigzag.setup(cast(Trainer, SimpleNamespace(strategy=self)), module, "fit")

    def register_batch_transform(self, transform: Callable[[Any, str], Any]) -> None:
        """Nobody calls it here."""

    def count(self, batch: Any) -> MicroBatch:
        self.zigzag.split(batch, "train")
        return self.micro_batch


class _Reference(Callback):
    """Wraps the training step, and keeps what the ranks keep."""

    def __init__(
        self,
        settings: Settings,
        module: LightningModule,
        counter: _Counter,
        ranks: Sequence[RankRecord],
        forwards: Sequence[_Forward],
    ) -> None:
        self.settings, self.module, self.ranks, self.forwards = settings, module, ranks, forwards
        self.record = ReferenceRecord()
        self.experts = find_experts(module)
        self._counts = {name: torch.zeros(int(e.num_experts), dtype=torch.int64) for name, e in self.experts.items()}  # type: ignore[arg-type]
        self._micro_batches = [counter.count(forward.batch) for forward in forwards]
        self._shares = _shares(self._micro_batches, forwards, is_sum=settings.loss_is_sum)
        self._zigzag = counter.zigzag
        self._differences: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
        self._loss = 0.0
        self._has_loss = False
        self._running = ExitStack()
        self._ties = 0, 0

    def watched(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """The step with the batch of the ranks; what it returns is weighed so that the gradients add up."""
        per_step = len(self.forwards) // self.settings.steps
        takes_index = is_param_in_hook_signature(training_step, "batch_idx", min_args=2)

        @wraps(training_step)
        def step(number: Tensor, batch_idx: int = 0) -> Any:
            forward, share = self.forwards[int(number)], self._shares[int(number)]
            with ExitStack() as stack:
                self._watch(stack, int(number), forward)
                output = training_step(forward.batch, *([forward.batch_idx] if takes_index else []))
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, Tensor):
                return output
            value = float(loss.detach())
            self._loss += value * share if share else 0.0
            self._has_loss = True
            weighed = loss * (share * per_step)  # Lightning divides by the number of batches of a step
            return {**output, "loss": weighed} if isinstance(output, dict) else weighed

        return step

    def _watch(self, stack: ExitStack, number: int, forward: _Forward) -> None:
        places = self._places(forward.batch)
        for name, experts in self.experts.items():
            stack.callback(experts.register_forward_pre_hook(self._counting(name, number)).remove)
        if places is not None and self.experts:
            routing = RoutingWatch(self.module, self.experts, places)
            stack.callback(lambda: self._note_ties(routing))
            stack.enter_context(routing.repeating(self._picks(forward, places)))
            for name, layer in routing.sparse_layers.items():
                stack.callback(layer.register_forward_hook(self._noting(name, routing)).remove)
        if forward.batch_idx == 0:
            stack.enter_context(first_outputs(self.module, lambda name, x: self._compare(name, x, forward, places)))

    def _places(self, batch: Any) -> TokenPlaces | None:
        items = items_of(batch)
        try:
            fields = find_sequences(items, sequence_keys=self._zigzag.sequence_keys, labels_key=self._zigzag.labels_key)
        except ValueError:
            return None
        return whole_places(fields, real_tokens(items, fields))

    def _picks(self, forward: _Forward, places: TokenPlaces) -> Mapping[str, Iterator[Tensor]]:
        """Per layer what the ranks have chosen for this batch, [R, T, K]."""
        of_groups = [[rank.picks[forward.batch_idx] for rank in self.ranks if rank.dp == dp] for dp in forward.rows]
        picks: dict[str, Iterator[Tensor]] = {name: iter(()) for name in _sparse_layers(self.experts)}
        for layer in picks:
            of_ranks = [[pick.of_layer.get(layer, []) for pick in group if pick] for group in of_groups]
            counts = {len(ids) for group in of_ranks for ids in group}
            if len(counts) != 1:
                continue
            wholes = []
            for number in range(counts.pop()):
                parts = [
                    _of_whole([(pick.place_RL, pick.of_layer[layer][number]) for pick in group if pick], places)
                    for group in of_groups
                ]
                wholes.append(torch.cat(parts))
            picks[layer] = iter(wholes)
        return picks

    def _noting(self, layer: str, routing: RoutingWatch) -> Callable[..., None]:
        def note(*args: object) -> None:
            lost, size = self.record.routing.get(layer, (0.0, 0.0))
            self.record.routing[layer] = max(lost, float(routing.worst[0])), max(size, float(routing.worst[1]))
            routing.worst = routing.nothing  # what the next layer loses is the next layer's

        return note

    def _note_ties(self, routing: RoutingWatch) -> None:
        self._ties = self._ties[0] + routing.num_changed, self._ties[1] + routing.num_choices

    def _counting(self, name: str, number: int) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if in_backward():
                return
            ids_TK = args[1]
            real_T = self._micro_batches[number].real_tokens_T(ids_TK.shape[0])
            ids = ids_TK if real_T is None else ids_TK[real_T]
            self._counts[name] += torch.bincount(ids.flatten(), minlength=len(self._counts[name]))

        return count

    def _compare(self, name: str, output: Tensor, forward: _Forward, places: TokenPlaces | None) -> None:
        for rank in self.ranks:
            kept = rank.outputs.get(name)
            if kept is None or rank.dp not in forward.rows:
                continue
            found = same_part(output, kept, places, forward.rows[rank.dp])
            if found is None:
                continue
            theirs, inside = found
            mine = kept.values_NC[inside].double()
            both_nan = mine.isnan() & theirs.isnan()
            difference = (mine - theirs.double()).abs().masked_fill(both_nan, 0.0).nan_to_num(nan=torch.inf)
            size = float(theirs.double().nan_to_num(nan=0.0).abs().max()) if theirs.numel() else 0.0
            of_tokens = difference.amax(1) if difference.numel() else difference.new_zeros(len(inside))
            place = torch.full_like(inside, -1) if kept.place_N is None else kept.place_N[inside]
            self._differences.setdefault(name, []).append((of_tokens, place, size))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._running.enter_context(without_randomness())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        gradients = {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}
        self.record.gradients.append(gradients)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._running.close()
        last = batch_idx + 1 == len(self.forwards)
        if not last and self.forwards[batch_idx + 1].step == self.forwards[batch_idx].step:
            return
        self.record.parameters.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        self.record.counts.append({name: counts.clone() for name, counts in self._counts.items()})
        self.record.losses.append(self._loss if self._has_loss else float("nan"))
        self._loss = 0.0
        for counts in self._counts.values():
            counts.zero_()
        trainer.should_stop = last

    def finished_record(self) -> ReferenceRecord:
        for name, parts in self._differences.items():
            self.record.outputs[name] = OutputDifference(
                size=max(size for _, _, size in parts),
                difference_N=torch.cat([difference for difference, _, _ in parts]),
                place_N=torch.cat([place for _, place, _ in parts]),
            )
        self.record.ties = self._ties
        return self.record


def _sparse_layers(experts: Mapping[str, nn.Module]) -> list[str]:
    return sorted({sparse_layer_of(name) for name in experts})


def _shares(micro_batches: Sequence[MicroBatch], forwards: Sequence[_Forward], *, is_sum: bool) -> list[float]:
    """What each forward's mean has of its step's gradient; a sum is added as it is."""
    if is_sum:
        return [1.0] * len(forwards)
    weights = [float(loss_weight(micro_batch)) for micro_batch in micro_batches]
    shares: list[float] = []
    for _, numbers in groupby(range(len(forwards)), key=lambda number: forwards[number].step):
        of_step = [weights[number] for number in numbers]
        shares += [weight / max(1.0, sum(of_step)) for weight in of_step]
    return shares


def _of_whole(parts: Sequence[tuple[Tensor, Tensor]], places: TokenPlaces) -> Tensor:
    """Picks of whole sequences, [R, T, K], from those of the ranks; -1 where no rank has one."""
    rows, tokens = len(parts[0][0]), places.whole_shape[1]
    whole = parts[0][1].new_full((rows, tokens + 1, parts[0][1].shape[-1]), -1)
    for place_RL, ids_RLK in parts:
        row_RL = torch.arange(rows)[:, None].expand_as(place_RL)
        whole[row_RL, torch.where(place_RL < 0, tokens, place_RL)] = ids_RLK
    return whole[:, :tokens]
