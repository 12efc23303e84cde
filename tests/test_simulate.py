"""The simulator against real ranks, against arithmetic, and against what it must refuse."""

import json
from contextlib import ExitStack
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.cli.simulate import run_simulate
from lightning_moe_strategy.expert_parallel import all_to_all
from lightning_moe_strategy.kernels import router
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.plan.presets import preset
from lightning_moe_strategy.plan.workload import distinct_ranks
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.simulation.report import Simulation
from lightning_moe_strategy.simulation.watch import StepWatch
from tests.modules import VOCABULARY, HuggingFaceLanguageModel, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit

LENGTH, BATCH, LAYERS, EXPERTS, TOP_K, HIDDEN = 128, 8, 3, 8, 2, 64
SIZES = {"vocab_size": VOCABULARY, "hidden": HIDDEN, "layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
make_ours = partial(MoELanguageModel, {"preset": "tiny", **SIZES}, warmup_steps=0)

# A real step never has less memory than its simulation. It has 192 to 236 bytes more, the scalars of the logged loss,
# and in one of some forty runs the two buffers of an all-to-all more (2 % of this tiny step): the size says so, and
# that gloo's thread lets go of them only after the collective has returned.
PEAK_TOLERANCE = 0.03


class WatchSecondStep(L.Callback):
    """The simulator's own watch on a step that Lightning runs."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        placement = trainer.strategy.placement
        state = [v for values in trainer.optimizers[0].state.values() for v in values.values()]
        self.watch = StepWatch(placement)
        others = [*batch.values()] if isinstance(batch, dict) else []
        self.stack.enter_context(
            self.watch.opened(parameters=pl_module.parameters(), optimizer_state=state, others=others)
        )
        self.resident_bytes = self.watch.memory.num_bytes
        self.phase = self.watch.phase("forward")
        self.phase.__enter__()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.phase.__exit__(None, None, None)
            self.phase = self.watch.phase("backward")
            self.phase.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 1:
            self.phase.__exit__(None, None, None)
            self.stack.close()


def figures(watch: StepWatch, resident_bytes: int) -> dict[str, Any]:
    axes = {key: size for key, size in watch.communication.num_bytes.items() if key[0] != "world"}
    return {
        "bytes": axes,
        "units": dict(watch.communication.of_units),
        "unit_bytes": dict(watch.communication.bytes_of_units),
        "flops": dict(watch.arithmetic.flops),
        "order": dict(watch.communication.order_of_units),
        "peaks": {name: peak.num_bytes for name, peak in watch.memory.peaks.items() if name != "optimizer"},
        "buckets": {name: watch.memory.buckets(peak.moment) for name, peak in watch.memory.peaks.items()},
        "resident": resident_bytes,
    }


def select_in_turn(scores_TE: Tensor, top_k: int) -> Tensor:
    """Every expert gets as many tokens of every rank."""
    num_tokens, num_experts = scores_TE.shape
    slots = torch.arange(num_tokens * top_k, device=scores_TE.device)
    chosen = (slots % num_experts).view(num_tokens, top_k)
    return torch.zeros_like(scores_TE).scatter(1, chosen, 1.0).topk(top_k, dim=-1).indices


def real_step(degrees: dict[str, Any], precision: str) -> dict[str, Any]:
    watch = WatchSecondStep()
    select, router.best_experts = router.best_experts, select_in_turn
    try:
        fit(degrees, make_ours, lambda dp: loader(2 * BATCH, LENGTH, BATCH // dp), shift="module", max_steps=2,
            precision=precision, callbacks=(watch,))  # fmt: skip
    finally:
        router.best_experts = select
    return figures(watch.watch, watch.resident_bytes)


def ids(batch_size: int, length: int = LENGTH) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def run(degrees: dict[str, Any], make_model: Any = make_ours, **options: Any) -> Any:
    dims = {name: value for name, value in degrees.items() if name != "recompute"}
    arguments = dict(
        world_size=4, local_world_size=4, precision="32-true", recompute=degrees.get("recompute", "none"),
        shift="module",
    )  # fmt: skip
    batch_size = BATCH // (degrees.get("d_rep", 1) * degrees.get("fsdp", 1))
    return simulate(make_model, ParallelDims(**dims), ids(batch_size), **(arguments | options))


@pytest.mark.parametrize(
    ("degrees", "precision"),
    [
        pytest.param(LAYOUTS_OF_4[2], "32-true", id="cp2-ep2", marks=pytest.mark.slow),
        pytest.param(LAYOUTS_OF_4[2] | {"recompute": "block"}, "bf16-mixed", id="cp2-ep2-recomputed"),
        pytest.param(LAYOUTS_OF_4[9], "bf16-mixed", id="replicas", marks=pytest.mark.slow),
        pytest.param(LAYOUTS_OF_4[0], "32-true", id="ep4", marks=pytest.mark.slow),
        pytest.param(LAYOUTS_OF_4[5] | {"recompute": "block"}, "32-true", id="cp4-recomputed", marks=pytest.mark.slow),
    ],
)
def test_a_simulated_step_is_the_real_one(degrees, precision, ranks4, monkeypatch):
    # What is selected in turn are pairs of neighbours: a copy has both of its token's rows.
    monkeypatch.setattr(
        all_to_all, "assumed_copies",
        lambda routing, num_tokens, *rows, **where: tuple([num // 2 for num in of_ranks] for of_ranks in rows),
    )  # fmt: skip
    real = ranks4(real_step, degrees, precision)[0]
    simulated = run(degrees, precision=precision, accelerator="cpu")
    traffic = {key: size for key, size in simulated.num_bytes.items() if key[0] != "world"}
    assert traffic == real["bytes"]
    for name, unit in simulated.units.items():
        assert unit.all_gathers == real["units"].get((name, "all_gather"), 0)
        assert unit.reduce_scatters == real["units"].get((name, "reduce_scatter"), 0)
        assert unit.all_gather_bytes == real["unit_bytes"].get((name, "all_gather"), 0)
        assert unit.reduce_scatter_bytes == real["unit_bytes"].get((name, "reduce_scatter"), 0)
    assert {name for name, _ in real["units"]} == set(simulated.units)
    assert {name: unit.order for name, unit in simulated.units.items()} == {
        name: tuple(order) for name, order in real["order"].items()
    }
    assert simulated.flops == real["flops"]
    assert simulated.resident_bytes == real["resident"]
    for phase in ("forward", "backward"):
        peak = simulated.phases[phase].peak_bytes
        assert peak <= real["peaks"][phase] <= (1 + PEAK_TOLERANCE) * peak
        for bucket in ("parameters", "optimizer", "other"):
            assert simulated.phases[phase].buckets.get(bucket, 0) == real["buckets"][phase].get(bucket, 0)


def test_every_unit_is_gathered_in_each_pass_that_reads_it_and_reduced_once():
    simulated = run(LAYOUTS_OF_4[2], recompute="block")
    assert len(simulated.units) == 2 * LAYERS + 3  # blocks, their experts, embedding, norm, head
    assert gathers_and_reductions(simulated) == {"lookup": {(1, 1)}, "other": {(2, 1)}}


def gathers_and_reductions(simulated: Simulation) -> dict[str, set[tuple[int, int]]]:
    """A lookup's backward pass does not read its weights."""
    found: dict[str, set[tuple[int, int]]] = {"lookup": set(), "other": set()}
    for name, unit in simulated.units.items():
        kind = "lookup" if name.rpartition(".")[2] in ("embed", "embed_tokens") else "other"
        found[kind].add((unit.all_gathers, unit.reduce_scatters))
    return found


@pytest.mark.slow
def test_gathered_weights_are_gone_after_their_layer():
    def gathered(num_layers: int) -> list[int]:
        make_model = partial(MoELanguageModel, {"preset": "tiny", **SIZES, "layers": num_layers})
        simulated = run(LAYOUTS_OF_4[2] | {"recompute": "block"}, make_model)
        return [phase.buckets.get("gathered_weights", 0) for phase in simulated.phases.values()]

    forward, backward, optimizer = gathered(4)
    assert forward > 0 and backward > 0 and optimizer == 0
    assert gathered(8) == [forward, backward, 0]


@pytest.mark.slow
def test_worst_routing_brings_all_that_the_other_ranks_can_send():
    balanced, worst = (run(LAYOUTS_OF_4[0], routing=routing) for routing in ("balanced", "worst"))
    tokens, ep = BATCH * LENGTH // 4, 4
    share = distinct_ranks(TOP_K, ep, EXPERTS) / ep
    copies = {"balanced": ep * round(share * tokens), "worst": ep * tokens}
    for simulated, name in ((balanced, "balanced"), (worst, "worst")):
        # Out and back, forward and backward: D numbers a copy each time. The token's probabilities out and their
        # gradients back, and its ids. Counts of rows by expert and of copies.
        expected = LAYERS * (copies[name] * 4 * (4 * HIDDEN + 3 * TOP_K) + 4 * (EXPERTS + ep))
        assert simulated.num_bytes["ep", "all_to_all"] == expected
    assert worst.peak_bytes > balanced.peak_bytes


@pytest.mark.slow
def test_recompute_keeps_block_inputs_and_routing_alone():
    kept, recomputed = run(LAYOUTS_OF_4[1]), run(LAYOUTS_OF_4[1], recompute="block")
    tokens = BATCH * LENGTH // 4
    per_layer = tokens * (4 * HIDDEN + 4 * EXPERTS + 12 * TOP_K)
    # The head's: what the last block returned, that normalised, that scaled, and the logits.
    head = tokens * (3 * 4 * HIDDEN + 4 * VOCABULARY)
    blocks = recomputed.activation_bytes - head
    assert LAYERS * per_layer < blocks < 1.03 * LAYERS * per_layer  # and numbers per token
    assert kept.activation_bytes > 4 * recomputed.activation_bytes
    assert recomputed.peak_bytes < 0.75 * kept.peak_bytes
    forward = {key: flops for key, flops in kept.flops.items() if key[0] == "forward"}
    assert forward == {key: flops for key, flops in recomputed.flops.items() if key[0] == "forward"}


def test_flops_are_those_of_the_dimensions():
    simulated = run(dict(fsdp=4, cp=1, e_fsdp=4, ep=1))
    tokens, head_dim, heads, kv_heads, inner = BATCH * LENGTH // 4, 32, 4, 2, 64
    projections = HIDDEN * head_dim * (2 * heads + 2 * kv_heads)
    experts = TOP_K * 3 * HIDDEN * inner
    attention = heads * 2 * head_dim * LENGTH // 2  # every token sees half of the sequence
    per_layer = projections + experts + HIDDEN * EXPERTS + attention
    forward = 2 * tokens * (LAYERS * per_layer + HIDDEN * VOCABULARY)
    assert sum(flops for (phase, _, _), flops in simulated.flops.items() if phase == "forward") == forward


@pytest.mark.slow
def test_sixty_four_ranks_and_any_of_them():
    dims = dict(d_rep=2, fsdp=4, cp=8, e_rep=2, e_fsdp=8, ep=4)
    first, last = (run(dims, world_size=64, local_world_size=8, rank=rank) for rank in (0, 63))
    model = make_ours()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    dense = sum(p.numel() for p in model.parameters()) - experts
    local = 4 * (dense / 32 + experts / 32)
    parameters = first.phases["forward"].buckets["parameters"]
    assert local <= parameters < 1.02 * local  # dims that 32 does not divide are padded
    assert first.num_bytes == last.num_bytes and first.dims.world_size == 64
    assert not dist.is_initialized()


class QuietHuggingFaceModel(HuggingFaceLanguageModel):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def test_one_rank_and_other_models():
    assert run(dict(fsdp=1, cp=1), world_size=1).num_bytes == {}
    for model_type in ("qwen3_moe", "deepseek_v3"):
        make_model = partial(QuietHuggingFaceModel, model_type)
        simulated = run(LAYOUTS_OF_4[2] | {"recompute": "block"}, make_model, shift="model", precision="bf16-mixed")
        assert gathers_and_reductions(simulated) == {"lookup": {(1, 1)}, "other": {(2, 1)}}


def test_a_model_that_reads_values_is_named_with_its_line():
    with pytest.raises(RuntimeError, match=r"PlainLanguageModel cannot be simulated: .*modules\.py:\d+, .*expert"):
        run(LAYOUTS_OF_4[2], PlainLanguageModel)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4}, r"rank\(4\) must be in \[0, 4\)"),
        ({"routing": "best"}, r"routing\('best'\) must be one of 'balanced', 'worst'"),
        ({"precision": "16-mixed"}, r"precision\('16-mixed'\) must be one of"),
        ({"recompute": "all"}, r"recompute\('all'\) must be one of"),
        ({"world_size": 6}, "the world has 6"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(LAYOUTS_OF_4[2], **options)
    assert not dist.is_initialized()


def simulate_on_a_rank() -> str:
    try:
        run(LAYOUTS_OF_4[2])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_process_of_a_real_run_is_refused(ranks2):
    assert all("call it in a fresh process" in error for error in ranks2(simulate_on_a_rank))


def exit_code(arguments: list[str]) -> int:
    try:
        return run_simulate(arguments)
    except SystemExit as stopped:
        return int(str(stopped.code))


def test_a_simulation_leaves_no_plans_of_its_rank_to_real_ranks():
    """A real run on a mesh of the same shape would take them, and wait in collectives of other ranks."""
    run(LAYOUTS_OF_4[2])
    assert _get_fast_path_sharding_prop_cache_stats() == (0, 0)


def config_file(name: str) -> str:
    return str(files("lightning_moe_strategy.configs") / f"{name}.yaml")


@pytest.mark.parametrize("name", ["tiny_cpu", "tiny_hf_qwen3_moe"])
def test_the_command_writes_the_documented_keys(name, tmp_path, capsys):
    written = tmp_path / "figures.json"
    assert run_simulate(["--config", config_file(name), "--json", str(written)]) == 0
    figures = json.loads(written.read_text())
    keys = {"world", "peak_gb", "resident_gb", "phases", "buckets_gb", "bytes_gb", "units", "flops", "seconds"}
    assert keys <= set(figures)
    assert figures["world"] == 4 and set(figures["bytes_gb"]) >= {"cp", "ep", "e_fsdp", "fsdp_cp"}
    assert figures["peak_gb"] == pytest.approx(sum(figures["buckets_gb"].values()))
    assert "peak" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_more_gpus_are_more_copies(capsys):
    assert run_simulate(["--config", config_file("tiny_cpu"), "--world", "8", "--rank", "7"]) == 0
    page = capsys.readouterr().out
    assert "dense (d_rep, fsdp, cp) = (2, 2, 2), expert (e_rep, e_fsdp, ep) = (2, 2, 2)" in page
    assert "d_rep" in page


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ["--png", "/no/such/folder/x.png"], "--png(/no/such/folder/x.png) cannot be written"),
        ({}, ["--trace", "/tmp"], "--trace(/tmp) cannot be written"),
        ({}, ["--json", "/tmp/x", "--png", "/tmp/x"], "--png(/tmp/x) is written by another option too"),
        ({}, ["--cluster", "gb200"], "cluster('gb200') is not known: gb200-nvl72"),
        ({}, ["--achieved_tflops", "500"], "--achieved_tflops(500) needs a --cluster"),
        ({}, ["--cluster", "h200-nvl8", "--achieved_tflops", "0"], "--achieved_tflops(0.0) must be above 0"),
        ({}, ["--routing", "nowhere.json"], "--routing(nowhere.json) must be balanced, worst or a JSON file"),
        ({}, ["--routing", __file__], "is no JSON"),
        ({}, ["--no_such_option"], "unrecognized arguments"),
        ({}, ["--world", "6"], "--world(6) must be a multiple of the 4 GPUs"),
        ({}, ["--json", "/no/such/folder/x.json"], "--json(/no/such/folder/x.json) cannot be written"),
        ({"data": {"class_path": "x.Y"}}, [], "data.init_args has no sequence_length and batch_size"),
        ({"model": {"class_path": "no_such_module.Y"}}, [], "model.class_path('no_such_module.Y') cannot be imported"),
        ({"trainer": {"devices": "auto"}}, [], "trainer.devices('auto') must be a number"),
        ({"trainer": {"devices": 4, "strategy": "ddp"}}, [], "trainer.strategy('ddp') cannot be simulated"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(change, arguments, message, tmp_path, capsys):
    config = yaml.safe_load(open(config_file("tiny_cpu")).read()) | change
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert exit_code(["--config", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def simulated_file(tmp_path: Path, changes: dict[str, Any], *arguments: str) -> tuple[dict[str, Any], str]:
    """Figures and notes of tiny_cpu.yaml with other trainer arguments."""
    config = yaml.safe_load(open(config_file("tiny_cpu")).read())
    config["trainer"] |= changes
    path, written = tmp_path / "config.yaml", tmp_path / "figures.json"
    path.write_text(yaml.safe_dump(config))
    assert run_simulate(["--config", str(path), "--json", str(written), *arguments]) == 0
    figures = json.loads(written.read_text())
    return figures, " ".join(figures["notes"])


@pytest.mark.slow
def test_the_cluster_is_assumed_by_the_size_of_its_domains(tmp_path):
    def of_domain(nvl: Any) -> tuple[dict[str, Any], str]:
        layout = {"d_rep": 1, "fsdp": 2, "cp": 2, "e_fsdp": 2, "ep": 2, "nvl": nvl}
        strategy = {"class_path": "lightning_moe_strategy.FSDPCPEPStrategy", "init_args": layout}
        return simulated_file(tmp_path, {"accelerator": "gpu", "strategy": strategy})

    for nvl, name in ((72, "gb200-nvl72"), (8, "h200-nvl8")):
        figures, notes = of_domain(nvl)
        assert figures["cluster"] == name and f"taken to be those of {name}" in notes
        assert figures["seconds"]["step"] > 0
    figures, notes = of_domain("auto")
    assert figures["seconds"] is None and "no known cluster has NVLink domains of 4" in notes


@pytest.mark.slow
def test_a_faster_gpu_computes_in_less_time(tmp_path):
    slow, _ = simulated_file(tmp_path, {}, "--cluster", "h200-nvl8", "--achieved_tflops", "100")
    fast, _ = simulated_file(tmp_path, {}, "--cluster", "h200-nvl8", "--achieved_tflops", "400")
    assert slow["seconds"]["compute"] == pytest.approx(4 * fast["seconds"]["compute"])
    assert slow["seconds"]["busy"]["nvlink"] == pytest.approx(fast["seconds"]["busy"]["nvlink"])


def test_what_is_left_out_of_a_configuration_is_said(tmp_path):
    callbacks = [{"class_path": "lightning.pytorch.callbacks." + name} for name in ("ModelCheckpoint", "Wild")]
    _, notes = simulated_file(tmp_path, {"accumulate_grad_batches": 4, "callbacks": callbacks})
    assert "4 micro-batches" in notes and "left out: callbacks Wild." in notes
    assert "ModelCheckpoint" not in notes


def test_clipping_is_simulated_as_the_strategy_clips(tmp_path):
    clipped, _ = simulated_file(tmp_path, {"gradient_clip_val": 1.0})
    free, _ = simulated_file(tmp_path, {"gradient_clip_val": None})
    by_value, _ = simulated_file(tmp_path, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"})
    squares = 8 / 1e9  # one number in FP64, summed over the world
    assert clipped["bytes_gb"]["world"]["all_reduce"] - free["bytes_gb"]["world"]["all_reduce"] == squares
    assert by_value["bytes_gb"] == free["bytes_gb"]


def test_a_missing_file_is_named(capsys):
    assert run_simulate(["--config", "nowhere.yaml"]) == 2
    assert "--config(nowhere.yaml) cannot be read" in capsys.readouterr().err


LATENT, INDEX_KEY = 2 * (512 + 64), 2 * 128
"""Bytes of GLM-5.2: of a token's latent and rope key, in 78 layers, and of an indexer's key, in 21."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dense_shards", "gathered", "steps"),
    [
        ("glm52_1m_256gpu", 64, 2**20, {"cp": 1.0}),
        ("glm52_256k_b300_256gpu", 256, 2**18, {"cp": 1.0}),
        # Between 8 domains first: each rank gathers 8 pieces of 64 there, and then all inside of its domain.
        ("glm52_1m_b300_2d_cp", 64, 2**20, {"cp_inter": 8 / 64, "cp_intra": 1.0}),
    ],
)
def test_glm_5_2_on_256_ranks(name, dense_shards, gathered, steps, tmp_path):
    written = tmp_path / "figures.json"
    assert run_simulate(["--config", config_file(name), "--json", str(written)]) == 0
    figures = json.loads(written.read_text())
    # FP32 weights, gradients and two AdamW moments; the indexers are frozen.
    counts = preset("glm-5.2").counts
    trained = (counts.dense - counts.indexer) / dense_shards + counts.experts / 256
    resident = 16 * trained + 4 * counts.indexer / dense_shards
    assert figures["resident_gb"] == pytest.approx(resident / 1e9, rel=1e-3)
    ep, layer = figures["layout"]["ep"], 3 * 2048 * 6144 * 256
    assert figures["bytes_gb"]["e_fsdp"] == {
        "all_gather": pytest.approx(75 * 2 * 2 * layer / ep / 1e9, rel=1e-4),
        "reduce_scatter": pytest.approx(75 * 4 * layer / ep / 1e9, rel=1e-4),
    }
    for axis, share in steps.items():
        # Latents in the forward pass and in the recompute, gradients in FP32; an indexer's keys once.
        latents = 78 * LATENT * gathered * share
        assert figures["bytes_gb"][axis] == {
            "all_gather": pytest.approx((2 * latents + 21 * INDEX_KEY * gathered * share) / 1e9, rel=1e-6),
            "reduce_scatter": pytest.approx(2 * latents / 1e9, rel=1e-6),
        }
    assert all(unit["reduce_scatters"] == 1 for unit in figures["units"].values())
    assert {name for name, unit in figures["units"].items() if unit["all_gathers"] != 2} == {"model.embed"}
    assert figures["units"]["model.embed"]["all_gathers"] == 1
    seconds = figures["seconds"]
    assert seconds["step"] == pytest.approx(seconds["compute"] + sum(seconds["exposed"].values()))
