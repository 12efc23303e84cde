"""The wheel and the source distribution hold all that is needed and nothing else, and every version is one version."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lightning_moe_strategy
from tests.test_layering import PACKAGE, package_files

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Built for GPUs, which the tests do not have.
WITHOUT_A_PIN = {"flash-attn", "flash-attn-4"}


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs)
    return {canonicalize_name(name): Version(number) for name, number in pairs}


def requirements() -> list[tuple[str, Requirement]]:
    extras = PROJECT["optional-dependencies"] | {"": PROJECT["dependencies"]}
    return [(extra, Requirement(text)) for extra, texts in extras.items() for text in texts]


def test_every_requirement_has_a_pin_that_it_allows():
    pinned = pins()
    for extra, requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name not in WITHOUT_A_PIN:
            assert name in pinned, f"{name} of [{extra}] has no version in constraints.txt"
            assert requirement.specifier.contains(pinned[name]), f"{requirement} of [{extra}], pinned {pinned[name]}"
    assert not WITHOUT_A_PIN & set(pinned)


def test_the_version_is_one():
    number = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert [number] * 3 == [str(citation["version"]), changelog[0], lightning_moe_strategy.__version__]
    assert f"Version {number}" in (ROOT / "README.md").read_text()


def test_the_citation_has_what_its_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0" and citation["license"] == PROJECT["license"]
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])


class Built:
    """Both distributions, built from what git would hand out, and a clean environment with the wheel in it."""

    def __init__(self, folder: Path) -> None:
        source = folder / "source"
        listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / name, follow_symlinks=False)
        run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)], folder)
        (self.wheel,) = (folder / "dist").glob("*.whl")
        (self.sdist,) = (folder / "dist").glob("*.tar.gz")
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        self.scripts = self._install(folder / "environment")

    def _install(self, folder: Path) -> Path:
        """Our dependencies come from this environment by a path file; its own (editable) package does not."""
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], self.elsewhere)
        (packages,) = folder.glob("lib/python*/site-packages")
        here = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
        (packages / "dependencies.pth").write_text("\n".join(here))
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--quiet"]
        run([*pip, "install", "--no-deps", "--no-index", "--ignore-installed", str(self.wheel)], self.elsewhere)
        return folder / "bin"

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as wheel:
            (name,) = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
            return Parser().parsestr(wheel.read(name).decode())


def run(command: list[str], folder: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("packaging"))


def modules_and_data() -> set[str]:
    """Every module of the package and what lies beside it, under the names of a wheel."""
    paths = {path.relative_to(ROOT / PACKAGE).as_posix() for _, path in package_files(ROOT)}
    data = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} | {"py.typed"}
    return {f"{PACKAGE}/{name}" for name in paths | data}


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_data_and_nothing_else(built: Built):
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert names == modules_and_data()


@pytest.mark.slow
def test_the_wheel_says_what_pyproject_says(built: Built):
    metadata = built.metadata()
    assert metadata["Version"] == PROJECT["version"] and metadata["License-Expression"] == PROJECT["license"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert len(required) == len(requirements())
    for requirement in required:
        if requirement.marker is None:
            assert requirement.specifier.contains(version(requirement.name)), requirement


@pytest.mark.slow
def test_the_source_distribution_makes_the_same_wheel_again(built: Built, tmp_path: Path):
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert all((source / name).is_file() for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"))
    run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist"), str(source)],
        tmp_path,
    )
    (again,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(again) as second, zipfile.ZipFile(built.wheel) as first:
        assert {name: first.read(name) for name in first.namelist() if not name.endswith("RECORD")} == {
            name: second.read(name) for name in second.namelist() if not name.endswith("RECORD")
        }


@pytest.mark.slow
def test_the_installed_program_plans_and_knows_its_version(built: Built):
    program = str(built.scripts / "lightning-moe")
    assert run([program, "--version"], built.elsewhere).strip() == PROJECT["version"]
    command = "plan --model glm-5.2 --cluster gb200-nvl72 --gpus 256 --context 1M"
    assert "Fits 256 GB200" in run([program, *command.split()], built.elsewhere)


@pytest.mark.slow
def test_a_trainer_knows_the_strategy_of_the_installed_package_by_name(built: Built):
    code = """
import importlib.resources, sys
import lightning
trainer = lightning.Trainer(strategy="fsdp_cp_ep", accelerator="cpu", devices=1, logger=False)
import lightning_moe_strategy
assert type(trainer.strategy) is lightning_moe_strategy.FSDPCPEPStrategy
assert lightning_moe_strategy.__file__.startswith(sys.prefix), lightning_moe_strategy.__file__
for name in lightning_moe_strategy.__all__:
    getattr(lightning_moe_strategy, name)
configs = importlib.resources.files("lightning_moe_strategy.configs")
assert "trainer:" in (configs / "tiny_cpu.yaml").read_text()
assert not {"callbacks", "models", "kernels", "configs", "tests", "docs"} & set(sys.modules)
print("ok")
"""
    assert run([str(built.scripts / "python"), "-c", code], built.elsewhere).endswith("ok\n")
