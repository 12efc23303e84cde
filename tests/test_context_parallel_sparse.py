"""Sparse attention over a sequence spread over ranks: keys, values and gradients of one process, little gathered."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy import MoELanguageModel
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.layout import zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.kernels.key_selection import select_keys
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.units import find_blocks
from tests.modules import VOCABULARY, loader
from tests.parity import LAYOUTS_OF_4, fit, reference, worst_difference
from tests.traffic import noted_traffic

# H != S != D; 5 of 16 to 32 keys; the second and the fourth layer share.
SIZES = {"preset": "tiny-dsa", "vocab_size": VOCABULARY, "hidden": 48, "heads": 3, "index_heads": 12, "index_top_k": 5}
BATCH, KV_LORA, ROPE, INDEX_DIM = 2, 32, 8, 16


def make_model(**changes):
    """All MLPs dense: this is about attention."""
    torch.manual_seed(3)
    model = MoETransformer(ModelConfig.resolve(SIZES | {"dense_first_layers": 4} | changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def split_over_ranks(model, num_tokens):
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(model, find_blocks(model), cp)
    layout = zigzag(num_tokens, cp.degree)
    own = layout.token_ids(cp.rank)
    cp.sequence = LocalSequence(layout=layout, num_tokens=num_tokens, position_ids_BL=own.expand(BATCH, -1))
    return cp, own


def keys_of_layers(model):
    kept = []
    for block in model.layers:
        block.register_forward_hook(lambda module, args, output: kept.append(output[1]))
    return kept


class Gathers:
    """Channels and dtype of everything that is gathered or reduced, and whether bf16 could hold what is reduced."""

    def __enter__(self):
        self.gathered, self.reduced, self.reduced_bf16 = [], [], []
        self.noted = noted_traffic(self.gather, self.reduce)
        self.noted.__enter__()
        return self

    def __exit__(self, *error):
        self.noted.__exit__(*error)

    def gather(self, x):
        self.gathered.append((x.shape[-1], x.dtype))

    def reduce(self, x):
        self.reduced.append((x.shape[-1], x.dtype))
        self.reduced_bf16.append(torch.equal(x, x.bfloat16().to(x.dtype)))


def compare_with_one_process(num_tokens, recompute):
    """Errors of logits and gradients, whether all layers' keys agree, and what was gathered and reduced."""
    whole, model = make_model(), make_model()
    ids_BS = torch.randint(VOCABULARY, (BATCH, num_tokens), generator=torch.Generator().manual_seed(5))
    weights = torch.randn(BATCH, num_tokens, VOCABULARY, generator=torch.Generator().manual_seed(6))
    expected_keys, keys = keys_of_layers(whole), keys_of_layers(model)
    expected = whole(ids_BS)
    (expected * weights).sum().backward()

    cp, own = split_over_ranks(model, num_tokens)
    if recompute:
        recompute_blocks(model, find_blocks(model), {})
    with Gathers() as forward, cp.step("train"):
        logits = model(ids_BS[:, own], cp.current.position_ids_BL)
    with Gathers() as backward:
        (logits * weights[:, own]).sum().backward()
    errors = {"logits": float((logits - expected[:, own]).norm() / expected.norm())}
    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        if mine.requires_grad:
            dist.all_reduce(mine.grad)
            errors[name] = float((mine.grad - theirs.grad).norm() / theirs.grad.norm())
    same_keys = [torch.equal(mine, theirs[:, own]) for mine, theirs in zip(keys[:4], expected_keys, strict=True)]
    return max(errors.values()), same_keys, (forward.gathered, backward.gathered, backward.reduced)


LATENT, INDEX_KEY = (KV_LORA + ROPE, torch.float32), (INDEX_DIM, torch.float32)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"])
def test_keys_logits_and_gradients_are_those_of_one_process(ranks, recompute, request):
    for error, same_keys, (forward, backward, reduced) in request.getfixturevalue(ranks)(
        compare_with_one_process, 32, recompute
    ):
        assert error < 1e-6
        assert same_keys == [True] * 4
        # Index keys where a layer selects, and never again: neither for the backward pass nor for a recompute.
        assert forward == [INDEX_KEY, LATENT, LATENT, INDEX_KEY, LATENT, LATENT]
        assert backward == reduced == [LATENT] * 4


def bf16_traffic():
    model = make_model().bfloat16()
    cp, own = split_over_ranks(model, 16)
    with Gathers() as gathers, cp.step("train"):
        ids_BL = torch.randint(VOCABULARY, (BATCH, len(own)))
        model(ids_BL, cp.current.position_ids_BL).square().sum().backward()
    return gathers.gathered, gathers.reduced, gathers.reduced_bf16


def test_bf16_is_gathered_and_fp32_is_reduced(ranks2):
    for gathered, reduced, reduced_bf16 in ranks2(bf16_traffic):
        assert {dtype for _, dtype in gathered} == {torch.bfloat16}
        assert reduced == [(KV_LORA + ROPE, torch.float32)] * 4
        assert reduced_bf16 == [False] * 4, "the gradient was rounded to bf16 before it was summed"


def top_k_above_the_number_of_keys():
    whole, model = make_model(index_top_k=99), make_model(index_top_k=99)
    ids_BS = torch.randint(VOCABULARY, (BATCH, 16), generator=torch.Generator().manual_seed(5))
    keys = keys_of_layers(model)
    cp, own = split_over_ranks(model, 16)
    with cp.step("train"):
        logits = model(ids_BS[:, own], cp.current.position_ids_BL)
    widths = {key_ids.shape[-1] for key_ids in keys}
    return float((logits - whole(ids_BS)[:, own]).abs().max()), widths


def test_a_top_k_above_the_number_of_keys_is_all_keys_of_the_whole_sequence(ranks2):
    for error, widths in ranks2(top_k_above_the_number_of_keys):
        assert error < 1e-4 and widths == {16}


class PlainOptimizer(MoELanguageModel):
    """Without a schedule, which asks a Trainer for its length: the reference has none."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


make_module = partial(PlainOptimizer, SIZES)


def trained(degrees, recompute):
    _, _, keep = fit(degrees | {"recompute": recompute}, make_module, lambda dp: loader(8, 21, 8 // dp), shift="module")
    _, expected, _ = reference(make_module, loader(8, 21, 8))
    assert not any("indexer" in name for name in keep.steps[0])
    return worst_difference(keep.steps[0], expected[0])


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[2], LAYOUTS_OF_4[4], LAYOUTS_OF_4[9]], ids=str)
def test_a_trainer_on_four_ranks_has_the_gradients_of_one_process(ranks4, degrees, recompute):
    """21 tokens: the split adds padding, and a dummy token for labels that the module shifts."""
    for difference, name in ranks4(trained, degrees, recompute):
        assert difference < 1e-6, name


class Attends(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.child = attend, nn.Linear(1, 1)

    def forward(self, x):
        return self.attend(x)


def select(x_BLM, positions_L=None):
    with torch.no_grad():
        return select_keys(x_BLM[:, :, None], x_BLM, torch.ones(*x_BLM.shape[:2], 1), positions_L, top_k=3)


def attend(x_BLM, positions_L=None):
    ids = select(x_BLM, positions_L)
    return sparse_attention(x_BLM[:, :, None].expand(-1, -1, 2, -1), x_BLM, ids, x_BLM.shape[-1], 1.0).sum(2)


def select_in_a_checkpoint(x_BLM):
    ids = checkpoint(select, x_BLM, use_reentrant=False)
    return sparse_attention(x_BLM[:, :, None], x_BLM, ids, x_BLM.shape[-1], 1.0).sum(2)


def cross(x_BLM):
    ids = torch.zeros(*x_BLM.shape[:2], 1, dtype=torch.int32)
    return sparse_attention(x_BLM[:, :, None], x_BLM[:, :2], ids, 8, 1.0)


def cross_selection(x_BLM):
    return select_keys(x_BLM[:, :, None], x_BLM[:, :2], torch.ones(*x_BLM.shape[:2], 1), top_k=1)


MISUSES = {
    "nothing wrong": (attend, "passed"),
    "positions of its own": (
        lambda x: attend(x, torch.arange(x.shape[1])),
        r"ValueError: blocks\.0 uses select_keys with positions of its own; cp=2.*Pass query_positions_L=None",
    ),
    "cross attention": (cross, r"ValueError: Attention in blocks\.0: query has 4 tokens and what it selects from 2"),
    "cross selection": (
        cross_selection,
        r"ValueError: Attention in blocks\.0: query has 4 tokens and what it selects from 2",
    ),
    "nested checkpoint": (
        lambda x: checkpoint(attend, x, use_reentrant=False),
        r"ValueError: blocks\.0 uses attention inside a checkpoint.*Checkpoint the whole block",
    ),
    "nested selection": (
        select_in_a_checkpoint,
        r"ValueError: blocks\.0 uses attention inside a checkpoint.*Checkpoint the whole block",
    ),
    "outside": (attend, r"RuntimeError: select_keys was called outside of every adapted block"),
    "attention outside": (
        lambda x: sparse_attention(x[:, :, None], x, torch.zeros(1, x.shape[1], 1, dtype=torch.int32), 8, 1.0),
        r"RuntimeError: sparse_attention was called outside of every adapted block",
    ),
}


def run_misuse(what):
    function, _ = MISUSES[what]
    outside = what.endswith("outside")
    block = Attends(attend if outside else function)
    model = nn.ModuleList([block])
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(model, {"blocks.0": block}, cp)
    cp.positions_required = False
    cp.sequence = LocalSequence(layout=zigzag(8, 2), num_tokens=8, position_ids_BL=torch.zeros(1, 4))
    try:
        with cp.step("train"):
            x = block(torch.randn(1, 4, 8, requires_grad=True))
            if outside:
                function(x)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


@pytest.mark.parametrize("what", MISUSES)
def test_what_cannot_be_split_is_refused_and_names_the_block(what, ranks2):
    for answer in ranks2(run_misuse, what):
        assert re.match(f"(?s){MISUSES[what][1]}", answer), answer


def local_tensors_that_are_kept():
    """Shapes of all that autograd keeps of a block's attention, without recompute."""
    torch.manual_seed(0)
    block = Attends(attend)
    model = nn.ModuleList([block])
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(model, {"blocks.0": block}, cp)
    cp.sequence = LocalSequence(layout=zigzag(64, 2), num_tokens=64, position_ids_BL=torch.zeros(1, 32))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        block(torch.randn(1, 32, 8, requires_grad=True))
    return [tuple(shape) for shape in kept]


def test_between_forward_and_backward_only_tensors_of_this_rank_are_kept(ranks2):
    for kept in ranks2(local_tensors_that_are_kept):
        assert (1, 32, 8) in kept and all(shape[1] == 32 for shape in kept)


def simulated_glm(top_k):
    """One step of a short GLM-5.2 at a million tokens on 64 ranks that share the sequence."""
    sizes = {"preset": "glm-5.2", "layers": GLM_LAYERS, "vocab_size": 1024, "num_experts": 64, "index_top_k": top_k}
    ids_BS = torch.zeros(1, MILLION, dtype=torch.int64)
    return simulate(
        partial(MoELanguageModel, sizes),
        ParallelDims(fsdp=1, cp=64, e_fsdp=1, ep=64, nvl=72),
        {"input_ids": ids_BS, "labels": ids_BS, "shift_labels": ids_BS},
        world_size=64,
        local_world_size=4,
        precision="bf16-mixed",
        recompute="block",
    )


GLM_LAYERS, GLM_INDEXERS, MILLION = 5, 3, 2**20


@pytest.mark.slow
def test_a_million_tokens_on_64_ranks_gather_latents_and_keep_one_top_k_per_indexer():
    simulated, fewer = simulated_glm(2048), simulated_glm(1024)
    tokens = MILLION // 64
    assert simulated.activation_bytes - fewer.activation_bytes == GLM_INDEXERS * tokens * 1024 * 4
    # Latents in the forward and in the recompute; an indexer's keys once.
    latents, index_keys = 2 * GLM_LAYERS * MILLION * 2 * 576, GLM_INDEXERS * MILLION * 2 * 128
    assert simulated.num_bytes["cp", "all_gather"] == latents + index_keys
    assert simulated.num_bytes["cp", "reduce_scatter"] == GLM_LAYERS * MILLION * 4 * 576
    flops = {key: count for key, count in simulated.flops.items() if "select_keys" in key}
    assert {key[0] for key in flops} == {"forward"}
    assert sum(flops.values()) == GLM_INDEXERS * tokens * MILLION * 32 * 128
    # Expanded keys and values of the whole sequence would be 64 * (192 + 256) * 2 bytes a token.
    assert simulated.peak_bytes < MILLION * 64 * (192 + 256) * 2
