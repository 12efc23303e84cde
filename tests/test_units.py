"""How arbitrary module trees are cut into units."""

import pytest
import torch
from torch import nn

from lightning_moe_strategy.units import find_blocks, find_routers, plan_units
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, StackedExperts


def experts_of(root: nn.Module, marker: type = StackedExperts) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules() if isinstance(module, marker)}


def kinds(root: nn.Module, experts: dict[str, nn.Module], separate_routers: bool = True) -> dict[str, str]:
    return {unit.name: unit.kind for unit in plan_units(root, experts, separate_routers=separate_routers)}


def test_a_plain_decoder_is_cut_into_embedding_blocks_experts_routers_and_head():
    model = PlainLanguageModel(num_layers=1)
    assert kinds(model, experts_of(model)) == {
        "": "rest",
        "decoder.embedding": "outer",
        "decoder.positions": "outer",
        "decoder.blocks.0": "block",
        "decoder.blocks.0.sparse.router": "router",
        "decoder.blocks.0.sparse.experts": "experts",
        "decoder.norm": "outer",
        "decoder.head": "outer",
    }


def test_routers_share_their_blocks_unit_when_there_is_one_dtype():
    model = PlainLanguageModel(num_layers=1)
    assert "decoder.blocks.0.sparse.router" not in kinds(model, experts_of(model), separate_routers=False)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_hugging_face_decoders_are_cut_at_their_layers(model_type):
    model = HuggingFaceLanguageModel(model_type)
    assert list(find_blocks(model)) == ["model.model.layers.0", "model.model.layers.1"]


def test_hugging_face_gates_are_found_as_routers():
    model = HuggingFaceLanguageModel("deepseek_v3")
    experts = {name: m for name, m in model.named_modules() if hasattr(m, "_is_expert_parallel")}
    assert list(find_routers(model, experts)) == ["model.model.layers.1.mlp.gate"]


def test_every_parameter_belongs_to_the_innermost_unit_around_it():
    model = HuggingFaceLanguageModel()
    experts = {name: m for name, m in model.named_modules() if hasattr(m, "_is_expert_parallel")}
    names = kinds(model, experts)
    assert names["model.lm_head"] == "outer" and names["model.model.embed_tokens"] == "outer"
    assert "model.model" not in names, "a parent without parameters of its own is no unit"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.embedding = nn.Embedding(8, 4)
        self.trunk.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.trunk.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.trunk.embedding(ids)
        for block in self.trunk.blocks:
            x = block(x)
        return self.head(x)


def test_tied_weights_fall_to_the_unit_of_their_common_parent():
    root = nn.ModuleDict({"net": Tied(), "other": nn.Linear(2, 2)})
    names = kinds(root, {})
    assert "net.trunk.embedding" not in names and "net.head" not in names
    assert names["net"] == "rest" and names["net.trunk.blocks.0"] == "block" and names["other"] == "outer"


def test_tied_weights_inside_one_block_leave_the_block_alone():
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    block[1].weight = block[0].weight
    names = kinds(nn.ModuleDict({"blocks": nn.ModuleList([block])}), {})
    assert names == {"": "rest", "blocks.0": "block"}


class WithOwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)) * self.scale


def test_a_parameter_a_parent_holds_itself_makes_the_parent_a_unit():
    assert kinds(nn.ModuleDict({"net": WithOwnParameter()}), {})["net"] == "rest"


def test_a_list_of_plain_layers_is_no_list_of_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {}
