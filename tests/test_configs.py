"""Every shipped configuration names things that exist and lays its ranks out completely."""

import importlib
import inspect
import math
from importlib.resources import files

import pytest
import yaml

from lightning_moe_strategy._lightning_compat import Trainer
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.config import ModelConfig

PATHS = {
    path.name.removesuffix(".yaml"): path
    for path in files("lightning_moe_strategy.configs").iterdir()
    if path.name.endswith(".yaml")
}
ALL = pytest.mark.parametrize("name", sorted(PATHS))

# The seed's plans: (d_rep, fsdp, cp), (e_fsdp, ep), tokens per sequence, tokens per GPU and micro-batch.
SEED = {
    "glm52_1m_256gpu": ((4, 1, 64), (4, 64), 1_048_576, 16_384),
    "glm52_256k_b300_256gpu": ((1, 32, 8), (32, 8), 262_144, 32_768),
    "glm52_1m_b300_2d_cp": ((4, 1, 64), (32, 8), 1_048_576, 16_384),
}


def load(name):
    return yaml.safe_load(PATHS[name].read_text())


def class_and_arguments(node):
    module, _, attribute = node["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), attribute), node["init_args"]


def resolved_dims(name):
    config = load(name)
    trainer, model = config["trainer"], config["model"]["init_args"]
    degrees = trainer["strategy"]["init_args"]
    sizes = model["config"] if "config" in model else vars(ModelConfig.resolve(model["model"]))
    world = trainer["devices"] * trainer.get("num_nodes", 1)
    dims = ParallelDims(**{axis: degree for axis, degree in degrees.items() if axis != "recompute"})
    return dims.resolve(world, local_world_size=trainer["devices"], num_experts=sizes["num_experts"]), world


def test_the_seeds_plans_and_the_tiny_runs_are_all_here():
    assert set(PATHS) >= {*SEED, "tiny_cpu", "tiny_hf_qwen3_moe"}


@ALL
def test_every_key_is_a_parameter_of_what_it_configures(name):
    config = load(name)
    assert set(config) == {"seed_everything", "trainer", "model", "data"}
    assert set(config["trainer"]) <= set(inspect.signature(Trainer.__init__).parameters)
    for node in (config["trainer"]["strategy"], config["model"], config["data"]):
        configured, init_args = class_and_arguments(node)
        assert set(init_args) <= set(inspect.signature(configured.__init__).parameters), configured


@ALL
def test_degrees_multiply_to_the_world_in_both_meshes(name):
    dims, world = resolved_dims(name)
    degrees = load(name)["trainer"]["strategy"]["init_args"]
    assert math.prod(degrees[axis] for axis in ("d_rep", "fsdp", "cp")) == world
    assert math.prod(degrees[axis] for axis in ("e_fsdp", "ep")) == world
    assert dims.world_size == world


@ALL
def test_model_and_data_agree_on_the_vocabulary_and_build(name):
    model_class, model = class_and_arguments(load(name)["model"])
    data_class, data = class_and_arguments(load(name)["data"])
    data_class(**data)
    if "config" in model:
        pytest.importorskip("transformers")
        assert model["config"]["vocab_size"] == data["vocab_size"]
        assert model["config"]["max_position_embeddings"] >= data["sequence_length"]
        model_class(**model)
    else:
        assert ModelConfig.resolve(model["model"]).vocab_size == data["vocab_size"]


@pytest.mark.parametrize("name", SEED)
def test_a_plan_is_the_seeds(name):
    dense, expert, sequence_length, tokens_per_gpu = SEED[name]
    config, (dims, world) = load(name), resolved_dims(name)
    data = config["data"]["init_args"]
    assert world == 256
    assert ((dims.d_rep, dims.fsdp, dims.cp), (dims.e_fsdp, dims.ep)) == (dense, expert)
    assert dims.cp_inter == (8 if name.endswith("2d_cp") else 1)
    assert config["trainer"]["precision"] == "bf16-mixed"
    assert config["trainer"]["strategy"]["init_args"]["recompute"] == "block"
    assert config["model"]["init_args"]["model"] == "glm-5.2"
    assert data["sequence_length"] == sequence_length
    assert data["batch_size"] * sequence_length // dims.cp == tokens_per_gpu
