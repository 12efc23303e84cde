"""One package, one name: nothing outside ``lightning_moe_strategy`` is importable after an install."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_moe_strategy"
SUBPACKAGES = ("callbacks", "models", "kernels", "configs")

CHECK_IMPORTS = f"""
import importlib, importlib.util, sys
for name in {SUBPACKAGES}:
    importlib.import_module("{PACKAGE}." + name)
    assert importlib.util.find_spec(name) is None, name + " is importable by its bare name"
print(sys.modules["{PACKAGE}"].__file__)
"""


def package_folders() -> dict[str, Path]:
    """Dotted name and folder of every package, the links to the root folders followed."""
    folders = [Path(folder) for folder, _, names in os.walk(ROOT / PACKAGE, followlinks=True) if "__init__.py" in names]
    return {".".join(folder.relative_to(ROOT).parts): folder for folder in folders}


def package_files() -> set[str]:
    """Every file that belongs into the wheel, by its path in there."""
    suffixes = (".py", ".yaml", ".typed")
    folders = package_folders().items()
    return {
        f"{name.replace('.', '/')}/{p.name}"
        for name, folder in folders
        for p in folder.iterdir()
        if p.suffix in suffixes
    }


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_subpackages_are_importable_from_anywhere_and_only_inside_the_package(tmp_path):
    run(sys.executable, "-c", CHECK_IMPORTS, cwd=tmp_path)


def test_the_links_lead_to_the_root_folders():
    for name in SUBPACKAGES:
        assert os.readlink(ROOT / PACKAGE / name) == f"../{name}"


def test_pyproject_lists_every_package_and_where_the_root_folders_go():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == set(package_folders())
    assert setuptools["package-dir"] == {f"{PACKAGE}.{name}": name for name in SUBPACKAGES}


@pytest.mark.slow
def test_the_wheel_holds_every_file_and_installs_as_one_package(tmp_path):
    # A copy, because a build leaves build/ and egg-info behind; links stay links, as in a checkout.
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", ".*_cache", "runs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "wheel", *offline, "--wheel-dir", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == package_files()

    site = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    origin = run(sys.executable, "-c", CHECK_IMPORTS, cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(origin.strip()).is_relative_to(site)
