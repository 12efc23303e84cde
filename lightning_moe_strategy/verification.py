"""Is a model, split along the sequence, what it is in one process? Asked of its own training step and its own data.

A piece of the first batch goes through the step twice on the sharded model: split over the cp ranks, and whole on each
of them, with the model's own attention. Experts stay spread over their ranks in both.

The second loss is weighed with ``-1 / cp``, so that the gradients of both, which FSDP sums over all ranks, cancel: what
is left in ``.grad`` is their difference, and no second set of gradients is in memory.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._lightning_compat import (
    LightningModule,
    Trainer,
    is_param_in_hook_signature,
    isolate_rng,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_moe_strategy.collectives import TwoStepGroup
from lightning_moe_strategy.comparison import TOLERANCES, Comparison, failure_text, relative, success_text
from lightning_moe_strategy.context_parallel.batch import MicroBatch, SequenceFields, items_of, with_items
from lightning_moe_strategy.context_parallel.piece import Piece, SplitSettings, cut_piece
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT
from lightning_moe_strategy.rehearsal import rehearsal
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.token_watch import OutputWatch, RoutingWatch, TokenPlaces, largest


def verify_context_parallel(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    fields: SequenceFields,
    settings: SplitSettings,
    *,
    batch_idx: int,
) -> bool:
    """Compare loss, logits and gradients of a piece of ``batch`` with and without cp, and say the result.

    ``batch`` is a whole one. Every rank of the world calls it; training goes on as if it had not been called. It costs
    two steps of a few hundred tokens and no more memory than a step takes. False when nothing in the piece is trained
    on, so that another batch has to be asked.

    Raises:
        RuntimeError: on every rank alike, when both are not equal, with what differs, by how much and where.
    """
    started = time.perf_counter()
    strategy: Any = trainer.strategy
    cp: ContextParallel = strategy.context_parallel
    items = items_of(batch)
    as_one: Comparison | None = None
    with rehearsal(trainer, module, strategy.experts):
        runs = _TwoRuns(strategy, module, batch, batch_idx)
        piece = cut_piece(items, fields, settings, degree=cp.degree)
        found = runs.compare(piece)
        has_documents = _any_rank(piece.documents != ONE_DOCUMENT, strategy.root_device)
        if found.what_differs and has_documents:
            as_one = runs.compare(cut_piece(items, fields, settings, degree=cp.degree, as_one_document=True))
    what = f"{piece.fields.batch_size} x {piece.fields.num_tokens} tokens of batch {batch_idx}"
    if not found.num_counted:
        rank_zero_warn(f"verify_cp: none of {what} has a label that counts. The next batch is tried.")
        return False
    if found.what_differs:
        raise RuntimeError(failure_text(found, as_one, what, cp.degree))
    rank_zero_info(success_text(found, what, cp.degree, time.perf_counter() - started))
    return True


class _TwoRuns:
    """The user's step, split and whole."""

    def __init__(self, strategy: Any, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.strategy, self.module, self.batch = strategy, module, batch
        self.cp: ContextParallel = strategy.context_parallel
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.further_arguments = (batch_idx,) if takes_index else ()

    def compare(self, piece: Piece) -> Comparison:
        before = self.strategy.micro_batch, self.cp.sequence, self.cp.indexer_loss
        local, sequence, counts, place_RL = piece.split(self.cp.degree, self.cp.rank)
        places = TokenPlaces(place_RL=place_RL, real_RT=piece.real_tokens_RT)
        outputs = OutputWatch(self.module, self.cp.blocks, places)
        routing = RoutingWatch(self.module, self.strategy.experts, places)
        try:
            # A model's own attention has no loss of its indexers.
            self.cp.sequence, self.cp.indexer_loss = sequence, None
            with outputs.first_run(), routing.first_run(), self.cp.uncounted_steps():
                loss = self._run(local, counts, weight=1.0)
            largest_gradients = [self._largest_gradient(parameter) for parameter in self._parameters.values()]
            whole_sequence, whole_counts = piece.whole
            with ExitStack() as stack:
                stack.enter_context(self.cp.alone(whole_sequence))
                stack.enter_context(outputs.second_run())
                stack.enter_context(routing.second_run(self.cp.group))
                whole_loss = self._run(piece.items, whole_counts, weight=-1.0 / self.cp.degree)
            differences = [self._largest_gradient(parameter) for parameter in self._parameters.values()]
        finally:
            self.strategy.micro_batch, self.cp.sequence, self.cp.indexer_loss = before
            for parameter in self._parameters.values():
                parameter.grad = None
        rows = [self._loss_row(loss, whole_loss), routing.worst]
        rows += [outputs.differences.get(name, routing.nothing) for name in outputs.modules]
        rows += zip(differences, largest_gradients, strict=True)
        return self._judged(rows, outputs, routing, piece)

    def _run(self, items: Mapping[Any, Any], counts: MicroBatch, *, weight: float) -> Tensor:
        """The sum of the losses of the tokens that this rank holds, after the backward pass of ``weight`` times it."""
        self.strategy.micro_batch = counts
        # Both runs draw the same, where what is drawn is no tensor.
        with isolate_rng():
            output = self.strategy.training_step(with_items(self.batch, items), *self.further_arguments)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                raise ValueError(
                    f"training_step returned {type(loss).__name__} for the piece of the first batch that verify_cp "
                    "checks. Return a loss, or set verify_cp=False."
                )
            assert counts.num_loss_tokens is not None, "with cp > 1 a batch to train on has labels"
            self.module.backward(loss * (counts.num_loss_tokens * weight))
        count = counts.num_loss_tokens.double()
        return torch.where(count > 0, loss.detach().double() * count, 0.0)

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _largest_gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        """On this rank."""
        if parameter.grad is None:
            return torch.zeros((), dtype=torch.float64, device=self.strategy.root_device)
        return largest(local_tensor(parameter.grad))

    def _loss_row(self, loss: Tensor, whole_loss: Tensor) -> tuple[Tensor, Tensor]:
        """Parts that the ranks of a cp group hold add up to what each of them computed whole."""
        group = self.cp.group.whole if isinstance(self.cp.group, TwoStepGroup) else self.cp.group
        dist.all_reduce(loss, group=group)
        return largest(loss - whole_loss), largest(whole_loss)

    def _judged(
        self, rows: Sequence[tuple[Tensor, Tensor]], outputs: OutputWatch, routing: RoutingWatch, piece: Piece
    ) -> Comparison:
        """What all ranks have found, the same on each."""
        counted = torch.tensor([float(piece.num_counted)], dtype=torch.float64, device=rows[0][0].device)
        table = torch.cat([torch.stack([x for row in rows for x in row]), counted])
        dist.all_reduce(table, dist.ReduceOp.MAX)
        choices = torch.tensor([routing.num_changed, routing.num_choices], device=table.device)
        dist.all_reduce(choices)
        dtype = self._dtype()
        tolerance = TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])
        pairs = table[:-1].view(-1, 2).tolist()
        num_outputs = len(outputs.modules)
        of_outputs = dict(zip(outputs.modules, pairs[2 : 2 + num_outputs], strict=True))
        of_gradients = pairs[2 + num_outputs :]
        floor = tolerance.noise * max((size for _, size in of_gradients), default=0.0)
        return Comparison(
            tolerance=tolerance,
            dtype=dtype,
            loss=relative(*pairs[0]),
            outputs={name: relative(*of_outputs[name]) for name in outputs.kept},
            gradients={
                name: relative(difference, max(size, floor))
                for name, (difference, size) in zip(self._parameters, of_gradients, strict=True)
            },
            routing=relative(*pairs[1]),
            num_changed=int(choices[0]) // self.cp.degree,
            num_choices=int(choices[1]) // self.cp.degree,
            num_counted=int(table[-1]),
        )

    def _dtype(self) -> torch.dtype:
        """The coarsest that is computed in."""
        dtypes = {parameter.dtype for parameter in self._parameters.values() if parameter.is_floating_point()}
        compute_dtype: torch.dtype | None = self.strategy.precision_plugin.compute_dtype
        dtypes |= {compute_dtype} if compute_dtype is not None else set()
        return max({*dtypes, torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


def _any_rank(condition: bool, device: torch.device) -> bool:
    answer = torch.tensor(int(condition), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)
