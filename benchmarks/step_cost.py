"""What a training step costs: this strategy beside Lightning's own FSDP2 and transformers' own FSDP2 x EP.

    python benchmarks/step_cost.py [--steps 20] [--tokens 512] [--json step_cost.json]

On two gloo ranks, a qwen3_moe causal LM of Hugging Face with its own loss and AdamW, trained by

- this strategy, experts spread over both ranks (ep=2) or gathered as all other parameters are (ep=1);
- Lightning's ``ModelParallelStrategy``, ``fully_shard`` on every block and the root in ``configure_model``;
- transformers' ``DistributedConfig(fsdp_size=2, ep_size=2)``, in a loop written by hand: no Trainer to pay for.

All start from the same weights and read the same batches; that they have the same losses is checked first. Each has
two processes of its own, which wait for their turn: one step each per round, forwards and backwards, and a ratio is one
of two times of the same round, so that a busy machine slows both.

Time is process time of the slowest rank, one thread and one core each, from step to step: loader, callbacks and what
ranks agree on included. Peak bytes are those of all tensors of a step, parameters and optimizer state included, as
operations below autograd make them; what an operation takes inside itself is not seen. They do not depend on the
machine. Goals stand beside; one that is missed is said so. ``step_cost_alone.py`` compares a world of one with a loop
written by hand.

Figures are in docs/numbers.md. At 512 tokens ep=1 takes 1.01 to 1.06 of Lightning's time, for 11 units that are
gathered and not 5: experts apart from their blocks (4 % of a step) and embedding and head apart from the root (2 %),
which is where the memory is saved. At ``--tokens 2048`` the host counts less, and ep=1 takes 0.98. At ``--tokens 64``
it counts most: 1.17 to 1.19, where the same units under Lightning's strategy take 1.16 to 1.2. The rest is three
agreements of the hosts (0.2 ms each), one pass over all gradients to divide them, and lists of what is gathered ahead.
All pay 7 ms and more for AdamW, which on a CPU takes one DTensor at a time. ep=2, and transformers, depend on the
routing besides: random routers give one rank 7 % more to do. At 2048 tokens ep=2 takes 1.03 to 1.04 and 0.30 s of the
kernel's time, where Lightning's takes 0.19 and ep=1 0.24: tokens go through sockets and wake threads, while all four
have as many page faults, 85,000 to 105,000 a step (2 AVX512 cores, torch 2.13).
"""

import argparse
import json
import logging
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.simulation.memory import MemoryWatch
from lightning_moe_strategy.strategy import FSDPCPEPStrategy

NUM_RANKS, SEQUENCES, VOCABULARY = 2, 2, 4096
CHECKED_STEPS, TOLERANCE = 3, 1e-4
"""Losses of so many steps are compared: AdamW has then used two gradients. Relative; FP32 is summed in other orders."""

OURS_EP2, OURS_EP1 = "this strategy, ep=2", "this strategy, ep=1"
LIGHTNING, TRANSFORMERS = "Lightning, ModelParallel", "transformers, FSDP2 x EP"
AT_MOST_SECONDS = 1.03


# What a rank does in turn

Build = Callable[[], Qwen3MoeForCausalLM]
Rows = list[dict[str, Tensor]]


class Step(NamedTuple):
    """Of one rank."""

    seconds: float
    loss: float
    peak_bytes: int
    """0 where it was not watched."""


class Turns:
    """One rank's steps: each waits until it is asked for, and is reported when the next one begins."""

    def __init__(self, pipe: Connection) -> None:
        self.loss: Tensor | None = None
        self._pipe, self._start, self._peak = pipe, 0.0, PeakBytes()

    def next(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Begin a step; False when there are no more."""
        seconds = time.process_time() - self._start
        if self.loss is not None:
            self._pipe.send((seconds, float(self.loss), self._peak.stop()))
        asked = self._pipe.recv()
        if asked == "watched step":
            self._peak.start(module, optimizers)
        self._start = time.process_time()
        return bool(asked)


class PeakBytes(OperationMode):
    """Bytes of all tensors at the fullest moment between ``start`` and ``stop``."""

    def __init__(self) -> None:
        super().__init__()
        self._memory, self._opened = MemoryWatch(), ExitStack()

    def start(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._memory = MemoryWatch()
        self._opened.enter_context(self._memory.opened())
        self._opened.enter_context(self._memory.phase("forward"))
        parameters = list(module.parameters())
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        self._memory.adopt(parameters, "parameters")
        self._memory.adopt((parameter.grad for parameter in parameters), "gradients")
        self._memory.adopt((x for state in states for x in state.values() if isinstance(x, Tensor)), "optimizer")
        self._memory.adopt(module.buffers(), "other")
        self._opened.enter_context(self)

    def stop(self) -> int:
        self._opened.close()
        return max((peak.num_bytes for peak in self._memory.peaks.values()), default=0)

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        self._memory.observe(operation, args, result)
        return result


# The candidates


def qwen3_moe(layers: int, hidden: int) -> Qwen3MoeForCausalLM:
    """Random weights, the same on every rank; transformers' grouped products, faster than its loop over experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=hidden // 8, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=hidden // 2, norm_topk_prob=True, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).train()
    model.set_experts_implementation("grouped_mm")
    return model


class Qwen3Moe(LightningModule):
    """As its users write it."""

    def __init__(self, turns: Turns, build: Build) -> None:
        super().__init__()
        self.turns, self.model = turns, build()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return None if self.turns.next(self, self.trainer.optimizers) else -1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.turns.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class FullySharded(Qwen3Moe):
    """As ``ModelParallelStrategy`` asks for it."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


Train = Callable[[Turns, Build, Rows], None]


def by_trainer(
    turns: Turns,
    build: Build,
    rows: Rows,
    strategy: Callable[[], Strategy],
    kind: type[Qwen3Moe] = Qwen3Moe,
) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=NUM_RANKS, strategy=strategy(), use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(kind(turns, build), loader(rows))


def by_transformers(turns: Turns, build: Build, rows: Rows) -> None:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(fsdp_size=NUM_RANKS, ep_size=NUM_RANKS)
    _, mesh = initialize_distributed_mesh(config)
    model = Qwen3MoeForCausalLM.maybe_distribute_model(build(), config, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in loader(rows):
        if not turns.next(model, [optimizer]):
            return
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        turns.loss = loss.detach()


def loader(rows: Rows) -> DataLoader[dict[str, Tensor]]:
    """Of this rank's part."""
    return DataLoader(rows[dist.get_rank() :: NUM_RANKS], batch_size=SEQUENCES)  # type: ignore[arg-type]


CANDIDATES: dict[str, Train] = {
    OURS_EP2: partial(by_trainer, strategy=partial(FSDPCPEPStrategy, fsdp=2, ep=2)),
    OURS_EP1: partial(by_trainer, strategy=partial(FSDPCPEPStrategy, fsdp=2, ep=1)),
    LIGHTNING: partial(
        by_trainer,
        strategy=partial(ModelParallelStrategy, data_parallel_size=NUM_RANKS, tensor_parallel_size=1),
        kind=FullySharded,
    ),
    TRANSFORMERS: by_transformers,
}


# Two ranks


@dataclass
class Figures:
    """Of one candidate."""

    seconds: list[float] = field(default_factory=list)
    """Of every round, on its slowest rank."""
    peak_bytes: int = 0
    """0 where it was not watched."""


class Ranks:
    """A candidate's processes."""

    def __init__(self, train: Train, build: Build, rows: Rows, folder: Path) -> None:
        # Forked: they share what is imported, and eight imports of all this take longer than the steps.
        context = multiprocessing.get_context("fork")
        folder.mkdir()
        self._pipes, self._processes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, train, build, rows, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def step(self, asked: str = "step") -> list[Step]:
        """One on every rank. RuntimeError with the words of a rank that fails."""
        for pipe in self._pipes:
            pipe.send(asked)
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return [Step(*answer) for answer in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def run_rank(rank: int, train: Train, build: Build, rows: Rows, folder: Path, pipe: Connection) -> None:
    logging.disable(logging.WARNING)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # a rank that moves between cores pays for cold caches
    # As torchrun would: a Trainer takes the process group that exists.
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "step_cost",
    }  # fmt: skip
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
        train(Turns(pipe), build, rows)
        raise RuntimeError("it ended before its last step")
    except BaseException:
        pipe.send(traceback.format_exc())


def measure_ranks(build: Build, tokens: int, steps: int) -> dict[str, Figures]:
    """Check the losses of all candidates, watch one step of each, and time ``steps`` in turn."""
    num_rows = NUM_RANKS * SEQUENCES * (CHECKED_STEPS + 2 + steps + 1)  # one begins that is not asked for
    ids = torch.randint(VOCABULARY, (num_rows, tokens), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    figures = {name: Figures() for name in CANDIDATES}
    with tempfile.TemporaryDirectory() as folder:
        ranks = {name: Ranks(train, build, rows, Path(folder, name)) for name, train in CANDIDATES.items()}
        try:
            checked = {name: [each.step() for _ in range(CHECKED_STEPS)] for name, each in ranks.items()}
            require_equal_losses({name: [[x.loss for x in step] for step in found] for name, found in checked.items()})
            for name, each in ranks.items():
                figures[name].peak_bytes = max(step.peak_bytes for step in each.step("watched step"))
                each.step()
            for number in range(steps):
                for name in list(ranks)[:: (-1) ** number]:
                    figures[name].seconds.append(max(step.seconds for step in ranks[name].step()))
        finally:
            for each in ranks.values():
                each.stop()
    return figures


def require_equal_losses(losses: Mapping[str, list[list[float]]]) -> None:
    """By candidate, step and rank. An error where one is not that of Lightning's FSDP2."""
    for name, steps in losses.items():
        for number, (found, expected) in enumerate(zip(steps, losses[LIGHTNING], strict=True)):
            worst = max(abs(x - y) / abs(y) for x, y in zip(found, expected, strict=True))
            if not worst < TOLERANCE:
                raise RuntimeError(
                    f"{name}: a loss of step {number} is off by {worst:.1e}; there is nothing to compare."
                )


# All


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A quotient of two candidates' figures, by name of the figure, and what its median may be at most."""

    figure: str
    numerator: str
    denominator: str
    at_most: float
    min: float
    median: float
    max: float

    @property
    def is_met(self) -> bool:
        return self.median <= self.at_most


def judged(figures: Mapping[str, Figures]) -> list[Goal]:
    """Never slower than the better of the others, with less memory than each."""
    others = (LIGHTNING, TRANSFORMERS)
    better = min(others, key=lambda name: median(figures[name].seconds))
    goals = []
    for ours in (OURS_EP2, OURS_EP1):
        goals.append(_goal(figures, "seconds", ours, better, AT_MOST_SECONDS))
        goals += [_goal(figures, "peak_bytes", ours, other, 1.0) for other in others]
    return goals


def _goal(figures: Mapping[str, Figures], figure: str, numerator: str, denominator: str, at_most: float) -> Goal:
    """Times by round, so that what slows a round slows both."""
    over, under = figures[numerator], figures[denominator]
    if figure == "seconds":
        quotients = [x / y for x, y in zip(over.seconds, under.seconds, strict=True)]
    else:
        quotients = [over.peak_bytes / under.peak_bytes]
    return Goal(
        figure=figure, numerator=numerator, denominator=denominator, at_most=at_most,
        min=min(quotients), median=median(quotients), max=max(quotients),
    )  # fmt: skip


def print_figures(title: str, figures: Mapping[str, Figures]) -> None:
    print(f"{title}: ms of a step (min / median / max)")
    for name, each in figures.items():
        ms = [1e3 * second for second in each.seconds]
        peak = f"   peak {each.peak_bytes / 1e6:7.2f} MB" if each.peak_bytes else ""
        print(f"  {name:<34}{min(ms):8.1f} / {median(ms):8.1f} / {max(ms):8.1f}{peak}")


def print_goals(goals: list[Goal]) -> None:
    for goal in goals:
        spread = f"{goal.min:.3f} / {goal.median:.3f} / {goal.max:.3f}"
        what = f"{goal.figure.replace('_', ' ')} of {goal.numerator} / {goal.denominator}"
        print(f"  {'met   ' if goal.is_met else 'MISSED'} {spread} <= {goal.at_most}  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="to be timed (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the qwen3_moe model (%(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="of the qwen3_moe model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence (%(default)s)")
    parser.add_argument("--json", type=Path, help="where the figures go too")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning's launcher takes every core
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take the GPU
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    versions = {each.__name__: each.__version__ for each in (torch, lightning, transformers)}
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    print(f"{versions}, {machine}, 1 thread per rank, {' '.join(sys.argv)}", flush=True)

    build = partial(qwen3_moe, arguments.layers, arguments.hidden)
    title = f"{NUM_RANKS} ranks, qwen3_moe, {SEQUENCES} x {arguments.tokens} tokens each"
    figures = measure_ranks(build, arguments.tokens, arguments.steps)
    goals = judged(figures)
    print_figures(title, figures)
    print_goals(goals)
    if arguments.json:
        report = {"versions": versions, "machine": machine, "figures": {name: asdict(x) for name, x in figures.items()}}
        judgements = [asdict(goal) | {"met": goal.is_met} for goal in goals]
        arguments.json.write_text(json.dumps(report | {"goals": judgements}, indent=1))


if __name__ == "__main__":
    main()
