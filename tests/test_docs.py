"""What the pages say is so: links open, commands are commands, code runs, and the site builds without a warning."""

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jsonargparse
import lightning.pytorch
import matplotlib
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from docs import floors
from lightning_moe_strategy import (
    FSDPCPEPStrategy,
    MoELanguageModel,
    ParallelDims,
    ShardedEMA,
    load_pretrained,
)
from lightning_moe_strategy.__main__ import COMMANDS, main
from lightning_moe_strategy.cli.plan import run_plan
from lightning_moe_strategy.plan.cluster import load_cluster
from tests.code_blocks import DOCS, PAGES, ROOT, Block, anchors_of, blocks_of, commands_of, prose_of, public_objects
from tests.modules import HuggingFaceLanguageModel, loader
from tests.parity import QUIET

LANGUAGES = {"", "bash", "console", "ini", "json", "markdown", "python", "shell", "text", "yaml"}
MOST_NOT_RUN = 6
COMMAND_LINES = sorted({(page.name, line) for page in PAGES for line in commands_of(page)})


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def site_settings() -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        """Functions of extensions, which the file names by a tag, do not matter here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def names_in(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    children = navigation.values() if isinstance(navigation, dict) else navigation
    return [name for child in children for name in names_in(child)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_opens(page: Path):
    markdown = prose_of(page)
    for link in re.findall(r"\]\(([^)\s]+)\)", markdown):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor and target.name == "reference.md":
            assert f"::: {anchor}\n" in target.read_text(), f"{name_of(page)}: {link}"
        elif anchor:
            assert anchor in anchors_of(target.read_text()), f"{name_of(page)}: {link}"


def test_the_navigation_has_every_page_once():
    listed = names_in(site_settings()["nav"])
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_a_page_is_finished_and_begins_with_a_title_and_prose():
    for page in DOCS.glob("*.md"):
        title, prose = page.read_text().split("\n\n", 2)[:2]
        assert title.startswith("# ") and "\n" not in title, page.name
        assert not re.search(r"@@|TODO|FIXME|XXX", page.read_text()), page.name
        assert not prose.startswith(("#", "|", "-", "```", "!")), page.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_closed_of_known_languages_and_say_why_they_are_not_run(page: Path):
    blocks = blocks_of(page)
    markdown = page.read_text()
    assert len(re.findall(r"^ *```", markdown, re.MULTILINE)) == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES
    assert markdown.count("<!-- not run:") == sum(block.not_run is not None for block in blocks)
    assert all(len(block.not_run.split()) >= 2 for block in blocks if block.not_run is not None)


def test_few_blocks_are_not_run():
    not_run = [f"{page.name}:{b.line} {b.not_run}" for page in PAGES for b in blocks_of(page) if b.not_run is not None]
    assert len(not_run) <= MOST_NOT_RUN, not_run


class Parsed(Exception):
    """The arguments were understood."""


def parse(words: list[str]) -> None:
    """Let the program parse its arguments and stop there; raises what it raises."""
    depth = 0

    def stop_after(parse_args: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                parsed = parse_args(*args, **kwargs)
            finally:
                depth -= 1
            if depth:
                return parsed
            raise Parsed

        return wrapped

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("sys.argv", ["lightning-moe", *words]))
        for parser in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
            stack.enter_context(mock.patch.object(parser, "parse_args", stop_after(parser.parse_args)))
        main()


def words_of(line: str, folder: Path) -> list[str]:
    """Its words; a configuration that only the reader has is one of ours."""
    words = shlex.split(line, comments=True)[1:]
    for index, word in enumerate(words[:-1]):
        if word == "--config" and words[0] != "export" and not (ROOT / words[index + 1]).exists():
            words[index + 1] = "configs/tiny_cpu.yaml"
    return words


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES, ids=lambda value: value[:60])
def test_a_command_line_is_understood_by_the_program(page: str, line: str, tmp_path: Path, capfd: Any):
    with contextlib.chdir(ROOT), pytest.raises(Parsed):
        try:
            parse(words_of(line, tmp_path))
        except SystemExit as end:
            pytest.fail(f"{page}: {line}: exit status {end.code}: {capfd.readouterr().err[-2000:]}")


def test_a_wrong_command_line_is_not_understood(capfd: Any):
    for line in (
        "plan --modle glm-5.2",
        "simulate --config",
        "inspect",
        "fit --config configs/tiny_cpu.yaml --trainr 1",
    ):
        with contextlib.chdir(ROOT), pytest.raises(SystemExit):
            parse(line.split())


def assert_is_excerpt(shown: str, printed: str, where: str) -> None:
    """The end of what was printed, or parts of it in their order with ``...`` between; line breaks do not matter."""
    printed, place = " ".join(printed.split()), 0
    pieces = [" ".join(piece.split()) for piece in shown.split("...")]
    for piece in pieces:
        assert piece in printed[place:], f"{where}: {piece}"
        place = printed.index(piece, place) + len(piece)
    assert printed.endswith(pieces[-1]), f"{where}: {pieces[-1]}"


def test_a_plan_ends_as_the_text_below_its_command_says(capsys: pytest.CaptureFixture[str]):
    checked = 0
    for page in PAGES:
        for block in blocks_of(page):
            if block.text.startswith("lightning-moe plan") and block.shown_below:
                assert run_plan(shlex.split(block.text, comments=True)[2:]) == 0
                assert_is_excerpt(block.shown_below, capsys.readouterr().out, f"{name_of(page)}:{block.line}")
                checked += 1
    assert checked >= 3


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_scripts_that_a_page_names_exist(page: Path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = [block.text for block in blocks_of(page) if block.language in ("", "bash", "shell", "console")]
    spans = re.findall(r"`([^`\n]+)`", prose_of(page))
    for line in [line for text in code for line in text.splitlines()] + spans:
        for target in re.findall(r"^make ([\w-]+)", line):
            assert target in targets, f"{name_of(page)}: {line}"
        for command in re.findall(r"^lightning-moe ([\w-]+)", line):
            assert command in COMMANDS, f"{name_of(page)}: {line}"
        for script in re.findall(r"\b((?:benchmarks|docs|tests|configs)/[\w/]+\.(?:py|yaml|svg|png))\b", line):
            assert (ROOT / script).exists(), f"{name_of(page)}: {line}"
        for module in re.findall(r"^python -m ((?:docs|benchmarks)\.\w+)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{name_of(page)}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_yaml_is_what_its_reader_takes(page: Path, tmp_path: Path):
    for index, block in enumerate(block for block in blocks_of(page) if block.language == "yaml"):
        documents = list(yaml.safe_load_all(block.text))
        path = tmp_path / f"{index}.yaml"
        path.write_text(block.text)
        if isinstance(documents[0], dict) and {"trainer", "model"} & set(documents[0]):
            instantiate_strategy(path)
        elif isinstance(documents[0], dict) and "base" in documents[0]:
            assert load_cluster(str(path)).gpus_per_host > 0


def instantiate_strategy(path: Path) -> None:
    class ParseOnly(LightningCLI):
        def instantiate_classes(self) -> None:
            """A plan of many hosts cannot be built here."""

    arguments = ["--config", str(path)]
    if "model:" not in path.read_text():
        arguments += ["--model", "lightning_moe_strategy.MoELanguageModel"]
    with mock.patch("sys.argv", ["lightning-moe"]):
        trainer = ParseOnly(args=arguments, run=False).config.trainer
    if not isinstance(trainer.strategy, str):
        options = dict(vars(trainer.strategy.init_args))
        assert isinstance(FSDPCPEPStrategy(**options), FSDPCPEPStrategy)
        degrees = {name: value for name, value in options.items() if name in ParallelDims.__dataclass_fields__}
        devices = trainer.devices if isinstance(trainer.devices, int) else ParallelDims(**degrees).cp
        ParallelDims(**degrees).resolve(trainer.num_nodes * devices, local_world_size=devices)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_arguments_and_modules_that_a_page_names_exist(page: Path):
    code = "\n".join([*re.findall(r"`([^`\n]+)`", prose_of(page)), *(block.text for block in blocks_of(page))])
    objects = public_objects()
    # Looked ahead, so that calls inside of calls are found too.
    calls = re.findall(r"(?=\b(\w+)\(((?:[^()]|\([^()]*\))*)\))", code)
    for name, arguments in calls:
        if name in objects:
            known = set(inspect.signature(objects[name]).parameters)
            used = set(re.findall(r"(?:^|,)\s*(\w+)=", re.sub(r"\([^()]*\)", "", arguments)))
            assert used <= known, f"{name_of(page)}: {name}({', '.join(sorted(used - known))})"
    for dotted in set(re.findall(r"\blightning_moe_strategy(?:\.\w+)+", code)):
        assert exists(dotted), f"{name_of(page)}: {dotted}"


def exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError:
            return parts[cut:] == ["py"]
        return True
    return False


def test_every_benchmark_has_its_numbers_or_the_word_that_none_were_kept():
    text = (DOCS / "numbers.md").read_text()
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert f"`{path.name}`" in text and f"benchmarks/{path.name}" in text or f"benchmarks.{path.stem}" in text, path


def test_numbers_are_those_of_the_pages_they_come_from():
    """Sections that say where their figures stand: every number of them stands there."""
    checked = 0
    for section in re.split(r"^## ", (DOCS / "numbers.md").read_text(), flags=re.MULTILINE)[1:]:
        source = re.search(r"From (?:the (?:head of )?)?\[[^\]]+\]\(([^)#]+)", section)
        if source is not None:
            there = re.sub(r"[\s#*|]+", " ", (DOCS / source[1]).read_text())
            figures = re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)
            for number in re.findall(r"\d+(?:[.,]\d+)*", " ".join(figures)):
                assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", there), f"{number} of {section[:40]}"
                checked += 1
    assert checked > 40


def test_the_picture_of_the_floors_is_what_its_script_draws(tmp_path: Path):
    committed = (DOCS / "floors.svg").read_text()
    floors.draw(tmp_path / "again.svg")
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip(f"drawn with another matplotlib than {matplotlib.__version__}")
    assert (tmp_path / "again.svg").read_text() == committed, "python -m docs.floors draws it anew"
    assert set(floors.WALK) <= set(floors.FLOORS)


# Names that a page takes for granted, made before its blocks run; and what is done with them before a block.
def _checkpoint(directory: Path) -> dict[str, Any]:
    trainer, model = _trained([])
    trainer.save_checkpoint("run/last.ckpt")
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_experts=4)
    heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts_per_tok=2)
    if trainer.global_rank == 0:
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads)).save_pretrained("model")
    trainer.strategy.barrier()
    names = dict(AutoConfig=AutoConfig, AutoModelForCausalLM=AutoModelForCausalLM, torch=torch, folder="model")
    return names | {"self": SimpleNamespace(), "load_pretrained": load_pretrained}


def _average(names: dict[str, Any]) -> None:
    names["ema"] = ShardedEMA()
    names["trainer"], names["model"] = _trained([names["ema"]])


def _load_data(names: dict[str, Any]) -> None:
    trainer, _ = _trained([])
    loaded = names["train_dataloader"](SimpleNamespace(trainer=trainer))
    assert loaded.dataset == [trainer.global_rank] and loaded.batch_size == 4


def _configure_muon(names: dict[str, Any]) -> None:
    _, model = _trained([])
    assert isinstance(names["configure_optimizers"](model), names["Muon"])


def _trained(callbacks: list[Any]) -> tuple[Any, Any]:
    model = MoELanguageModel({"preset": "tiny", "vocab_size": 64, "hidden": 32, "layers": 1})
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="fsdp_cp_ep",
        max_steps=1,
        limit_val_batches=0,
        callbacks=callbacks,
        **QUIET,
    )
    trainer.fit(model, loader(4, 16, 1))
    return trainer, model


def _existing(directory: Path) -> dict[str, Any]:
    return {"my_existing_lightning_module": HuggingFaceLanguageModel(), "my_datamodule": loader(8, 16, 2)}


def _public(directory: Path) -> dict[str, Any]:
    return public_objects() | {"L": lightning.pytorch}


PREPARED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "index.md": _existing,
    "checkpoints.md": _checkpoint,
    "context_parallel.md": _public,
    "data.md": lambda _: {"DataLoader": DataLoader, "MyStream": lambda num_replicas, rank: [rank]},
    "optimizers.md": _public,
}
BEFORE: dict[tuple[str, int], Callable[[dict[str, Any]], None]] = {("optimizers.md", 2): _average}
AFTER: dict[tuple[str, int], Callable[[dict[str, Any]], None]] = {
    ("data.md", 0): _load_data,
    ("optimizers.md", 0): _configure_muon,
}
PYTHON_PAGES = [
    page for page in PAGES[1:] if any(block.language == "python" and block.not_run is None for block in blocks_of(page))
]


def run_page(page: Path, directory: Path) -> list[str]:
    """Run the python blocks of a page one after the other, as rank of two; what they printed."""
    printed = []
    make_trainer = partial(lightning.pytorch.Trainer, accelerator="cpu", **(QUIET | {"max_steps": 2}))
    with contextlib.chdir(directory), mock.patch("lightning.Trainer", make_trainer):
        names = {"__name__": "page"} | PREPARED.get(page.name, lambda _: {})(directory)
        for index, block in enumerate(block for block in blocks_of(page) if block.language == "python"):
            if block.not_run is None:
                BEFORE.get((page.name, index), lambda _: None)(names)
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(compile(on_two_ranks(block), f"{page.name}:{block.line}", "exec"), names)
                AFTER.get((page.name, index), lambda _: None)(names)
                printed.append(output.getvalue())
    return printed


def on_two_ranks(block: Block) -> str:
    """What it trains, it trains on the two ranks there are."""
    return re.sub(r"devices=\d+", "devices=2", block.text) if ".fit(" in block.text else block.text


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_python_runs_and_prints_what_stands_below_it(page: Path, ranks2: Any, tmp_path: Path):
    printed, _ = ranks2(run_page, page, tmp_path)
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.not_run is None]
    for block, output in zip(blocks, printed, strict=True):
        # A training prints its own tables first.
        assert output.endswith(block.shown_below) if ".fit(" in block.text else output == block.shown_below, block.line
