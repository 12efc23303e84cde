"""When redundant experts pay, by hand and as a plan says it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_moe_strategy.cli.plan import run_plan
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.planner import PlanRequest, plan

NVL72 = PlanRequest(model="glm-5.2", d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64)
NVL8 = PlanRequest(model="glm-5.2", cluster="b300-nvl8", context=262_144, d_rep=32, fsdp=1, cp=8, e_fsdp=32, ep=8)


def price(request: PlanRequest) -> dict[str, Any]:
    values = plan(request).to_json()["redundant_experts"]
    assert isinstance(values, dict)
    return values


def test_the_price_of_glm_is_what_one_gets_by_hand():
    made, values = plan(NVL72), price(NVL72)
    parameters = 3 * 6144 * 2048
    rows = 16_384 * 8
    # Forward, recompute and twice backward; weights twice in BF16 and their gradients once in FP32, to one of 63 others
    # or to each.
    assert values["experts_seconds"] == pytest.approx(2 * 4 * parameters * rows / made.workload.achieved_flops)
    assert values["expert_gb"] == 2 * parameters / 1e9
    one_move = (2 * 2 + 4) * parameters / made.workload.cluster.nvlink_bytes_per_second
    assert values["least_move_seconds"] == pytest.approx(one_move)
    assert values["most_move_seconds"] == pytest.approx(63 * one_move)
    cost = values["plan_seconds"] + one_move
    assert values["least_skew_that_pays"] == pytest.approx(1 + cost / values["experts_seconds"])
    assert 1.01 < values["least_skew_that_pays"] < 1.05 < values["most_skew_that_pays"] < 1.5
    assert "skew of the ep ranks of 1.02" in values["verdict"] and "of 1.40" in values["verdict"]


def test_over_rdma_a_move_costs_what_its_link_does():
    inside, across = price(NVL8), price(PlanRequest(**(vars(NVL8) | dict(e_fsdp=16, ep=16))))
    assert across["least_move_seconds"] > 4 * inside["least_move_seconds"]
    assert inside["experts_seconds"] == across["experts_seconds"]


def test_less_work_per_rank_asks_for_more_skew():
    short = PlanRequest(**(vars(NVL72) | dict(context=65_536)))
    assert price(short)["least_skew_that_pays"] > 1.2 > price(NVL72)["least_skew_that_pays"]
    kept = PlanRequest(**(vars(NVL72) | dict(recompute="none")))
    assert price(kept)["experts_seconds"] == pytest.approx(0.75 * price(NVL72)["experts_seconds"])


def test_where_every_expert_is_on_every_rank_there_is_no_price():
    request = PlanRequest(model="qwen3-30b-a3b", cluster="h200-nvl8", gpus=8, context=8192, e_fsdp=8, ep=1)
    assert plan(request).to_json()["redundant_experts"] is None


def test_the_command_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = "--model glm-5.2 --gpus 256 --context 1M --d_rep 4 --fsdp 1 --cp 64 --e_fsdp 4 --ep 64 --json"
    assert run_plan(arguments.split()) == 0
    assert json.loads(capsys.readouterr().out)["redundant_experts"] == price(NVL72)


def test_a_plan_has_even_rows_and_the_weights_that_move():
    """Of the rank that is busiest: a receiver of 4 experts beside its own 4."""
    even, worst, moving = (
        plan(PlanRequest(**(vars(NVL72) | dict(balance=b)))) for b in ("balanced", "worst", "redundant")
    )
    moments = [made.evaluation.experts.moments["last layer's experts"] for made in (even, worst, moving)]
    rows = [moment["expert_rows"] + moment["ep_buffers"] for moment in moments]
    assert rows[2] == pytest.approx(rows[0], rel=0.01) and rows[1] > 10 * rows[0]
    of_one_expert = 3 * 6144 * 2048
    # BF16 of its own once more and of the others; FP32 gradients of these.
    extra = moments[2]["expert_units"] - moments[0]["expert_units"]
    assert extra == pytest.approx((2 * 8 + 4 * 4) * of_one_expert)
    assert even.evaluation.peak.total <= moving.evaluation.peak.total < worst.evaluation.peak.total


def test_nothing_moves_where_every_expert_is_on_every_rank():
    request = PlanRequest(model="qwen3-30b-a3b", cluster="h200-nvl8", gpus=8, context=8192, e_fsdp=8, ep=1)
    moving = PlanRequest(**(vars(request) | dict(balance="redundant")))
    assert plan(moving).evaluation.peak == plan(request).evaluation.peak


def test_chunks_are_refused_beside_redundant_experts():
    with pytest.raises(PlanError, match=r"ep_chunks\(adaptive\) must be left out where balance is redundant"):
        plan(PlanRequest(**(vars(NVL72) | dict(balance="redundant", ep_chunks="adaptive"))))
