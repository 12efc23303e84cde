"""Bytes of the layer whose backward runs: its experts, their gradients, the norm of its MLP, its attention.

Beside the weights (weights.py) and the rows of experts (memory.py). With recompute the layer is there again; without,
what it keeps is counted among all that is saved, and the moments here take away what is already gone.
"""

from lightning_moe_strategy.plan import activations as act
from lightning_moe_strategy.plan.layout import DenseSide
from lightning_moe_strategy.plan.model import ModelShape
from lightning_moe_strategy.plan.weights import Buckets, DenseWeights
from lightning_moe_strategy.plan.workload import BF16, FP32, Workload


def during_experts(workload: Workload, side: DenseSide) -> dict[str, float]:
    """The layer whose experts run backward: what its recompute made, and keys and values of the whole sequences."""
    shape, tokens = workload.model, workload.tokens_per_gpu(side)
    # The gradient of the residual stream. The shared experts ran last in the forward, so they are done: they leave
    # the gradient of their input.
    per_token: float = BF16 * shape.hidden * (2 if shape.shared_intermediate else 1)
    if workload.recompute == "none":
        return {"recompute_backward": tokens * per_token, "gathered_kv": 0.0}
    per_token += _made_by_attention(workload, side) + act.kept_beside_experts(shape)
    return {
        "recompute_backward": tokens * per_token,
        "gathered_kv": workload.tokens_per_cp_group * act.held_kv_bytes(workload, side),
    }


def during_expert_reduction(workload: Workload, side: DenseSide) -> dict[str, float]:
    """The same with the gradient of the experts' input, while their weights' gradients are reduced."""
    return _with(
        during_experts(workload, side), recompute_backward=BF16 * workload.model.hidden * workload.tokens_per_gpu(side)
    )


def during_norm(buckets: Buckets, weights: DenseWeights, workload: Workload, layer: int) -> dict[str, float]:
    """The layer between its MLP and its attention: the norm runs backward."""
    shape, side = workload.model, weights.side
    tokens, whole = workload.tokens_per_gpu(side), workload.tokens_per_cp_group
    per_token: float = (BF16 + act.NORM_BACKWARD) * shape.hidden
    held, done = act.held_kv_bytes(workload, side), 0.0
    if workload.recompute == "none":
        # Of what is saved, the norm's FP32 input is still there.
        per_token, held = per_token - FP32 * shape.hidden, 0.0
        done = _kept_by_mlp(shape, layer) - FP32 * shape.hidden
    else:
        per_token += _made_by_attention(workload, side)
    running = {"recompute_backward": tokens * per_token, "gathered_kv": whole * held}
    return _with({**buckets, **weights.during_norm(layer), **running}, saved_activations=-tokens * done)


def during_attention(buckets: Buckets, weights: DenseWeights, workload: Workload, layer: int) -> dict[str, float]:
    """The layer whose attention runs backward, or after it the norm of its queries: whichever is more.

    The gradient of the attention's output has taken the place of one output.
    """
    shape, side = workload.model, weights.side
    tokens, whole = workload.tokens_per_gpu(side), workload.tokens_per_cp_group
    kept, done = _made_by_attention(workload, side), 0.0
    held = act.held_kv_bytes(workload, side) + act.kv_gradient_bytes(workload, side)
    added = act.added_by_attention_backward(workload, side)
    queries = shape.heads * shape.qk_head_dim if shape.qk_norm else 0
    after = act.NORM * shape.hidden + act.NORM_BACKWARD * queries
    is_after = tokens * after > tokens * (kept + added) + whole * held
    running = after if is_after else kept + added
    if workload.recompute == "none":
        # What of the layer is saved: its own inputs after the attention, all but the replaced output before.
        saved = (
            act.NORM * shape.hidden + FP32 * queries if is_after else kept - BF16 * shape.heads * shape.value_head_dim
        )
        done, running = _kept_by_mlp(shape, layer) + kept - saved, running - saved
        # Gathered keys and values are gathered again; expanded ones were kept.
        held -= act.held_kv_of_a_kept_layer(workload, side)
    layer_bytes = {
        "recompute_backward": tokens * (BF16 * shape.hidden + running),
        "gathered_kv": 0.0 if is_after else whole * held,
    }
    return _with({**buckets, **weights.during_attention(layer), **layer_bytes}, saved_activations=-tokens * done)


def _made_by_attention(workload: Workload, side: DenseSide) -> float:
    """Norm and attention of one layer, but for what ``selective`` keeps of it anyway."""
    is_kept = workload.recompute == "selective" and workload.model.softmax_layers > 0
    return act.kept_by_attention(workload, side) - (act.attention_output(workload.model) if is_kept else 0.0)


def _kept_by_mlp(shape: ModelShape, layer: int) -> float:
    return act.kept_by_dense_mlp(shape) if layer < shape.dense_first_layers else act.kept_by_moe(shape)


def _with(buckets: Buckets, **more: float) -> dict[str, float]:
    """The same buckets with more bytes in some."""
    return {**buckets, **{name: buckets.get(name, 0.0) + size for name, size in more.items()}}
