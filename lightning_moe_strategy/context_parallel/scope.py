"""One rank's place in its cp group, and the part of the current micro-batch that it holds.

The strategy owns the one ``ContextParallel`` of a rank; the adapters read it through the objects they put
into the model, never through a thread-local: an activation recompute may run in a thread of the autograd
engine.

Shapes: B batch, L tokens of this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from lightning_moe_strategy.collectives import AnyGroup
from lightning_moe_strategy.context_parallel.guard import FirstStepGuard
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss
from lightning_moe_strategy.context_parallel.layout import SequenceLayout
from lightning_moe_strategy.context_parallel.padding import PaddedSequence
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.attention import AttentionKernelName

Shift = Literal["model", "module", "none"]
"""Who shifts the labels by one token: the model inside its forward, the LightningModule, or nobody any more."""

LOSSES_WITHOUT_SHIFT = frozenset({"ForTokenClassification", "ForMaskedLM"})
"""Of transformers, by ``loss_type``: a label belongs to the token where it stands."""


@dataclass(frozen=True, kw_only=True)
class LocalSequence:
    """What this rank holds of one micro-batch's sequences."""

    layout: SequenceLayout
    num_tokens: int
    """Tokens of the whole sequence before padding and dummies."""
    position_ids_BL: Tensor
    padded: PaddedSequence | None = None
    """How the whole sequence was padded and shared out; None where it is not split."""
    documents: Documents = ONE_DOCUMENT
    """Packed in the whole sequence. Padding and dummies belong to the last one."""
    shift: Shift = "none"
    shift_labels_BL: Tensor | None = None
    """With ``shift="model"``: the labels, shifted on the whole sequence. A Hugging Face loss takes them as they are."""
    attention_mask_BL: Tensor | None = None
    """This rank's part of a mask that was checked on the whole sequence: padding on the right and nothing else. All of
    it where a model splits the batch inside."""
    real_tokens_BL: Tensor | None = None
    """Which of this rank's tokens are no padding, the user's or the split's: bool. None when all are."""
    has_labels: bool = True
    """Whether the step's gradient is divided by a number of labels."""
    token_ids_BL: Tensor | None = None
    """What the batch gives the step as token ids, to see whether it moves them along the sequence."""

    @property
    def is_token_P(self) -> Tensor | None:
        """Which tokens of the padded sequence are no padding, where it does not stand at the end alone. On the CPU."""
        return None if self.padded is None else self.padded.is_token_P


class ContextParallel:
    """The cp group of this rank, the micro-batch it holds, and the check of the first step of every stage."""

    def __init__(self, group: AnyGroup, indexer_loss: IndexerLoss | None = None) -> None:
        self.group = group
        self.indexer_loss = indexer_loss
        """What trains the indexers of sparse attention; None leaves them as they are."""
        self.rank = group.rank()
        self.degree = group.size()
        self.sequence: LocalSequence | None = None
        self.blocks: tuple[str, ...] = ()
        """Names of the modules whose attention was adapted."""
        self.wrapped_blocks: set[str] = set()
        """Of which it is known whether they run: no attention is expected of one that a stage leaves out."""
        self.token_wise_modules: tuple[str, ...] = ()
        """Patterns of block names that mix no tokens, so that no attention is expected of them."""
        self.positions_required = True
        """Whether a step that never reads the position ids is an error."""
        self.ulysses_modules: tuple[str, ...] = ()
        """Patterns of names of blocks and modules that see whole sequences of a part of their heads."""
        self.is_off = False
        """Whether every module computes what it would in one process, with whatever tokens it is given."""
        self.splits_inside = False
        """Whether the batch stays whole, as a model splits it at its language part (hugging_face_language_part.py)."""
        self.attention_kernel: AttentionKernelName = "auto"
        """What attends to keys of other ranks."""
        self.separates_documents = False
        """Whether modules that are no Hugging Face models keep packed documents apart."""
        self.guard: FirstStepGuard | None = None
        """Watches the step that runs now, if it is the first of its stage."""
        self.stock_attention: dict[object, Callable[[], AbstractContextManager[None]]] = {}
        """Per model that names its attention in its settings, which cannot ask ``is_off``: how it gets its own back."""
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
        if self.sequence is None and self.degree == 1:
            raise RuntimeError(
                "The indexer loss counts the tokens of a batch, and this one has no sequences [batch, tokens]. Return "
                "a dict with input_ids, run the model inside a step of the Trainer, or leave indexer_loss_weight out."
            )
        if self.sequence is None:
            raise RuntimeError(
                f"cp({self.degree}) > 1, but no batch was split over the cp ranks yet. Add ZigZagContextParallel to "
                "the Trainer's callbacks, and run the model inside training_step, validation_step, test_step or "
                "predict_step."
            )
        return self.sequence

    @contextmanager
    def off(self) -> Iterator[None]:
        """What runs inside is not taken over."""
        was_off, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = was_off

    @contextmanager
    def alone(self, sequence: LocalSequence) -> Iterator[None]:
        """Inside, every rank computes a whole ``sequence`` by itself, with the models' own attention."""
        split, self.sequence = self.sequence, sequence
        try:
            with self.off(), ExitStack() as stack:
                for stock in self.stock_attention.values():
                    stack.enter_context(stock())
                yield
        finally:
            self.sequence = split

    def uses_ulysses(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ulysses_modules)

    def is_token_wise(self, block: str) -> bool:
        return any(fnmatchcase(block, pattern) for pattern in self.token_wise_modules)

    def token_wise(self) -> AbstractContextManager[None]:
        """Around what mixes no tokens of the sequence: the check of a first step looks away."""
        return nullcontext() if self.guard is None else self.guard.token_wise_block()

    def note_run(self, block: str) -> None:
        """The forward of this block was called."""
        if self.guard is not None:
            self.guard.blocks_that_ran.add(block)

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
    def uncounted_steps(self) -> Iterator[None]:
        """Steps inside are no first ones of a stage: those that follow are checked as if these had not been."""
        checked = set(self._checked_stages)
        try:
            yield
        finally:
            self._checked_stages = checked

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """Around the user's step. The first one of every stage is watched; later ones cost nothing.

        RuntimeError when the step did what this rank's part of a sequence makes wrong: attention that nobody
        took over, positions or labels that nobody read.
        """
        if self.degree == 1 or self.is_off or stage in self._checked_stages:
            yield
            return
        sequence = self.current
        expected = {block for block in self.blocks if not self.is_token_wise(block)}
        labels = None if stage == "predict" else sequence.shift_labels_BL
        self.guard = FirstStepGuard(
            self.degree,
            sequence.position_ids_BL,
            labels,
            token_ids_BL=sequence.token_ids_BL,
            num_dummies=sequence.layout.tail_tokens_per_rank,
        )
        try:
            with self.guard:
                yield
            expected -= self.wrapped_blocks - self.guard.blocks_that_ran
            self.guard.check(expected, positions_required=self.positions_required)
            self._checked_stages.add(stage)
        finally:
            self.guard = None
