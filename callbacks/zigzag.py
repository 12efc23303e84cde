"""Every rank of a cp group reads the same batch; this callback leaves each its zig-zag part of the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import Tensor, nn

from lightning_moe_strategy._lightning_compat import Callback, LightningModule, Trainer, rank_zero_info
from lightning_moe_strategy.context_parallel.batch import (
    SHIFTED_LABEL_KEYS,
    MicroBatch,
    SequenceFields,
    count_whole,
    find_sequences,
    items_of,
    refuse_labels_of_whole_sequences,
    refuse_what_cannot_be_split,
    split_items,
    whole_sequence,
    with_items,
)
from lightning_moe_strategy.context_parallel.gather import restore_sequence
from lightning_moe_strategy.context_parallel.padding import LayoutName
from lightning_moe_strategy.context_parallel.piece import SplitSettings
from lightning_moe_strategy.context_parallel.scope import (
    LOSSES_WITHOUT_SHIFT,
    ContextParallel,
    LocalSequence,
    Shift,
)
from lightning_moe_strategy.kernels.attention import AttentionKernelName, require_attention_kernel
from lightning_moe_strategy.verification import verify_context_parallel


@runtime_checkable
class SplitsBatches(Protocol):
    """What the callback needs of a strategy; ``"fsdp_cp_ep"`` has it."""

    micro_batch: MicroBatch

    @property
    def context_parallel(self) -> ContextParallel: ...

    def register_batch_transform(self, transform: Callable[[Any, str], Any]) -> None: ...


class ZigZagContextParallel(Callback):
    """Give each rank of a cp group its tokens of every batch, and count them.

    Rank r gets chunks r and ``2 * cp - 1 - r`` of ``2 * cp``, so that causal attention costs every rank the same. The
    batch keeps its type; a dict-like one gets ``position_ids``. Lengths that ``2 * cp`` does not divide are padded at
    the end, where nothing sees the padding and no label counts. With cp=1 the batch passes unchanged.
    """

    def __init__(
        self,
        *,
        sequence_keys: Sequence[str] | None = None,
        labels_key: str | None = None,
        shift: Literal["auto", "model", "module", "none"] = "auto",
        ignore_index: int = -100,
        pad_token_id: int = 0,
        token_wise_modules: Sequence[str] = (),
        ulysses_modules: Sequence[str] = (),
        positions: Literal["required", "none"] = "required",
        documents: Literal["auto", "separate"] = "auto",
        layout: LayoutName = "zigzag",
        attention_kernel: AttentionKernelName = "auto",
        verify_cp: bool = False,
    ) -> None:
        """
        Args:
            sequence_keys: keys of the tensors [batch, tokens, ...] to split; by default every tensor whose dim 1 is
                as long as ``input_ids``.
            labels_key: key of the labels; by default ``labels``, ``shift_labels``, ``targets``, ``target`` or ``y``,
                and the second part of a tuple.
            shift: who shifts the labels by one token. "model": a Hugging Face model, in its forward. "module": the
                LightningModule, as ``logits[:, :-1]`` against ``labels[:, 1:]``. "none": they are targets already.
                "auto" tells from the key and the model.
            ignore_index: the label that does not count.
            pad_token_id: what ``input_ids`` are padded with.
            token_wise_modules: patterns (``fnmatch``) of block names that mix no tokens.
            ulysses_modules: patterns of names, in the LightningModule, of attention that is no causal
                ``F.scaled_dot_product_attention``: masked, bidirectional, of its own making. A block's calls of that
                function, or a module's forward of query, key and value [batch, heads, tokens, channels], get whole
                sequences of ``heads / cp`` heads, for two all-to-alls of all heads. ``cp`` must divide the heads.
            positions: "none" for a model that uses no positions.
            documents: of a batch that marks packed documents (``cu_seqlens``, ``document_ids``, ``position_ids`` that
                start again). "auto": Hugging Face models keep them apart, other modules refuse such a batch.
                "separate": other modules keep them apart too, as they must in one process for equal results.
            layout: "zigzag" shares out the whole sequence. "per_document" does so with every packed document by itself,
                padded to a multiple of ``2 * cp``: equal attention for every rank where documents are many and much
                longer than that; the padding is said once. "contiguous": one piece per rank, for models without
                softmax attention.
            attention_kernel: see ``attention_kernel_for``. "auto": FlashAttention 4, 3, 2, torch's own, or pieces.
            verify_cp: before the first training step, put a few hundred tokens of its batch through ``training_step``
                twice, split over the cp ranks and whole on each of them, and raise on every rank when loss, logits or a
                gradient differ. Training goes on as if nothing had been; what the step does outside of tensors, metrics
                and the module's own numbers, lists and dicts (files, objects of its own) it does twice more.
        """
        for name, value, allowed in (
            ("shift", shift, ("auto", "model", "module", "none")),
            ("positions", positions, ("required", "none")),
            ("documents", documents, ("auto", "separate")),
            ("layout", layout, get_args(LayoutName)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}({value!r}) must be one of {allowed}.")
        self.sequence_keys = None if sequence_keys is None else tuple(sequence_keys)
        self.labels_key = labels_key
        self.shift = shift
        self.ignore_index, self.pad_token_id = ignore_index, pad_token_id
        self.token_wise_modules, self.positions = tuple(token_wise_modules), positions
        self.ulysses_modules = tuple(ulysses_modules)
        self.documents, self.layout, self.attention_kernel = documents, layout, attention_kernel
        self.verify_cp = verify_cp
        self._to_verify: tuple[Any, SequenceFields, SplitSettings] | None = None
        self._is_verified = not verify_cp
        self._strategy: SplitsBatches | None = None
        self._module: nn.Module | None = None
        self._said_who_shifts = self._said_padding = False
        self._is_model_asked = False
        self._shift_of_model: Shift | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: object = trainer.strategy
        if not isinstance(strategy, SplitsBatches):
            raise ValueError(
                f"ZigZagContextParallel needs Trainer(strategy='fsdp_cp_ep'); this one has {type(strategy).__name__}."
            )
        if self.verify_cp and stage == "fit":
            if not pl_module.automatic_optimization:
                raise ValueError(
                    f"verify_cp=True runs training_step twice without training, and {type(pl_module).__name__} (manual "
                    "optimization) steps its optimizer in there. Verify with a LightningModule whose training_step "
                    "returns the loss and whose automatic_optimization is True, then train with verify_cp=False."
                )
            self._is_verified = False
        require_attention_kernel(self.attention_kernel)
        strategy.context_parallel.attention_kernel = self.attention_kernel
        self._strategy, self._module, self._is_model_asked = strategy, pl_module, False
        strategy.context_parallel.token_wise_modules = self.token_wise_modules
        strategy.context_parallel.ulysses_modules = self.ulysses_modules
        strategy.context_parallel.positions_required = self.positions == "required"
        strategy.context_parallel.separates_documents = self.documents == "separate"
        strategy.register_batch_transform(self.split)

    def split(self, batch: Any, stage: str) -> Any:
        """This rank's part of ``batch``. ``stage`` is Lightning's: train, validate, sanity_check, test or predict.

        ValueError for a batch that cannot be split exactly; the strategy has every rank of the world raise it.
        """
        strategy = self._attached_to()
        if strategy.context_parallel.degree == 1:
            strategy.micro_batch = self._count(batch)
            if strategy.context_parallel.indexer_loss is not None:
                strategy.context_parallel.sequence = self._whole(batch, strategy.micro_batch)
            return batch
        items = items_of(batch)
        fields = find_sequences(items, sequence_keys=self.sequence_keys, labels_key=self.labels_key)
        degree = strategy.context_parallel.degree
        name = type(self._module).__name__.removeprefix("FSDP")
        refuse_labels_of_whole_sequences(items, fields, degree=degree, module=name)
        shift = self._who_shifts(fields, stage)
        refuse_what_cannot_be_split(
            items,
            fields,
            shift=shift,
            degree=degree,
            ignore_index=self.ignore_index,
            layout=self.layout,
        )
        cp = strategy.context_parallel
        if cp.splits_inside:
            self._refuse_what_reads_parts(fields, shift)
        if stage == "train" and not self._is_verified:
            settings = SplitSettings(
                shift=shift, ignore_index=self.ignore_index, pad_token_id=self.pad_token_id, layout=self.layout
            )
            self._to_verify = (batch, fields, settings)
        local, cp.sequence, strategy.micro_batch = split_items(
            items,
            fields,
            shift=shift,
            degree=cp.degree,
            rank=cp.rank,
            ignore_index=self.ignore_index,
            pad_token_id=self.pad_token_id,
            layout=self.layout,
        )
        self._say_padding(fields, cp)
        if cp.splits_inside:
            cp.sequence = replace(cp.sequence, attention_mask_BL=items.get("attention_mask"))
            return batch
        return with_items(batch, local)

    def _refuse_what_reads_parts(self, fields: SequenceFields, shift: Shift) -> None:
        """Of a model that splits the batch inside, which all else holds whole."""
        if self.verify_cp:
            raise ValueError(
                "verify_cp=True cuts a few tokens out of a batch, and a model that reads images needs all of an "
                "image's. Say verify_cp=False, and run lightning-moe verify."
            )
        if fields.labels_key is not None and shift != "model":
            raise ValueError(
                f"A model that reads images has logits of this rank's tokens alone, and the labels under "
                f"{fields.labels_key!r} stay whole (shift={shift!r}). Pass labels= to the model, which computes the "
                "loss, or choose cp=1."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._to_verify is not None:
            whole, fields, settings = self._to_verify
            self._to_verify = None
            self._is_verified = verify_context_parallel(
                trainer, pl_module, whole, fields, settings, batch_idx=batch_idx
            )

    def restore(self, x: Tensor, dim: int = 1) -> Tensor:
        """An output of the current batch for its whole sequence, in natural order and without padding.

        ``x`` has this rank's tokens along ``dim``; every rank of the cp group calls it. Not differentiable.
        """
        cp = self._attached_to().context_parallel
        if cp.degree == 1 or cp.is_off:
            return x
        sequence = cp.current
        if sequence.is_token_P is None:
            return restore_sequence(x, dim, sequence.layout, cp.group, num_tokens=sequence.num_tokens)
        num_padded = sequence.is_token_P.shape[0]
        padded = restore_sequence(x, dim, sequence.layout, cp.group, num_tokens=num_padded)
        return padded.index_select(dim, sequence.is_token_P.nonzero()[:, 0].to(x.device))

    def _say_padding(self, fields: SequenceFields, cp: ContextParallel) -> None:
        """What cutting every document by itself costs, for the first batch."""
        if cp.current.is_token_P is None or self._said_padding:
            return
        num_padding = cp.current.is_token_P.shape[0] - fields.num_tokens
        rank_zero_info(
            f"ZigZagContextParallel pads {fields.num_tokens:,} tokens of {len(cp.current.documents[0]):,} documents by "
            f"{num_padding:,} ({num_padding / fields.num_tokens:.1%}), so that 2 * cp({cp.degree}) divides each."
        )
        self._said_padding = True

    def _attached_to(self) -> SplitsBatches:
        if self._strategy is None:
            raise RuntimeError("ZigZagContextParallel works once a Trainer has called its setup().")
        return self._strategy

    def _count(self, batch: Any) -> MicroBatch:
        """Without cp any batch passes; one without sequences is not counted."""
        items = items_of(batch)
        try:
            fields = find_sequences(items, sequence_keys=self.sequence_keys, labels_key=self.labels_key)
        except ValueError:
            return MicroBatch(num_tokens=0, num_loss_tokens=None)
        return count_whole(items, fields, self._who_shifts(fields, stage="count"), self.ignore_index)

    def _whole(self, batch: Any, counts: MicroBatch) -> LocalSequence:
        """A batch that is not split, for attention that asks what the rank holds. ValueError as for a split one."""
        items = items_of(batch)
        fields = find_sequences(items, sequence_keys=self.sequence_keys, labels_key=self.labels_key)
        shift = self._who_shifts(fields, stage="count")
        refuse_what_cannot_be_split(items, fields, shift=shift, degree=1, ignore_index=self.ignore_index)
        return whole_sequence(items, fields, counts)

    def _who_shifts(self, fields: SequenceFields, stage: str) -> Shift:
        key = fields.labels_key
        if key is None and stage == "train":
            raise ValueError(
                "The batch has no labels, and labels must be shifted before the sequence is split. Return a dict with "
                "'labels' (or targets), a tuple (x, y), or say ZigZagContextParallel(labels_key=...)."
            )
        if self.shift != "auto":
            return self.shift
        if key is None or key in SHIFTED_LABEL_KEYS or isinstance(key, int):
            return "none"
        if (who := self._who_shifts_in_model()) is not None:
            return who
        if self._attached_to().context_parallel.degree > 1:
            raise ValueError(
                f"{key!r} are labels, but of whom? Say who shifts them: ZigZagContextParallel(shift='module') for "
                "logits[:, :-1] against labels[:, 1:] in the LightningModule, 'model' inside a model's forward, 'none' "
                "when they are targets already."
            )
        if not self._said_who_shifts:
            rank_zero_info(f"ZigZagContextParallel takes {key!r} to be shifted by the LightningModule ('module').")
            self._said_who_shifts = True
        return "module"

    def _who_shifts_in_model(self) -> Shift | None:
        # Once: a walk over all modules of a large model is a millisecond of every batch.
        if self._module is not None and not self._is_model_asked:
            self._is_model_asked, self._shift_of_model = True, _who_shifts_in_hugging_face(self._module)
        return self._shift_of_model


def _who_shifts_in_hugging_face(module: nn.Module) -> Shift | None:
    """By transformers' own mark: which loss ``labels=`` of a forward leads to. None without a model that has one."""
    models = [part for part in module.modules() if getattr(part, "loss_type", None)]
    losses = {part.loss_type for part in models if not _has_encoder(part)}
    if losses & {"ForCausalLM", "ForConditionalGeneration"}:
        return "model"
    return "none" if losses & LOSSES_WITHOUT_SHIFT or any(map(_has_encoder, models)) else None


def _has_encoder(model: nn.Module) -> bool:
    """Of its own, so that the decoder's inputs are shifted, and not the labels."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
