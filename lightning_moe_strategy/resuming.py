"""A resumed run goes on as the unbroken one would have: random numbers of every rank, position in the data.

The methods stand in the order in which a Trainer calls them.
"""

import io
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._lightning_compat import (
    DeferredSignals,
    Trainer,
    TrainerFn,
    epoch_progress,
    know_saved,
    loaders_in_use,
    rank_zero_info,
    rank_zero_warn,
    resumes_inside_epoch,
    set_batches_done,
)
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.plain import packed
from lightning_moe_strategy.data_position import LoaderPosition, Loop, Position
from lightning_moe_strategy.host_agreement import host_group, raise_together
from lightning_moe_strategy.placed_strategy import PlacedStrategy
from lightning_moe_strategy.random_states import (
    RandomState,
    derived_state,
    random_state,
    random_state_of,
    set_random_state,
)

_NAME = "resume"
_FORMAT = 2


class Resuming(PlacedStrategy):
    """A strategy whose checkpoints hold what each rank would draw and read next."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._signals: DeferredSignals | None = None
        self._coming: dict[str, Any] | None = None
        """Of this rank, from the checkpoint that was loaded, until training starts."""
        self._pending: RandomState | None = None
        """What the first random number of training is drawn from."""
        self._held: RandomState | None = None
        """Training's, while a validation draws."""
        self._last: dict[str, Any] | None = None
        """Of this rank, when the last fit ended."""
        self._has_failed = False

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._held = self._pending = self._coming = None
        trainer = getattr(model, "_trainer", None)
        if trainer is not None:
            self._signals = DeferredSignals(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                self._last, self._has_failed = None, False

    def take_rank_states(self, states: Mapping[str, Tensor], saved_world_size: int) -> None:
        """Go on from ``states`` when training starts: those of the rank of this number, of ``saved_world_size``.

        Every rank calls it.

        The same degrees d_rep * fsdp and cp: every rank takes up its own. Another layout: a rank takes those of the
        rank that had its share of the samples and its part of the sequence; shares that did not exist draw from
        streams of their own.
        """
        if not self._is_fitting:
            return
        sent = [states.get(_NAME) if self.global_rank == 0 else None]
        dist.broadcast_object_list(sent, src=0, group=self._hosts)
        if sent[0] is None:
            return
        saved = torch.load(io.BytesIO(sent[0].cpu().numpy().tobytes()), weights_only=True)
        if saved["format"] != _FORMAT:
            raise CheckpointError(
                f"The checkpoint says where the data stood in format {saved['format']}, and this version reads "
                f"{_FORMAT}: install the version of lightning-moe-strategy that wrote it."
            )
        if len(saved["ranks"]) != saved_world_size:
            raise CheckpointError(
                f"The checkpoint was saved by {saved_world_size} ranks, and says where {len(saved['ranks'])} of them "
                "stood: it is of two saves. Use another checkpoint."
            )
        self._coming = {**saved, "ranks": None, "num_taken": 0, **self._of_this_rank(saved)}
        self._pending = self._coming["random"]

    def _of_this_rank(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        dp, cp = (self.dims.coordinate(axis, self.global_rank) for axis in ("dp", "cp"))
        saved_dp, saved_cp = saved["dp"], saved["cp"]
        by_place = {tuple(rank["place"]): rank for rank in saved["ranks"]}
        positions = by_place[min(dp, saved_dp - 1), 0]["positions"]
        if (saved_dp, saved_cp) != (self.dims.dp, self.dims.cp):
            new = f", and {self.dims.dp - saved_dp} have new ones" if self.dims.dp > saved_dp else ""
            rank_zero_info(
                f"The checkpoint was saved by {saved_dp} shares of the samples on {saved_cp} ranks each, and goes on "
                f"with {self.dims.dp} on {self.dims.cp}: shares keep the random numbers they had{new}."
            )
        if dp < saved_dp:
            random = RandomState.of_plain(by_place[dp, cp if cp < saved_cp else 0]["random"])
        else:
            # Ranks of a cp group draw alike, so that they read the same samples.
            random = derived_state(RandomState.of_plain(by_place[0, 0]["random"]), dp)
        return {"random": random, "positions": [Position.of_plain(position) for position in positions]}

    def reading_position(self, loader: object, name: str) -> LoaderPosition:
        """How ``loader``, the next of training, is read: on from the checkpoint's, if one was loaded.

        Raises:
            ValueError: it cannot go on there; the error calls it ``name``.
        """
        trainer = self._trainer
        loop = Loop(
            num_done=lambda: epoch_progress(trainer).num_begun,
            num_accumulated=lambda: epoch_progress(trainer).num_accumulated,
            random=lambda: random_state(self.root_device),
            reading=self._reading,
            say=rank_zero_warn,
        )
        position = LoaderPosition(loader, name=name, dp=self.dims.dp, loop=loop)
        coming = self._coming
        if coming is None:
            if resumes_inside_epoch(trainer) and not hasattr(loader, "load_state_dict") and self._is_first_epoch:
                rank_zero_warn(
                    f"The checkpoint was saved inside an epoch and does not say where {name} stood, as those of this "
                    "strategy do: its first samples come again."
                )
            return position
        number, coming["num_taken"] = coming["num_taken"], coming["num_taken"] + 1
        if number >= len(coming["positions"]):
            if coming["is_over"] or not coming["positions"]:
                return position
            raise ValueError(
                f"The checkpoint was saved with {len(coming['positions'])} training loaders, and there are more now: "
                "give as many, or resume from a checkpoint without them."
            )
        num_used = position.go_on_at(coming["positions"][number])
        if not coming["is_over"]:
            if number and num_used != coming["num_used"]:
                raise ValueError(
                    f"{name} is one of several loaders, which would go on after {coming['num_used']} and {num_used} "
                    "batches: another layout can take up one loader only. Resume with the degrees it was saved with."
                )
            coming["num_used"] = num_used
            set_batches_done(trainer, num_used)
            if not number and (num_over := num_used % epoch_progress(trainer).num_accumulated):
                rank_zero_warn(
                    f"accumulate_grad_batches is another one, or {name} has other batches than when the checkpoint was "
                    f"saved: the first optimizer step comes {num_over} micro-batches early, with as many fewer."
                )
        return position

    def evaluation_batches(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader that is not trained on: inside a fit they leave training's random numbers alone."""
        batches: Iterator[Any] | None = None
        while True:
            with self._reading_beside():
                batches = iter(loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def on_train_start(self) -> None:
        super().on_train_start()
        coming, self._coming = self._coming, None
        pending, self._pending = self._pending, None
        if pending is None:
            return
        know_saved(self._trainer)
        set_random_state(pending, self.root_device)
        if coming is not None and coming["num_repeated"]:
            rank_zero_info(
                f"The checkpoint was saved {coming['num_repeated']} micro-batches into an optimizer step. They are "
                "computed again, as gradients are not saved; what is logged for each batch counts them twice."
            )

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.hold_random_state()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._held is not None:
            set_random_state(self._held, self.root_device)
            self._held = None

    def signals_here(self) -> tuple[bool, bool]:
        """Whether this rank was told to end, and to save for SLURM's requeue."""
        return (False, False) if self._signals is None else (self._signals.has_term, self._signals.has_requeue)

    def obey_signals(self, num_told: list[int]) -> None:
        """``num_told``: ranks with each of ``signals_here``. Every rank calls it, at the same batch."""
        assert self._signals is not None
        num_term, num_requeue = num_told
        if num_term:
            self._signals.obey_term()
        if num_requeue and self._is_fitting and self._trainer.training:
            self._signals.obey_requeue()

    def rank_states(self) -> dict[str, Tensor]:
        """What a checkpoint needs to go on from here, uint8. Every rank calls it.

        Rank 0 holds it for all ranks, as another layout needs that of others; theirs is one byte.

        Raises:
            CheckpointError: a loader's ``state_dict()`` holds what a checkpoint cannot.
        """
        own = self._where_it_stands() if self._is_fitting and self._last is None else self._last
        everyones: list[Any] | None = [None] * self.world_size if self.global_rank == 0 else None
        dist.gather_object(own, everyones, dst=0, group=self._hosts)
        found = {} if own is None else {_NAME: torch.zeros(1, dtype=torch.uint8)}
        error: Exception | None = None
        if everyones is not None and everyones[0] is not None:
            ranks = [{name: state[name] for name in ("place", "random", "positions")} for state in everyones]
            of_all = {name: everyones[0][name] for name in ("is_over", "num_repeated")}
            saved = {"format": _FORMAT, "dp": self.dims.dp, "cp": self.dims.cp, **of_all, "ranks": ranks}
            try:
                found[_NAME] = torch.from_numpy(np.frombuffer(packed(saved), dtype=np.uint8).copy())
            except CheckpointError as reason:
                error = reason
        raise_together(error, self._hosts, "saving where the data stands")
        return found

    def on_exception(self, exception: BaseException) -> None:
        self._held, self._has_failed = None, True
        super().on_exception(exception)

    def keep_last_position(self) -> None:
        """A fit is over: a checkpoint that is saved after it goes on from here."""
        if self._is_fitting and self._last is None and not self._has_failed:
            self._last = self._where_it_stands()

    def _where_it_stands(self) -> dict[str, Any]:
        """Of this rank. In the middle of an optimizer step: where it began, as no gradient is saved."""
        progress = epoch_progress(self._trainer)
        positions = [p for loader in loaders_in_use(self._trainer) if (p := _position_of(loader)) is not None]
        now = self._held or random_state(self.root_device)
        dp, cp = (self.dims.coordinate(axis, self.global_rank) for axis in ("dp", "cp"))
        num_repeated = 0 if progress.is_over else progress.num_done % progress.num_accumulated
        num_done = progress.num_done - num_repeated
        if progress.is_over:
            found = [position.at_end() for position in positions]
        else:
            found = [position.at(num_done) for position in positions]
            # What this batch would be computed with was drawn from before the loop read its next one.
            read = positions[0].at(num_done + (progress.num_ahead if num_done else 0)).random if positions else None
            now = read or now
        return {
            "place": (dp, cp),
            "random": now.as_plain(),
            "is_over": progress.is_over,
            "num_repeated": num_repeated,
            # Ranks of a cp group read the same.
            "positions": [position.as_plain() for position in found] if cp == 0 else [],
        }

    @contextmanager
    def _reading(self, before: RandomState | None) -> Generator[None, None, None]:
        """Before training starts, a batch that was read ahead is read again as it was, and a new one draws first."""
        if self._pending is None:
            yield
        elif before is not None:
            with random_state_of(before):
                yield
        else:
            set_random_state(self._pending, self.root_device)
            yield
            self._pending = random_state(self.root_device)

    def _reading_beside(self) -> AbstractContextManager[None]:
        trainer = self._trainer
        if not self._is_fitting or trainer.sanity_checking or trainer.validating:
            return nullcontext()
        return random_state_of(random_state())

    def hold_random_state(self) -> None:
        """Validation may draw as it likes: training goes on as if it had not."""
        if self._is_fitting and self._trainer.validating and self._held is None:
            self._held = random_state(self.root_device)

    @property
    def _is_first_epoch(self) -> bool:
        return not loaders_in_use(self._trainer)

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _hosts(self) -> dist.ProcessGroup:
        return host_group(self._mesh_timeout)


def _position_of(loader: object) -> LoaderPosition | None:
    """Of an AgreedLoader, which passes for another class."""
    position = getattr(loader, "__dict__", {}).get("position")
    return position if isinstance(position, LoaderPosition) else None
