"""What the README says is what the program does: its code runs, its output is real, its names and links exist."""

import contextlib
import importlib
import io
import re
import runpy
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from unittest import mock

import lightning.pytorch
import matplotlib
import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_moe_strategy
from lightning_moe_strategy import ExpertLoadMonitor, ParallelDims, ThroughputMonitor
from lightning_moe_strategy.__main__ import COMMANDS
from lightning_moe_strategy.cli import demo
from lightning_moe_strategy.cli.plan import run_plan
from lightning_moe_strategy.cli.training import MoELightningCLI
from lightning_moe_strategy.models.config import PRESETS
from lightning_moe_strategy.precision import PrecisionName
from tests.modules import HuggingFaceLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, QUIET

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
MAX_LINES = 190

# Where a name in the README may come from, ours first.
HOMES = ("lightning_moe_strategy", "lightning.pytorch", "lightning.pytorch.cli", "torch.nn")


class Fence(NamedTuple):
    language: str
    text: str


FENCES = [Fence(*match) for match in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
SPANS = re.findall(r"`([^`\n]+)`", PROSE)


def fences(language: str) -> list[str]:
    return [fence.text for fence in FENCES if fence.language == language]


def headings(text: str) -> set[str]:
    return {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def run_python(source: str, names: dict[str, Any] | None = None, **trainer_options: Any) -> str:
    """What the source prints. Its Trainers are built for CPU processes, wherever the tests run."""
    printed = io.StringIO()
    make_trainer = partial(lightning.pytorch.Trainer, accelerator="cpu", **(QUIET | trainer_options))
    with mock.patch("lightning.Trainer", make_trainer), contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), names or {})
    return printed.getvalue()


def test_it_fits_a_newcomers_patience():
    assert len(README.splitlines()) <= MAX_LINES


def test_every_fence_is_of_a_language_that_is_checked():
    assert README.count("```") == 2 * len(FENCES)
    assert {fence.language for fence in FENCES} == {"bash", "python", "yaml", "text"}


def test_python_that_only_builds_runs_and_prints_the_text_below_it():
    checked = 0
    for fence, below in zip(FENCES, [*FENCES[1:], Fence("", "")], strict=True):
        if fence.language == "python" and ".fit(" not in fence.text:
            assert run_python(fence.text) == (below.text if below.language == "text" else "")
            checked += 1
    assert checked == 1


def fit_as_the_readme_says(source: str, world_size: int, directory: Path) -> tuple[dict[str, int], int]:
    module = HuggingFaceLanguageModel()
    names = {"my_existing_lightning_module": module, "my_datamodule": loader(8, 16, 2)}
    with contextlib.chdir(directory):  # logs and pictures go to where the program runs
        run_python(source.replace("devices=8", f"devices={world_size}"), names, max_steps=2)
    dims = module.trainer.strategy.dims
    return {axis: dims.degree(axis) for axis in ("fsdp", "cp", "ep")}, module.trainer.global_step


def test_the_one_line_change_trains_an_unchanged_module(ranks2: Any, tmp_path: Path):
    (source,) = [text for text in fences("python") if ".fit(" in text]
    assert "devices=8" in source
    assert ranks2(fit_as_the_readme_says, source, 2, tmp_path) == [({"fsdp": 2, "cp": 1, "ep": 2}, 2)] * 2


@pytest.mark.parametrize("base", [LightningCLI, MoELightningCLI])
def test_yaml_parses_and_lays_its_ranks_out(base: type[LightningCLI], tmp_path: Path):
    class ParseOnly(base):  # type: ignore[misc, valid-type]
        def instantiate_classes(self) -> None:
            """A plan of many hosts cannot be built here."""

    for index, text in enumerate(fences("yaml")):
        path = tmp_path / f"{index}.yaml"
        path.write_text(text)
        arguments = ["--config", str(path), "--model", "lightning_moe_strategy.MoELanguageModel"]
        with mock.patch("sys.argv", ["lightning-moe"]):
            cli = ParseOnly(args=arguments, run=False)
        trainer = cli.config.trainer
        assert trainer.strategy.class_path.endswith(".FSDPCPEPStrategy")
        names = {field.name for field in fields(ParallelDims)}
        degrees = {name: value for name, value in vars(trainer.strategy.init_args).items() if name in names}
        dims = ParallelDims(**degrees).resolve(trainer.num_nodes * trainer.devices, local_world_size=trainer.devices)
        assert dims.warnings() == []
    assert fences("yaml")


def test_every_command_is_one():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line.split("#")[0].split() for text in fences("bash") for line in text.splitlines()]
    spans = [span.split() for span in SPANS if span.startswith(("make ", "lightning-moe "))]
    for program, command, *options in [*lines, *spans]:
        assert command in {"make": targets, "lightning-moe": COMMANDS}[program]
        assert all((ROOT / option).is_file() for option in options if option.endswith(".yaml"))


def test_the_planners_verdict_is_what_the_command_above_it_prints(capsys: pytest.CaptureFixture[str]):
    (command,) = [text.split("#")[0].split() for text in fences("bash") if text.startswith("lightning-moe plan")]
    (shown,) = [text for text in fences("text") if text.startswith("Fits ")]
    assert run_plan(command[2:]) == 0
    assert capsys.readouterr().out.split()[-len(shown.split()) :] == shown.split()


def test_the_demos_last_line_has_the_programs_format(capsys: pytest.CaptureFixture[str]):
    throughput, load = ThroughputMonitor(), ExpertLoadMonitor()
    throughput.tokens_per_second, load.last_skew = 1234.5, 1.25
    trainer: Any = SimpleNamespace(callback_metrics={"val_loss": 4.5}, callbacks=[load, throughput])
    data: Any = SimpleNamespace(unigram_entropy=lambda: 5.5)
    demo._report(trainer, data)
    printed = capsys.readouterr().out.strip()
    (shown,) = [line for text in fences("text") for line in text.splitlines() if line.startswith("demo: ")]
    assert re.sub(r"\d+", "0", shown) == re.sub(r"\d+", "0", printed)
    assert fences("text")[0].rstrip().endswith(shown)


def test_the_demos_layout_is_that_of_its_config():
    yaml_text = (ROOT / "configs/tiny_cpu.yaml").read_text()
    degrees = {name: int(degree) for name, degree in re.findall(r"(d_rep|fsdp|cp|e_fsdp|ep): (\d)", yaml_text)}
    explained = ParallelDims(**degrees).resolve(4, local_world_size=4, num_experts=8).explain()
    assert fences("text")[0].startswith("\n".join(explained.splitlines()[:2]))


@pytest.mark.parametrize("text", [README, CHANGELOG], ids=["README", "CHANGELOG"])
def test_every_relative_link_and_anchor_exists(text: str):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert links
    for path, _, anchor in (link.partition("#") for link in links):
        assert not path or (ROOT / path).exists(), path
        assert not anchor or anchor in headings((ROOT / path).read_text() if path else text), anchor


def test_every_class_it_names_can_be_imported():
    code = "\n".join([*SPANS, *(fence.text for fence in FENCES if fence.language != "text")])
    homes = [importlib.import_module(home) for home in HOMES]
    names = set(re.findall(r"\b(?:[A-Z]+[a-z]+){2,}\w*|FSDPCPEPStrategy", code))
    assert {name for name in names if not any(hasattr(home, name) for home in homes)} == set()


def test_every_public_name_is_in_the_readme_or_the_changelog():
    names = set(lightning_moe_strategy.__all__) - {"__version__"}
    assert {name for name in names if f"`{name}`" not in README + CHANGELOG} == set()
    assert {preset for preset in PRESETS if f"`{preset}`" not in README + CHANGELOG} == set()


def test_the_table_has_the_six_degrees_with_their_defaults():
    rows = re.findall(r"^\| `(\w+)` \| (\w+)", README, re.MULTILINE)
    defaults = {field.name: str(field.default) for field in fields(ParallelDims)}
    assert dict(rows) == {name: defaults[name] for name in ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep")}


def test_what_is_counted_is_so():
    assert all(f"`{name}`" in README for name in get_args(PrecisionName))
    assert "thirteen layouts" in README and len(LAYOUTS_OF_4) == 13


def test_the_picture_is_what_its_script_draws(tmp_path: Path):
    committed = (ROOT / "docs/two_meshes.svg").read_text()
    draw = runpy.run_path(str(ROOT / "docs/two_meshes.py"))["draw"]
    draw(tmp_path / "again.svg")
    drawn = (tmp_path / "again.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip(f"drawn with another matplotlib than {matplotlib.__version__}")
    assert drawn == committed
