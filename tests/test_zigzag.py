"""A split batch, an unchanged model, the summed gradients of all ranks: the same as one process on the whole batch.

Every test that trains compares the loss and each parameter's gradient (P1, P2, P5 of the project's invariants).
"""

from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, BatchEncoding

from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.context_parallel.scope import ContextParallel

VOCABULARY = 97
TOLERANCE = 1e-6
"""Norm of a gradient's error over its norm, FP32."""

TINY = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)


class Strategy:
    """What the callback needs of a strategy."""

    def __init__(self, group):
        self.context_parallel = ContextParallel(group)
        self.micro_batch = MicroBatch(num_tokens=0, num_loss_tokens=None)
        self.transforms = []

    def register_batch_transform(self, transform):
        self.transforms.append(transform)


Trainer = namedtuple("Trainer", "strategy")


def attach(callback, module, group=None):
    strategy = Strategy(group or dist.group.WORLD)
    callback.setup(Trainer(strategy), module, "fit")
    assert strategy.transforms == [callback.split]
    return strategy


class Block(nn.Module):
    """Attention with rotary positions, query heads != key heads; H * D != hidden."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(24, 64), nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(64, 24)

    def forward(self, x_BLD, position_ids_BL):
        def heads(x):
            return x.unflatten(-1, (-1, 16)).transpose(1, 2)

        angles = position_ids_BL[:, None, :, None] / 10 ** torch.linspace(0, 2, 8)
        q, k = (
            torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
            for a, b in (heads(f(x_BLD)).chunk(2, -1) for f in (self.q, self.k))
        )
        out = F.scaled_dot_product_attention(q, k, heads(self.v(x_BLD)), is_causal=True, enable_gqa=True)
        return x_BLD + self.o(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """Any causal model that is no Hugging Face model."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embed, self.head, self.recompute = nn.Embedding(VOCABULARY, 24), nn.Linear(24, VOCABULARY), recompute
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids_BL, position_ids_BL):
        x_BLD = self.embed(ids_BL)
        for block in self.blocks:
            if self.recompute:
                x_BLD = checkpoint(block, x_BLD, position_ids_BL, use_reentrant=False)
            else:
                x_BLD = block(x_BLD, position_ids_BL)
        return self.head(x_BLD)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_model(recompute=False):
    torch.manual_seed(1)
    model = Plain(recompute)
    return model, {f"blocks.{i}": block for i, block in enumerate(model.blocks)}


def hugging_face_model(kind):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(TINY | (LATENT if kind == "deepseek_v3" else {})))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().train()
    return model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}


def steps(style):
    """The user's training_step of each style, written for one process: (model, batch) -> mean loss."""

    def positions(batch, ids):
        return batch.get("position_ids", torch.arange(ids.shape[1])[None])

    def hugging_face(model, batch):
        return model(**batch).loss

    def passes_no_positions(model, batch):
        return model(batch["input_ids"], labels=batch["labels"]).loss

    def shifts_logits(model, batch):
        logits = model(batch["input_ids"], positions(batch, batch["input_ids"]))
        return cross_entropy(logits[:, :-1], batch["labels"][:, 1:])

    def drops_last_input(model, batch):
        ids = batch["input_ids"]
        logits = model(ids[:, :-1], positions(batch, ids)[:, :-1])
        return cross_entropy(logits, batch["labels"][:, 1:])

    def targets(model, batch):
        return cross_entropy(model(batch["input_ids"], positions(batch, batch["input_ids"])), batch["targets"])

    return {
        "model": hugging_face,
        "model, bare": passes_no_positions,
        "module": shifts_logits,
        "module, cut": drops_last_input,
        "none": targets,
    }[style]


def whole_batch(style, num_tokens):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (2, num_tokens), generator=generator)
    labels = ids.clone()
    # A prompt long enough that one rank's first chunk has no label, and a hole.
    labels[:, : num_tokens // 3] = -100
    labels[1, -2] = -100
    if style == "none":
        targets = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
        return {"input_ids": ids, "targets": targets}
    return {"input_ids": ids, "labels": labels}


def train_both(style, kind, num_tokens, recompute=False, extra=()):
    """Loss difference and the worst relative error of a gradient, this rank's share of tokens, and the counts."""
    make = plain_model if kind == "plain" else lambda: hugging_face_model(kind)
    batch = whole_batch(style, num_tokens) | dict(extra)
    model, _ = make()
    if recompute and kind != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    reference = steps(style)(model, batch)
    reference.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    model, blocks = plain_model(recompute) if kind == "plain" else make()
    if recompute and kind != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    callback = ZigZagContextParallel(shift=style.split(",")[0] if style.startswith("module") else "auto")
    strategy = attach(callback, model)
    adapt_attention(model, blocks, strategy.context_parallel)
    adapt_attention(model, blocks, strategy.context_parallel)  # a second Trainer changes nothing
    for _ in range(2):  # the watched step, and one after it
        model.zero_grad()
        local = callback.split(batch, "train")
        with strategy.context_parallel.step("train"):
            loss = steps(style)(model, local)
        count = strategy.micro_batch.num_loss_tokens
        assert count.dtype == torch.int64 and count.dim() == 0
        (loss * count).backward()
    total, summed = count.clone(), (loss.detach() * count).nan_to_num()
    dist.all_reduce(total)
    dist.all_reduce(summed)
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in expected:
            grad = torch.zeros_like(expected[name]) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            worst = max(worst, float((grad / total - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)))
    counted = torch.tensor(strategy.micro_batch.num_tokens)
    dist.all_reduce(counted)
    return abs(float(summed / total - reference)), worst, int(counted), int(total)


def check_parity(ranks, *args):
    style, _, num_tokens = args[:3]
    batch = whole_batch(style, num_tokens)
    labels = batch["targets"] if style == "none" else batch["labels"][:, 1:]
    for loss_error, grad_error, num_counted, num_loss_tokens in ranks(train_both, *args):
        assert loss_error < TOLERANCE and grad_error < TOLERANCE
        assert num_counted == 2 * num_tokens and num_loss_tokens == int((labels != -100).sum())


@pytest.mark.parametrize("style", ["module", "module, cut", "none"])
@pytest.mark.parametrize("num_tokens", [16, 19])
def test_plain_module_equals_one_process(ranks2, style, num_tokens):
    check_parity(ranks2, style, "plain", num_tokens)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("num_tokens", [16, 19])
def test_unchanged_hugging_face_model_equals_one_process(ranks2, kind, num_tokens):
    check_parity(ranks2, "model", kind, num_tokens)


def test_positions_are_added_when_the_step_passes_none(ranks2):
    check_parity(ranks2, "model, bare", "qwen3_moe", 19)


@pytest.mark.parametrize(("style", "kind"), [("module", "plain"), ("model", "deepseek_v3"), ("model", "qwen3_moe")])
def test_four_ranks_equal_one_process(ranks4, style, kind):
    check_parity(ranks4, style, kind, 21)


@pytest.mark.parametrize(("style", "kind"), [("module", "plain"), ("model", "deepseek_v3"), ("model", "qwen3_moe")])
def test_recompute_equals_one_process(ranks2, style, kind):
    check_parity(ranks2, style, kind, 19, True)


def test_padding_on_the_right_equals_one_process(ranks2):
    mask = torch.ones(2, 19, dtype=torch.int64)
    mask[1, -2:] = 0
    labels = whole_batch("model", 19)["labels"]
    labels[1, -2:] = -100
    extra = (("attention_mask", mask), ("labels", labels))
    for loss_error, grad_error, *_ in ranks2(train_both, "model", "qwen3_moe", 19, False, extra):
        assert loss_error < TOLERANCE and grad_error < TOLERANCE


def one_rank(callback, batch, module=None):
    """The batch without cp, and what was counted."""
    strategy = attach(callback, module or nn.Linear(1, 1), Alone())
    return callback.split(batch, "train"), strategy.micro_batch


class Alone:
    def rank(self):
        return 0

    def size(self):
        return 1


@pytest.mark.parametrize("style", ["model", "module", "none"])
def test_without_cp_the_batch_is_the_same_object_and_counted(style):
    batch = whole_batch(style, 16)
    module = hugging_face_model("qwen3_moe")[0] if style == "model" else None
    same, counts = one_rank(ZigZagContextParallel(), batch, module)
    assert same is batch and counts.num_tokens == 32 and int(counts.num_loss_tokens) == 2 * 11 - 1


@pytest.mark.parametrize("batch", [torch.ones(3), {"a": "b"}, (torch.ones(2, 3, 4, 4), torch.ones(2)), None, 5])
def test_without_cp_any_batch_passes(batch):
    assert one_rank(ZigZagContextParallel(), batch)[0] is batch


def split_types():
    callback = ZigZagContextParallel(positions="none")
    attach(callback, plain_model()[0])
    x = torch.arange(8)[None]
    pair = namedtuple("Pair", "x y")(x, x)
    encoding = BatchEncoding({"input_ids": x, "targets": x})
    results = [callback.split(b, "train") for b in ((x, x), [x, x], pair, encoding)] + [callback.split(x, "predict")]
    assert list(encoding) == ["input_ids", "targets"] and encoding["input_ids"] is x  # the user's stays
    results[3] = type(results[3]).__name__, sorted(results[3]), results[3]["input_ids"]
    return [type(results[i]).__name__ for i in range(5)], results[3][:2], results[2].y.shape, results[4].shape


def test_a_split_batch_keeps_its_type(ranks2):
    types = ["tuple", "list", "Pair", "tuple", "Tensor"]
    encoding = ("BatchEncoding", ["input_ids", "position_ids", "targets"])
    assert ranks2(split_types) == [(types, encoding, (1, 4), (1, 4))] * 2


def restored(shift, num_tokens):
    callback = ZigZagContextParallel(shift=shift)
    attach(callback, nn.Linear(1, 1))
    ids = torch.randn(2, num_tokens, 3)
    local = callback.split({"inputs_embeds": ids}, "predict")
    return torch.equal(callback.restore(local["inputs_embeds"]), ids)


@pytest.mark.parametrize("shift", ["none", "module"])
@pytest.mark.parametrize("num_tokens", [8, 11])
def test_restore_undoes_the_split(ranks2, shift, num_tokens):
    assert ranks2(restored, shift, num_tokens) == [True, True]


def messages(what):
    x = torch.arange(8)[None]
    batch = {"input_ids": x, "labels": x}
    callback, stage = ZigZagContextParallel(shift="auto" if what == "whose labels" else "module"), "train"
    attach(callback, nn.Linear(1, 1))
    if what == "no labels":
        batch = {"input_ids": x}
    if what == "short":
        batch = {"input_ids": x[:, :3], "labels": x[:, :3]}
    if what == "no labels in validation":
        batch, stage = {"input_ids": x}, "validate"
    try:
        callback.split(batch, stage)
    except ValueError as error:
        return str(error)
    return "split"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no labels", ["The batch has no labels"] * 2),
        ("no labels in validation", ["split"] * 2),
        ("whose labels", ["shift='module'"] * 2),
        ("short", ["The sequence has 3 tokens"] * 2),
    ],
)
def test_a_batch_that_cannot_be_split_says_why(ranks2, what, words):
    for got, word in zip(ranks2(messages, what), words, strict=True):
        assert word in got


def test_settings_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"shift\('left'\) must be one of"):
        ZigZagContextParallel(shift="left")
    with pytest.raises(ValueError, match=r"strategy='fsdp_cp_ep'.*object"):
        ZigZagContextParallel().setup(Trainer(object()), nn.Linear(1, 1), "fit")


class SeparatesDocuments(Plain):
    """In one process it hides the documents before a token's own from it."""

    def forward(self, ids_BL, position_ids_BL):
        if torch.distributed.is_initialized() and self.__dict__.get("on_ranks"):
            return super().forward(ids_BL, position_ids_BL)
        ends = [*(position_ids_BL[0, 1:] == 0).nonzero().flatten().add(1).tolist(), ids_BL.shape[1]]
        starts = [0, *ends[:-1]]
        pairs = zip(starts, ends, strict=True)
        return torch.cat(
            [super(SeparatesDocuments, self).forward(ids_BL[:, a:b], position_ids_BL[:, a:b]) for a, b in pairs], 1
        )


def train_separated(documents):
    positions = torch.cat([torch.arange(5), torch.arange(9), torch.arange(2)]).expand(2, -1)
    batch = whole_batch("none", 16) | {"position_ids": positions}
    torch.manual_seed(1)
    model = SeparatesDocuments()
    reference = steps("none")(model, batch)
    reference.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.__dict__["on_ranks"] = True
    callback = ZigZagContextParallel(documents=documents)
    strategy = attach(callback, model)
    adapt_attention(model, {f"blocks.{i}": block for i, block in enumerate(model.blocks)}, strategy.context_parallel)
    local = callback.split(batch, "train")
    loss = steps("none")(model, local)
    count = strategy.micro_batch.num_loss_tokens
    dist.all_reduce(total := count.clone())
    (loss * count / total).backward()
    errors = []
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        errors.append(float((parameter.grad - expected[name]).norm() / expected[name].norm()))
    return max(errors)


def test_a_module_that_says_so_keeps_documents_apart(ranks2):
    assert max(ranks2(train_separated, "separate")) < TOLERANCE


def train_joined():
    with pytest.raises(ValueError, match=r"blocks\.0 uses .* packed documents.*documents='separate'"):
        train_separated("auto")
    return True


def test_a_module_that_attends_across_documents_is_refused(ranks2):
    assert all(ranks2(train_joined))


def restored_by_document():
    callback = ZigZagContextParallel(layout="per_document")
    attach(callback, nn.Linear(1, 1))
    targets = torch.arange(24).view(2, 12)
    batch = {"input_ids": targets, "targets": targets, "document_ids": torch.tensor([[0] * 5 + [1] * 7] * 2)}
    local = callback.split(batch, "train")
    return torch.equal(callback.restore(local["input_ids"]), targets)


def test_outputs_come_back_without_the_padding_of_documents(ranks2):
    assert all(ranks2(restored_by_document))
