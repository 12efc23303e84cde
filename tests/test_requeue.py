"""SIGTERM, and SLURM's signal before a job's time is up: whatever rank hears it, all answer at the same batch."""

import os
import signal
from functools import partial
from typing import Any

import torch.distributed as dist

from tests.flavour import L
from tests.test_resume import Dropped, shuffled, trained

SCONTROL = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n'


class Told(L.Callback):
    """One rank gets a signal in the middle of a step, another one between two."""

    def __init__(self, kind: signal.Signals, after: int, *, rank: int) -> None:
        self.kind, self.after, self.rank = kind, after, rank

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Any) -> None:
        if len(pl_module.seen) == self.after and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.kind)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if len(pl_module.seen) == self.after and trainer.global_rank == 0:
            os.kill(os.getpid(), self.kind)


class SavesAtTheEnd(L.Callback):
    """What a user may write, as all ranks end together."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def in_slurm(folder: str) -> None:
    """This rank is a task of job 7, and auto-requeue is on."""
    del os.environ["TORCHELASTIC_RUN_ID"]
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        SLURM_NTASKS=world, SLURM_NTASKS_PER_NODE=world, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0",
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NODELIST="localhost", PATH=f"{folder}:{os.environ['PATH']}",
    )  # fmt: skip


def requeued(folder: str) -> tuple[Any, Any, list[str]]:
    """Batches of the run that was told and went on, and of the job that SLURM started again."""
    before = dict(os.environ)
    in_slurm(folder)
    try:
        run = partial(trained, shuffled, default_root_dir=folder)
        told, _ = run(seed=1, callbacks=(Told(signal.SIGUSR1, 3, rank=2),))
        again, trainer = run(seed=2)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert type(trainer.strategy.cluster_environment).__name__ == "SLURMEnvironment"
    return told.seen, again.seen, sorted(os.listdir(folder))


def test_a_job_that_slurm_requeues_goes_on_with_the_next_batch(ranks4, tmp_path):
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    for told, again, files in ranks4(requeued, str(tmp_path)):
        assert again == told[3:] and len(again) == 9
        assert files == ["asked", "hpc_ckpt_1.ckpt", "scontrol"]
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def terminated(path: str) -> tuple[str, Any, Any]:
    """What ended the run, the batches until then, and those of one that goes on."""
    models: list[Any] = []
    kind = "nothing"

    def make_model() -> Dropped:
        models.append(Dropped())
        return models[-1]

    try:
        callbacks = (Told(signal.SIGTERM, 3, rank=3), SavesAtTheEnd(path))
        trained(shuffled, seed=1, callbacks=callbacks, make_model=make_model)
    except BaseException as exception:
        kind = type(exception).__name__
    again, _ = trained(shuffled, seed=2, ckpt_path=path)
    return kind, models[0].seen, again.seen


def test_a_sigterm_of_some_ranks_ends_all_after_the_same_batch(ranks4, tmp_path):
    answers = ranks4(terminated, str(tmp_path / "last"))
    for (kind, seen, again), expected in zip(answers, ranks4(unbroken), strict=True):
        assert kind == "SIGTERMException"
        assert len(seen) == 4 and seen + again == expected


def unbroken() -> Any:
    return trained(shuffled, seed=1)[0].seen
