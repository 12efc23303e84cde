"""Does ExpertPrefetch hide the gathers of the experts, and does the receipt say what it does not? Two ranks, two
network namespaces, a link of 400 Mbit/s.

    sudo .venv/bin/python benchmarks/overlap_limited_link.py [--blocks 6] [--tokens 3072] [--repeats 7]

Each rank lives in its own namespace; the two are joined by a veth pair that ``tc tbf`` limits. The experts are
sharded over the link (e_fsdp = 2), the dense weights are replicated (d_rep = 2): what the seed's 256-GPU plan does
over RDMA. Forward time is wall time of rank 0. Perfect overlap costs max(compute, communication).

Then whole steps, forward and backward. What a step takes longer than compute alone, which runs right before it and
right after it, is what the receipt of that step has to say. Steps with and without a receipt in turn say what it costs,
as does, on a machine that others use too, the time that the receipt's own code takes.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import set_asynchronous_unshard
from lightning_moe_strategy.mesh import build_dense_meshes, build_expert_meshes
from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.prefetch_order import UnitPrefetch, forward_prefetch, group_units
from lightning_moe_strategy.sharding import shard
from lightning_moe_strategy.units import Unit, plan_units
from lightning_moe_strategy.waits import CATEGORIES, StepWaits, WaitWatch, watch_group

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("moe-bench-0", "moe-bench-1")
PORT = 29_577  # inside the namespace, so free by construction
TIMEOUT = timedelta(seconds=120)

# D model dim, F expert intermediate dim, E experts, T tokens of this rank, C tokens of one expert.
NUM_EXPERTS, MODEL_DIM, EXPERT_DIM = 4, 768, 512


class Experts(nn.Module):
    """Every expert on its share of the tokens, in order: the traffic of an expert layer without its routing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up_EDF = nn.Parameter(torch.randn(NUM_EXPERTS, MODEL_DIM, EXPERT_DIM) * MODEL_DIM**-0.5)
        self.down_EFD = nn.Parameter(torch.randn(NUM_EXPERTS, EXPERT_DIM, MODEL_DIM) * EXPERT_DIM**-0.5)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_ECD = x_TD.view(NUM_EXPERTS, -1, MODEL_DIM)
        hidden_ECF = torch.bmm(x_ECD, _whole(self.up_EDF)).relu()
        return torch.bmm(hidden_ECF, _whole(self.down_EFD))  # a view would make FSDP warn


class Block(nn.Module):
    """Dense work that stands for attention, then the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)
        self.experts = Experts()

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.experts(self.attention(x_TD)).view_as(x_TD)


class Stack(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x_TD: Tensor) -> Tensor:
        for block in self.blocks:
            x_TD = block(x_TD)
        return x_TD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of each rank; a multiple of 4")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--megabits", type=int, default=400, help="rate of the link, each direction")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments)
        return
    reason = why_no_namespaces()
    if reason is not None:
        print(f"Skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        run_ranks(arguments.megabits, results)
        report = json.loads(results.read_text())
        print_table(report["forward"], arguments)
        print_receipts(report["receipts"])
        print_cost(report["cost"], report["own"])


# The link


def why_no_namespaces() -> str | None:
    """One sentence when this machine or user cannot make network namespaces, else None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2."
    trial = f"moe-bench-trial-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here ({made.stderr.strip()}); run as root."
    shell(f"ip netns del {trial}")
    return None


def run_ranks(megabits: int, results: Path) -> None:
    """Run this file once per rank, each in its own namespace; whatever happens, the namespaces are gone after."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the clean-up runs
    with limited_link(megabits) as namespaces:
        ranks = []
        try:
            for rank, namespace in enumerate(namespaces):
                arguments = [*sys.argv[1:], "--rank", str(rank), "--results", str(results)]
                command = ["ip", "netns", "exec", namespace, sys.executable, __file__, *arguments]
                environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACES[rank], "OMP_NUM_THREADS": "1"}
                ranks.append(subprocess.Popen(command, env=environment))
            if any(rank.wait() for rank in ranks):
                raise RuntimeError("A rank failed; its error stands above.")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


@contextmanager
def limited_link(megabits: int) -> Iterator[list[str]]:
    """Two namespaces joined by a link of the given rate in each direction."""
    namespaces = [f"moe-bench-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for namespace in namespaces:
            shell(f"ip netns add {namespace}")
        (first, second), (near, far) = namespaces, INTERFACES
        shell(f"ip link add {near} netns {first} type veth peer name {far} netns {second}")
        for namespace, interface, address in zip(namespaces, INTERFACES, ADDRESSES, strict=True):
            shell(f"ip -n {namespace} addr add {address}/24 dev {interface}")
            shell(f"ip -n {namespace} link set {interface} up")
            shell(f"ip -n {namespace} link set lo up")
            shell(f"tc -n {namespace} qdisc add dev {interface} root tbf rate {megabits}mbit burst 256kb latency 50ms")
        yield namespaces
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


# One rank


def measure(arguments: argparse.Namespace) -> None:
    """Time forwards, then whole steps with their receipts, on this rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    address = f"tcp://{ADDRESSES[0]}:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=arguments.rank, world_size=2, timeout=TIMEOUT)
    torch.manual_seed(0)
    x_TD = torch.randn(arguments.tokens, MODEL_DIM)
    whole, sharded = Stack(arguments.blocks), Stack(arguments.blocks)
    sharded.load_state_dict(whole.state_dict())
    expected_TD = whole(x_TD).detach()

    dims = ParallelDims(d_rep=2, fsdp=1, e_fsdp=2, ep=1).resolve(2, local_world_size=1, num_experts=NUM_EXPERTS)
    dense, expert = build_dense_meshes(dims, "cpu", TIMEOUT), build_expert_meshes(dims, "cpu", TIMEOUT)
    experts = {f"blocks.{i}.experts": block.experts for i, block in enumerate(sharded.blocks)}
    units = plan_units(sharded, experts, separate_routers=False)
    shard(units, dense=dense, expert=expert, compute_dtype=None)

    def gather_every_expert() -> None:
        for module in experts.values():
            module.unshard()
            module.reshard()

    seconds = {
        "compute alone": repeat(lambda: whole(x_TD), arguments.repeats),
        "no prefetch": repeat(lambda: sharded(x_TD), arguments.repeats),
        "communication alone": repeat(gather_every_expert, arguments.repeats),
    }
    receipts = {"no prefetch": compare(Steps(whole, sharded, x_TD), units, arguments.repeats)}
    modules = {unit.name: unit.module for unit in units}
    names, kinds = [unit.name for unit in units], {unit.name: unit.kind for unit in units}
    for name, targets in forward_prefetch(group_units(names, kinds)).items():
        modules[name].set_modules_to_forward_prefetch([modules[target] for target in targets])
    set_asynchronous_unshard(sharded, True)
    seconds["ExpertPrefetch"] = repeat(lambda: sharded(x_TD), arguments.repeats)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x_TD), expected_TD)
    steps = Steps(whole, sharded, x_TD, UnitPrefetch(units))
    receipts["ExpertPrefetch"] = compare(steps, units, arguments.repeats)
    report = {
        "forward": seconds,
        "receipts": receipts,
        "cost": cost_of_receipt(steps, units, arguments.repeats),
        "own": len(units) * seconds_of_unit(),
    }
    if arguments.rank == 0:
        arguments.results.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def repeat(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat after one that is not counted; the ranks begin each together."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        with torch.no_grad():
            work()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


class Steps:
    """Training steps of the same numbers, alone and sharded; the ranks begin each together."""

    def __init__(self, whole: Stack, sharded: Stack, x_TD: Tensor, prefetch: UnitPrefetch | None = None) -> None:
        self.whole, self.sharded, self.prefetch = whole, sharded, prefetch
        self.x_TD = x_TD.clone().requires_grad_()

    def alone(self) -> float:
        return self._timed(self.whole, lambda: None, lambda: None)

    def run(self, watch: WaitWatch | None = None) -> float:
        prefetch = self.prefetch
        start, stop = (watch.start, watch.stop) if watch is not None else (lambda: None, lambda: None)
        if prefetch is None:
            return self._timed(self.sharded, start, stop)
        prefetch.before_batch("train")
        seconds = self._timed(self.sharded, start, stop, prefetch.before_backward)
        prefetch.after_backward()
        return seconds

    def _timed(
        self,
        model: Stack,
        start: Callable[[], None],
        stop: Callable[[], None],
        before_backward: Callable[[], None] = lambda: None,
    ) -> float:
        dist.barrier()
        begin = time.perf_counter()
        start()
        loss = model(self.x_TD).square().mean()
        before_backward()
        loss.backward()
        stop()
        seconds = time.perf_counter() - begin
        model.zero_grad()
        self.x_TD.grad = None
        return seconds


def compare(steps: Steps, units: Sequence[Unit], repeats: int) -> list[dict[str, Any]]:
    """Steps between two of compute alone, each with what its receipt says; the first round is not counted."""
    watch, rounds = WaitWatch(units, device=torch.device("cpu")), []
    with watch.opened():
        for _ in range(repeats + 1):
            alone = steps.alone()
            step = steps.run(watch)
            watch.end_step()
            (waits,) = watch.take()
            alone = (alone + steps.alone()) / 2
            rounds.append({"alone": alone, "step": step, "exposed": by_category(waits)})
    return rounds[1:]


def by_category(waits: StepWaits) -> dict[str, float]:
    found = {category: 0.0 for category in CATEGORIES}
    for what, seconds in waits.waits.items():
        found[what.category] += seconds
    return {category: seconds for category, seconds in found.items() if seconds}


def cost_of_receipt(steps: Steps, units: Sequence[Unit], repeats: int) -> dict[str, list[list[float]]]:
    """Clock and process time of steps with and without a receipt, in turn; the first of each is not counted."""
    watch = WaitWatch(units, device=torch.device("cpu"))
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    for number in range(2 * repeats + 2):
        is_timed = number % 2 == 1
        with watch.opened() if is_timed else nullcontext():
            begin = time.process_time()
            seconds = steps.run(watch if is_timed else None)
            found["with" if is_timed else "without"].append([seconds, time.process_time() - begin])
        watch.end_step()
        watch.take()
    return {kind: times[1:] for kind, times in found.items()}


class Idle:
    """A unit whose gathers and reductions are nothing at all."""

    def __init__(self) -> None:
        self._all_gather_result: Any = None
        self._all_gather_comm = self._reduce_scatter_comm = IdleCollective()

    def unshard(self) -> None:
        self._all_gather_comm()
        self._all_gather_result = PENDING

    def wait_for_unshard(self) -> None:
        self._all_gather_result = None

    def post_backward(self) -> None:
        self._reduce_scatter_comm()

    def finalize_backward(self) -> None: ...


class IdleCollective:
    allocate = None

    def __call__(self) -> None: ...


PENDING = SimpleNamespace(all_gather_work=None)


def seconds_of_unit(num_steps: int = 2000) -> float:
    """What timing adds for a unit: two gathers and their waits, a reduction and the end of a backward pass."""
    watch, group = WaitWatch((), device=torch.device("cpu")), Idle()

    def run() -> float:
        begin = time.process_time()
        for _ in range(num_steps):
            with watch.step():
                for _ in range(2):
                    group.unshard()
                    group.wait_for_unshard()
                group.post_backward()
                group.finalize_backward()
            watch.take()
        return time.process_time() - begin

    plain = run()
    with watch_group(watch, group, "", "dense_gather"):
        return (run() - plain) / num_steps


def _whole(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def print_table(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    floor = max(median(seconds["compute alone"]), median(seconds["communication alone"]))
    num_megabytes = arguments.blocks * 2 * NUM_EXPERTS * MODEL_DIM * EXPERT_DIM * 4 / 2 / 1e6
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {' '.join(sys.argv)}")
    print(f"{arguments.blocks} blocks, {arguments.tokens} tokens, {num_megabytes:.0f} MB received per forward")
    print(f"{'forward seconds':<22}{'min':>8}{'median':>8}{'max':>8}{'median / max(compute, communication)':>40}")
    for case in ("compute alone", "communication alone", "no prefetch", "ExpertPrefetch"):
        times = seconds[case]
        print(f"{case:<22}{min(times):>8.3f}{median(times):>8.3f}{max(times):>8.3f}{median(times) / floor:>40.2f}")


def print_receipts(receipts: dict[str, list[dict[str, Any]]]) -> None:
    header = f"{'step':>9}{'alone':>8}{'step - alone':>14}{'receipt':>9}{'receipt / (step - alone)':>32}"
    print(f"\n{'training step, seconds':<24}{header}")
    for case, rounds in receipts.items():
        steps, alone = [each["step"] for each in rounds], [each["alone"] for each in rounds]
        longer = [each["step"] - each["alone"] for each in rounds]
        exposed = [sum(each["exposed"].values()) for each in rounds]
        ratios = [a / b for a, b in zip(exposed, longer, strict=True)]
        medians = f"{median(steps):>9.3f}{median(alone):>8.3f}{median(longer):>14.3f}{median(exposed):>9.3f}"
        print(f"{case:<24}{medians}{f'{min(ratios):.3f} / {median(ratios):.3f} / {max(ratios):.3f}':>32}")
    for case, rounds in receipts.items():
        names = {name for each in rounds for name in each["exposed"]}
        seconds = {name: median(each["exposed"].get(name, 0.0) for each in rounds) for name in names}
        print(f"{case}: " + ", ".join(f"{n} {s:.3f}" for n, s in sorted(seconds.items(), key=lambda item: -item[1])))


def print_cost(cost: dict[str, list[list[float]]], own_seconds: float) -> None:
    print("\nwhat a receipt costs, seconds of a step (min / median / max)")
    for column, clock in enumerate(("clock", "process time")):
        times = {kind: [each[column] for each in steps] for kind, steps in cost.items()}
        for kind, seconds in times.items():
            figures = f"{min(seconds):.4f} / {median(seconds):.4f} / {max(seconds):.4f}"
            print(f"{f'{clock}, {kind}':<24}{figures:>28}")
        print(f"{clock}: {median(times['with']) / median(times['without']) - 1:+.2%}")
    step = median(seconds for seconds, _ in cost["without"])
    print(f"its own code: {own_seconds * 1e3:.3f} ms of process time, {own_seconds / step:.3%} of a step")


if __name__ == "__main__":
    main()
