"""Modules that call F.scaled_dot_product_attention: taken over in their blocks, refused where it would be wrong."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as bound_at_import
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy.context_parallel import gather
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.layout import zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.models.attention import MultiHeadLatentAttention
from lightning_moe_strategy.models.config import ModelConfig
from tests.traffic import noted_traffic


class Group:
    """Two ranks, of which this process is the first: enough for what is refused before anything is gathered."""

    def rank(self):
        return 0

    def size(self):
        return 2


class Attends(nn.Module):
    """A block whose forward is the function it was given."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.child = attend, nn.Linear(1, 1)

    def forward(self, x):
        return self.attend(x)


class Model(nn.Module):
    def __init__(self, *functions, outside=None):
        super().__init__()
        self.blocks = nn.ModuleList(Attends(function) for function in functions)
        self.outside = outside

    def forward(self, x, position_ids=None):
        if position_ids is not None:
            x = x + 0 * position_ids[:, None, :, None]
        for block in self.blocks:
            x = block(x)
        return x if self.outside is None else self.outside(x)


def causal(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def adapted(*functions, outside=None, group=None, num_tokens=8):
    model = Model(*functions, outside=outside)
    cp = ContextParallel(group or Group())
    adapt_attention(model, {f"blocks.{i}": block for i, block in enumerate(model.blocks)}, cp)
    layout = zigzag(num_tokens, cp.degree)
    own = layout.token_ids(cp.rank)
    cp.sequence = LocalSequence(layout=layout, num_tokens=num_tokens, position_ids_BL=own[None])
    whole = torch.randn(1, 2, num_tokens, 8)
    return model, cp, whole, whole[:, :, own]


def largest_difference(name):
    def three_dims(x):
        return bound_at_import(x[0], x[0], x[0], is_causal=True)[None]

    def imported(x):
        return bound_at_import(query=x, key=x, value=x, is_causal=True, scale=0.3)

    attend = {"three dims": three_dims, "imported": imported, "causal": causal}[name]
    model, cp, whole, local = adapted(attend, attend, group=dist.group.WORLD)
    plain = attend(attend(whole))
    return float((model(local) - plain[:, :, cp.layout.token_ids(cp.rank)]).abs().max())


@pytest.mark.parametrize("name", ["causal", "imported", "three dims"])
def test_every_spelling_of_the_call_is_taken_over(ranks2, name):
    assert max(ranks2(largest_difference, name)) < 1e-6


class LatentModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        config = ModelConfig(
            vocab_size=32,
            hidden=16,
            layers=1,
            heads=4,
            kv_heads=4,
            attention="mla",
            q_lora=None,
            kv_lora=12,
            nope_head_dim=8,
            rope_head_dim=4,
            v_head_dim=6,
        )
        self.blocks = nn.ModuleList([MultiHeadLatentAttention(config)])


def latent_attention_errors():
    """Errors of output and gradients, and the channels per token that were gathered."""
    positions = torch.arange(8)[None].expand(2, -1)
    whole = torch.randn(2, 8, 16)
    plain = LatentModel().blocks[0]
    expected = plain(whole, positions)
    expected.square().sum().backward()

    model = LatentModel()
    cp = ContextParallel(dist.group.WORLD)
    for _ in range(2):
        adapt_attention(model, {"blocks.0": model.blocks[0]}, cp)
    layout = zigzag(8, 2)
    own = layout.token_ids(cp.rank)
    cp.sequence = LocalSequence(layout=layout, num_tokens=8, position_ids_BL=positions[:, own])
    channels = []
    with noted_traffic(lambda x: channels.append(x[0, 0].numel())):
        out = model.blocks[0](whole[:, own], positions[:, own])
        out.square().sum().backward()
    errors = [float((out - expected[:, own]).abs().max())]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        errors.append(float((mine.grad - theirs.grad).norm() / theirs.grad.norm()))
    return max(errors), channels


def test_latent_attention_of_ours_gathers_latents_and_is_exact(ranks2):
    for error, channels in ranks2(latent_attention_errors):
        assert error < 1e-6 and channels == [12 + 4] * 2  # forward and backward


def gathers_with_and_without_recompute():
    """All-gathers of forward and backward with a checkpoint around a block, and whether gradients are equal."""
    model, cp, _, local = adapted(causal, group=dist.group.WORLD)
    count, original = [], gather.all_gather_in_steps
    gather.all_gather_in_steps = lambda x, group: (count.append(1), original(x, group))[1]
    try:
        grads = []
        for recompute in (False, True):
            x = local.clone().requires_grad_()
            out = checkpoint(model.blocks[0], x, use_reentrant=False) if recompute else model(x)
            out.square().sum().backward()
            grads.append(x.grad)
    finally:
        gather.all_gather_in_steps = original
    return len(count), torch.equal(*grads)


def test_a_recompute_goes_through_the_same_attention(ranks2):
    assert ranks2(gathers_with_and_without_recompute) == [(8, True)] * 2


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Linear(1, 1)

    def forward(self, x):
        return causal(x) * self.factor.bias


def deep_copied():
    block = Scales()
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(nn.ModuleList([block]), {"0": block}, cp)
    cp.sequence = LocalSequence(layout=zigzag(8, 2), num_tokens=8, position_ids_BL=torch.zeros(1, 4))
    average = copy.deepcopy(block)
    block.factor.bias.data.fill_(1.0)
    average.factor.bias.data.fill_(0.5)
    x = torch.randn(1, 2, 4, 8)
    return torch.equal(2 * average(x), block(x))


def test_a_deep_copy_attends_as_well_and_with_its_own_weights(ranks2):
    assert ranks2(deep_copied) == [True, True]


def nested_checkpoint(reentrant):
    return lambda x: checkpoint(causal, x, use_reentrant=reentrant)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x), "is_causal=False.*Pass is_causal=True"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril().bool()), "attn_mask.*no mask"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True), r"dropout_p\(0\.1\) > 0"),
        (lambda x: F.scaled_dot_product_attention(x, x[:, :, :2], x[:, :, :2], is_causal=True), "Cross attention"),
        (lambda x: causal(x[:, :, :3]), "3 tokens along its sequence dim"),
        (lambda x: F.conv1d(x[0], torch.ones(8, 2, 3), padding=1), "a convolution over tokens"),
        (lambda x: SelfAttention(8, 2).eval()(x[0]), "torch.nn.MultiheadAttention"),
        (lambda x: SelfAttention(8, 2)(x[0]), "torch.nn.MultiheadAttention"),
        (lambda x: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()(x[0]), "MultiheadAttention|Encoder"),
    ],
)
def test_what_cannot_be_split_is_refused_and_names_the_block(attend, message):
    model, _, _, local = adapted(causal, attend)
    with pytest.raises(ValueError, match=rf"(?s)blocks\.1.*({message})"), torch.no_grad():
        model.blocks[1](local)


def test_flex_attention_is_refused():
    model, _, _, local = adapted(lambda x: flex_attention(x, x, x))
    with pytest.raises(Exception, match="flex_attention"):
        model(local)


def run_step(model, cp, local, stage="train", read_positions=True):
    with cp.step(stage):
        model(local, cp.current.position_ids_BL if read_positions else None)


def guarded(what):
    group = dist.group.WORLD
    token_wise, positions_required, read_positions = (), True, True
    functions, outside = (causal, causal), None
    if what == "silent block":
        functions = (causal, lambda x: x)
    if what == "token-wise block":
        functions, token_wise = (causal, lambda x: F.scaled_dot_product_attention(x, x, x)), ("blocks.1",)
    if what == "attention outside":
        outside = causal
    if what == "no positions":
        read_positions = False
    if what == "positions not needed":
        read_positions, positions_required = False, False
    if what.startswith("nested"):
        functions = (nested_checkpoint(what == "nested reentrant"),)
    if what == "labels":
        functions = (causal,)
    model, cp, _, local = adapted(*functions, outside=outside, group=group)
    cp.token_wise_modules, cp.positions_required = token_wise, positions_required
    if what == "labels":
        cp.sequence = LocalSequence(
            layout=cp.layout,
            num_tokens=8,
            position_ids_BL=cp.current.position_ids_BL,
            shift="model",
            shift_labels_BL=cp.current.position_ids_BL.clone(),
        )
    try:
        run_step(model, cp, local.requires_grad_(), read_positions=read_positions)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("nothing wrong", "passed"),
        (
            "silent block",
            r"RuntimeError: No attention call was taken over in blocks\.1.*modules=\['blocks\.1'\]",
        ),
        ("token-wise block", "passed"),
        ("attention outside", "RuntimeError: F.scaled_dot_product_attention was called outside"),
        ("no positions", "RuntimeError: The step never read the position ids.*positions='none'"),
        ("positions not needed", "passed"),
        ("labels", "RuntimeError: The labels were split for a model that shifts them.*shift='module'"),
        ("nested", r"ValueError: blocks\.0 uses attention inside a checkpoint.*Checkpoint the whole block"),
        ("nested reentrant", r"ValueError: blocks\.0 uses attention inside a checkpoint"),
    ],
)
def test_first_step_of_a_stage_is_watched(ranks2, what, answer):
    for got in ranks2(guarded, what):
        assert re.match(f"(?s){answer}", got), got


def later_steps():
    model, cp, _, local = adapted(causal, group=dist.group.WORLD)
    run_step(model, cp, local)
    run_step(model, cp, local, read_positions=False)
    with pytest.raises(RuntimeError, match="position ids"):
        run_step(model, cp, local, stage="validate", read_positions=False)
    adapt_attention(model, {"blocks.0": model.blocks[0]}, cp)
    with pytest.raises(RuntimeError, match="position ids"):
        run_step(model, cp, local, read_positions=False)


def test_later_steps_are_free_and_every_stage_and_trainer_is_watched_again(ranks2):
    ranks2(later_steps)


def test_a_step_without_a_split_batch_says_what_is_missing():
    _, cp, _, _ = adapted(causal)
    cp.sequence = None
    with pytest.raises(RuntimeError, match=r"cp\(2\) > 1, but no batch was split.*ZigZagContextParallel"):
        with cp.step("train"):
            pass


def test_asking_a_tensor_for_its_dtype_is_not_reading_it():
    _, cp, _, _ = adapted()
    with pytest.raises(RuntimeError, match="never read the position ids"):
        with cp.step("train"):
            positions = cp.current.position_ids_BL
            torch.is_floating_point(positions), positions.shape, positions.to(positions.dtype), positions.device
