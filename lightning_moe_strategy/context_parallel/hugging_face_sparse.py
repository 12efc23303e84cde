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

from lightning_moe_strategy.context_parallel.ahead import GatheredAhead
from lightning_moe_strategy.context_parallel.compiled import refuse_in_graph
from lightning_moe_strategy.context_parallel.indexer_loss import Index, index_to_train
from lightning_moe_strategy.context_parallel.indexers import choice_already_made
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
    keep = module.__dict__.get("expand_kv")
    if not isinstance(keep, _KeepLatents):
        has_indexer = getattr(module, "indexer", None) is not None
        keep = module.__dict__["expand_kv"] = _KeepLatents(module.expand_kv, has_indexer=has_indexer)
    keep.cp = cp
    indexer = getattr(module, "indexer", None)
    if isinstance(indexer, nn.Module):
        wrapper = indexer.__dict__.get(_WRAPPER)
        if wrapper is None:
            wrapper = indexer.__dict__[_WRAPPER] = indexer.__dict__["forward"] = _SelectingForward(indexer.forward)
        wrapper.set_place(where, int(indexer.index_topk), cp, keep)


def attend_sparsely(
    module: Any, query_BHLX: Tensor, latent_B1LM: Tensor, key_ids_BLK: Tensor, scale: float, cp: ContextParallel
) -> Tensor:
    """The attention's output [B, L, H, V] from local queries and latents."""
    nope, values, channels = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
    up_HXC = module.kv_b_proj.weight.view(-1, nope + values, channels)
    up_key_HNC, up_value_HVC = torch.split(up_HXC, [nope, values], dim=1)
    query_BLHN, rope_BLHR = torch.split(query_BHLX.transpose(1, 2), [nope, module.qk_rope_head_dim], dim=-1)
    query_BLHM = torch.cat([torch.einsum("blhn,hnc->blhc", query_BLHN, up_key_HNC), rope_BLHR], dim=-1)
    refuse_in_graph(type(module).__name__)
    ahead = module.expand_kv.taken(latent_B1LM)
    latent_BLM = latent_B1LM[:, 0] if ahead is None else ahead.local
    attended_BLHC = attend_to_selected(
        query_BLHM,
        latent_BLM,
        key_ids_BLK,
        channels,
        scale,
        layout=cp.layout,
        group=cp.group,
        ahead=ahead,
        index=_index_of(module, key_ids_BLK),
    )
    return torch.einsum("blhc,hvc->blhv", attended_BLHC, up_value_HVC)


def _index_of(module: nn.Module, key_ids_BLK: Tensor) -> Index | None:
    """What the module's own indexer chose these very keys by, if that is to be trained."""
    wrapper: _SelectingForward | None = getattr(getattr(module, "indexer", None), _WRAPPER, None)
    if wrapper is None:
        return None
    index, wrapper.index = wrapper.index, None
    return index if index is not None and index.key_ids_BLK is key_ids_BLK else None


class _KeepLatents:
    """In place of ``expand_kv``: one key of one head, of which the latent is the value."""

    cp: ContextParallel

    def __init__(self, expand: Callable[..., tuple[Tensor, Tensor]], *, has_indexer: bool) -> None:
        self.expand, self.has_indexer = expand, has_indexer
        self._key_B1LM: Tensor | None = None
        self._ahead: GatheredAhead | None = None

    def __call__(self, latent_B1LC: Tensor, rope_key_B1LR: Tensor) -> tuple[Tensor, Tensor]:
        if self.cp.is_off:
            return self.expand(latent_B1LC, rope_key_B1LR)
        self._key_B1LM, self._ahead = torch.cat([latent_B1LC, rope_key_B1LR], dim=-1), None
        if not self.has_indexer:
            self.send()
        return self._key_B1LM, latent_B1LC

    def send(self) -> None:
        """Start the gather: where a layer selects, behind the index keys, which are read first."""
        assert self._key_B1LM is not None, "expand_kv comes before the indexer"
        if self.cp.degree == 1:
            return
        self._ahead = GatheredAhead(self._key_B1LM[:, 0], 1, self.cp.layout, self.cp.group)

    def taken(self, key_B1LM: Tensor) -> GatheredAhead | None:
        """The gather of this key. None if nobody started it: a recompute, which does not select again."""
        (kept, self._key_B1LM), (ahead, self._ahead) = (self._key_B1LM, None), (self._ahead, None)
        return ahead if kept is key_B1LM else None


class _SelectingForward:
    """The indexer's forward: its projections, norms and rotations as they are, its choice by ``select_keys``."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward
        self.index: Index | None = None
        """What the last keys were chosen by, until the attention to them has come."""

    def set_place(self, where: str, top_k: int, cp: ContextParallel, latents: _KeepLatents) -> None:
        self.where, self.top_k, self.cp, self.latents = where, top_k, cp, latents

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.cp.is_off:
            return self.forward(hidden_states, *args, **kwargs)
        has_loss = self.cp.indexer_loss is not None
        with _Products(with_graph=has_loss and torch.is_grad_enabled()) as products:
            # Detached: the loss trains the indexer and not what it reads.
            inputs = (x.detach() if isinstance(x, Tensor) else x for x in (hidden_states, *args))
            self.forward(*inputs, **kwargs)
        if len(products.factors) != 2:
            raise RuntimeError(
                f"{self.where}.indexer multiplied {len(products.factors)} times, and one that scores keys by head and "
                "sums over heads does so twice. cp > 1 cannot follow it: choose cp=1."
            )
        (query_BLIJ, key_B1JL), (weights_BL1I, score_of_one_BLI1) = products.factors
        key_BLJ = key_B1JL[:, 0].transpose(1, 2).to(hidden_states.dtype)  # as it was before it was scored in FP32
        weights_BLI = weights_BL1I[:, :, 0]
        key_ids_BLK = choice_already_made()
        if key_ids_BLK is None:
            key_ids_BLK = self._select(query_BLIJ, key_BLJ, weights_BLI)
        if has_loss:
            query_BLIJ, weights_BLI = query_BLIJ.to(hidden_states.dtype), weights_BLI * score_of_one_BLI1[..., 0]
            self.index = index_to_train(query_BLIJ, key_BLJ, weights_BLI, key_ids_BLK, self.cp)
        return key_ids_BLK

    def _select(self, query_BLIJ: Tensor, key_BLJ: Tensor, weights_BLI: Tensor) -> Tensor:
        layout, group = self.cp.layout, self.cp.group
        ahead = GatheredAhead(key_BLJ.detach(), 1, layout, group) if self.cp.degree > 1 else None
        self.latents.send()
        with torch.no_grad():
            return select_keys_of_sequence(
                query_BLIJ,
                key_BLJ,
                weights_BLI,
                self.top_k,
                layout=layout,
                group=group,
                documents=self.cp.current.documents,
                ahead=ahead,
            )


class _Products(TorchFunctionMode):
    """Keeps the factors of matrix products and computes none.

    The first products, of queries and keys, are taken to be those of one key, and 1: what the indexer makes of them
    before it sums over heads is the scale of its scores. Of no keys at all are the sums, which cost nothing.
    """

    def __init__(self, *, with_graph: bool) -> None:
        super().__init__()
        self.with_graph = with_graph
        """Whether the factors lead back to the indexer's parameters, whose own forward says no_grad."""
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.matmul:
            with torch.set_grad_enabled(self.with_graph):
                return func(*args, **(kwargs or {}))
        left, right = args
        self.factors.append((left, right))
        return left.new_ones((*left.shape[:-1], 1 if len(self.factors) == 1 else 0))
