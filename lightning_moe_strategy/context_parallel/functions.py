"""Attention of any module that calls ``F.scaled_dot_product_attention``, or our kernels of sparse attention, taken over
while one block computes.

A TorchFunctionMode is entered inside the block's own ``forward``: so it is there in an activation recompute
too, in whatever thread that runs, and it catches the functions under any name they were imported by. The model's
source and classes stay as they are.

Shapes: B batch, L tokens of this rank; for sparse attention those of its kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_moe_strategy._torch_compat import in_checkpointed_region, saved_tensors_hook
from lightning_moe_strategy.context_parallel.ahead import GatheredAhead
from lightning_moe_strategy.context_parallel.compiled import refuse_in_graph
from lightning_moe_strategy.context_parallel.guard import OTHER_ATTENTION
from lightning_moe_strategy.context_parallel.indexer_loss import Index, index_to_train
from lightning_moe_strategy.context_parallel.indexers import choice_already_made
from lightning_moe_strategy.context_parallel.next_tokens import next_tokens_of_sequence
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.softmax import causal_attention
from lightning_moe_strategy.context_parallel.sparse import attend_to_selected, select_keys_of_sequence
from lightning_moe_strategy.context_parallel.token_mixing import MIXING, REMEDY, mixes_tokens
from lightning_moe_strategy.context_parallel.ulysses import attend_by_heads
from lightning_moe_strategy.context_parallel.unexpanded import KeysOfSequence, adapt_latent_attention
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.announcement import announce_keys
from lightning_moe_strategy.kernels.key_selection import select_keys
from lightning_moe_strategy.kernels.next_tokens import next_tokens
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention
from lightning_moe_strategy.models.attention import MultiHeadLatentAttention
from lightning_moe_strategy.models.sparse_attention import SparseLatentAttention

_WRAPPER = "_context_parallel_forward"


def adapt_block(block: nn.Module, name: str, cp: ContextParallel) -> None:
    """Let ``block`` attend over the whole sequence. A second call only hands over the new ``name`` and ``cp``."""
    wrapper = block.__dict__.get(_WRAPPER)
    if wrapper is None:
        wrapper = block.__dict__[_WRAPPER] = block.__dict__["forward"] = _BlockForward(block.forward)
    wrapper.name, wrapper.cp = name, cp
    wrapper.is_sparse = any(isinstance(module, SparseLatentAttention) for module in block.modules())
    cp.wrapped_blocks.add(name)
    for module in block.modules():
        if cp.degree > 1 and isinstance(module, MultiHeadLatentAttention):
            adapt_latent_attention(module, "expand", "kv_up_proj", cp)


class _BlockForward:
    """A block's forward, inside the mode that takes over its attention."""

    name: str
    cp: ContextParallel
    is_sparse: bool

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_sparse:
            refuse_in_graph(self.name)
        self.cp.note_run(self.name)
        if not self.cp.is_token_wise(self.name):
            with _AttentionMode(self.name, self.cp):
                return self.forward(*args, **kwargs)
        with self.cp.token_wise():
            return self.forward(*args, **kwargs)


class _AttentionMode(TorchFunctionMode):
    """Rewrites causal self-attention and refuses what cannot be split along the sequence, naming the block."""

    def __init__(self, block: str, cp: ContextParallel) -> None:
        super().__init__()
        self.block, self.cp = block, cp
        self.announced: list[GatheredAhead] = []
        """On their way, and read by no call yet."""
        self.index: Index | None = None
        """What the last keys were chosen by, to be trained by the attention to them."""
        if cp.guard is not None:
            self.hook_at_entry, self.grad_at_entry = saved_tensors_hook(), torch.is_grad_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.cp.is_off or (self.cp.degree == 1 and func not in (select_keys, sparse_attention)):
            return func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            if self.cp.uses_ulysses(self.block):
                return self._attend_by_heads(*args, **(kwargs or {}))
            return self._attend(*args, **(kwargs or {}))
        if func is sparse_attention:
            return self._attend_to_selected(*args, **(kwargs or {}))
        if func is announce_keys:
            return self._announce(*args)
        if func is select_keys:
            return self._select_keys(*args, **(kwargs or {}))
        if func is next_tokens:
            return self._next_tokens(*args, **(kwargs or {}))
        if func in OTHER_ATTENTION:
            raise self._refusal(OTHER_ATTENTION[func], "Call F.scaled_dot_product_attention(is_causal=True).")
        if func is F.conv1d and _width(*args, **(kwargs or {})) > 1:
            raise self._refusal("a convolution over tokens", "Choose cp=1 for this model.")
        if self.cp.guard is not None and (name := mixes_tokens(MIXING, self.cp.guard.shapes_BL, func, args, kwargs)):
            raise self._refusal(f"{name} along its tokens", REMEDY)
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: "Tensor | KeysOfSequence",
        value: "Tensor | KeysOfSequence",
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        by_heads = f"or say ZigZagContextParallel(ulysses_modules=[{self.block!r}]): whole sequences of some heads."
        if attn_mask is not None:
            raise self._refusal("attn_mask", f"Pass is_causal=True and no mask, {by_heads}")
        if dropout_p > 0.0:
            raise self._refusal(f"dropout_p({dropout_p}) > 0", "Set the attention dropout to 0.")
        if not is_causal:
            raise self._refusal("is_causal=False", f"Pass is_causal=True (queries see no later token), {by_heads}")
        if query.dim() == 3 and isinstance(key, Tensor) and isinstance(value, Tensor):
            query, key, value = (x[:, None] for x in (query, key, value))
            return self._attend(query, key, value, is_causal=True, scale=scale)[:, 0]
        self._check_that_a_recompute_would_come_here(has_gradient=True)
        self.cp.note_attention(self.block)
        layout, group, documents = self.cp.layout, self.cp.group, self._documents()
        try:
            if isinstance(key, KeysOfSequence):
                assert value is key, "one stands for both"
                return key.attend(query, scale=scale, documents=documents)
            assert isinstance(value, Tensor)
            kernel = self.cp.attention_kernel
            return causal_attention(
                query, key, value, layout=layout, group=group, scale=scale, documents=documents, kernel=kernel
            )
        except ValueError as error:
            raise ValueError(f"Attention in {self.block}: {error}") from error

    def _attend_by_heads(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_that_a_recompute_would_come_here(has_gradient=True)
        self.cp.note_attention(self.block)
        attend = F.scaled_dot_product_attention
        return attend_by_heads(attend, query, *args, name=self.block, cp=self.cp, **kwargs)

    def _announce(self, keys_BLX: Tensor) -> Tensor:
        if choice_already_made() is not None:
            return keys_BLX  # of an indexer that chooses nothing by them
        try:
            self.announced.append(GatheredAhead(keys_BLX, 1, self.cp.layout, self.cp.group))
        except ValueError as error:
            raise ValueError(f"Attention in {self.block}: {error}") from error
        return self.announced[-1].local

    def _taken(self, keys_BLX: Tensor) -> GatheredAhead | None:
        """These keys, if they were announced."""
        ahead = next((ahead for ahead in self.announced if ahead.local is keys_BLX), None)
        if ahead is not None:
            self.announced.remove(ahead)
        return ahead

    def _attend_to_selected(
        self, query_BLHM: Tensor, latent_BLM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
    ) -> Tensor:
        self._check_that_a_recompute_would_come_here(has_gradient=True)
        self.cp.note_attention(self.block)
        layout, group = self.cp.layout, self.cp.group
        try:
            return attend_to_selected(
                query_BLHM,
                latent_BLM,
                key_ids_BLK,
                value_channels,
                scale,
                layout=layout,
                group=group,
                ahead=self._taken(latent_BLM),
                index=self.index if self.index is not None and self.index.key_ids_BLK is key_ids_BLK else None,
            )
        except ValueError as error:
            raise ValueError(f"Attention in {self.block}: {error}") from error

    def _select_keys(
        self,
        query_BLHN: Tensor,
        key_BLN: Tensor,
        weights_BLH: Tensor,
        query_positions_L: Tensor | None = None,
        *,
        top_k: int,
        first_keys_BL: Tensor | None = None,
    ) -> Tensor:
        if query_positions_L is not None or first_keys_BL is not None:
            raise self._refusal("select_keys with positions of its own", "Pass query_positions_L=None.")
        # Keys are selected without gradients anywhere.
        self._check_that_a_recompute_would_come_here(has_gradient=False)
        layout, group, key_ids_BLK = self.cp.layout, self.cp.group, choice_already_made()
        try:
            if key_ids_BLK is None:
                with torch.no_grad():
                    key_ids_BLK = select_keys_of_sequence(
                        query_BLHN,
                        key_BLN,
                        weights_BLH,
                        top_k,
                        layout=layout,
                        group=group,
                        documents=self._documents(),
                        ahead=self._taken(key_BLN),
                    )
            self.index = index_to_train(query_BLHN, key_BLN, weights_BLH, key_ids_BLK, self.cp)
        except ValueError as error:
            raise ValueError(f"Attention in {self.block}: {error}") from error
        return key_ids_BLK

    def _next_tokens(
        self, x_BL: Tensor, distance: int, fill: float, *, position_ids_BS: Tensor | None = None
    ) -> Tensor:
        self._check_that_a_recompute_would_come_here(has_gradient=True, what="next_tokens")
        sequence = self.cp.current
        # With positions it keeps documents apart in one process too. Where they start, the whole batch has told.
        documents = self._documents("next_tokens") if position_ids_BS is None else sequence.documents
        try:
            return next_tokens_of_sequence(
                x_BL, distance, fill, sequence=sequence, group=self.cp.group, documents=documents
            )
        except ValueError as error:
            raise ValueError(f"next_tokens in {self.block}: {error}") from error

    def _documents(self, reads: str = "causal attention") -> Documents:
        """What one call with ``is_causal=True`` does not do by itself."""
        documents = self.cp.current.documents
        if documents != ONE_DOCUMENT and not self.cp.separates_documents:
            if self.cp.degree == 1:
                return ONE_DOCUMENT  # as the module has it
            raise self._refusal(
                f"{reads} on a batch that marks packed documents, which reads across them",
                "Say ZigZagContextParallel(documents='separate') if the module keeps them apart in one process "
                "(verify_cp=True beside it checks that), or give one document per row.",
            )
        return documents

    def _check_that_a_recompute_would_come_here(self, *, has_gradient: bool, what: str = "attention") -> None:
        """A checkpoint inside the block would recompute its attention outside of this mode."""
        if self.cp.guard is None:
            return
        is_checkpoint = in_checkpointed_region() and saved_tensors_hook() is not self.hook_at_entry
        # A reentrant checkpoint sets no hook; it runs what it will recompute without gradients.
        if is_checkpoint or (has_gradient and torch.is_grad_enabled() != self.grad_at_entry):
            raise self._refusal(
                f"{what} inside a checkpoint (or no_grad) that starts within the block",
                "Checkpoint the whole block: checkpoint(block, x), not a part of its forward.",
            )

    def _refusal(self, what: str, remedy: str) -> ValueError:
        return ValueError(
            f"{self.block} uses {what}; cp={self.cp.degree} cannot split that along the sequence. {remedy} "
            "If the block mixes no tokens, name it in ZigZagContextParallel(token_wise_modules=[...])."
        )


def _width(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return weight.shape[-1]
