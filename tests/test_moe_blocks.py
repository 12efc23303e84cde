"""Each block with experts in transformers: on two ep ranks what it is in one process, or refused with its reason."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, find_experts, require_experts
from lightning_moe_strategy.sharding import spread_experts
from tests.moe_blocks import HIDDEN, NUM_EXPERTS, call, found_blocks, make_block

# FP32: the probability acts before the down projection, theirs after it; sums over ranks are regrouped.
TOLERANCE = 3e-6

REFUSED = {
    "DbrxFFN": "its weights are not stacked in one tensor per projection",
    "JetMoeMoE": "its forward takes (inputs, expert_size)",
    "JetMoeMoA": "its forward takes (inputs, expert_size)",
    "Llama4TextMoe": "its forward takes (hidden_states)",
    "LongcatFlashMoE": "it has no attribute num_experts",
    "MuseSparkMoE": "its parameter post_expert_norm.weight belongs to a submodule, which all experts share",
    "NllbMoeSparseMLP": "its 5 experts are separate modules in a NllbMoeExperts",
    "SwitchTransformersSparseMLP": "its 4 experts are separate modules in a SwitchTransformersExperts",
    "VitPoseBackboneMoeMLP": "its 4 experts are separate modules in a VitPoseNaiveMoe",
}

BLOCKS = [pytest.param(*block, id=block[1]) for block in found_blocks() if block[1] not in REFUSED]


def results_of(block: Any, x_BSD: Tensor) -> dict[str, Tensor]:
    x_BSD = x_BSD.clone().requires_grad_()
    out_BSD = call(block, x_BSD)
    out_BSD.square().sum().backward()
    grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": out_BSD.detach(), "input": x_BSD.grad, **grads}


def largest_error(family: str, name: str) -> tuple[float, str]:
    """Relative to the norm, of output and gradients: this rank has one of two sequences."""
    torch.manual_seed(2)
    whole_BSD = torch.randn(2, 6, HIDDEN)
    block = make_block(family, name)
    expected = results_of(copy.deepcopy(block), whole_BSD)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    (experts,) = find_experts(block).values()
    attach(experts, AllToAllDispatcher(NUM_EXPERTS, mesh.get_group()))
    spread_experts(experts, mesh)
    own = slice(dist.get_rank(), dist.get_rank() + 1)
    errors = []
    for key, value in results_of(block, whole_BSD[own]).items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif key not in ("output", "input"):
            dist.all_reduce(value)
        wanted = expected[key][own] if key in ("output", "input") else expected[key]
        errors.append((float((value - wanted).norm() / (wanted.norm() + 1e-12)), key))
    return max(errors)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), BLOCKS)
def test_a_block_on_two_ranks_equals_one_process(ranks2: Any, family: str, name: str):
    for error, where in ranks2(largest_error, family, name):
        assert error < TOLERANCE, where


@pytest.mark.parametrize(
    ("family", "name"), [block for block in found_blocks() if block[1] in REFUSED], ids=lambda value: value
)
def test_a_block_that_cannot_be_spread_says_why(family: str, name: str):
    with pytest.raises(ValueError) as refusal:
        require_experts(make_block(family, name), ep=2)
    assert REFUSED[name] in str(refusal.value)


def test_most_blocks_of_transformers_run():
    assert len(found_blocks()) >= 77 and len(BLOCKS) >= 65
