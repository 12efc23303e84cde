"""The sizes of a mixture-of-experts transformer, and the published ones by name."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of one model. Defaults are a tiny GQA model, so a test or a demo names only what it changes."""

    vocab_size: int = 1024
    """Tokens of the embedding and of the head."""
    hidden: int = 128
    """Channels of a token between blocks."""
    layers: int = 2
    """Blocks, those of multi-token prediction left out."""
    dense_first_layers: int = 0
    """Leading layers with a plain MLP instead of experts."""
    intermediate: int = 256
    """Width of that plain MLP."""

    attention: Literal["gqa", "mla"] = "gqa"
    """Grouped-query attention, or latent attention (DeepSeek)."""
    heads: int = 4
    """Query heads of a layer."""
    kv_heads: int = 2
    """GQA only; in MLA every head expands its own key and value from the latent."""
    head_dim: int = 32
    """GQA only; an MLA head is ``nope_head_dim + rope_head_dim`` wide."""
    qk_norm: bool = False
    """GQA only: RMSNorm over each query and key head, before RoPE (Qwen3)."""
    q_lora: int | None = None
    """MLA only: rank of the query projection; None projects in one step."""
    kv_lora: int = 0
    """MLA only: width of the latent that determines keys and values."""
    nope_head_dim: int = 0
    """MLA only: channels of a query or key head that RoPE leaves alone."""
    rope_head_dim: int = 0
    """MLA only: channels that RoPE turns; their key is one for all heads."""
    v_head_dim: int = 0
    """MLA only: channels of a value head."""
    rope_theta: float = 10000.0
    """Base of RoPE's wavelengths."""

    num_experts: int = 8
    """Routed experts of a layer."""
    top_k: int = 2
    """Experts that a token goes to."""
    moe_intermediate: int = 64
    """Width of one expert."""
    shared_experts: int = 0
    """Experts every token passes, computed as one MLP ``shared_experts`` times as wide."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What turns a router's logits into scores, in FP32."""
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum."""
    routed_scaling: float = 1.0
    """Factor of the chosen scores."""
    balance_bias: bool = False
    """Keep a bias per expert that only the selection sees (balancing without an auxiliary loss)."""
    num_groups: int = 1
    """Experts are cut into this many groups; a token picks from the ``top_k_groups`` best ones."""
    top_k_groups: int = 1
    """Groups that a token's experts come from."""

    norm_eps: float = 1e-6
    """Of every RMSNorm, beside the mean square."""
    tie_embeddings: bool = False
    """The head is the embedding."""

    mtp_layers: int = 0
    """Depths of multi-token prediction: layer k predicts the token k + 1 places on, in training alone."""
    mtp_loss: float = 0.1
    """Weight of the mean loss of those depths beside the main one (DeepSeek-V3: 0.3, later 0.1)."""

    index_heads: int = 0
    """MLA only: heads of a DSA indexer, which picks the keys that a query attends to; 0: attend to every earlier
    token."""
    index_head_dim: int = 0
    """Channels of such a head; RoPE turns the first ``rope_head_dim`` of them."""
    index_top_k: int = 0
    """Keys of a query, or as many as there are."""
    index_every: int = 1
    """An indexer in one of so many layers, its keys shared by those that follow."""
    index_skip_first: int = 2
    """The first layers, each with its own indexer, before that rhythm starts."""

    def __post_init__(self) -> None:
        self._require_positive()
        if self.attention == "gqa" and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads({self.kv_heads}) does not divide heads({self.heads}). "
                "Each key head serves a whole number of query heads: choose a divisor."
            )
        if self.rotary_dim % 2:
            name = "head_dim" if self.attention == "gqa" else "rope_head_dim"
            raise ValueError(f"{name}({self.rotary_dim}) is odd. RoPE turns pairs of channels: make it even.")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups({self.num_groups}) does not divide num_experts({self.num_experts}). "
                "Groups are of equal size: choose a divisor."
            )
        self._check_indexer()
        self._check_multi_token_prediction()
        selectable = self.top_k_groups * self.num_experts // self.num_groups
        if self.top_k > selectable or self.top_k_groups > self.num_groups:
            raise ValueError(
                f"top_k({self.top_k}) must be at most top_k_groups({self.top_k_groups}) * num_experts"
                f"({self.num_experts}) / num_groups({self.num_groups}) = {selectable}, and top_k_groups at "
                "most num_groups. Lower top_k or open more groups."
            )

    def _require_positive(self) -> None:
        names = ["vocab_size", "hidden", "layers", "heads", "num_experts", "top_k", "moe_intermediate"]
        names += ["num_groups", "top_k_groups", "index_every"]
        if self.attention == "mla":
            names += ["kv_lora", "nope_head_dim", "rope_head_dim", "v_head_dim"]
        else:
            names += ["kv_heads", "head_dim"]
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}({getattr(self, name)}) must be at least 1 with {self.attention} attention.")

    def _check_indexer(self) -> None:
        if not self.is_dsa:
            return
        if self.attention != "mla":
            raise ValueError(
                f"index_heads({self.index_heads}) needs mla attention, not {self.attention!r}: chosen keys are read as "
                "latents. Set attention='mla', or index_heads=0."
            )
        if self.index_head_dim < self.rope_head_dim:
            raise ValueError(
                f"index_head_dim({self.index_head_dim}) must be at least rope_head_dim({self.rope_head_dim}), the "
                "channels of an index head that RoPE turns. Raise it."
            )
        for name in ("index_top_k", "index_skip_first"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}({getattr(self, name)}) must be at least 1 with index_heads({self.index_heads}): the first "
                    "layer selects the keys that others share."
                )

    def _check_multi_token_prediction(self) -> None:
        if self.mtp_layers < 0:
            raise ValueError(f"mtp_layers({self.mtp_layers}) must be at least 0, which trains the next token alone.")
        if self.mtp_layers and self.mtp_loss <= 0.0:
            raise ValueError(
                f"mtp_loss({self.mtp_loss}) must be above 0 with mtp_layers({self.mtp_layers}). Set mtp_layers=0 to "
                "train without them."
            )

    @property
    def is_dsa(self) -> bool:
        """Attention sees the keys an indexer picks (DSA), not every earlier token."""
        return self.index_heads > 0

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that RoPE turns."""
        return self.head_dim if self.attention == "gqa" else self.rope_head_dim

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        """Layers that own a DSA indexer, those of multi-token prediction left out: each of them does."""
        if not self.is_dsa:
            return ()
        first, every = self.index_skip_first - 1, self.index_every
        return tuple(layer for layer in range(self.layers) if max(layer - first, 0) % every == 0)

    @property
    def indexer_parameters(self) -> int:
        """Parameters of all DSA indexers together."""
        dims = self.index_heads * self.index_head_dim
        one = (self.q_lora or self.hidden) * dims + self.hidden * (self.index_head_dim + self.index_heads)
        layer_norm_of_the_key = 2 * self.index_head_dim
        num_indexers = len(self.indexer_layers) + self.mtp_layers * self.is_dsa
        return num_indexers * (one + layer_norm_of_the_key)

    @classmethod
    def resolve(cls, model: "ModelConfig | Mapping[str, Any] | str") -> "ModelConfig":
        """``model`` as a config: a preset's name, a mapping of sizes (``preset`` names its base), or a config as it is.

        Raises:
            ValueError: the preset or a size is not known.
        """
        if isinstance(model, ModelConfig):
            return model
        sizes = {"preset": model} if isinstance(model, str) else dict(model)
        name = sizes.pop("preset", "tiny")
        if name not in PRESETS:
            raise ValueError(f"model preset {name!r} is not known. Choose one of: {', '.join(PRESETS)}.")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(sizes) - known):
            raise ValueError(f"model sizes {unknown} are not known. Choose from: {', '.join(sorted(known))}.")
        return dataclasses.replace(PRESETS[name], **sizes)


_DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    hidden=7168,
    layers=61,
    dense_first_layers=3,
    intermediate=18432,
    attention="mla",
    heads=128,
    q_lora=1536,
    kv_lora=512,
    nope_head_dim=128,
    rope_head_dim=64,
    v_head_dim=128,
    num_experts=256,
    top_k=8,
    moe_intermediate=2048,
    shared_experts=1,
    scoring="sigmoid",
    routed_scaling=2.5,
    balance_bias=True,
    num_groups=8,
    top_k_groups=4,
)

_KIMI_K2 = dataclasses.replace(
    _DEEPSEEK_V3,
    vocab_size=163840,
    dense_first_layers=1,
    heads=64,
    rope_theta=50000.0,
    num_experts=384,
    routed_scaling=2.827,
    num_groups=1,
    top_k_groups=1,
)

_GLM_5_2 = dataclasses.replace(
    _DEEPSEEK_V3,
    vocab_size=154880,
    hidden=6144,
    layers=78,
    intermediate=12288,
    heads=64,
    q_lora=2048,
    nope_head_dim=192,
    v_head_dim=256,
    rope_theta=8e6,
    num_groups=1,
    top_k_groups=1,
    norm_eps=1e-5,
    index_heads=32,
    index_head_dim=128,
    index_top_k=2048,
    index_every=4,
    index_skip_first=3,
)

_QWEN3_235B = ModelConfig(
    vocab_size=151936,
    hidden=4096,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    rope_theta=1e6,
    num_experts=128,
    top_k=8,
    moe_intermediate=1536,
)

_QWEN3_30B = dataclasses.replace(_QWEN3_235B, hidden=2048, layers=48, heads=32, moe_intermediate=768)

_TINY_MLA = ModelConfig(
    dense_first_layers=1,
    attention="mla",
    q_lora=64,
    kv_lora=32,
    nope_head_dim=24,
    rope_head_dim=8,
    v_head_dim=32,
    shared_experts=1,
    scoring="sigmoid",
    routed_scaling=2.5,
    balance_bias=True,
    num_groups=4,
    top_k_groups=2,
)

_TINY_DSA = dataclasses.replace(
    _TINY_MLA, layers=4, index_heads=4, index_head_dim=16, index_top_k=16, index_every=2, index_skip_first=1
)

PRESETS: dict[str, ModelConfig] = {
    "glm-5.2": _GLM_5_2,
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,
    "qwen3-235b-a22b": _QWEN3_235B,
    "qwen3-30b-a3b": _QWEN3_30B,
    "tiny": ModelConfig(),
    "tiny-mla": _TINY_MLA,
    "tiny-dsa": _TINY_DSA,
}
"""Published sizes, without multi-token-prediction layers and with plain RoPE. GPT-OSS is missing because its
attention sinks, sliding windows and biased experts are not what this block computes."""
