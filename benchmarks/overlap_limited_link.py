"""Does ExpertPrefetch hide the gathers of the experts? Two ranks, two network namespaces, a link of 400 Mbit/s.

    sudo .venv/bin/python benchmarks/overlap_limited_link.py [--blocks 6] [--tokens 3072] [--repeats 7]

Each rank lives in its own namespace; the two are joined by a veth pair that ``tc tbf`` limits. The experts are
sharded over the link (e_fsdp = 2), the dense weights are replicated (d_rep = 2): what the seed's 256-GPU plan does
over RDMA. Forward time is wall time of rank 0. Perfect overlap costs max(compute, communication).
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import set_asynchronous_unshard
from lightning_moe_strategy.mesh import build_dense_meshes, build_expert_meshes
from lightning_moe_strategy.parallel_dims import ParallelDims
from lightning_moe_strategy.prefetch_order import forward_prefetch, group_units
from lightning_moe_strategy.sharding import shard
from lightning_moe_strategy.units import plan_units

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
        return torch.bmm(hidden_ECF, _whole(self.down_EFD)).view_as(x_TD)


class Block(nn.Module):
    """Dense work that stands for attention, then the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)
        self.experts = Experts()

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.experts(self.attention(x_TD))


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
        print_table(json.loads(results.read_text()), arguments)


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
    """Time the four cases on this rank; rank 0 writes ``{case: [seconds, ...]}``."""
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
    modules = {unit.name: unit.module for unit in units}
    names, kinds = [unit.name for unit in units], {unit.name: unit.kind for unit in units}
    for name, targets in forward_prefetch(group_units(names, kinds)).items():
        modules[name].set_modules_to_forward_prefetch([modules[target] for target in targets])
    set_asynchronous_unshard(sharded, True)
    seconds["ExpertPrefetch"] = repeat(lambda: sharded(x_TD), arguments.repeats)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x_TD), expected_TD)
    if arguments.rank == 0:
        arguments.results.write_text(json.dumps(seconds))
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


if __name__ == "__main__":
    main()
