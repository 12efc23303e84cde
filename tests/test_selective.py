"""``recompute="selective"`` runs no attention kernel twice; it changes memory and nothing else. Nor does a block's
recompute change what the block draws or counts."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moe_strategy import recomputed_operations
from lightning_moe_strategy._torch_compat import in_backward
from lightning_moe_strategy.context_parallel import latent, softmax
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, find_experts
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.units import find_blocks
from tests import test_communication
from tests.modules import HuggingFaceLanguageModel, PlainDecoder, loader
from tests.parity import LAYOUTS_OF_4, fit
from tests.test_recompute import MODELS, VOCABULARY, NewStorages, different, gradients

NO_CP_EP4, CP2_EP2, CP4_EP4 = LAYOUTS_OF_4[0], LAYOUTS_OF_4[2], LAYOUTS_OF_4[4]
SELECTIVE = {"recompute": "selective"}
KERNELS = {"aten._scaled_dot_product_flash_attention_for_cpu.default", "lightning_moe.sparse_attention.default"}


def unequal_gradients(degrees: dict[str, Any], model: str, precision: str) -> list[str]:
    kept, selective = (gradients(degrees | more, model, precision) for more in ({}, SELECTIVE))
    assert len(kept) == len(selective) == 2
    return different(kept, selective)


@pytest.mark.parametrize(
    ("model", "degrees", "precision"),
    [
        ("ours", CP2_EP2, "32-true"),
        pytest.param("dsa", CP4_EP4, "32-true", marks=pytest.mark.slow),
        ("dsa", NO_CP_EP4, "bf16-mixed"),
        ("qwen3_moe", CP2_EP2, "bf16-mixed"),
        pytest.param("qwen3_moe", NO_CP_EP4, "bf16-true", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", CP4_EP4, "32-true", marks=pytest.mark.slow),
        pytest.param("plain", NO_CP_EP4, "32-true", marks=pytest.mark.slow),
        pytest.param("plain", CP2_EP2, "bf16-true", marks=pytest.mark.slow),
        pytest.param("dropout", NO_CP_EP4, "bf16-mixed", marks=pytest.mark.slow),
        ("dropout", CP2_EP2, "32-true"),
    ],
)
def test_gradients_are_bitwise_those_of_kept_activations(model, degrees, precision, ranks4):
    assert ranks4(unequal_gradients, degrees, model, precision) == [[]] * 4


class Watch(TorchDispatchMode):
    """Kernels that run in a backward pass, and what is communicated in one, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.collectives: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward() and str(func) in KERNELS:
            self.kernels.append(str(func))
        if in_backward() and func.namespace == "c10d":
            self.collectives[str(func)] = self.collectives.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def work_of_backward(degrees: dict[str, Any], model: str) -> tuple[int, dict[str, int]]:
    """Kernels of attention that a step's backward pass runs forward, and its collectives."""
    make_model, shift = MODELS[model]
    again = []
    originals = [(module, module.attend) for module in (softmax, latent)]
    for module, attend in originals:
        module.attend = lambda *args, attend=attend: (again.append(1) if in_backward() else None, attend(*args))[1]
    try:
        with Watch() as watch:
            fit(degrees, make_model, lambda dp: loader(8, 24, 8 // dp), shift=shift)
    finally:
        for module, attend in originals:
            module.attend = attend
    # A kernel inside of ``attend`` is the same call; over cp ranks only sparse attention is called without it.
    return max(len(again), len(watch.kernels)), watch.collectives


def work_of_policies(degrees: dict[str, Any], model: str) -> list[tuple[int, dict[str, int]]]:
    return [work_of_backward(degrees | {"recompute": how}, model) for how in ("block", "selective")]


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("ours", CP2_EP2),
        ("dsa", CP2_EP2),
        ("qwen3_moe", CP2_EP2),
        ("plain", NO_CP_EP4),
        pytest.param("dsa", NO_CP_EP4, marks=pytest.mark.slow),
    ],
)
def test_a_replay_runs_no_attention_kernel_and_communicates_no_more_than_that_of_a_block(model, degrees, ranks4):
    """Keys and values of the sequence are gathered once: the backward pass of the attention reads them."""
    for (again, collectives), (again_selective, collectives_selective) in ranks4(work_of_policies, degrees, model):
        assert again > 0 and again_selective == 0
        assert collectives == collectives_selective != {}


def test_each_unit_is_gathered_once_in_each_pass_that_reads_it_and_reduced_once(ranks4):
    for result in ranks4(test_communication.train, CP2_EP2 | SELECTIVE, test_communication.make_plain, "bf16-mixed"):
        for step in result["steps"]:
            test_communication.assert_gathered_and_reduced_once(step, result["units"])
        assert result["left"] == [] and result["validated"] == []


def with_recompute(model: nn.Module, *, keep_attention: bool = True) -> nn.Module:
    experts = find_experts(model)
    for module in experts.values():
        attach(module, LocalDispatcher(module.num_experts))
    recompute_blocks(model, find_blocks(model), experts, keep_attention=keep_attention)
    return model


def bytes_kept(num_layers: int, num_tokens: int, *, keep_attention: bool) -> int:
    model = with_recompute(PlainDecoder(num_layers=num_layers, length=num_tokens), keep_attention=keep_attention)
    with NewStorages(model) as storages:
        loss = model(torch.zeros(1, num_tokens, dtype=torch.int64)).sum()
        num_bytes = storages.num_bytes()
    loss.backward()
    return num_bytes


def test_output_and_log_sum_exp_are_kept_and_nothing_else():
    num_tokens, width, heads = 64, 16, 2
    more = [
        bytes_kept(layers, num_tokens, keep_attention=True) - bytes_kept(layers, num_tokens, keep_attention=False)
        for layers in (2, 3)
    ]
    assert more[1] - more[0] == num_tokens * (width + heads) * 4


def test_a_retained_graph_is_replayed_by_every_backward():
    torch.manual_seed(0)
    model, plain = PlainDecoder(), PlainDecoder()
    plain.load_state_dict(model.state_dict())
    with_recompute(model)
    ids = torch.randint(0, VOCABULARY, (2, 12))
    for each in (model, plain):
        loss = each(ids).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("ends", ["after a backward pass", "without one"])
def test_what_is_kept_goes_with_the_graph(ends):
    """Kept tensors that led to the graph, which leads to them, would stay until the garbage collector comes."""
    model = with_recompute(PlainDecoder())
    gc.collect()
    gc.disable()
    try:
        with NewStorages(model) as storages:
            loss = model(torch.zeros(1, 32, dtype=torch.int64)).sum()
            if ends == "after a backward pass":
                loss.backward()
            del loss
            model.zero_grad()
            assert storages.num_bytes() == 0
    finally:
        gc.enable()


@torch.library.custom_op("selective_tests::dropping_attention", mutates_args=())
def dropping_attention(query: Tensor) -> tuple[Tensor, Tensor]:
    """Draws, as a kernel with dropout does; its second result says what."""
    mask = torch.rand_like(query)
    return query * mask, mask


def _keep_mask(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


dropping_attention.register_autograd(lambda ctx, grad, _: grad * ctx.saved_tensors[0], setup_context=_keep_mask)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout((dropping_attention(F.dropout(x, 0.5) * self.weight)[0]).sin(), 0.5).exp()


def test_what_is_drawn_after_an_attention_does_not_depend_on_whether_it_ran(monkeypatch):
    monkeypatch.setattr(recomputed_operations, "ATTENTION", frozenset({"selective_tests::dropping_attention"}))
    block, plain = Drawing(), Drawing()
    recompute_blocks(nn.ModuleList([block]), {"0": block}, {}, keep_attention=True)
    grads = []
    for each in (block, plain):
        torch.manual_seed(1)
        x = torch.ones(64, 8, requires_grad=True)
        each(x).sum().backward()
        grads.append((x.grad, each.weight.grad, torch.rand(3)))
    assert all(map(torch.equal, *grads))


class ChangedOutput(nn.Module):
    """Changes an attention's output in place, which autograd allows where nothing before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x_BHLD: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(x_BHLD, x_BHLD, x_BHLD, is_causal=True)
        out.mul_(2.0)
        return out * self.gate


def test_an_output_that_is_changed_in_place_is_an_error_and_not_a_wrong_gradient():
    block = ChangedOutput()
    recompute_blocks(nn.ModuleList([block]), {"0": block}, {}, keep_attention=True)
    out = block(torch.randn(1, 2, 8, 4))
    with pytest.raises(RuntimeError, match=r"changed in place, and recompute='selective' keeps it as it is"):
        out.sum().backward()


class OtherKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x_BHLD: Tensor) -> Tensor:
        x = x_BHLD * self.weight
        if in_backward():
            return torch.ops.lightning_moe.sparse_attention(
                x, x[:, 0], torch.zeros(1, 2, 1, dtype=torch.int32), 4, 1.0
            )[0]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_a_replay_that_attends_by_another_kernel_is_an_error():
    block = OtherKernel()
    recompute_blocks(nn.ModuleList([block]), {"0": block}, {}, keep_attention=True)
    out = block(torch.randn(1, 2, 2, 4))
    with pytest.raises(RuntimeError, match=r"attends by lightning_moe::sparse_attention where the first pass did by"):
        out.sum().backward()


class Counting(nn.Module):
    """Reads, then changes buffers in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("still", torch.full((4,), 3.0))
        self.inner = nn.Identity()
        self.inner.register_buffer("shared", self.count)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * self.weight * self.scale) * (1 + self.count) + self.mean.sin() * self.still
        self.count += 1
        self.mean[1:].copy_(x.detach().mean(0)[1:])
        self.scale = self.scale * 2
        assert self.inner.shared is self.count
        return y.sin() * self.weight


@pytest.mark.parametrize("keep_attention", [False, True])
def test_buffers_are_changed_once_and_a_replay_reads_what_the_first_pass_read(keep_attention):
    torch.manual_seed(0)
    block, plain = Counting(), Counting()
    recompute_blocks(nn.ModuleList([block]), {"0": block}, {}, keep_attention=keep_attention)
    x = torch.randn(16, 4)
    for each in (block, plain):
        # Two calls before any backward: each replay must find what its own first pass found.
        (each(x).sum() + each(2 * x).sum()).backward()
    assert torch.equal(block.weight.grad, plain.weight.grad)
    assert torch.equal(block.norm.weight.grad, plain.norm.weight.grad)
    for (name, mine), theirs in zip(block.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert block.inner.shared is block.count and block.count == 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x_BLD: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x_BLD).chunk(3, -1))
        out = self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        self.dtypes.append(out.dtype)
        return out.sin()


@pytest.mark.parametrize("keep_attention", [False, True])
def test_a_replay_computes_under_the_autocast_of_the_first_pass(keep_attention):
    torch.manual_seed(0)
    block, plain = Attention(), Attention()
    plain.load_state_dict(block.state_dict())
    recompute_blocks(nn.ModuleList([block]), {"0": block}, {}, keep_attention=keep_attention)
    x = torch.randn(2, 8, 16)
    for each in (block, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().square().sum()
        loss.backward()
    assert block.dtypes == [torch.bfloat16] * 2 and plain.dtypes == [torch.bfloat16]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(block.parameters(), plain.parameters(), strict=True))


class CastingModel(HuggingFaceLanguageModel):
    """A user's own autocast inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


def steps_under_autocast(recompute: str) -> list[dict[str, Tensor]]:
    degrees = CP2_EP2 | {"recompute": recompute}
    _, _, keep = fit(degrees, partial(CastingModel, "qwen3_moe"), lambda dp: loader(8, 24, 8 // dp), shift="model")
    return keep.steps


def same_under_autocast() -> list[str]:
    assert dist.is_initialized()
    kept, selective = (steps_under_autocast(recompute) for recompute in ("none", "selective"))
    return different(kept, selective)


def test_an_autocast_in_the_users_step_composes(ranks4):
    assert ranks4(same_under_autocast) == [[]] * 4
