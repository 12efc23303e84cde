"""FSDP x CP x EP for mixture-of-experts models, as the Lightning strategy ``"fsdp_cp_ep"``.

Importing this package imports neither torch nor lightning: public names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_moe_strategy import _autoload

if TYPE_CHECKING:
    from lightning_moe_strategy.callbacks.ema import ShardedEMA
    from lightning_moe_strategy.callbacks.expert_load import ExpertLoadMonitor
    from lightning_moe_strategy.callbacks.plan_check import PlanCheck
    from lightning_moe_strategy.callbacks.prefetch import ExpertPrefetch
    from lightning_moe_strategy.callbacks.receipt import Receipt
    from lightning_moe_strategy.callbacks.throughput import ThroughputMonitor
    from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
    from lightning_moe_strategy.expert_parallel.registry import register_dispatcher
    from lightning_moe_strategy.hugging_face_weights.pretrained import load_pretrained
    from lightning_moe_strategy.models.config import ModelConfig
    from lightning_moe_strategy.models.data import TextDataModule
    from lightning_moe_strategy.models.lightning_module import HFCausalLM, MoELanguageModel
    from lightning_moe_strategy.optimizers.muon import Muon
    from lightning_moe_strategy.optimizers.muon_groups import muon_groups
    from lightning_moe_strategy.parallel_dims import ParallelDims
    from lightning_moe_strategy.strategy import FSDPCPEPStrategy
    from lightning_moe_strategy.verifying.check import verify

    __version__: str

__all__ = [
    "ExpertLoadMonitor",
    "ExpertPrefetch",
    "FSDPCPEPStrategy",
    "HFCausalLM",
    "MoELanguageModel",
    "ModelConfig",
    "Muon",
    "ParallelDims",
    "PlanCheck",
    "Receipt",
    "ShardedEMA",
    "TextDataModule",
    "ThroughputMonitor",
    "ZigZagContextParallel",
    "__version__",
    "load_pretrained",
    "muon_groups",
    "register_dispatcher",
    "verify",
]

_HOME = {
    "ExpertLoadMonitor": "callbacks.expert_load",
    "ExpertPrefetch": "callbacks.prefetch",
    "FSDPCPEPStrategy": "strategy",
    "HFCausalLM": "models.lightning_module",
    "MoELanguageModel": "models.lightning_module",
    "ModelConfig": "models.config",
    "Muon": "optimizers.muon",
    "ParallelDims": "parallel_dims",
    "PlanCheck": "callbacks.plan_check",
    "Receipt": "callbacks.receipt",
    "ShardedEMA": "callbacks.ema",
    "TextDataModule": "models.data",
    "ThroughputMonitor": "callbacks.throughput",
    "ZigZagContextParallel": "callbacks.zigzag",
    "load_pretrained": "hugging_face_weights.pretrained",
    "muon_groups": "optimizers.muon_groups",
    "register_dispatcher": "expert_parallel.registry",
    "verify": "verifying.check",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("lightning-moe-strategy")
    elif name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_autoload.install()
