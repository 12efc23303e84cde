"""``verify``: what is exact passes, what differs is told, and nothing is left behind."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_moe_strategy import ZigZagContextParallel, verify
from lightning_moe_strategy.cli.verify import run_verify
from lightning_moe_strategy.models.lightning_module import HFCausalLM, MoELanguageModel
from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.verifying.causes import Gradient, Pattern, WrongOutput, likely_cause
from lightning_moe_strategy.verifying.layouts import parse_layout, shrunk, world_of
from lightning_moe_strategy.verifying.memory import require_memory
from tests.code_blocks import DOCS, blocks_of
from tests.modules import PlainLanguageModel, RandomTokens, tiny_hf_config
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

CP2_EP2 = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)
EP4 = dict(fsdp=4, cp=1, e_fsdp=1, ep=4)
CLI_PROJECT = Path(__file__).parent / "projects" / "cli_project"


class Texts(L.LightningDataModule):
    def __init__(self, length=22, num_samples=32, **options):
        super().__init__()
        self.data = RandomTokens(num_samples, length, **options)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=2, shuffle=True)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("qwen3_moe")
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_hf_config("qwen3_moe", initializer_range=0.1)).save_pretrained(directory)
    return str(directory)


def lora(path):
    pytest.importorskip("peft")
    return importlib.import_module("tests.projects.lora").LoRAFineTune(path)


def lora_texts():
    return importlib.import_module("tests.projects.lora").Texts(4)


slow = pytest.mark.slow
PROJECTS = {
    "hugging_face_finetune": (hugging_face_finetune.FineTune, partial(hugging_face_finetune.Texts, 4), CP2_EP2, {}),
    "nanogpt": (lambda _: nanogpt.LitGPT(), partial(nanogpt.Pairs, 2), EP4, {}),
    "actor_critic": (
        lambda _: actor_critic.ActorCritic(), partial(actor_critic.Pairs, 4), CP2_EP2, dict(positions="none")
    ),
    "lora": (lora, lora_texts, CP2_EP2, {}),
    "frozen_backbone": (
        frozen_backbone.Tagger, partial(frozen_backbone.Tagged, 4), CP2_EP2, dict(shift="none")
    ),
    "encoder_classifier": (
        lambda _: encoder_classifier.TextClassifier(), partial(encoder_classifier.Labelled, 2), EP4, {}
    ),
    "dense_llama": (lambda _: dense_llama.Llama(), partial(dense_llama.Texts, 4), dict(fsdp=2, cp=2), {}),
    "instruction_tuning": (
        instruction_tuning.InstructionTuning, partial(instruction_tuning.Chats, 4), CP2_EP2, {}
    ),
    "own_clipping": (
        lambda _: own_clipping.Clipped(), partial(own_clipping.Pairs, 4), CP2_EP2, dict(positions="none")
    ),
}  # fmt: skip
FAST = ("actor_critic", "hugging_face_finetune")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else slow) for name in PROJECTS])
def test_a_project_as_its_user_wrote_it_passes(name, qwen3_moe):
    make, data, layout, zigzag = PROJECTS[name]
    torch.manual_seed(0)
    result = verify(make(qwen3_moe), data(), layout, zigzag=ZigZagContextParallel(**zigzag))
    assert result.passed and bool(result), result.text
    assert result.first_wrong_module is None and result.likely_cause is None
    assert not any(row.is_wrong for row in result.rows)
    expected = {"loss", "output", "gradient", "parameter", "replica"}
    if name == "actor_critic":  # it returns no loss
        expected.remove("loss")
    assert expected <= {row.kind for row in result.rows}


@pytest.mark.slow
def test_the_project_that_is_a_yaml_file_passes_from_the_command_line(capsys):
    status = run_verify(
        ["--config", str(CLI_PROJECT / "config.yaml"), "--layout", "fsdp=2,ep=2", "--steps", "2",
         "--data.init_args.batch_size", "4"]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert "Left out: callbacks WriteLosses." in printed.out and "2 ranks (fsdp=2, ep=2)" in printed.out


@pytest.mark.slow
def test_the_users_module_stays_as_it_was_and_accumulation_is_one_step():
    """Two steps of two micro-batches, ragged labels, clipping, recompute; the module of a fine-tune in miniature."""
    torch.manual_seed(0)
    module, said = PlainLanguageModel(optimizer="adamw", learning_rate=0.01), []
    before = {name: p.clone() for name, p in module.named_parameters()}
    random_state = torch.get_rng_state()
    result = verify(
        module,
        Texts(),
        CP2_EP2,
        steps=2,
        zigzag=ZigZagContextParallel(shift="module"),
        strategy=dict(recompute="block"),
        trainer=dict(accumulate_grad_batches=2, gradient_clip_val=0.5),
        say=said.append,
    )
    assert result.passed, result.text
    assert {row.step for row in result.rows if row.kind in ("loss", "gradient", "parameter", "count")} == {0, 1}
    shares = {row.name: row.shape for row in result.rows if row.kind == "gradient"}
    assert shares == {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), random_state) and module._trainer is None
    assert len(said) == 3 and all(line.startswith("verify: ") for line in said)
    names = [row.name for row in result.rows if row.kind == "output"]
    for inside in ("embedding", "blocks.0.norm", "blocks.0.qkv", "blocks.1.sparse.router", "blocks.1.sparse.experts"):
        assert f"decoder.{inside}" in names
    assert all(row.unit and row.name.startswith(row.unit) for row in result.rows if row.kind == "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [dict(d_rep=2, fsdp=1, cp=2, e_rep=2, e_fsdp=1, ep=2), dict(fsdp=1, cp=4, ep=4)])
def test_our_own_model_on_the_meta_device_is_drawn_once_for_all(layout):
    with torch.device("meta"):
        module = MoELanguageModel("tiny")
    result = verify(module, Texts(), layout, zigzag=ZigZagContextParallel(shift="module"))
    assert result.passed, result.text
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.slow
def test_a_hugging_face_folder_that_a_meta_module_waits_for_is_read(qwen3_moe):
    with torch.device("meta"):
        module = HFCausalLM(pretrained=qwen3_moe)
    result = verify(module, Texts(), dict(fsdp=2, cp=1, ep=2), steps=1)
    assert result.passed, result.text
    assert max(row.difference for row in result.rows if row.kind == "output") > 0


class Drops(PlainLanguageModel):
    """Dropout between its blocks, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.3)
        self.decoder.blocks[1].norm.register_forward_hook(
            lambda module, args, x: self.dropout(x) + 0.1 * torch.randn_like(x)
        )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_dropout_and_noise_are_no_difference(recompute):
    zigzag, strategy = ZigZagContextParallel(shift="module"), dict(recompute=recompute)
    result = verify(Drops(), Texts(), dict(fsdp=2, ep=2), zigzag=zigzag, strategy=strategy)
    assert result.passed, result.text


def test_data_that_end_inside_a_step_are_refused():
    zigzag, trainer = ZigZagContextParallel(shift="module"), dict(accumulate_grad_batches=2)
    with pytest.raises(
        ValueError, match=r"rank 0: The data of a rank end inside a step of accumulate_grad_batches\(2\)"
    ):
        verify(PlainLanguageModel(), Texts(num_samples=2), dict(fsdp=1), zigzag=zigzag, trainer=trainer)


class TiesOnOneRank(PlainLanguageModel):
    """All experts score the same but for a rounding error, which is another on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.decoder.blocks:
            weight = block.sparse.router.weight.data
            weight.copy_(weight[:1].expand_as(weight).clone())
            block.sparse.router.register_forward_hook(self.round)

    @staticmethod
    def round(module, args, logits):
        sign = -1 if os.environ.get("RANK") == "1" else 1
        return logits + sign * 1e-7 * torch.arange(logits.shape[1])


@pytest.mark.slow
def test_ties_within_rounding_are_no_difference():
    result = verify(TiesOnOneRank(), Texts(), dict(cp=2, ep=2), zigzag=ZigZagContextParallel(shift="module"))
    assert result.passed, result.text
    assert "choices of experts were ties within rounding" in result.text


class MixesTokens(PlainLanguageModel):
    """A mean over the sequence, written so that no refusal sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.blocks[1].norm.register_forward_hook(
            lambda module, args, x: x + torch.einsum("bsd->bd", x)[:, None].expand_as(x) / x.shape[1]
        )


CONFIG = """
seed_everything: 3
trainer:
  strategy:
    class_path: lightning_moe_strategy.FSDPCPEPStrategy
    init_args: {{fsdp: 1, cp: {cp}, ep: {cp}, recompute: block, balance: bias, async_save: true}}
  devices: {devices}
  accelerator: gpu
  precision: bf16-mixed
  max_steps: 50
  callbacks:
    - class_path: lightning_moe_strategy.ZigZagContextParallel
      init_args: {{shift: module, verify_cp: true}}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
ckpt_path: {tmp_path}/last.ckpt
model: {{class_path: tests.test_verify.{model}}}
data: {{class_path: tests.test_verify.Texts}}
"""


def config(tmp_path, model, *, cp=2, devices=2):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(tmp_path=tmp_path, model=model, cp=cp, devices=devices))
    return str(path)


@pytest.fixture(autouse=True)
def no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tests that run beside this one have folders too
    yield
    assert not list(tmp_path.glob("lightning-moe-verify-*"))


@pytest.mark.slow
def test_a_difference_ends_with_status_1_and_names_the_module(tmp_path, capsys):
    status = run_verify(["--config", config(tmp_path, "MixesTokens")])
    printed = capsys.readouterr()
    assert status == 1, printed.err
    assert "First wrong module: decoder.blocks.1.norm." in printed.out
    assert "Likely cause: The forward pass of this module: it mixes tokens" in printed.out
    assert "Left out: ckpt_path" in printed.out and "Left out: callbacks ModelCheckpoint" in printed.out
    assert "one process has none of it: balance='bias'" in printed.out
    assert "Left out: precision bf16-mixed; verified in 32-true" in printed.out


@pytest.mark.slow
def test_a_layout_of_many_ranks_is_shrunk_and_said(tmp_path, capsys):
    status = run_verify(["--config", config(tmp_path, "PlainLanguageModel", cp=4, devices=256)])
    printed = capsys.readouterr()
    assert status == 2 and "d_rep(1) * fsdp(1) * cp(4) = 4 GPUs, but the world has 256" in printed.err
    status = run_verify(
        ["--config", config(tmp_path, "PlainLanguageModel", cp=4, devices=256)]
        + ["--trainer.strategy.init_args.fsdp", "64"]
    )
    printed = capsys.readouterr()
    assert status == 0, printed
    assert "has 256 ranks (fsdp=64, cp=4, e_fsdp=64, ep=4); verified was fsdp=2, cp=2, e_fsdp=2, ep=2" in printed.out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--layout", "fsdp=2,tp=2"], r"--layout(fsdp=2,tp=2) has 'tp=2': write axis=degree"),
        (["--layout", "cp=3,ep=2,e_fsdp=1"], "d_rep(1) * cp(3) = 3 does not divide the world of 2 GPUs"),
        (["--layout", "cp=2,ep=3"], "ep(3) does not divide num_experts(4)"),
        (["--steps", "0"], "steps(0) must be at least 1"),
        (["--precision", "16-mixed"], "precision('16-mixed') must be one of"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(arguments, error, tmp_path, capsys):
    assert run_verify(["--config", config(tmp_path, "PlainLanguageModel"), *arguments]) == 2
    printed = capsys.readouterr()
    assert error in printed.err.splitlines()[-1] and not printed.out, printed.err


def test_a_module_that_the_machine_cannot_hold_is_refused_with_its_size():
    with pytest.raises(
        ValueError, match=r"The module takes 2\.0 GB, and 4 ranks .* 40\.0 GB, .* has 30\.0 GB\. Shrink"
    ):
        require_memory(2_000_000_000, 4, available=30_000_000_000)
    require_memory(2_000_000_000, 4, available=40_000_000_000)


class TooLarge(PlainLanguageModel):
    """On the meta device it costs nothing, and it must not be built anywhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(10**13))


def test_a_module_is_refused_before_it_is_built(tmp_path, capsys):
    assert run_verify(["--config", config(tmp_path, "TooLarge")]) == 2
    assert "The module takes 40,000.0 GB, and 2 ranks and one process" in capsys.readouterr().err


def test_layouts_are_read_filled_and_shrunk():
    assert parse_layout("fsdp=2, cp=2,e_fsdp=2,ep=auto") == dict(fsdp=2, cp=2, e_fsdp=2, ep="auto")
    assert world_of(dict(fsdp=2, cp=2)) == 4
    assert world_of(dict(cp=2, ep=2)) == 2 and world_of(dict(cp=2, ep=3)) == 6
    seed = ParallelDims(d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64).resolve(256, local_world_size=64)
    small = shrunk(seed)
    assert small == dict(d_rep=2, fsdp=1, cp=2, e_rep=1, e_fsdp=2, ep=2, cp_inter=1) and world_of(small) == 4
    uneven = ParallelDims(d_rep=2, fsdp=4, cp=16, cp_inter=4, ep=128).resolve(128, local_world_size=8)
    assert world_of(shrunk(uneven)) == 16 and shrunk(uneven)["cp"] == 4
    with pytest.raises(ValueError, match="128 ranks, more than 64"):
        world_of(dict(fsdp=128))


class DiesOnOneRank(PlainLanguageModel):
    """Without a word, or with one; the other would go on for a minute."""

    def training_step(self, batch, batch_idx):
        if os.environ["RANK"] == "1" and self.learning_rate > 0.1:
            raise LookupError("this one failed first")
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def children_of(pid):
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and parent_of(path) == pid]


def parent_of(path):
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "error"),
    [(0.1, "rank 1 was killed by SIGKILL, without an error"), (0.2, "rank 1: this one failed first")],
)
def test_a_rank_that_dies_ends_the_others_and_is_named(rate, error):
    before, started = children_of(os.getpid()), time.monotonic()
    with pytest.raises(RuntimeError, match=error):
        verify(DiesOnOneRank(rate), Texts(), dict(fsdp=2), zigzag=ZigZagContextParallel(shift="module"))
    assert time.monotonic() - started < 30 and children_of(os.getpid()) == before


WAITS = """
import sys, time
import tests.test_verify as t
class Waits(t.PlainLanguageModel):
    def training_step(self, batch, batch_idx):
        print("here", file=open(sys.argv[1], "a"))
        time.sleep(600)
t.verify(Waits(), t.Texts(), dict(fsdp=2), zigzag=t.ZigZagContextParallel(shift="module"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_nothing_is_left_when_it_is_stopped(end, tmp_path):
    mark = tmp_path / "mark"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": "."}
    run = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(mark)],
        cwd=CLI_PROJECT.parents[2],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: mark.exists() and mark.read_text().count("here") == 2)
    ranks = children_of(run.pid)
    assert len(ranks) == 2 and len(list(tmp_path.glob("lightning-moe-verify-*"))) == 1
    os.killpg(run.pid, end)
    run.wait(20)
    wait_until(lambda: not any(Path(f"/proc/{pid}/fd/0").exists() for pid in ranks))
    wait_until(lambda: not list(tmp_path.glob("lightning-moe-verify-*")))


def wait_until(holds, seconds=60.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_the_outputs_in_the_documentation_are_real(capsys):
    page = DOCS / "verify.md"
    shown = [block.text for block in blocks_of(page) if block.language == "text"]
    with contextlib.chdir(DOCS.parent):
        assert run_verify(["--config", "configs/tiny_cpu.yaml"]) == 0
        exec(compile(next(b.text for b in blocks_of(page) if b.language == "python"), str(page), "exec"), {})
    printed = capsys.readouterr().out
    for text in shown:
        lines = text.strip().splitlines()
        for line in [lines[0], *(line for line in lines if line.startswith(("Equal", "First", "Likely", "Left out")))]:
            assert line in printed, printed


DEGREES = dict(d_rep=1, fsdp=2, cp=2, e_rep=1, e_fsdp=2, ep=2)


def gradient(name="w", *, ratio=None, wrong=True, expert=False, **options):
    return Gradient(name=name, is_expert=expert, is_wrong=wrong, ratio=ratio, **options)


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        (dict(), None),
        (dict(gradients=[gradient(ratio=1 / 4)]), "All gradients are 1/4 of what they should be: a factor that is no"),
        (
            dict(gradients=[gradient(ratio=2.0)]),
            "All gradients are 2 times of what they should be: added up over cp(2)",
        ),
        (
            dict(gradients=[gradient(ratio=0.5, expert=True), gradient(wrong=False, ratio=1.0)]),
            "The gradients of all experts are 1/2",
        ),
        (dict(gradients=[gradient(), gradient(wrong=False, ratio=1.0)]), "A gather without its reduce"),
        (dict(gradients=[gradient(expert=True, missing_experts=(3,))]), "dropped: those of expert 3 lack"),
        (dict(gradients=[gradient(right_on_some_replicas=True)]), "A stale replica"),
        (dict(stale_replicas=["w"], parameters_are_wrong=True), "A stale replica"),
        (dict(parameters_are_wrong=True), "The optimizer's step"),
        (dict(count_ratios=[2.0, 2.0]), "counted twice"),
        (dict(count_ratios=[1.1]), "miscounted: padding"),
        (dict(loss_is_wrong=True, gradients=[gradient()]), "labels shifted after the sequence was split"),
        (dict(leaked="layers.0", loss_is_wrong=True), "A document leak"),
        (dict(low_precision_routers=["gate"]), "A router that is not in FP32"),
        (dict(routing_is_wrong=True), "Routers that do not choose token by token"),
    ],
)
def test_the_cause_follows_from_the_pattern(pattern, cause):
    found = likely_cause(Pattern(degrees=DEGREES, **pattern))
    assert found is None if cause is None else cause in str(found)


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (dict(), "The forward pass of this module"),
        (dict(is_router=True, difference=3e-3), "A router that is not in FP32"),
        (dict(later_tokens_alone=True), "Positions counted on the rank"),
        (dict(later_tokens_alone=True, other_documents_alone=True), "Packed documents"),
    ],
)
def test_the_cause_follows_from_the_first_wrong_output(output, cause):
    options = dict(name="m", difference=0.5, is_router=False, later_tokens_alone=False, other_documents_alone=False)
    pattern = Pattern(degrees=DEGREES, wrong_output=WrongOutput(**options | output), gradients=[gradient()])
    assert str(likely_cause(pattern)).startswith(cause)
