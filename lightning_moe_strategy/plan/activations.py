"""Bytes per token of one layer: what a backward pass keeps, and what it adds while it runs.

Counted from the package's own modules on bf16 activations, each tensor once and by its name there. H heads, Q and V
channels of all query and value heads, W the wider of a query and a value head, D hidden, I expert width, E experts,
K experts per token, S tokens of the whole sequences of a cp group.
"""

import math

from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.model import ModelShape, shared_parameters
from lightning_moe_strategy.plan.workload import BF16, FP32, INT32, INT64, Workload

NORM = FP32 + BF16 + BF16
"""Per channel of an RMSNorm: its FP32 input, the normalised value, and the output that the next product reads."""

NORM_ALONE = FP32 + BF16
"""The same where nothing that reads the output keeps it: queries and keys (rotated), a latent (gathered), the tokens
of experts on other ranks (sent)."""

NORM_BACKWARD = 6 * FP32
"""Per channel, its FP32 input and five products of its backward: each is a tensor in an RMSNorm that is not fused."""

PROBABILITY_HEADS = 128
"""Heads the sparse MLA kernel before FlashAttention pull request 2816 pads to: 128 * 2048 * 2 B = 0.52 MB/token, the
seed's 0.5 MB that the forward (P) and the backward (dS) each spend."""

SWIGLU_BACKWARD = 7 * FP32
"""Per number of an expert's width, the FP32 temporaries of kernels/swiglu.py: gate and up, sigmoid, silu, their
product, the gradient, and one more for the next result."""

SWIGLU_FORWARD = 3 * FP32
"""The same in the forward: gate and up, and the silu that becomes the result."""

SWIGLU_BLOCK_NUMBERS = 2**24
"""Numbers that have these temporaries at the same time on a GPU."""

EXPANDED_BYTES = 2**30
"""Of the keys and values that dense MLA expands at a time under cp (context_parallel/latent.py)."""

GDN_CHUNK = 64
"""Tokens between two states that a gated delta-net kernel writes down for its backward."""


def kept_by_attention(workload: Workload, side: DenseSide) -> float:
    """Norm and attention of one layer, gathered keys and values apart; the kind of layer that keeps most."""
    shape = workload.model
    kinds = [_kept_by_softmax(workload, side)] if shape.softmax_layers else []
    kinds += [_kept_by_linear_attention(shape)] if shape.linear_layers else []
    return NORM * shape.hidden + max(kinds)


def _kept_by_softmax(workload: Workload, side: DenseSide) -> float:
    shape = workload.model
    queries, values = shape.heads * shape.qk_head_dim, shape.heads * shape.value_head_dim
    # Query and log-sum-exp, and the output once more as the output projection reads it.
    common = BF16 * queries + FP32 * shape.heads + BF16 * values
    if shape.attention == "gqa":
        keys = shape.kv_heads * shape.head_dim
        normed = NORM_ALONE * (queries + keys) if shape.qk_norm else 0
        return common + normed + BF16 * values + (0 if _keeps_gathered_kv(workload, side) else 2 * BF16 * keys)
    # Behind the latent's norm stands, without cp, the expansion; with it the gather.
    common += (NORM_ALONE if side.cp > 1 else NORM) * shape.kv_lora
    common += 0 if shape.q_lora is None else NORM * shape.q_lora
    own_latent = 0 if _keeps_gathered_kv(workload, side) else latent_bytes(shape)
    if not shape.is_sparse:
        return common + BF16 * values + (own_latent if side.cp > 1 else 0)
    absorbed = shape.heads * (shape.kv_lora + shape.rope_head_dim)
    probabilities = 0 if workload.fa4_pr_2816 else probability_bytes(shape)
    return common + own_latent + BF16 * (absorbed + shape.heads * shape.kv_lora) + probabilities


def _keeps_gathered_kv(workload: Workload, side: DenseSide) -> bool:
    """A recomputed layer keeps the gathered keys and values in place of this rank's (context_parallel/softmax.py)."""
    return side.cp > 1 and workload.recompute != "none"


def _kept_by_linear_attention(shape: ModelShape) -> float:
    keys = shape.linear_key_heads * shape.linear_key_dim
    values = shape.linear_value_heads * shape.linear_value_dim
    # Projections with the output gate, convolution, normalised keys and queries, the gated norm of the output.
    activations = BF16 * (2 * keys + 2 * values) + BF16 * (2 * keys + values) + BF16 * 2 * keys + NORM * values
    states = BF16 * shape.linear_value_heads * shape.linear_key_dim * shape.linear_value_dim / GDN_CHUNK
    return activations + states


def added_by_attention_backward(workload: Workload, side: DenseSide) -> float:
    """Gradients of the attention's output and query, beside ``kept_by_attention``, which has let go of one output."""
    shape = workload.model
    if shape.is_sparse:
        # Of the absorbed query and of the latents' average, which has no room to take: it is wider than the output.
        width = shape.heads * (2 * shape.kv_lora + shape.rope_head_dim - shape.v_head_dim)
        return BF16 * width + _score_gradient(workload, side)
    queries = shape.heads * shape.qk_head_dim
    if side.cp == 1:
        return BF16 * queries
    if shape.attention == "gqa":
        # Of the later of a zig-zag's two segments, the sum over its pieces in FP32 and one piece's gradient in bf16; of
        # both, the gradients apart and joined.
        return (FP32 + BF16) / 2 * queries + 2 * BF16 * queries
    return _own_bytes_of_heads(shape, *_expanded_heads(workload, side))


def _expanded_heads(workload: Workload, side: DenseSide) -> tuple[int, int]:
    """Dense MLA under cp: heads that are expanded together, and how many have run before, when that takes most."""
    shape, whole = workload.model, workload.tokens_per_cp_group
    per_token = BF16 * (shape.nope_head_dim + shape.v_head_dim + shape.rope_head_dim)
    num_groups = math.ceil(shape.heads / max(1, EXPANDED_BYTES // (whole * per_token)))
    size = math.ceil(shape.heads / num_groups)
    # As even as they come: only the last group may be smaller, and then more has run before it.
    before = range(0, shape.heads, size)
    groups = [(min(size, shape.heads - done), done) for done in before]
    return max(
        groups,
        key=lambda group: _own_bytes_of_heads(shape, *group) + side.cp * group[0] * _kv_bytes_of_head(shape, side),
    )


def _own_bytes_of_heads(shape: ModelShape, running: int, done: int) -> float:
    """Of an own token: of the heads that run, output and its gradient widened, and in the later segment the sum of the
    query's gradient, one piece of it, the gradients of its own queries, keys and values, and of its queries from the
    keys before; of heads that have run, the gradient of the query."""
    widened = BF16 * max(shape.qk_head_dim, shape.v_head_dim)
    per_head = (FP32 + BF16) / 2 * shape.qk_head_dim + (2 + 4 / 2) * widened
    return running * per_head + done * BF16 * shape.qk_head_dim


def _kv_bytes_of_head(shape: ModelShape, side: DenseSide) -> float:
    """Of a token of the whole sequences: keys and values, values widened to the keys, their gradients in FP32, and
    those of the keys before the last segment in bf16 as the kernel returns them."""
    width_qk, width_v = shape.qk_head_dim, shape.v_head_dim
    width = max(width_qk, width_v)
    widened = width if width != width_v else 0
    return BF16 * (width_qk + width_v + widened) + FP32 * (width_qk + width_v) + _returned_by_kernel(width, side)


def _returned_by_kernel(width: int, side: DenseSide) -> float:
    return 2 * BF16 * width * (1 - 1 / (2 * side.cp))


def probability_bytes(shape: ModelShape) -> float:
    """P, or dS, of one token's sparse attention: what FlashAttention pull request 2816 saves twice."""
    return max(shape.heads, PROBABILITY_HEADS) * shape.index_top_k * BF16


def _score_gradient(workload: Workload, side: DenseSide) -> float:
    """dS of sparse attention, per own token: of all of them before the pull request, with it of a chunk of one
    sequence's (kernels/sparse_flash_attention.py), or of none (our own kernel)."""
    shape, tokens = workload.model, workload.tokens_per_gpu(side)
    if not workload.fa4_pr_2816:
        return probability_bytes(shape)
    if workload.fa4_token_chunk is None:
        return 0.0
    of_sequence = tokens / workload.micro_batch
    chunk = min(workload.fa4_token_chunk or of_sequence, of_sequence)
    return BF16 * shape.heads * shape.index_top_k * chunk / tokens


def attention_output(shape: ModelShape) -> float:
    """What ``selective`` recompute keeps of a softmax layer beside its input: the output as the kernel returns it, in
    sparse attention of latents, and the log-sum-exp."""
    return (BF16 * (shape.kv_lora if shape.is_sparse else shape.value_head_dim) + FP32) * shape.heads


def kept_beside_experts(shape: ModelShape) -> float:
    """Norm and router of one layer."""
    # The router's FP32 input; scores, chosen ids and three steps of their weights.
    router = FP32 * shape.hidden + FP32 * shape.num_experts + (INT64 + 3 * FP32) * shape.top_k
    return NORM_ALONE * shape.hidden + router


def running_forward(workload: Workload) -> float:
    """A layer while its experts run forward: the residual stream, the normalised tokens, the router's logits."""
    shape = workload.model
    # A block with sparse attention holds that attention's output as well.
    streams = 2 + shape.is_sparse
    if workload.recompute == "none":
        # The block's input is not among what is kept; the normalised tokens are, where shared experts read them.
        streams += 1 - (shape.shared_intermediate > 0)
    return streams * BF16 * shape.hidden + FP32 * shape.num_experts


def kept_by_shared_experts(shape: ModelShape) -> float:
    """Shared experts of one layer, with the input that they alone keep."""
    if not shape.shared_intermediate:
        return 0.0
    return BF16 * shape.hidden + 4 * BF16 * shape.shared_intermediate


def runs_shared_experts_ahead(workload: Workload, side: ExpertSide, tokens: int) -> bool:
    """Whether they run while tokens travel (expert_parallel/shared_expert.py): where a block calls them after the
    others, and not first, as those with a gate do."""
    shape = workload.model
    is_after = shape.shared_intermediate > 0 and not shape.shared_gate
    return is_after and side.ep > 1 and workload.num_chunks(side, tokens) == 1


def early_result(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """What shared experts that run ahead have made of a GPU's tokens, while the others run forward."""
    return tokens * BF16 * workload.model.hidden * runs_shared_experts_ahead(workload, side, tokens)


def of_early_run(workload: Workload, side: ExpertSide, tokens: int) -> dict[str, float]:
    """While experts run backward, what there is more of shared experts that ran ahead of them than of some that ran
    after: what they keep, and no gradient yet of their input and weights."""
    shape = workload.model
    if not runs_shared_experts_ahead(workload, side, tokens):
        return {}
    kept = kept_by_shared_experts(shape) if workload.recompute != "none" else 0.0
    return {
        "recompute_backward": tokens * (kept - BF16 * shape.hidden),
        "dense_units": -BF16 * shared_parameters(shape),
    }


def kept_by_moe(shape: ModelShape) -> float:
    """Norm, router and shared experts of one layer, rows apart."""
    return kept_beside_experts(shape) + kept_by_shared_experts(shape)


def routing_kept(shape: ModelShape) -> float:
    """What a recompute takes from the first pass (recompute.py): all logits, scores and ids of the chosen experts."""
    return FP32 * shape.num_experts + (FP32 + INT64) * shape.top_k


def kept_by_dense_mlp(shape: ModelShape) -> float:
    """Norm and plain MLP of one of the leading layers."""
    return NORM * shape.hidden + 4 * BF16 * shape.intermediate


def received_row(shape: ModelShape) -> float:
    """One row at its expert: the hidden state and its probability. Kept for the weight gradient."""
    return BF16 * shape.hidden + FP32


def kept_by_expert_row(shape: ModelShape) -> float:
    """The product of gate and up projection of one row, and where the row came from and goes back to."""
    return 2 * BF16 * shape.moe_intermediate + 5 * INT32


def added_by_expert_row(shape: ModelShape) -> float:
    """One row in the experts' backward: gradients of the output, of the activation and of gate and up, and the
    activation again."""
    return BF16 * (shape.hidden + 4 * shape.moe_intermediate)


def forward_rows(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """Rows of one layer in its forward: the largest of its activation, its last product, and results on their way."""
    shape, num_chunks = workload.model, workload.num_chunks(side, tokens)
    rows = math.ceil(tokens / num_chunks) * workload.expert_rows_per_token(side)
    computed, returned = _computed_and_returned(workload, side, tokens)
    return rows * received_row(shape) + max(computed, returned)


def forward_results(workload: Workload, side: ExpertSide, tokens: int) -> float:
    """Results of a layer's tokens in its forward, where its peak is in their sums over ranks."""
    computed, returned = _computed_and_returned(workload, side, tokens)
    is_sum = side.ep > 1 and workload.num_chunks(side, tokens) == 1 and returned > computed
    return tokens * BF16 * workload.model.hidden * is_sum


def _computed_and_returned(workload: Workload, side: ExpertSide, tokens: int) -> tuple[float, float]:
    """Beside the rows as they arrived: at the most while they are computed, and when their results are sent back."""
    shape, num_chunks = workload.model, workload.num_chunks(side, tokens)
    tokens = math.ceil(tokens / num_chunks)
    rows, width = tokens * workload.expert_rows_per_token(side), shape.moe_intermediate
    # A block of the activation's temporaries, and the next one's gate and up before they are let go.
    numbers, block = rows * width, SWIGLU_BLOCK_NUMBERS
    temporaries = SWIGLU_FORWARD * min(numbers, block) + 2 * FP32 * max(0, min(numbers - block, block))
    computed = BF16 * numbers + max(temporaries, BF16 * shape.hidden * rows)
    if workload.recompute != "none" or num_chunks > 1:
        computed += rows * kept_by_expert_row(shape)  # else it is counted among what is kept
    # Results as computed; their sums by token; and those of this rank's tokens as they arrive.
    copies = workload.received_copies_per_token(side) + workload.sent_copies_per_token(side)
    if workload.dispatcher == "symm_mem":
        copies = 0  # they are summed into its buffers
    return computed, BF16 * shape.hidden * (rows if side.ep == 1 else rows + tokens * copies)


def swiglu_temporaries(shape: ModelShape, rows: float) -> float:
    """FP32 temporaries of the activation's backward, of that many rows."""
    return SWIGLU_BACKWARD * min(rows * shape.moe_intermediate, SWIGLU_BLOCK_NUMBERS)


def exchange_buffers(workload: Workload, experts: ExpertSide) -> float:
    """Buffers of the dispatcher that all layers share, per token of a rank.

    all_to_all and all_gather: none, copies arrive in tensors of their own. symm_mem: two, so that a rank may send
    before another has read, each with room for one exchange (expert_parallel/one_sided_way.py): copies with the
    probabilities of their tokens, or, for each rank that a token goes to, a result with gradients of its probabilities.
    A number of chunks makes room for a copy of every rank's tokens; adaptive ones bring about what even routing does.
    """
    if workload.dispatcher != "symm_mem" or experts.ep == 1:
        return 0.0
    shape, chunks = workload.model, workload.ep_chunks
    copies = experts.ep if isinstance(chunks, int) else workload.received_copies_per_token(experts)
    if chunks == "adaptive":
        copies = workload.sent_copies_per_token(experts)
    share = 1 / chunks if isinstance(chunks, int) else 1.0
    return 2 * share * max(copies, min(shape.top_k, experts.ep)) * (BF16 * shape.hidden + FP32 * shape.top_k)


def gathered_kv_bytes(shape: ModelShape) -> float:
    """What is gathered of one token in the widest layer, bf16. Seed, "What If There's No NVL72?": 1408 B."""
    return latent_bytes(shape) + (BF16 * shape.index_head_dim if shape.indexer_layers else 0)


def latent_bytes(shape: ModelShape) -> float:
    """What carries a gradient of one gathered token: keys and values, or the latent that determines them."""
    if shape.attention == "mla":
        return BF16 * (shape.kv_lora + shape.rope_head_dim)
    return 2 * BF16 * shape.kv_heads * shape.head_dim if shape.softmax_layers else 0.0


def held_kv_bytes(workload: Workload, side: DenseSide) -> float:
    """Of one token of the whole sequences, what a layer holds from its recompute on.

    Under cp the gathered keys and values, or latents; without, what every head expands from a latent. The sparse
    kernels read the latent itself.
    """
    shape = workload.model
    if side.cp > 1:
        return latent_bytes(shape)
    return 0.0 if shape.attention == "gqa" or shape.is_sparse else _expanded_bytes(shape)


def held_kv_of_a_kept_layer(workload: Workload, side: DenseSide) -> float:
    """Of that, what a layer without recompute keeps; what is gathered is gathered again."""
    return 0.0 if side.cp > 1 else held_kv_bytes(workload, side)


def _expanded_bytes(shape: ModelShape) -> float:
    """The expansion's result, whose values are read in place, and the keys with their rope part."""
    return BF16 * shape.heads * (shape.nope_head_dim + shape.v_head_dim + shape.qk_head_dim)


def kv_gradient_bytes(workload: Workload, side: DenseSide) -> float:
    """Of one token of the whole sequences, what the attention's backward adds to ``held_kv_bytes``."""
    shape = workload.model
    if shape.is_sparse:
        # FP32, and once more in the order of the ranks for the reduce-scatter.
        return latent_bytes(shape) * FP32 / BF16 * (2 if side.cp > 1 else 1)
    heads = shape.kv_heads if shape.attention == "gqa" else shape.heads
    width_qk, width_v = shape.qk_head_dim, shape.value_head_dim
    if side.cp == 1:
        return BF16 * heads * (width_qk + width_v)
    if shape.attention == "gqa":
        # Summed in FP32; those of the keys before the last segment, in bf16 as the kernel returns them.
        return heads * (FP32 * (width_qk + width_v) + _returned_by_kernel(width_qk, side))
    # The latents' own gradient in FP32.
    running, _ = _expanded_heads(workload, side)
    return running * _kv_bytes_of_head(shape, side) + latent_bytes(shape) * FP32 / BF16
