"""``torch.compile`` keeps blocks with context parallel attention in one graph, equal to eager in values and gradients.

A block that is compiled is called outside of a watched first step (``ContextParallel.step``), whose mode sees every
torch function, and has its experts on its rank: a dispatch over ep reads counts of rows on the host, which no graph can
hold. There the attention alone is compiled, as here for Hugging Face.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from lightning_moe_strategy.collectives import (
    TwoStepGroup,
    all_gather_in_steps,
    all_to_all_rows,
    reduce_scatter_in_steps,
)
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.compiled import GraphCall, _call_of, _names, _numbers
from lightning_moe_strategy.context_parallel.gather import gather_sequence
from lightning_moe_strategy.context_parallel.layout import SequenceLayout, zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.context_parallel.softmax import causal_attention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.units import find_blocks
from tests.families import make_model as make_hugging_face_model

BATCH, TOKENS, HIDDEN = 2, 16, 48
TOLERANCE = 1e-6
"""Relative, FP32: a graph may add gradients up in another order."""


def group_called(kind: str) -> Any:
    if kind == "one step":
        return dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("inter", "intra"))
    return TwoStepGroup(whole=dist.group.WORLD, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))


def split(model: nn.Module, kind: str = "one step", documents: Any = ((0,),)) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(group_called(kind))
    cp.separates_documents = True
    adapt_attention(model, find_blocks(model), cp)
    layout = zigzag(TOKENS, cp.degree)
    own = layout.token_ids(cp.rank).expand(BATCH, -1)
    cp.sequence = LocalSequence(layout=layout, num_tokens=TOKENS, position_ids_BL=own, documents=documents)
    return cp, own


def compare(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> tuple[int, float]:
    """Graphs that ``module`` compiles to, and the largest relative error of its output and gradients."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    results = []
    # Compiled first: nothing may depend on what an eager pass has left in a cache.
    for run in (torch.compile(module, fullgraph=True, backend=counter), module):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        output = run(leaf, *args, **kwargs)
        out = output[0] if isinstance(output, tuple) else output
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)])
    compiled, eager = results
    errors = [float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in zip(eager, compiled, strict=True)]
    return counter.frame_count, max(errors)


def block_of_ours(preset: str, kind: str = "one step", documents: Any = ((0,),)) -> tuple[int, float]:
    torch.manual_seed(3)
    sizes = {"preset": preset, "vocab_size": 64, "hidden": HIDDEN, "layers": 1, "dense_first_layers": 1}
    model = MoETransformer(ModelConfig.resolve(sizes))
    _, own = split(model, kind, documents)
    return compare(model.layers[0], torch.randn(BATCH, own.shape[1], HIDDEN), own)


@pytest.mark.parametrize("preset", ["tiny", "tiny-mla"])
def test_a_block_of_ours_is_one_graph_and_equals_eager(ranks2, preset):
    for num_graphs, error in ranks2(block_of_ours, preset):
        assert num_graphs == 1 and error < TOLERANCE


def refusal() -> str:
    with pytest.raises(Exception) as raised:
        block_of_ours("tiny-dsa")
    return str(raised.value)


def test_sparse_attention_is_refused_in_a_full_graph(ranks2):
    """The tracer would pass by the mode that takes over its calls: each rank would attend to its own tokens."""
    for message in ranks2(refusal):
        assert "sparse attention over cp ranks cannot be in a graph" in message


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "tiny-mla"])
def test_packed_documents_over_two_steps_are_one_graph_too(ranks4, preset):
    for num_graphs, error in ranks4(block_of_ours, preset, "two steps", ((0, 5), (0, 3, 11))):
        assert num_graphs == 1 and error < TOLERANCE


def hugging_face(family: str, part: str) -> tuple[int, float]:
    model = make_hugging_face_model(family)
    _, own = split(model)
    layer = model.model.layers[0]
    x = torch.randn(BATCH, own.shape[1], model.config.hidden_size)
    module = layer if part == "block" else layer.self_attn
    return compare(module, x, position_embeddings=model.model.rotary_emb(x, own), attention_mask=None)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_attention_of_hugging_face_is_one_graph_and_equals_eager(ranks2, family):
    for num_graphs, error in ranks2(hugging_face, family, "attention"):
        assert num_graphs == 1 and error < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_block_of_hugging_face_is_one_graph_and_equals_eager(ranks2, family):
    for num_graphs, error in ranks2(hugging_face, family, "block"):
        assert num_graphs == 1 and error < TOLERANCE


def window_and_sinks() -> tuple[int, float, bool]:
    """Of a module that attends with both, and whether another layout compiles it again and is as right."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks_H = nn.Parameter(torch.tensor([0.3, -1.0]))
            self.layout = zigzag(TOKENS, dist.get_world_size())

        def forward(self, x_BHLD: Tensor) -> Tensor:
            return causal_attention(
                x_BHLD, 2 * x_BHLD, -x_BHLD, layout=self.layout, group=dist.group.WORLD, window=3, sinks_H=self.sinks_H
            )

    module, x = Attention(), torch.randn(1, 2, TOKENS // 2, 8)
    num_graphs, error = compare(module, x)
    again = torch.compile(module, fullgraph=True, backend="aot_eager")
    first = again(x)
    module.layout = SequenceLayout(segments=tuple(reversed(zigzag(TOKENS, 2).segments)))
    second = again(x)
    is_right = torch.allclose(second, module(x)) and not torch.allclose(first, second)
    return num_graphs, error, is_right


def test_windows_and_sinks_are_in_the_graph_and_another_layout_is_another_graph(ranks2):
    for num_graphs, error, is_right in ranks2(window_and_sinks):
        assert num_graphs == 1 and error < TOLERANCE and is_right


def the_collectives(kind: str) -> list[int]:
    """Graphs of each collective of ours."""
    group, x = group_called(kind), torch.arange(16.0).view(8, 2) + dist.get_rank()
    whole = dist.group.WORLD
    counts = [8 // whole.size()] * whole.size()
    layout = zigzag(8 * whole.size(), whole.size())
    found = []
    for collective in (
        lambda x: all_gather_in_steps(x, group),
        lambda x: reduce_scatter_in_steps(x, group),
        lambda x: gather_sequence(x, 0, layout, group),
        lambda x: all_to_all_rows(x, counts, counts, whole),
    ):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(collective, fullgraph=True, backend=counter)
        expected = collective(x)
        assert torch.equal(compiled(x), expected)
        found.append(counter.frame_count)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one step", "two steps"])
def test_every_collective_is_in_the_graph_and_brings_the_same(ranks4, kind):
    assert ranks4(the_collectives, kind) == [[1] * 4] * 4


def test_a_call_is_the_same_after_names_and_numbers(ranks4):
    assert ranks4(told_apart) == [True] * 4


def told_apart() -> bool:
    call = GraphCall(
        layout=zigzag(16, 4).with_tail_token(),
        group=group_called("two steps"),
        scale=0.5,
        documents=((0, 5), (0,)),
        window=None,
        kernel="auto",
        expanded_bytes=7,
    )
    return _call_of(_names(call.group), tuple(_numbers(call)), call.scale, call.kernel) == call
