"""Two processes that write into each other's memory with the Triton kernels, interpreted, against an all-to-all.

test_symm_mem.py runs this file in a process of its own with TRITON_INTERPRET=1: forward and backward of a layer, with
exact memory and with bounded, where every exchange goes through put_copies, put_sums, signal and wait of
kernels/triton_peer_copy.py.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.one_sided import OneSidedDispatcher
from lightning_moe_strategy.kernels import on_cuda, triton_peer_copy
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from tests.ranks import Ranks

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 2, 4, 2, 8, 8
ROUTINGS = ("random", "all to one", "empty rank")
KERNELS = ("put_copies", "put_sums", "signal", "wait")


def inputs_of_rank(routing: str, rank: int) -> tuple[Tensor, ...]:
    """x_TD, probs_TK, ids_TK, the gradient that comes back, and this rank's weights."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 0 if routing == "empty rank" and rank == 1 else 5 + rank
    ids_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    if routing == "all to one":
        ids_TK = ids_TK % (NUM_EXPERTS // NUM_RANKS)
    sizes = ((num_tokens, HIDDEN), (num_tokens, TOP_K), (num_tokens, HIDDEN))
    x_TD, probs_TK, grad_TD = (torch.randn(size, generator=generator) for size in sizes)
    local = NUM_EXPERTS // NUM_RANKS
    weights = (
        torch.randn(local, 2 * INTERMEDIATE, HIDDEN, generator=generator),
        torch.randn(local, HIDDEN, INTERMEDIATE, generator=generator),
    )
    return x_TD, probs_TK, ids_TK, grad_TD, *weights


def layer(dispatcher: Any, routing: str, *, is_bound: bool = False) -> list[Tensor]:
    """The result, and gradients of tokens, probabilities and weights."""
    x_TD, probs_TK, ids_TK, grad_TD, *weights = inputs_of_rank(routing, dist.get_rank())
    leaves = [tensor.requires_grad_() for tensor in (x_TD, probs_TK, *weights)]
    splits = dispatcher.bound(ids_TK, 1).join(0, 1).splits if is_bound else None
    plan = dispatcher.plan(ids_TK, splits)
    rows_RD, probs_R, offsets_L = dispatcher.dispatch(x_TD, probs_TK, plan)
    y_TD = dispatcher.combine(expert_mlp(rows_RD, probs_R, *weights, offsets_L), plan)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, grad_TD)]


def counting(calls: Counter[str], name: str) -> Callable[..., Any]:
    kernel = getattr(triton_peer_copy, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return kernel(*args, **kwargs)

    return run


def compared(routing: str, is_bound: bool) -> Counter[str]:
    """How often each Triton function ran."""
    assert on_cuda.IS_INTERPRETED
    expected, calls = layer(AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD), routing), Counter[str]()
    originals = {name: getattr(triton_peer_copy, name) for name in KERNELS}
    for name in KERNELS:
        setattr(triton_peer_copy, name, counting(calls, name))
    on_cuda._kernel.cache_clear()
    try:
        actual = layer(OneSidedDispatcher(NUM_EXPERTS, dist.group.WORLD), routing, is_bound=is_bound)
    finally:
        for name, original in originals.items():
            setattr(triton_peer_copy, name, original)
        on_cuda._kernel.cache_clear()
    for name, ours, theirs in zip(("y", "x", "probs", "gate_up", "down"), actual, expected, strict=True):
        assert torch.equal(ours, theirs), (routing, is_bound, name, (ours - theirs).abs().max())
    return calls


def main() -> None:
    ranks = Ranks(NUM_RANKS)
    try:
        for is_bound in (False, True):
            for routing in ROUTINGS:
                for calls in ranks(compared, routing, is_bound):
                    # Counts, ids, tokens and probabilities; gradients of results; and of probabilities back.
                    assert calls == Counter(put_copies=6, put_sums=2, signal=6, wait=6), calls
    finally:
        ranks.close()
    print("Triton's kernels ran and agreed with an all-to-all")


if __name__ == "__main__":
    main()
