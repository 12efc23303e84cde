"""Bytes by bucket: exact arithmetic, buckets that coexist, and simulated figures of the same layouts as witnesses."""

import dataclasses

import pytest

from lightning_moe_strategy.context_parallel import latent
from lightning_moe_strategy.plan import activations, memory
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.planner import PlanRequest, parse_layout, plan
from lightning_moe_strategy.plan.verdict import changes

GLM = PlanRequest(model="glm-5.2")
NVL72 = dataclasses.replace(GLM, **parse_layout("4,1,64/4,64"))
NVL8 = dataclasses.replace(GLM, cluster="b300-nvl8", context=262_144)


def gigabytes(request, layout=None):
    request = dataclasses.replace(request, **parse_layout(layout)) if layout else request
    return plan(request).to_json()["memory_gb"]


# Simulated with the real FSDP2 on a fake process group of GLM-5.2's dimensions (balanced routing, AdamW): GB. Other
# code, whose SwiGLU has FP32 temporaries of all rows: up to 7 % more than a plan.
SIMULATED_PEAKS = [
    (NVL72, "4,1,64/4,64", 81.1),
    (NVL8, "1,32,8/32,8", 117.7),
    (NVL8, "32,1,8/32,8", 144.25),
    (dataclasses.replace(GLM, gpus=128), "2,1,64/2,64", 121.9),
]


@pytest.mark.parametrize(("request_", "layout", "simulated"), SIMULATED_PEAKS)
def test_the_peak_is_the_simulated_one_within_7_percent(request_, layout, simulated):
    made = gigabytes(request_, layout)
    assert made["total"] - made["reserve"] == pytest.approx(simulated, rel=0.07)


def test_resident_state_is_the_simulated_one():
    made = gigabytes(NVL72)
    assert made["parameters"] == pytest.approx(49.91, rel=2e-3)
    # 12.48 parameters, 24.95 AdamW, 12.48 gradients; 3.1219 B parameters on a rank.
    assert made["buckets"]["masters"] / 4 == pytest.approx(3.1219, abs=1e-4)
    assert made["buckets"]["optimizer_state"] == pytest.approx(24.95, rel=2e-3)


def test_frozen_indexers_have_masters_alone():
    dense = plan(NVL72).evaluation.dense
    counts = plan(NVL72).workload.model.counts
    resident = dense.moments["optimizer"]
    assert resident["masters"] == 4 * counts.dense / 64
    assert resident["gradients"] == 4 * (counts.dense - counts.indexer) / 64
    assert resident["optimizer_state"] == 2 * resident["gradients"]


def test_saved_inputs_and_top_k_are_the_simulated_ones():
    saved = plan(NVL72).evaluation.dense.moments["last layer's experts"]
    assert saved["block_inputs"] == pytest.approx(15.70e9, abs=0.01e9)
    assert saved["dsa_topk"] == pytest.approx(2.82e9, abs=0.01e9)
    assert saved["block_inputs"] == 78 * 6144 * 2 * 16384
    assert saved["dsa_topk"] == 21 * 2048 * 4 * 16384
    assert saved["router_state"] == 75 * (4 * 256 + 12 * 8) * 16384


def test_worst_routing_goes_through_the_experts_gemms():
    """All 64 ranks send every token to this one, for each of the 4 experts it holds."""
    requests = (NVL72, dataclasses.replace(NVL72, balance="worst"))
    balanced, worst = (gigabytes(request)["moments"]["experts before the last"] for request in requests)
    rows = 16384 * (64 * 4 - 8)
    # bf16: the row, the gradients of its result and of itself, gate and up with theirs, the activation with its own.
    kernel = 2 * (3 * 6144 + 6 * 2048)
    # Its probability and indices; and of each of the 74 layers before the last, where a row is from (int32).
    assert (worst - balanced) * 1e9 / rows == pytest.approx(kernel + 4 + 5 * 4 + 74 * 4)


@pytest.mark.parametrize("request_", [NVL72, dataclasses.replace(NVL8, **parse_layout("1,32,8/32,8"))])
def test_the_worst_routing_in_adaptive_chunks_takes_one_and_a_half_times_the_rows_of_even_routing(request_):
    worst = dataclasses.replace(request_, balance="worst", ep_chunks="adaptive")
    even, chunked = (plan(each).evaluation.experts.moments["experts before the last"] for each in (request_, worst))
    rows = [moment["ep_buffers"] + moment["expert_rows"] for moment in (even, chunked)]
    assert 1.3 * rows[0] < rows[1] <= 1.5 * rows[0]
    assert plan(dataclasses.replace(request_, ep_chunks="adaptive")).to_json()["memory_gb"] == gigabytes(request_)


def test_glm_at_a_million_tokens_has_room_for_any_routing_in_chunks():
    """Seed, "Deriving the Scheme": about 133 GB, dispatch buffers for the worst routing included."""
    worst = dataclasses.replace(NVL72, balance="worst")
    assert gigabytes(worst)["total"] > 250
    for chunks in ("adaptive", 8, 64):
        assert gigabytes(dataclasses.replace(worst, ep_chunks=chunks))["total"] < 133
    after = dict(changes(plan(worst).evaluation))["run experts in adaptive chunks"]
    assert after.fits and not plan(worst).fits


def test_chunks_cost_a_dispatch_and_a_forward_of_the_experts_more():
    at_once, chunked = plan(NVL72), plan(dataclasses.replace(NVL72, ep_chunks=4))
    ep = [{t.axis: t for t in made.evaluation.experts.transfers}["ep"].nvlink for made in (at_once, chunked)]
    assert ep[1] / ep[0] == pytest.approx(4 / 3, rel=1e-3)  # ids travel once
    assert chunked.tokens_per_second_per_gpu < at_once.tokens_per_second_per_gpu
    assert chunked.to_json()["settings"]["ep_chunks"] == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ep_chunks": 0}, r"^ep_chunks\(0\) must be"),
        ({"ep_chunks": True}, r"^ep_chunks\(True\) must be"),
        ({"ep_chunks": "some"}, r"^ep_chunks\(.?some.?\) must be"),
        ({"ep_chunk_bytes": 10}, r"^ep_chunk_bytes\(10\) must be left out unless ep_chunks is adaptive"),
        ({"ep_chunks": "adaptive", "ep_chunk_bytes": 0}, r"^ep_chunk_bytes\(0\) must be a whole number"),
        ({"ep_chunks": 4, "assumptions": "seed"}, r"^ep_chunks\(4\) has no figure in the seed"),
    ],
)
def test_errors_about_chunks_name_the_setting(settings, words):
    with pytest.raises(PlanError, match=words):
        plan(dataclasses.replace(NVL72, **settings))


def test_experts_on_their_own_rank_keep_tokens_in_place_of_rows():
    request = PlanRequest(model="qwen3-30b-a3b", cluster="h200-nvl8", gpus=8, context=131_072)
    alone, spread = (dataclasses.replace(request, **parse_layout(layout)) for layout in ("1,1,8/8,1", "1,1,8/1,8"))
    kept = [plan(each).evaluation.experts.moments["last layer's experts"]["ep_buffers"] for each in (alone, spread)]
    assert kept == [16384 * (2 * 2048 + 4 * 8), 16384 * 8 * (2 * 2048 + 4)]


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
    made = gigabytes(dataclasses.replace(NVL72, balance="worst"))
    assert made["peak_moment"] == "experts before the last"
    assert made["buckets"]["gradients"] < 0.1 * made["parameters"] / 4
    assert made["not_coexisting"] > 12
    # With few tokens there is nothing to save, and the update is the peak: 16 bytes and a temporary of 4.
    few = gigabytes(dataclasses.replace(NVL72, context=128 * 64))
    assert few["peak_moment"] == "optimizer"
    resident, temporaries = few["parameters"], few["buckets"]["optimizer_temporaries"]
    assert few["total"] - few["reserve"] == pytest.approx(resident + temporaries)
    assert temporaries == pytest.approx(resident * 4 / 16, rel=1e-3)


@pytest.mark.parametrize("policy", ["selective", "none"])
def test_less_recompute_keeps_more(policy):
    kept = gigabytes(dataclasses.replace(NVL72, recompute=policy, context=65_536))
    block = gigabytes(dataclasses.replace(NVL72, context=65_536))
    head = kept["moments"]["head and loss"] - block["moments"]["head and loss"]
    shape, tokens = plan(NVL72).workload.model, 1024
    per_layer = activations.attention_output(shape)
    if policy == "none":
        made = plan(dataclasses.replace(NVL72, recompute="none"))
        per_layer = activations.kept_by_attention(made.workload, made.evaluation.dense.side)
        per_layer += activations.kept_by_moe(shape)
        per_layer += 8 * (activations.received_row(shape) + activations.kept_by_expert_row(shape))
        # The block's input in bf16, and the routing, are no longer beside all that.
        per_layer -= 2 * shape.hidden + activations.routing_kept(shape)
    # 3 of 78 layers have a plain MLP, which keeps a little less.
    assert head * 1e9 == pytest.approx(78 * tokens * per_layer, rel=0.03)
    backward = "last layer's attention"
    assert kept["moments"][backward] > block["moments"][backward]


def test_muon_keeps_one_moment_of_the_layers_matrices_and_two_of_the_rest():
    adamw, muon = gigabytes(NVL72), gigabytes(dataclasses.replace(NVL72, optimizer="muon"))
    outer = 2 * 154880 * 6144 / 64
    trained = adamw["buckets"]["optimizer_state"] * 1e9 / 8
    assert adamw["parameters"] - muon["parameters"] == pytest.approx(4 * (trained - outer) / 1e9)


def test_fa4_pull_2816_saves_half_a_megabyte_per_token_in_each_pass():
    shape = plan(GLM).workload.model
    assert activations.probability_bytes(shape) == 128 * 2048 * 2
    without = gigabytes(dataclasses.replace(NVL72, fa4_pr_2816=False))["moments"]
    with_pull = gigabytes(NVL72)["moments"]
    forward = without["last layer's experts"] - with_pull["last layer's experts"]
    backward = without["last layer's attention"] - with_pull["last layer's attention"]
    assert forward * 1e9 == pytest.approx(16384 * 128 * 2048 * 2)
    assert backward * 1e9 == pytest.approx(2 * 16384 * 128 * 2048 * 2)


@pytest.mark.parametrize(
    ("chunk", "micro_batch", "tokens"), [(None, 1, 0), (2048, 1, 2048), (0, 1, 16384), (10**6, 1, 16384), (0, 2, 16384)]
)
def test_a_token_chunk_has_its_score_gradients_in_memory_and_no_others(chunk, micro_batch, tokens):
    """Of the 64 heads there are; a whole sequence at most, however many there are."""
    request = dataclasses.replace(NVL72, micro_batch=micro_batch)
    made = plan(dataclasses.replace(request, fa4_token_chunk=chunk)).to_json()
    moments, without = made["memory_gb"]["moments"], gigabytes(request)["moments"]
    added = {moment: moments[moment] - without[moment] for moment in moments}
    attention = {f"{which} layer's attention" for which in ("last", "second", "first")} & set(added)
    assert attention and made["settings"]["fa4_token_chunk"] == chunk
    for moment, size in added.items():
        expected = 2 * 64 * 2048 * tokens if moment in attention else 0
        assert size * 1e9 == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fa4_token_chunk": -1}, r"^fa4_token_chunk\(-1\) must be a whole number of at least 0"),
        ({"fa4_token_chunk": True}, r"^fa4_token_chunk\(True\) must be a whole number"),
        ({"fa4_token_chunk": 64, "fa4_pr_2816": False}, r"left out without fa4_pr_2816, whose option it is"),
        ({"fa4_token_chunk": 64, "model": "deepseek-v3"}, r"left out where attention is not sparse"),
        (
            {"fa4_token_chunk": 64, "assumptions": "seed", "fa4_pr_2816": True},
            r"^fa4_token_chunk\(64\) has no figure in the seed",
        ),
    ],
)
def test_a_token_chunk_that_prices_nothing_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        plan(dataclasses.replace(NVL72, **change))


def test_exact_plans_have_kernels_without_p_and_the_seeds_have_it():
    exact, seed = (plan(dataclasses.replace(GLM, assumptions=each)) for each in ("exact", "seed"))
    assert (exact.workload.fa4_pr_2816, seed.workload.fa4_pr_2816) == (True, False)
    assert plan(dataclasses.replace(GLM, fa4_pr_2816=False)).workload.fa4_pr_2816 is False


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        # Of 8 of 256 experts on 64 ranks, 7.68 are on different ones, and results have a place for each of the 8.
        ({}, 8),
        ({"balance": "worst"}, 64),
        ({"ep_chunks": "adaptive", "balance": "worst"}, 8),
        # A copy of every token of the 64 ranks, whatever the routing.
        ({"ep_chunks": 1}, 64),
        ({"ep_chunks": 4}, 16),
    ],
)
def test_one_sided_writes_have_two_buffers_for_the_most_that_an_exchange_brings(options, copies):
    request = dataclasses.replace(NVL72, **options)
    # In a number of chunks, rows beside the buffers are those of the worst routing.
    same_rows = {"balance": "worst"} if isinstance(request.ep_chunks, int) else {}
    alone = plan(dataclasses.replace(request, dispatcher="all_to_all", **same_rows)).to_json()
    buffered = plan(dataclasses.replace(request, dispatcher="symm_mem")).to_json()
    added = buffered["per_token_mb"]["ep_buffer"] - alone["per_token_mb"]["ep_buffer"]
    assert added * 1e6 == pytest.approx(2 * copies * (2 * 6144 + 4 * 8))
    of_loss = [made["memory_gb"]["moments"]["head and loss"] for made in (alone, buffered)]
    assert of_loss[1] > of_loss[0]


def test_one_sided_writes_in_chunks_provide_for_the_worst_rows_of_one_whatever_the_routing():
    bounded = dataclasses.replace(NVL72, dispatcher="symm_mem", ep_chunks=8)
    worst = dataclasses.replace(NVL72, balance="worst", ep_chunks=8)
    rows = [plan(each).workload.expert_rows_per_token(plan(each).evaluation.experts.side) for each in (bounded, worst)]
    assert rows == [256, 256]
    exact = plan(dataclasses.replace(NVL72, dispatcher="symm_mem", recompute="none"))
    assert not exact.workload.keeps_copies(exact.evaluation.experts.side, 16384)


def test_the_head_holds_the_logits_of_all_tokens_and_fp32_ones_of_a_chunk():
    work = plan(NVL72).workload
    side = plan(NVL72).evaluation.dense.side
    vocabulary, weights = 154880, 154880 * 6144
    logits = 4 * 16384 * vocabulary + 3 * 4 * 1024 * vocabulary
    assert memory.head_bytes(work, side) == 2 * weights + logits + 8 * 16384 * 6144
    # With few tokens it is the head's gradient, in bf16 and in FP32.
    few = dataclasses.replace(work, context=64 * 512)
    assert memory.head_bytes(few, side) == 6 * weights + (2 + 8) * 512 * 6144


def test_dense_mla_under_cp_holds_latents_and_expands_a_gigabyte_at_a_time():
    request = PlanRequest(model="deepseek-v3", cluster="h200-nvl8", gpus=256, context=131_072, cp=8)
    moments = plan(request).evaluation.dense.moments
    latents = 131_072 * 2 * 576
    assert moments["last layer's experts"]["gathered_kv"] == latents
    # 12 of 128 heads, keys of 192 and values of 128 channels: bf16, values widened, FP32 gradients, and those of 15 of
    # 16 segments as a kernel returns them; the latents' gradient in FP32.
    of_heads = 131_072 * 12 * (2 * (192 + 128) + 2 * 192 + 4 * (192 + 128) + 2 * 2 * 192 * 15 / 16)
    assert activations.EXPANDED_BYTES == latent.EXPANDED_BYTES == 2**30
    assert 12 * 131_072 * 2 * (128 + 128 + 64) <= 2**30 < 13 * 131_072 * 2 * (128 + 128 + 64)
    assert moments["last layer's attention"]["gathered_kv"] == pytest.approx(3 * latents + of_heads)


def test_dense_mla_without_cp_holds_keys_and_values_of_all_heads():
    request = PlanRequest(model="deepseek-v3", cluster="h200-nvl8", gpus=256, context=4096, cp=1)
    held = plan(request).evaluation.dense.moments["last layer's experts"]["gathered_kv"]
    assert held == 4096 * 2 * 128 * (128 + 128 + 192)


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


def test_a_checkpoint_has_weights_and_adam_state_of_all_gpus_once():
    planned = plan(PlanRequest(model="qwen3-30b-a3b", cluster="h200-nvl8", gpus=16, context=32768))
    values, work = planned.to_json(), planned.workload
    saved = values["checkpoint"]
    assert saved["total_gb"] == pytest.approx(12 * work.model.counts.total / 1e9)
    dense, experts = planned.evaluation.dense.side, planned.evaluation.experts.side
    own = 12 * (work.model.counts.dense / dense.shards + work.model.counts.experts / experts.shards)
    assert saved["async_snapshot_gb"] == pytest.approx(own / 1e9)
    assert saved["async_snapshot_gb_per_host"] == pytest.approx(8 * own / 1e9)
