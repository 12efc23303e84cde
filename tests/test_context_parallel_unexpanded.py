"""Latent attention of whole modules: what is handed on unexpanded, who expands by itself, and training with it."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.layout import zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.context_parallel.unexpanded import is_its_weight
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.attention import MultiHeadLatentAttention
from lightning_moe_strategy.models.config import PRESETS, ModelConfig
from lightning_moe_strategy.models.layers import Linear
from lightning_moe_strategy.simulate import simulate
from tests.modules import VOCABULARY, loader
from tests.parity import LAYOUTS_OF_4, fit, reference, worst_difference
from tests.test_context_parallel_latent import TOLERANCE, B, Traffic, _error

SIZES = {"preset": "tiny-mla", "vocab_size": VOCABULARY, "hidden": 48, "heads": 3}


class Adapted(nn.Module):
    """A projection with a low-rank adapter beside it, as PEFT writes it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, change=None):
        super().__init__()
        torch.manual_seed(1)
        self.attention = MultiHeadLatentAttention(ModelConfig.resolve(SIZES))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)
        if change is not None:
            change(self.attention)

    def forward(self, x, positions):
        return self.attention(x, positions)


def with_adapter(attention):
    attention.kv_up_proj = Adapted(attention.kv_up_proj)


def with_hook(attention):
    attention.kv_up_proj.register_forward_hook(lambda module, args, output: 2 * output)


def split_block(change=None, num_tokens=16):
    block, cp = Block(change), ContextParallel(dist.group.WORLD)
    for _ in range(2):
        adapt_attention(nn.ModuleList([block]), {"0": block}, cp)
    layout = zigzag(num_tokens, cp.degree)
    positions = layout.token_ids(cp.rank).expand(B, -1)
    cp.sequence = LocalSequence(layout=layout, num_tokens=num_tokens, position_ids_BL=positions)
    return block, cp


def changed_projection(change):
    """Errors of output and gradients of a block, and the channels that were gathered."""
    whole = torch.randn(B, 16, 48, dtype=torch.float64)
    plain = Block(change).double()
    expected = plain(whole, torch.arange(16).expand(B, -1))
    expected.square().sum().backward()
    block, cp = split_block(change)
    block.double()
    own = cp.layout.token_ids(cp.rank)
    with Traffic() as traffic:
        out = block(whole[:, own], cp.current.position_ids_BL)
        out.square().sum().backward()
    found = [_error(out, expected[:, own])]
    for mine, theirs in zip(block.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        found.append(_error(mine.grad, theirs.grad))
    return max(found), [channels for channels, _ in traffic.gathered]


@pytest.mark.parametrize("change", [None, with_adapter, with_hook])
def test_a_projection_that_is_more_than_its_weight_expands_by_itself_and_is_as_exact(ranks2, change):
    config = ModelConfig.resolve(SIZES)
    both = config.kv_lora + config.rope_head_dim
    gathers = [both, both] if change is None else [config.kv_lora, config.rope_head_dim]
    for error, channels in ranks2(changed_projection, change):
        assert error < TOLERANCE[torch.float64] and channels == gathers


def changed_hugging_face_projection():
    from tests.families import make_model

    ids = torch.randint(1, 97, (B, 16), generator=torch.Generator().manual_seed(3))
    models = [make_model("deepseek_v3") for _ in range(2)]
    for model in models:
        torch.manual_seed(4)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
    plain, model = models
    expected = plain(input_ids=ids).logits
    expected.square().sum().backward()
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}, cp)
    layout = zigzag(16, 2)
    own = layout.token_ids(cp.rank)
    cp.sequence = LocalSequence(layout=layout, num_tokens=16, position_ids_BL=own.expand(B, -1))
    with Traffic() as traffic:
        logits = model(input_ids=ids[:, own]).logits
    logits.square().sum().backward()
    found = [_error(logits, expected[:, own])]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            dist.all_reduce(gradient := torch.zeros_like(theirs) if mine.grad is None else mine.grad)
            found.append(_error(gradient, theirs.grad))
    return max(found), len(traffic.gathered)


def test_adapters_of_a_hugging_face_model_are_exact(ranks2):
    for error, num_gathers in ranks2(changed_hugging_face_projection):
        assert error < 2e-6 and num_gathers == 2 * 2


def of_forward(linear):
    linear.forward = lambda x: x
    return linear


def hooked(linear):
    linear.register_forward_pre_hook(lambda module, args: None)
    return linear


@pytest.mark.parametrize(
    ("projection", "is_weight"),
    [
        (lambda: nn.Linear(2, 3, bias=False), True),
        (lambda: Linear(2, 3), True),
        (lambda: nn.Linear(2, 3), False),
        (lambda: Adapted(nn.Linear(2, 3, bias=False)), False),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 3, bias=False)), False),
        (lambda: weight_norm(nn.Linear(2, 3, bias=False)), False),
        (lambda: hooked(nn.Linear(2, 3, bias=False)), False),
        (lambda: of_forward(nn.Linear(2, 3, bias=False)), False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_projection_is_its_weight_only_if_nothing_else_is_done(projection, is_weight):
    assert is_its_weight(projection()) is is_weight


def under_autocast():
    """Dtypes of output, of what travels and of the gradients; error against the same in one process."""
    whole = torch.randn(B, 16, 48)
    block, cp = split_block()
    own = cp.layout.token_ids(cp.rank)
    with Traffic() as traffic, torch.autocast("cpu", torch.bfloat16):
        expected = Block()(whole, torch.arange(16).expand(B, -1))
        out = block(whole[:, own], cp.current.position_ids_BL)
    out.float().square().sum().backward()
    dtypes = {parameter.grad.dtype for parameter in block.parameters()}
    return out.dtype, traffic.gathered, dtypes, _error(out, expected[:, own].double())


def test_autocast_casts_as_the_projection_would(ranks2):
    config = ModelConfig.resolve(SIZES)
    for dtype, gathered, gradients, error in ranks2(under_autocast):
        assert dtype == torch.bfloat16 and gradients == {torch.float32}
        assert {*gathered} == {(config.kv_lora + config.rope_head_dim, torch.bfloat16)}
        assert error < TOLERANCE[torch.bfloat16]


def read_by_somebody_else(what):
    block, cp = split_block()
    x, positions = torch.randn(B, 8, 48), cp.current.position_ids_BL
    if what == "token-wise block":
        cp.token_wise_modules = ("0",)
    else:
        make = block.attention.expand
        block.attention.__dict__["expand"] = lambda *latents: [torch.add(keys, 1) for keys in make(*latents)]
    try:
        block(x, positions)
    except RuntimeError as error:
        return str(error)
    return "passed"


@pytest.mark.parametrize(("what", "function"), [("token-wise block", "scaled_dot_product_attention"), ("sum", "add")])
def test_keys_that_nobody_expanded_say_who_can_read_them(ranks2, what, function):
    for message in ranks2(read_by_somebody_else, what):
        assert re.search(rf"^{function} was called on keys of latent attention.*choose cp=1", message), message


def deep_copied():
    block, cp = split_block()
    average = copy.deepcopy(block)
    block.attention.kv_up_proj.weight.data.zero_()
    x = torch.randn(B, 8, 48)
    positions = cp.current.position_ids_BL
    return float(block(x, positions).abs().max()), float(average(x, positions).abs().max())


def test_a_deep_copy_expands_with_its_own_weights(ranks2):
    for zeroed, copied in ranks2(deep_copied):
        assert zeroed == 0.0 and copied > 0.0


class PlainOptimizer(MoELanguageModel):
    """Without a schedule, which asks a Trainer for its length: the reference has none."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


make_module = partial(PlainOptimizer, SIZES)


def trained(degrees, recompute, **options):
    degrees = degrees | {"recompute": recompute}
    _, _, keep = fit(degrees, make_module, lambda dp: loader(8, 21, 8 // dp), shift="module", **options)
    _, expected, _ = reference(make_module, loader(8, 21, 8))
    return worst_difference(keep.steps[0], expected[0])


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[2], LAYOUTS_OF_4[12]], ids=str)
def test_a_trainer_on_four_ranks_has_the_gradients_of_one_process(ranks4, degrees, recompute):
    """21 tokens: the split adds padding, and a dummy token for labels that the module shifts."""
    assert PRESETS["tiny-mla"].attention == "mla"
    for difference, name in ranks4(trained, degrees, recompute):
        assert difference < 1e-6, name


def test_mixed_precision_casts_latents_and_weight_alike(ranks4):
    for difference, name in ranks4(partial(trained, precision="bf16-mixed"), LAYOUTS_OF_4[2], "block"):
        assert difference < 0.1, name  # a model that is bf16 through and through


def in_bf16():
    from tests.families import make_model

    model = make_model("deepseek_v3").bfloat16()
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}, cp)
    layout = zigzag(16, 2)
    own = layout.token_ids(cp.rank).expand(B, -1)
    cp.sequence = LocalSequence(layout=layout, num_tokens=16, position_ids_BL=own)
    with Traffic() as traffic:
        model(input_ids=own).logits.float().square().sum().backward()
    return [dtype for _, dtype in traffic.gathered + traffic.reduced]


def test_bf16_is_gathered_and_fp32_is_reduced_of_a_hugging_face_model(ranks2):
    assert ranks2(in_bf16) == [[torch.bfloat16] * 4 + [torch.float32] * 2] * 2


@pytest.mark.slow
def test_a_million_tokens_on_64_ranks_fit_where_their_keys_and_values_do_not():
    layers, million = 2, 2**20
    sizes = {"preset": "deepseek-v3", "layers": layers, "dense_first_layers": 1, "vocab_size": 1024, "num_experts": 64}
    ids_BS = torch.zeros(1, million, dtype=torch.int64)
    simulated = simulate(
        partial(MoELanguageModel, sizes),
        ParallelDims(fsdp=1, cp=64, e_fsdp=1, ep=64, nvl=72),
        {"input_ids": ids_BS, "labels": ids_BS, "shift_labels": ids_BS},
        world_size=64,
        local_world_size=4,
        precision="bf16-mixed",
        recompute="block",
    )
    # bf16 latents in the forward and in the recompute, FP32 gradients once.
    assert simulated.num_bytes["cp", "all_gather"] == 2 * layers * million * 2 * 576
    assert simulated.num_bytes["cp", "reduce_scatter"] == layers * million * 4 * 576
    # Keys and values of 128 heads, expanded for the whole sequence: 85.9e9 bytes, and as many of their gradients.
    assert simulated.peak_bytes < million * 128 * (192 + 128) * 2 / 3
