"""Causal attention of one long document over cp ranks: ours, contiguous parts, torch's ring, and Ulysses.

    python benchmarks/context_parallel.py [--tokens 16384] [--repeats 5]

The document is the longest of the default corpus, its keys and values made of its tokens. One process per rank, gloo,
one thread each; every candidate computes the same output and gradients (checked first), forward and backward.
Time is process time, communication included, of the slowest rank of each round; the candidates take turns. Bytes are
those that one rank receives from others, counted below autograd at every collective. A row of packed documents is timed
too, zig-zag against contiguous; the others have no documents.

torch's ``context_parallel`` does not run on a CPU (its error is printed). What it would run is its ring loop, which is
called here with torch's CPU kernel: all-to-all is its ring, all-gather its default.

Shapes: S tokens of the document, L of one rank, H query heads, G key heads, D channels, R ranks.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.collectives import all_to_all_rows
from lightning_moe_strategy.context_parallel.layout import SequenceLayout, contiguous, take_segments, zigzag
from lightning_moe_strategy.context_parallel.softmax import causal_attention
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT, Documents
from lightning_moe_strategy.models.corpus import Corpus
from lightning_moe_strategy.models.token_store import open_store

VOCABULARY, HEAD_DIM = 1024, 32
HEADS = {"grouped queries": (4, 2), "every head its own key": (4, 4), "one key head": (8, 1)}
"""Query and key heads; the first pair is timed."""

CHECKED_TOKENS = 512
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""Largest error over the largest value; BF16 has eight bits, and Ulysses adds the gradients of repeated keys in it."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From this rank's query [1, H, L, D], key and value [1, G, L, D] to its output [1, H, L, D]."""


@dataclass(frozen=True)
class Candidate:
    layout: Callable[[int, int], SequenceLayout]
    """From tokens and ranks."""
    attention: Callable[[SequenceLayout], Attention]


def ours(documents: Documents = ONE_DOCUMENT) -> dict[str, Candidate]:
    """The package's attention in two layouts, by name."""

    def attention(layout: SequenceLayout) -> Attention:
        return lambda q, k, v: causal_attention(q, k, v, layout=layout, group=_world(), documents=documents)

    return {"zig-zag, ours": Candidate(zigzag, attention), "contiguous, ours": Candidate(contiguous, attention)}


def candidates() -> dict[str, Candidate]:
    """Ours and the others."""
    found = ours() | {"Ulysses": Candidate(contiguous, lambda layout: ulysses)}
    for name, method in (("torch's ring", "alltoall"), ("torch's all-gather", "allgather")):
        if _torch_ring() is not None:
            found[name] = Candidate(zigzag, lambda layout, method=method: _ring_attention(method))
    return found


# Ulysses


def ulysses(query_1HLD: Tensor, key_1GLD: Tensor, value_1GLD: Tensor) -> Tensor:
    """Each rank attends with its share of the heads over all tokens: an all-to-all before, one after.

    Key heads that are fewer than ranks are repeated until every rank has one.
    """
    num_ranks, num_key_heads = _world().size(), key_1GLD.shape[1]
    copies = max(1, num_ranks // num_key_heads)
    key, value = (x.repeat_interleave(copies, 1) for x in (key_1GLD, value_1GLD))
    query, key, value = (_heads_to_tokens(x) for x in (query_1HLD, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    return _tokens_to_heads(out)


def _heads_to_tokens(x_1HLD: Tensor) -> Tensor:
    """All tokens of this rank's heads: [1, H / R, S, D]."""
    pieces_RHLD = _exchanged(x_1HLD[0].unflatten(0, (_world().size(), -1)))
    return pieces_RHLD.transpose(0, 1).flatten(1, 2)[None]


def _tokens_to_heads(x_1HSD: Tensor) -> Tensor:
    """The way back: [1, H, L, D]."""
    pieces_RHLD = x_1HSD[0].unflatten(1, (_world().size(), -1)).transpose(0, 1)
    return _exchanged(pieces_RHLD).flatten(0, 1)[None]


def _exchanged(pieces: Tensor) -> Tensor:
    one_each = [1] * _world().size()
    return all_to_all_rows(pieces, one_each, one_each, _world())


# torch's ring


def _torch_ring() -> Any:
    """The module of torch's ring loop (private; seen in 2.13), or None where this torch has it elsewhere."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:
        return None
    return _attention


def _ring_attention(method: str) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ring = _torch_ring()
        ring.set_rotate_method(method)
        return _TorchRing.apply(query, key, value)

    return attention


class _TorchRing(torch.autograd.Function):
    """torch's loop over the ranks' keys, with torch's flash attention for CPU as its kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = _torch_ring()._templated_ring_attention(_world(), 2, kernel, query, key, value, is_causal=True)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = _torch_ring()._templated_ring_attention_backward(
            _world(), 2, _ring_backward, grad_out, "grad_out", query, key, value, out, lse, is_causal=True
        )
        return tuple(grads[:3])


def _ring_backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )


def why_no_public_context_parallel() -> str:
    """What ``torch.distributed.tensor.experimental.context_parallel`` says here to a forward of attention."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (_world().size(),))
    buffers = [torch.randn(1, 4, CHECKED_TOKENS, HEAD_DIM) for _ in range(3)]
    answers = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        try:
            with sdpa_kernel(backend), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                F.scaled_dot_product_attention(*buffers, is_causal=True)
            answers.append(f"{backend.name}: runs")
        except (RuntimeError, NotImplementedError) as error:
            answers.append(f"{backend.name}: {type(error).__name__}: {error}")
    return "; ".join(answers)


# One rank


class ReceivedBytes(OperationMode):
    """Bytes that this rank receives from others, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, int] = {}

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        if operation.namespace in ("c10d", "_c10d_functional"):
            name = operation._schema.name.partition("::")[2]
            kind, num_bytes = self._received(name, args, result)
            if num_bytes:
                self.by_kind[kind] = self.by_kind.get(kind, 0) + num_bytes
        return result

    def _received(self, name: str, args: tuple[Any, ...], result: Any) -> tuple[str, int]:
        others, rank = _world().size() - 1, _world().rank()
        if name == "_allgather_base_":
            return "all-gather", others * args[1].nbytes
        if name == "all_gather_into_tensor":
            return "all-gather", others * args[0].nbytes
        if name == "_reduce_scatter_base_":
            return "reduce-scatter", others * args[0].nbytes
        if name == "alltoall_base_":
            output, splits = args[0], args[3] or [1] * (others + 1)
        elif name == "all_to_all_single":
            output, splits = result, args[1]
        elif name in ("wait_tensor", "_wrap_tensor_autograd"):
            return "", 0
        else:
            raise RuntimeError(f"{name} is a collective whose bytes are not counted; add it to ReceivedBytes.")
        return "all-to-all", output.nbytes * (sum(splits) - splits[rank]) // sum(splits)


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Check, count and time every candidate; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    document_S, packed_S, starts = torch.load(Path(folder, "tokens.pt"))
    dtype = getattr(torch, arguments.dtype)
    results = {
        "refusal": why_no_public_context_parallel(),
        "bytes": {kind: check(document_S[:CHECKED_TOKENS], heads, dtype) for kind, heads in HEADS.items()},
        "document": time_in_turns(candidates(), document_S, dtype, arguments.repeats),
        "packed": time_in_turns(ours((tuple(starts),)), packed_S, dtype, arguments.repeats),
    }
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def check(tokens_S: Tensor, heads: tuple[int, int], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Compare every candidate with one process in FP32; bytes received per token of the document, by collective."""
    given = query_key_value(tokens_S, heads, dtype)
    whole = [x.detach().float().requires_grad_() for x in given]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    grad = torch.linspace(-1, 1, expected.numel()).view_as(expected).to(dtype)
    expected.backward(grad.float())
    found = {}
    for name, candidate in candidates().items():
        layout = candidate.layout(len(tokens_S), _world().size())
        own = layout.segments[_world().rank()]
        local = [take_segments(x.detach(), 2, own).clone().requires_grad_() for x in given]
        with ReceivedBytes() as received:
            out = candidate.attention(layout)(*local)
            out.backward(take_segments(grad, 2, own))
        for mine, theirs in zip((out, *(x.grad for x in local)), (expected, *(x.grad for x in whole)), strict=True):
            error = (mine - take_segments(theirs, 2, own)).abs().max() / theirs.abs().max()
            assert error < TOLERANCES[dtype], f"{name} is off by {float(error):.1e}"
        found[name] = {kind: total / len(tokens_S) for kind, total in received.by_kind.items()}
    return found


def time_in_turns(
    timed: dict[str, Candidate], tokens_S: Tensor, dtype: torch.dtype, repeats: int
) -> dict[str, list[float]]:
    """Process seconds of the slowest rank, forward and backward, each round after one of warm-up."""
    whole = query_key_value(tokens_S, next(iter(HEADS.values())), dtype)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for round_number in range(repeats + 1):
        for name, candidate in timed.items():
            layout = candidate.layout(len(tokens_S), _world().size())
            own = layout.segments[_world().rank()]
            local = [take_segments(x.detach(), 2, own).clone().requires_grad_() for x in whole]
            dist.barrier()
            start = time.process_time()
            out = candidate.attention(layout)(*local)
            out.backward(torch.ones_like(out))
            spent = torch.tensor(time.process_time() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if round_number:
                seconds[name].append(float(spent))
    return seconds


def query_key_value(tokens_S: Tensor, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query [1, H, S, D], key and value [1, G, S, D] of the document's tokens: a row of a table each."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_key_heads = heads
    tables = [torch.randn(VOCABULARY, n * HEAD_DIM, generator=generator) for n in (num_heads, *[num_key_heads] * 2)]
    rows = (table[tokens_S].unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)[None] for table in tables)
    return [x.to(dtype).contiguous().requires_grad_() for x in rows]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# All ranks


def longest_and_packed(folder: str, num_tokens: int, multiple: int) -> tuple[Tensor, Tensor, list[int]]:
    """At most ``num_tokens`` of the default corpus's longest document; a row of packed ones four times as long, because
    attention inside of them is cheaper; and where those start."""
    store = open_store(Path(folder), Corpus(), vocab_size=VOCABULARY, validation_fraction=0.0)
    tokens = torch.from_numpy(store.tokens("train").astype("int64"))
    starts: list[int] = store.document_starts("train").tolist()
    start, end = max(zip(starts, starts[1:], strict=False), key=lambda span: span[1] - span[0])
    length = min(num_tokens, end - start) // multiple * multiple
    return tokens[start : start + length], tokens[: 4 * length], [start for start in starts if start < 4 * length]


def print_results(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"torch {torch.__version__}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, ", end="")
    print(f"{os.cpu_count()} cores, {' '.join(sys.argv)}")
    print(f"torch's context_parallel on a CPU: {results['refusal']}")
    for kind, (num_heads, num_key_heads) in HEADS.items():
        print(
            f"Bytes received per rank and token, {kind}: {num_heads} heads, {num_key_heads} of keys, {arguments.dtype}"
        )
        for name, by_collective in results["bytes"][kind].items():
            parts = ", ".join(f"{collective} {value:.1f}" for collective, value in by_collective.items())
            print(f"  {name:<20}{sum(by_collective.values()):8.1f}   {parts}")
    print(f"Process seconds of the slowest of {arguments.ranks} ranks, forward and backward: the longest document")
    print_seconds(results["document"])
    print("The same for a row of packed documents, four times as long")
    print_seconds(results["packed"])


def print_seconds(seconds: dict[str, list[float]]) -> None:
    """Min / median / max, of the ratio to the first candidate too, round by round."""
    base = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratios = [time / of_base for time, of_base in zip(times, base, strict=True)]
        print(
            f"  {name:<20}{min(times):7.2f} / {median(times):6.2f} / {max(times):6.2f} s   "
            f"{min(ratios):.2f} / {median(ratios):.2f} / {max(ratios):.2f} x zig-zag"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the document at most (%(default)s)")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        document_S, packed_S, starts = longest_and_packed(folder, arguments.tokens, 2 * arguments.ranks)
        torch.save([document_S.clone(), packed_S.clone(), starts], Path(folder, "tokens.pt"))
        mp.start_processes(run_rank, (arguments, folder), nprocs=arguments.ranks, start_method="spawn")
        print_results(json.loads(Path(folder, "results.json").read_text()), arguments)


if __name__ == "__main__":
    main()
