"""Seconds to save and load a checkpoint, against torch.save of the same bytes and Lightning's ModelParallelStrategy.

    python -m benchmarks.checkpoint_speed --gigabytes 4 --repeats 3

One mixture of experts with AdamW's state, sharded over four gloo ranks: by this strategy (fsdp 4, ep 4) and by
Lightning's FSDP2. All are measured in one run, in turn, each time in the other order, by the clock of the slowest rank,
from an empty write cache. Plain: every rank saves its own shards with ``torch.save`` into a file of its own, and loads
that. This strategy's files are on the disk (``fsync``) when a save returns, and so are the plain ones where it is not
said otherwise; Lightning's data files too. ``stall``: what an asynchronous save keeps a training step waiting for, when
it begins and before the optimizer's step; what the threads that copy and write take from the cores is not in it.

What is saved is loaded at once and then removed, so that loads find their files in the page cache, all alike; ours
reads them twice there, once for the checksums. At 4 GB that takes 20 GB of memory. Goals stand beside; one that is
missed is said so.
"""

import argparse
import logging
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks.step_cost import VOCABULARY, qwen3_moe
from lightning_moe_strategy.checkpoint.load import Loaded, load
from lightning_moe_strategy.checkpoint.read import open_directory
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.strategy import FSDPCPEPStrategy

NUM_RANKS, TOKENS = 4, 16
SAVED = "saved"
BYTES_OF_LAYER = {hidden: 12 * (16 * 3 * hidden * hidden // 2 + 3 * hidden * hidden) for hidden in (256, 1024)}
"""Weights and AdamW's state in FP32, roughly."""
GOAL, STALL_GOAL = 1.1, 0.1

PLAIN, NOT_SYNCED, LIGHTNING = "torch.save, own shards", "torch.save, no fsync", "Lightning, ModelParallel"
OURS, STALL = "this strategy", "this strategy, async: stall"


class Whole(LightningModule):
    """As its users write it."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.model = qwen3_moe(layers, hidden)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randint(VOCABULARY, (NUM_RANKS, TOKENS)), batch_size=1)  # type: ignore[arg-type]


class FullySharded(Whole):
    """As ``ModelParallelStrategy`` asks for it."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def trained(module: LightningModule, strategy: Strategy) -> Trainer:
    """After one step, so that the optimizer has a state."""
    trainer = Trainer(
        accelerator="cpu", devices=NUM_RANKS, strategy=strategy, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return trainer


def own_shards(trainer: Trainer) -> list[Tensor]:
    """What this rank holds of parameters and optimizer state."""
    states = [
        value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
    ]
    tensors = [*trainer.lightning_module.parameters(), *(state for state in states if isinstance(state, Tensor))]
    return [local_tensor(tensor.detach()) for tensor in tensors]


def candidates(
    layers: int, hidden: int, folder: Path
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]], Callable[[], None]]:
    """What saves and what loads, by name, and what to wait for before the next."""
    ours = trained(Whole(layers, hidden), FSDPCPEPStrategy(fsdp=NUM_RANKS, ep=NUM_RANKS, async_save=True))
    theirs = trained(
        FullySharded(layers, hidden), ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1)
    )
    strategy: Any = ours.strategy
    shards, saved = own_shards(ours), folder / SAVED
    saved.mkdir(exist_ok=True)
    own_file = saved / f"own_{dist.get_rank()}.pt"

    def save_plain(*, is_synced: bool) -> None:
        with own_file.open("wb") as stream:
            torch.save(shards, stream)
            if is_synced:
                stream.flush()
                os.fsync(stream.fileno())

    def load_plain() -> None:
        for shard, loaded in zip(shards, torch.load(own_file), strict=True):
            shard.copy_(loaded)

    module, (optimizer,) = ours.lightning_module, strategy.optimizers
    batch = torch.randint(VOCABULARY, (1, TOKENS))

    def stall() -> float:
        """Seconds that an asynchronous save keeps a step waiting: when it begins, and before the optimizer changes
        what is still to be copied.
        """
        times = [time.perf_counter()]

        def note(*args: object) -> None:
            times.append(time.perf_counter())

        hooks = [optimizer.register_step_pre_hook(note)]
        with strategy.in_background():
            ours.save_checkpoint(saved / "async")
        note()
        hooks.append(optimizer.register_step_pre_hook(note))
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        begun, returned, before_wait, after_wait = times
        return returned - begun + after_wait - before_wait

    def settle() -> None:
        """What the one before left to be written is not the next one's time."""
        strategy.wait_for_saves()
        os.sync()

    saves = {
        PLAIN: lambda: save_plain(is_synced=True),
        NOT_SYNCED: lambda: save_plain(is_synced=False),
        LIGHTNING: lambda: theirs.save_checkpoint(saved / "lightning"),
        OURS: lambda: ours.save_checkpoint(saved / "ours"),
        STALL: stall,
    }
    loads = {
        PLAIN: load_plain,
        LIGHTNING: lambda: theirs.strategy.load_checkpoint(saved / "lightning"),
        OURS: lambda: load(str(saved / "ours"), strategy.model, strategy.optimizers, group=dist.group.WORLD),
    }
    return saves, loads, settle


def run_rank(rank: int, options: argparse.Namespace, folder: Path, pipe: Connection) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # As torchrun would: a Trainer takes the process group that exists.
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "checkpoint_speed",
    }  # fmt: skip
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
        layers = max(1, round(options.gigabytes * 1e9 / BYTES_OF_LAYER[options.hidden]))
        pipe.send(measured(*candidates(layers, options.hidden, folder), repeats=options.repeats, folder=folder))
    except BaseException:
        pipe.send(traceback.format_exc())


def measured(
    saves: dict[str, Callable[[], Any]],
    loads: dict[str, Callable[[], Any]],
    settle: Callable[[], None],
    *,
    repeats: int,
    folder: Path,
) -> dict[str, Any]:
    """Seconds of each save and load on this rank, and the bytes of what was saved."""
    seconds: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    num_bytes = num_bytes_read = 0
    for number in range(repeats + 1):  # the first makes buffers, and is not counted
        for name in list(saves)[:: (-1) ** number]:
            for kind, actions in (("save", saves), ("load", loads)):
                if name not in actions:
                    continue
                settle()
                dist.barrier()
                started = time.perf_counter()
                result = actions[name]()
                dist.barrier()
                passed = result if isinstance(result, float) else time.perf_counter() - started
                if number:
                    seconds[kind].setdefault(name, []).append(passed)
                if isinstance(result, Loaded):
                    num_bytes_read = result.num_bytes_read
                    with open_directory(str(folder / SAVED / "ours")) as saved:
                        num_bytes = sum(
                            stored.shape.numel() * stored.dtype.itemsize for stored in saved.tensors().values()
                        )
            settle()
            dist.barrier()
            if dist.get_rank() == 0:  # so that the page cache holds what is loaded, and the next finds no file
                shutil.rmtree(folder / SAVED)
                (folder / SAVED).mkdir()
            dist.barrier()
    return {"seconds": seconds, "bytes": num_bytes, "read": num_bytes_read}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint_speed-"))
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=run_rank, args=(rank, options, folder, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        answers = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder)
    for answer in answers:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    return answers


def report(answers: list[dict[str, Any]]) -> list[str]:
    """A line for each candidate: seconds min / median / max, bytes a second, and ours over it in the same round."""
    num_bytes = answers[0]["bytes"]
    once = sum(answer["read"] for answer in answers) / num_bytes
    lines = [f"{num_bytes / 1e9:.2f} GB of tensors, {NUM_RANKS} ranks; a load reads each byte {once:.4f} times"]
    for kind in ("save", "load"):
        by_name = answers[0]["seconds"][kind]
        slowest = {
            name: [max(of_rank) for of_rank in zip(*(each["seconds"][kind][name] for each in answers), strict=True)]
            for name in by_name
        }
        lines.append(f"{kind:32}  min / median / max s        GB/s   ours / this (goal)")
        for name, seconds in slowest.items():
            ratios = [ours / other for ours, other in zip(slowest[OURS], seconds, strict=True)]
            goal = {PLAIN: f" (<= {GOAL})", LIGHTNING: f" (<= {GOAL})"}.get(name, "")
            figures = f"{min(seconds):6.2f} / {statistics.median(seconds):6.2f} / {max(seconds):6.2f}"
            rate = num_bytes / statistics.median(seconds) / 1e9
            ratio = f"{statistics.median(ratios):.2f}{goal}"
            if name == STALL:
                share = statistics.median(1 / ratio for ratio in ratios)
                ratio = f"stalls {share:.1%} of a save (<= {STALL_GOAL:.0%})"
            lines.append(f"  {name:30}  {figures}  {rate:8.2f}   {ratio}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint (default: 1)")
    parser.add_argument("--hidden", type=int, choices=list(BYTES_OF_LAYER), default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="on the file system to measure (default: that of temporary files)")
    print("\n".join(report(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
