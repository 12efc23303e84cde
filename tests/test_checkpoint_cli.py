"""``lightning-moe inspect`` and ``consolidate`` on a checkpoint that two ranks wrote, and on damaged ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moe_strategy.cli.checkpoints import run_consolidate, run_inspect
from tests.laid_out import Tensors, adamw, saved_on
from tests.modules import PlainDecoder

DEGREES = dict(fsdp=2, e_fsdp=1, ep=2)


@pytest.fixture
def saved(ranks2: Any, tmp_path: Path) -> tuple[Path, Tensors]:
    """A checkpoint of two ranks, and its tensors whole."""
    path = tmp_path / "step.ckpt"
    return path, ranks2(saved_on, DEGREES, str(path), adamw, {})[0]


def test_inspect_says_what_is_in_it_and_that_it_is_whole(saved, capsys):
    path, tensors = saved
    assert run_inspect([str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{path}: complete, written with torch {torch.__version__}" in out
    assert "layout: 2 ranks" in out and "every byte as it was written" in out
    assert run_inspect([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in found["parts"]}
    weights = [tensor for name, tensor in tensors.items() if not name.startswith("0.")]
    assert parts["parameters and buffers"]["num_tensors"] == len(weights)
    assert parts["parameters and buffers"]["num_bytes"] == sum(w.numel() * w.element_size() for w in weights)
    states = [tensor for name, tensor in tensors.items() if name.startswith("0.")]
    assert parts["optimizer_0"]["num_tensors"] == len(states)
    assert (found["is_complete"], found["is_verified"], found["epoch"]) == (True, True, 1)
    assert found["num_file_bytes"] == sum(f.stat().st_size for f in path.iterdir() if f.name != "manifest.json")
    assert run_inspect([str(path), "--tensors", "--no-verify"]) == 0
    out = capsys.readouterr().out
    assert "not verified" in out and all(f"state_dict.{name} " in out for name in tensors if not name.startswith("0."))


def test_inspect_of_a_flipped_bit_or_no_checkpoint_fails_with_one_sentence(saved, tmp_path, capsys):
    path, _ = saved
    shard = next(path.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert run_inspect([str(path)]) == 1
    assert f"{shard.name} has other bytes than were written" in capsys.readouterr().err
    assert run_inspect([str(path), "--no-verify"]) == 0
    (path / "manifest.json").unlink()
    assert run_inspect([str(path)]) == 1
    assert "has no manifest.json, which is written last: it is not complete" in capsys.readouterr().err
    assert run_inspect([str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_consolidated_file_has_every_tensor_whole_and_loads_into_one_process(saved, tmp_path, capsys):
    path, tensors = saved
    out = tmp_path / "whole.ckpt"
    assert run_consolidate(["--ckpt", str(path), "--out", str(out)]) == 0
    content = torch.load(out, weights_only=True)
    model = PlainDecoder(num_layers=1)
    model.load_state_dict(content["state_dict"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    optimizer = adamw(model)
    optimizer.load_state_dict(content["optimizer_states"][0])
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {f"0.{names[p]}.{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
    assert states.keys() == {name for name in tensors if name.startswith("0.")}
    assert all(torch.equal(value, tensors[name]) for name, value in states.items())
    assert content["epoch"] == 1

    lean = tmp_path / "lean.ckpt"
    assert run_consolidate(["--ckpt", str(path), "--out", str(lean), "--weights-only"]) == 0
    assert "optimizer_states" not in torch.load(lean, weights_only=True)
    assert {file.name for file in tmp_path.iterdir()} == {"step.ckpt", "whole.ckpt", "lean.ckpt"}, (
        "nothing is left aside"
    )


def test_consolidate_writes_over_nothing_and_nothing_of_what_is_damaged(saved, tmp_path, capsys):
    path, _ = saved
    out = tmp_path / "whole.ckpt"
    out.write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        run_consolidate(["--ckpt", str(path), "--out", str(out)])
    assert "exists already" in capsys.readouterr().err and out.read_text() == "mine"
    shutil.copytree(path, tmp_path / "cut.ckpt")
    shard = next((tmp_path / "cut.ckpt").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="2"):
        run_consolidate(["--ckpt", str(tmp_path / "cut.ckpt"), "--out", str(tmp_path / "new.ckpt")])
    assert f"{shard.name} has" in capsys.readouterr().err and not (tmp_path / "new.ckpt").exists()
