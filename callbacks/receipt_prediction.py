"""What the planner says that a run's steps wait for, in the categories of a receipt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_moe_strategy.callbacks.peak_prediction import price_run
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.evaluate import GRADIENT_SHARE, Exact
from lightning_moe_strategy.plan.search import Evaluation
from lightning_moe_strategy.plan.time import transfer_seconds
from lightning_moe_strategy.plan.workload import BF16, FP32, INT32, Workload
from lightning_moe_strategy.waits import Category


@dataclass(frozen=True, kw_only=True)
class PlannedWaits:
    """Of one optimizer step on a cluster, with even routing and perfect overlap."""

    cluster: str
    step_seconds: float
    seconds: Mapping[Category, float]
    """What is waited for; what the planner does not count is not among them."""
    tokens: int
    """Of a GPU and micro-batch."""
    min_tokens_to_hide: float
    """Above which compute covers the traffic of shards."""

    @property
    def exposed_seconds(self) -> float:
        return sum(self.seconds.values())


def plan_waits(
    module: nn.Module,
    placement: Placement,
    optimizers: Sequence[Optimizer],
    batch: tuple[int, int],
    *,
    cluster: Cluster,
    num_micro_batches: int,
) -> PlannedWaits:
    """The planner's times for a run as it is; ``batch`` is (sequences, tokens of each on this rank).

    Raises:
        CannotPlan: with the reason.
    """
    evaluation = price_run(module, placement, optimizers, batch, cluster)
    assert isinstance(evaluation.arithmetic, Exact)
    dense, experts = evaluation.dense, evaluation.experts
    per_step = dense.step_seconds + experts.step_seconds
    seconds = {name: num_micro_batches * each for name, each in _of_micro_batch(evaluation).items()}
    seconds["reduce_scatter"] += per_step  # of replicas: their all-reduce
    return PlannedWaits(
        cluster=cluster.name,
        step_seconds=num_micro_batches * (evaluation.times.step - per_step) + per_step,
        seconds=seconds,
        tokens=dense.tokens,
        min_tokens_to_hide=evaluation.figures.min_tokens_to_hide,
    )


def _of_micro_batch(evaluation: Evaluation) -> dict[Category, float]:
    work, dense, experts = evaluation.arithmetic.workload, evaluation.dense, evaluation.experts
    shape, both = work.model, dense.links + experts.links
    seconds: dict[Category, float] = dict.fromkeys(("dense_gather", "expert_gather", "reduce_scatter"), 0.0)
    for layers, links in ((shape.moe_layers, both), (shape.dense_first_layers, dense.links)):
        forward = layers * max(0.0, links.hidden_forward - dense.forward_seconds)
        backward = layers * max(0.0, links.hidden_backward - dense.backward_seconds)
        # Dense and expert shards share the links, and what compute leaves of both is divided like their traffic.
        of_dense = dense.links.hidden / links.hidden if links.hidden else 0.0
        gathers = forward + (1 - GRADIENT_SHARE) * backward
        seconds["dense_gather"] += of_dense * gathers
        seconds["expert_gather"] += (1 - of_dense) * gathers
        seconds["reduce_scatter"] += GRADIENT_SHARE * backward
    # Nothing runs before the first layer's gather and after its reduction.
    seconds["dense_gather"] += dense.links.hidden_forward
    seconds["expert_gather"] += experts.links.hidden_forward
    seconds["reduce_scatter"] += GRADIENT_SHARE * experts.links.hidden_backward
    seconds["cp_gather"] = shape.layers * dense.links.critical
    results = _results_share(work) * sum(transfer_seconds(t, work.cluster) for t in experts.transfers if t.axis == "ep")
    seconds["ep_dispatch"] = shape.moe_layers * max(0.0, experts.links.critical - results)
    seconds["ep_combine"] = shape.moe_layers * results
    return seconds


def _results_share(work: Workload) -> float:
    """Of what travels over ep, results and their gradients: beside them go tokens, probabilities and, once, ids."""
    passes = 2 + (work.recompute != "none") + work.chunks_even_routing
    result = BF16 * work.model.hidden
    both_ways = 2 * result + FP32 * work.model.top_k
    return passes * result / (passes * both_ways + INT32 * work.model.top_k)
