"""``compile_blocks`` changes the time of a step and nothing else: gradients, names, collectives, routing."""

from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel
from lightning_moe_strategy._torch_compat import in_backward
from lightning_moe_strategy.compiled_blocks import compile_blocks, require_compile_options
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.units import find_blocks
from tests import test_communication
from tests.modules import VOCABULARY, HuggingFaceLanguageModel, PlainDecoder, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit, worst_difference
from tests.test_selective import Watch

NO_CP_EP4, NO_CP_NO_EP, CP2_EP2, CP4_NO_EP = LAYOUTS_OF_4[0], LAYOUTS_OF_4[1], LAYOUTS_OF_4[2], LAYOUTS_OF_4[5]
TOLERANCE = 1e-6

MODELS = {
    "plain": (PlainLanguageModel, "module"),
    "ours": (partial(MoELanguageModel, {"preset": "tiny", "vocab_size": VOCABULARY, "hidden": 32}, warmup_steps=0),
             "module"),
    "mla": (partial(MoELanguageModel, {"preset": "tiny-mla", "vocab_size": VOCABULARY, "hidden": 32}, warmup_steps=0),
            "module"),
    "qwen3_moe": (partial(HuggingFaceLanguageModel, "qwen3_moe"), "model"),
}  # fmt: skip


def trained(degrees: dict[str, Any], model: str, **options: Any) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Gradients of two steps, and the names in a checkpoint."""
    make_model, shift = MODELS[model]
    _, module, keep = fit(degrees, make_model, lambda dp: loader(16, 24, 8 // dp), shift=shift, max_steps=2, **options)
    return keep.steps, list(module.state_dict())


def against_eager(degrees: dict[str, Any], model: str, backend: str, options: dict[str, Any]) -> tuple[float, str, int]:
    """Worst relative difference of a gradient, whose it is, and the number of graphs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    eager, names = trained(degrees, model, **options)
    compiled, compiled_names = trained(degrees | {"compile_blocks": {"backend": counter}}, model, **options)
    assert names == compiled_names
    difference, name = max(worst_difference(*pair) for pair in zip(compiled, eager, strict=True))
    return difference, name, counter.frame_count


@pytest.mark.parametrize(
    ("model", "degrees", "recompute"),
    [
        ("plain", NO_CP_EP4, "none"),
        ("plain", NO_CP_NO_EP, "selective"),
        ("plain", CP2_EP2, "block"),
        ("ours", CP2_EP2, "selective"),
        ("qwen3_moe", NO_CP_EP4, "block"),
        pytest.param("qwen3_moe", CP2_EP2, "none", marks=pytest.mark.slow),
        pytest.param("mla", CP4_NO_EP, "selective", marks=pytest.mark.slow),
        pytest.param("mla", NO_CP_EP4, "block", marks=pytest.mark.slow),
        pytest.param("ours", CP4_NO_EP, "none", marks=pytest.mark.slow),
    ],
)
def test_gradients_and_names_are_those_of_eager_code(model, degrees, recompute, ranks4):
    """Experts and their exchange stay outside: blocks of one kind are two graphs, one to either side."""
    for difference, name, num_graphs in ranks4(
        against_eager, degrees | {"recompute": recompute}, model, "aot_eager", {}
    ):
        assert difference < TOLERANCE, name
        # Of plain blocks over cp ranks, norms alone are modules without experts and more than a product.
        assert num_graphs >= (1 if (model, degrees) == ("plain", CP2_EP2) else 2)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_gradients_of_inductor_are_those_of_eager_code(recompute, ranks2):
    degrees = dict(fsdp=1, cp=2, e_fsdp=1, ep=2, recompute=recompute)
    for difference, name, num_graphs in ranks2(against_eager, degrees, "ours", "inductor", {}):
        assert difference < TOLERANCE, name
        assert num_graphs >= 2


class WatchGraphs(Watch):
    """Attention kernels, and picks among experts, that run in a backward pass, those called by graphs too."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward() and str(func) in ("aten.topk.default", "lightning_moe.context_parallel_attention.default"):
            self.kernels.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def run_again(degrees: dict[str, Any], model: str) -> dict[str, int]:
    """What the backward pass of the second step, which nobody watches, runs forward."""
    torch.compiler.reset()
    with WatchGraphs() as watch:
        trained(degrees | {"compile_blocks": {"backend": "aot_eager"}}, model)
    return {name: watch.kernels.count(name) for name in sorted(set(watch.kernels))}


@pytest.mark.parametrize(("model", "degrees"), [("plain", NO_CP_EP4), ("qwen3_moe", CP2_EP2)])
def test_a_replay_neither_routes_nor_attends_again_where_graphs_call_the_kernels(model, degrees, ranks4):
    block = ranks4(run_again, degrees | {"recompute": "block"}, model)
    assert all(counts and "aten.topk.default" not in counts for counts in block)
    assert ranks4(run_again, degrees | {"recompute": "selective"}, model) == [{}] * 4


def units_of_norms(recompute: str) -> tuple[float, str, int]:
    degrees = NO_CP_EP4 | {"fp32_norms": True, "recompute": recompute}
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    eager, _ = trained(degrees, "plain", precision="bf16-mixed")
    compiled, _ = trained(degrees | {"compile_blocks": {"backend": counter}}, "plain", precision="bf16-mixed")
    # Casts of units are hooks, which break graphs: they still run where they did.
    return *worst_difference(compiled[0], eager[0]), counter.frame_count


@pytest.mark.slow
def test_units_inside_of_a_block_are_gathered_between_its_graphs(ranks4):
    for difference, name, num_graphs in ranks4(units_of_norms, "selective"):
        assert difference < 1e-2, name
        assert num_graphs >= 2


def compiled_communication(degrees: dict[str, Any]) -> dict[str, Any]:
    torch.compiler.reset()
    return test_communication.train(
        degrees | {"compile_blocks": {"backend": "aot_eager"}}, test_communication.make_plain
    )


@pytest.mark.slow
def test_each_unit_is_gathered_once_in_each_pass_that_reads_it_and_reduced_once(ranks4):
    for result in ranks4(compiled_communication, CP2_EP2 | {"recompute": "selective"}):
        for step in result["steps"]:
            test_communication.assert_gathered_and_reduced_once(step, result["units"])
        assert result["left"] == [] and result["validated"] == []


class Branching(nn.Module):
    """Asks the host for a number, which breaks a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().sum()) > 0 else -self.inner(x)


class BranchingModel(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for block in self.decoder.blocks:
            block.norm = nn.Sequential(block.norm, Branching())


def branching() -> str:
    torch.compiler.reset()
    degrees = CP2_EP2 | {"compile_blocks": {"backend": "eager"}}
    try:
        fit(degrees, BranchingModel, lambda dp: loader(16, 24, 8 // dp), shift="module", max_steps=2)
    except ValueError as error:
        return str(error)
    return ""


def test_a_part_that_is_no_whole_graph_is_refused_over_cp_ranks_and_named(ranks4):
    for message in ranks4(branching):
        assert message.startswith("compile_blocks: decoder.blocks.0.norm cannot be one graph, which cp(2) > 1 needs")
        assert "choose cp=1" in message


def test_sparse_attention_is_refused():
    model = MoETransformer(ModelConfig.resolve({"preset": "tiny-dsa", "vocab_size": VOCABULARY, "hidden": 32}))
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.indexer chooses keys .*Leave compile_blocks out"):
        compile_blocks(model, find_blocks(model), find_experts(model), {}, cp=None)  # type: ignore[arg-type]


def test_a_full_graph_around_experts_is_refused():
    model = PlainDecoder()
    with pytest.raises(ValueError, match=r"fullgraph\(True\): blocks\.0\.sparse\.experts waits for the host"):
        compile_blocks(model, find_blocks(model), find_experts(model), {"fullgraph": True}, cp=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backends": "eager"}, r"torch\.compile has no 'backends'\. Say True, or a dict of backend, "),
        ({"mode": "reduce-overhead"}, "asks for CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "asks for CUDA graphs"),
    ],
)
def test_arguments_are_judged_when_the_strategy_is_built(asked, message):
    with pytest.raises(ValueError, match=message):
        FSDPCPEPStrategy(compile_blocks=asked)


def test_true_is_the_default_of_torch_and_false_compiles_nothing():
    assert require_compile_options(True) == {} and require_compile_options(False) is None
    assert require_compile_options({"dynamic": False}) == {"dynamic": False}


def test_a_compiled_lightning_module_is_refused_and_told_what_to_do():
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=FSDPCPEPStrategy(), logger=False,
                        enable_checkpointing=False)  # fmt: skip
    with pytest.raises(RuntimeError, match=r"Pass the model itself.*compile_blocks=True"):
        trainer.fit(torch.compile(PlainLanguageModel(), backend="eager"))
