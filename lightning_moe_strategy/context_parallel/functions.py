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
from lightning_moe_strategy.context_parallel.guard import OTHER_ATTENTION
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.softmax import causal_attention
from lightning_moe_strategy.context_parallel.sparse import attend_to_selected, select_keys_of_sequence
from lightning_moe_strategy.context_parallel.unexpanded import KeysOfSequence, adapt_latent_attention
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.kernels.key_selection import select_keys
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention
from lightning_moe_strategy.models.attention import MultiHeadLatentAttention

_WRAPPER = "_context_parallel_forward"


def adapt_block(block: nn.Module, name: str, cp: ContextParallel) -> None:
    """Let ``block`` attend over the whole sequence. A second call only hands over the new ``name`` and ``cp``."""
    wrapper = block.__dict__.get(_WRAPPER)
    if wrapper is None:
        wrapper = block.__dict__[_WRAPPER] = block.__dict__["forward"] = _BlockForward(block.forward)
    wrapper.name, wrapper.cp = name, cp
    for module in block.modules():
        if isinstance(module, MultiHeadLatentAttention):
            adapt_latent_attention(module, "expand", "kv_up_proj", cp)


class _BlockForward:
    """A block's forward, inside the mode that takes over its attention."""

    name: str
    cp: ContextParallel

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.cp.is_token_wise(self.name):
            with _AttentionMode(self.name, self.cp):
                return self.forward(*args, **kwargs)
        if self.cp.guard is None:
            return self.forward(*args, **kwargs)
        with self.cp.guard.token_wise_block():
            return self.forward(*args, **kwargs)


class _AttentionMode(TorchFunctionMode):
    """Rewrites causal self-attention and refuses what cannot be split along the sequence, naming the block."""

    def __init__(self, block: str, cp: ContextParallel) -> None:
        super().__init__()
        self.block, self.cp = block, cp
        if cp.guard is not None:
            self.hook_at_entry, self.grad_at_entry = saved_tensors_hook(), torch.is_grad_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is sparse_attention:
            return self._attend_to_selected(*args, **(kwargs or {}))
        if func is select_keys:
            return self._select_keys(*args, **(kwargs or {}))
        if func in OTHER_ATTENTION:
            raise self._refusal(OTHER_ATTENTION[func], "Call F.scaled_dot_product_attention(is_causal=True).")
        if func is F.conv1d and _width(*args, **(kwargs or {})) > 1:
            raise self._refusal("a convolution over tokens", "Choose cp=1 for this model.")
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
        if attn_mask is not None:
            raise self._refusal("attn_mask", "Pass is_causal=True and no mask.")
        if dropout_p > 0.0:
            raise self._refusal(f"dropout_p({dropout_p}) > 0", "Set the attention dropout to 0.")
        if not is_causal:
            raise self._refusal("is_causal=False", "Pass is_causal=True: queries may see earlier tokens only.")
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
            return causal_attention(query, key, value, layout=layout, group=group, scale=scale, documents=documents)
        except ValueError as error:
            raise ValueError(f"Attention in {self.block}: {error}") from error

    def _attend_to_selected(
        self, query_BLHM: Tensor, latent_BLM: Tensor, key_ids_BLK: Tensor, value_channels: int, scale: float
    ) -> Tensor:
        self._check_that_a_recompute_would_come_here(has_gradient=True)
        self.cp.note_attention(self.block)
        layout, group = self.cp.layout, self.cp.group
        try:
            return attend_to_selected(
                query_BLHM, latent_BLM, key_ids_BLK, value_channels, scale, layout=layout, group=group
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
        layout, group = self.cp.layout, self.cp.group
        try:
            return select_keys_of_sequence(
                query_BLHN, key_BLN, weights_BLH, top_k, layout=layout, group=group, documents=self._documents()
            )
        except ValueError as error:
            raise ValueError(f"Attention in {self.block}: {error}") from error

    def _documents(self) -> Documents:
        """What one call with ``is_causal=True`` does not do by itself."""
        documents = self.cp.current.documents
        if documents != ONE_DOCUMENT and not self.cp.separates_documents:
            raise self._refusal(
                "causal attention on a batch that marks packed documents, which attends across them",
                "Say ZigZagContextParallel(documents='separate') if the module keeps them apart in one process, or "
                "give one document per row.",
            )
        return documents

    def _check_that_a_recompute_would_come_here(self, *, has_gradient: bool) -> None:
        """A checkpoint inside the block would recompute its attention outside of this mode."""
        if self.cp.guard is None:
            return
        is_checkpoint = in_checkpointed_region() and saved_tensors_hook() is not self.hook_at_entry
        # A reentrant checkpoint sets no hook; it runs what it will recompute without gradients.
        if is_checkpoint or (has_gradient and torch.is_grad_enabled() != self.grad_at_entry):
            raise self._refusal(
                "attention inside a checkpoint (or no_grad) that starts within the block",
                "Checkpoint the whole block: checkpoint(block, x), not a part of its forward.",
            )

    def _refusal(self, what: str, remedy: str) -> ValueError:
        return ValueError(
            f"{self.block} uses {what}; cp={self.cp.degree} cannot split that along the sequence. {remedy} "
            "If the block mixes no tokens, name it in ZigZagContextParallel(token_wise_modules=[...])."
        )


def _width(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return weight.shape[-1]
