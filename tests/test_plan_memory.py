"""Bytes by bucket: exact arithmetic, buckets that coexist, and simulated figures of the same layouts as witnesses."""

import dataclasses

import pytest

from lightning_moe_strategy.plan import activations, memory
from lightning_moe_strategy.plan.planner import PlanRequest, parse_layout, plan

# Sparse attention without P and dS, as the simulation had it.
GLM = PlanRequest(model="glm-5.2", fa4_pr_2816=True)
NVL72 = dataclasses.replace(GLM, **parse_layout("4,1,64/4,64"))
NVL8 = dataclasses.replace(GLM, cluster="b300-nvl8", context=262_144)


def gigabytes(request, layout=None):
    request = dataclasses.replace(request, **parse_layout(layout)) if layout else request
    return plan(request).to_json()["memory_gb"]


# Simulated with the real FSDP2 on a fake process group of GLM-5.2's dimensions (balanced routing, AdamW): GB.
SIMULATED_PEAKS = [
    (NVL72, "4,1,64/4,64", 81.1),
    (NVL8, "1,32,8/32,8", 117.7),
    (NVL8, "32,1,8/32,8", 144.25),
    (dataclasses.replace(GLM, gpus=128), "2,1,64/2,64", 121.9),
]


@pytest.mark.parametrize(("request_", "layout", "simulated"), SIMULATED_PEAKS)
def test_the_peak_is_the_simulated_one_within_5_percent(request_, layout, simulated):
    made = gigabytes(request_, layout)
    assert made["total"] - made["reserve"] == pytest.approx(simulated, rel=0.05)


def test_resident_state_is_the_simulated_one():
    made = gigabytes(NVL72)
    assert made["parameters"] == pytest.approx(49.91, rel=2e-3)
    # 12.48 parameters, 24.95 AdamW, 12.48 gradients.
    assert made["buckets"]["masters"] == pytest.approx(12.48, rel=2e-3)
    assert made["buckets"]["optimizer_state"] == pytest.approx(24.95, rel=2e-3)
    # 3.1219 B parameters on a rank.
    assert made["parameters"] / 16 == pytest.approx(3.1219, abs=1e-4)


def test_saved_inputs_and_top_k_are_the_simulated_ones():
    buckets = gigabytes(NVL72)["buckets"]
    assert buckets["block_inputs"] == pytest.approx(15.70, abs=0.01)
    assert buckets["dsa_topk"] == pytest.approx(2.82, abs=0.01)
    assert buckets["block_inputs"] == 78 * 6144 * 2 * 16384 / 1e9
    assert buckets["dsa_topk"] == 21 * 2048 * 4 * 16384 / 1e9


def test_worst_routing_goes_through_the_experts_gemms():
    """Simulated: 71.4 GB more for 917,504 more rows. Ours are a fifth smaller, and as many more as can come."""
    balanced, worst = gigabytes(NVL72), gigabytes(dataclasses.replace(NVL72, balance="worst"))
    # All 64 ranks send every token to this one, for each of the 4 experts it holds.
    rows = 16384 * (64 * 4 - 8)
    per_row = (worst["total"] - worst["reserve"] - balanced["total"] + balanced["reserve"]) * 1e9 / rows
    assert per_row == pytest.approx(2 * (3 * 6144 + 6 * 2048) + 4)
    assert per_row == pytest.approx(77.8e3, rel=0.22)


def test_buckets_at_the_peak_add_up_and_every_moment_is_below_it():
    made = gigabytes(NVL72)
    assert sum(made["buckets"].values()) == pytest.approx(made["total"])
    assert set(made["moments"]) == set(memory.MOMENTS)
    assert made["moments"][made["peak_moment"]] == max(made["moments"].values())
    assert made["moments"][made["peak_moment"]] == pytest.approx(made["total"] - made["reserve"])
    parts = made["parameters"] + made["fsdp_transient"] + made["dynamic"] + made["reserve"]
    assert parts - made["not_coexisting"] == pytest.approx(made["total"])
    assert made["headroom"] == pytest.approx(made["device"] - made["total"])


def test_gradients_and_saved_inputs_do_not_coexist():
    """At the start of the backward the inputs of all layers are there and next to no gradient; at its end, no input."""
    made = gigabytes(NVL72)
    assert made["peak_moment"] == "last layer's experts"
    assert made["buckets"]["gradients"] < 0.1 * made["parameters"] / 4
    assert made["not_coexisting"] > 12
    # With few tokens there is nothing to save, and the update is the peak: 16 bytes and a temporary of 4.
    few = gigabytes(dataclasses.replace(NVL72, context=128 * 64))
    assert few["peak_moment"] == "optimizer"
    assert few["total"] - few["reserve"] == pytest.approx(few["parameters"] * 20 / 16)


@pytest.mark.parametrize("policy", ["selective", "none"])
def test_less_recompute_keeps_more(policy):
    kept = gigabytes(dataclasses.replace(NVL72, recompute=policy, context=65_536))
    block = gigabytes(dataclasses.replace(NVL72, context=65_536))
    head = kept["moments"]["head and loss"] - block["moments"]["head and loss"]
    shape, tokens = plan(NVL72).workload.model, 1024
    per_layer = activations.attention_output(shape)
    if policy == "none":
        work = dataclasses.replace(plan(NVL72).workload, recompute="none")
        per_layer = activations.kept_by_attention(work) + activations.kept_beside_experts(shape)
        per_layer += 8 * (activations.received_row(shape) + activations.kept_by_expert_row(shape))
    # 3 of 78 layers have a plain MLP, which keeps a little less.
    assert head * 1e9 == pytest.approx(78 * tokens * per_layer, rel=0.03)
    backward = "last layer's attention"
    assert kept["moments"][backward] > block["moments"][backward]


def test_muon_keeps_one_moment_of_the_layers_matrices_and_two_of_the_rest():
    adamw, muon = gigabytes(NVL72), gigabytes(dataclasses.replace(NVL72, optimizer="muon"))
    outer = 2 * 154880 * 6144 / 64
    saved = 4 * (adamw["parameters"] / 16 * 1e9 - outer) / 1e9
    assert adamw["parameters"] - muon["parameters"] == pytest.approx(saved)


def test_fa4_pull_2816_saves_half_a_megabyte_per_token_in_each_pass():
    shape = plan(GLM).workload.model
    assert activations.probability_bytes(shape) == 128 * 2048 * 2
    without = gigabytes(dataclasses.replace(NVL72, fa4_pr_2816=False))["moments"]
    with_pull = gigabytes(NVL72)["moments"]
    forward = without["last layer's experts"] - with_pull["last layer's experts"]
    backward = without["last layer's attention"] - with_pull["last layer's attention"]
    assert forward * 1e9 == pytest.approx(16384 * 128 * 2048 * 2)
    assert backward * 1e9 == pytest.approx(2 * 16384 * 128 * 2048 * 2)


def test_static_dispatch_buffers_are_there_whatever_the_routing():
    for dispatcher, per_token in (("all_gather", 64 * 6 * 6144), ("symm_mem", 2 * 64 * (2 * 6144 + 8 * 8))):
        made = plan(dataclasses.replace(NVL72, dispatcher=dispatcher)).to_json()
        rows = 8 * (2 * 6144 + 4)
        assert made["per_token_mb"]["ep_buffer"] * 1e6 == pytest.approx(per_token + rows)
        assert made["memory_gb"]["moments"]["head and loss"] > gigabytes(NVL72)["moments"]["head and loss"]


def test_the_head_holds_the_logits_of_all_tokens_and_fp32_ones_of_a_chunk():
    work = plan(NVL72).workload
    side = plan(NVL72).evaluation.dense.side
    vocabulary, weights = 154880, 154880 * 6144
    logits = 4 * 16384 * vocabulary + 8 * 1024 * vocabulary
    assert memory.head_bytes(work, side) == 4 * weights + logits + 8 * 16384 * 6144


def test_dense_mla_holds_expanded_keys_and_values_of_the_whole_sequence():
    request = PlanRequest(model="deepseek-v3", cluster="h200-nvl8", gpus=256, context=131_072, cp=8)
    buckets = plan(request).evaluation.dense.moments["last layer's experts"]
    assert buckets["gathered_kv"] == 131_072 * (2 * 576 + 2 * 128 * (192 + 128))


PUBLIC_RUNS = [
    # NeMo Automodel's recipe takes 64 hosts "to avoid OOM".
    ("glm-5.2", "h100-nvl8", 512, 32_768, "1,64,8/8,64", True),
    ("glm-5.2", "h100-nvl8", 128, 32_768, "1,16,8/2,64", False),
    # torchtitan pull 2207, 8 sequences on each GPU.
    ("deepseek-v3", "gb200-nvl72", 256, 8 * 4096, "1,256,1/4,64", True),
    # prime-rl, 106 GiB measured.
    ("qwen3-30b-a3b", "h200-nvl8", 8, 16_384, "1,8,1/8,1", True),
    # TRL, with a loss in chunks; the logits of 131,072 tokens do not fit.
    ("qwen3-30b-a3b", "h100-nvl8", 8, 1_048_576, "1,1,8/8,1", False),
]


@pytest.mark.parametrize(("model", "cluster", "gpus", "tokens", "layout", "fits"), PUBLIC_RUNS)
def test_a_public_run_gets_its_verdict(model, cluster, gpus, tokens, layout, fits):
    request = PlanRequest(model=model, cluster=cluster, gpus=gpus, context=tokens)
    assert plan(dataclasses.replace(request, **parse_layout(layout))).fits is fits
