"""Bytes of one GPU by bucket, at each moment that can be the peak.

Buckets that never coexist are never added: the peak is the largest of the moments. Weights are FP32 and sharded,
gathered in bf16 unit by unit (FSDP2 keeps no bf16 copy resident: 16 bytes per parameter, the seed counts 18).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_moe_strategy.plan import activations as act
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.workload import BF16, FP32, Workload

Buckets = Mapping[str, float]
Moments = Mapping[str, Buckets]

MOMENTS = ("head and loss", "last layer's experts", "last layer's attention", "first layer's experts", "optimizer")
"""In the order of a step: the loss, then the backward from the last layer to the first, then the update."""

RESIDENT = ("masters", "optimizer_state", "gradients", "optimizer_temporaries")
TRANSIENT = ("expert_units", "dense_units", "reduce_scatter_input")
"""Bytes of the gathered weights and their gradients (seed: BF16 current and prefetched layer, FP32 gradient)."""

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits are FP32 at the same time (models/loss.py)."""

RESERVE_BYTES, RESERVE_SHARE = 2e9, 0.03
"""CUDA context and the channels of about six NCCL communicators; what a caching allocator cannot hand out."""

ADAMW_STATE = 2 * FP32
MUON_STATE = FP32
"""Bytes per parameter: two moments, or Muon's momentum for matrices inside the layers."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with the most bytes."""

    moment: str
    buckets: Buckets

    @property
    def total(self) -> float:
        """All that coexists then."""
        return sum(self.buckets.values())


def dense_moments(workload: Workload, side: DenseSide) -> Moments:
    """All that follows from the dense mesh: dense parameters, saved inputs, attention, head."""
    counts = workload.model.counts
    local = counts.dense / side.shards
    outer = (counts.embedding + counts.head) / side.shards
    adamw = outer if workload.optimizer == "muon" else local
    always = {
        "masters": FP32 * local,
        "optimizer_state": ADAMW_STATE * adamw + MUON_STATE * (local - adamw),
    }
    saved = saved_between_passes(workload, side)
    one_layer = {name: size / workload.model.layers for name, size in saved.items()}
    gathered = workload.model.dense_layer_parameters
    head = counts.head or counts.embedding
    units = {"dense_units": 3 * BF16 * gathered}
    return {
        "head and loss": {**always, **saved, "head_and_logits": head_bytes(workload, side)},
        "last layer's experts": {
            **always,
            **saved,
            **units,
            "gradients": FP32 * counts.head / side.shards,
            # FSDP2 holds the last unit's FP32 gradients until the next unit's are reduced: here the head's.
            "reduce_scatter_input": FP32 * max(head, gathered),
            **_layer_bytes(workload, side, with_attention_backward=False),
        },
        "last layer's attention": {
            **always,
            **saved,
            **units,
            "gradients": FP32 * counts.head / side.shards,
            **_layer_bytes(workload, side, with_attention_backward=True),
        },
        "first layer's experts": {
            **always,
            **one_layer,
            **units,
            "gradients": FP32 * local,
            "reduce_scatter_input": FP32 * gathered,
            **_layer_bytes(workload, side, with_attention_backward=False),
        },
        "optimizer": {**always, "gradients": FP32 * local, "optimizer_temporaries": FP32 * adamw},
    }


def expert_moments(workload: Workload, side: ExpertSide, tokens: int) -> Moments:
    """All that follows from the expert mesh, for ``tokens`` per GPU: experts and the rows they compute."""
    shape = workload.model
    local = shape.counts.experts / side.shards
    is_adamw = workload.optimizer == "adamw"
    always = {
        "masters": FP32 * local,
        "optimizer_state": (ADAMW_STATE if is_adamw else MUON_STATE) * local,
        "ep_buffers": tokens * act.exchange_buffers(workload, side),
    }
    gathered = shape.expert_layer_parameters / side.ep
    rows = expert_row_bytes(workload, side, tokens)
    working = {
        **always,
        # The current weights, the prefetched ones and the bf16 gradient.
        "expert_units": 3 * BF16 * gathered,
        "ep_buffers": always["ep_buffers"] + rows["ep_buffers"],
        "expert_rows": rows["expert_rows"],
    }
    kept = saved_expert_rows(workload, side, tokens)
    return {
        "head and loss": {**always, "saved_activations": kept},
        "last layer's experts": {**working, "saved_activations": kept},
        "last layer's attention": {
            **always,
            "saved_activations": kept,
            "expert_units": BF16 * gathered,
            "reduce_scatter_input": FP32 * gathered,
            "gradients": FP32 * local / shape.moe_layers,
        },
        "first layer's experts": {**working, "gradients": FP32 * local},
        "optimizer": {**always, "gradients": FP32 * local, "optimizer_temporaries": FP32 * local * is_adamw},
    }


def saved_between_passes(workload: Workload, side: DenseSide) -> dict[str, float]:
    """What every layer keeps from its forward to its backward, all layers together, expert rows apart.

    Seed, "Deriving the Scheme": block inputs 0.958 MB/token, DSA top-k 0.172 MB/token for GLM-5.2.
    """
    shape, tokens = workload.model, workload.tokens_per_gpu(side)
    saved: dict[str, float] = {
        "block_inputs": tokens * BF16 * shape.hidden * shape.layers,
        "dsa_topk": tokens * shape.indexer_layers * shape.index_top_k * 4,
        "router_state": tokens * (act.INDEX_BYTES + act.SCORE_BYTES) * shape.top_k * shape.moe_layers,
    }
    if workload.recompute == "selective":
        saved["saved_activations"] = tokens * act.attention_output(shape) * shape.layers
    elif workload.recompute == "none":
        per_layer = act.kept_by_attention(workload) + _kept_kv(workload, side)
        mlps = act.kept_beside_experts(shape) * shape.moe_layers
        mlps += act.kept_by_dense_mlp(shape) * shape.dense_first_layers
        saved["saved_activations"] = tokens * (per_layer * shape.layers + mlps)
    return saved


def saved_expert_rows(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """Rows that every layer keeps for its backward without recompute; none with it."""
    if workload.recompute != "none":
        return 0.0
    shape = workload.model
    per_row = act.received_row(shape) + act.kept_by_expert_row(shape)
    return tokens * workload.expert_rows_per_token(side) * per_row * shape.moe_layers


def expert_row_bytes(workload: Workload, side: ExpertSide, tokens: int) -> dict[str, float]:
    """Rows of one layer during the experts' backward: as they arrived, and what computing with them takes.

    The seed provides for 13312 B from every ep rank's every token; that the rows then pass through the GEMMs is
    the larger part in the worst case.
    """
    shape = workload.model
    rows = tokens * workload.expert_rows_per_token(side)
    is_kept = workload.recompute == "none"
    return {
        "ep_buffers": 0.0 if is_kept else rows * act.received_row(shape),
        "expert_rows": rows * (act.added_by_expert_row(shape) + (0 if is_kept else act.kept_by_expert_row(shape))),
    }


def head_bytes(workload: Workload, side: DenseSide) -> float:
    """The head as a unit of its own with the logits of all tokens, or with its FP32 gradient: whichever is more."""
    shape = workload.model
    tokens, weights = workload.tokens_per_gpu(side), shape.vocab_size * shape.hidden
    logits = 2 * BF16 * tokens * shape.vocab_size + 2 * FP32 * min(tokens, LOSS_CHUNK_TOKENS) * shape.vocab_size
    return 2 * BF16 * weights + max(logits, FP32 * weights) + tokens * act.NORM * shape.hidden


def _layer_bytes(workload: Workload, side: DenseSide, *, with_attention_backward: bool) -> dict[str, float]:
    """The layer whose backward runs: what its recompute made, and the gathered keys and values."""
    shape, tokens = workload.model, workload.tokens_per_gpu(side)
    is_kept = workload.recompute == "none"
    attention = 0.0 if is_kept else act.kept_by_attention(workload)
    beside = 0.0 if is_kept else max(act.kept_beside_experts(shape), act.kept_by_dense_mlp(shape))
    # Gradients of the residual stream and of the branch.
    gradients = 2 * BF16 * shape.hidden
    if with_attention_backward:
        layer = attention + act.added_by_attention_backward(workload) + gradients
    else:
        layer = attention + beside + gradients
    gathered = gathered_kv(workload, side, with_gradient=with_attention_backward)
    return {"recompute_backward": tokens * layer, "gathered_kv": gathered}


def gathered_kv(workload: Workload, side: DenseSide, *, with_gradient: bool) -> float:
    """Keys and values (or latents) of the whole sequences of the cp group, on every GPU of it.

    With its gradient: FP32, and once more in the order of the ranks for the reduce-scatter.
    """
    shape, tokens = workload.model, workload.tokens_per_cp_group
    held = act.gathered_kv_bytes(shape) if side.cp > 1 else 0.0
    expanded = act.expanded_kv_bytes(shape)
    if not with_gradient:
        return tokens * (held + expanded)
    in_fp32 = FP32 / BF16
    latent = act.latent_bytes(shape) * in_fp32 * (2 if side.cp > 1 else 1)
    return tokens * (held + expanded + latent + expanded * in_fp32)


def _kept_kv(workload: Workload, side: DenseSide) -> float:
    """Expanded keys and values that a layer keeps per own token when it is not recomputed."""
    return act.expanded_kv_bytes(workload.model) * side.cp


def least_gpus(parameters: float, bytes_per_parameter: float, memory_bytes: float) -> int:
    """GPUs whose memory holds the resident state alone. Seed: 18 TB of a trillion parameters need 90 of 200 GB."""
    return math.ceil(parameters * bytes_per_parameter / memory_bytes)


def reserve(total: float) -> float:
    """Bytes a GPU needs beside the tensors."""
    return RESERVE_BYTES + RESERVE_SHARE * total


def combine(dense: Moments, experts: Moments, *, with_reserve: bool) -> Peak:
    """The peak of both meshes together."""
    moment = max(dense, key=lambda name: sum(dense[name].values()) + sum(experts[name].values()))
    buckets: dict[str, float] = {}
    for part in (dense[moment], experts[moment]):
        for name, size in part.items():
            buckets[name] = buckets.get(name, 0.0) + size
    if with_reserve:
        buckets["allocator_reserve"] = reserve(sum(buckets.values()))
    return Peak(moment=moment, buckets={name: size for name, size in buckets.items() if size})
