"""Programs as users start them: a script, a YAML file, torchrun, both flavours of Lightning.

Each runs on four processes of its own and writes down every rank's losses. Their mean over tokens must be the loss
of one process on the whole batch, step by step.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Subset

from tests import modules
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, RandomTokens
from tests.parity import reference

BIN = Path(sys.executable).parent
MODELS: dict[str, type[LightningModule]] = {"plain": PlainLanguageModel, "hugging_face": HuggingFaceLanguageModel}
NUM_STEPS, NUM_RANKS = 5, 4
TOLERANCE = 1e-5
"""Relative, of a loss in FP32, over five steps of SGD."""

LAUNCHERS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Absent where a user types a command; the process that runs the tests may have them."""


def user_project(folder: Path, flavour: str = "lightning.pytorch") -> None:
    """``train.py`` and ``user_models.py``; a user of the other flavour differs in the name they import."""
    for source, name in ((Path(__file__).parent / "scripts" / "train.py", "train"), (modules.__file__, "user_models")):
        # Our own tests run on both flavours; a user names theirs.
        text = Path(str(source)).read_text().replace("tests.flavour", "lightning.pytorch")
        assert "lightning_moe" not in text and "lightning.pytorch" in text
        (folder / f"{name}.py").write_text(text.replace("lightning.pytorch", flavour))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def check_losses(folder: Path, kind: str, result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr[-6000:]
    data = RandomTokens(NUM_STEPS * 8, 24)
    # Lightning's own sampler shuffles training data, with the seed of seed_everything(0).
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()

    def make_model() -> LightningModule:
        model = MODELS[kind]()
        # strict=False for buffers: every parameter was written down.
        missing, unexpected = model.load_state_dict(torch.load(folder / "first_weights.pt"), strict=False)
        assert not unexpected and not set(missing) & {name for name, _ in model.named_parameters()}
        return model

    _, _, expected = reference(make_model, DataLoader(Subset(data, order), batch_size=8), num_steps=NUM_STEPS)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    for step, loss in enumerate(expected):
        here = [(losses[step], counts[step]) for losses, counts in ranks]
        mean = sum(value * count for value, count in here if count) / sum(count for _, count in here)
        assert mean == pytest.approx(loss, rel=TOLERANCE), f"step {step}"


def check_first_weights_are_of_the_seed(folder: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    weights = torch.load(folder / "first_weights.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach()), name


def yaml_config(kind: str) -> str:
    strategy = {"class_path": "lightning_moe_strategy.FSDPCPEPStrategy", "init_args": {"cp": 2, "ep": 2}}
    callbacks = [{"class_path": "train.Record"}]
    if kind == "plain":
        shifts = {"class_path": "lightning_moe_strategy.ZigZagContextParallel", "init_args": {"shift": "module"}}
        callbacks.append(shifts)
    return yaml.safe_dump(
        {
            "seed_everything": 0,
            "trainer": {
                "accelerator": "cpu",
                "devices": NUM_RANKS,
                "strategy": strategy,
                "max_steps": NUM_STEPS,
                "callbacks": callbacks,
                "logger": False,
                "enable_checkpointing": False,
            },
            "model": {"class_path": f"user_models.{MODELS[kind].__name__}"},
            "data": {"class_path": "train.Data", "init_args": {"batch_size": 4}},
        }
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "flavour"),
    [
        ("plain", "lightning.pytorch"),
        pytest.param("hugging_face", "lightning.pytorch", marks=SLOW),
        pytest.param("hugging_face", "pytorch_lightning", marks=SLOW),
    ],
)
def test_a_script_that_only_names_the_strategy_trains_as_one_process(kind, flavour, tmp_path):
    user_project(tmp_path, flavour)
    check_losses(tmp_path, kind, run(tmp_path, sys.executable, "train.py", kind))
    check_first_weights_are_of_the_seed(tmp_path, kind)


@SLOW
@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("plain", [str(BIN / "lightning-moe")]),
        ("hugging_face", [sys.executable, "-m", "lightning_moe_strategy"]),
    ],
)
def test_a_yaml_file_with_cp_and_ep_trains_as_one_process(kind, program, tmp_path):
    user_project(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml_config(kind))
    check_losses(tmp_path, kind, run(tmp_path, *program, "fit", "--config", "config.yaml"))


@SLOW
def test_torchrun_starts_the_same_script(tmp_path):
    user_project(tmp_path)
    torchrun = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    check_losses(tmp_path, "plain", run(tmp_path, *torchrun, "train.py", "plain"))


def test_help_is_the_same_in_both_spellings_quick_and_without_torch(tmp_path):
    pages, seconds = set(), []
    for program in ([str(BIN / "lightning-moe")], [sys.executable, "-m", "lightning_moe_strategy"]):
        for _ in range(2):
            start = time.perf_counter()
            result = run(tmp_path, *program, "--help")
            seconds.append(time.perf_counter() - start)
            assert result.returncode == 0 and not result.stderr
            pages.add(result.stdout)
    (page,) = pages
    assert page.startswith("usage: lightning-moe COMMAND") and "fit" in page
    assert min(seconds) < 2  # the machine may be busy; the fastest of four is ours
    loaded = run(
        tmp_path,
        sys.executable,
        "-c",
        "import sys; from lightning_moe_strategy.__main__ import main; sys.argv = ['lightning-moe', '--help']; main()\n"
        "assert not {'torch', 'lightning', 'pytorch_lightning', 'yaml', 'numpy'} & set(sys.modules)",
    )
    assert loaded.returncode == 0, loaded.stderr
