"""What a step costs: CPU time of the strategy in a world of one against a hand-written loop, and CPU time and memory
of a mixture-of-experts block against transformers on the same weights.

    python benchmarks/step_cost.py

Times are ``time.process_time`` of one thread, forward and backward, the candidates taking turns within one run, so a
busy machine slows all of them alike. Bytes are storages that autograd keeps for the backward, weights excluded;
they do not depend on the machine.

Shapes: T tokens, D hidden size, I intermediate size.
"""

import argparse
import copy
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.lightning_module import MoELanguageModel
from lightning_moe_strategy.models.loss import cross_entropy_sum

Step = Callable[[], Tensor]
"""A forward; its result is what the backward starts from."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The block all candidates compute."""

    num_tokens: int = 1024
    hidden: int = 256
    intermediate: int = 128
    num_experts: int = 32
    top_k: int = 4


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one candidate."""

    milliseconds: list[float]
    """CPU time of every repeat."""
    bytes_kept: int
    """By autograd between forward and backward."""


def moe_block_costs(shape: BlockShape, dtype: torch.dtype, repeats: int) -> dict[str, Cost]:
    """Forward and backward of one qwen3_moe block: transformers' two ways, ours, and the floor.

    The floor is one dense MLP of the same number of products: no routing, no small matrices.
    """
    torch.manual_seed(0)
    block = _qwen3_moe_block(shape, dtype)
    x_1TD = torch.randn(1, shape.num_tokens, shape.hidden).to(dtype).requires_grad_()
    weights = tuple(block.parameters())

    def with_implementation(name: str) -> Step:
        def step() -> Tensor:
            block.experts.config._experts_implementation = name
            return block(x_1TD)

        return step

    def ours() -> Tensor:
        undo = attach(block.experts, LocalDispatcher(shape.num_experts))
        try:
            return block(x_1TD)
        finally:
            undo()

    def dense() -> Tensor:
        rows_RD = x_1TD[0].repeat(shape.top_k, 1)
        gate, up = F.linear(rows_RD, block.experts.gate_up_proj[0]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, block.experts.down_proj[0])

    steps = {
        "transformers eager": with_implementation("eager"),
        "transformers grouped_mm": with_implementation("grouped_mm"),
        "ours": ours,
        "dense floor": dense,
    }
    times = interleaved_times(steps, (x_1TD, *weights), repeats)
    return {name: Cost(milliseconds=times[name], bytes_kept=bytes_kept(step, weights)) for name, step in steps.items()}


def interleaved_times(steps: dict[str, Step], leaves: tuple[Tensor, ...], repeats: int) -> dict[str, list[float]]:
    """CPU milliseconds of forward and backward, every candidate once per round, after a round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gradients: dict[str, Tensor] = {}
    for round_number in range(repeats + 1):
        for name, step in steps.items():
            for leaf in leaves:
                leaf.grad = None
            start = time.process_time()
            y = step()
            y.backward(gradients.setdefault(name, torch.randn(y.shape).to(y.dtype)))
            if round_number:
                times[name].append(1e3 * (time.process_time() - start))
    return times


def bytes_kept(step: Step, weights: tuple[Tensor, ...]) -> int:
    """Bytes of the distinct storages autograd keeps after ``step``, the weights' aside."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step()
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    del y
    return sum(kept.values())


def print_costs(title: str, costs: dict[str, Cost], unit: str) -> None:
    """One line per candidate: min / median / max, its ratio to ``unit`` by the medians, and the bytes it keeps."""
    print(title)
    base = statistics.median(costs[unit].milliseconds)
    for name, cost in costs.items():
        low, middle, high = min(cost.milliseconds), statistics.median(cost.milliseconds), max(cost.milliseconds)
        print(
            f"  {name:<24} {low:7.1f} / {middle:7.1f} / {high:7.1f} ms   {middle / base:5.2f}x {unit}   "
            f"keeps {cost.bytes_kept / 1e6:6.2f} MB = {cost.bytes_kept / costs[unit].bytes_kept:.2f}x"
        )


class AgainstPlainLoop(Callback):
    """After every step of the Trainer, one step of a hand-written loop on a copy of the model and the same batch."""

    def __init__(self, model: MoELanguageModel) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.trainer_ms: list[float] = []
        self.loop_ms: list[float] = []
        self.losses: list[tuple[float, float]] = []
        self.last_end = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_end = time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # From the end of the step before: the loop, the loader and every callback included.
        self.trainer_ms.append(1e3 * (time.process_time() - self.last_end))
        start = time.process_time()
        self.optimizer.zero_grad()
        logits_TV = self.model.model(batch["input_ids"]).flatten(0, 1)
        targets_T = batch["shift_labels"].flatten()
        loss = cross_entropy_sum(logits_TV, targets_T) / len(targets_T)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loop_ms.append(1e3 * (time.process_time() - start))
        self.losses.append((float(outputs["loss"].detach()), float(loss.detach())))
        self.last_end = time.process_time()


class PlainAdamW(MoELanguageModel):
    """With the loop's optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def strategy_costs(steps: int, strategy: str, sequences: int = 2) -> AgainstPlainLoop:
    """The Trainer with ``strategy`` on one device and the plain loop, step by step in turn, from equal weights."""
    config = ModelConfig.resolve(
        {"preset": "tiny", "vocab_size": 4096, "hidden": 256, "layers": 4, "num_experts": 16, "top_k": 4}
    )
    torch.manual_seed(0)
    model = PlainAdamW(config)
    against = AgainstPlainLoop(copy.deepcopy(model))
    tokens = torch.randint(4096, (sequences * steps, 513), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in tokens]
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[against],
            default_root_dir=directory,
        )  # fmt: skip
        trainer.fit(model, DataLoader(rows, batch_size=sequences))
    return against


def print_strategy_costs(steps: int, warmup: int = 3) -> None:
    # What the strategy adds (copies of weights and gradients) is per parameter: many tokens carry it.
    for sequences in (2, 8):
        for strategy in ("auto", "fsdp_cp_ep"):
            against = strategy_costs(steps + warmup, strategy, sequences)
            worst = max(abs(ours - loop) / loop for ours, loop in against.losses)
            ratios = [ours / loop for ours, loop in zip(against.trainer_ms, against.loop_ms, strict=True)][warmup:]
            print(f"Trainer(strategy={strategy!r}, devices=1) against a plain loop, {512 * sequences} tokens a step")
            for name, times in (("Trainer", against.trainer_ms[warmup:]), ("plain loop", against.loop_ms[warmup:])):
                print(f"  {name:<24} {min(times):7.1f} / {statistics.median(times):7.1f} / {max(times):7.1f} ms")
            print(
                f"  step by step {min(ratios):.3f} / {statistics.median(ratios):.3f} / {max(ratios):.3f}x, "
                f"losses differ by {worst:.1e} at most"
            )


def _qwen3_moe_block(shape: BlockShape, dtype: torch.dtype) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    return block.to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="of each block (%(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="of each Trainer (%(default)s)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning's launcher takes every core
    torch.set_num_threads(1)
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}, 1 thread")
    for dtype in (torch.float32, torch.bfloat16):
        costs = moe_block_costs(BlockShape(), dtype, arguments.repeats)
        print_costs(f"qwen3_moe block, {BlockShape()}, {dtype}: forward + backward", costs, "transformers grouped_mm")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print_strategy_costs(arguments.steps)


if __name__ == "__main__":
    main()
