"""One file of a checkpoint directory, for whatever reads ``torch.load``."""

import os

import torch

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.open_checkpoint import RANK_STATES
from lightning_moe_strategy.checkpoint.publish import discard_staging, publish, staging_of
from lightning_moe_strategy.checkpoint.storage import plain_path, storage_of
from lightning_moe_strategy.checkpoint.whole import whole_checkpoint


def consolidate(directory: str, out: str, *, with_optimizers: bool = True) -> int:
    """Write the file ``out``, at once or not at all, and return its bytes. The whole checkpoint is in memory meanwhile.

    Without optimizers, what only resuming needs is left out, as in ``trainer.save_checkpoint(weights_only=True)``.

    Raises:
        CheckpointError: ``out`` is there already, or the directory is no checkpoint, damaged or not complete.
    """
    out = plain_path(out)
    storage = storage_of(out)
    if storage.exists(out):
        raise CheckpointError(f"out({out!r}) exists already. Give a new name, or move that one away.")
    content = whole_checkpoint(directory)
    if not with_optimizers:
        resumed = ("optimizer_states", "lr_schedulers", "loops", "callbacks", RANK_STATES)
        content = {name: value for name, value in content.items() if name not in resumed}
    storage.make_directory(os.path.dirname(out) or ".")
    try:
        with storage.open(staging_of(out), "wb") as stream:
            torch.save(content, stream)
            storage.sync(stream)
            num_bytes: int = stream.tell()
        publish(out)
    except BaseException:
        discard_staging(out)
        raise
    return num_bytes
