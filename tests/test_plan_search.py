"""Every layout is found, priced alike alone and in a search, ranked by speed; the sentence says what was computed."""

import dataclasses
import itertools
import re
import subprocess
import sys
import time

import pytest

from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.plan.cluster import CLUSTERS, load_cluster
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.layout import domains_reached
from lightning_moe_strategy.plan.planner import DEGREES, PlanRequest, compare, parse_layout, plan, search
from lightning_moe_strategy.plan.workload import distinct_ranks

GLM = PlanRequest(model="glm-5.2")
SEED = dataclasses.replace(GLM, assumptions="seed")


def layout_of(made):
    return {name: getattr(made.request, name) for name in DEGREES}


def test_every_layout_of_a_small_world_is_found_once():
    request = PlanRequest(model="tiny", cluster="h100-nvl8", gpus=8, context=256)
    found = [tuple(layout_of(made).values()) for made in search(request, limit=None)]
    dense = [(d, f, c) for d, f, c in itertools.product((1, 2, 4, 8), repeat=3) if d * f * c == 8]
    expected = {(*side, 1, *experts) for side in dense for experts in dense}
    assert len(found) == len(set(found)) and set(found) == expected


def test_ep_divides_the_experts():
    request = PlanRequest(model="tiny", cluster="h100-nvl8", gpus=32, context=1024)
    assert {made.request.ep for made in search(request, limit=None)} == {1, 2, 4, 8}


def test_a_cp_beyond_the_domain_is_tried_flat_and_in_two_dimensions():
    request = dataclasses.replace(GLM, cluster="b300-nvl8", cp=64)
    assert {made.request.cp_inter for made in search(request, limit=None)} == {1, 8}
    assert search(request)[0].request.cp_inter == 8


@pytest.mark.parametrize("request_", [GLM, SEED])
def test_the_peak_that_a_search_ranks_by_is_the_one_of_the_buckets(request_):
    for made in search(request_, limit=None):
        assert made.evaluation.peak_bytes == pytest.approx(made.evaluation.peak.total, rel=1e-12)


def test_a_layout_is_priced_the_same_alone_and_in_a_search():
    made = search(GLM)[3]
    alone = plan(dataclasses.replace(GLM, **layout_of(made)))
    assert alone.to_json() == made.to_json()


@pytest.mark.parametrize(
    "request_", [GLM, SEED, dataclasses.replace(GLM, model="qwen3-30b-a3b", gpus=16, context=65536)]
)
def test_no_layout_ranks_above_one_that_beats_it_in_everything(request_):
    """Fitting layouts come first, and none above another that is faster, asks less of RDMA and takes less memory."""
    made = search(request_, limit=None)
    fits = [each.fits for each in made]
    assert fits == sorted(fits, reverse=True)
    goods = [
        (each.tokens_per_second_per_gpu, -each.evaluation.rdma_bytes_per_token, -each.evaluation.peak.total)
        for each in made
        if each.fits
    ]
    for higher, lower in itertools.combinations(goods[:200], 2):
        assert not all(low > high + 1e-6 * abs(high) for low, high in zip(lower, higher, strict=True))


def test_the_first_is_within_a_hundredth_of_the_fastest_that_fits():
    made = search(GLM, limit=None)
    fastest = max(each.tokens_per_second_per_gpu for each in made if each.fits)
    assert made[0].tokens_per_second_per_gpu > 0.99 * fastest


def test_1m_on_256_gb200_is_the_seeds_layout_or_one_shown_to_be_better():
    seeds = plan(dataclasses.replace(GLM, **parse_layout("4,1,64/4,64")))
    first = search(GLM)[0]
    assert seeds.fits and first.fits
    assert first.tokens_per_second_per_gpu >= seeds.tokens_per_second_per_gpu
    assert first.evaluation.rdma_bytes_per_token <= seeds.evaluation.rdma_bytes_per_token
    assert layout_of(search(SEED)[0]) == parse_layout("4,1,64/4,64")


def test_1m_on_nvl8_with_cp_inside_the_domain_is_broken_by_dynamic_memory():
    for assumptions in ("exact", "seed"):
        request = dataclasses.replace(GLM, cluster="b300-nvl8", cp=8, assumptions=assumptions)
        made = search(request)
        assert not any(each.fits for each in made)
        assert "dynamic memory breaks it" in made[0].verdict
        assert plan(dataclasses.replace(request, cp=None)).fits


def test_16384_gpus_are_searched_in_2_seconds():
    request = dataclasses.replace(GLM, gpus=16_384)
    start = time.process_time()
    made = search(request, limit=None)
    assert time.process_time() - start < 2
    assert len(made) > 10_000
    assert made[0].fits


def test_given_degrees_are_kept():
    for made in search(dataclasses.replace(GLM, cp=64, ep=32), limit=None):
        assert (made.request.cp, made.request.ep) == (64, 32)


def test_domains_are_those_of_the_strategys_layout():
    for world, nvl, local in ((32, 8, 8), (64, 72, 4), (48, 8, 4), (24, 6, 2)):
        for cp, fsdp in itertools.product((1, 2, 4, 8), (1, 2, 3, 4)):
            if world % (cp * fsdp):
                continue
            dims = ParallelDims(d_rep=world // cp // fsdp, fsdp=fsdp, cp=cp, e_fsdp=world, ep=1, nvl=nvl)
            resolved = dims.resolve(world, local_world_size=local)
            for axis, degree, stride in (
                ("fsdp_cp", cp * fsdp, 1),
                ("d_rep", resolved.d_rep, cp * fsdp),
                ("cp", cp, 1),
            ):
                priced = domains_reached(degree, stride, resolved.ranks_per_domain)
                assert priced == resolved.num_domains(axis), (resolved, axis)


def test_traffic_is_what_the_simulated_run_moved():
    """Buffers counted in a simulated step: GB over ep, over cp backward, and 302/302/604 MB of eFSDP in a layer."""
    traffic = plan(dataclasses.replace(GLM, **parse_layout("4,1,64/4,64"))).to_json()["traffic_gb_per_layer"]
    whole = 64 / 63
    ep = traffic["ep"]
    # 7.68 of 8 rows of a token go to ranks of their own: out and back three times, with probabilities, and ids once.
    copies = 16_384 * distinct_ranks(8, 64, 256)
    expected = 75 * copies * (3 * (2 * 2 * 6144 + 4 * 8) + 4 * 8) / 1e9
    assert 75 * (ep["forward_nvlink"] + ep["backward_nvlink"]) * whole == pytest.approx(expected)
    assert expected == pytest.approx(696.6, rel=1e-3)  # 724.8 where every row travelled by itself
    latent = 78 * 1_048_576 * 576 * 2 / 1e9
    assert 78 * traffic["cp"]["backward_nvlink"] * whole == pytest.approx(188.4 + latent, rel=1e-3)
    efsdp = traffic["e_fsdp"]
    assert efsdp["forward_rdma"] * 4 / 3 == pytest.approx(0.302, abs=1e-3)
    assert efsdp["backward_rdma"] * 4 / 3 == pytest.approx(0.302 + 0.604, abs=1e-3)
    # The recompute gathers no indexer key again: its top-k is kept.
    assert traffic["cp"]["forward_nvlink"] * whole * 78 == pytest.approx(latent + 21 * 1_048_576 * 256 / 1e9)


def test_attention_takes_the_seeds_share_of_a_layer_at_both_of_its_points():
    for context, ratio in ((262_144, 2), (1_048_576, 4)):
        compute = plan(dataclasses.replace(GLM, context=context)).to_json()["compute"]
        assert compute["attention_ratio"] == pytest.approx(ratio, rel=0.03)


def test_the_threshold_scales_with_the_achieved_rate():
    request = dataclasses.replace(GLM, **parse_layout("4,1,64/4,64"))
    slow, fast = (plan(dataclasses.replace(request, achieved_tflops=rate)).to_json() for rate in (576, 1152))
    assert fast["efsdp"]["min_tokens_to_hide"] == pytest.approx(2 * slow["efsdp"]["min_tokens_to_hide"])
    assert slow["compute"]["achieved_tflops"] == plan(request).to_json()["compute"]["achieved_tflops"] == 576


def test_exposed_traffic_slows_the_step():
    """GLM-5.2 with few tokens per GPU: what compute does not cover is waited for, and the sentence names it."""
    made = plan(dataclasses.replace(GLM, context=65_536, cluster="b300-nvl8", **parse_layout("32,1,8/32,8")))
    json = made.to_json()
    assert not json["efsdp"]["hidden"] or json["efsdp"]["tokens_per_gpu"] >= json["efsdp"]["min_tokens_to_hide"]
    short = plan(dataclasses.replace(GLM, context=8192, cluster="b300-nvl8", **parse_layout("32,1,8/32,8")))
    assert not short.to_json()["efsdp"]["hidden"]
    assert short.to_json()["efsdp"]["exposed_share"] > 0.3
    assert "the traffic of the experts breaks first" in short.verdict


def test_days_of_a_run():
    made = plan(dataclasses.replace(GLM, tokens=1e12))
    rate = made.tokens_per_second_per_gpu * 256
    assert made.to_json()["days"] == pytest.approx(1e12 / rate / 86_400)
    assert plan(GLM).to_json()["days"] is None


def test_the_longest_context_is_the_border_of_what_fits():
    made = plan(dataclasses.replace(GLM, **parse_layout("4,1,64/4,64")))
    longest = made.to_json()["longest_context"]
    assert f"{longest:,}" in made.verdict

    def fits(context):
        return plan(dataclasses.replace(made.request, context=context)).fits

    assert fits(longest) and not fits(round(longest * 1.003 / 128) * 128)


def test_what_helps_most_helps():
    made = plan(dataclasses.replace(GLM, cluster="b300-nvl8", cp=8))
    words = re.search(r"lay it out as \(([^/]+)\)/\(([^;:]+)\): ([\d.]+) GB, which fits", made.verdict)
    assert words is not None
    better = plan(dataclasses.replace(made.request, **parse_layout(f"{words[1]}/{words[2]}")))
    assert better.fits
    assert better.to_json()["memory_gb"]["total"] == pytest.approx(float(words[3]), abs=0.05)


def test_a_comparison_has_every_number_of_both():
    first, second = (plan(dataclasses.replace(GLM, **parse_layout(text))) for text in ("4,1,64/4,64", "8,1,32/4,64"))
    rows = {row.quantity: row for row in compare(first, second)}
    total = rows["memory_gb.total"]
    assert (total.first, total.second, total.unit) == (
        first.to_json()["memory_gb"]["total"],
        second.to_json()["memory_gb"]["total"],
        "GB",
    )
    assert rows["layout.cp"].ratio == 0.5
    assert rows["efsdp.seconds_per_layer"].unit == "s"
    assert rows["memory_gb.least_gpus_for_parameters"].unit == "GPUs"
    assert rows["cp.rdma_gb"].ratio is None


def test_a_layout_is_written_as_the_seed_writes_it():
    degrees = {"d_rep": 4, "fsdp": 1, "cp": 64, "cp_inter": 8, "e_rep": 1, "e_fsdp": 32, "ep": 8}
    assert parse_layout("(4, 1, 8x8)/(32, 8)") == degrees
    assert parse_layout("4,1,64/2,16,8") == {**degrees, "cp_inter": 1, "e_rep": 2, "e_fsdp": 16}
    with pytest.raises(PlanError, match=r"layout\('4,64'\) is not d_rep,fsdp,cp/e_fsdp,ep. Write for example"):
        parse_layout("4,64")


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_plans_every_size_of_world(name):
    for gpus in (1, 4, 12, 72, 96):
        made = plan(PlanRequest(model="tiny", cluster=name, gpus=gpus, context=1024))
        assert made.fits and made.verdict.endswith(".")


def test_a_cluster_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h200-nvl8\nrdma_bytes_per_second: 20.0e+9\n")
    mine = load_cluster(str(path))
    assert mine.rdma_bytes_per_second == 20e9 and mine.name == "mine"
    assert mine.memory_bytes == load_cluster("h200-nvl8").memory_bytes
    layout = parse_layout("32,1,8/32,8")
    times = [
        plan(dataclasses.replace(GLM, cluster=cluster, context=262_144, **layout)).to_json()["efsdp"][
            "seconds_per_layer"
        ]
        for cluster in (str(path), "h200-nvl8")
    ]
    assert times[0] > 2 * times[1]


BAD_REQUESTS = [
    ({"model": "glm-5"}, r"^model\('glm-5'\) is not known: glm-5.2"),
    ({"cluster": "gb200"}, r"^cluster\('gb200'\) is not known: gb200-nvl72.*Choose one, or give the path"),
    ({"gpus": 0}, r"^gpus\(0\) must be a whole number of at least 1"),
    ({"context": -1}, r"^context\(-1\) must be a whole number"),
    ({"micro_batch": 0}, r"^micro_batch\(0\) must be"),
    ({"cp": 0}, r"^cp\(0\) must be a whole number of at least 1\. Correct it or leave it out"),
    (
        {"d_rep": 4, "fsdp": 1, "cp": 32},
        r"^d_rep\(4\) \* fsdp\(1\) \* cp\(32\) = 128 is not gpus\(256\)\. Set .*cp to 64",
    ),
    ({"d_rep": 3}, r"^d_rep\(3\) does not divide gpus\(256\)"),
    ({"e_fsdp": 5, "ep": 64}, r"^e_fsdp\(5\) \* ep\(64\) = 320 does not divide gpus\(256\)\. Set e_fsdp to 4"),
    ({"ep": 3, "gpus": 3}, r"^ep\(3\) does not divide num_experts\(256\)"),
    ({"cp": 64, "context": 1000}, r"^context\(1000\) is not divisible by 2 \* cp\(64\).*pad the context to 1024"),
    ({"cp": 8, "cp_inter": 3}, r"^cp_inter\(3\) does not divide cp\(8\)"),
    ({"achieved_tflops": 0}, r"^achieved_tflops\(0\) must be above 0"),
    ({"achieved_tflops": 9000}, r"^achieved_tflops\(9000\) must be at most the 2500 of a GB200"),
    ({"tokens": float("nan")}, r"^tokens\(nan\) must be above 0"),
    ({"recompute": "blocks"}, r"^recompute\('blocks'\) is not known: block, "),
    ({"balance": "even"}, r"^balance\('even'\) is not known: "),
    ({"cluster": "missing.yaml"}, r"^cluster\('missing.yaml'\) cannot be read"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_REQUESTS)
def test_what_cannot_be_planned_is_said_in_one_line(changes, message):
    with pytest.raises(PlanError, match=message) as raised:
        plan(dataclasses.replace(GLM, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvl: 8\n", r"lacks gpus_per_host, memory_bytes.* or a base"),
        ("base: h200-nvl8\nnvlink: 3\n", r"has unknown fields \['nvlink'\]. Choose from: "),
        ("base: h200-nvl8\nmemory_bytes: -1\n", r"memory_bytes\(-1\) must be a number above 0"),
        ("base: h200-nvl8\nnvl: 12\n", r"gpus_per_host\(8\) must divide nvl\(12\)"),
        ("base: h300\n", r"cluster\('h300'\) is not known"),
        ("- 1\n", "holds no mapping"),
    ],
)
def test_a_cluster_file_that_is_wrong_says_where(tmp_path, text, message):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_cluster(str(path))


def test_the_planner_imports_neither_torch_nor_yaml_for_a_preset():
    code = (
        "import sys\nfrom lightning_moe_strategy.plan.planner import PlanRequest, plan\n"
        "plan(PlanRequest(model='glm-5.2')).to_json()\n"
        "print({'torch', 'lightning', 'transformers', 'yaml', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
