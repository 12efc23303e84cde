"""The sort of `routing.sort_by_expert` as a counting sort on the GPU: nothing is read on the host.

Shapes: T tokens, K experts per token, E experts, R = T*K rows or slots, B blocks of slots, S slots of one block,
M of them ranked at a time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe_strategy.kernels.routing import Routing

# A slot finds its place among the equal ones before it by comparing with its whole block: S*S comparisons a block.
# 256 keeps that under 10 us of integer work for 262,144 slots on an H200 (reckoned), and the counts at E*R/256.
SLOTS_PER_BLOCK = 256
SLOTS_RANKED_AT_ONCE = 32


@triton.jit
def _load_experts(expert_ids_ptr, slots, num_slots, E: tl.constexpr):
    """Ids of slots, E for what is none: such slots sort last and take part in no expert's count."""
    experts = tl.load(expert_ids_ptr + slots, mask=slots < num_slots, other=E)
    return tl.where((experts >= 0) & (experts < E), experts, E).to(tl.int32)


# As in triton_rows.py, counts change from step to step.
@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _count_kernel(
    expert_ids_ptr, counts_ptr, num_slots, num_blocks, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    experts_S = _load_experts(expert_ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_slots, E)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins * num_blocks + block, tl.histogram(experts_S, BINS), mask=bins <= E)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _place_kernel(
    expert_ids_ptr,
    counts_ptr,
    ends_ptr,
    slot_of_row_ptr,
    token_of_row_ptr,
    row_of_slot_ptr,
    num_slots,
    num_blocks,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    block = tl.program_id(0)
    slots_S = block * BLOCK + tl.arange(0, BLOCK)
    experts_S = _load_experts(expert_ids_ptr, slots_S, num_slots, E)
    for start in tl.range(0, BLOCK, AT_ONCE):
        slots_M = block * BLOCK + start + tl.arange(0, AT_ONCE)
        experts_M = _load_experts(expert_ids_ptr, slots_M, num_slots, E)
        is_before_MS = (experts_M[:, None] == experts_S[None, :]) & (slots_S[None, :] < slots_M[:, None])
        is_slot_M = slots_M < num_slots
        count_M = experts_M * num_blocks + block
        first_row_M = tl.load(ends_ptr + count_M) - tl.load(counts_ptr + count_M)
        rows_M = first_row_M + tl.sum(is_before_MS.to(tl.int32), axis=1)
        tl.store(row_of_slot_ptr + slots_M, rows_M, mask=is_slot_M)
        tl.store(slot_of_row_ptr + rows_M, slots_M, mask=is_slot_M)
        tl.store(token_of_row_ptr + rows_M, slots_M // K, mask=is_slot_M)


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> Routing:
    """See `routing.sort_by_expert`; ids out of range end up behind the last offset."""
    expert_ids_TK = expert_ids_TK.contiguous()
    num_slots, (_, top_k) = expert_ids_TK.numel(), expert_ids_TK.shape
    num_blocks = max(1, triton.cdiv(num_slots, SLOTS_PER_BLOCK))

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=expert_ids_TK.device)

    counts_EB = indices(num_experts + 1, num_blocks)  # the last for what is no expert
    _count_kernel[(num_blocks,)](
        expert_ids_TK,
        counts_EB,
        num_slots,
        num_blocks,
        E=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=SLOTS_PER_BLOCK,
    )
    # Expert by expert, block by block: the running sum is where each block's rows of each expert end.
    ends_EB = counts_EB.view(-1).cumsum(0, dtype=torch.int32).view_as(counts_EB)
    slot_of_row_R, token_of_row_R, row_of_slot_TK = (
        indices(num_slots),
        indices(num_slots),
        indices(*expert_ids_TK.shape),
    )
    _place_kernel[(num_blocks,)](
        expert_ids_TK,
        counts_EB,
        ends_EB,
        slot_of_row_R,
        token_of_row_R,
        row_of_slot_TK,
        num_slots,
        num_blocks,
        K=top_k,
        E=num_experts,
        BLOCK=SLOTS_PER_BLOCK,
        AT_ONCE=SLOTS_RANKED_AT_ONCE,
    )
    return Routing(slot_of_row_R, token_of_row_R, row_of_slot_TK, ends_EB[:num_experts, -1].contiguous())
