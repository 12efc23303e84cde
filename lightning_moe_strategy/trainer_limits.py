"""What a Trainer asks for and its strategy alone cannot give: made to work, or refused before a rank computes."""

from collections.abc import Iterable
from typing import Any

from lightning_moe_strategy._lightning_compat import (
    AsyncCheckpointIO,
    BaseFinetuning,
    Callback,
    LightningThroughputMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    TorchCheckpointIO,
    Trainer,
    detects_anomalies,
    evaluate_without_inference_mode,
    logs_graph,
    rank_zero_warn,
    registry_of,
)
from lightning_moe_strategy._torch_compat import let_anomaly_detection_see_shards
from lightning_moe_strategy.callbacks.ema import refuse_other_averages


def check_trainer(trainer: Trainer, *, cp: int, saves_directories: bool) -> None:
    """Before the module is sharded; ``saves_directories`` as in ``save_distributed_checkpoint``.

    Raises:
        ValueError: a callback, logger or plugin that needs the whole module on one rank.
    """
    callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    refuse_other_averages(callbacks)
    for callback in callbacks:
        _check_callback(callback, world_size=trainer.world_size, cp=cp)
    has_example = trainer.lightning_module.example_input_array is not None
    if cp > 1 and has_example and any(isinstance(callback, ModelSummary) for callback in callbacks):
        raise ValueError(
            f"example_input_array runs through the model outside of a step, where no sequence is split over cp({cp}) "
            "ranks. Set it to None, or enable_model_summary=False."
        )
    if registry := registry_of(trainer):
        raise ValueError(
            f"model_registry({registry!r}) uploads checkpoints while they are saved, which was never run "
            "with checkpoints that all ranks write. Leave it out, and upload a checkpoint after training."
        )
    for logger in trainer.loggers:
        if logs_graph(logger):
            raise ValueError(
                f"{type(logger).__name__}(log_graph=True) runs the model on rank 0 alone, which would wait there for "
                "the shards of the other ranks. Leave log_graph out."
            )
    _check_checkpoint_io(trainer.strategy.checkpoint_io, saves_directories=saves_directories)
    if detects_anomalies(trainer):
        let_anomaly_detection_see_shards()
    # FSDP keeps the tensors it gathers into, and what is made in inference mode cannot be trained with afterwards.
    evaluate_without_inference_mode(trainer)


def _check_callback(callback: Callback, *, world_size: int, cp: int) -> None:
    name = type(callback).__name__
    if isinstance(callback, ModelPruning):
        raise ValueError(
            f"{name} prunes by comparing whole weights, and strategy 'fsdp_cp_ep' shards them. Prune the model before "
            "training, in one process, or after it, from an exported checkpoint."
        )
    if isinstance(callback, BaseFinetuning):
        raise ValueError(
            f"{name} compares parameters by value to add them to the optimizer, which shards on two meshes do not "
            "allow. Give the optimizer all parameters in configure_optimizers() and switch requires_grad_(...) in "
            "on_train_epoch_start: what is frozen gets no gradient and is not stepped."
        )
    saves_alone = isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
    if saves_alone and world_size > 1:
        option = "(save_on_exception=True)" if isinstance(callback, ModelCheckpoint) else ""
        raise ValueError(
            f"{name}{option} saves after an error that one rank may have alone, and a checkpoint needs all ranks: the "
            "one that failed would wait until the timeout. Use ModelCheckpoint(every_n_train_steps=...)."
        )
    if isinstance(callback, LightningThroughputMonitor) and cp > 1:
        rank_zero_warn(
            f"Lightning's {name} counts a batch once for each of the {cp} ranks of a cp group, which share it: its "
            f"figures for samples are {cp} times too high. lightning_moe_strategy.ThroughputMonitor, which the "
            "strategy adds, counts tokens once."
        )


def _check_checkpoint_io(checkpoint_io: Any, *, saves_directories: bool) -> None:
    name = type(checkpoint_io).__name__
    if saves_directories and type(checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"plugins: {name} would not be asked to save: all ranks write a checkpoint together, a directory. Leave it "
            "out, or set save_distributed_checkpoint=False on the strategy: rank 0 then hands the whole model to it."
        )
    reads = type(checkpoint_io).load_checkpoint
    if reads not in (TorchCheckpointIO.load_checkpoint, AsyncCheckpointIO.load_checkpoint):
        raise ValueError(
            f"plugins: {name} has a load_checkpoint of its own, which would not be called: every rank reads its shards "
            "with torch.load. Write what torch.load reads and leave load_checkpoint out."
        )
