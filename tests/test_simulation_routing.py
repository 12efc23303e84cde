"""A recorded routing: who sends how many rows where, in a layer by hand and in a simulated step."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.cli.simulate import run_simulate
from lightning_moe_strategy.expert_parallel.assumed_routing import RecordedRouting, assumed_counts, routing_by_layer
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.simulate import simulate

LAYERS, EXPERTS, TOP_K, HIDDEN, LENGTH = 2, 8, 2, 64, 64
MODEL = {"preset": "tiny", "vocab_size": 128, "hidden": HIDDEN, "layers": LAYERS, "num_experts": EXPERTS,
         "top_k": TOP_K}  # fmt: skip
NAMES = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]


def counts(tokens: list[float], num_tokens: int, rank: int = 0) -> tuple[list[int], list[list[int]]]:
    routing = RecordedRouting(tuple(tokens))
    return assumed_counts(routing, num_tokens, 2, rank=rank, num_ranks=2, num_local_experts=len(tokens) // 2)


def test_rows_follow_the_proportions_and_this_rank_gets_what_its_experts_get():
    assert counts([1, 2, 2, 3], 8) == ([6, 10], [[2, 4], [2, 4]])
    assert counts([10, 20, 20, 30], 8, rank=1) == ([6, 10], [[4, 6], [4, 6]])
    assert counts([0.5, 0.5, 0, 0], 8, rank=1) == ([16, 0], [[0, 0], [0, 0]])


def test_split_sizes_are_whole_add_up_and_are_the_same_each_time():
    for num_tokens in range(1, 40):
        tokens = [3, 1, 1, 1, 2, 5, 4, 1]
        sent, received = counts(tokens, num_tokens)
        assert sum(sent) == 2 * num_tokens
        assert received == [received[0]] * 2
        assert sum(received[0]) + sum(counts(tokens, num_tokens, rank=1)[1][0]) == 2 * num_tokens
        assert counts(tokens, num_tokens) == (sent, received)
    # Six rows by tenths: 2.4, 1.8, 1.8 and 0; the two that were cut most get what is left.
    assert counts([4, 3, 3, 0], 3) == ([4, 2], [[2, 2], [2, 2]])


def test_an_expert_gets_a_token_once():
    with pytest.raises(ValueError, match=r"gives expert 3 75\.0% .* at most 1 / top_k\(2\) = 50\.0%"):
        counts([1, 0, 0, 3], 8)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({NAMES[0]: [1] * 8}, r"1 missing, first 'model.layers.1.mlp.experts'.*has 2, from"),
        ({NAMES[0]: [1] * 8, NAMES[1]: [1] * 8, "x": [1]}, r"1 unknown, first 'x'"),
        ([1] * 7, r"layers.0.mlp.experts has 7 numbers, but the layer has num_experts\(8\)"),
        ({NAMES[0]: [1] * 8, NAMES[1]: 5}, r"layers.1.mlp.experts has 5, but"),
        ([1] * 7 + [-1], r"has -1 for expert 7"),
        ([1] * 7 + ["many"], r"has 'many' for expert 7"),
        ([1] * 7 + [float("nan")], r"has nan for expert 7"),
        ([0] * 8, "no tokens at all"),
    ],
)
def test_a_routing_that_is_not_this_models_is_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        routing_by_layer(tokens, dict.fromkeys(NAMES, EXPERTS))


def step(routing: Any, rank: int = 0, **degrees: int) -> Any:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    layout = ParallelDims(**dict(d_rep=1, fsdp=4, cp=1, e_fsdp=1, ep=4) | degrees)
    return simulate(
        partial(MoELanguageModel, MODEL), layout, {"input_ids": ids, "labels": ids}, world_size=4, local_world_size=4,
        rank=rank, precision="32-true", routing=routing,
    )  # fmt: skip


def test_a_rank_computes_the_rows_of_its_experts_in_every_layer():
    rows = 2 * LENGTH * TOP_K
    # Of 256 rows, twentieths of 5 5 3 3 1 1 1 1: 64 64 38.4 38.4 12.8 12.8 12.8 12.8, in whole rows; four ranks send.
    rows_of_skewed = {0: 4 * (64 + 64), 1: 4 * (38 + 38), 2: 4 * (13 + 13), 3: 4 * (13 + 13)}
    even = [1] * EXPERTS
    skewed = [5, 5, 3, 3, 1, 1, 1, 1]
    tokens = {NAMES[0]: torch.tensor(even), NAMES[1]: torch.tensor(skewed)}
    for rank, rows_here in rows_of_skewed.items():
        simulated = step(tokens, rank)
        flops = {name: simulated.flops["forward", name, "_grouped_mm"] for name in NAMES}
        of_row = 2 * 3 * HIDDEN * 64
        assert flops[NAMES[0]] == rows * of_row
        assert flops[NAMES[1]] == rows_here * of_row
        assert simulated.routing == "recorded"


def test_an_even_recording_is_balanced_routing():
    recorded, balanced = step([7] * EXPERTS), step("balanced")
    assert recorded.num_bytes == balanced.num_bytes and recorded.peak_bytes == balanced.peak_bytes
    # Every expert on every rank: nothing is sent, whatever was recorded.
    assert step([5, 5, 3, 3, 1, 1, 1, 1], ep=1, e_fsdp=4).num_bytes == step("balanced", ep=1, e_fsdp=4).num_bytes


def test_the_command_reads_a_file_of_counts(tmp_path, capsys):
    config = str(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")
    recorded, written = tmp_path / "routing.json", tmp_path / "figures.json"

    def received(tokens: Any) -> float:
        recorded.write_text(json.dumps(tokens))
        assert run_simulate(["--config", config, "--routing", str(recorded), "--json", str(written)]) == 0
        return json.loads(written.read_text())["bytes_gb"]["ep"]["all_to_all"]

    even = received({"tokens_per_expert": [1] * 8})
    # 1.8 times the rows; a token of two of them is sent once.
    assert received({"tokens_per_expert": {name: [9, 9, 9, 9, 1, 1, 1, 1] for name in NAMES}}) > 1.2 * even
    recorded.write_text(json.dumps({"tokens": []}))
    assert run_simulate(["--config", config, "--routing", str(recorded)]) == 2
    recorded.write_text(json.dumps({"tokens_per_expert": [1] * 5}))
    assert run_simulate(["--config", config, "--routing", str(recorded)]) == 2
    error = capsys.readouterr().err
    assert "has no tokens_per_expert" in error and "has 5 numbers" in error and error.count("\n") == 2
