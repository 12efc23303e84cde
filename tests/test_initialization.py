"""Models built on the meta device: the same numbers for every layout, and nothing forgotten."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy.initialization import materialize
from lightning_moe_strategy.mesh import ParallelDims, build_dense_meshes, build_expert_meshes
from lightning_moe_strategy.sharding import shard
from lightning_moe_strategy.units import plan_units
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, StackedExperts

CPU = torch.device("cpu")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, StackedExperts) or hasattr(module, "_is_expert_parallel")
    }


def initialize_sharded(model_class: type, degrees: dict[str, int]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = model_class()
    experts = experts_of(model)
    dims = ParallelDims(**degrees).resolve(torch.distributed.get_world_size(), local_world_size=4)
    minute = timedelta(minutes=1)
    dense, expert = build_dense_meshes(dims, "cpu", minute), build_expert_meshes(dims, "cpu", minute)
    units = plan_units(model, experts, separate_routers=False)
    shard(units, dense=dense, expert=expert, compute_dtype=None)
    materialize(model, CPU, seed=7, experts=experts)
    full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return full | {name: buffer.clone() for name, buffer in model.named_buffers()}


LAYOUTS: list[dict[str, int]] = [
    dict(fsdp=4, e_fsdp=1, ep=4),
    dict(fsdp=2, cp=2, e_fsdp=2, ep=2),
    dict(d_rep=2, fsdp=2, e_rep=2, e_fsdp=2, ep=1),
    dict(d_rep=4, fsdp=1, e_fsdp=4, ep=1),
]


@pytest.mark.parametrize("model_class", [PlainLanguageModel, HuggingFaceLanguageModel])
def test_meta_initialization_is_the_same_for_every_layout(model_class, ranks4):
    with torch.device("meta"):
        model = model_class()
    materialize(model, CPU, seed=7, experts=experts_of(model))
    reference: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for degrees in LAYOUTS:
        for values in ranks4(initialize_sharded, model_class, degrees):
            assert values.keys() == reference.keys()
            for name, value in values.items():
                assert torch.equal(value, reference[name]), f"{name} differs at {degrees}"


def test_other_seeds_and_other_experts_get_other_numbers():
    def build(seed: int) -> PlainLanguageModel:
        with torch.device("meta"):
            model = PlainLanguageModel()
        materialize(model, CPU, seed=seed, experts=experts_of(model))
        return model

    experts = build(1).decoder.blocks[0].sparse.experts
    assert not torch.equal(experts.up[0], experts.up[1])
    assert not torch.equal(experts.up, build(2).decoder.blocks[0].sparse.experts.up)


def test_hugging_face_buffers_survive_meta_initialization():
    with torch.device("meta"):
        model = HuggingFaceLanguageModel()
    materialize(model, CPU, seed=1, experts=experts_of(model))
    expected = dict(HuggingFaceLanguageModel().named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(2, 2)


class HalfDone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(("module_class", "named"), [(Forgetful, "scale"), (HalfDone, "frequencies")])
def test_a_tensor_nobody_initialises_is_an_error_that_names_it(module_class, named):
    with torch.device("meta"):
        model = nn.ModuleDict({"net": module_class()})
    with pytest.raises(RuntimeError, match=rf"net\.{named}.*reset_parameters"):
        materialize(model, CPU, seed=1, experts={})


def test_what_a_checkpoint_will_give_needs_no_initialiser():
    with torch.device("meta"):
        model = Forgetful()
    materialize(model, CPU, seed=1, experts={}, values_will_be_loaded=True)
    assert not any(parameter.is_meta for parameter in model.parameters())


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_tied_through_meta_initialization():
    with torch.device("meta"):
        model = TiedHead()
    materialize(model, CPU, seed=1, experts={})
    assert model.head.weight is model.embedding.weight


def place_experts(degrees: dict[str, int]) -> dict[str, Any]:
    model = PlainLanguageModel(num_experts=4)
    dims = ParallelDims(**degrees).resolve(4, local_world_size=4)
    minute = timedelta(minutes=1)
    dense, expert = build_dense_meshes(dims, "cpu", minute), build_expert_meshes(dims, "cpu", minute)
    experts = experts_of(model)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard(plan_units(model, experts, separate_routers=False), dense=dense, expert=expert, compute_dtype=None)
    parameter = model.decoder.blocks[0].sparse.experts.up
    assert isinstance(parameter, DTensor)
    equal = all(torch.equal(p.full_tensor(), whole[name]) for name, p in model.named_parameters())
    return {"shape": tuple(parameter.shape), "local": tuple(parameter.to_local().shape), "equal": equal}


def test_experts_are_dtensors_of_the_whole_shape_and_hold_the_same_values(ranks4):
    for degrees, local in [
        (dict(fsdp=4, e_fsdp=2, ep=2), (1, 32, 16)),
        (dict(fsdp=4, e_fsdp=4, ep=1), (1, 32, 16)),
        (dict(fsdp=4, e_fsdp=1, ep=4), (1, 32, 16)),
    ]:
        for placed in ranks4(place_experts, degrees):
            assert placed == {"shape": (4, 32, 16), "local": local, "equal": True}


def place_two_experts() -> tuple[int, ...]:
    model = PlainLanguageModel(num_experts=2)
    dims = ParallelDims(fsdp=4, e_fsdp=4, ep=1).resolve(4, local_world_size=4)
    minute = timedelta(minutes=1)
    dense, expert = build_dense_meshes(dims, "cpu", minute), build_expert_meshes(dims, "cpu", minute)
    shard(
        plan_units(model, experts_of(model), separate_routers=False),
        dense=dense,
        expert=expert,
        compute_dtype=None,
    )
    return tuple(model.decoder.blocks[0].sparse.experts.up.to_local().shape)


def test_fewer_experts_than_shards_are_cut_along_the_last_dim(ranks4):
    assert ranks4(place_two_experts) == [(2, 32, 4)] * 4
