"""When redundant experts pay, by hand and as a plan says it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_moe_strategy.callbacks.peak_prediction import CannotPlan, plan_run
from lightning_moe_strategy.cli.plan import run_plan
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
    # Forward, recompute and twice backward; weights twice and their gradients once, to one of 63 others or to each.
    assert values["experts_seconds"] == pytest.approx(2 * 4 * parameters * rows / made.workload.achieved_flops)
    assert values["expert_gb"] == 2 * parameters / 1e9
    one_move = 3 * 2 * parameters / made.workload.cluster.nvlink_bytes_per_second
    assert values["least_move_seconds"] == pytest.approx(one_move)
    assert values["most_move_seconds"] == pytest.approx(63 * one_move)
    cost = values["plan_seconds"] + one_move
    assert values["least_skew_that_pays"] == pytest.approx(1 + cost / values["experts_seconds"])
    assert 1.01 < values["least_skew_that_pays"] < 1.05 < values["most_skew_that_pays"] < 1.5
    assert "skew of the ep ranks of 1.02" in values["verdict"] and "of 1.30" in values["verdict"]


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


def test_a_run_with_redundant_experts_is_not_compared_with_a_plan_without():
    placement: Any = SimpleNamespace(precision="bf16-mixed", max_imbalance=1.0)
    with pytest.raises(CannotPlan, match="balance='redundant'"):
        plan_run(nn.Linear(1, 1), placement, [], (1, 8))
