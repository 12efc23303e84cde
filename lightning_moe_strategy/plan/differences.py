"""The seed's figures beside the exact ones of the same layout, each difference with its reason."""

from dataclasses import dataclass, replace

from lightning_moe_strategy.plan import activations as act
from lightning_moe_strategy.plan import memory
from lightning_moe_strategy.plan.search import Evaluation


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One quantity that exact dimensions and the seed see differently."""

    quantity: str
    unit: str
    seed: float
    exact: float
    why: str


def differences(by_seed: Evaluation, by_dimensions: Evaluation) -> list[Difference]:
    """The seed's figures and the exact ones of one layout, where they disagree, each with the reason."""
    return [*_parameters(by_seed, by_dimensions), *_memory(by_seed, by_dimensions), *_traffic(by_seed, by_dimensions)]


def _parameters(by_seed: Evaluation, by_dimensions: Evaluation) -> list[Difference]:
    seed, exact = by_seed.figures, by_dimensions.figures
    return [
        Difference(
            quantity="parameters",
            unit="B",
            seed=seed.parameters / 1e9,
            exact=exact.parameters / 1e9,
            why="78 layers without the multi-token-prediction layer",
        ),
        Difference(
            quantity="dense share",
            unit="%",
            seed=100 * (1 - seed.expert_share),
            exact=100 * (1 - exact.expert_share),
            why="embedding and head are 1.9 B, attention 174 M in each layer",
        ),
        Difference(
            quantity="resident bytes per parameter",
            unit="B",
            seed=seed.resident_bytes_per_parameter,
            exact=exact.resident_bytes_per_parameter,
            why="FSDP2 gathers from the FP32 masters, no bf16 copy stays",
        ),
        Difference(
            quantity="resident state",
            unit="GB",
            seed=seed.resident_bytes / 1e9,
            exact=exact.resident_bytes / 1e9,
            why="the three lines above",
        ),
    ]


def _memory(by_seed: Evaluation, by_dimensions: Evaluation) -> list[Difference]:
    tokens, side = by_dimensions.dense.tokens, by_dimensions.experts.side
    worst = replace(by_dimensions.arithmetic.workload, balance="worst", ep_chunks="none")
    moment = memory.expert_moments(worst, side, tokens)["last layer's experts"]
    return [
        Difference(
            quantity="rows of the worst routing",
            unit="GB",
            seed=by_seed.experts.moments["step"]["ep_buffers"] / 1e9,
            exact=(moment["ep_buffers"] + moment["expert_rows"]) / 1e9,
            why=f"{worst.expert_rows_per_token(side):g} rows per own token, which pass through the experts' GEMMs",
        ),
        Difference(
            quantity="peak memory",
            unit="GB",
            seed=by_seed.peak.total / 1e9,
            exact=by_dimensions.peak.total / 1e9,
            why=f"{by_dimensions.arithmetic.workload.balance} routing, buckets added only where they coexist",
        ),
    ]


def _traffic(by_seed: Evaluation, by_dimensions: Evaluation) -> list[Difference]:
    seed, exact = by_seed.figures, by_dimensions.figures
    shape = by_dimensions.arithmetic.workload.model
    return [
        Difference(
            quantity="gathered per token and layer",
            unit="B",
            seed=seed.kv_bytes_per_token,
            exact=exact.kv_bytes_per_token,
            why=f"{shape.indexer_layers} layers with an indexer gather {act.gathered_kv_bytes(shape):.0f} B, "
            f"the others {act.latent_bytes(shape):.0f} B",
        ),
        Difference(
            quantity="eFSDP traffic per layer",
            unit="GB",
            seed=seed.efsdp_bytes / 1e9,
            exact=exact.efsdp_bytes / 1e9,
            why="75 of 78 layers hold all experts; a rank's own shard does not travel",
        ),
        Difference(
            quantity="tokens per GPU to hide it",
            unit="",
            seed=seed.min_tokens_to_hide,
            exact=exact.min_tokens_to_hide,
            why="the rate published runs reach, not 80 % of the peak",
        ),
    ]
