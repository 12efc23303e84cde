"""Gathered weights and gradients on their way to the reduce-scatter, at each moment of a backward pass.

A layer's units, the one before them in prefetch, and of the layers after them the FP32 gradients that FSDP2 holds
until the next unit's are reduced. Where one rank holds a whole unit nothing is gathered ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.model import ModelShape, indexer_parameters, shared_parameters
from lightning_moe_strategy.plan.workload import BF16, FP32

Buckets = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """Blocks without their experts, the embedding and the head."""

    shape: ModelShape
    side: DenseSide

    def parameters(self, layer: int) -> int:
        """Of one block; of the embedding before the first, of the norm after the last."""
        shape = self.shape
        if layer < 0:
            return shape.vocab_size * shape.hidden
        if layer == shape.layers:
            return shape.hidden
        if layer >= shape.dense_first_layers:
            return shape.dense_layer_parameters
        return shape.dense_layer_parameters + self._mlp(layer) - self._beside_experts

    def trained(self, layer: int) -> int:
        """Of those, what has gradients: an indexer has none."""
        has_indexer = self.shape.indexer_layers > 0 and 0 <= layer < self.shape.layers
        return self.parameters(layer) - (indexer_parameters(self.shape) if has_indexer else 0)

    def in_forward(self, layer: int) -> float:
        """While a layer runs forward: its weights, and those of the next on their way."""
        return BF16 * self.parameters(layer) + self._gathered_ahead(layer + 1)

    def head_in_forward(self) -> float:
        """As it is gathered, and copied."""
        return BF16 * self.parameters(-1) + self._gathered_ahead(-1)

    def during_experts(self, layer: int) -> Buckets:
        """While the layer's experts run backward: its shared experts have their gradients."""
        gradients = BF16 * shared_parameters(self.shape)
        return {
            "dense_units": self._gathered(layer) + gradients,
            "reduce_scatter_input": FP32 * self.parameters(layer + 1),
        }

    def during_expert_reduction(self, layer: int) -> Buckets:
        """While the experts' gradients are reduced: those of the layer after are gone."""
        return {"dense_units": self._gathered(layer) + BF16 * shared_parameters(self.shape)}

    def during_norm(self, layer: int) -> Buckets:
        """While the norm of the layer's MLP runs backward: the MLP has its gradients."""
        shape = self.shape
        # A router's FP32 gradients were reduced last, where there is a router.
        reduced = self.parameters(layer + 1) if layer < shape.dense_first_layers else shape.num_experts * shape.hidden
        return {
            "dense_units": self._gathered(layer) + BF16 * self._mlp(layer),
            "reduce_scatter_input": FP32 * reduced,
        }

    def during_attention(self, layer: int) -> Buckets:
        """While the layer's attention runs backward: its output projection has its gradient too."""
        output = self.shape.heads * self.shape.value_head_dim * self.shape.hidden
        before = self.during_norm(layer)
        return {**before, "dense_units": before["dense_units"] + BF16 * output}

    def during_embedding(self) -> Buckets:
        """While the embedding's gradients are reduced."""
        return {"reduce_scatter_input": (BF16 + FP32) * self.parameters(-1)}

    def before_embedding(self) -> Buckets:
        """Once its gradient is there."""
        return {"dense_units": BF16 * self.parameters(-1), "reduce_scatter_input": FP32 * self.parameters(0)}

    def _gathered(self, layer: int) -> float:
        """Backward. A lookup's weights, before the first layer, are not read there."""
        return BF16 * self.parameters(layer) + (self._gathered_ahead(layer - 1) if layer else 0.0)

    def _gathered_ahead(self, layer: int) -> float:
        return BF16 * self.parameters(layer) if self.side.shards > 1 else 0.0

    def _mlp(self, layer: int) -> int:
        shape = self.shape
        is_dense = layer < shape.dense_first_layers
        return 3 * shape.hidden * shape.intermediate if is_dense else shared_parameters(shape)

    @property
    def _beside_experts(self) -> int:
        return shared_parameters(self.shape) + self.shape.num_experts * (self.shape.hidden + self.shape.expert_bias)


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts of one layer on one ep rank."""

    shape: ModelShape
    side: ExpertSide

    @property
    def parameters(self) -> float:
        """As they are gathered."""
        return self.shape.expert_layer_parameters / self.side.ep

    def in_forward(self, *, is_last: bool) -> float:
        """Weights in bf16, as they were gathered too, and those of the next layer on their way."""
        is_gathered = self.side.e_fsdp > 1
        return BF16 * self.parameters * (1 + is_gathered * (1 if is_last else 2))

    def during_experts(self, *, is_first: bool) -> float:
        """Weights in bf16, and those of the layer before on their way."""
        return BF16 * self.parameters + self.gathered_ahead(is_first=is_first)

    def during_reduction(self, *, is_first: bool) -> Buckets:
        """Gradients as the products left them and as they are reduced, both FP32; the weights are freed before."""
        return {
            "expert_units": self.gathered_ahead(is_first=is_first),
            "reduce_scatter_input": 2 * FP32 * self.parameters,
        }

    @property
    def gradients(self) -> float:
        """As the products leave them: never rounded."""
        return FP32 * self.parameters

    def gathered_ahead(self, *, is_first: bool) -> float:
        """Of the layer before, where it has experts and more than one rank holds them."""
        return 0.0 if is_first or self.side.e_fsdp == 1 else BF16 * self.parameters
