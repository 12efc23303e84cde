"""Planner and simulator, two witnesses of one step: every bucket at every moment, every axis, every kind of FLOP.

Five or six layers at the true number of GPUs have every quantity of a layer; even routing runs at the whole depth too.
"""

import dataclasses
from functools import cache

import pytest

from lightning_moe_strategy.plan import time
from lightning_moe_strategy.plan.traffic import Transfer
from tests.simulated_moments import Case, Witnesses, ask, differences

QWEN_ON_8 = Case(model="qwen3-30b-a3b", cluster="h200-nvl8", gpus=8, context=131_072, layout="1,1,8/1,8", layers=3)
QWEN_ON_64 = dataclasses.replace(QWEN_ON_8, gpus=64, context=65_536, layout="1,16,4/8,8")
QWEN_WITH_REPLICAS = dataclasses.replace(QWEN_ON_64, layout="4,4,4/2,4,8")
DEEPSEEK = Case(model="deepseek-v3", cluster="gb200-nvl72", gpus=256, context=32_768, layout="4,16,4/4,64", layers=5)
DEEPSEEK_4K = dataclasses.replace(DEEPSEEK, context=4096, micro_batch=8, layout="1,256,1/4,64")
GLM_NVL72 = Case(model="glm-5.2", cluster="gb200-nvl72", gpus=256, context=1_048_576, layout="4,1,64/4,64", layers=5)
GLM_NVL8 = dataclasses.replace(GLM_NVL72, cluster="b300-nvl8", context=262_144, layout="1,32,8/32,8")
GLM_NVL8_INSIDE = dataclasses.replace(GLM_NVL8, layout="32,1,8/32,8")

FAST = {
    "qwen-8": QWEN_ON_8,
    "qwen-64-kept": dataclasses.replace(QWEN_ON_64, recompute="none"),
    "glm-nvl72": GLM_NVL72,
    "qwen-64-selective": dataclasses.replace(QWEN_ON_64, recompute="selective"),
    "qwen-8-kept-chunks": dataclasses.replace(QWEN_ON_8, recompute="none", ep_chunks=4),
}
LAYOUTS = {
    "qwen-8": dataclasses.replace(QWEN_ON_8, context=16_384),
    "qwen-64": QWEN_ON_64,
    "deepseek": DEEPSEEK,
    "glm-nvl72": GLM_NVL72,
    "glm-nvl8": GLM_NVL8,
    "glm-nvl8-inside": GLM_NVL8_INSIDE,
}
WHOLE = {f"{name}-whole": dataclasses.replace(case, layers=None) for name, case in LAYOUTS.items()}
SHALLOW = {f"{name}-worst": dataclasses.replace(case, routing="worst") for name, case in LAYOUTS.items()} | {
    "qwen-8-experts-not-spread": dataclasses.replace(QWEN_ON_8, layout="1,1,8/8,1"),
    "qwen-8-one-rank-a-sequence": dataclasses.replace(QWEN_ON_8, context=16_384, layout="1,8,1/1,8"),
    "qwen-64-replicas": QWEN_WITH_REPLICAS,
    "qwen-64-kept-worst-chunks": dataclasses.replace(QWEN_ON_64, recompute="none", routing="worst", ep_chunks=4),
    "glm-nvl8-worst-chunks": dataclasses.replace(GLM_NVL8, routing="worst", ep_chunks="adaptive"),
    "deepseek-worst-chunks": dataclasses.replace(DEEPSEEK, routing="worst", ep_chunks=4),
    "glm-nvl72-worst-chunks": dataclasses.replace(GLM_NVL72, routing="worst", ep_chunks="adaptive"),
    "deepseek-kept": dataclasses.replace(DEEPSEEK, recompute="none"),
    "glm-nvl8-kept": dataclasses.replace(GLM_NVL8, recompute="none"),
    "glm-nvl72-selective": dataclasses.replace(GLM_NVL72, recompute="selective"),
    "deepseek-selective": dataclasses.replace(DEEPSEEK, recompute="selective"),
}


# The planner's traffic and time are those of even routing.
EVEN = [{name: case for name, case in group.items() if case.routing == "balanced"} for group in (FAST, SHALLOW, WHOLE)]


@cache
def asked(case: Case) -> Witnesses:
    return ask(case)


def cases(*groups: dict[str, Case]) -> list[object]:
    return [
        pytest.param(case, id=name, marks=() if case in FAST.values() else pytest.mark.slow)
        for group in groups
        for name, case in group.items()
    ]


def unplanned(case):
    """What the planner leaves out, bytes by bucket."""
    found = {}
    if case.model == "deepseek-v3":
        found["layer"] = 0.16e9  # latents are made before queries, and their gradients wait for those of queries
    if case.ep_chunks != "none":
        found["saved"] = 0.035e9  # which rows a chunk received, until the step's graph is let go of
    return found


@pytest.mark.parametrize("case", cases(FAST, SHALLOW, WHOLE))
def test_every_bucket_at_every_moment_is_the_simulated_one_within_5_percent(case):
    assert differences(asked(case), unplanned=unplanned(case)) == []


@pytest.mark.parametrize("case", cases(FAST, SHALLOW, WHOLE))
def test_the_planned_peak_is_the_simulated_one_within_1_percent(case):
    witnesses = asked(case)
    planned = witnesses.plan.evaluation.peak.buckets
    without_reserve = sum(size for name, size in planned.items() if name != "allocator_reserve")
    left_out = sum(unplanned(case).values())
    assert without_reserve == pytest.approx(witnesses.simulation.peak_bytes, rel=0.01, abs=left_out)


@pytest.mark.parametrize("case", [QWEN_ON_8, GLM_NVL72])
def test_inputs_routing_and_chosen_keys_kept_between_passes_are_the_simulated_ones(case):
    """Small beside a step of few layers, large at the whole depth: closer than the 5 % of every bucket."""
    witnesses = asked(case)
    planned, simulated = (side["last layer's experts"]["saved"] for side in (witnesses.planned, witnesses.simulated))
    assert planned == pytest.approx(simulated, rel=1e-3)


@pytest.mark.slow
def test_without_a_kernel_for_the_cpu_only_the_attention_differs():
    """DeepSeek-V3 without cp: fake tensors are on the CPU, whose torch has no kernel for heads of 192 and 128.

    It materialises softmax(QK^T), 69 GB that a GPU's kernels do not have. In the forward that is the peak of the layer.
    """
    found = [line for line in differences(asked(DEEPSEEK_4K)) if not line.startswith("experts in the forward")]
    assert found and all(", layer:" in line or ", keys and values:" in line for line in found)


@pytest.mark.parametrize("case", cases(*EVEN))
def test_bytes_of_every_axis_are_the_simulated_ones_within_5_percent(case):
    witnesses = asked(case)
    simulated = received_bytes(witnesses)
    planned = {axis: size for axis, size in planned_bytes(witnesses).items() if size}
    assert planned == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("case", cases(*EVEN))
def test_flops_are_the_simulated_ones_within_5_percent(case):
    assert planned_flops(asked(case)) == pytest.approx(simulated_flops(asked(case)), rel=0.05)


def received_bytes(witnesses: Witnesses) -> dict[str, float]:
    """Of the layers, a step, by axis: of the larger buffer of a collective, what is not a rank's own."""
    simulation = witnesses.simulation
    sizes: dict[str, float] = {}
    for (axis, collective), size in simulation.num_bytes.items():
        if axis in ("world", "fsdp_cp"):
            continue
        # An all-reduce passes every piece on twice.
        passes = 2 if collective == "all_reduce" else 1
        sizes[axis] = sizes.get(axis, 0.0) + passes * size * remote_share(witnesses, axis)
    # The planner's traffic is that of layers; the simulator's is that of embedding and head as well.
    blocks = [unit for name, unit in simulation.units.items() if ".layers." in name and not name.endswith("experts")]
    shards = sum(unit.all_gather_bytes + unit.reduce_scatter_bytes for unit in blocks)
    return sizes | {"fsdp_cp": shards * remote_share(witnesses, "fsdp_cp")}


def planned_bytes(witnesses: Witnesses) -> dict[str, float]:
    evaluation, shape = witnesses.plan.evaluation, witnesses.plan.workload.model

    def in_a_step(transfer: Transfer) -> float:
        layers = shape.moe_layers if transfer.only_moe_layers else shape.layers
        return (transfer.rdma + transfer.nvlink) * (1 if transfer.per_step else layers)

    return {t.axis: in_a_step(t) for t in (*evaluation.dense.transfers, *evaluation.experts.transfers)}


def remote_share(witnesses: Witnesses, axis: str) -> float:
    degree = witnesses.simulation.dims.degree(axis)
    return (degree - 1) / degree


def simulated_flops(witnesses: Witnesses) -> dict[str, float]:
    """Of the layers, by kind and pass; a causal square counts half."""
    sums = {"linear forward": 0.0, "linear step": 0.0, "attention forward": 0.0, "attention step": 0.0, "indexer": 0.0}
    for (phase, module, operation), count in witnesses.simulation.flops.items():
        if ".layers." not in module:
            continue
        kind = "attention" if "attention" in operation else "linear"
        if operation == "select_keys":
            sums["indexer"] += count
            continue
        sums[f"{kind} step"] += count
        if phase == "forward":
            sums[f"{kind} forward"] += count
    return sums


def planned_flops(witnesses: Witnesses) -> dict[str, float]:
    made, shape = witnesses.plan, witnesses.plan.workload.model
    side, tokens = made.evaluation.dense.side, made.evaluation.dense.tokens
    compute = time.layer_compute(made.workload, side)
    # What is executed, not what is needed: under cp the kernel takes keys and values of one width.
    widened = 1.0
    if shape.attention == "mla" and not shape.is_sparse and side.cp > 1:
        widened = 2 * max(shape.qk_head_dim, shape.v_head_dim) / (shape.qk_head_dim + shape.v_head_dim)
    attention = compute.attention * widened
    passes = 1 + time.ATTENTION_BACKWARD + compute.recomputes_attention
    per_token = {
        "linear forward": compute.linear,
        "linear step": compute.linear_step,
        "attention forward": attention,
        "attention step": attention * passes,
        "indexer": compute.indexer,
    }
    return {name: flops * tokens * shape.layers for name, flops in per_token.items()}
