"""Load a checkpoint into a model and its optimizers: looked through on all ranks first, then read, each rank its parts.

What does not fit or is damaged is one error on every rank, and nothing has changed then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_model_state_dict
from torch.optim import Optimizer

from lightning_moe_strategy.checkpoint.agreement import together
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.named_state import model_state, names_of_parameters
from lightning_moe_strategy.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_moe_strategy.checkpoint.optimizer_state import MatchedOptimizer, match_optimizers
from lightning_moe_strategy.checkpoint.progress import progress
from lightning_moe_strategy.checkpoint.read import open_checkpoint
from lightning_moe_strategy.checkpoint.single_file import SingleFile
from lightning_moe_strategy.checkpoint.weights import MatchedWeights, match_weights
from lightning_moe_strategy.sharding import local_tensor


@dataclass(kw_only=True)
class Loaded:
    """What a checkpoint held beside what is in the model and the optimizers now."""

    rest: dict[str, Any]
    rank_states: dict[str, Tensor] | None
    """What the rank of this number had alone, perhaps nothing; None where no rank had."""
    world_size: int
    """Ranks that saved it."""
    is_verified: bool
    """Its files were compared with their checksums."""
    has_optimizers: bool
    num_bytes_read: int = 0
    """Of tensors, by this rank, from a directory."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what was skipped or converted."""


def load(
    path: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    weights_only: bool = True,
    shows_progress: bool = False,
) -> Loaded:
    """Every rank calls it. Without ``optimizers``, or where none was saved, the weights alone are loaded.

    ``group``: all ranks, exchanging tensors of the CPU; None is one process. Not ``strict``: tensors that only the
    model or only the checkpoint has are skipped. Not ``weights_only``: the code that a file names is run.

    Raises:
        CheckpointError: on every rank; names what is missing, damaged, does not fit or would have to run code.
    """
    with together(path, lambda: open_checkpoint(path, weights_only=weights_only), group) as saved:
        num_bytes = saved.num_bytes_to_verify(group)
        with progress("Verifying the checkpoint", num_bytes, is_shown=shows_progress) as advance:
            saved.verify(group, advance=advance)
        plan = together(path, lambda: _planned(saved, model, optimizers, strict=strict, safe=weights_only), group)
        with progress("Loading the checkpoint", plan.num_bytes, is_shown=shows_progress) as advance:
            together(path, lambda: _fill(saved, plan, advance), group)
        plan.apply(model)
        if isinstance(saved, OpenCheckpoint):
            plan.loaded.num_bytes_read = saved.num_bytes_read
            plan.loaded.is_verified = saved.manifest is not None
        return plan.loaded


@dataclass(kw_only=True)
class _Plan:
    """What will be loaded where."""

    state: dict[str, Any]
    """Of the model."""
    weights: MatchedWeights
    optimizers: list[MatchedOptimizer]
    loaded: Loaded

    @property
    def pairs(self) -> list[tuple[Tensor, Any]]:
        return [*self.weights.pairs, *(pair for optimizer in self.optimizers for pair in optimizer.pairs)]

    @property
    def num_bytes(self) -> int:
        """Of this rank's parts."""
        return sum(local.numel() * local.dtype.itemsize for local in (local_tensor(target) for target, _ in self.pairs))

    def apply(self, model: nn.Module) -> None:
        # The tensors are filled in place; this is for the hooks of modules, and for what is no tensor.
        set_model_state_dict(model, self.state | self.weights.values, options=StateDictOptions(strict=False))
        for optimizer in self.optimizers:
            optimizer.apply()


def _planned(
    saved: OpenCheckpoint | SingleFile,
    model: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool,
    safe: bool,
) -> _Plan:
    """Everything that may be wrong is found here, on this rank."""
    state = model_state(model)
    weights = match_weights(state, saved.weights(), strict=strict, where=saved.path)
    weights.values = {name: saved.whole(value) for name, value in weights.values.items()}
    states = saved.optimizers()
    matched = []
    if optimizers is not None and states:
        matched = match_optimizers(
            optimizers,
            states,
            names_of_parameters(model),
            strict=strict,
            where=saved.path,
            make_states=lambda optimizer: get_optimizer_state_dict(model, optimizer),
        )
    loaded = Loaded(
        rest=saved.rest(weights_only=safe),
        rank_states=saved.rank_states(_rank()) if saved.has_rank_states() else None,
        world_size=saved.saved_world_size(),
        is_verified=True,
        has_optimizers=bool(states),
        notes=[*weights.notes, *(note for optimizer in matched for note in optimizer.notes)],
    )
    plan = _Plan(state=state, weights=weights, optimizers=matched, loaded=loaded)
    saved.prepare(plan.pairs)
    return plan


def _rank() -> int:
    """Of this process in the world."""
    return dist.get_rank() if dist.is_initialized() else 0


def _fill(saved: OpenCheckpoint | SingleFile, plan: _Plan, advance: Callable[[int], None]) -> None:
    try:
        saved.fill(plan.pairs, advance=advance)
    except Exception as reason:
        raise CheckpointError(
            f"checkpoint({saved.path!r}) was verified and could not be read then, {type(reason).__name__}: {reason}. "
            "Some weights are loaded and some are not: start again."
        ) from reason
