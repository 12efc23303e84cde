"""Every number the seed derives, from the planner with ``assumptions="seed"``."""

import dataclasses
import random

import pytest

from lightning_moe_strategy.plan import assumptions, tensor_parallel
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.memory import least_gpus
from lightning_moe_strategy.plan.planner import PlanRequest, parse_layout, plan, search

NVL72 = PlanRequest(model="glm-5.2", cluster="gb200-nvl72", gpus=256, context=1_048_576, assumptions="seed")
NVL8 = PlanRequest(
    model="glm-5.2", cluster="b300-nvl8", gpus=256, context=262_144, assumptions="seed", fa4_pr_2816=True
)
NVL8_1M = dataclasses.replace(NVL8, context=1_048_576)


def values(request, layout=None):
    if layout is not None:
        request = dataclasses.replace(request, **parse_layout(layout))
    return plan(request).to_json()


def value(json, path):
    for name in path.split("."):
        json = json[name]
    return json


def rounded_alike(found, written):
    """The seed's number is the found one, rounded to the digits the seed writes or one in the last of them."""
    digits = len(written.partition(".")[2])
    return abs(found - float(written)) <= 1.001 * 10.0**-digits


# Seed, "Deriving the Scheme" and "Hiding eFSDP Communication": 256 GB200, 1M tokens, (4, 1, 64)/(4, 64).
DERIVED_NVL72 = [
    ("per_token_mb.block_inputs", "0.958"),
    ("per_token_mb.dsa_topk", "0.172"),
    ("per_token_mb.ep_buffer", "0.852"),
    ("per_token_mb.recompute_backward", "2.5"),
    ("resident_bytes_per_parameter", "18"),
    ("memory_gb.fsdp_transient", "2.727"),
    ("memory_gb.dynamic", "73.4"),
    ("memory_gb.parameters", "56.122"),
    ("memory_gb.total", "133"),
    ("memory_gb.device", "200"),
    ("memory_gb.headroom", "67"),
    ("efsdp.layer_expert_gb", "0.300"),
    ("efsdp.gb_per_layer", "1.200"),
    ("efsdp.seconds_per_layer", "0.027"),
    ("efsdp.min_tokens_to_hide", "4500"),
    ("efsdp.tokens_per_gpu", "16384"),
    ("compute.attention_ratio", "4"),
]


@pytest.mark.parametrize(("path", "written"), DERIVED_NVL72)
def test_nvl72_at_1m(path, written):
    assert rounded_alike(value(values(NVL72), path), written)


def test_dynamic_memory_from_the_rounded_bytes_per_token():
    per_token = sum(round(size, 3) for size in values(NVL72)["per_token_mb"].values())
    assert round(1_048_576 * per_token / 64 / 1e3, 3) == 73.433


def test_the_layout_of_the_seed_is_the_one_chosen():
    made = values(NVL72)
    degrees = {"d_rep": 4, "fsdp": 1, "cp": 64, "cp_inter": 1, "e_rep": 1, "e_fsdp": 4, "ep": 64}
    assert made["layout"] == degrees
    assert made["fits"] and made["efsdp"]["hidden"]
    assert plan(NVL72).to_json() == search(NVL72)[0].to_json()


def test_parameters_flops_and_the_structural_waste():
    made = values(NVL72)
    assert made["parameters"]["total"] == 753e9
    assert made["parameters"]["expert_share"] == 0.98
    assert made["parameters"]["active_per_layer"] == 0.5e9
    assert made["compute"]["flops_per_token_layer"] == 4e9
    assert round(100 * made["efsdp"]["structural_share"], 2) == 1.28
    assert round(100 * made["efsdp"]["exposed_share"], 2) == 1.28
    # A pipeline of 4 stages has as small a bubble with 231 micro-batches.
    micro_batches = made["efsdp"]["pipeline_micro_batches_for_equal_bubble"]
    assert 3 / (micro_batches + 3) == pytest.approx(1 / 78)


def test_a_trillion_parameters_need_18_tb_and_90_gpus():
    assert 1e12 * sum(assumptions.RESIDENT.values()) == 18e12
    assert least_gpus(1e12, 18, 200e9) == 90


def test_one_token_on_its_way_to_an_ep_rank_is_13312_bytes():
    assert assumptions.ROW_BYTES == 13312


def test_what_the_seed_rounds_is_rounded_from_what_it_derives():
    layer = 753e9 / 78
    assert round(layer * 0.98 * 2 / 64 / 1e6, 1) == 295.6 and assumptions.round_layer_bytes(295.6e6) == 300e6
    assert round(1.2 / 45, 4) == 0.0267 and assumptions.round_seconds(1.2 / 45) == 0.027
    assert round(layer * (0.02 + 0.98 * 8 / 256) / 1e9, 1) == 0.5
    assert assumptions.attention_ratio(262_144) == 2 and assumptions.attention_ratio(1_048_576) == 4


def test_fa4_pull_2816_makes_128_gpus_or_a_micro_batch_of_2_fit():
    """Seed: "it fits even when shrunk to 128 GPUs. Or, staying at 256 GPUs, the microbatch can go from 1 to 2"."""
    saved = values(NVL72)["per_token_mb"]["recompute_backward"]
    with_pull = dataclasses.replace(NVL72, fa4_pr_2816=True)
    assert saved - values(with_pull)["per_token_mb"]["recompute_backward"] == pytest.approx(1.0)
    assert plan(dataclasses.replace(with_pull, gpus=128, **parse_layout("2,1,64/2,64"))).fits
    layout = parse_layout("4,1,64/4,64")
    assert plan(dataclasses.replace(with_pull, micro_batch=2, **layout)).fits
    assert not plan(dataclasses.replace(NVL72, micro_batch=2, **layout)).fits


# Seed, "Bonus": 256 B300, 256k tokens. Dense parameters over RDMA, (1, 32, 8), or inside the domain, (32, 1, 8).
DERIVED_NVL8 = [
    ("per_token_mb.ep_buffer", "0.106"),
    ("per_token_mb.recompute_backward", "1.5"),
    ("memory_gb.fsdp_transient", "11.005"),
    ("memory_gb.parameters", "52.95"),
    ("memory_gb.device", "309"),
    ("efsdp.layer_expert_gb", "2.365"),
    ("efsdp.gb_per_layer", "9.460"),
    ("efsdp.dense_gb_per_layer", "1.544"),
    ("efsdp.seconds_per_layer", "0.122"),
    ("efsdp.tokens_per_gpu", "32768"),
    ("compute.attention_ratio", "2"),
]


@pytest.mark.parametrize(("path", "written"), DERIVED_NVL8)
def test_nvl8_at_256k(path, written):
    assert rounded_alike(value(values(NVL8, "1,32,8/32,8"), path), written)


def test_nvl8_at_256k_in_sums():
    sharded, replicated = values(NVL8, "1,32,8/32,8"), values(NVL8, "32,1,8/32,8")
    # The seed counts the FSDP buffers as dynamic here: 100.66 GB.
    dynamic = sharded["memory_gb"]["dynamic"] + sharded["memory_gb"]["fsdp_transient"]
    assert dynamic == pytest.approx(100.66, abs=0.05)
    assert round(replicated["memory_gb"]["parameters"], 2) == 85.77
    assert sharded["efsdp"]["gb_per_layer"] + sharded["efsdp"]["dense_gb_per_layer"] == pytest.approx(11.0, abs=0.01)
    # 20,333 before the seed rounds it down.
    assert sharded["efsdp"]["min_tokens_to_hide"] == pytest.approx(20_300, abs=50)
    for made in (sharded, replicated):
        assert made["fits"] and made["efsdp"]["hidden"]
    # Dense shards inside the domain leave RDMA to the experts.
    assert replicated["efsdp"]["seconds_per_layer"] == pytest.approx(9.460 / 90, abs=1e-3)


def test_1m_on_nvl8_is_broken_by_dynamic_memory():
    """Seed: "For one-million-token context, however, this scheme falls apart; dynamic memory alone isn't enough"."""
    made = plan(dataclasses.replace(NVL8_1M, cp=8))
    assert made.to_json()["memory_gb"]["dynamic"] > 309
    assert not made.fits
    assert "dynamic memory breaks it" in made.verdict
    assert "what helps most is to lay it out as" in made.verdict


DERIVED_2D = [
    ("cp.kv_bytes_per_token", "1408"),
    ("cp.kv_gb", "1.476"),
    ("cp.rdma_gb", "0.1615"),
    ("cp.nvlink_gb", "1.292"),
    ("cp.rdma_seconds", "0.0072"),
    ("compute.layer_seconds", "0.164"),
    ("cp.extra_time_share", "0.044"),
    ("efsdp.seconds_per_layer", "0.122"),
    ("efsdp.min_tokens_to_hide", "12200"),
    ("efsdp.tokens_per_gpu", "16384"),
]


@pytest.mark.parametrize(("path", "written"), DERIVED_2D)
def test_1m_on_nvl8_with_two_dimensional_cp(path, written):
    assert rounded_alike(value(values(NVL8_1M, "4,1,8x8/32,8"), path), written)


def test_1m_on_nvl8_with_two_dimensional_cp_fits_and_hides():
    made = values(NVL8_1M, "4,1,8x8/32,8")
    assert made["fits"] and made["efsdp"]["hidden"]


def test_flat_cp_over_domains_moves_eight_times_as_much_over_rdma():
    flat, hierarchical = values(NVL8_1M, "4,1,64/32,8"), values(NVL8_1M, "4,1,8x8/32,8")
    assert flat["cp"]["rdma_gb"] == pytest.approx(8 * hierarchical["cp"]["rdma_gb"])


def test_etp_never_raises_the_skew_and_moves_etp_times_the_bytes():
    """Seed, "TP": the mean of a group never exceeds its maximum; EP communication becomes 4x."""
    generator = random.Random(0)
    for _ in range(50):
        loads = [generator.expovariate(1.0) for _ in range(64)]
        grouped = tensor_parallel.grouped_loads(loads, 4)
        assert len(grouped) == 16
        assert sum(grouped) / 16 == pytest.approx(sum(loads) / 64)
        assert tensor_parallel.skew(grouped) <= tensor_parallel.skew(loads) + 1e-12
    assert tensor_parallel.traffic_factor(4) == 4
    with pytest.raises(PlanError, match=r"etp\(5\) must divide ep\(64\)"):
        tensor_parallel.grouped_loads(loads, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "deepseek-v3"}, r"assumptions\('seed'\) are GLM-5.2's, and model is 'deepseek-v3'"),
        ({"recompute": "none"}, r"recompute\('none'\) has no figure in the seed, which prices 'block'"),
        ({"optimizer": "muon"}, r"optimizer\('muon'\) has no figure"),
        ({"balance": "balanced"}, r"balance\('balanced'\) has no figure in the seed, which prices 'worst'"),
    ],
)
def test_what_the_seed_does_not_price_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(dataclasses.replace(NVL72, **changes))


def test_seed_and_exact_stand_side_by_side_where_they_differ():
    request = dataclasses.replace(NVL72, **parse_layout("4,1,64/4,64"))
    by_seed, exact = values(request), values(dataclasses.replace(request, assumptions="exact"))
    assert by_seed["differences"] == exact["differences"]
    shown = {row["quantity"]: (round(row["seed"], 2), round(row["exact"], 2)) for row in exact["differences"]}
    assert shown["parameters"] == (753.0, 743.38)
    assert shown["dense share"] == (2.0, 2.5)
    # 16, and 4 of the indexers' frozen weights.
    assert shown["resident bytes per parameter"] == (18, 15.99)
    assert shown["gathered per token and layer"] == (1408, 1220.92)
    assert shown["rows of the worst routing"] == (13.96, 257.8)
    assert all(row["why"] for row in exact["differences"])
    assert values(dataclasses.replace(request, model="kimi-k2", assumptions="exact"))["differences"] == []
