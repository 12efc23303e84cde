"""What a receipt says: means, the first layer not hidden, table, file and warning; the plan beside them; refusals."""

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_moe_strategy import MoELanguageModel, Receipt
from lightning_moe_strategy.callbacks.peak_prediction import CannotPlan, price_run
from lightning_moe_strategy.callbacks.receipt_prediction import PlannedWaits, plan_waits
from lightning_moe_strategy.callbacks.receipt_summary import StepReceipt, WaitSums, receipt_of, receipt_table, warning
from lightning_moe_strategy.expert_parallel.chunks import Chunking
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.plan.cluster import CLUSTERS
from lightning_moe_strategy.waits import CATEGORIES, StepWaits, Wait

SIZES: dict[str, Any] = {"preset": "tiny", "vocab_size": 61, "hidden": 32, "layers": 3, "num_experts": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warn_above": 0.0}, r"warn_above\(0\.0\) must be a share"),
        ({"warn_above": 1.5}, r"warn_above\(1\.5\) must be a share"),
        ({"log_every_n_steps": 0}, r"log_every_n_steps\(0\) must be at least 1"),
        ({"cluster": "gb200-nvl27"}, r"cluster\('gb200-nvl27'\) is not known: gb200-nvl72"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Receipt(**options)


def test_another_strategy_and_a_second_receipt_are_refused():
    receipt, module = Receipt(), nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"Receipt needs Trainer\(strategy='fsdp_cp_ep'\); this one has SimpleN"):
        receipt.setup(SimpleNamespace(strategy=SimpleNamespace(), callbacks=[receipt]), module, "fit")  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(strategy_name="fsdp_cp_ep"), callbacks=[receipt, Receipt()])
    with pytest.raises(ValueError, match="two Receipts"):
        receipt.setup(trainer, module, "fit")  # type: ignore[arg-type]


# The numbers

LAYERS, BLOCKS = ("", "embed", "blocks.0", "blocks.1", "head"), ("blocks.0", "blocks.1")


def receipt_from(*ranks: list[dict[Wait, float]], planned: PlannedWaits | None = None) -> StepReceipt | None:
    """Of steps of one second on each rank."""
    vectors = []
    for rank, steps in enumerate(ranks):
        sums = WaitSums()
        for waits_of_step in steps:
            sums.add(StepWaits(seconds=1.0, waits=waits_of_step))
        vectors.append(torch.tensor(sums.numbers(LAYERS, rank=rank, num_ranks=len(ranks)), dtype=torch.float64))
    return receipt_of(torch.stack(vectors).sum(0).tolist(), LAYERS, BLOCKS, step=8, planned=planned)


def test_a_receipt_is_the_mean_over_steps_and_ranks_and_knows_the_worst_rank():
    gather, results = Wait("blocks.1", "expert_gather", True), Wait("blocks.0", "ep_combine", False)
    receipt = receipt_from([{gather: 0.4, results: 0.1}, {gather: 0.2}], [{results: 0.2}, {}])
    assert receipt is not None and (receipt.num_steps, receipt.step_seconds) == (2, 1.0)
    assert receipt.exposed == pytest.approx({"expert_gather": 0.15, "ep_combine": 0.075})
    assert receipt.most == pytest.approx({"expert_gather": 0.3, "ep_combine": 0.1})
    assert receipt.exposed_seconds == pytest.approx(0.225) and receipt.most_exposed_seconds == pytest.approx(0.35)
    assert receipt.worst == "expert_gather"
    # A rank whose device has not come that far gives no step, and does not thin out the mean.
    late = receipt_from([{gather: 0.4}], [])
    assert late is not None and late.exposed == pytest.approx({"expert_gather": 0.4})
    assert receipt_from([], []) is None


@pytest.mark.parametrize(
    ("waits_of_step", "category", "expected"),
    [
        ({Wait("blocks.0", "dense_gather", False): 0.1}, "dense_gather", None),  # nothing runs before it
        ({Wait("embed", "dense_gather", False): 0.1}, "dense_gather", None),
        ({Wait("blocks.0", "dense_gather", True): 0.1}, "dense_gather", "blocks.0"),
        ({Wait("head", "dense_gather", True): 0.1}, "dense_gather", None),
        ({Wait("head", "dense_gather", False): 0.1}, "dense_gather", "head"),
        ({Wait("blocks.0", "reduce_scatter", True): 0.1}, "reduce_scatter", None),  # nothing runs after it
        ({Wait("blocks.1", "reduce_scatter", True): 0.1}, "reduce_scatter", "blocks.1"),
        ({Wait("blocks.0", "cp_gather", False): 0.1}, "cp_gather", "blocks.0"),
        ({Wait("blocks.1", "expert_gather", False): 0.024}, "expert_gather", None),  # 5 % of half a step: hidden
        ({Wait("blocks.1", "expert_gather", False): 0.026}, "expert_gather", "blocks.1"),
        ({Wait("blocks.1", "copies", False): 0.5}, "copies", None),
    ],
)
def test_the_first_layer_not_hidden_is_one_that_could_have_been(waits_of_step, category, expected):
    receipt = receipt_from([waits_of_step])
    assert receipt is not None and receipt.first_layer(category) == expected


PLANNED = PlannedWaits(
    cluster="gb200-nvl72",
    step_seconds=2.0,
    seconds={"expert_gather": 0.25, "cp_gather": 0.0},
    tokens=1024,
    min_tokens_to_hide=4500.0,
)


def test_the_table_and_the_line_stand_beside_the_plan():
    receipt = receipt_from([{Wait("blocks.1", "expert_gather", False): 0.3}], planned=PLANNED)
    assert receipt is not None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(receipt_table(receipt, 256))
    row, total = [line for line in console.export_text().splitlines() if "expert gathers" in line or "all " in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "expert gathers", "0.3000", "30.0%", "0.3000", "blocks.1", "0.2500",
    ]  # fmt: skip
    assert [cell.strip() for cell in total.split("│")[1:-1]] == ["all", "0.3000", "30.0%", "0.3000", "", "0.2500"]
    assert receipt.line() == {
        "step": 8, "num_steps": 1, "seconds": 1.0, "exposed": {"expert_gather": 0.3}, "most_exposed_seconds": 0.3,
        "worst": "expert_gather", "first_layer": "blocks.1", "planned": {"expert_gather": 0.25, "cp_gather": 0.0},
    }  # fmt: skip
    assert receipt.figures()["receipt/planned_exposed_seconds"] == 0.25
    without = receipt_from([{Wait("blocks.1", "expert_gather", False): 0.3}])
    assert without is not None and "planned" not in without.line()
    assert [column.header for column in receipt_table(without, 1).columns][-1] == "first layer not hidden"


def test_the_warning_names_what_where_and_what_helps():
    receipt = receipt_from([{Wait("blocks.1", "expert_gather", False): 0.3}], planned=PLANNED)
    assert receipt is not None
    assert warning(receipt, 0.1, on_gpu=True) == (
        "Receipt: compute waits for 30% of a step (0.3 of 1 s up to step 8), more than warn_above(0.1). Most is for "
        "expert gathers, 0.3 s, not hidden from blocks.1 on. More tokens per GPU and micro-batch hide more (this run "
        "has 1,024, the planner hides it above 4,500). With e_fsdp in an NVLink domain less has to."
    )
    for category in CATEGORIES:
        other = receipt_from([{Wait("blocks.1", category, True): 0.3}])
        assert other is not None and warning(other, 0.1, on_gpu=False).endswith(".")


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("rdma", [45e9, 1e6])
def test_the_plan_of_a_run_is_the_planners_divided_by_category(num_micro_batches, rdma):
    dims = ParallelDims(d_rep=2, fsdp=1, cp=4, e_fsdp=2, ep=4, nvl=4).resolve(8, local_world_size=4, num_experts=8)
    placement: Any = SimpleNamespace(
        precision="bf16-mixed", dims=dims, recompute="block", dispatcher="auto", max_imbalance=None, chunking=Chunking()
    )
    model, batch = MoELanguageModel(SIZES), (2, 512)
    optimizers = [torch.optim.AdamW(model.parameters())]
    cluster = dataclasses.replace(CLUSTERS["h100-nvl8"], nvl=4, gpus_per_host=4, rdma_bytes_per_second=rdma)
    planned = plan_waits(model, placement, optimizers, batch, cluster=cluster, num_micro_batches=num_micro_batches)
    evaluation = price_run(model, placement, optimizers, batch, cluster)
    dense, experts, times = evaluation.dense, evaluation.experts, evaluation.times
    per_step = dense.step_seconds + experts.step_seconds
    seconds = planned.seconds
    shards = seconds["dense_gather"] + seconds["expert_gather"] + seconds["reduce_scatter"]
    assert shards == pytest.approx(num_micro_batches * times.exposed + per_step)
    assert seconds["cp_gather"] == pytest.approx(num_micro_batches * 3 * dense.links.critical)
    exchanged = seconds["ep_dispatch"] + seconds["ep_combine"]
    assert exchanged == pytest.approx(num_micro_batches * 3 * experts.links.critical)
    assert 0 < seconds["ep_combine"] < exchanged
    assert planned.step_seconds == pytest.approx(num_micro_batches * (times.step - per_step) + per_step)
    assert planned.exposed_seconds < planned.step_seconds
    placement.precision = "32-true"
    with pytest.raises(CannotPlan, match="bf16-mixed"):
        plan_waits(model, placement, optimizers, batch, cluster=cluster, num_micro_batches=1)
