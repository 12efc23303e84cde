"""The sizes of a mixture-of-experts transformer, and its parameters counted exactly from them.

Nothing here is rounded: a count is the number of elements the Hugging Face model of the same sizes holds.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from lightning_moe_strategy.plan.errors import PlanError, require

Attention = Literal["gqa", "mla"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that memory, traffic and time follow from. Names are those of the ``model:`` section of our configs."""

    name: str
    vocab_size: int
    hidden: int
    layers: int
    dense_first_layers: int = 0
    """Leading layers with a plain MLP instead of experts."""
    intermediate: int = 0
    """Width of that plain MLP."""

    attention: Attention = "gqa"
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    qk_norm: bool = False
    q_lora: int | None = None
    kv_lora: int = 0
    nope_head_dim: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    gated_query: bool = False
    """GQA only: the query projection is twice as wide, its second half gates the output (Qwen3-Next, Qwen3.5)."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """A bias on the output projection."""
    attention_sinks: bool = False
    sliding_window: int = 0
    sliding_layers: int = 0
    """Layers whose tokens see the last ``sliding_window`` tokens only."""

    linear_layers: int = 0
    """Layers with gated delta-net attention instead of softmax."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0

    num_experts: int
    top_k: int
    moe_intermediate: int
    expert_bias: bool = False
    """Biases on experts and router (GPT-OSS)."""
    shared_intermediate: int = 0
    """Width of the experts every token passes, all together."""
    shared_gate: bool = False
    """The shared expert has a gate of one number per token."""

    tie_embeddings: bool = False
    index_heads: int = 0
    """DSA indexer: heads; 0 for models without one."""
    index_head_dim: int = 0
    index_top_k: int = 0
    indexer_layers: int = 0
    """Layers that own an indexer; the others take the top-k of the layer before."""
    mtp_layers: int = 0
    """Multi-token-prediction layers of the published model. Priced apart: training here leaves them out."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("name", "attention") or (item.name == "q_lora" and value is None):
                continue
            rule, remedy = "a whole number of at least 0", f"Check the sizes of {self.name}."
            require(item.name, value, isinstance(value, int) and value >= 0, rule, remedy)
        for field in ("vocab_size", "hidden", "layers", "heads", "num_experts", "top_k", "moe_intermediate"):
            value = getattr(self, field)
            require(field, value, value >= 1, "at least 1", f"Check the sizes of {self.name}.")
        for field in (
            ("kv_lora", "rope_head_dim", "v_head_dim") if self.attention == "mla" else ("kv_heads", "head_dim")
        ):
            value = getattr(self, field)
            require(field, value, value >= 1, f"at least 1 with {self.attention} attention", f"Check {self.name}.")
        if self.top_k > self.num_experts:
            raise PlanError(f"top_k({self.top_k}) must be at most num_experts({self.num_experts}). Check {self.name}.")
        if not self.moe_layers > 0:
            raise PlanError(
                f"dense_first_layers({self.dense_first_layers}) leaves no layer with experts among "
                f"layers({self.layers}). Plan a mixture of experts."
            )

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_first_layers

    @property
    def softmax_layers(self) -> int:
        """Layers with softmax attention."""
        return self.layers - self.linear_layers

    @property
    def is_sparse(self) -> bool:
        """Attention sees the indexer's top-k (DSA)."""
        return self.index_heads > 0

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head as the attention kernel sees it: MLA expanded, not absorbed."""
        return self.head_dim if self.attention == "gqa" else self.nope_head_dim + self.rope_head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels of a value head."""
        return self.head_dim if self.attention == "gqa" else self.v_head_dim

    @cached_property
    def counts(self) -> "ParameterCounts":
        """Parameters by kind, for the whole model without its multi-token-prediction layers."""
        softmax = attention_parameters(self) * self.softmax_layers
        linear = linear_attention_parameters(self) * self.linear_layers
        norms = 2 * self.hidden * self.layers + self.hidden
        dense_mlps = 3 * self.hidden * self.intermediate * self.dense_first_layers
        beside_experts = (router_parameters(self) + shared_parameters(self)) * self.moe_layers
        embedding = self.vocab_size * self.hidden
        indexer = indexer_parameters(self) * self.indexer_layers
        return ParameterCounts(
            experts=expert_parameters(self) * self.num_experts * self.moe_layers,
            embedding=embedding,
            head=0 if self.tie_embeddings else embedding,
            indexer=indexer,
            layers_without_experts=softmax + linear + norms - self.hidden + dense_mlps + beside_experts + indexer,
            final_norm=self.hidden,
            mtp=mtp_parameters(self) * self.mtp_layers,
        )

    @property
    def expert_layer_parameters(self) -> int:
        """Routed experts of one layer."""
        return expert_parameters(self) * self.num_experts

    @property
    def dense_layer_parameters(self) -> int:
        """Everything but the routed experts in one layer with experts, with an indexer where the model has one."""
        attention = attention_parameters(self) if self.softmax_layers else linear_attention_parameters(self)
        indexer = indexer_parameters(self) if self.indexer_layers else 0
        return attention + indexer + 2 * self.hidden + router_parameters(self) + shared_parameters(self)

    @property
    def active_layer_parameters(self) -> float:
        """Parameters a token meets in the mean layer: dense ones and ``top_k`` of the experts.

        Seed, "Hiding eFSDP Communication": about 0.5 B for GLM-5.2.
        """
        counts = self.counts
        return (counts.layers_without_experts + counts.experts * self.top_k / self.num_experts) / self.layers


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters by kind. ``layers_without_experts`` holds the indexers too."""

    experts: int
    embedding: int
    head: int
    """0 when it is the embedding's matrix."""
    indexer: int
    layers_without_experts: int
    final_norm: int
    mtp: int
    """Of the multi-token-prediction layers, experts included; not in ``total``."""

    @property
    def dense(self) -> int:
        """All that is not a routed expert."""
        return self.embedding + self.head + self.layers_without_experts + self.final_norm

    @property
    def total(self) -> int:
        """All that is trained here."""
        return self.dense + self.experts

    @property
    def expert_share(self) -> float:
        """Experts' share of the total."""
        return self.experts / self.total


def attention_parameters(shape: ModelShape) -> int:
    """Softmax attention of one layer, indexer left out."""
    if shape.attention == "mla":
        queries = shape.heads * shape.qk_head_dim
        if shape.q_lora is None:
            query = shape.hidden * queries
        else:
            query = shape.hidden * shape.q_lora + shape.q_lora + shape.q_lora * queries
        latent = shape.hidden * (shape.kv_lora + shape.rope_head_dim) + shape.kv_lora
        expand = shape.kv_lora * shape.heads * (shape.nope_head_dim + shape.v_head_dim)
        return query + latent + expand + shape.heads * shape.v_head_dim * shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projected = queries * (2 if shape.gated_query else 1) + 2 * keys
    extras = projected * shape.attention_bias + shape.hidden * shape.output_bias
    extras += 2 * shape.head_dim * shape.qk_norm + shape.heads * shape.attention_sinks
    return shape.hidden * projected + queries * shape.hidden + extras


def linear_attention_parameters(shape: ModelShape) -> int:
    """Gated delta-net attention of one layer: projections, short convolution, decay, norm."""
    keys = shape.linear_key_heads * shape.linear_key_dim
    values = shape.linear_value_heads * shape.linear_value_dim
    mixed = 2 * keys + values
    projections = shape.hidden * (mixed + values + 2 * shape.linear_value_heads) + values * shape.hidden
    return projections + mixed * shape.linear_conv + 2 * shape.linear_value_heads + shape.linear_value_dim


def indexer_parameters(shape: ModelShape) -> int:
    """One DSA indexer: queries from the query latent, one key per token with its LayerNorm, head weights."""
    queries = (shape.q_lora or shape.hidden) * shape.index_heads * shape.index_head_dim
    keys = shape.hidden * (shape.index_head_dim + shape.index_heads)
    return queries + keys + 2 * shape.index_head_dim if shape.index_heads else 0


def expert_parameters(shape: ModelShape) -> int:
    """One routed expert: gate, up and down projections."""
    weights = 3 * shape.hidden * shape.moe_intermediate
    return weights + (2 * shape.moe_intermediate + shape.hidden) * shape.expert_bias


def router_parameters(shape: ModelShape) -> int:
    """One router. The balance bias of DeepSeek and GLM is a buffer, not a parameter."""
    return shape.num_experts * (shape.hidden + shape.expert_bias)


def shared_parameters(shape: ModelShape) -> int:
    """The experts every token passes in one layer."""
    return 3 * shape.hidden * shape.shared_intermediate + shape.hidden * shape.shared_gate


def mtp_parameters(shape: ModelShape) -> int:
    """One multi-token-prediction layer: a layer with experts, the projection of two hidden states, three norms."""
    layer = shape.dense_layer_parameters + shape.expert_layer_parameters
    return layer + 2 * shape.hidden * shape.hidden + 3 * shape.hidden
