"""Latent attention taken over where a module would expand its latents: what it hands on instead of keys and values.

Ours and Hugging Face's modules expand in a method of their own, which is replaced. Its result goes through the module's
hands into the attention call, which is taken over too and reads it.

Shapes: B batch, L tokens of this rank, S tokens of the whole sequence, H heads, X channels of a query or key head, V
channels of a value head, R rope channels, C latent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy.context_parallel.gather import gather_sequence
from lightning_moe_strategy.context_parallel.latent import attend_to_latents, gather_latents_ahead
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.softmax import causal_attention_on_gathered
from lightning_moe_strategy.context_parallel.visible import Documents


def adapt_latent_attention(
    module: nn.Module, expand: str, projection: str, cp: ContextParallel, *, has_window: bool = False
) -> None:
    """Let ``module`` hand on ``KeysOfSequence``. A second call only hands over the new ``cp``.

    ``expand`` names its method, of latents [B, (1,) L, C] and rope keys [B, 1, L, R]; ``projection`` the linear map in
    it, from C channels to those of all heads, each a key without position and a value. Latents travel from where
    ``expand`` is called to where the attention is: behind the queries of ours. Hugging Face's modules compute queries
    first and expand last, so that theirs are waited for at once. Nor do those travel ahead of which a window
    (``has_window``) needs the tails of segments only.
    """
    stand_in = module.__dict__.get(expand)
    if not isinstance(stand_in, _Expand):
        stand_in = module.__dict__[expand] = _Expand(getattr(module, expand), module, projection)
    stand_in.cp, stand_in.has_window = cp, has_window


class KeysOfSequence(ABC):
    """In place of a key and of a value: those of every token of the sequence, to be attended to once."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp

    @abstractmethod
    def attend(
        self,
        query_BHLX: Tensor,
        *,
        scale: float | None,
        documents: Documents,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """The attention's output [B, H, L, V]; options as ``causal_attention`` has them."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # That there is such a method makes torch pass the keys to a mode, as if they were a tensor.
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} was called on keys of latent attention, which with cp > 1 only "
            "F.scaled_dot_product_attention(is_causal=True) in the block that made them can read. Pass them there as "
            "they are, or choose cp=1."
        )


class _Latents(KeysOfSequence):
    """Of this rank, on their way to the others from now on; a few heads at a time are expanded for the attention."""

    def __init__(
        self, latent_BLC: Tensor, rope_key_BLR: Tensor, up_weight: Tensor, cp: ContextParallel, *, ahead: bool
    ) -> None:
        super().__init__(cp)
        self.latents = latent_BLC, rope_key_BLR, up_weight
        self.ahead = gather_latents_ahead(*self.latents[:2], layout=cp.layout, group=cp.group) if ahead else None

    def attend(self, query_BHLX: Tensor, **options: Any) -> Tensor:
        ahead, self.ahead = self.ahead, None
        options |= {"layout": self.cp.layout, "group": self.cp.group, "kernel": self.cp.attention_kernel}
        return attend_to_latents(query_BHLX, *self.latents, ahead=ahead, **options)


class _Expanded(KeysOfSequence):
    """Of all heads and the whole sequence."""

    def __init__(self, key_BHSX: Tensor, value_BHSV: Tensor, cp: ContextParallel) -> None:
        super().__init__(cp)
        self.expanded = key_BHSX, value_BHSV

    def attend(self, query_BHLX: Tensor, **options: Any) -> Tensor:
        options |= {"layout": self.cp.layout, "rank": self.cp.rank, "kernel": self.cp.attention_kernel}
        return causal_attention_on_gathered(query_BHLX, *self.expanded, **options)


class _Expand:
    """In place of a module's ``expand``.

    A projection that is more than its weight (a LoRA adapter, a bias, a hook) expands the gathered latents itself: as
    exact, but then keys and values of all heads are in memory for the whole sequence, ``H * (X + V)`` channels a token,
    and autograd keeps them.
    """

    cp: ContextParallel
    has_window: bool

    def __init__(self, expand: Callable[..., tuple[Tensor, Tensor]], module: nn.Module, projection: str) -> None:
        self.expand, self.module, self.projection = expand, module, projection

    def __call__(
        self, latent: Tensor, rope_key_B1LR: Tensor
    ) -> tuple[KeysOfSequence, KeysOfSequence] | tuple[Tensor, Tensor]:
        if self.cp.is_off:
            return self.expand(latent, rope_key_B1LR)
        projection = getattr(self.module, self.projection)
        keys: KeysOfSequence
        if is_its_weight(projection):
            latent_BLC = latent.flatten(1, -2)
            ahead = not self.has_window and not torch.compiler.is_compiling()
            keys = _Latents(latent_BLC, rope_key_B1LR[:, 0], projection.weight, self.cp, ahead=ahead)
        else:
            layout, group = self.cp.layout, self.cp.group
            latent_S = gather_sequence(latent, latent.dim() - 2, layout, group)
            keys = _Expanded(*self.expand(latent_S, gather_sequence(rope_key_B1LR, 2, layout, group)), self.cp)
        return keys, keys


def is_its_weight(projection: nn.Module) -> bool:
    """Whether calling ``projection`` multiplies by its ``weight`` and does nothing else."""
    is_linear = type(projection).forward is nn.Linear.forward and "forward" not in projection.__dict__
    has_hooks = projection._forward_pre_hooks or projection._forward_hooks or projection._backward_hooks
    # One that is made of other parameters (weight norm) is no parameter itself.
    weight = projection._parameters.get("weight")
    return is_linear and not has_hooks and weight is not None and getattr(projection, "bias", None) is None
