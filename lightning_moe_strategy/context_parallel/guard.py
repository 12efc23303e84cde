"""The check of a stage's first step: is every attention call taken over, are positions and labels read?

Under context parallel a plain attention call sees this rank's tokens only and returns a plausible wrong
result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_moe_strategy.context_parallel.token_mixing import (
    ORDERED,
    REMEDY,
    cuts_the_end,
    mixes_tokens,
    shifts_ids,
)
from lightning_moe_strategy.kernels.key_selection import select_keys
from lightning_moe_strategy.kernels.next_tokens import next_tokens
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention

TAKEN_OVER: Mapping[object, str] = {
    F.scaled_dot_product_attention: "F.scaled_dot_product_attention",
    select_keys: "select_keys",
    sparse_attention: "sparse_attention",
    next_tokens: "next_tokens",
}
"""What an adapted block rewrites, by function."""

OTHER_ATTENTION: Mapping[object, str] = {
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention",
    torch._native_multi_head_attention: "torch.nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "torch.nn.TransformerEncoderLayer",
    torch.ops.higher_order.flex_attention: "flex_attention",
}
"""Attention that cannot be taken over, by the function that torch calls for it."""


class FirstStepGuard(TorchFunctionMode):
    """Sees every torch function of one step."""

    def __init__(
        self,
        degree: int,
        position_ids_BL: Tensor,
        shift_labels_BL: Tensor | None,
        *,
        token_ids_BL: Tensor | None = None,
        num_dummies: int = 0,
    ) -> None:
        super().__init__()
        self.degree = degree
        self.position_ids_BL, self.shift_labels_BL = position_ids_BL, shift_labels_BL
        self.token_ids = [] if token_ids_BL is None else [token_ids_BL]
        num_rows, num_tokens = (position_ids_BL if token_ids_BL is None else token_ids_BL).shape[:2]
        self.shapes_BL = {(num_rows, num_tokens), (num_rows, num_tokens - num_dummies)}
        """Of tensors whose dim 1 are this rank's tokens, with the dummy at their end and without it."""
        self.position_ids_were_read = False
        self.shift_labels_were_read = False
        self.blocks_with_attention: set[str] = set()
        self.blocks_that_ran: set[str] = set()
        self.token_wise_depth = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = TAKEN_OVER.get(func) or OTHER_ATTENTION.get(func)
        if name and not self.token_wise_depth:
            raise RuntimeError(
                f"{name} was called outside of every adapted block. With cp={self.degree} it would see this "
                "rank's tokens only. Make the module that calls it an item of a ModuleList of blocks; if it mixes no "
                "tokens, name its block in ZigZagContextParallel(token_wise_modules=[...])."
            )
        mixing = None if self.token_wise_depth else mixes_tokens(ORDERED, self.shapes_BL, func, args, kwargs)
        if mixing:
            raise RuntimeError(
                f"{mixing} runs along the tokens of a tensor outside of every adapted block. With cp={self.degree} a "
                f"rank's tokens are not consecutive. {REMEDY}"
            )
        result = func(*args, **(kwargs or {}))
        self._watch_token_ids(func, args, kwargs, result)
        # A new tensor, or nothing was computed: FSDP asks every input for its dtype and device.
        if isinstance(result, Tensor):
            for argument in _tensors(args, kwargs):
                if argument is self.position_ids_BL and argument is not result:
                    self.position_ids_were_read = True
                if argument is self.shift_labels_BL and argument is not result:
                    self.shift_labels_were_read = True
        return result

    def _watch_token_ids(
        self, func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, result: Any
    ) -> None:
        """RuntimeError when token ids come to stand elsewhere. Cutting off the dummy at their end is no such move."""
        for ids_BL in self.token_ids:
            if not shifts_ids(ids_BL, func, args, kwargs, result):
                continue
            if tuple(result.shape) in self.shapes_BL and cuts_the_end(ids_BL, func, result):
                self.token_ids.append(result)
                return
            raise RuntimeError(
                "The token ids were moved along the sequence (an n-gram embedding, multi-token prediction?). With "
                f"cp={self.degree} a rank's tokens are not consecutive. {REMEDY}"
            )

    @contextmanager
    def token_wise_block(self) -> Iterator[None]:
        """Around a block that mixes no tokens: it may call any attention, over whatever is not the sequence."""
        self.token_wise_depth += 1
        try:
            yield
        finally:
            self.token_wise_depth -= 1

    def check(self, blocks: set[str], *, positions_required: bool) -> None:
        """RuntimeError for what a complete step must have done and this one has not."""
        silent = sorted(blocks - self.blocks_with_attention)
        if silent:
            raise RuntimeError(
                f"No attention call was taken over in {', '.join(silent)}. With cp={self.degree} whatever mixes "
                "tokens there sees this rank's only. Use F.scaled_dot_product_attention(is_causal=True) or a Hugging "
                "Face model; if these modules mix no tokens, say so: "
                f"ZigZagContextParallel(token_wise_modules={silent!r}); verify_cp=True beside it checks that."
            )
        if positions_required and not self.position_ids_were_read:
            raise RuntimeError(
                f"The step never read the position ids. With cp={self.degree} a rank's tokens are not consecutive, so "
                "positions counted from 0 are wrong. Pass batch['position_ids'] (or "
                "trainer.strategy.context_parallel.current.position_ids_BL) to the model; if it has no positions, say "
                "so: ZigZagContextParallel(positions='none'); verify_cp=True beside it checks that."
            )
        if self.shift_labels_BL is not None and not self.shift_labels_were_read:
            raise RuntimeError(
                "The labels were split for a model that shifts them inside its forward (shift='model'), but no "
                "Hugging Face loss read them. Pass labels= to the model, or say who shifts: "
                "ZigZagContextParallel(shift='module') for logits[:, :-1] against labels[:, 1:], 'none' for targets."
            )


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[Tensor]:
    for value in (*args, *(kwargs or {}).values()):
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Tensor):
                yield item
