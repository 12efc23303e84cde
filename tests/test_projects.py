"""Ten projects as their users wrote them (``tests/projects``): one process and the strategy take the same ten steps.

REF is a plain Trainer with one process and the whole batch. Nothing in a project knows of ranks; what differs between
the two runs is the Trainer's arguments and the batch size, which is a rank's share, as under any Trainer. Lightning's
own sampler shuffles in both.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from tests.modules import tiny_hf_config
from tests.parity import QUIET, whole, worst_difference
from tests.projects import (
    actor_critic,
    dense_llama,
    encoder_classifier,
    frozen_backbone,
    hugging_face_finetune,
    instruction_tuning,
    nanogpt,
    own_clipping,
)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

TOLERANCE = 1e-5
"""Relative, of losses and of every parameter after ten steps."""

NUM_STEPS, BATCH_SIZE = 10, 8
CLI_PROJECT = Path(__file__).parent / "projects" / "cli_project"
CP2_EP2 = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)
EP4 = dict(fsdp=4, cp=1, e_fsdp=1, ep=4)
FSDP4 = dict(fsdp=4, cp=1, e_fsdp=4, ep=1)
REPLICAS = dict(d_rep=2, fsdp=2, cp=1, e_fsdp=2, ep=2)
WITH_CP = [pytest.param(CP2_EP2, id="cp2-ep2"), pytest.param(EP4, id="ep4", marks=pytest.mark.slow)]
WITHOUT_CP = [pytest.param(EP4, id="ep4"), pytest.param(FSDP4, id="fsdp4", marks=pytest.mark.slow)]

Losses = list[tuple[float, float]]
"""Of every step what the module logged, and how many labels are behind it."""


class Recorder(L.Callback):
    """What the module logs, step by step."""

    def __init__(self, key: str = "train_loss") -> None:
        self.key, self.losses = key, []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        micro_batch = getattr(trainer.strategy, "micro_batch", None)
        labels = None if micro_batch is None else micro_batch.num_loss_tokens
        self.losses.append((float(trainer.callback_metrics[self.key]), 1.0 if labels is None else float(labels)))


class InSamplerOrder(L.LightningDataModule):
    """The training samples in the order of Lightning's distributed sampler, whose ranks take every nth."""

    def __init__(self, data: L.LightningDataModule, seed: int = 0) -> None:
        super().__init__()
        self.data, self.seed = data, seed
        for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
            if getattr(type(data), name) is not getattr(L.LightningDataModule, name):
                setattr(self, name, getattr(data, name))

    def train_dataloader(self) -> DataLoader:
        loader = self.data.train_dataloader()
        sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0, seed=self.seed)
        return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)


def one_process(
    make_module: Callable[[], Any], make_data: Callable[[int], Any], *, ckpt_path: Any = None, **options: Any
) -> tuple[Any, Any, Losses]:
    """The Trainer, the trained module and its losses."""
    recorder = Recorder()
    options = QUIET | dict(max_steps=NUM_STEPS) | options
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[recorder], **options)
    torch.manual_seed(0)
    module = make_module()
    trainer.fit(module, datamodule=InSamplerOrder(make_data(BATCH_SIZE)), ckpt_path=ckpt_path)
    return trainer, module, recorder.losses


def on_rank(
    degrees: dict[str, Any], make_module: Callable[[], Any], make_data: Callable[[int], Any], **options: Any
) -> tuple[Losses, dict[str, Tensor]]:
    """This rank's losses and the whole parameters after training."""
    _, module, losses = fit_on_rank(degrees, make_module, make_data, **options)
    return losses, parameters_of(module)


def fit_on_rank(
    degrees: dict[str, Any],
    make_module: Callable[[], Any],
    make_data: Callable[[int], Any],
    *,
    zigzag: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[Any, Any, Losses]:
    recorder = Recorder()
    trainer = trainer_on_rank(degrees, [recorder], zigzag or {}, **options)
    torch.manual_seed(0)
    module = make_module()
    trainer.fit(module, datamodule=make_data(share_of_batch(degrees)), ckpt_path=ckpt_path)
    return trainer, module, recorder.losses


def trainer_on_rank(degrees: dict[str, Any], callbacks: list[Any], zigzag: dict[str, Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return L.Trainer(
            accelerator="cpu",
            devices=torch.distributed.get_world_size(),
            strategy=FSDPCPEPStrategy(**degrees),
            callbacks=[*callbacks, ZigZagContextParallel(**zigzag)],
            **(QUIET | dict(max_steps=NUM_STEPS) | options),
        )


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except Exception as error:
        return str(error)
    return "no error"


def share_of_batch(degrees: dict[str, int]) -> int:
    return BATCH_SIZE // (degrees.get("d_rep", 1) * degrees.get("fsdp", 1))


def parameters_of(module: Any) -> dict[str, Tensor]:
    return {name: whole(parameter.detach()).clone() for name, parameter in module.named_parameters()}


def mean_losses(per_rank: list[Losses]) -> list[float]:
    """Of every step the loss of the whole batch: a rank without labels may have logged NaN."""
    return [
        sum(loss * labels for loss, labels in step if labels) / sum(labels for _, labels in step)
        for step in zip(*per_rank, strict=True)
    ]


def assert_same_ten_steps(per_rank: list[tuple[Losses, dict[str, Tensor]]], module: Any, losses: Losses) -> None:
    expected = parameters_of(module)
    assert len(losses) == NUM_STEPS and losses[-1] != losses[0]
    assert mean_losses([losses for losses, _ in per_rank]) == pytest.approx([x for x, _ in losses], rel=TOLERANCE)
    for _, parameters in per_rank:
        difference, name = worst_difference(parameters, expected)
        assert difference < TOLERANCE, (name, difference)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory) -> str:
    """A directory with a pretrained model, as a user has downloaded it."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("qwen3_moe")
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_hf_config("qwen3_moe", initializer_range=0.1)).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("degrees", WITH_CP)
def test_a_hugging_face_fine_tune_with_warm_up_and_padding(degrees, qwen3_moe, ranks4):
    make = partial(hugging_face_finetune.FineTune, qwen3_moe)
    _, module, losses = one_process(make, hugging_face_finetune.Texts)
    assert_same_ten_steps(ranks4(on_rank, degrees, make, hugging_face_finetune.Texts), module, losses)


@pytest.mark.parametrize("degrees", WITHOUT_CP)
def test_a_nanogpt_with_tied_embeddings_and_experts_in_some_layers(degrees, ranks4):
    _, module, losses = one_process(nanogpt.LitGPT, nanogpt.Pairs)
    assert_same_ten_steps(ranks4(on_rank, degrees, nanogpt.LitGPT, nanogpt.Pairs), module, losses)


def test_a_nanogpt_without_positions_on_half_sequences(ranks4):
    make = partial(nanogpt.LitGPT, use_positions=False)
    _, module, losses = one_process(make, nanogpt.Pairs)
    on_half = partial(on_rank, zigzag=dict(positions="none"))
    assert_same_ten_steps(ranks4(on_half, CP2_EP2, make, nanogpt.Pairs), module, losses)


def logged_by_hand(degrees: dict[str, int]) -> tuple[Losses, dict[str, Tensor], dict[str, float]]:
    trainer, module, losses = fit_on_rank(
        degrees, actor_critic.ActorCritic, actor_critic.Pairs, zigzag=dict(positions="none"), max_steps=2 * NUM_STEPS
    )
    return losses, parameters_of(module), gradients_logged_by(trainer)


def gradients_logged_by(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "grad" in name}


@pytest.mark.parametrize("degrees", WITH_CP)
def test_manual_optimization_whose_two_optimizers_take_turns(degrees, ranks4):
    steps = 2 * NUM_STEPS  # two optimizers step on every batch
    trainer, module, losses = one_process(actor_critic.ActorCritic, actor_critic.Pairs, max_steps=steps)
    logged = gradients_logged_by(trainer)
    per_rank = ranks4(logged_by_hand, degrees)
    assert_same_ten_steps([(losses, parameters) for losses, parameters, _ in per_rank], module, losses)
    assert len(logged) == 2
    for _, _, logged_here in per_rank:
        assert logged_here == pytest.approx(logged, rel=1e-4)


@pytest.fixture
def lora() -> Any:
    pytest.importorskip("peft")
    return importlib.import_module("tests.projects.lora")


@pytest.mark.parametrize("degrees", WITH_CP)
def test_lora_on_dense_linears_trains_the_adapters_only(degrees, lora, qwen3_moe, ranks4):
    make = partial(lora.LoRAFineTune, qwen3_moe)
    _, module, losses = one_process(make, lora.Texts)
    assert_same_ten_steps(ranks4(on_rank, degrees, make, lora.Texts), module, losses)


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("degrees", [*WITH_CP, WITHOUT_CP[1]])
def test_lora_on_the_parameters_of_experts_trains_the_adapters_only(degrees, lora, qwen3_moe, ranks4):
    make = partial(lora.LoRAFineTune, qwen3_moe, ("q_proj",), EXPERTS)
    before = parameters_of(make())
    _, module, losses = one_process(make, lora.Texts)
    per_rank = ranks4(on_rank, degrees, make, lora.Texts)
    assert_same_ten_steps(per_rank, module, losses)
    for name, parameter in per_rank[0][1].items():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name


@pytest.mark.parametrize("degrees", WITH_CP)
def test_a_frozen_backbone_with_a_head_that_is_trained(degrees, qwen3_moe, ranks4):
    make = partial(frozen_backbone.Tagger, qwen3_moe)
    _, module, losses = one_process(make, frozen_backbone.Tagged)
    on_some = partial(on_rank, zigzag=dict(shift="none"))
    assert_same_ten_steps(ranks4(on_some, degrees, make, frozen_backbone.Tagged), module, losses)


@pytest.mark.parametrize("degrees", [CP2_EP2, EP4], ids=["cp2-ep2", "ep4"])
def test_the_labels_of_a_hugging_face_tagger_are_counted_where_they_stand(degrees, qwen3_moe, ranks4):
    make = partial(frozen_backbone.HuggingFaceTagger, qwen3_moe)
    _, module, losses = one_process(make, frozen_backbone.Tagged)
    assert_same_ten_steps(ranks4(on_rank, degrees, make, frozen_backbone.Tagged), module, losses)


@pytest.mark.parametrize("degrees", WITHOUT_CP)
def test_a_classifier_on_a_bidirectional_encoder_with_experts(degrees, ranks4):
    _, module, losses = one_process(encoder_classifier.TextClassifier, encoder_classifier.Labelled)
    ten_steps = ranks4(on_rank, degrees, encoder_classifier.TextClassifier, encoder_classifier.Labelled)
    assert_same_ten_steps(ten_steps, module, losses)


def test_a_classifier_of_whole_sequences_is_refused_with_cp_by_name(ranks4):
    error = partial(error_of, on_rank, CP2_EP2, encoder_classifier.TextClassifier, encoder_classifier.Labelled)
    for message in ranks4(error):
        assert "TextClassifier trains on 'labels' (4,)" in message and "cp(2)" in message, message
        assert "Choose cp=1" in message


def test_an_encoder_with_a_label_per_token_is_refused_with_cp_at_its_first_layer(ranks4):
    data = encoder_classifier.Masked
    error = partial(error_of, on_rank, CP2_EP2, encoder_classifier.MaskedLanguageModel, data, zigzag=dict(shift="none"))
    for message in ranks4(error):
        assert "layers.0 uses attn_mask; cp=2 cannot split that" in message, message


def test_a_nanogpt_that_counts_positions_itself_is_refused_with_cp(ranks4):
    for message in ranks4(partial(error_of, on_rank, CP2_EP2, nanogpt.LitGPT, nanogpt.Pairs)):
        assert "never read the position ids" in message and "positions='none'" in message, message


@pytest.mark.parametrize("degrees", [dict(fsdp=2, cp=2), dict(d_rep=2, fsdp=2)], ids=["cp2", "d_rep2"])
def test_a_dense_decoder(degrees, ranks4):
    _, module, losses = one_process(dense_llama.Llama, dense_llama.Texts)
    assert_same_ten_steps(ranks4(on_rank, degrees, dense_llama.Llama, dense_llama.Texts), module, losses)


@pytest.mark.parametrize(
    "project", [instruction_tuning.InstructionTuning, instruction_tuning.MeanOverAnswers], ids=["of_model", "own"]
)
@pytest.mark.parametrize("degrees", WITH_CP)
def test_prompts_that_are_ignored_on_ranks_that_hold_no_answer(degrees, project, qwen3_moe, ranks4):
    make = partial(project, qwen3_moe)
    _, module, losses = one_process(make, instruction_tuning.Chats)
    shift = "module" if project is instruction_tuning.MeanOverAnswers else "auto"
    per_rank = ranks4(partial(on_rank, zigzag=dict(shift=shift)), degrees, make, instruction_tuning.Chats)
    assert any(not labels for losses, _ in per_rank for _, labels in losses)
    assert_same_ten_steps(per_rank, module, losses)


def norms_on_rank(degrees: dict[str, Any], make_module: Callable[[], Any]) -> tuple[Losses, dict[str, Tensor], Any]:
    fitted = fit_on_rank(degrees, make_module, own_clipping.Pairs, zigzag=dict(positions="none"))
    trainer, module, losses = fitted
    logged = gradients_logged_by(trainer)
    return losses, parameters_of(module), (module.norms, logged)


@pytest.mark.parametrize("make", [own_clipping.Clipped, own_clipping.ClippedByTorch], ids=["lightning", "torch"])
@pytest.mark.parametrize("degrees", WITH_CP)
def test_a_module_that_clips_its_own_way_and_logs_gradient_norms(make, degrees, ranks4):
    trainer, module, losses = one_process(make, own_clipping.Pairs)
    logged = gradients_logged_by(trainer)
    per_rank = ranks4(norms_on_rank, degrees, make)
    assert_same_ten_steps([(losses, parameters) for losses, parameters, _ in per_rank], module, losses)
    for _, _, (norms, logged_here) in per_rank:
        assert logged_here == pytest.approx(logged, rel=TOLERANCE)
        for step, expected in zip(norms, module.norms, strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.fixture(scope="module")
def cli_in_one_process(tmp_path_factory) -> tuple[Any, Losses]:
    """The YAML project as it is, but for Lightning's sampler, which a Trainer with one process leaves out."""
    directory = tmp_path_factory.mktemp("cli")
    cli = run_cli(str(directory), {}, run=False)
    cli.datamodule = InSamplerOrder(cli.datamodule, seed=11)
    cli.trainer.fit(cli.model, cli.datamodule)
    return cli.model, logged_by_cli(directory)


def run_cli(directory: str, trainer: dict[str, Any], *, run: bool = True) -> Any:
    """``python -m tests.projects.cli_project fit --config config.yaml --config layout.yaml``, here."""
    from lightning.pytorch.cli import LightningCLI

    layout = Path(directory) / f"layout_{os.environ.get('RANK', 'alone')}.yaml"
    layout.write_text(yaml.safe_dump({"trainer": trainer | {"default_root_dir": directory}} | batch_size_of(trainer)))
    args = ["--config", str(CLI_PROJECT / "config.yaml"), "--config", str(layout)]
    seed = os.environ.pop("PL_GLOBAL_SEED", None)
    try:
        return LightningCLI(args=["fit", *args] if run else args, run=run, save_config_callback=None)
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
        if seed is not None:
            os.environ["PL_GLOBAL_SEED"] = seed


def batch_size_of(trainer: dict[str, Any]) -> dict[str, Any]:
    degrees = trainer.get("strategy", {}).get("init_args", {})
    return {"data": {"init_args": {"batch_size": share_of_batch(degrees)}}}


def logged_by_cli(directory: Path, rank: int = 0) -> Losses:
    lines = map(json.loads, (directory / f"losses_{rank}.jsonl").read_text().splitlines())
    return [(line["train_loss"], 1.0) for line in lines]


def layout_for_cli(degrees: dict[str, int]) -> dict[str, Any]:
    """What its user adds to the YAML file."""
    return {
        "devices": degrees["e_fsdp"] * degrees["ep"],
        "strategy": {"class_path": "lightning_moe_strategy.FSDPCPEPStrategy", "init_args": degrees},
        "callbacks": [
            {"class_path": "tests.projects.cli_project.callbacks.WriteLosses"},
            {"class_path": "lightning_moe_strategy.ZigZagContextParallel", "init_args": {"positions": "none"}},
        ],
    }


def cli_on_rank(directory: str, degrees: dict[str, int]) -> dict[str, Tensor]:
    return parameters_of(run_cli(directory, layout_for_cli(degrees)).model)


@pytest.mark.parametrize("degrees", WITH_CP)
def test_a_lightning_cli_project_in_yaml_alone(degrees, cli_in_one_process, ranks4, tmp_path):
    module, losses = cli_in_one_process
    parameters = ranks4(cli_on_rank, str(tmp_path), degrees)
    per_rank = [(logged_by_cli(tmp_path, rank), parameters[rank]) for rank in range(4)]
    assert_same_ten_steps(per_rank, module, losses)


@pytest.mark.slow
def test_the_cli_project_started_by_lightnings_own_launcher(cli_in_one_process, tmp_path):
    _, losses = cli_in_one_process
    layout = layout_for_cli(dict(fsdp=1, cp=2, e_fsdp=1, ep=2))
    layout["default_root_dir"] = str(tmp_path)
    (tmp_path / "layout.yaml").write_text(yaml.safe_dump({"trainer": layout} | batch_size_of(layout)))
    command = [sys.executable, "-m", "tests.projects.cli_project", "fit"]
    command += ["--config", str(CLI_PROJECT / "config.yaml"), "--config", str(tmp_path / "layout.yaml")]
    environment = {key: value for key, value in os.environ.items() if key != "PL_GLOBAL_SEED"}
    done = subprocess.run(
        command, cwd=CLI_PROJECT.parents[2], env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = mean_losses([logged_by_cli(tmp_path, rank) for rank in range(2)])
    assert measured == pytest.approx([loss for loss, _ in losses], rel=TOLERANCE)


STAGES = {
    "fine_tune": (hugging_face_finetune.FineTune, hugging_face_finetune.Texts, CP2_EP2),
    "classifier": (encoder_classifier.TextClassifier, encoder_classifier.Labelled, EP4),
}


def four_stages(trainer: Any, module: Any, data: Any) -> dict[str, Any]:
    """Fit, validate, test and predict with one Trainer; the metrics, and the predictions of this rank."""
    trainer.fit(module, datamodule=data)
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    metrics |= trainer.test(module, datamodule=data, verbose=False)[0]
    return {"metrics": metrics, "predictions": trainer.predict(module, datamodule=data)}


def four_stages_on_rank(degrees: dict[str, int], make_module: Callable[[], Any], make_data: Any) -> dict[str, Any]:
    trainer = trainer_on_rank(degrees, [], {}, max_steps=3)
    torch.manual_seed(0)
    return four_stages(trainer, make_module(), make_data(share_of_batch(degrees)))


@pytest.mark.parametrize("project", list(STAGES))
def test_fit_validate_test_and_predict_with_one_trainer(project, qwen3_moe, ranks4):
    make, data, degrees = STAGES[project]
    make = partial(make, qwen3_moe) if project == "fine_tune" else make
    torch.manual_seed(0)
    trainer = L.Trainer(accelerator="cpu", devices=1, **(QUIET | dict(max_steps=3)))
    expected = four_stages(trainer, make(), InSamplerOrder(data(BATCH_SIZE)))
    per_rank = ranks4(four_stages_on_rank, degrees, make, data)
    for result in per_rank:
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE)
    dp = BATCH_SIZE // share_of_batch(degrees)
    whole_predictions = torch.cat(expected["predictions"])
    for rank, result in enumerate(per_rank):
        here, dp_rank = torch.cat(result["predictions"]), rank * dp // 4
        expected_here = whole_predictions[dp_rank::dp]
        if here.shape != expected_here.shape:  # this rank's tokens, in zig-zag order
            chunks = expected_here.chunk(4, 1)
            cp_rank = rank % 2
            expected_here = torch.cat([chunks[cp_rank], chunks[3 - cp_rank]], 1)
        torch.testing.assert_close(here, expected_here, rtol=1e-4, atol=1e-5)


def fit_twice_on_rank(degrees: dict[str, int]) -> tuple[Losses, dict[str, Tensor]]:
    _, module, first = fit_on_rank(degrees, nanogpt.LitGPT, nanogpt.Pairs, max_steps=4)
    again = fit_on_rank(degrees, lambda: module, nanogpt.Pairs, max_steps=6)
    return first + again[2], parameters_of(module)


def test_a_second_trainer_fits_the_same_module_on(ranks4):
    _, module, first = one_process(nanogpt.LitGPT, nanogpt.Pairs, max_steps=4)
    _, module, second = one_process(lambda: module, nanogpt.Pairs, max_steps=6)
    assert_same_ten_steps(ranks4(fit_twice_on_rank, EP4), module, first + second)


def resumed_on_rank(
    degrees: dict[str, int], others: dict[str, int], directory: str
) -> tuple[Losses, dict[str, Tensor]]:
    make, data = nanogpt.LitGPT, nanogpt.Pairs
    trainer, _, first = fit_on_rank(degrees, make, data, max_steps=4)
    trainer.save_checkpoint(f"{directory}/four_steps.ckpt")
    _, module, second = fit_on_rank(others, make, data, ckpt_path=f"{directory}/four_steps.ckpt")
    return first + second, parameters_of(module)


def test_training_resumes_from_a_checkpoint_on_another_layout(ranks4, tmp_path):
    # Unbroken: a plain Trainer that resumes inside an epoch reads its first samples again.
    _, module, losses = one_process(nanogpt.LitGPT, nanogpt.Pairs)
    assert_same_ten_steps(ranks4(resumed_on_rank, REPLICAS, EP4, str(tmp_path)), module, losses)


def built_in_init_module(degrees: dict[str, int]) -> tuple[Losses, dict[str, Tensor]]:
    """Every rank builds under ``trainer.init_module()``, with real values."""
    recorder = Recorder()
    trainer = trainer_on_rank(degrees, [recorder], {})
    torch.manual_seed(0)
    with trainer.init_module():
        module = nanogpt.LitGPT()
    trainer.fit(module, datamodule=nanogpt.Pairs(share_of_batch(degrees)))
    return recorder.losses, parameters_of(module)


def test_a_module_that_is_built_in_trainer_init_module(ranks4):
    _, module, losses = one_process(nanogpt.LitGPT, nanogpt.Pairs)
    assert_same_ten_steps(ranks4(built_in_init_module, FSDP4), module, losses)
