"""Attention that only the user knows: whole sequences of some heads, exact, and with limits that are said."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.batch import find_sequences, split_items
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from tests.modules import Block as PlainBlock
from tests.modules import PlainLanguageModel, loader
from tests.parity import fit, reference, worst_difference

HEADS, KEY_HEADS, CHANNELS = 8, 2, 4


class CappedAttention(nn.Module):
    """Both directions, scores capped and scaled by a parameter: nothing that a library calls."""

    def __init__(self):
        super().__init__()
        self.cap = nn.Parameter(torch.tensor([3.0]))

    def forward(self, query, key, value, *, flipped=False):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = self.cap * torch.tanh(query @ key.mT / self.cap)
        return (scores.flip(-1) if flipped else scores).softmax(-1) @ value


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        width = HEADS * CHANNELS
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * KEY_HEADS * CHANNELS)
        self.attention = attention

    def forward(self, x_BLD):
        query = self.q(x_BLD).unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2)
        key, value = self.kv(x_BLD).unflatten(-1, (2 * KEY_HEADS, CHANNELS)).transpose(1, 2).chunk(2, dim=1)
        return x_BLD + self.attention(query, key, value).transpose(1, 2).flatten(2)


class Function(nn.Module):
    """A module around a call of F.scaled_dot_product_attention, to be taken over by its block's name."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **self.options)


class Model(nn.Module):
    def __init__(self, *attentions):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(attention) for attention in attentions)
        self.norm = nn.LayerNorm(HEADS * CHANNELS)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def of_kind(kind, num_tokens):
    """A model with two layers, and what of it is declared."""
    if kind == "module":
        return Model(CappedAttention(), CappedAttention()), ["blocks.*.attention"]
    band = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(2).triu(-3)
    options = {"bidirectional": {}, "mask": dict(attn_mask=band), "causal": dict(is_causal=True)}[kind]
    return Model(Function(**options), Function(**options)), ["blocks.?"]


def split(model, declared, x, layout, packed=None):
    """The model adapted, and this rank's part of its input."""
    cp = ContextParallel(dist.group.WORLD)
    cp.positions_required = False
    cp.ulysses_modules, cp.separates_documents = tuple(declared), packed is not None
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    for _ in range(2):
        adapt_attention(model, blocks, cp)
    items = {"inputs_embeds": x, "targets": torch.zeros(x.shape[:2], dtype=torch.int64)} | (packed or {})
    fields = find_sequences(items, sequence_keys=None, labels_key=None)
    options = dict(shift="none", degree=cp.degree, rank=cp.rank, ignore_index=-100, pad_token_id=0, layout=layout)
    local, cp.sequence, _ = split_items(items, fields, **options)
    return local["inputs_embeds"], local["targets"], cp


def largest_errors(kind, num_tokens, layout):
    """Of output, input's and parameters' gradients, relative to the largest value."""
    torch.manual_seed(1)
    x, weight = torch.randn(2, num_tokens, HEADS * CHANNELS, requires_grad=True), torch.randn(2, num_tokens, 1)
    plain, _ = of_kind(kind, num_tokens)
    (plain(x) * weight).square().sum().backward()
    starts = torch.tensor([0, 5, num_tokens, num_tokens + 5, 2 * num_tokens])
    packed = {"cu_seqlens": starts} if layout == "per_document" else None
    model, declared = of_kind(kind, num_tokens)
    local, _, cp = split(model, declared, x.detach(), layout, packed)
    real = cp.sequence.is_token_P
    own = cp.layout.token_ids(cp.rank)
    place = torch.cumsum(real, 0) - 1 if real is not None else torch.arange(cp.layout.num_tokens)
    is_real = real[own] if real is not None else own < num_tokens
    own = place[own][is_real]
    local.requires_grad_()
    with cp.step("predict"):
        out = model(local)[:, is_real]
        (out * weight[:, own]).square().sum().backward()
    errors = [error(out, plain(x)[:, own]), error(local.grad[:, is_real], x.grad[:, own])]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        errors.append(error(mine.grad, theirs.grad))
    return errors


def error(mine, expected):
    return float((mine - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "per_document"])
@pytest.mark.parametrize("kind", ["module", "bidirectional", "mask", "causal"])
def test_whole_sequences_of_some_heads_equal_one_process(ranks2, kind, layout):
    assert max(map(max, ranks2(largest_errors, kind, 13, layout))) < 1e-5


def test_key_heads_that_are_fewer_than_ranks_are_repeated(ranks4):
    assert max(map(max, ranks4(largest_errors, "module", 21, "zigzag"))) < 1e-5


class CappedBlock(PlainBlock):
    def __init__(self, *args):
        super().__init__(*args)
        self.attention = CappedAttention()

    def forward(self, x_BSD):
        heads = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x_BSD)).chunk(3, -1))
        x_BSD = x_BSD + self.out(self.attention(*heads).transpose(1, 2).flatten(2))
        return x_BSD + self.sparse(self.sparse_norm(x_BSD))


class CappedLanguageModel(PlainLanguageModel):
    def __init__(self):
        super().__init__()
        self.decoder.blocks = nn.ModuleList(CappedBlock(16, 2, 4, 2) for _ in range(2))


def batches(dp):
    return loader(4, 18, 4 // dp)


def error_of_training(recompute):
    degrees = dict(fsdp=1, cp=2, e_fsdp=1, ep=2, recompute=recompute)
    options = dict(callback_options=dict(ulysses_modules=["decoder.blocks.*.attention"]))
    _, _, keep = fit(degrees, CappedLanguageModel, batches, shift="module", **options)
    return keep.steps[0]


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_trainer_trains_attention_of_the_users_own_making(ranks2, recompute):
    _, expected, _ = reference(CappedLanguageModel, batches(1))
    for gradients in ranks2(error_of_training, recompute):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < 2e-6, name


def message(model, declared, num_tokens=8):
    try:
        local, _, cp = split(model, declared, torch.randn(1, num_tokens, HEADS * CHANNELS), "zigzag")
        with cp.step("predict"):
            model(local)
    except (ValueError, RuntimeError) as reason:
        return str(reason)
    return ""


class ThreeHeads(Function):
    def forward(self, query, key, value):
        return super().forward(query[:, :3], key[:, :1], value[:, :1])


class LocalMask(Function):
    def forward(self, query, key, value):
        mask = query.new_ones(query.shape[2], query.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class OneHead(nn.Module):
    def forward(self, query, key, value):
        return query[:, :1]


def refusals():
    return {
        "heads": message(Model(ThreeHeads()), ["blocks.0"]),
        "mask": message(Model(LocalMask()), ["blocks.0"]),
        "output": message(Model(OneHead()), ["blocks.0.attention"]),
        "unknown": message(Model(Function()), ["layers.*"]),
        "outside": message(Model(Function()), ["norm"]),
        "not declared": message(Model(Function()), []),
    }


def test_what_does_not_fit_is_refused_by_name(ranks2):
    for found in ranks2(refusals):
        assert re.match(r"blocks.0 has a query \(1, 3, 4, 4\).* cp\(2\) must divide", found["heads"])
        assert re.match(r"blocks.0 is given a tensor \(4, 4\) with this rank's 4 tokens", found["mask"])
        assert re.match(r"blocks.0.attention returned \(1, 1, 8, 4\) for a query \(1, 4, 8, 4\)", found["output"])
        assert re.match(r"ulysses_modules\(\['layers.\*'\]\) match no module of Model", found["unknown"])
        assert re.match(r"ulysses_modules: norm \(LayerNorm\) is in no block", found["outside"])
        assert "ulysses_modules=['blocks.0']" in found["not declared"]
