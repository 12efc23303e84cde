"""Sparse attention (DSA) of unchanged Hugging Face models over a sequence that is spread over the cp ranks.

The stock indexer scores every key against every query at once, and the stock attention expands keys and values of all
tokens. Here the indexer's own projections run, and its keys are picked by ``select_keys``; the attention reads the
gathered latents in absorbed form. What is gathered is what DSA needs: latent, rope key and, where a layer has an
indexer, its key.

Shapes: B batch, L tokens of this rank, H heads, N and V channels of a head without position and of a value, R rope
channels, C latent, M = C + R, K keys per query; I heads of the indexer, J channels of each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.context_parallel.sparse import attend_to_selected, select_keys_of_sequence

_WRAPPER = "_context_parallel_forward"


@cache
def no_mask(device: torch.device) -> Tensor:
    """What such a model gets for its mask, which it slices and hands to its indexer: causality is told by positions."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def is_sparse_attention(module: nn.Module) -> bool:
    """Whether ``module`` attends to chosen latents."""
    is_latent = callable(getattr(module, "expand_kv", None))
    return is_latent and getattr(getattr(module, "config", None), "index_topk", None) is not None


def adapt_sparse_attention(module: nn.Module, where: str, cp: ContextParallel) -> None:
    """Let one attention module read gathered latents. May be called again.

    Raises:
        ValueError: its value projection is not a plain one, whose weight the absorbed form needs.
    """
    if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.bias is not None:
        raise ValueError(
            f"{where}.kv_b_proj is {type(module.kv_b_proj).__name__}; sparse attention with cp > 1 needs a plain "
            "Linear without bias there. Leave that projection out of adapters, or choose cp=1."
        )
    module.__dict__["expand_kv"] = _keep_latents
    indexer = getattr(module, "indexer", None)
    if isinstance(indexer, nn.Module):
        wrapper = indexer.__dict__.get(_WRAPPER)
        if wrapper is None:
            wrapper = indexer.__dict__[_WRAPPER] = indexer.__dict__["forward"] = _SelectingForward(indexer.forward)
        wrapper.set_place(where, int(indexer.index_topk), cp)


def attend_sparsely(
    module: Any, query_BHLX: Tensor, latent_B1LM: Tensor, key_ids_BLK: Tensor, scale: float, cp: ContextParallel
) -> Tensor:
    """The attention's output [B, L, H, V] from local queries and latents."""
    nope, values, channels = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
    up_HXC = module.kv_b_proj.weight.view(-1, nope + values, channels)
    up_key_HNC, up_value_HVC = torch.split(up_HXC, [nope, values], dim=1)
    query_BLHN, rope_BLHR = torch.split(query_BHLX.transpose(1, 2), [nope, module.qk_rope_head_dim], dim=-1)
    query_BLHM = torch.cat([torch.einsum("blhn,hnc->blhc", query_BLHN, up_key_HNC), rope_BLHR], dim=-1)
    attended_BLHC = attend_to_selected(
        query_BLHM, latent_B1LM[:, 0], key_ids_BLK, channels, scale, layout=cp.layout, group=cp.group
    )
    return torch.einsum("blhc,hvc->blhv", attended_BLHC, up_value_HVC)


def _keep_latents(latent_B1LC: Tensor, rope_key_B1LR: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``: one key of one head, of which the latent is the value."""
    return torch.cat([latent_B1LC, rope_key_B1LR], dim=-1), latent_B1LC


class _SelectingForward:
    """The indexer's forward: its projections, norms and rotations as they are, its choice by ``select_keys``."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward

    def set_place(self, where: str, top_k: int, cp: ContextParallel) -> None:
        self.where, self.top_k, self.cp = where, top_k, cp

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _Products() as products:
            self.forward(hidden_states, *args, **kwargs)
        if len(products.factors) != 2:
            raise RuntimeError(
                f"{self.where}.indexer multiplied {len(products.factors)} times, and one that scores keys by head and "
                "sums over heads does so twice. cp > 1 cannot follow it: choose cp=1."
            )
        (query_BLIJ, key_B1JL), (weights_BL1I, _) = products.factors
        key_BLJ = key_B1JL[:, 0].transpose(1, 2).to(hidden_states.dtype)  # as it was before it was scored in FP32
        weights_BLI = weights_BL1I[:, :, 0]
        with torch.no_grad():
            return select_keys_of_sequence(
                query_BLIJ,
                key_BLJ,
                weights_BLI,
                self.top_k,
                layout=self.cp.layout,
                group=self.cp.group,
                documents=self.cp.current.documents,
            )


class _Products(TorchFunctionMode):
    """Keeps the factors of matrix products and computes none: scores of no keys at all have no cost."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.matmul:
            return func(*args, **(kwargs or {}))
        left, right = args
        self.factors.append((left, right))
        return left.new_empty((*left.shape[:-1], 0))
