"""Simulate what a LightningCLI file configures."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_strategy.expert_parallel.assumed_routing import RecordedTokens, RoutingName
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.plan.cluster import Cluster, load_cluster
from lightning_moe_strategy.precision import MeshPrecision
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.simulation.report import Simulation

_STRATEGY = "fsdp_cp_ep"

CLUSTER_OF_DOMAIN = {8: "h200-nvl8", 72: "gb200-nvl72"}
"""By GPUs of one NVLink domain, for a configuration that is simulated without a cluster's name."""

_SIMULATED = {"seed_everything", "trainer", "model", "data", "ckpt_path"}
_LIGHT_CALLBACKS = (
    "EarlyStopping", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary", "RichModelSummary", "RichProgressBar",
    "TQDMProgressBar", "Timer",
)  # fmt: skip
"""They add nothing to a step, and need not be mentioned."""


def simulate_configured(
    path: str,
    *,
    world: int | None = None,
    rank: int = 0,
    routing: RoutingName | RecordedTokens = "balanced",
    cluster: str | None = None,
    achieved_tflops: float | None = None,
    needs_seconds: bool = False,
) -> Simulation:
    """The step of ``rank`` of a configured run; ``world`` GPUs instead of the configured ones are copies of them.

    ``cluster`` is a preset's name or a YAML; without it, one with NVLink domains of the configured size is assumed,
    and a run on CPUs has no seconds. Whatever of the file is left out is in the notes.

    Raises:
        ValueError: a file, model, layout, cluster or routing that cannot be simulated.
        RuntimeError: the model reads values of tensors.
    """
    config = _read(path)
    trainer, data = config["trainer"], config["data"].get("init_args", {})
    devices, num_nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    if not isinstance(devices, int):
        raise ValueError(f"trainer.devices({devices!r}) must be a number: the GPUs of one host.")
    arguments = _strategy_arguments(trainer)
    dims = ParallelDims(**{name: arguments[name] for name in _fields(ParallelDims) if name in arguments})
    world_size = devices * num_nodes
    if world is not None:
        dims = _with_copies(dims, world_size, world)
        world_size = world
    is_cpu = trainer.get("accelerator") == "cpu"
    machine, notes = _cluster(cluster, achieved_tflops, devices if dims.nvl == "auto" else dims.nvl, is_cpu=is_cpu)
    if machine is None and needs_seconds:
        raise ValueError("--trace needs the speed of GPUs and links: name them with --cluster, as gb200-nvl72.")
    built: list[nn.Module] = []

    def make_module() -> nn.Module:
        built.append(_build(config["model"]))
        return built[0]

    precision = trainer.get("precision", "32-true")
    simulation = simulate(
        make_module,
        dims,
        _batch(data),
        world_size=world_size,
        local_world_size=devices,
        rank=rank,
        precision=precision,
        recompute=arguments.get("recompute", "none"),
        indexer_loss_weight=arguments.get("indexer_loss_weight", 0.0),
        ep_chunks=arguments.get("ep_chunks", "none"),
        ep_chunk_bytes=arguments.get("ep_chunk_bytes"),
        dispatcher=arguments.get("dispatcher", "auto"),
        max_imbalance=arguments.get("max_imbalance", 1.0) if arguments.get("balance") == "redundant" else None,
        routing=routing,
        accelerator="cpu" if is_cpu else "gpu",
        cluster=machine,
        clip_gradients=_clipping(trainer),
    )
    if machine is not None and precision == "32-true":
        notes.append(f"precision is 32-true, and the rates of {machine.name} are those of bf16: take them for a bound.")
    notes += [*_notes_on_model(built[0], simulation), *simulation.notes, *_left_out(config)]
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
    return dict(config)


def _strategy_arguments(trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    strategy = trainer.get("strategy", _STRATEGY)
    name = strategy if isinstance(strategy, str) else str(strategy.get("class_path", ""))
    if name.lower() != _STRATEGY and not name.endswith(".FSDPCPEPStrategy"):
        raise ValueError(f"trainer.strategy({name!r}) cannot be simulated: only FSDPCPEPStrategy ({_STRATEGY!r}) can.")
    return {} if isinstance(strategy, str) else dict(strategy.get("init_args", {}))


def _cluster(
    name: str | None, achieved_tflops: float | None, nvl: int, *, is_cpu: bool
) -> tuple[Cluster | None, list[str]]:
    """What the seconds are of, and a note where it is assumed."""
    notes: list[str] = []
    if name is None and not is_cpu and nvl in CLUSTER_OF_DOMAIN:
        name = CLUSTER_OF_DOMAIN[nvl]
        notes.append(f"the GPUs are taken to be those of {name}, for NVLink domains of {nvl}. Name others: --cluster.")
    if achieved_tflops is not None and not 0 < achieved_tflops < float("inf"):
        raise ValueError(f"--achieved_tflops({achieved_tflops}) must be above 0: TFLOP/s that a GPU reaches.")
    if name is None:
        reason = "a CPU's rates are not known" if is_cpu else f"no known cluster has NVLink domains of {nvl}"
        if achieved_tflops is not None:
            raise ValueError(f"--achieved_tflops({achieved_tflops:g}) needs a --cluster, whose links it goes with.")
        return None, [f"no seconds: {reason}. Name a cluster with --cluster."]
    cluster = load_cluster(name)
    if achieved_tflops is not None:
        cluster = dataclasses.replace(cluster, achieved_flops=1e12 * achieved_tflops)
    return cluster, notes


def _clipping(trainer: Mapping[str, Any]) -> Callable[[Optimizer], None] | None:
    """Clipping as the strategy's precision does it."""
    value, algorithm = trainer.get("gradient_clip_val"), trainer.get("gradient_clip_algorithm") or "norm"
    if not value:
        return None
    if algorithm not in ("norm", "value"):
        raise ValueError(f"trainer.gradient_clip_algorithm({algorithm!r}) must be 'norm' or 'value'.")
    precision = MeshPrecision()
    clip = precision.clip_grad_by_norm if algorithm == "norm" else precision.clip_grad_by_value
    return lambda optimizer: clip(optimizer, float(value))


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


def _notes_on_model(module: nn.Module, simulation: Simulation) -> list[str]:
    config = getattr(module, "config", None)
    is_dense = not any(operation.startswith("sparse_attention") for _, _, operation in simulation.flops)
    if isinstance(config, ModelConfig) and config.index_heads and is_dense:
        return [
            "the published model attends to the "
            f"{config.index_top_k} keys its indexer picks (DSA); this one attends to every earlier token and holds no "
            "indexer, so memory and FLOP of attention are those of dense attention."
        ]
    return []


def _left_out(config: Mapping[str, Any]) -> list[str]:
    """What of the file has no part in the simulated step."""
    trainer, notes = config["trainer"], []
    micro_batches = trainer.get("accumulate_grad_batches", 1)
    if micro_batches != 1:
        notes.append(f"a step has {micro_batches} micro-batches (accumulate_grad_batches); one is simulated.")
    callbacks = trainer.get("callbacks") or []
    names = [_class_name(callback) for callback in (callbacks if isinstance(callbacks, list) else [callbacks])]
    strange = [name for name in names if name not in _LIGHT_CALLBACKS]
    others = sorted(set(config) - _SIMULATED)
    parts = [f"callbacks {', '.join(strange)}"] if strange else []
    parts += [name for name in ("plugins",) if trainer.get(name)]
    if parts + others:
        notes.append(f"left out: {', '.join([*parts, *others])}.")
    return notes


def _class_name(node: object) -> str:
    path = node.get("class_path", "") if isinstance(node, Mapping) else node
    return str(path).rpartition(".")[2]


def _fields(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]
