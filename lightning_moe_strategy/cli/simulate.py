"""``lightning-moe simulate``: memory, traffic and arithmetic of a configured run, from the code that would run.

It takes the model, layout, precision, recompute and batch of a LightningCLI file to their real world size in this one
process, without a GPU. Data is not read: a batch has the configured number and length of sequences.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.simulate import simulate

_STRATEGY = "fsdp_cp_ep"


def run_simulate(arguments: Sequence[str]) -> int:
    """Simulate and print. Exit code 2 and one line for a configuration that cannot be simulated."""
    parser = argparse.ArgumentParser(prog="lightning-moe simulate", description=__doc__)
    parser.add_argument("--config", required=True, help="a LightningCLI file, as 'lightning-moe fit' takes it")
    parser.add_argument(
        "--world", type=int, help="number of GPUs, a multiple of the config's: copies (d_rep, e_rep) are added"
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank whose step is simulated (default: 0)")
    parser.add_argument(
        "--routing",
        choices=("balanced", "worst"),
        default="balanced",
        help="worst: every rank sends this one all it can (default: balanced)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        _check_writable(options.json)
        config = _read(options.config)
        simulation = _simulate(config, options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"lightning-moe simulate: {error}", file=sys.stderr)
        return 2
    if options.json:
        beside = Path(f"{options.json}.part")
        beside.write_text(json.dumps(simulation.to_json(), indent=1) + "\n")
        beside.replace(options.json)
    print(simulation.to_text())
    return 0


def _simulate(config: Mapping[str, Any], options: argparse.Namespace) -> Any:
    trainer, data = config["trainer"], config["data"].get("init_args", {})
    devices, num_nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    if not isinstance(devices, int):
        raise ValueError(f"trainer.devices({devices!r}) must be a number: the GPUs of one host.")
    strategy = trainer.get("strategy", _STRATEGY)
    arguments = {} if isinstance(strategy, str) else strategy.get("init_args", {})
    names = {field.name for field in dataclasses.fields(ParallelDims)}
    dims = ParallelDims(**{name: value for name, value in arguments.items() if name in names})
    world_size = devices * num_nodes
    if options.world is not None:
        dims = _with_copies(dims, world_size, options.world)
        world_size = options.world
    notes: list[str] = []

    def make_module() -> nn.Module:
        module = _build(config["model"])
        notes.extend(_notes(module))
        return module

    simulation = simulate(
        make_module,
        dims,
        _batch(data),
        world_size=world_size,
        local_world_size=devices,
        rank=options.rank,
        precision=trainer.get("precision", "32-true"),
        recompute=arguments.get("recompute", "none"),
        routing=options.routing,
        accelerator="cpu" if trainer.get("accelerator") == "cpu" else "gpu",
    )
    return dataclasses.replace(simulation, notes=tuple(notes))


def _with_copies(dims: ParallelDims, configured: int, world_size: int) -> ParallelDims:
    """The layout on more GPUs: more copies of it, where its degrees are fixed."""
    if world_size < 1 or world_size % configured:
        raise ValueError(
            f"--world({world_size}) must be a multiple of the {configured} GPUs of the configuration, whose layout is "
            "copied. Write other degrees into a configuration of its own."
        )
    copies = world_size // configured
    return dataclasses.replace(
        dims,
        d_rep=dims.d_rep if dims.fsdp == "auto" else dims.d_rep * copies,
        e_rep=dims.e_rep if "auto" in (dims.e_fsdp, dims.ep) else dims.e_rep * copies,
    )


def _read(path: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config({path}) cannot be read: {error.strerror}. Give the path of a YAML file.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config({path}) is no YAML: {' '.join(str(error).split())}") from error
    missing = [key for key in ("trainer", "model", "data") if not isinstance(config, dict) or key not in config]
    if missing:
        raise ValueError(f"--config({path}) has no {', '.join(missing)}. Take a file that 'lightning-moe fit' takes.")
    strategy = config["trainer"].get("strategy", _STRATEGY)
    name = strategy if isinstance(strategy, str) else str(strategy.get("class_path", ""))
    if name.lower() != _STRATEGY and not name.endswith(".FSDPCPEPStrategy"):
        raise ValueError(f"trainer.strategy({name!r}) cannot be simulated: only FSDPCPEPStrategy ({_STRATEGY!r}) can.")
    return dict(config)


def _build(node: Mapping[str, Any]) -> nn.Module:
    module_name, _, class_name = str(node["class_path"]).rpartition(".")
    try:
        model_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model.class_path({node['class_path']!r}) cannot be imported: {error}.") from error
    model: nn.Module = model_class(**node.get("init_args", {}))
    return model


def _batch(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Token ids and targets, under the keys of ``TextDataModule``."""
    missing = [name for name in ("sequence_length", "batch_size") if not isinstance(data.get(name), int)]
    if missing:
        raise ValueError(
            f"data.init_args has no {' and '.join(missing)}: a simulated batch is that many sequences of so many "
            "tokens. Say both numbers, as for TextDataModule."
        )
    ids_BS = torch.zeros(data["batch_size"], data["sequence_length"], dtype=torch.int64)
    return {"input_ids": ids_BS, "labels": ids_BS.clone(), "shift_labels": ids_BS.clone()}


def _notes(module: nn.Module) -> list[str]:
    config = getattr(module, "config", None)
    if isinstance(config, ModelConfig) and config.index_heads:
        return [
            "the published model attends to the "
            f"{config.index_top_k} keys its indexer picks (DSA); this one attends to every earlier token and holds no "
            "indexer, so memory and FLOP of attention are those of dense attention."
        ]
    return []


def _check_writable(path: str | None) -> None:
    if path is None:
        return
    folder = Path(path).parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--json({path}) cannot be written. Give a file in a folder that exists.")
