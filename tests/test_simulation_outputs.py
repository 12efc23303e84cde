"""What is written of a simulated step: the timeline of memory, the trace, the picture, the figures."""

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.cli.simulate import run_simulate
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.plan.cluster import load_cluster
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.simulation.figures import MAX_POINTS, to_json
from lightning_moe_strategy.simulation.memory import MemoryWatch, thinned
from lightning_moe_strategy.simulation.picture import draw_memory
from lightning_moe_strategy.simulation.report import Simulation
from lightning_moe_strategy.simulation.trace import THREADS, to_trace

MODEL = {"preset": "tiny", "vocab_size": 128, "hidden": 64, "layers": 3, "num_experts": 8, "top_k": 2}


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    ids = torch.zeros(2, 128, dtype=torch.int64)
    return simulate(
        partial(MoELanguageModel, MODEL),
        ParallelDims(d_rep=2, fsdp=1, cp=4, e_fsdp=2, ep=4, nvl=4),
        {"input_ids": ids, "labels": ids.clone()},
        world_size=8,
        local_world_size=4,
        recompute="block",
        shift="module",
        cluster=load_cluster("h200-nvl8"),
    )


def test_a_step_is_compute_and_what_it_waits_for(simulation):
    seconds = simulation.seconds
    assert seconds.step == pytest.approx(seconds.compute + sum(seconds.exposed.values()))
    linear = sum(flops for (_, _, name), flops in simulation.flops.items())
    assert seconds.compute == pytest.approx(linear / simulation.cluster.achieved_flops)
    assert set(seconds.exposed) >= {"cp", "ep"}
    assert seconds.tokens_per_second_per_gpu == pytest.approx(2 * 128 / 4 / seconds.step)


def test_bytes_are_split_over_the_links_as_the_groups_lie(simulation):
    h200 = simulation.cluster
    # 8 ranks are one domain of 8, whatever nvl the layout was made for: nothing is left for RDMA.
    assert simulation.seconds.busy["rdma"] == 0
    received = 0.0
    degrees = {"cp": 4, "ep": 4, "fsdp_cp": 4, "e_fsdp": 2, "d_rep": 2, "world": 8}
    for (axis, name), size in simulation.num_bytes.items():
        received += size * (1 - 1 / degrees[axis]) * (2 if name == "all_reduce" else 1)
    assert simulation.seconds.busy["nvlink"] == pytest.approx(received / h200.nvlink_bytes_per_second)


def test_the_trace_has_lanes_that_do_one_thing_at_a_time_and_ends_with_the_step(simulation):
    trace = json.loads(json.dumps(to_trace(simulation), allow_nan=False))
    events = trace["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [threads[index] for index in sorted(threads)] == list(THREADS.values())
    seconds = simulation.seconds
    ends = []
    for index, name in enumerate(THREADS):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == index)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-6, name
        ends += [end for _, end in spans]
        together = sum(end - start for start, end in spans) / 1e6
        expected = {"phases": seconds.step, "waits": seconds.step - seconds.compute} | seconds.busy
        assert together == pytest.approx(expected[name])
    assert max(ends) == pytest.approx(1e6 * seconds.step)
    counters = [e for e in events if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == pytest.approx(simulation.peak_bytes / 1e9)
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
    phases = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert phases == ["forward", "backward", "optimizer"]


def test_a_step_without_a_cluster_has_no_seconds_and_no_trace(simulation):
    timeless = dataclasses.replace(simulation, cluster=None, timeline=None)
    figures = to_json(timeless)
    assert figures["seconds"] is None and figures["timeline"]["seconds"] is None
    with pytest.raises(ValueError, match="name a cluster"):
        to_trace(timeless)


def test_the_timeline_has_the_peak_and_few_points(simulation):
    figures = to_json(simulation)
    columns = figures["timeline"]
    assert 50 < len(columns["total_gb"]) <= MAX_POINTS
    assert max(columns["total_gb"]) == pytest.approx(figures["peak_gb"])
    at_peak = columns["total_gb"].index(max(columns["total_gb"]))
    assert columns["phase"][at_peak] == figures["peak_phase"]
    assert {b: sizes[at_peak] for b, sizes in columns["buckets_gb"].items() if sizes[at_peak]} == pytest.approx(
        figures["buckets_gb"]
    )
    assert columns["seconds"] == sorted(columns["seconds"]) and columns["seconds"][-1] <= figures["seconds"]["step"]
    for phase, made in figures["phases"].items():
        of_phase = [gb for gb, name in zip(columns["total_gb"], columns["phase"], strict=True) if name == phase]
        assert max(of_phase) == pytest.approx(made["peak_gb"])


def test_the_peak_is_named_by_the_largest_tensor_of_the_unit_that_ran(simulation):
    peak = simulation.peak
    assert peak.cause is not None and peak.cause.unit == peak.unit
    assert peak.cause.num_bytes == max(piece.num_bytes for piece in peak.largest if piece.unit == peak.unit)
    assert simulation.to_json()["peak_tensor"]["shape"] == list(peak.cause.shape)
    assert f"the peak: {peak.cause.operation} {list(peak.cause.shape)}" in simulation.to_text()


def test_units_are_listed_in_the_order_of_issue(simulation):
    firsts = [unit.order[0] for unit in simulation.units.values()]
    assert firsts == sorted(firsts)
    every = sorted(position for unit in simulation.units.values() for position in unit.order)
    assert every == list(range(len(every)))
    experts = [name for name in simulation.units if name.endswith(".experts")]
    assert experts == [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    last_of = {name: simulation.units[name].order[-1] for name in experts}
    assert sorted(experts, key=lambda name: last_of[name]) == experts[::-1]  # reduced from the last layer on


def test_flops_belong_to_the_modules_that_computed_them(simulation):
    figures = simulation.to_json()["flops"]
    modules = figures["modules"]
    tokens, heads, kv_heads, head_dim, inner = 2 * 128 // 4, 4, 2, 32, 64
    vocabulary, hidden, experts = MODEL["vocab_size"], MODEL["hidden"], MODEL["num_experts"]
    # Every rank holds one dummy token at the end of each of its two sequences: the module drops its logits itself.
    rows = tokens + 2
    for layer in range(3):
        block = f"model.layers.{layer}"
        expert = 2 * rows * 2 * 3 * hidden * inner
        assert modules[f"{block}.mlp.experts"]["forward"] == expert
        assert modules[f"{block}.mlp.experts"]["backward"] == 2 * expert
        router = 2 * rows * hidden * experts
        assert modules[f"{block}.mlp.router"] == {"forward": router, "backward": 2 * router}  # kept, not recomputed
        projections = 2 * rows * hidden * head_dim * (2 * heads + 2 * kv_heads)
        attention = modules[f"{block}.attention"]
        assert projections < attention["forward"] < 3 * projections
        assert 2 * projections < attention["backward"] < 6 * projections
        assert 0 < attention["recompute"] <= attention["forward"]
    assert modules["model.head"]["forward"] == 2 * rows * hidden * vocabulary
    assert "model.head" in modules and "recompute" not in modules["model.head"]
    assert figures["total"] == sum(sum(counts.values()) for counts in modules.values())
    assert figures["total"] == figures["forward"] + figures["recompute"] + figures["backward"]


def test_the_picture_shows_memory_up_to_the_devices_limit(simulation, tmp_path):
    written = tmp_path / "memory.png"
    draw_memory(simulation, written)
    pixels = imread(written)
    assert pixels.shape[0] > 600 and pixels.shape[1] > 1200
    colors = {tuple(color) for color in (pixels[::4, ::4, :3] * 255).round().astype(int).reshape(-1, 3).tolist()}
    for color in ("#1f3b57", "#3a6ea5", "#e0a030"):  # parameters, optimizer, activations
        assert tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) in colors


def test_a_long_step_is_thinned_without_losing_its_peak():
    watch = MemoryWatch()
    with watch.opened():
        kept: list[torch.Tensor] = []
        for name in ("forward", "backward"):
            with watch.phase(name):  # type: ignore[arg-type]
                for index in range(5000):
                    kept = [*kept[-3:], torch.empty(1 + index % 7 + 50 * (index == 1234))]
                    watch.observe("made", (), kept[-1])
    points = watch.timeline(100)
    assert len(points) <= 100 and [p.moment for p in points] == sorted(p.moment for p in points)
    assert max(p.num_bytes for p in points) == max(peak.num_bytes for peak in watch.peaks.values())
    assert points[0].phase == "forward" and points[-1].phase == "backward"
    few = thinned(points, 20)
    assert len(few) <= 20
    for phase, peak in watch.peaks.items():
        assert max(p.num_bytes for p in few if p.phase == phase) == peak.num_bytes


TINY = str(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")


def simulate_tiny(*arguments: Any) -> int:
    return run_simulate(["--config", TINY, *map(str, arguments)])


def test_the_command_writes_every_file_or_none(tmp_path, capsys):
    files = {name: tmp_path / f"{name}.out" for name in ("json", "png", "trace")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    assert simulate_tiny(*options, "--cluster", "h200-nvl8") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files.values())
    figures = json.loads(files["json"].read_text())
    last = max(e["ts"] + e["dur"] for e in json.loads(files["trace"].read_text())["traceEvents"] if e["ph"] == "X")
    assert last == pytest.approx(1e6 * figures["seconds"]["step"])
    page = capsys.readouterr().out
    assert "a step on h200-nvl8" in page and "busy: compute" in page
    assert "the rates of h200-nvl8 are those of bf16" in page
    for path in files.values():
        path.unlink()
    assert simulate_tiny(*options) == 2  # a CPU has no rates, so there is no trace
    assert "--trace needs the speed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_at_the_end_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    def fail(simulation: Simulation, path: Path) -> None:
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr("lightning_moe_strategy.simulation.picture.draw_memory", fail)
    (tmp_path / "a.json").write_text("before")
    assert simulate_tiny("--json", tmp_path / "a.json", "--png", tmp_path / "a.png") == 2
    assert "No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "before"
