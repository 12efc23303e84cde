"""Seconds per layer and per step of one GPU, from FLOPs and bytes. Compute and prefetched traffic overlap fully.

The mean layer is taken for compute: layers with another MLP or another attention differ by little of the whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_moe_strategy.plan.activations import runs_shared_experts_ahead
from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.model import ModelShape, shared_parameters
from lightning_moe_strategy.plan.traffic import Transfer
from lightning_moe_strategy.plan.workload import Workload

ATTENTION_BACKWARD = 2.5
"""Of the forward: five products for two, in any kernel that recomputes its scores."""

# The seed's profile has attention take 2 times the linear layers' time at 256k tokens and 4 times at 1M. GLM-5.2's
# sparse attention costs the same at both, its indexer four times as much at 1M; these two rates, as shares of the
# linear layers', give both points.
SPARSE_ATTENTION_RATE = 0.24
INDEXER_RATE = 0.11


@dataclass(frozen=True, kw_only=True)
class LayerCompute:
    """FLOPs of the mean layer per token, forward, and how often a step runs them."""

    linear: float
    attention: float
    attention_rate: float
    """FLOP/s of the attention's kernel, as a share of the linear layers'."""
    indexer: float
    """Forward only: no gradient, and a saved top-k is not computed again."""
    routed: float
    """Of ``linear``, the routed experts'."""
    recomputes_linear: bool
    recomputes_attention: bool
    repeats_experts: bool
    """In chunks, whose forward runs once more in their backward pass."""
    spared: float = 0.0
    """Of ``linear``, what a recompute that keeps the attention's output leaves out: keys and values expanded in it."""

    @property
    def linear_step(self) -> float:
        """Linear FLOPs of a step: forward, backward twice, recompute. Seed: 4 GFLOP/token for GLM-5.2."""
        return self.linear * (3 + self.recomputes_linear) - self.spared + self.routed * self.repeats_experts

    @property
    def attention_ratio(self) -> float:
        """Time of the attention over that of the linear layers. Seed: 2 at 256k, 4 at 1M."""
        passes = 1 + ATTENTION_BACKWARD + self.recomputes_attention
        equivalent = self.attention * passes / self.attention_rate + self.indexer / INDEXER_RATE
        return equivalent / self.linear_step

    @property
    def model_flops(self) -> float:
        """FLOPs of a step that a model needs, recompute left out: what MFU counts."""
        return 3 * self.linear + (1 + ATTENTION_BACKWARD) * self.attention + self.indexer

    def forward_seconds(self, achieved: float) -> float:
        """Of one token."""
        attention = self.attention / self.attention_rate + self.indexer / INDEXER_RATE
        return (self.linear + attention) / achieved

    def backward_seconds(self, achieved: float) -> float:
        """Of one token, recompute included."""
        linear = self.linear * (2 + self.recomputes_linear) - self.spared + self.routed * self.repeats_experts
        attention = self.attention * (ATTENTION_BACKWARD + self.recomputes_attention) / self.attention_rate
        return (linear + attention) / achieved


def layer_compute(workload: Workload, side: DenseSide) -> LayerCompute:
    """FLOPs of the mean layer."""
    shape = workload.model
    return LayerCompute(
        linear=2 * (shape.active_layer_parameters + _repeated_parameters(shape, side)),
        attention=_attention_flops(shape, workload.context),
        attention_rate=SPARSE_ATTENTION_RATE if shape.is_sparse else 1.0,
        indexer=_indexer_flops(shape, workload.context),
        routed=2 * shape.counts.experts * shape.top_k / shape.num_experts / shape.layers,
        recomputes_linear=workload.recompute != "none",
        recomputes_attention=workload.recompute == "block",
        repeats_experts=workload.chunks_even_routing,
        spared=2 * _expansion(shape) * side.cp if workload.recompute == "selective" and side.cp > 1 else 0.0,
    )


def model_flops_per_token(shape: ModelShape, context: int) -> float:
    """FLOPs of a step for one token of a sequence, head included, whatever the layout: what MFU counts."""
    layer = LayerCompute(
        linear=2 * shape.active_layer_parameters,
        attention=_attention_flops(shape, context),
        attention_rate=1.0,
        indexer=_indexer_flops(shape, context),
        routed=0.0,
        recomputes_linear=False,
        recomputes_attention=False,
        repeats_experts=False,
    )
    return layer.model_flops * shape.layers + 6 * shape.vocab_size * shape.hidden


def _repeated_parameters(shape: ModelShape, side: DenseSide) -> float:
    """Dense MLA: every GPU of a cp group expands keys and values of all its tokens, not of its own alone."""
    return _expansion(shape) * (side.cp - 1)


def _expansion(shape: ModelShape) -> float:
    """Parameters that make keys and values of a latent, where that is done at all."""
    if shape.attention == "gqa" or shape.is_sparse:
        return 0.0
    return shape.kv_lora * shape.heads * (shape.nope_head_dim + shape.v_head_dim)


def _attention_flops(shape: ModelShape, context: int) -> float:
    """Scores and weighted values of one token, forward: it sees half the context on average, or a window, or top-k."""
    seen = (context + 1) / 2
    if shape.is_sparse:
        width = shape.heads * (2 * shape.kv_lora + shape.rope_head_dim)
        return 2 * width * min(shape.index_top_k, seen)
    width = shape.heads * (shape.qk_head_dim + shape.value_head_dim)
    full = shape.softmax_layers - shape.sliding_layers
    softmax = 2 * width * (full * seen + shape.sliding_layers * min(shape.sliding_window, seen))
    # The delta rule reads, corrects and writes a state of key by value channels in every head.
    state = shape.linear_value_heads * shape.linear_key_dim * shape.linear_value_dim
    return (softmax + 6 * state * shape.linear_layers) / shape.layers


def _indexer_flops(shape: ModelShape, context: int) -> float:
    """Scores of one token's index queries with every earlier key, over the mean layer."""
    scores = 2 * shape.index_heads * shape.index_head_dim * (context + 1) / 2
    return scores * shape.indexer_layers / shape.layers


@dataclass(frozen=True, kw_only=True)
class LinkSeconds:
    """Seconds of one layer's traffic, of both meshes or of one."""

    hidden_forward: float = 0.0
    """Prefetched: costs only what compute does not cover."""
    hidden_backward: float = 0.0
    critical: float = 0.0
    """On the critical path, both passes."""

    def __add__(self, other: "LinkSeconds") -> "LinkSeconds":
        return LinkSeconds(
            hidden_forward=self.hidden_forward + other.hidden_forward,
            hidden_backward=self.hidden_backward + other.hidden_backward,
            critical=self.critical + other.critical,
        )

    @property
    def hidden(self) -> float:
        """Prefetched, both passes."""
        return self.hidden_forward + self.hidden_backward


def link_seconds(transfers: Iterable[Transfer], cluster: Cluster, *, moe_layer: bool) -> LinkSeconds:
    """Time of what one layer moves. Transfers share the links, so their times add."""
    total = LinkSeconds()
    for transfer in transfers:
        if transfer.per_step or (transfer.only_moe_layers and not moe_layer):
            continue
        forward = _seconds(transfer.forward_rdma, transfer.forward_nvlink, cluster)
        backward = _seconds(transfer.backward_rdma, transfer.backward_nvlink, cluster)
        if transfer.hideable:
            total += LinkSeconds(hidden_forward=forward, hidden_backward=backward)
        else:
            total += LinkSeconds(critical=forward + backward)
    return total


def behind_shared_experts(workload: Workload, side: ExpertSide, tokens: int, one_way: Transfer) -> float:
    """Seconds of one layer's dispatch that no GPU waits for: its shared experts run while tokens travel out, forward
    and in a recompute, and while the gradients of these travel back, which is as much."""
    if not runs_shared_experts_ahead(workload, side, tokens):
        return 0.0
    travels = transfer_seconds(one_way, workload.cluster)
    forward = 2 * shared_parameters(workload.model) * tokens / workload.achieved_flops
    runs = [forward] * (1 + (workload.recompute != "none")) + [2 * forward]
    return sum(min(travels, seconds) for seconds in runs)


def step_link_seconds(transfers: Iterable[Transfer], cluster: Cluster) -> float:
    """Time of what is moved once per optimizer step."""
    return sum(_seconds(t.rdma, t.nvlink, cluster) for t in transfers if t.per_step)


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Time of one transfer, both passes."""
    return _seconds(transfer.rdma, transfer.nvlink, cluster)


def _seconds(rdma: float, nvlink: float, cluster: Cluster) -> float:
    # A hierarchical collective runs its two steps one after the other.
    return rdma / cluster.rdma_bytes_per_second + nvlink / cluster.nvlink_bytes_per_second


def head_seconds(shape: ModelShape, tokens: int, achieved: float) -> float:
    """Logits of all tokens of a GPU, forward and backward."""
    return 3 * 2 * shape.vocab_size * shape.hidden * tokens / achieved


def tokens_to_hide(compute: LayerCompute, links: LinkSeconds, achieved: float) -> float:
    """Tokens per GPU and micro-batch above which both passes cover their prefetched traffic.

    Seed, "Hiding eFSDP Communication": about 4,500 for GLM-5.2 on GB200.
    """
    forward = links.hidden_forward / compute.forward_seconds(achieved)
    backward = links.hidden_backward / compute.backward_seconds(achieved)
    return max(forward, backward)
