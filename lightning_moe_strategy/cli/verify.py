"""Is my model exact under this layout? Train a step of it on CPU ranks of this machine and in one process, and compare.

Any option of 'lightning-moe fit' may follow and overrides the file: that is how a large model is made small enough,
--model.init_args.NAME VALUE and --data.init_args.NAME VALUE.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_moe_strategy._lightning_compat import (
    CLIInstantiator,
    LightningCLI,
    LightningDataModule,
    LightningModule,
)
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.cli.training import is_strategy, quiet_cli
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.placement import common_num_experts
from lightning_moe_strategy.precision import precision_name
from lightning_moe_strategy.verifying.building import bytes_when_built
from lightning_moe_strategy.verifying.check import verify
from lightning_moe_strategy.verifying.layouts import (
    MAX_WORLD,
    Degree,
    degrees_of,
    describe,
    parse_layout,
    shrunk,
    world_of,
)
from lightning_moe_strategy.verifying.memory import require_memory
from lightning_moe_strategy.verifying.settings import NOT_CHECKED, OF_STRATEGY, TRAINER_OPTIONS

_EPILOG = """\
Exit status: 0 equal; 1 not equal, the table says what and the sentences where and why; 2 bad input, or a rank ended
with an error.
"""


def run_verify(arguments: Sequence[str]) -> int:
    """Verify and print. Exit code 0 equal, 1 different, 2 for what cannot be verified."""
    options, others = _parser().parse_known_args(arguments)
    try:
        layout = None if options.layout is None else parse_layout(options.layout)
        world_of(layout or {})
        configured = _Configured(["--config", options.config, *others], layout)
        configured.note_precision(options.precision)
        result = verify(
            configured.cli.model,
            configured.cli.datamodule,
            configured.layout,
            steps=options.steps,
            precision=options.precision,
            zigzag=ZigZagContextParallel(**configured.zigzag),
            strategy=configured.strategy,
            trainer=configured.trainer,
            seed=configured.seed,
            say=_say,
        )
    except KeyboardInterrupt:
        print("lightning-moe verify: stopped.", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, ValueError):
            print("".join(getattr(error, "__notes__", ())), file=sys.stderr, end="")
        print(f"lightning-moe verify: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(result)
    for note in configured.notes:
        print(note)
    return 0 if result.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-moe verify",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="a file that 'lightning-moe fit' takes")
    parser.add_argument(
        "--layout",
        help="degrees, as fsdp=2,cp=2,e_fsdp=2,ep=2 (default: those of the file, with more than "
        f"{MAX_WORLD} ranks every degree above 1 as 2)",
    )
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps (default: 1)")
    parser.add_argument("--precision", default="32-true", help="of the ranks (default: 32-true, the sharpest)")
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Parts(LightningCLI):
    """Model, data and settings of a configuration, without a Trainer."""

    require: Any

    def add_arguments_to_parser(self, parser: Any) -> None:
        # Arguments of fit, which a file for it may have.
        parser.add_argument("--ckpt_path", default=None)
        parser.add_argument("--weights_only", default=None)

    def before_instantiate_classes(self) -> None:
        self.require(self)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


class _Configured:
    """What a file and overrides say. The model is built once its size is known to fit."""

    def __init__(self, arguments: Sequence[str], layout: Mapping[str, Degree] | None) -> None:
        self.notes: list[str] = []
        self.asked_layout = layout
        self.layout: Mapping[str, Degree] = {}
        self.trainer: dict[str, Any] = {}
        self.strategy: dict[str, Any] = {}
        self.zigzag: dict[str, Any] = {}
        self.precision: object = None
        self.refusal: Exception | None = None
        parts = type("_Parts", (_Parts,), {"require": staticmethod(self._before_building)})
        try:
            with quiet_cli():
                self.cli = parts(
                    args=list(arguments),
                    run=False,
                    save_config_callback=None,
                    trainer_defaults={"strategy": "fsdp_cp_ep"},
                )
        except Exception as error:
            raise self.refusal or error from None  # jsonargparse wraps it into remarks on its own types

    def note_precision(self, precision: str) -> None:
        if self.precision not in (None, precision) and precision_name(self.precision) != precision_name(precision):
            self.notes.append(f"Left out: precision {self.precision}; verified in {precision}. Another: --precision.")

    @property
    def seed(self) -> int:
        return torch.initial_seed() % 2**32

    def _before_building(self, cli: LightningCLI) -> None:
        trainer = cli.config.trainer
        strategy = _plain(trainer.strategy)
        if not is_strategy(trainer.strategy):
            raise ValueError(f"trainer.strategy({strategy!r}) is not FSDPCPEPStrategy, whose layouts are verified.")
        given = dict(strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}
        self.precision = trainer.precision
        self._take_settings(trainer, given)
        self._take_callbacks(trainer)
        if cli.config.get("ckpt_path"):
            self.notes.append("Left out: ckpt_path; the weights are those of the start.")
        trainer.callbacks = trainer.plugins = trainer.profiler = None
        trainer.logger, trainer.strategy = False, "auto"
        build = CLIInstantiator(cli=cli, key="model")

        def build_small(
            model_class: type[LightningModule],
            *args: Any,
            applied_instantiation_links: dict[str, Any],
            **kwargs: Any,
        ) -> LightningModule:
            def build_it() -> LightningModule:
                return build(model_class, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)

            try:
                sized = _on_meta(build_it) or build_it()
                self._choose_layout(sized, trainer, given)
                require_memory(bytes_when_built(sized), world_of(self.layout))
                return build_it()
            except Exception as error:
                self.refusal = error
                raise

        build_data = CLIInstantiator(cli=cli, key="data")

        def build_or_note(
            data_class: type[LightningDataModule],
            *args: Any,
            applied_instantiation_links: dict[str, Any],
            **kwargs: Any,
        ) -> LightningDataModule:
            try:
                return build_data(data_class, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)
            except Exception as error:
                self.refusal = error
                raise

        cli.parser.add_instantiator(build_small, LightningModule, subclasses=True, prepend=True)
        cli.parser.add_instantiator(build_or_note, LightningDataModule, subclasses=True, prepend=True)

    def _take_settings(self, trainer: Any, given: Mapping[str, Any]) -> None:
        self.trainer = {name: trainer[name] for name in TRAINER_OPTIONS if trainer.get(name) is not None}
        self.strategy = {name: given[name] for name in OF_STRATEGY if given.get(name) is not None}
        changed = [name for name, off in NOT_CHECKED.items() if given.get(name, off) != off]
        if self.strategy.get("balance") == "bias":
            del self.strategy["balance"]
            changed.append("balance='bias'")
        if changed:
            self.notes.append(f"Left out, because one process has none of it: {', '.join(changed)}.")

    def _take_callbacks(self, trainer: Any) -> None:
        callbacks = trainer.callbacks or []
        others = []
        for callback in map(_plain, callbacks if isinstance(callbacks, list) else [callbacks]):
            name = str(callback.get("class_path", "")).rpartition(".")[2]
            if name == ZigZagContextParallel.__name__:
                self.zigzag = dict(callback.get("init_args") or {}) | {"verify_cp": False}
            else:
                others.append(name)
        if others:
            self.notes.append(f"Left out: callbacks {', '.join(others)}.")

    def _choose_layout(self, probe: LightningModule, trainer: Any, given: Mapping[str, Any]) -> None:
        """As asked for; that of the file where this machine can start it; else shrunk."""
        if self.asked_layout is not None:
            self.layout = self.asked_layout
            return
        dims = ParallelDims(**{name: given[name] for name in _DEGREES if given.get(name) is not None})
        devices = trainer.devices if isinstance(trainer.devices, int) and trainer.devices > 0 else None
        if devices is None:
            least = world_of(degrees_of(dims))
            devices = least if least > 1 or dims.fsdp == 1 else _RANKS_OF_AUTO
            self.notes.append(f"The file does not say how many devices; verified were {devices}. Others: --layout.")
        world = devices * (trainer.num_nodes or 1)
        # A smaller model may have too few experts for a degree that is shrunk as well.
        num_experts = common_num_experts(find_experts(probe)) if dims.ep == "auto" else None
        resolved = dims.resolve(world, local_world_size=devices, num_experts=num_experts)
        self.layout = degrees_of(resolved) if world <= MAX_WORLD else shrunk(resolved)
        if world > MAX_WORLD:
            self.notes.append(
                f"The layout of the file has {world} ranks ({describe(degrees_of(resolved))}); verified was "
                f"{describe(self.layout)}. Another: --layout."
            )


_RANKS_OF_AUTO = 4
_DEGREES = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep", "cp_inter", "nvl")


def _on_meta(build: Callable[[], LightningModule]) -> LightningModule | None:
    """The model without memory; None of one that cannot be, as it reads the values of its weights."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError, ValueError):
        return None


def _plain(node: Any) -> Any:
    """Of a part of a parsed configuration, dicts and lists."""
    return node.as_dict() if hasattr(node, "as_dict") else node
