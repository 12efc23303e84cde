"""A training run in which one rank fails in the way that the first argument names, at its third batch.

    failing.py HOW RANK NUM_RANKS [SECONDS]

SECONDS: the timeout of every collective once training has begun. ``FAILS`` and ``PORT`` are printed with the time of
the failure and the port where the ranks met.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_strategy import ZigZagContextParallel
from lightning_moe_strategy._torch_compat import set_group_timeout
from lightning_moe_strategy.strategy import FSDPCPEPStrategy
from tests.flavour import L
from tests.modules import PlainLanguageModel, RandomTokens

HOW, RANK, NUM_RANKS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SECONDS = float(sys.argv[4]) if len(sys.argv) > 4 else None
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def tell(words: str) -> None:
    """In one piece: other ranks write into the same file."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def fail(how: str) -> None:
    tell(f"FAILS {time.time()}")
    if how == "raise":
        raise ValueError("loss is nan")
    os.kill(os.getpid(), SIGNALS[how])


class Fails(PlainLanguageModel):
    def setup(self, stage: str) -> None:
        if self.global_rank == 0:
            tell(f"PORT {os.environ['MASTER_PORT']}")
        if HOW == "setup" and self.global_rank == RANK:
            fail("raise")

    def on_train_start(self) -> None:
        for group in list(dist.distributed_c10d._world.pg_map) if SECONDS else ():
            set_group_timeout(group, timedelta(seconds=SECONDS))
        if HOW == "stop":  # in the second layer's experts, between their dispatch and their combine
            self.decoder.blocks[1].sparse.experts.register_forward_pre_hook(self.count)

    def count(self, *args: Any) -> None:
        if self.trainer.global_step == 2 and self.global_rank == RANK:
            fail("stop")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == RANK and HOW in ("raise", "kill"):
            fail(HOW)
        if batch_idx == 2 and HOW == "caught":
            raise MemoryError(f"rank {self.global_rank} has no room")
        return super().training_step(batch, batch_idx)


class Data(RandomTokens):
    num_read = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.num_read += 1
        if HOW == "worker" and self.num_read == 5 and int(os.environ["LOCAL_RANK"]) == RANK:
            tell(f"FAILS {time.time()}")
            raise KeyError("sample is damaged")
        return super().__getitem__(index)


if __name__ == "__main__":
    torch.set_num_threads(1)
    layout = {4: dict(fsdp=2, cp=2, e_fsdp=2, ep=2), 2: dict(fsdp=1, cp=2, e_fsdp=1, ep=2)}[NUM_RANKS]
    options: dict[str, Any] = dict(
        strategy=FSDPCPEPStrategy(**layout, timeout=timedelta(seconds=120)),
        accelerator="cpu",
        devices=NUM_RANKS,
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ZigZagContextParallel(shift="module")],
    )
    data = DataLoader(Data(48, 24), batch_size=2, num_workers=int(HOW == "worker"))
    try:
        L.Trainer(**options).fit(Fails(), data)
    except MemoryError:
        options["strategy"] = FSDPCPEPStrategy(**layout)
        options["callbacks"] = [ZigZagContextParallel(shift="module")]
        time.sleep(8)  # longer than any part of a failure takes
        L.Trainer(**options).fit(PlainLanguageModel(), data)
    tell("ENDED")
