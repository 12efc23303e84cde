"""``lightning-moe import`` and ``export``, and a run that starts from a Hugging Face folder and becomes one again."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe_strategy import HFCausalLM
from lightning_moe_strategy.cli.weights import run_export, run_import
from tests.families import make_model

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    make_model("qwen3_moe", vocab_size=300).save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of the original")
    return folder


@pytest.fixture(scope="module")
def start(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "start.ckpt"
    assert run_import(["--hf", str(hf), "--out", str(path)]) == 0
    return path


def weights_of(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= safetensors_torch.load_file(file)
    return weights


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def test_a_folder_becomes_a_checkpoint_and_that_a_folder(hf, start, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_export(["--ckpt", str(start), "--out", str(out), "--config", str(hf), "--max-shard-size", "90KB"]) == 0
    told = capsys.readouterr()
    assert f"{out}: " in told.out and "verifying" in told.err and "/s" in told.err
    require_equal(weights_of(out), weights_of(hf))
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} < names and "README.md" not in names
    assert all(file.stat().st_size < 100_000 for file in out.glob("*.safetensors"))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    require_equal(loaded.state_dict(), HFCausalLM(pretrained=str(hf)).model.state_dict())


def test_another_dtype_and_the_configuration_of_the_checkpoint(hf, start, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_export(["--ckpt", str(start), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert "No tokenizer" in capsys.readouterr().out
    require_equal(weights_of(out), {name: tensor.bfloat16() for name, tensor in weights_of(hf).items()})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]


def test_a_single_file_of_any_trainer_is_exported_too(hf, tmp_path):
    module = HFCausalLM(pretrained=str(hf))
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    torch.save(content, tmp_path / "one.ckpt")
    assert run_export(["--ckpt", str(tmp_path / "one.ckpt"), "--out", str(tmp_path / "out")]) == 0
    require_equal(weights_of(tmp_path / "out"), weights_of(hf))


def test_what_was_imported_is_a_checkpoint_of_lightning(hf, start):
    again = HFCausalLM.load_from_checkpoint(start)
    require_equal(again.state_dict(), HFCausalLM(pretrained=str(hf)).state_dict())


def exported(*options: Any) -> list[str]:
    return [str(option) for option in options]


def test_what_cannot_be_done_is_one_sentence_and_exit_status_2(hf, start, tmp_path, capsys):
    quantised, other = tmp_path / "quantised", tmp_path / "other"
    for folder, change in ((quantised, {"quantization_config": {"quant_method": "fp8"}}), (other, {"vocab_size": 99})):
        folder.mkdir()
        config = json.loads((hf / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
    new = tmp_path / "new"
    cases: list[tuple[Any, list[str], str]] = [
        (run_import, exported("--hf", tmp_path / "nowhere", "--out", new), "nothing is downloaded"),
        (run_import, exported("--hf", hf, "--out", start), "exists already"),
        (run_import, exported("--hf", quantised, "--out", new), "is quantised (fp8)"),
        (run_import, exported("--hf", other, "--out", new), "has neither model.safetensors.index.json"),
        (run_export, exported("--ckpt", tmp_path / "nowhere", "--out", new), "does not exist"),
        (run_export, exported("--ckpt", start, "--out", hf), "exists already"),
        (run_export, exported("--ckpt", start, "--out", new, "--config", tmp_path / "no"), "is no folder here"),
        (run_export, exported("--ckpt", start, "--out", new, "--max-shard-size", "5 files"), "must be a size"),
        (run_export, exported("--ckpt", start, "--out", new, "--config", other), "other shapes: model.embed_tokens"),
        (run_export, exported("--ckpt", tmp_path, "--out", new), "is no checkpoint"),
    ]
    for command, arguments, message in cases:
        with pytest.raises(SystemExit) as ended:
            command(arguments)
        told = capsys.readouterr().err
        assert ended.value.code == 2 and "Traceback" not in told
        assert message in told.rpartition("error: ")[2], told
    assert not new.exists() and not list(tmp_path.glob(".new*"))


def test_a_checkpoint_with_other_bytes_is_not_exported(start, tmp_path, capsys):
    damaged = tmp_path / "damaged.ckpt"
    damaged.mkdir()
    for file in start.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    content = bytearray((damaged / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "__0_0.distcp").write_bytes(content)
    with pytest.raises(SystemExit):
        run_export(exported("--ckpt", damaged, "--out", tmp_path / "out"))
    assert "is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert run_export(exported("--ckpt", damaged, "--out", tmp_path / "out", "--no-verify")) == 0


def test_help_needs_no_torch():
    script = """
        import contextlib, sys
        from lightning_moe_strategy.__main__ import main
        for command in ("import", "export"):
            sys.argv = ["lightning-moe", command, "--help"]
            with contextlib.suppress(SystemExit):
                main()
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "lightning-moe import --hf" in done.stdout and "lightning-moe export --ckpt" in done.stdout


CONFIG = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 4
  logger: false
  strategy:
    class_path: lightning_moe_strategy.FSDPCPEPStrategy
    init_args: {{d_rep: 2, fsdp: 1, cp: 2, e_fsdp: 2, ep: 2}}
  max_steps: 1
  limit_val_batches: 0
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}, filename: trained}}
model:
  class_path: lightning_moe_strategy.HFCausalLM
  init_args: {{{weights}, learning_rate: 1.0e-30, weight_decay: 0.0}}
data:
  class_path: lightning_moe_strategy.TextDataModule
  init_args: {{vocab_size: 300, sequence_length: 32, batch_size: 2}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pretrained", "import"])
def test_a_run_starts_from_a_folder_and_ends_in_one(way, hf, start, tmp_path):
    """On 4 ranks, with a step too small to move a weight."""
    weights = f"pretrained: {hf}" if way == "pretrained" else f"config: {hf}"
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path, weights=weights))
    program = [sys.executable, "-m", "lightning_moe_strategy"]
    options = ["--ckpt_path", str(start)] if way == "import" else []
    command = [*program, "fit", "--config", "run.yaml", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("reading " in done.stderr) == (way == "pretrained")
    assert run_export(exported("--ckpt", tmp_path / "trained.ckpt", "--out", tmp_path / "out")) == 0
    require_equal(weights_of(tmp_path / "out"), weights_of(hf))


MEMORY = """
import os, subprocess, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
from lightning_moe_strategy.hugging_face_weights.into_checkpoint import into_checkpoint
from lightning_moe_strategy.hugging_face_weights.out_of_checkpoint import out_of_checkpoint

# Another process: what writes a file holds the interpreter's lock, and a thread would not see that moment.
WATCH = '''
import sys, time
from pathlib import Path

status = Path(f"/proc/{sys.argv[1]}/status")
def in_use():
    return 1024 * int(status.read_text().partition("RssAnon:")[2].split()[0])

first = peak = in_use()
print("begun", flush=True)
end = Path(sys.argv[2])
while not end.exists():
    peak = max(peak, in_use())
    time.sleep(0.002)
print(peak - first)
'''

def peak_of(action):
    end = folder / "is_over"
    end.unlink(missing_ok=True)
    watch = [sys.executable, "-c", WATCH, str(os.getpid()), str(end)]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watcher:
        watcher.stdout.readline()
        action()
        end.touch()
        return int(watcher.stdout.read())

folder = Path(sys.argv[1])
into = lambda number: into_checkpoint(folder / "hf", str(folder / f"start{number}"), max_part_bytes=40_000_000)
out = lambda number: out_of_checkpoint(str(folder / "start0"), folder / f"out{number}")
for number in range(2):  # the first time, modules are imported
    peaks = peak_of(lambda: into(number)), peak_of(lambda: out(number))
print(*peaks)
"""


@pytest.mark.slow
def test_import_and_export_take_less_memory_than_1_3_layers(tmp_path):
    sizes = dict(hidden_size=256, moe_intermediate_size=512, num_experts=64, num_local_experts=64)
    model = make_model("qwen3_moe", **sizes)
    layer = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path / "hf", max_shard_size="60MB")
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    into, out = (int(number) / layer for number in done.stdout.split())
    assert layer > 100e6 and into < 0.65 and 0.5 < out < 1.3, (into, out)
