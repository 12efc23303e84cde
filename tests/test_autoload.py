"""The name ``fsdp_cp_ep`` is known without an import of the package, and its registration cannot break torch."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

import lightning_moe_strategy
from lightning_moe_strategy import _autoload

BROKEN_REGISTRY = """
class Broken(dict):
    def register(self, *args, **kwargs):
        raise OSError("no registry today")
StrategyRegistry = Broken()
"""


def run_python(code: str, cwd: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def check(code: str, cwd: Path, *options: str, **environment: str) -> str:
    result = run_python(code, cwd, *options, **environment)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_the_entry_point_that_torch_calls_is_installed():
    (point,) = [p for p in entry_points(group="torch.backends") if p.name == "lightning_moe_strategy"]
    assert point.load() is _autoload.install


def test_importing_the_package_imports_neither_torch_nor_lightning(tmp_path):
    check(
        "import sys, lightning_moe_strategy\n"
        "assert not {'torch', 'lightning', 'pytorch_lightning', 'numpy'} & set(sys.modules)\n"
        "assert 'FSDPCPEPStrategy' in dir(lightning_moe_strategy)\n"
        "assert lightning_moe_strategy.ParallelDims(cp=2).cp == 2 and lightning_moe_strategy.__version__\n"
        "assert 'torch' not in sys.modules",
        tmp_path,
    )


def test_import_torch_stays_light_and_then_both_flavours_know_the_name(tmp_path):
    check(
        "import sys, torch\n"
        "ours = {name for name in sys.modules if name.startswith('lightning_moe_strategy')}\n"
        "assert ours == {'lightning_moe_strategy', 'lightning_moe_strategy._autoload'}, ours\n"
        "assert not {'lightning', 'pytorch_lightning', 'lightning_fabric'} & set(sys.modules)\n"
        "import lightning.pytorch.strategies as strategies, pytorch_lightning.strategies as mirror\n"
        "for module in (strategies, mirror):\n"
        "    assert 'fsdp_cp_ep' in module.StrategyRegistry.available_strategies()\n"
        "    assert 'lightning_moe' not in type(module.__spec__.loader).__module__\n"
        "assert 'lightning_moe_strategy.strategy' not in sys.modules",
        tmp_path,
    )


def test_with_autoload_off_the_name_is_known_after_our_import_alone(tmp_path):
    check(
        "import sys, lightning.pytorch.strategies as strategies\n"
        "assert 'lightning_moe_strategy' not in sys.modules\n"
        "assert 'fsdp_cp_ep' not in strategies.StrategyRegistry\n"
        "import lightning_moe_strategy\n"
        "assert 'fsdp_cp_ep' in strategies.StrategyRegistry",
        tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


@pytest.mark.parametrize("trainer_module", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_takes_the_name_and_gets_a_strategy_of_its_own_flavour(trainer_module, tmp_path):
    check(
        f"import {trainer_module} as pl\n"
        "trainer = pl.Trainer(strategy='fsdp_cp_ep', accelerator='cpu', devices=1, logger=False)\n"
        "assert type(trainer.strategy).__name__ == 'FSDPCPEPStrategy'\n"
        "assert isinstance(trainer.strategy, pl.strategies.ModelParallelStrategy)",
        tmp_path,
    )


def test_a_broken_registry_warns_and_import_torch_survives_even_where_warnings_are_errors(tmp_path):
    broken = (
        "import sys, types\n"
        "name = 'lightning.pytorch.strategies'\n"
        "strategies = sys.modules[name] = types.ModuleType(name)\n"
        f"exec({BROKEN_REGISTRY!r}, strategies.__dict__)\n"
    )
    assert "could not register 'fsdp_cp_ep': OSError" in check(broken + "import lightning_moe_strategy", tmp_path)
    check(broken + "import torch; torch.ones(1)", tmp_path, "-W", "error::UserWarning")


def test_strategies_imported_later_register_and_a_broken_one_still_imports(tmp_path):
    for package, source in (("lightning/pytorch", BROKEN_REGISTRY), ("pytorch_lightning", "")):
        folder = tmp_path / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        works = BROKEN_REGISTRY.replace('raise OSError("no registry today")', "self[args[0]] = args[1]")
        (folder / "strategies.py").write_text(source or works)
    (tmp_path / "lightning" / "__init__.py").touch()
    warning = check(
        "import lightning_moe_strategy as ours\n"
        "import lightning.pytorch.strategies as broken, pytorch_lightning.strategies as works\n"
        "assert not broken.StrategyRegistry and list(works.StrategyRegistry) == ['fsdp_cp_ep']\n"
        "ours._autoload.install()\n"
        "import sys\n"
        "assert sum(type(finder).__name__ == '_StrategiesFinder' for finder in sys.meta_path) == 1",
        tmp_path,
    )
    assert warning.count("no registry today") == 2  # once after its import, once more at the second install


# The flavour


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(_autoload, "_flavour", None)
    monkeypatch.delenv("LIGHTNING_MOE_FLAVOUR", raising=False)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variable", "imported", "flavour"),
    [
        (None, [], "lightning"),  # both are installed here
        (None, ["pytorch_lightning"], "pytorch_lightning"),
        (None, ["pytorch_lightning", "lightning.pytorch"], "lightning"),
        ("pytorch_lightning", ["lightning.pytorch"], "pytorch_lightning"),
    ],
)
def test_flavour_is_the_asked_then_the_imported_then_the_installed(undecided, variable, imported, flavour):
    for name in imported:
        undecided.setitem(sys.modules, name, ModuleType(name))
    if variable is not None:
        undecided.setenv("LIGHTNING_MOE_FLAVOUR", variable)
    assert _autoload.flavour() == flavour
    undecided.setenv("LIGHTNING_MOE_FLAVOUR", "lightning")
    assert _autoload.flavour() == flavour  # the first answer holds


def test_flavour_is_the_one_installed_when_there_is_one(undecided):
    undecided.setattr("importlib.util.find_spec", lambda name: name == "pytorch_lightning" or None)
    assert _autoload.flavour() == "pytorch_lightning"


def test_an_unknown_flavour_is_refused(undecided):
    undecided.setenv("LIGHTNING_MOE_FLAVOUR", "fabric")
    with pytest.raises(ValueError, match=r"LIGHTNING_MOE_FLAVOUR must be one of .* but it is 'fabric'"):
        _autoload.flavour()


def test_the_other_flavour_is_refused_once_the_strategy_has_one(undecided):
    strategy = ModuleType("lightning_moe_strategy.strategy")
    strategy.FSDPCPEPStrategy = dict
    undecided.setitem(sys.modules, "lightning_moe_strategy.strategy", strategy)
    undecided.setenv("LIGHTNING_MOE_FLAVOUR", "lightning")
    assert _autoload._factory("pytorch_lightning")(cp=2) == {"cp": 2}
    assert _autoload.flavour() == "pytorch_lightning"  # the Trainer that asked first goes before the variable
    with pytest.raises(RuntimeError, match="Trainer of lightning .* with pytorch_lightning.*FLAVOUR=lightning"):
        _autoload._factory("lightning")()


# The public face


def test_an_unknown_name_is_an_attribute_error_and_every_public_name_has_a_home():
    with pytest.raises(AttributeError, match="no attribute 'PipelineStrategy'"):
        lightning_moe_strategy.PipelineStrategy  # noqa: B018
    assert {*lightning_moe_strategy._HOME, "__version__"} == set(lightning_moe_strategy.__all__)
    for name in lightning_moe_strategy.__all__:
        assert getattr(lightning_moe_strategy, name) is not None
