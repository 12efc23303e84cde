"""Bytes of one GPU by bucket, at each moment that can be the peak.

Buckets that never coexist are never added: the peak is the largest of the moments. Weights are FP32 and sharded,
gathered in bf16 unit by unit (FSDP2 keeps no bf16 copy resident: 16 bytes per parameter, the seed counts 18).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_moe_strategy.plan import activations as act
from lightning_moe_strategy.plan import backward
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.redundancy import with_moved_weights
from lightning_moe_strategy.plan.weights import Buckets, DenseWeights, ExpertWeights
from lightning_moe_strategy.plan.workload import BF16, FP32, INT32, Workload

Moments = Mapping[str, Buckets]

MOMENTS = (
    "experts in the forward",
    "head in the forward",
    "head and loss",
    "last layer's experts",
    "last layer's expert gradients",
    "last layer's MLP norm",
    "last layer's attention",
    "experts before the last",
    "experts after the first",
    "first layer's experts",
    "first layer's expert gradients",
    "second layer's MLP norm",
    "second layer's attention",
    "first layer's MLP norm",
    "first layer's attention",
    "embedding's gradient",
    "embedding reduced",
    "optimizer",
)
"""In the order of a step: the forward, through which the gradients of the step before are kept; the loss; the backward
from the last layer to the first; the update. Experts in the forward are those before the last layer's. The first
layer's experts are those of the first layer that has some. Between the last and the first, experts hold the FP32
gradients of the block after them as well as the prefetched weights of the experts before."""

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
    shape, counts = workload.model, workload.model.counts
    # An indexer's choice has no gradient: its weights are frozen.
    trained = counts.dense - counts.indexer
    local = trained / side.shards
    adamw = (counts.embedding + counts.head) / side.shards if workload.optimizer == "muon" else local
    always = {
        "masters": FP32 * counts.dense / side.shards,
        "optimizer_state": ADAMW_STATE * adamw + MUON_STATE * (local - adamw),
    }
    weights = DenseWeights(shape=shape, side=side)
    first, last = shape.dense_first_layers, shape.layers - 1
    before_last, after_first, second = max(first, last - 1), min(first + 1, last), min(1, last)

    def at(layer: int) -> dict[str, float]:
        """Inputs of this layer and those before it, gradients of those after it."""
        below = sum(weights.trained(index) for index in range(-1, layer + 1))
        gradients = counts.head if layer == last else trained - below
        return {
            **always,
            **saved_between_passes(workload, side, layer + 1),
            "gradients": FP32 * gradients / side.shards,
        }

    experts = backward.during_experts(workload, side)
    reduced = backward.during_expert_reduction(workload, side)
    saved = saved_between_passes(workload, side)
    every = {**always, "gradients": FP32 * local}
    before_embedding = {**always, "gradients": FP32 * (trained - counts.embedding) / side.shards}
    return {
        "experts in the forward": {
            **every,
            **saved_between_passes(workload, side, before_last + 1),
            "dense_units": weights.in_forward(before_last),
            "recompute_backward": workload.tokens_per_gpu(side) * act.running_forward(workload),
        },
        "head in the forward": {
            **every,
            **saved,
            "head_and_logits": weights.head_in_forward() + head_activations(workload, side),
        },
        "head and loss": {**always, **saved, "head_and_logits": head_bytes(workload, side)},
        "last layer's experts": {**at(last), **weights.during_experts(last), **experts},
        "last layer's expert gradients": {**at(last), **weights.during_expert_reduction(last), **reduced},
        "last layer's MLP norm": backward.during_norm(at(last), weights, workload, last),
        "last layer's attention": backward.during_attention(at(last), weights, workload, last),
        "experts before the last": {**at(before_last), **weights.during_experts(before_last), **experts},
        "experts after the first": {**at(after_first), **weights.during_experts(after_first), **experts},
        "first layer's experts": {**at(first), **weights.during_experts(first), **experts},
        "first layer's expert gradients": {**at(first), **weights.during_expert_reduction(first), **reduced},
        # The first layer's weights are on their way then; during the first layer's own backward none are.
        "second layer's MLP norm": backward.during_norm(at(second), weights, workload, second),
        "second layer's attention": backward.during_attention(at(second), weights, workload, second),
        "first layer's MLP norm": backward.during_norm(at(0), weights, workload, 0),
        "first layer's attention": backward.during_attention(at(0), weights, workload, 0),
        "embedding's gradient": {
            **before_embedding,
            **weights.before_embedding(),
            "recompute_backward": BF16 * shape.hidden * workload.tokens_per_gpu(side),
        },
        "embedding reduced": {**every, **weights.during_embedding()},
        "optimizer": {**every, "optimizer_temporaries": FP32 * adamw},
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
    weights = ExpertWeights(shape=shape, side=side)
    is_only = shape.moe_layers == 1
    kept, one_layer = saved_expert_rows(workload, side, tokens), 1 / shape.moe_layers
    # A reduction over one rank leaves its input as the gradient; over more, the gradient comes after the peak.
    reduced = one_layer if side.e_fsdp == 1 else 0.0

    def at(*, layers: float, gradients: float) -> dict[str, float]:
        """Rows of this share of the layers, gradients of that share."""
        return {**always, "saved_activations": kept * layers, "gradients": FP32 * local * gradients}

    last = at(layers=1 - one_layer, gradients=one_layer) | {"expert_units": weights.gathered_ahead(is_first=is_only)}
    first = second = at(layers=0, gradients=1)
    if shape.dense_first_layers == 0 and not is_only:
        # The experts of the layer before it are to come.
        second = at(layers=one_layer, gradients=1 - one_layer)
        second |= {"expert_units": weights.gathered_ahead(is_first=False)}
    return {
        "experts in the forward": {
            **at(layers=max(one_layer, 1 - one_layer), gradients=1),
            **_experts_in_forward(workload, weights, tokens, is_last=is_only),
            "recompute_backward": _results_of_chunks(workload, side, tokens)
            + act.forward_results(workload, side, tokens)
            + act.early_result(workload, side, tokens),
        },
        "head in the forward": at(layers=1, gradients=1),
        "head and loss": at(layers=1, gradients=0),
        "last layer's experts": {
            **at(layers=1, gradients=0),
            **_working_experts(workload, weights, tokens, is_first=is_only),
        },
        "last layer's expert gradients": {
            **at(layers=1 - one_layer, gradients=reduced),
            **weights.during_reduction(is_first=is_only),
        },
        "last layer's MLP norm": last,
        "last layer's attention": last,
        "experts before the last": {
            **at(layers=max(one_layer, 1 - one_layer), gradients=0 if is_only else one_layer),
            **_working_experts(workload, weights, tokens, is_first=shape.moe_layers <= 2),
        },
        "experts after the first": {
            **at(layers=min(1, 2 * one_layer), gradients=max(0, 1 - 2 * one_layer)),
            **_working_experts(workload, weights, tokens, is_first=is_only),
        },
        "first layer's experts": {
            **at(layers=one_layer, gradients=1 - one_layer),
            **_working_experts(workload, weights, tokens, is_first=True),
        },
        "first layer's expert gradients": {
            **at(layers=0, gradients=1 - one_layer + reduced),
            **weights.during_reduction(is_first=True),
        },
        "second layer's MLP norm": second,
        "second layer's attention": second,
        "first layer's MLP norm": first,
        "first layer's attention": first,
        "embedding's gradient": first,
        "embedding reduced": first,
        "optimizer": {**first, "optimizer_temporaries": FP32 * local * is_adamw},
    }


def saved_between_passes(workload: Workload, side: DenseSide, num_layers: int | None = None) -> dict[str, float]:
    """What the first ``num_layers`` layers (all by default) keep from forward to backward, expert rows apart.

    Seed, "Deriving the Scheme": block inputs 0.958 MB/token, DSA top-k 0.172 MB/token for all layers of GLM-5.2.
    """
    shape, tokens = workload.model, workload.tokens_per_gpu(side)
    layers = shape.layers if num_layers is None else num_layers
    # Which layers own an indexer is not known here: the ones without experts, and an even share.
    share = math.ceil(shape.indexer_layers * layers / shape.layers)
    indexers = min(layers, shape.indexer_layers, max(shape.dense_first_layers, share))
    with_experts = max(0, layers - shape.dense_first_layers)
    saved: dict[str, float] = {
        "block_inputs": tokens * BF16 * shape.hidden * layers,
        "dsa_topk": tokens * indexers * shape.index_top_k * INT32,
        "router_state": tokens * act.routing_kept(shape) * with_experts,
    }
    if workload.recompute == "none":
        # The norm's FP32 input stands in for the block's.
        per_layer = act.kept_by_attention(workload, side) + act.held_kv_of_a_kept_layer(workload, side)
        mlps = act.kept_by_moe(shape) * with_experts
        mlps += act.kept_by_dense_mlp(shape) * (layers - with_experts)
        kept = {"block_inputs": 0.0, "router_state": 0.0, "saved_activations": tokens * (per_layer * layers + mlps)}
        return saved | kept
    if workload.recompute == "selective":
        # Which layers are linear, whose attention is computed again, is not known here: an even share.
        softmax_layers = math.ceil(shape.softmax_layers * layers / shape.layers)
        saved["saved_activations"] = tokens * act.attention_output(shape) * softmax_layers
    return saved


def saved_expert_rows(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """Rows that every layer keeps for its backward without recompute. In chunks, the tokens alone.

    With recompute: which slot each row is of, where copies of tokens come from other ranks.
    """
    shape = workload.model
    if workload.recompute != "none":
        rows = 0.0 if workload.moves_experts(side) else tokens * workload.expert_rows_per_token(side)
        return rows * INT32 * shape.moe_layers if side.ep > 1 else 0.0
    if workload.num_chunks(side, tokens) > 1:
        # Where there are shared experts, these keep them.
        return 0.0 if shape.shared_intermediate else tokens * BF16 * shape.hidden * shape.moe_layers
    rows = tokens * workload.expert_rows_per_token(side)
    per_layer = _kept_rows(workload, side, tokens) + rows * act.kept_by_expert_row(shape)
    return per_layer * shape.moe_layers


def _results_of_chunks(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """Of all chunks of a layer together, in its forward. Without recompute the normalised tokens are kept instead of
    held, where no shared experts keep them as well: as many."""
    shape = workload.model
    is_held = workload.recompute != "none" or shape.shared_intermediate > 0
    return tokens * BF16 * shape.hidden * (is_held and workload.num_chunks(side, tokens) > 1)


def expert_row_bytes(workload: Workload, side: ExpertSide, tokens: int) -> dict[str, float]:
    """Rows of one layer during the experts' backward: as they arrived, and what computing with them takes.

    The seed provides for 13312 B from every ep rank's every token; that the rows then pass through the GEMMs is
    the larger part in the worst case.
    """
    shape, num_chunks = workload.model, workload.num_chunks(side, tokens)
    tokens = math.ceil(tokens / num_chunks)
    rows = tokens * workload.expert_rows_per_token(side)
    computed = rows * act.added_by_expert_row(shape) + act.swiglu_temporaries(shape, rows)
    if workload.recompute == "none" and num_chunks == 1:
        return {"ep_buffers": 0.0, "expert_rows": computed}
    return {
        "ep_buffers": _kept_rows(workload, side, tokens),
        "expert_rows": computed + rows * act.kept_by_expert_row(shape),
    }


def head_bytes(workload: Workload, side: DenseSide) -> float:
    """The larger of the logits of all tokens with their gradient, and the head's gradient in bf16 and FP32."""
    shape = workload.model
    tokens, weights = workload.tokens_per_gpu(side), shape.vocab_size * shape.hidden
    # FP32 of one chunk: the logits, their difference to the log-sum-exp, and the result of the chunk before.
    chunk = 3 * FP32 * min(tokens, LOSS_CHUNK_TOKENS) * shape.vocab_size
    logits = BF16 * weights + 2 * BF16 * tokens * shape.vocab_size + chunk
    gradient = (BF16 + FP32) * weights + BF16 * tokens * shape.hidden
    return max(logits, gradient) + tokens * act.NORM * shape.hidden


def head_activations(workload: Workload, side: DenseSide) -> float:
    """The last block's output, its norm, and the logits."""
    shape = workload.model
    return workload.tokens_per_gpu(side) * ((BF16 + act.NORM) * shape.hidden + BF16 * shape.vocab_size)


def _kept_rows(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """Rows as they were gathered from copies of tokens, or these copies, where a backward pass is far."""
    shape, rows = workload.model, tokens * workload.expert_rows_per_token(side)
    if side.ep == 1:
        return tokens * (BF16 * shape.hidden + FP32 * shape.top_k)
    if workload.keeps_copies(side, tokens):
        return tokens * workload.received_copies_per_token(side) * BF16 * shape.hidden + rows * FP32
    return rows * act.received_row(shape)


def _working_experts(workload: Workload, weights: ExpertWeights, tokens: int, *, is_first: bool) -> dict[str, float]:
    """The experts' backward: the larger of its activation's temporaries, and its last product with all gradients."""
    shape, side = workload.model, weights.side
    num_chunks = workload.num_chunks(side, tokens)
    rows = math.ceil(tokens / num_chunks) * workload.expert_rows_per_token(side)
    buckets = expert_row_bytes(workload, side, tokens)
    units = weights.during_experts(is_first=is_first)
    activation = act.swiglu_temporaries(shape, rows)
    product = rows * BF16 * shape.hidden  # the rows' gradients
    if product + weights.gradients > activation:
        units += weights.gradients
        buckets["expert_rows"] += product - activation
    buckets["ep_buffers"] += tokens * act.exchange_buffers(workload, side)
    if num_chunks > 1:
        # What chunks share: sums of the weights' gradients, the tokens (saved without recompute) and their gradients;
        # and the results of this one.
        units += FP32 * weights.parameters
        of_tokens = (2 if workload.recompute != "none" else 1) + 1 / num_chunks
        buckets["recompute_backward"] = tokens * (of_tokens * BF16 * shape.hidden + FP32 * shape.top_k)
    gathered = weights.during_experts(is_first=is_first)
    buckets |= act.of_early_run(workload, side, tokens)
    buckets["expert_units"] = units
    return with_moved_weights(workload, side, tokens, buckets, gathered=gathered, backward=True)


def _experts_in_forward(workload: Workload, weights: ExpertWeights, tokens: int, *, is_last: bool) -> dict[str, float]:
    gathered, rows = weights.in_forward(is_last=is_last), act.forward_rows(workload, weights.side, tokens)
    buckets = {"expert_units": gathered, "expert_rows": rows}
    return with_moved_weights(workload, weights.side, tokens, buckets, gathered=gathered, backward=False)


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
