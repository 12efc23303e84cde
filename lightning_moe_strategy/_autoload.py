"""Make ``Trainer(strategy="fsdp_cp_ep")`` work without an import of this package. Standard library only.

And let Lightning read its checkpoint directories where it reads a file: ``load_from_checkpoint``, any other Trainer.

torch calls ``install`` when it is imported (entry point group ``torch.backends``), and both flavours of
Lightning import torch before their strategies. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off; importing
``lightning_moe_strategy`` registers the name as well.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRATEGY_NAME = "fsdp_cp_ep"
FLAVOUR_VARIABLE = "LIGHTNING_MOE_FLAVOUR"
_FLAVOUR_OF = {
    "lightning.pytorch.strategies": "lightning",
    "pytorch_lightning.strategies": "pytorch_lightning",
}
_READS_FILES = ("lightning.fabric.utilities.cloud_io", "lightning_fabric.utilities.cloud_io")
"""Where each flavour has its ``_load``; who may have imported it from there as ``pl_load``. Seen in Lightning 2.6."""
_READERS = (
    "lightning.pytorch.core.saving",
    "lightning.fabric.plugins.io.torch_io",
    "pytorch_lightning.core.saving",
    "lightning_fabric.plugins.io.torch_io",
)
_MANIFEST = "manifest.json"
_flavour: str | None = None


def install() -> None:
    """Register the strategy with each flavour of Lightning, now or when it is imported; may be called often.

    An error here would break ``import torch`` for the whole environment, so it becomes a warning.
    """
    try:
        for name in (*_FLAVOUR_OF, *_READS_FILES):
            if name in sys.modules:
                _extend(sys.modules[name])
        if not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _StrategiesFinder())
    except Exception as error:
        _warn(error)


def flavour() -> str:
    """Which Lightning this process uses, ``"lightning"`` or ``"pytorch_lightning"``; the first answer holds.

    The one whose Trainer asked for the strategy, else ``LIGHTNING_MOE_FLAVOUR``, else the one imported, else
    the one installed; ``lightning`` where both are.
    """
    global _flavour
    if _flavour is None:
        _flavour = _choose_flavour()
    return _flavour


def _choose_flavour() -> str:
    flavours = list(_FLAVOUR_OF.values())
    asked = os.environ.get(FLAVOUR_VARIABLE)
    if asked is not None and asked not in flavours:
        raise ValueError(f"{FLAVOUR_VARIABLE} must be one of {flavours}, but it is {asked!r}. Set it or unset it.")
    imported = [_FLAVOUR_OF[name] for name in _FLAVOUR_OF if name.rpartition(".")[0] in sys.modules]
    if asked or imported:
        return asked or imported[0]
    installed = [name for name in flavours if importlib.util.find_spec(name)]
    if not installed:
        raise ModuleNotFoundError("Neither lightning nor pytorch_lightning is installed. Run: pip install lightning")
    return installed[0]


def _extend(module: ModuleType) -> None:
    if module.__name__ in _READS_FILES:
        _read_directories(module)
    else:
        _register(module)


def _register(strategies: ModuleType) -> None:
    if STRATEGY_NAME not in strategies.StrategyRegistry:
        make_strategy = _factory(_FLAVOUR_OF[strategies.__name__])
        strategies.StrategyRegistry.register(STRATEGY_NAME, make_strategy, description="FSDP x CP x EP for MoE")


def _read_directories(module: ModuleType) -> None:
    """Lightning's ``_load(path, map_location, weights_only)`` takes a checkpoint directory of this package as well."""
    load = module._load
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_or_read(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, str | os.PathLike) and os.path.isfile(os.path.join(path_or_url, _MANIFEST)):
            from lightning_moe_strategy.checkpoint.whole import whole_checkpoint

            return whole_checkpoint(path_or_url, *args, **kwargs)
        return load(path_or_url, *args, **kwargs)

    module._load = load_or_read  # type: ignore[attr-defined]
    for name in _READERS:
        reader = sys.modules.get(name)
        if getattr(reader, "pl_load", None) is load:
            reader.pl_load = load_or_read  # type: ignore[union-attr]


def _factory(asking: str) -> Callable[..., object]:
    """What the Trainer of one flavour calls for the name; the strategy is imported no earlier."""

    def make_strategy(**init_args: Any) -> object:
        global _flavour
        if _flavour not in (None, asking):
            raise RuntimeError(
                f"A Trainer of {asking} asks for {STRATEGY_NAME!r}, but this process already uses the "
                f"strategy with {_flavour}. Import one flavour only, {asking} before lightning_moe_strategy, or "
                f"set {FLAVOUR_VARIABLE}={asking}."
            )
        _flavour = asking
        from lightning_moe_strategy.strategy import FSDPCPEPStrategy

        return FSDPCPEPStrategy(**init_args)

    return make_strategy


class _StrategiesFinder(MetaPathFinder):
    """Finds the modules of Lightning as the other finders do, and extends them after they are executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _FLAVOUR_OF and fullname not in _READS_FILES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(Loader):
    """Stands in for a module's loader until the module is executed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _extend(module)
        except Exception as error:
            _warn(error)


def _warn(error: Exception) -> None:
    # Under -W error a warning is an exception, and it would break the import that this function protects.
    with contextlib.suppress(Warning):
        warnings.warn(f"lightning_moe_strategy could not register {STRATEGY_NAME!r}: {error!r}", stacklevel=2)
