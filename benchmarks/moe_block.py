"""One mixture-of-experts block, forward and backward: ours, transformers' two ways, dense MLPs of as many FLOPs.

    python benchmarks/moe_block.py [--repeats 7] [--json moe_block.json]

First in one process, then on two gloo ranks that hold half of the experts each: our all-to-all and transformers' own.
All hold the same weights of a qwen3_moe block, read the same tokens and route them alike, router included; that they
compute the same outputs and gradients is checked first. Ours is the package's kernel in the place of the forward of
transformers' experts module.

Time is process time, one thread for each rank, of the slowest rank of each round. The candidates take turns, and a
ratio is one of two times of the same round, so that a busy machine slows both. Saved bytes are the storages that
autograd keeps between forward and backward, parameters left out. Received bytes are those that rank 0 gets from the
other, counted below autograd. Neither depends on the machine. Goals stand beside; one that is missed is said so.

The default is the block of Qwen3-30B-A3B with a quarter of its channels: 128 experts, 8 of a token. With
``--tokens 1024 --hidden 256 --intermediate 128 --experts 32 --top-k 4`` transformers' loop takes 2.2 to 2.7 times as
long as ours, which misses the goal: the products that all must compute are a third of it, and three times would leave
nothing for the rest. That rest grows with E squared: the backward of every expert fills and adds a gradient of all.

Shapes: T tokens of one rank, D hidden size, I intermediate size of an expert, E experts, K experts of a token.
"""

import argparse
import copy
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach

NUM_RANKS = 2
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest difference over the largest value; BF16 has eight bits, and the probability is applied in other places."""

OURS, EAGER, GROUPED_MM = "ours", "transformers, eager", "transformers, grouped_mm"
DENSE, DENSE_ROWS = "dense MLP, K * I wide", "dense MLP, K * T rows"
OURS_SPREAD, THEIRS_SPREAD = "ours, all-to-all", "transformers, AllToAllEP"


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Of the block, and the tokens that each rank reads."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclass
class Figures:
    """Of one candidate."""

    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A quotient of two candidates' figures, by name of the figure, and what it should be."""

    figure: str
    numerator: str
    denominator: str
    at_least: float | None = None
    at_most: float | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


GOALS = (
    Goal(figure="seconds", numerator=EAGER, denominator=OURS, at_least=3.0),
    Goal(figure="seconds", numerator=GROUPED_MM, denominator=OURS, at_least=1.0),
    Goal(figure="seconds", numerator=OURS, denominator=DENSE, at_most=1.5, dtypes=("float32",)),
    Goal(figure="seconds", numerator=OURS, denominator=DENSE_ROWS, at_most=1.5, dtypes=("float32",)),
    Goal(figure="saved_bytes", numerator=OURS, denominator=GROUPED_MM, at_most=0.33),
    Goal(figure="seconds", numerator=THEIRS_SPREAD, denominator=OURS_SPREAD, at_least=1.0),
)

Run = Callable[[Tensor], Tensor]
Gradients = dict[str, Tensor]
"""By name of the parameter; ``output`` is what a block returns, and ``input`` the gradient of what it reads."""


# The candidates


class WideMLP(nn.Module):
    """The first K experts as one MLP that every token takes: the FLOPs of top-K routing in three large products."""

    def __init__(self, block: Qwen3MoeSparseMoeBlock, top_k: int) -> None:
        super().__init__()
        gate_up_KHD, down_KDI = (parameter.detach()[:top_k] for parameter in block.experts.parameters())
        self.top_k = top_k
        self.gate_up = nn.Parameter(torch.cat([part_KID.flatten(0, 1) for part_KID in gate_up_KHD.chunk(2, 1)]))
        self.down = nn.Parameter(torch.cat(list(down_KDI), 1))

    def forward(self, x_1TD: Tensor) -> Tensor:
        gate, up = F.linear(x_1TD, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)

    def by_expert(self, gradients: Gradients) -> Gradients:
        """Those of the two parameters as gradients of K experts."""
        halves = gradients.pop("gate_up").chunk(2)
        gate_up_KHD = torch.cat([torch.stack(half.chunk(self.top_k)) for half in halves], 1)
        down_KDI = torch.stack(gradients.pop("down").chunk(self.top_k, 1))
        return gradients | {"experts.gate_up_proj": gate_up_KHD, "experts.down_proj": down_KDI}


class RowsMLP(WideMLP):
    """The first expert on as many rows as the experts have in all: their products without routing."""

    def __init__(self, block: Qwen3MoeSparseMoeBlock, top_k: int) -> None:
        super().__init__(block, 1)
        self.num_copies = top_k

    def forward(self, x_1TD: Tensor) -> Tensor:
        return super().forward(x_1TD.repeat(1, self.num_copies, 1))


def make_block(shape: BlockShape, dtype: torch.dtype) -> Qwen3MoeSparseMoeBlock:
    """A qwen3_moe block of random weights, the same on every rank; it loops over its experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    return block.to(dtype)


def make_tokens(shape: BlockShape, dtype: torch.dtype) -> Tensor:
    """What all ranks read, and the gradients of what they return: [2, NUM_RANKS, T, D]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, NUM_RANKS, shape.tokens, shape.hidden, generator=generator).to(dtype)


def with_grouped_mm(block: Qwen3MoeSparseMoeBlock) -> Qwen3MoeSparseMoeBlock:
    """A copy that runs transformers' grouped products."""
    copied = copy.deepcopy(block)
    copied.experts.config._experts_implementation = "grouped_mm"
    return copied


def with_our_kernel(block: Qwen3MoeSparseMoeBlock, shape: BlockShape) -> Qwen3MoeSparseMoeBlock:
    copied = copy.deepcopy(block)
    attach(copied.experts, LocalDispatcher(shape.experts))
    return copied


def spread_by_us(block: Qwen3MoeSparseMoeBlock, shape: BlockShape, mesh: DeviceMesh) -> Qwen3MoeSparseMoeBlock:
    copied = copy.deepcopy(block)
    for name, parameter in list(copied.experts.named_parameters()):
        local = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        copied.experts.register_parameter(name, nn.Parameter(local))
    attach(copied.experts, AllToAllDispatcher(shape.experts, mesh.get_group()))
    return copied


def spread_by_transformers(block: Qwen3MoeSparseMoeBlock, mesh: DeviceMesh, only_this_rank: DeviceMesh) -> nn.Module:
    """With the plan of every modern family's experts, on grouped products, as ``from_pretrained`` would apply it."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }
    spread: nn.Module = apply_expert_parallelism(with_grouped_mm(block), mesh, only_this_rank, plan, "all_to_all")
    return spread


# What is measured


def gradients_of(module: nn.Module, x_1TD: Tensor, grad_1TD: Tensor, run: Run | None = None) -> Gradients:
    """The output of ``run``, or of a forward, and the gradients of everything when its own is ``grad_1TD``."""
    x_1TD = x_1TD.clone().requires_grad_()
    y_1TD = (run or module)(x_1TD)
    y_1TD.backward(grad_1TD)
    grads = {"input": x_1TD.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return {"output": y_1TD.detach()} | {name: _local(grad) for name, grad in grads.items() if grad is not None}


def require_equal(name: str, found: Gradients, expected: Gradients) -> None:
    """An error where the largest difference over the largest value is too large."""
    assert found.keys() == expected.keys(), f"{name} has {sorted(found)}, not {sorted(expected)}"
    for what, tensor in found.items():
        difference = (tensor.float() - expected[what].float()).abs().max() / expected[what].float().abs().max()
        if not difference < TOLERANCES[tensor.dtype]:
            raise RuntimeError(f"{name}: {what} is off by {float(difference):.1e}, so there is nothing to compare.")


def time_in_turns(modules: Mapping[str, nn.Module], x_1TD: Tensor, repeats: int) -> dict[str, list[float]]:
    """Process seconds of forward and backward, of the slowest rank, each round after two of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for round_number in range(-2, repeats):
        for name, module in modules.items():
            # The others keep their gradients: with a heap that shrinks between turns, transformers' loop takes 8,000
            # page faults a step in FP32 and the time of the next candidate depends on the one before.
            module.zero_grad(set_to_none=True)
            leaf_1TD = x_1TD.clone().requires_grad_()
            if dist.is_initialized():
                dist.barrier()
            start = time.process_time()
            y = module(leaf_1TD)
            y.backward(y.detach())
            spent = torch.tensor(time.process_time() - start, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(spent, dist.ReduceOp.MAX)
            if round_number >= 0:
                seconds[name].append(float(spent))
    return seconds


def saved_bytes(module: nn.Module, x_1TD: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps after a forward, those of the parameters aside."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x_1TD.clone().requires_grad_())
    for parameter in module.parameters():
        kept.pop(_local(parameter.detach()).untyped_storage().data_ptr(), None)
    y.backward(y.detach())  # on every rank, or the others wait
    module.zero_grad(set_to_none=True)
    return sum(kept.values())


class ReceivedBytes(OperationMode):
    """Bytes that all-to-alls bring this rank from others."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        if operation.namespace in ("c10d", "_c10d_functional"):
            name = operation._schema.name.partition("::")[2]
            if name == "alltoall_base_":
                self.total += _from_others(args[0], args[3])
            elif name == "all_to_all_single":
                self.total += _from_others(result, args[1])
            elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
                raise RuntimeError(f"{name} is a collective whose bytes are not counted; add it to ReceivedBytes.")
        return result


def _from_others(received: Tensor, splits: list[int]) -> int:
    splits = splits or [1] * dist.get_world_size()
    return received.nbytes * (sum(splits) - splits[dist.get_rank()]) // max(sum(splits), 1)


# One process


def measure_one_process(shape: BlockShape, dtype: torch.dtype, repeats: int) -> dict[str, Figures]:
    """Check and measure the candidates that hold all experts, on the tokens of one rank."""
    block, (x_1TD, grad_1TD) = make_block(shape, dtype), make_tokens(shape, dtype)[:, :1]
    wide = WideMLP(block, shape.top_k)
    modules = {OURS: with_our_kernel(block, shape), EAGER: block, GROUPED_MM: with_grouped_mm(block)}
    expected = gradients_of(block, x_1TD, grad_1TD)
    for name in (OURS, GROUPED_MM):
        require_equal(name, gradients_of(modules[name], x_1TD, grad_1TD), expected)
    # The wide one is the block whose tokens all take the first K experts, each with probability 1.
    ids_TK = torch.arange(shape.top_k).expand(shape.tokens, -1)
    ones_TK = torch.ones(shape.tokens, shape.top_k, dtype=dtype)
    expected = gradients_of(block, x_1TD, grad_1TD, lambda x: block.experts(x[0], ids_TK, ones_TK)[None])
    expected = {name: x[: shape.top_k] if name.startswith("experts.") else x for name, x in expected.items()}
    require_equal(DENSE, wide.by_expert(gradients_of(wide, x_1TD, grad_1TD)), expected)
    modules |= {DENSE: wide, DENSE_ROWS: RowsMLP(block, shape.top_k)}
    seconds = time_in_turns(modules, x_1TD, repeats)
    return {name: Figures(seconds=seconds[name], saved_bytes=saved_bytes(modules[name], x_1TD)) for name in modules}


# Two ranks


def run_rank(rank: int, shape: BlockShape, repeats: int, folder: str) -> None:
    """Check and measure the blocks whose experts are spread; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("ep", "tp"))
    results: dict[str, Any] = {"refusals": {}}
    for dtype in DTYPES:
        block = make_block(shape, dtype)
        modules = {OURS_SPREAD: spread_by_us(block, shape, mesh["ep"])}
        try:
            modules[THEIRS_SPREAD] = spread_by_transformers(block, mesh["ep"], mesh["tp"])
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            results["refusals"][THEIRS_SPREAD] = f"{type(error).__name__}: {error}"
        received = check_spread(modules, block, *make_tokens(shape, dtype))
        x_1TD = make_tokens(shape, dtype)[0, rank : rank + 1]
        seconds = time_in_turns(modules, x_1TD, repeats)
        results[_name(dtype)] = {
            name: asdict(Figures(seconds[name], saved_bytes(module, x_1TD), received[name]))
            for name, module in modules.items()
        }
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def check_spread(modules: Mapping[str, nn.Module], block: nn.Module, x_PTD: Tensor, grad_PTD: Tensor) -> dict[str, int]:
    """Compare with ``block`` on the tokens of all ranks at once; the bytes that this rank receives, by candidate."""
    rank, received_bytes = dist.get_rank(), {}
    whole = gradients_of(block, x_PTD.flatten(0, 1)[None], grad_PTD.flatten(0, 1)[None])
    dim_of_rank = {"output": 1, "input": 1, "experts.gate_up_proj": 0, "experts.down_proj": 0}
    expected = {name: x.chunk(NUM_RANKS, dim_of_rank[name])[rank] for name, x in whole.items() if name in dim_of_rank}
    for name, module in modules.items():
        with ReceivedBytes() as received:
            found = gradients_of(module, x_PTD[rank][None], grad_PTD[rank][None])
        gate = found["gate.weight"].float()
        dist.all_reduce(gate)  # every rank routes its own tokens
        found["gate.weight"] = gate.to(x_PTD.dtype)
        require_equal(name, found, expected | {"gate.weight": whole["gate.weight"]})
        received_bytes[name] = received.total
    return received_bytes


# All


def judged(results: Mapping[str, Mapping[str, Figures]]) -> list[dict[str, Any]]:
    """Every goal in every dtype: min, median and max of its quotient, and whether the median meets it."""
    found = []
    for goal in GOALS:
        for dtype in goal.dtypes:
            pair = [results[dtype].get(name) for name in (goal.numerator, goal.denominator)]
            if pair[0] is None or pair[1] is None:
                continue
            over, under = (getattr(each, goal.figure) for each in pair)
            quotients = _quotients(over, under) if goal.figure == "seconds" else [over / under]
            met = (goal.at_least or 0.0) <= median(quotients) <= (goal.at_most or float("inf"))
            spread = {"min": min(quotients), "median": median(quotients), "max": max(quotients)}
            found.append(asdict(goal) | {"dtype": dtype, "met": met} | spread)
    return found


def print_figures(title: str, figures: Mapping[str, Figures], base: str) -> None:
    """One line per candidate: milliseconds, their quotient to ``base`` round by round, and bytes."""
    print(f"{title}: ms, x {base} (min / median / max), MB")
    for name, each in figures.items():
        quotients, ms = _quotients(each.seconds, figures[base].seconds), [1e3 * second for second in each.seconds]
        received = f"   receives {each.received_bytes / 1e6:.2f}" if each.received_bytes else ""
        print(
            f"  {name:<26}{min(ms):7.1f} / {median(ms):6.1f} / {max(ms):6.1f}   {min(quotients):5.2f} / "
            f"{median(quotients):4.2f} / {max(quotients):4.2f}   saves {each.saved_bytes / 1e6:6.2f}{received}"
        )


def print_goals(goals: list[dict[str, Any]]) -> None:
    print("Goals, by the median")
    for goal in goals:
        bound = f">= {goal['at_least']}" if goal["at_least"] is not None else f"<= {goal['at_most']}"
        what = f"{goal['figure'].replace('_', ' ')} of {goal['numerator']} / {goal['denominator']}"
        print(f"  {'met   ' if goal['met'] else 'MISSED'} {goal['median']:6.3f} {bound:<8}{goal['dtype']:<10}{what}")


def _quotients(over: list[float], under: list[float]) -> list[float]:
    return [x / y for x, y in zip(over, under, strict=True)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank (%(default)s)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=192, help="of one expert (%(default)s)")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the figures go too")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    shape = BlockShape(**{each.name: getattr(arguments, each.name) for each in fields(BlockShape)})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    print(f"{versions}, {machine}, 1 thread per rank, {' '.join(sys.argv)}\n{shape}", flush=True)
    results = {_name(dtype): measure_one_process(shape, dtype, arguments.repeats) for dtype in DTYPES}
    for dtype, figures in results.items():
        print_figures(f"One process, {dtype}", figures, OURS)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (shape, arguments.repeats, folder), nprocs=NUM_RANKS, start_method="spawn")
        spread = json.loads(Path(folder, "results.json").read_text())
    refusals = spread.pop("refusals")
    for dtype, by_name in spread.items():
        figures = {name: Figures(**each) for name, each in by_name.items()}
        print_figures(f"{NUM_RANKS} ranks, {dtype}", figures, OURS_SPREAD)
        results[dtype] |= figures
    for name, reason in refusals.items():
        print(f"{name} does not run here: {reason}")
    goals = judged(results)
    print_goals(goals)
    if arguments.json:
        by_dtype = {dtype: {name: asdict(x) for name, x in figures.items()} for dtype, figures in results.items()}
        report = {"versions": versions, "machine": machine, "shape": asdict(shape), "figures": by_dtype}
        arguments.json.write_text(json.dumps(report | {"goals": goals, "refusals": refusals}, indent=1))


if __name__ == "__main__":
    main()
