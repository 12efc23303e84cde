"""One rank's place in its cp group, and the part of the current micro-batch that it holds.

The strategy owns the one ``ContextParallel`` of a rank; the adapters read it through the objects they put
into the model, never through a thread-local: an activation recompute may run in a thread of the autograd
engine.

Shapes: B batch, L tokens of this rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.guard import FirstStepGuard
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents

Shift = Literal["model", "module", "none"]
"""Who shifts the labels by one token: the model inside its forward, the LightningModule, or nobody any more."""


@dataclass(frozen=True, kw_only=True)
class LocalSequence:
    """What this rank holds of one micro-batch's sequences."""

    layout: SequenceLayout
    num_tokens: int
    """Tokens of the whole sequence before padding and dummies."""
    position_ids_BL: Tensor
    is_token_P: Tensor | None = None
    """Which tokens of the padded sequence are no padding, where that does not stand at the end alone. On the CPU."""
    documents: Documents = ONE_DOCUMENT
    """Packed in the whole sequence. Padding and dummies belong to the last one."""
    shift: Shift = "none"
    shift_labels_BL: Tensor | None = None
    """With ``shift="model"``: the labels, shifted on the whole sequence. A Hugging Face loss takes them as they are."""
    attention_mask_BL: Tensor | None = None
    """This rank's part of a mask that was checked on the whole sequence: padding on the right and nothing else."""


class ContextParallel:
    """The cp group of this rank, the micro-batch it holds, and the check of the first step of every stage."""

    def __init__(self, group: AnyGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.degree = group.size()
        self.sequence: LocalSequence | None = None
        self.blocks: tuple[str, ...] = ()
        """Names of the modules whose attention was adapted."""
        self.token_wise_modules: tuple[str, ...] = ()
        """Patterns of block names that mix no tokens, so that no attention is expected of them."""
        self.positions_required = True
        """Whether a step that never reads the position ids is an error."""
        self.separates_documents = False
        """Whether modules that are no Hugging Face models keep packed documents apart."""
        self.guard: FirstStepGuard | None = None
        """Watches the step that runs now, if it is the first of its stage."""
        self._checked_stages: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextParallel":
        return self  # a copy of a model (an averaged one) lives on the same ranks

    @property
    def layout(self) -> SequenceLayout:
        """Of the current micro-batch; dummies included."""
        return self.current.layout

    @property
    def current(self) -> LocalSequence:
        """The current micro-batch; RuntimeError when no batch was split yet."""
        if self.sequence is None:
            raise RuntimeError(
                f"cp({self.degree}) > 1, but no batch was split over the cp ranks yet. Add ZigZagContextParallel to "
                "the Trainer's callbacks, and run the model inside training_step, validation_step, test_step or "
                "predict_step."
            )
        return self.sequence

    def is_token_wise(self, block: str) -> bool:
        return any(fnmatchcase(block, pattern) for pattern in self.token_wise_modules)

    def note_attention(self, block: str) -> None:
        """An adapter took over an attention call of this block."""
        if self.guard is not None:
            self.guard.blocks_with_attention.add(block)

    def note_positions(self) -> None:
        """The model was handed position ids."""
        if self.guard is not None:
            self.guard.position_ids_were_read = True

    def expect_every_block_again(self, blocks: tuple[str, ...]) -> None:
        """Name the adapted blocks; the next step of every stage is checked."""
        self.blocks = blocks
        self._checked_stages.clear()

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """Around the user's step. The first one of every stage is watched; later ones cost nothing.

        RuntimeError when the step did what this rank's part of a sequence makes wrong: attention that nobody
        took over, positions or labels that nobody read.
        """
        if self.degree == 1 or stage in self._checked_stages:
            yield
            return
        sequence = self.current
        expected = {block for block in self.blocks if not self.is_token_wise(block)}
        labels = None if stage == "predict" else sequence.shift_labels_BL
        self.guard = FirstStepGuard(self.degree, sequence.position_ids_BL, labels)
        try:
            with self.guard:
                yield
            self.guard.check(expected, positions_required=self.positions_required)
            self._checked_stages.add(stage)
        finally:
            self.guard = None
