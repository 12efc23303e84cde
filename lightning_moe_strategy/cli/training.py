"""fit, validate, test and predict from a YAML file: LightningCLI with models built on the meta device."""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_moe_strategy._lightning_compat import CLIInstantiator, LightningCLI, LightningModule
from lightning_moe_strategy.strategy import FSDPCPEPStrategy

_NOT_FOR_USERS = (
    r".*isinstance\(treespec, LeafSpec\).* is deprecated",  # Lightning 2.6 on torch 2.13, on every rank
    "LightningCLI's args parameter is intended to run from within Python",  # a sub-command of ours is just that
)
"""Beginnings of warnings about the code of others, which nobody who reads them could act on."""

_CLASS_PATHS = ("lightning_moe_strategy.FSDPCPEPStrategy", "lightning_moe_strategy.strategy.FSDPCPEPStrategy")


class MoELightningCLI(LightningCLI):
    """LightningCLI whose model takes no memory before it is sharded.

    LightningCLI builds the model before the Trainer. Under the strategy it is built on the meta device, so that a
    trillion parameters never lie whole on any rank; the strategy initialises the shards.
    """

    def before_instantiate_classes(self) -> None:
        build = CLIInstantiator(cli=self, key="model")

        def build_on_meta(
            model_class: type[LightningModule],
            *args: Any,
            applied_instantiation_links: dict[str, Any],  # jsonargparse gives it to whoever names it
            **kwargs: Any,
        ) -> LightningModule:
            with torch.device("meta"):
                return build(model_class, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)

        if is_strategy(self._get(self.config, "trainer").strategy):
            self.parser.add_instantiator(build_on_meta, LightningModule, subclasses=True, prepend=True)


def is_strategy(node: Any) -> bool:
    """Whether ``trainer.strategy`` of a parsed configuration is this package's."""
    if isinstance(node, str):
        return node.lower() == FSDPCPEPStrategy.strategy_name
    return getattr(node, "class_path", None) in _CLASS_PATHS


def run(arguments: Sequence[str]) -> MoELightningCLI:
    """Parse the arguments of one command and run it; the finished CLI holds trainer, model and datamodule."""
    with quiet_cli():
        return MoELightningCLI(
            args=list(arguments),
            trainer_defaults={"strategy": FSDPCPEPStrategy.strategy_name},
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
        )


@contextmanager
def quiet_cli() -> Generator[None, None, None]:
    """Without the warnings about the code of others."""
    with warnings.catch_warnings():
        for message in _NOT_FOR_USERS:
            warnings.filterwarnings("ignore", message)
        yield
