"""Bytes per token of one layer: what a backward pass keeps, and what it adds while it runs.

The counts follow the package's own modules on bf16 activations, each tensor once. Kernels are taken to keep their
temporaries in registers; an unfused RMSNorm keeps its FP32 input.
"""

from lightning_moe_strategy.plan.layout import ExpertSide
from lightning_moe_strategy.plan.model import ModelShape
from lightning_moe_strategy.plan.workload import BF16, FP32, Workload

NORM = FP32 + BF16 + BF16
"""Per channel of an RMSNorm: its FP32 input, the normalised value, the output."""

PROBABILITY_HEADS = 128
"""Heads the sparse MLA kernel before FlashAttention pull request 2816 pads to: 128 * 2048 * 2 B = 0.52 MB/token, the
seed's 0.5 MB that the forward (P) and the backward (dS) each spend."""

INDEX_BYTES, SCORE_BYTES = 8, 4
"""Of one routed expert id (int64) and its probability."""

GDN_CHUNK = 64
"""Tokens between two states that a gated delta-net kernel writes down for its backward."""


def kept_by_attention(workload: Workload) -> float:
    """Norm and attention of one layer, gathered keys and values apart; the kind of layer that keeps most."""
    shape = workload.model
    kinds = [_kept_by_softmax(workload)] if shape.softmax_layers else []
    kinds += [_kept_by_linear_attention(shape)] if shape.linear_layers else []
    return NORM * shape.hidden + max(kinds)


def _kept_by_softmax(workload: Workload) -> float:
    shape = workload.model
    queries, values = shape.heads * shape.qk_head_dim, shape.heads * shape.value_head_dim
    lse = FP32 * shape.heads
    if shape.attention == "gqa":
        keys = shape.kv_heads * shape.head_dim
        normed = (FP32 + BF16) * (queries + keys) if shape.qk_norm else 0
        # The attention's output is kept as the kernel wrote it and as the output projection reads it.
        return normed + BF16 * (queries + 2 * keys) + 2 * BF16 * values + lse
    query_latent = 0 if shape.q_lora is None else (BF16 + NORM) * shape.q_lora
    latent = BF16 * (shape.kv_lora + shape.rope_head_dim) + NORM * shape.kv_lora
    projected = query_latent + latent + BF16 * queries + lse
    if not shape.is_sparse:
        return projected + BF16 * queries + 2 * BF16 * values
    absorbed = shape.heads * (shape.kv_lora + shape.rope_head_dim)
    probabilities = 0 if workload.fa4_pr_2816 else probability_bytes(shape)
    return projected + BF16 * (absorbed + shape.heads * shape.kv_lora + values) + probabilities


def _kept_by_linear_attention(shape: ModelShape) -> float:
    keys = shape.linear_key_heads * shape.linear_key_dim
    values = shape.linear_value_heads * shape.linear_value_dim
    # Projections with the output gate, convolution, normalised keys and queries, the gated norm of the output.
    activations = BF16 * (2 * keys + 2 * values) + BF16 * (2 * keys + values) + BF16 * 2 * keys + NORM * values
    states = BF16 * shape.linear_value_heads * shape.linear_key_dim * shape.linear_value_dim / GDN_CHUNK
    return activations + states


def added_by_attention_backward(workload: Workload) -> float:
    """Gradients of the attention's output and query, beside what ``kept_by_attention`` counts."""
    shape = workload.model
    if shape.is_sparse:
        width = shape.heads * (2 * shape.kv_lora + shape.rope_head_dim)
        return BF16 * width + (0 if workload.fa4_pr_2816 else probability_bytes(shape))
    # The query's gradient is accumulated in FP32 over the pieces of a zig-zag.
    queries, values = shape.heads * shape.qk_head_dim, shape.heads * shape.value_head_dim
    return BF16 * values + (FP32 + BF16) * queries


def probability_bytes(shape: ModelShape) -> float:
    """P, or dS, of one token's sparse attention: what FlashAttention pull request 2816 saves twice."""
    return max(shape.heads, PROBABILITY_HEADS) * shape.index_top_k * BF16


def attention_output(shape: ModelShape) -> float:
    """What ``selective`` recompute keeps of a layer beside its input."""
    return (BF16 * shape.value_head_dim + FP32) * shape.heads


def kept_beside_experts(shape: ModelShape) -> float:
    """Norm, router and shared experts of one layer."""
    router = FP32 * shape.hidden + 2 * FP32 * shape.num_experts + 3 * FP32 * shape.top_k
    shared = 4 * BF16 * shape.shared_intermediate + (BF16 * shape.hidden if shape.shared_intermediate else 0)
    return NORM * shape.hidden + router + shared + BF16 * shape.hidden


def kept_by_dense_mlp(shape: ModelShape) -> float:
    """Norm and plain MLP of one of the leading layers."""
    return NORM * shape.hidden + 4 * BF16 * shape.intermediate


def received_row(shape: ModelShape) -> float:
    """One row at its expert: the hidden state and its probability. Kept for the weight gradient."""
    return BF16 * shape.hidden + FP32


def kept_by_expert_row(shape: ModelShape) -> float:
    """The product of gate and up projection of one row."""
    return 2 * BF16 * shape.moe_intermediate


def added_by_expert_row(shape: ModelShape) -> float:
    """One row at the peak of the experts' backward: gradients of the output, of the activation and of gate and up,
    the activation again, the gradient of the row."""
    return BF16 * (2 * shape.hidden + 4 * shape.moe_intermediate)


def exchange_buffers(workload: Workload, experts: ExpertSide) -> float:
    """Static buffers of the dispatcher, per token of a rank.

    all_to_all: none, rows arrive in tensors of their own. all_gather: every rank's tokens in bf16 and their FP32
    gradient. symm_mem: room for one copy of every rank's tokens with the (expert, probability) pairs, twice, so
    that a layer may send before the last one has read.
    """
    shape = workload.model
    if workload.dispatcher == "all_gather":
        return experts.ep * (BF16 + FP32) * shape.hidden
    if workload.dispatcher == "symm_mem":
        return 2 * experts.ep * (BF16 * shape.hidden + 2 * FP32 * shape.top_k)
    return 0.0


def gathered_kv_bytes(shape: ModelShape) -> float:
    """What is gathered of one token in the widest layer, bf16. Seed, "What If There's No NVL72?": 1408 B."""
    return latent_bytes(shape) + (BF16 * shape.index_head_dim if shape.indexer_layers else 0)


def latent_bytes(shape: ModelShape) -> float:
    """What carries a gradient of one gathered token: keys and values, or the latent that determines them."""
    if shape.attention == "mla":
        return BF16 * (shape.kv_lora + shape.rope_head_dim)
    return 2 * BF16 * shape.kv_heads * shape.head_dim if shape.softmax_layers else 0.0


def expanded_kv_bytes(shape: ModelShape) -> float:
    """Keys and values that every head expands from one gathered latent; the sparse kernels read the latent itself."""
    if shape.attention == "gqa" or shape.is_sparse:
        return 0.0
    return BF16 * shape.heads * (shape.qk_head_dim + shape.v_head_dim)
