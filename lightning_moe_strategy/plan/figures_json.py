"""A plan as JSON: names, units and order of docs/planning.md."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lightning_moe_strategy.plan import time
from lightning_moe_strategy.plan.layout import ranks_per_domain
from lightning_moe_strategy.plan.memory import TRANSIENT, least_gpus
from lightning_moe_strategy.plan.redundancy import redundancy
from lightning_moe_strategy.plan.verdict import dynamic_bytes, longest_context

if TYPE_CHECKING:
    from lightning_moe_strategy.plan.planner import Json, JsonValue, Plan

SECONDS_PER_DAY = 86_400


def to_json(plan: "Plan") -> "Json":
    """See ``Plan.to_json``."""
    request, work, evaluation = plan.request, plan.workload, plan.evaluation
    figures = evaluation.figures
    return {
        "assumptions": request.assumptions,
        "model": work.model.name,
        "cluster": work.cluster.name,
        "context": work.context,
        "micro_batch": work.micro_batch,
        "settings": {
            "recompute": work.recompute,
            "dispatcher": work.dispatcher,
            "balance": work.balance,
            "ep_chunks": work.ep_chunks,
            "ep_chunk_bytes": work.ep_chunk_bytes,
            "optimizer": work.optimizer,
            "fa4_pr_2816": work.fa4_pr_2816,
            "fa4_token_chunk": work.fa4_token_chunk,
        },
        "world": work.gpus,
        "layout": {**vars(evaluation.dense.side), **vars(evaluation.experts.side)},
        "parameters": {
            "total": figures.parameters,
            "expert_share": figures.expert_share,
            "active_per_layer": figures.active_per_layer,
            "multi_token_prediction": work.model.counts.mtp,
        },
        "resident_bytes_per_parameter": figures.resident_bytes_per_parameter,
        "per_token_mb": dict(evaluation.arithmetic.per_token_mb(evaluation.dense, evaluation.experts)),
        "memory_gb": _memory(plan),
        "efsdp": _efsdp(plan),
        "cp": _cp(plan),
        "redundant_experts": _redundant_experts(plan),
        "compute": _compute(plan),
        "traffic_gb_per_layer": _traffic(plan),
        "checkpoint": _checkpoint(plan),
        "days": days(plan),
        "longest_context": longest_context(evaluation) if evaluation.fits else None,
        "fits": evaluation.fits,
        "verdict": plan.verdict,
        "warnings": list(plan.warnings),
        "differences": [dict(vars(difference)) for difference in plan.differences],
    }


def _memory(plan: "Plan") -> "Json":
    evaluation = plan.evaluation
    peak, device = evaluation.peak, plan.workload.cluster.memory_bytes
    transient = sum(peak.buckets.get(name, 0.0) for name in TRANSIENT)
    dynamic, reserved = dynamic_bytes(evaluation), peak.buckets.get("allocator_reserve", 0.0)
    resident = evaluation.figures.resident_bytes
    temporaries = peak.buckets.get("optimizer_temporaries", 0.0)
    coexisting = resident + transient + dynamic + reserved + temporaries
    return {
        "parameters": resident / 1e9,
        "fsdp_transient": transient / 1e9,
        "dynamic": dynamic / 1e9,
        "reserve": reserved / 1e9,
        "not_coexisting": (coexisting - peak.total) / 1e9,
        "total": peak.total / 1e9,
        "device": device / 1e9,
        "headroom": (device - peak.total) / 1e9,
        "least_gpus_for_parameters": least_gpus(
            evaluation.figures.parameters, evaluation.figures.resident_bytes_per_parameter, device
        ),
        "peak_moment": peak.moment,
        "buckets": {name: size / 1e9 for name, size in peak.buckets.items()},
        "moments": {
            moment: sum(part[moment].get(name, 0.0) for part in _parts(plan) for name in part[moment]) / 1e9
            for moment in evaluation.dense.moments
        },
    }


def _parts(plan: "Plan") -> tuple[Mapping[str, Mapping[str, float]], ...]:
    return plan.evaluation.dense.moments, plan.evaluation.experts.moments


def _efsdp(plan: "Plan") -> "Json":
    evaluation, figures = plan.evaluation, plan.evaluation.figures
    needed, tokens, layers = figures.min_tokens_to_hide, evaluation.dense.tokens, plan.workload.model.layers
    e_fsdp = evaluation.experts.side.e_fsdp
    return {
        "layer_expert_gb": figures.layer_expert_bytes / 1e9,
        "gb_per_layer": figures.efsdp_bytes / 1e9,
        "dense_gb_per_layer": figures.dense_shard_bytes / 1e9,
        "seconds_per_layer": figures.efsdp_seconds,
        "min_tokens_to_hide": needed,
        "tokens_per_gpu": tokens,
        "margin": tokens / needed if needed else None,
        "hidden": evaluation.is_hidden,
        "exposed_share": evaluation.times.exposed / evaluation.times.step,
        "structural_share": 1 / layers,
        # (stages - 1) / (micro-batches + stages - 1) = 1 / layers, with as many stages as there are shards.
        "pipeline_micro_batches_for_equal_bubble": (e_fsdp - 1) * (layers - 1),
    }


def _cp(plan: "Plan") -> "Json":
    figures, evaluation = plan.evaluation.figures, plan.evaluation
    layer = evaluation.dense.forward_seconds + evaluation.dense.backward_seconds
    return {
        "kv_bytes_per_token": figures.kv_bytes_per_token,
        "kv_gb": figures.kv_bytes / 1e9,
        "rdma_gb": figures.cp_rdma_bytes / 1e9,
        "nvlink_gb": figures.cp_nvlink_bytes / 1e9,
        "rdma_seconds": figures.cp_rdma_seconds,
        "extra_time_share": figures.cp_rdma_seconds / layer,
    }


def _redundant_experts(plan: "Plan") -> "Json | None":
    work, evaluation = plan.workload, plan.evaluation
    domain = ranks_per_domain(work.gpus, work.cluster)
    price = redundancy(work, evaluation.experts.side, tokens=evaluation.dense.tokens, ranks_per_domain=domain)
    if price is None:
        return None
    least, most = price.pays_above_skew
    return {
        "expert_gb": price.expert_bytes / 1e9,
        "experts_seconds": price.experts_seconds,
        "plan_seconds": price.plan_seconds,
        "least_move_seconds": price.least_move_seconds,
        "most_move_seconds": price.most_move_seconds,
        "least_skew_that_pays": least,
        "most_skew_that_pays": most,
        "verdict": price.sentence,
    }


def _compute(plan: "Plan") -> "Json":
    work, evaluation, figures = plan.workload, plan.evaluation, plan.evaluation.figures
    rate = evaluation.times.tokens_per_second
    return {
        "flops_per_token_layer": figures.flops_per_token_layer,
        "attention_ratio": figures.attention_ratio,
        "forward_seconds": evaluation.dense.forward_seconds,
        "backward_seconds": evaluation.dense.backward_seconds,
        "layer_seconds": evaluation.dense.forward_seconds + evaluation.dense.backward_seconds,
        "step_seconds": evaluation.times.step,
        "tokens_per_second_per_gpu": rate,
        "mfu": figures.model_flops_per_token * rate / work.cluster.peak_flops,
        "achieved_tflops": work.achieved_flops / 1e12,
        "peak_tflops": work.cluster.peak_flops / 1e12,
        "achieved_source": _source(plan),
    }


def _source(plan: "Plan") -> str:
    return plan.workload.cluster.source if plan.request.achieved_tflops is None else "given"


_SAVED = ("masters", "optimizer_state")
"""What resuming needs; weights in bf16 and gradients are made again."""


def _checkpoint(plan: "Plan") -> "Json":
    evaluation = plan.evaluation
    held = [(_resident(price.moments, _SAVED), price.side.shards) for price in (evaluation.dense, evaluation.experts)]
    snapshot = sum(size for size, _ in held)
    return {
        "total_gb": sum(size * shards for size, shards in held) / 1e9,
        "async_snapshot_gb": snapshot / 1e9,
        "async_snapshot_gb_per_host": snapshot * plan.workload.cluster.gpus_per_host / 1e9,
    }


def _resident(moments: Mapping[str, Mapping[str, float]], names: tuple[str, ...]) -> float:
    return sum(max(buckets.get(name, 0.0) for buckets in moments.values()) for name in names)


def _traffic(plan: "Plan") -> "Json":
    evaluation, cluster = plan.evaluation, plan.workload.cluster
    axes: Json = {}
    for transfer in (*evaluation.dense.transfers, *evaluation.experts.transfers):
        if not transfer.rdma + transfer.nvlink:
            continue
        axes[transfer.axis] = {
            "forward_rdma": transfer.forward_rdma / 1e9,
            "forward_nvlink": transfer.forward_nvlink / 1e9,
            "backward_rdma": transfer.backward_rdma / 1e9,
            "backward_nvlink": transfer.backward_nvlink / 1e9,
            "seconds": time.transfer_seconds(transfer, cluster),
            "behind_compute": transfer.hideable,
            "per_step": transfer.per_step,
        }
    return axes


def days(plan: "Plan") -> float | None:
    """Days of the whole training run, where its tokens are given."""
    if plan.request.tokens is None:
        return None
    return plan.request.tokens / (plan.tokens_per_second_per_gpu * plan.workload.gpus) / SECONDS_PER_DAY


def numbers(values: "Mapping[str, JsonValue]", prefix: str = "") -> Iterator[tuple[str, float]]:
    """(path, number) of every number in the JSON; names, truths and lists are left out."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from numbers(value, f"{path}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, float(value)


def unit(path: str) -> str:
    """Unit of the number under that path."""
    if path == "memory_gb.least_gpus_for_parameters":
        return "GPUs"
    if path == "memory_gb" or path.startswith(("memory_gb.", "traffic_gb_per_layer.")) and not path.endswith("seconds"):
        return "GB"
    if path.startswith("per_token_mb."):
        return "MB"
    endings = {
        "_gb": "GB",
        "_gb_per_host": "GB",
        "gb_per_layer": "GB",
        "seconds": "s",
        "seconds_per_layer": "s",
        "bytes_per_token": "B",
        "bytes_per_parameter": "B",
        "tflops": "TFLOP/s",
        "flops_per_token_layer": "FLOP",
        "tokens_per_second_per_gpu": "tokens/s",
        "tokens_per_gpu": "tokens",
        "min_tokens_to_hide": "tokens",
        "context": "tokens",
        "days": "d",
    }
    return next((text for ending, text in endings.items() if path.endswith(ending)), "")
