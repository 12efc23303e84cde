"""Kill ranks while they save, 100 times, and see that nothing is lost: what a save that "survives" means.

    python benchmarks/kill_save.py [--moments 100] [--trainers 4] [--seed 0]

Two gloo ranks train a small model and save after every step: into one name again and again, or into a new name with a
link to the last and the one before the last removed; while the training stops, or beside it. At a random moment rank 0,
rank 1 or both get SIGKILL, now and then after the others had time to notice. Then the run starts again from
``last.ckpt``. Every time

- a checkpoint is there, none older than the last that was reported as saved, and its every byte verifies;
- the losses that follow are those of a run that nobody killed, to the last bit of FP32.

The ranks are forked from a process that has imported everything, so a moment takes about a second. ``--trainers``: as
many moments more with Trainers in processes of their own, ``ModelCheckpoint(save_last="link")``, ``ckpt_path="last"``.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_moe_strategy.checkpoint.asynchronous import BackgroundSaves
from lightning_moe_strategy.checkpoint.publish import clean, link, remove
from lightning_moe_strategy.checkpoint.read import open_directory
from lightning_moe_strategy.checkpoint.save import save_directory
from lightning_moe_strategy.sharding import local_tensor

NUM_RANKS, NUM_STEPS, NUM_TRAINER_STEPS = 2, 12, 6
ROWS, COLUMNS = 64, 32
PATIENCE = 60.0
"""Seconds that a run may take until it is taken to hang."""

State = dict[str, Any]
Losses = dict[int, str]
"""By step, in hexadecimal digits."""


@dataclass(frozen=True)
class Mode:
    is_async: bool
    is_rolling: bool
    """A new name for every step, and a link to the last; else one name for all."""

    def __str__(self) -> str:
        return f"{'async' if self.is_async else 'sync'}, {'new names' if self.is_rolling else 'one name'}"


MODES = [Mode(is_async, is_rolling) for is_async in (False, True) for is_rolling in (False, True)]


@dataclass
class Life:
    """What a run reported before it ended."""

    loaded: int = -1
    """Step it went on from; -1 where it did not come so far."""
    saved: int = 0
    losses: Losses = field(default_factory=dict)
    is_done: bool = False
    was_killed: bool = False
    seconds: float = 0.0
    """From loading to the end."""
    problem: str = ""


# What the ranks do


def new_state() -> State:
    """A weight in halves, a scale on both ranks, and AdamW's averages of them."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    generator = torch.Generator().manual_seed(0)
    weights = {
        "weight": distribute_tensor(torch.randn(ROWS, COLUMNS, generator=generator), mesh, [Shard(0)]),
        "scale": distribute_tensor(torch.ones(COLUMNS), mesh, [Replicate()]),
    }
    state = {name: {"exp_avg": w * 0, "exp_avg_sq": w * 0, "step": torch.zeros(())} for name, w in weights.items()}
    return {"state_dict": weights, "optimizer_0": {"state": state}}


def train_step(state: State, step: int) -> float:
    generator = torch.Generator().manual_seed(1000 + step)
    x_TD = torch.randn(16, COLUMNS, generator=generator)
    target_TR = torch.randn(16, ROWS, generator=generator).chunk(NUM_RANKS, dim=1)[dist.get_rank()]
    weights = {name: local_tensor(w).detach().requires_grad_() for name, w in state["state_dict"].items()}
    loss = ((x_TD * weights["scale"]) @ weights["weight"].T - target_TR).square().mean()
    loss.backward()
    scale_gradient = weights["scale"].grad
    assert scale_gradient is not None
    dist.all_reduce(scale_gradient)
    total = loss.detach().clone()
    dist.all_reduce(total)
    for name, weight in weights.items():
        own: dict[str, Tensor] = {key: local_tensor(t) for key, t in state["optimizer_0"]["state"][name].items()}
        gradient = weight.grad
        assert gradient is not None
        own["step"] += 1
        own["exp_avg"].lerp_(gradient, 0.1)
        own["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        with torch.no_grad():
            weight.sub_(own["exp_avg"] / (own["exp_avg_sq"].sqrt() + 1e-8) * 0.01)
    return float(total)


def live(folder: str, mode: Mode, report: Callable[..., None]) -> None:
    """A run from the last checkpoint to the last step."""
    group = dist.group.WORLD
    assert group is not None
    is_first, last = group.rank() == 0, f"{folder}/last.ckpt"
    if is_first:
        clean(folder)
    dist.barrier()
    state, begin = new_state(), 0
    if os.path.lexists(last):
        with open_directory(last) as checkpoint:
            checkpoint.verify(group)
            checkpoint.load_into(state)
            begin = int(checkpoint.rest()["global_step"])
    report("loaded", begin)
    background = BackgroundSaves(timedelta(seconds=PATIENCE)) if mode.is_async else None
    about: Any = dict(layout={"world_size": NUM_RANKS}, versions={"torch": torch.__version__})

    def after(step: int) -> None:
        if mode.is_rolling and is_first:
            remove(f"{folder}/step={step - 2}.ckpt")
            link(f"{folder}/step={step}.ckpt", last)

    for step in range(begin, NUM_STEPS):
        report("loss", step, train_step(state, step).hex())
        path = f"{folder}/step={step + 1}.ckpt" if mode.is_rolling else last
        rest = {"global_step": step + 1}
        if background is None:
            save_directory(path, state, rest, **about, group=group)
            after(step + 1)
            report("saved", step + 1)
        else:
            background.save(path, state, rest, **about)
            report("saved", step)  # the one before
            background.then(partial(after, step + 1))
    if background is not None:
        background.wait()
    report("done", NUM_STEPS)


def run_rank(rank: int, store: str, words: Path, pipe: Connection, job: Callable[[Callable[..., None]], None]) -> None:
    """In a process of its own, which ends here."""
    try:
        os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=PATIENCE)
        )
        job(lambda *event: pipe.send(event) if rank == 0 else None)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


# What is done to them


def one_life(folder: str, mode: Mode, kill: "tuple[float, list[int], float] | None") -> Life:
    """Fork the ranks and read what they report. ``kill``: seconds after the start, whom, seconds until the rest."""
    scratch = Path(tempfile.mkdtemp(prefix="life-"))
    ours, theirs = Pipe()
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            run_rank(rank, str(scratch / "store"), scratch / "words", theirs, partial(live, folder, mode))
        children.append(child)
    theirs.close()
    life, begin, deadline = Life(), time.monotonic(), None if kill is None else float("inf")
    loaded_at = begin
    try:
        while time.monotonic() - begin < PATIENCE:
            if deadline is not None and time.monotonic() >= deadline:
                break
            wait = PATIENCE if deadline in (None, float("inf")) else max(deadline - time.monotonic(), 0)
            if ours.poll(wait):
                was_loaded = life.loaded >= 0
                take(life, ours.recv())
                if life.loaded >= 0 and not was_loaded:
                    loaded_at = time.monotonic()
                    deadline = None if kill is None else loaded_at + kill[0]
        else:
            life.problem = f"nothing was heard for {PATIENCE:.0f} s"
        if kill is not None and not life.is_done:
            life.was_killed = True
            for rank in kill[1]:
                os.kill(children[rank], signal.SIGKILL)
            time.sleep(kill[2])
        while ours.poll(0):
            take(life, ours.recv())
    except EOFError:
        if not life.is_done and not life.was_killed:
            life.problem = (scratch / "words").read_text()[-3000:] or "the ranks ended without a word"
    life.seconds = time.monotonic() - loaded_at
    for child in children:
        try:
            if life.was_killed or life.problem:
                os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(child, 0)
    ours.close()
    shutil.rmtree(scratch)
    return life


def take(life: Life, event: tuple[Any, ...]) -> None:
    kind, step, *loss = event
    if kind == "loaded":
        life.loaded = step
    elif kind == "loss":
        life.losses[step] = loss[0]
    else:
        life.saved = max(life.saved, step)
        life.is_done |= kind == "done"


def check(life: Life, expected: Losses, saved: int) -> None:
    """Against the run that nobody killed, and what was saved before."""
    if life.problem:
        raise RuntimeError(f"A run did not go on: {life.problem}")
    if 0 <= life.loaded < saved:
        raise RuntimeError(f"Step {saved} was reported as saved, and step {life.loaded} was loaded.")
    wrong = {step: loss for step, loss in life.losses.items() if expected[step] != loss}
    if wrong:
        raise RuntimeError(f"From step {life.loaded} on, losses differ from those of the run nobody killed: {wrong}")


def leftovers(folder: str) -> Iterator[str]:
    for name in os.listdir(folder):
        if match := re.fullmatch(r"\..+\.(saving|replaced|removing|linking)", name):
            yield match[1]


def forked_moments(num_moments: int, chance: random.Random) -> None:
    warm_up()
    expected: Losses = {}
    seconds_per_step: dict[Mode, float] = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            life = one_life(folder, mode, None)
            expected = expected or life.losses
            check(life, expected, 0)
            seconds_per_step[mode] = life.seconds / NUM_STEPS
    killed: Counter[str] = Counter()
    in_midst: Counter[str] = Counter()
    restarts, begin, most_of_one = 0, time.monotonic(), -(-num_moments // len(MODES))
    while killed.total() < num_moments:
        mode = min(MODES, key=lambda mode: killed[str(mode)])
        with tempfile.TemporaryDirectory() as folder:
            saved, is_done = 0, False
            while not is_done:
                victims = chance.choice([[0], [1], [0, 1]])
                left = seconds_per_step[mode] * (NUM_STEPS - saved)
                kill = (chance.uniform(0, left), victims, chance.choice([0.0, 0.0, 0.2]))
                is_open = killed.total() < num_moments and killed[str(mode)] < most_of_one
                life = one_life(folder, mode, kill if is_open else None)
                check(life, expected, saved)
                restarts += life.loaded > 0
                saved, is_done = max(saved, life.saved), life.is_done
                if life.was_killed:
                    killed[str(mode)] += 1
                    in_midst.update(set(leftovers(folder)))
    print(f"{killed.total()} moments in {time.monotonic() - begin:.0f} s: {dict(killed)}")
    print(f"{restarts} restarts from a checkpoint, each verified, each with the losses of the run nobody killed")
    print(f"left behind by the killed and cleaned: {dict(in_midst)}")


def warm_up() -> None:
    """Import what the ranks will import, once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with tempfile.TemporaryDirectory() as folder:
        save_directory(f"{folder}/x", {"state_dict": {"x": tensor * 0}}, {}, layout={}, versions={}, group=group)
        with open_directory(f"{folder}/x") as checkpoint:
            checkpoint.load_into({"state_dict": {"x": tensor}})
    dist.destroy_process_group()


# With Trainers


def train(folder: str, is_async: bool) -> None:
    """A rank of a Trainer, in a process of its own; rank 0 writes the losses into ``losses.jsonl``."""
    from lightning_moe_strategy import FSDPCPEPStrategy
    from lightning_moe_strategy._lightning_compat import LightningModule, ModelCheckpoint, Trainer

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            step = self.trainer.global_step
            generator = torch.Generator().manual_seed(step * NUM_RANKS + self.global_rank)
            x_TD = torch.randn(16, 32, generator=generator)
            loss = (self.layers(x_TD) - x_TD[:, :8].cumsum(1)).square().mean()
            if self.trainer.is_global_zero:
                with open(f"{folder}/losses.jsonl", "a") as file:
                    file.write(json.dumps([step, float(loss.detach()).hex()]) + "\n")
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    checkpoints = ModelCheckpoint(
        f"{folder}/checkpoints", filename="{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2,
        save_last="link",
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=NUM_RANKS, strategy=FSDPCPEPStrategy(fsdp=NUM_RANKS, async_save=is_async),
        max_steps=NUM_TRAINER_STEPS, callbacks=[checkpoints], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(range(64), batch_size=4), ckpt_path="last")  # type: ignore[arg-type]


def trainer_life(folder: str, is_async: bool, seconds: float | None, victims: list[int]) -> bool:
    """Whether it came to its end; ``seconds`` after its first step of this life it is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS), "GROUP_RANK": "0"}
    common |= {"LOCAL_WORLD_SIZE": str(NUM_RANKS), "TORCHELASTIC_RUN_ID": "kill_save", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--train", folder, *(["--async"] if is_async else [])]
    losses = Path(folder, "losses.jsonl")
    before = losses.stat().st_size if losses.exists() else 0
    environments = [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NUM_RANKS)]
    with open(f"{folder}/words", "a") as words:
        ranks = [subprocess.Popen(command, env=each, stdout=words, stderr=words) for each in environments]
    deadline = time.monotonic() + 3 * PATIENCE
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if seconds is not None and losses.exists() and losses.stat().st_size > before:
            time.sleep(seconds)
            for rank in victims:
                ranks[rank].kill()
            break
        time.sleep(0.01)
    is_killed = seconds is not None and any(rank.poll() != 0 for rank in ranks)
    if is_killed or time.monotonic() >= deadline:
        for process in ranks:
            process.kill()
    codes = [process.wait() for process in ranks]
    if any(codes) and not is_killed:
        raise RuntimeError(f"A Trainer did not come to its end: {Path(folder, 'words').read_text()[-3000:]}")
    return not any(codes)


def losses_of(folder: str) -> list[tuple[int, str]]:
    lines = Path(folder, "losses.jsonl").read_text().splitlines()
    return [(step, loss) for step, loss in map(json.loads, lines)]


def trainer_moments(num_moments: int, chance: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer_life(folder, False, None, [])
        expected = dict(losses_of(folder))
    num_killed = num_steps = 0
    while num_killed < num_moments:
        with tempfile.TemporaryDirectory() as folder:
            is_async, is_done = bool(num_killed % 2), False
            while not is_done:
                seconds = chance.uniform(0, 1.0) if num_killed < num_moments else None
                is_done = trainer_life(folder, is_async, seconds, chance.choice([[0], [1], [0, 1]]))
                num_killed += not is_done
            wrong = [(step, loss) for step, loss in losses_of(folder) if expected[step] != loss]
            if wrong:
                raise RuntimeError(f"Losses differ from those of the run nobody killed: {wrong}")
            num_steps += len(losses_of(folder))
    print(f"{num_killed} moments of Trainers, {num_steps} steps with the losses of the run nobody killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--async", dest="is_async", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train:
        train(arguments.train, arguments.is_async)
        return
    chance = random.Random(arguments.seed)
    forked_moments(arguments.moments, chance)
    if arguments.trainers:
        trainer_moments(arguments.trainers, chance)


if __name__ == "__main__":
    main()
