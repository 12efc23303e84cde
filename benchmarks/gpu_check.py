"""The Triton kernels on one CUDA GPU: the same results as the torch references, and how fast they are.

    python benchmarks/gpu_check.py --json gpu_check.json

Every kernel is compared with its reference at full size, forward and backward; a difference ends with exit code 1.
Beside it stand times (CUDA events, L2 emptied before each run: min, median, max), the share of this GPU's own limits
(a copy of 1 GiB, a BF16 product of 8192 x 8192 x 8192), and the goal. A goal that is missed fails nothing. Meant to
take a few minutes of an H200, most of them compilation. Without a GPU it says so and ends with 0.

One-sided copies run among "ranks" whose memories are all on this GPU. That says nothing about NVLink: what is timed is
the pace of the kernel, which must be above that of a link, and no order between GPUs is tested.

Shapes: T tokens, K experts per token, E experts, D hidden size, I intermediate size, H = 2*I, R = T*K rows, P ranks,
C = T*P copies.
"""

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.kernels.grouped_products import persistent_products
from lightning_moe_strategy.kernels.outer_products import sum_outer_products
from lightning_moe_strategy.kernels.peer_copy import Peers, put_copies, put_sums, signal, wait
from lightning_moe_strategy.kernels.router import choose_experts
from lightning_moe_strategy.kernels.routing import add_rows, gather_rows, sort_by_expert, spread_rows, sum_rows
from lightning_moe_strategy.kernels.swiglu import swiglu_prob, swiglu_prob_backward

COPY_GOAL = 0.85
"""Of copy bandwidth, for what reads and writes rows; bytes are counted once each, the fewest possible."""
PRODUCT_GOAL, ROWS_OF_PRODUCT_GOAL = 0.75, 2048
"""Of the matmul peak, where an expert has that many rows."""
MLP_GOAL = 1.15
"""Times faster than eager operations around ``F.grouped_mm``, forward and backward."""
SORT_GOAL_MICROSECONDS = 30.0
"""For 262,144 slots."""
PUT_GOAL = 0.70
"""Of copy bandwidth, with a program on every SM."""
LINK_GOAL = 450e9
"""Bytes per second written by the few SMs that puts are given: one direction of an H200's NVLink."""
MAX_PEERS = 8

L2_BYTES = 256 * 2**20
NUM_WARMUPS, NUM_RUNS = 5, 20

Timer = Callable[[Callable[[], Any]], list[float]]
"""Seconds of each of some runs of a function."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


SHAPES = (
    Shape(name="Qwen3-30B-A3B", num_tokens=32768, hidden=2048, intermediate=768, num_experts=128, top_k=8),
    Shape(name="DeepSeek-V3, ep 8", num_tokens=8192, hidden=7168, intermediate=2048, num_experts=32, top_k=8),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape."""

    name: str
    run: Callable[[], Any]
    reference: Callable[[], Any] | None = None
    """What it must agree with, and is timed against."""
    tolerance: float = 0.0
    """Relative and absolute, for parity; 0: bit for bit."""
    comparable: Callable[[Any, Any], tuple[Any, Any]] = lambda actual, expected: (actual, expected)
    """The parts of two results that must agree."""
    num_bytes: int = 0
    num_flops: int = 0
    goal: str = ""
    is_met: Callable[["Figures"], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came out of a case. Shares are of the median."""

    name: str
    milliseconds: tuple[float, float, float]
    """min, median, max"""
    reference_milliseconds: tuple[float, float, float] | None
    share_of_copy: float | None
    share_of_peak: float | None
    goal: str
    is_met: bool | None

    @property
    def times_faster(self) -> float | None:
        return self.reference_milliseconds and self.reference_milliseconds[1] / self.milliseconds[1]


class Inputs:
    """Random tensors of a shape, and their routing."""

    def __init__(self, shape: Shape, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        tokens, hidden = shape.num_tokens, shape.hidden
        intermediate, num_experts = shape.intermediate, shape.num_experts

        def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(sizes, generator=generator, device=device).to(dtype)

        self.logits_TE = normal(tokens, num_experts, dtype=torch.float32).requires_grad_()
        self.bias_E = 0.1 * normal(num_experts, dtype=torch.float32)
        self.weights_TK, self.ids_TK = choose_experts.__wrapped__(  # type: ignore[attr-defined]
            self.logits_TE.detach(), None, top_k=shape.top_k, scoring="softmax", normalize_top_k=True
        )
        self.routing = sort_by_expert.__wrapped__(self.ids_TK, num_experts)  # type: ignore[attr-defined]
        self.probs_R = self.weights_TK.flatten().index_select(0, self.routing.slot_of_row_R)
        num_rows = self.probs_R.shape[0]
        self.x_TD, self.grad_y_TD = normal(tokens, hidden), normal(tokens, hidden)
        self.rows_RD = normal(num_rows, hidden)
        self.h_RH, self.grad_RI = normal(num_rows, 2 * intermediate), normal(num_rows, intermediate)
        self.gate_up_EHD = (normal(num_experts, 2 * intermediate, hidden) * hidden**-0.5).requires_grad_()
        self.down_EDI = (normal(num_experts, hidden, intermediate) * intermediate**-0.5).requires_grad_()


def memory_cases(given: Inputs) -> Iterator[Case]:
    """Bound by memory."""
    routing, rows = given.routing, given.rows_RD.numel() * 2
    tokens, channels = given.x_TD.numel() * 2, given.grad_RI.numel() * 2
    goal = f">= {COPY_GOAL:.0%} of copy"

    def case(name: str, function: Any, *args: Any, num_bytes: int, tolerance: float = 0.0) -> Case:
        return Case(
            name=name,
            run=partial(function, *args),
            reference=partial(function.__wrapped__, *args),
            tolerance=tolerance,
            num_bytes=num_bytes,
            goal=goal,
            is_met=lambda figures: (figures.share_of_copy or 0.0) >= COPY_GOAL,
        )

    yield case("permute", spread_rows, given.x_TD, *routing[1:3], num_bytes=tokens + rows)
    yield case("combine", add_rows, given.rows_RD, routing.row_of_slot_TK, num_bytes=tokens + rows)
    # One unit in the last place of BF16.
    yield case("swiglu", swiglu_prob, given.h_RH, given.probs_R, num_bytes=3 * channels, tolerance=8e-3)
    backward = (given.grad_RI, given.h_RH, given.probs_R)
    yield case("swiglu backward", swiglu_prob_backward, *backward, num_bytes=6 * channels, tolerance=8e-3)


def routing_cases(given: Inputs, shape: Shape) -> Iterator[Case]:
    """Bound by launches and latency."""
    num_slots = given.ids_TK.numel()
    yield Case(
        name=f"sort of {num_slots:,} slots",
        run=lambda: sort_by_expert(given.ids_TK, shape.num_experts),
        reference=lambda: sort_by_expert.__wrapped__(given.ids_TK, shape.num_experts),  # type: ignore[attr-defined]
        goal=f"<= {SORT_GOAL_MICROSECONDS:.0f} us per 262,144 slots",
        is_met=lambda figures: figures.milliseconds[1] * 1e3 <= SORT_GOAL_MICROSECONDS * max(1.0, num_slots / 2**18),
    )
    groups = {"num_groups": 8, "top_k_groups": 4} if shape.num_experts % 8 == 0 else {}
    rule = {"top_k": shape.top_k, "scoring": "sigmoid", "normalize_top_k": True, "routed_scaling": 2.5, **groups}

    def route(function: Any) -> tuple[Tensor, ...]:
        weights_TK, ids_TK = function(given.logits_TE, given.bias_E, **rule)
        return ids_TK, weights_TK.detach(), *torch.autograd.grad(weights_TK, given.logits_TE, given.weights_TK)

    yield Case(
        name="router, forward and backward",
        run=partial(route, choose_experts),
        reference=partial(route, choose_experts.__wrapped__),  # type: ignore[attr-defined]
        tolerance=1e-5,
        comparable=tokens_with_the_same_experts,
    )


def tokens_with_the_same_experts(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """Scores that differ in their last bit change places in a token of ten thousand or so; in more, all must agree."""
    is_same_T = (actual[0] == expected[0]).all(dim=1)
    if is_same_T.float().mean() < 0.999:
        return actual, expected
    return tuple(x[is_same_T] for x in actual), tuple(x[is_same_T] for x in expected)


class Exchange:
    """Copies of tokens to the ranks of their experts, and sums of their experts' rows on the way back."""

    def __init__(self, given: Inputs, shape: Shape, device: str) -> None:
        self.num_peers = math.gcd(MAX_PEERS, shape.num_experts)
        self.given, self.device = given, device
        ranks_P = torch.arange(self.num_peers, dtype=torch.int32, device=device)
        rank_TK = (given.ids_TK // (shape.num_experts // self.num_peers)).int()
        is_of_expert_TPK = rank_TK[:, None, :] == ranks_P[:, None]
        goes_TP = is_of_expert_TPK.any(2)
        self.rank_TP = ranks_P.where(goes_TP, -1)
        self.place_TP = (goes_TP.cumsum(0) - 1).int()
        # On the way back, copy t * P + p is of token t, which began on rank t % P.
        self.row_of_slot_CK = given.routing.row_of_slot_TK[:, None, :].where(is_of_expert_TPK, -1).flatten(0, 1)
        tokens_T1 = torch.arange(shape.num_tokens, dtype=torch.int32, device=device)[:, None]
        self.home_C = (tokens_T1 % self.num_peers).where(goes_TP, -1).flatten()
        self.place_C = (tokens_T1 // self.num_peers * self.num_peers + ranks_P).flatten()
        self.num_copies = int(goes_TP.sum())
        self.bytes_per_row = shape.hidden * 2

    def peers(self, num_bytes: int) -> Peers:
        memories = tuple(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.num_peers))
        return Peers(memories, torch.tensor([memory.data_ptr() for memory in memories], device=self.device))

    def copies(self, function: Any) -> Callable[[], tuple[Tensor, ...]]:
        peers = self.peers(len(self.given.x_TD) * self.bytes_per_row)

        def run() -> tuple[Tensor, ...]:
            function(self.given.x_TD, peers, 0, self.rank_TP, self.place_TP)
            return peers.memories

        return run

    def sums(self, function: Any) -> Callable[[], tuple[Tensor, ...]]:
        # Every rank has an equal share of the tokens, P places for each.
        peers = self.peers((len(self.given.x_TD) + self.num_peers) * self.bytes_per_row)

        def run() -> tuple[Tensor, ...]:
            function(self.given.rows_RD, peers, 0, self.row_of_slot_CK, self.home_C, self.place_C)
            return peers.memories

        return run

    def flags(self, signal: Any, wait: Any) -> Callable[[], tuple[Tensor, ...]]:
        peers = self.peers(4 * self.num_peers)
        flags_P = peers.memories[0].view(torch.int32)

        def run() -> tuple[Tensor, ...]:
            for rank in range(self.num_peers):
                signal(flags_P, peers, 0, rank, 7)
            wait(flags_P, 7, seconds=1.0)
            return peers.memories

        return run


def peer_cases(exchange: Exchange) -> Iterator[Case]:
    """One-sided copies, whose bytes are those read and those written."""
    given, written = exchange.given, exchange.num_copies * exchange.bytes_per_row
    for name, of, function, read in (
        ("put copies", exchange.copies, put_copies, given.x_TD.numel() * 2),
        ("put sums", exchange.sums, put_sums, given.rows_RD.numel() * 2),
    ):
        run, reference = of(function), of(function.__wrapped__)  # type: ignore[attr-defined]
        yield Case(
            name=name,
            run=run,
            reference=reference,
            num_bytes=read + written,
            goal=f">= {LINK_GOAL / 1e9:.0f} GB/s written",
            is_met=lambda figures: written / figures.milliseconds[1] * 1e3 >= LINK_GOAL,
        )
        if exchange.device == "cuda":
            yield Case(
                name=f"{name}, on every SM",
                run=partial(on_every_sm, run),
                num_bytes=read + written,
                goal=f">= {PUT_GOAL:.0%} of copy",
                is_met=lambda figures: (figures.share_of_copy or 0.0) >= PUT_GOAL,
            )
    yield Case(
        name=f"{exchange.num_peers} signals and a wait",
        run=exchange.flags(signal, wait),
        reference=exchange.flags(signal.__wrapped__, wait.__wrapped__),  # type: ignore[attr-defined]
    )


def on_every_sm(run: Callable[[], Any]) -> Any:
    from lightning_moe_strategy.kernels import triton_peer_copy

    num_sms = torch.cuda.get_device_properties().multi_processor_count
    with mock.patch.object(triton_peer_copy, "NUM_PROGRAMS", num_sms):
        return run()


def product_cases(given: Inputs, shape: Shape) -> Iterator[Case]:
    """Bound by arithmetic."""
    offsets_E, num_rows = given.routing.offsets_E, given.rows_RD.shape[0]
    applies = num_rows // shape.num_experts >= ROWS_OF_PRODUCT_GOAL
    weight = shape.hidden * shape.intermediate
    goal: dict[str, Any] = {
        "goal": f">= {PRODUCT_GOAL:.0%} of peak" if applies else "",
        "is_met": (lambda figures: (figures.share_of_peak or 0.0) >= PRODUCT_GOAL) if applies else None,
    }

    def product(name: str, left: Tensor, right: Tensor, flops: int) -> Case:
        run = partial(F.grouped_mm, left.detach(), right.detach(), offs=offsets_E)
        return Case(name=f"F.grouped_mm, {name}", run=run, num_flops=flops * num_rows, **goal)

    yield product("up", given.rows_RD, given.gate_up_EHD.mT, 4 * weight)
    yield product("down", given.grad_RI, given.down_EDI.mT, 2 * weight)
    yield product("weight gradient of up", given.h_RH.t(), given.rows_RD, 4 * weight)

    up = given.rows_RD.detach(), given.gate_up_EHD.detach().mT
    yield Case(
        name="persistent_products, up",
        run=partial(persistent_products, *up, offsets_E),
        reference=partial(F.grouped_mm, *up, offs=offsets_E),
        tolerance=1e-2,  # one rounding to BF16, of sums in two orders
        num_flops=4 * weight * num_rows,
    )
    yield Case(
        name="sum_outer_products, FP32",
        run=partial(sum_outer_products, given.h_RH, given.rows_RD.detach(), offsets_E),
        reference=partial(sum_outer_products.__wrapped__, given.h_RH, given.rows_RD.detach(), offsets_E),  # type: ignore[attr-defined]
        tolerance=1e-3,  # sums of thousands of products of size 1, in two orders
        num_flops=4 * weight * num_rows,
    )


def mlp_case(given: Inputs, shape: Shape) -> Case:
    """Permute, experts and combine, forward and backward, every gradient."""
    leaves = (given.x_TD.detach().requires_grad_(), given.weights_TK.detach().requires_grad_())

    def ours() -> tuple[Tensor, ...]:
        x_TD, weights_TK = leaves
        slots, tokens, row_of_slot_TK, offsets_E = sort_by_expert(given.ids_TK, shape.num_experts)
        rows_RD = gather_rows(x_TD, tokens, row_of_slot_TK)
        probs_R = gather_rows(weights_TK.view(-1, 1), slots, row_of_slot_TK.view(-1, 1)).squeeze(1)
        y_RD = expert_mlp(rows_RD, probs_R, given.gate_up_EHD, given.down_EDI, offsets_E, gathered_from=(x_TD, tokens))
        return gradients(sum_rows(y_RD, tokens, row_of_slot_TK))

    def eager() -> tuple[Tensor, ...]:
        x_TD, weights_TK = leaves
        _, order_R = given.ids_TK.flatten().sort(stable=True)
        counts_E = torch.histc(given.ids_TK.float(), bins=shape.num_experts, min=0, max=shape.num_experts)
        offsets_E = counts_E.cumsum(0).int()
        h_RH = F.grouped_mm(x_TD[order_R // shape.top_k], given.gate_up_EHD.mT, offs=offsets_E)
        gate_RI, up_RI = h_RH.chunk(2, dim=-1)
        y_RD = F.grouped_mm(F.silu(gate_RI) * up_RI, given.down_EDI.mT, offs=offsets_E)
        y_RD = y_RD * weights_TK.flatten()[order_R, None].to(y_RD.dtype)
        return gradients(y_RD[order_R.argsort()].view(*given.ids_TK.shape, -1).sum(1))

    def gradients(y_TD: Tensor) -> tuple[Tensor, ...]:
        inputs = (*leaves, given.gate_up_EHD, given.down_EDI)
        return (y_TD.detach(), *torch.autograd.grad(y_TD, inputs, given.grad_y_TD))

    return Case(
        name="expert MLP, forward and backward",
        run=ours,
        reference=eager,
        tolerance=0.1,  # BF16 products whose activations were rounded before the probability or after it
        num_flops=18 * given.rows_RD.shape[0] * shape.hidden * shape.intermediate,
        goal=f">= {MLP_GOAL} x eager",
        is_met=lambda figures: (figures.times_faster or 0.0) >= MLP_GOAL,
    )


def cases(shape: Shape, device: str) -> Iterator[Case]:
    given = Inputs(shape, device)
    yield from memory_cases(given)
    yield from routing_cases(given, shape)
    yield from peer_cases(Exchange(given, shape, device))
    yield from product_cases(given, shape)
    yield mlp_case(given, shape)


def difference(case: Case) -> str | None:
    """Where a kernel differs from its reference, or None."""
    if case.reference is None:
        return None
    actual, expected = case.comparable(case.run(), case.reference())
    try:
        torch.testing.assert_close(actual, expected, rtol=case.tolerance, atol=case.tolerance)
    except AssertionError as error:
        return f"{case.name}: {error}"
    return None


def measure(case: Case, timer: Timer, *, copy_bytes_per_second: float, peak_flops: float) -> Figures:
    def spread(function: Callable[[], Any]) -> tuple[float, float, float]:
        seconds = timer(function)
        return min(seconds) * 1e3, statistics.median(seconds) * 1e3, max(seconds) * 1e3

    milliseconds = spread(case.run)
    median = milliseconds[1] / 1e3
    figures = Figures(
        name=case.name,
        milliseconds=milliseconds,
        reference_milliseconds=spread(case.reference) if case.reference else None,
        share_of_copy=case.num_bytes / median / copy_bytes_per_second if case.num_bytes else None,
        share_of_peak=case.num_flops / median / peak_flops if case.num_flops else None,
        goal=case.goal,
        is_met=None,
    )
    return Figures(**{**vars(figures), "is_met": case.is_met(figures) if case.is_met else None})


def line(figures: Figures) -> str:
    low, median, high = figures.milliseconds
    shares = [
        f"{share:4.0%} of {what}"
        for share, what in ((figures.share_of_copy, "copy"), (figures.share_of_peak, "peak"))
        if share is not None
    ]
    faster = f"{figures.times_faster:5.2f} x reference" if figures.times_faster else ""
    verdict = {True: "met", False: "MISSED", None: ""}[figures.is_met]
    return (
        f"  {figures.name:34} {low:8.3f} {median:8.3f} {high:8.3f} ms  {', '.join(shares):13} {faster:18} "
        f"{figures.goal} {verdict}"
    ).rstrip()


def cuda_timer(function: Callable[[], Any]) -> list[float]:
    flushed = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    pairs = []
    for run in range(NUM_WARMUPS + NUM_RUNS):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        if run >= NUM_WARMUPS:
            pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def limits(timer: Timer, device: str, *, copied_bytes: int = 2**30, side: int = 8192) -> dict[str, float]:
    """What this GPU reaches at best: bytes read and written per second, and BF16 FLOP per second."""
    source, target = (torch.empty(copied_bytes, dtype=torch.int8, device=device) for _ in range(2))
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return {
        "copy_bytes_per_second": 2 * copied_bytes / min(timer(lambda: target.copy_(source))),
        "peak_flops": 2 * side**3 / min(timer(lambda: left @ right)),
    }


def check(shape: Shape, timer: Timer, device: str, best: dict[str, float]) -> tuple[list[str], list[Figures]]:
    """Differences and figures of all cases, printed as they come."""
    print(f"{shape.name}: {shape.num_tokens} tokens, top {shape.top_k} of {shape.num_experts}")
    differences, figures = [], []
    for case in cases(shape, device):
        found = difference(case)
        differences += [found] if found else []
        figures.append(measure(case, timer, **best))
        print(f"{line(figures[-1])}{'  DIFFERS' if found else ''}", flush=True)
    return differences, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the figures go")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA GPU: nothing to check. The CPU runs the torch references of these kernels.")
        return 0
    import triton

    device, best = torch.cuda.get_device_name(), limits(cuda_timer, "cuda")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    print(f"{device}, {versions}")
    print(f"copy {best['copy_bytes_per_second'] / 1e12:.2f} TB/s, matmul {best['peak_flops'] / 1e12:.0f} TFLOP/s")
    results = {shape.name: check(shape, cuda_timer, "cuda", best) for shape in SHAPES}
    report = {
        "device": device,
        "versions": versions,
        "limits": best,
        "figures": {name: [asdict(each) for each in figures] for name, (_, figures) in results.items()},
        "differences": {name: differences for name, (differences, _) in results.items()},
    }
    arguments.json.write_text(json.dumps(report, indent=1))
    for name, (differences, _) in results.items():
        for each in differences:
            print(f"\n{name}, {each}")
    return 1 if any(differences for differences, _ in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
