"""Unchanged Hugging Face models of many families on cp ranks: the loss and every gradient of one process.

Windows are shorter than a chunk and longer than one; documents begin inside of chunks and on their borders.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.recompute import recompute_blocks
from tests.families import FAMILIES, LINEAR, MORE_FAMILIES, NOT_SPLIT, VOCABULARY, make_model
from tests.modules import loader
from tests.parity import LAYOUTS_OF_4, fit, reference, worst_difference
from tests.test_zigzag import attach

TOLERANCE = 1e-6
"""Norm of a gradient's error over its norm, FP32."""

LOOSER = dict.fromkeys(LINEAR, 4e-6) | dict.fromkeys(("gpt_oss", "mimo_v2_flash"), 2e-6)
"""A_log, dt_bias and sinks have one number per head, a sum over all tokens that largely cancels."""

LOOSER_OF_MORE = {"gemma4_text": 2e-5, "bailing_hybrid": 3e-5, "lara_mini": 4e-6}
"""The same sums of linear attention, here over eight layers; Gemma's scores are not scaled down, and large."""

ALWAYS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "kimi_linear")
"""One for each kind of attention; the others are slow tests."""

PACKED = [[0, 5, 6, 13], [0, 9, 18, 20]]
"""Starts of documents in the two sequences of a batch: 24 tokens, in chunks of 6 (cp 2) or 3 (cp 4)."""


def make_batch(num_tokens, packed):
    """``packed`` are the starts of documents in the two rows, if any."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (2, num_tokens), generator=generator)
    labels = ids.clone()
    labels[0, :7] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        ends = [[*row[1:], num_tokens] for row in packed]
        rows = [
            torch.cat([torch.arange(e - s) for s, e in zip(*row, strict=True)])
            for row in zip(packed, ends, strict=True)
        ]
        batch["position_ids"] = torch.stack(rows)
    return batch


def one_by_one(model, batch, packed):
    """Each document's share of the loss, computed without the others."""
    targets = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), -100)], 1)
    for row, starts in enumerate(packed):
        for start, end in zip(starts, [*starts[1:], targets.shape[1]], strict=True):
            ids, labels = batch["input_ids"][row : row + 1, start:end], targets[row : row + 1, start:end]
            yield model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=(targets != -100).sum()).loss


def train(family, num_tokens, packed, recompute, layout="zigzag"):
    """Difference of the loss and the worst relative error of a gradient on this rank, with its parameter."""
    batch = make_batch(num_tokens, packed)
    model = make_model(family)
    expected = sum(one_by_one(model, batch, packed)) if packed else model(**batch).loss
    expected.backward()
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    model = make_model(family)
    blocks = {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}
    callback = ZigZagContextParallel(layout=layout)
    strategy = attach(callback, model)
    adapt_attention(model, blocks, strategy.context_parallel)
    if recompute:
        recompute_blocks(model, blocks, {})
    local = callback.split(batch, "train")
    with strategy.context_parallel.step("train"):
        loss = model(**local).loss
    count = strategy.micro_batch.num_loss_tokens
    dist.all_reduce(total := count.clone())
    share = loss * count / total
    share.backward()
    dist.all_reduce(loss := share.detach().clone())
    rows = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        want = reference.get(name, torch.zeros_like(gradient))
        rows[name] = float((gradient - want).norm() / (want.norm() + 1e-12))
    worst = max(rows, key=lambda name: rows[name])
    return abs(float(loss - expected.detach())), rows[worst], worst


def refusal(family):
    """What a first step says instead of a wrong result."""
    model = make_model(family)
    callback = ZigZagContextParallel()
    strategy = attach(callback, model)
    try:
        adapt_attention(model, {"model.layers": model.model.layers[0]}, strategy.context_parallel)
        local = callback.split(make_batch(24, None), "train")
        with strategy.context_parallel.step("train"):
            model(**local)
    except ValueError as reason:
        return str(reason)


@pytest.mark.parametrize(("degree", "num_tokens", "recompute"), [(2, 24, False), (4, 22, True)], ids=["cp2", "cp4"])
@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FAMILIES]
)
def test_every_gradient_equals_one_process(family, packed, degree, num_tokens, recompute, request):
    ranks = request.getfixturevalue(f"ranks{degree}")
    for difference, error, parameter in ranks(train, family, num_tokens, packed, recompute):
        assert difference < 1e-6 and error < LOOSER.get(family, TOLERANCE), parameter


@pytest.mark.slow
@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_more_families_equal_one_process(family, packed, ranks2):
    for difference, error, parameter in ranks2(train, family, 24, packed, False):
        assert difference < 2e-6 and error < LOOSER_OF_MORE.get(family, 2e-6), parameter


@pytest.mark.parametrize("family", NOT_SPLIT)
def test_families_that_cannot_be_split_are_refused(family, ranks2):
    for message in ranks2(refusal, family):
        assert "cp > 1 supports" in message or "cp > 1 does not support" in message


@pytest.mark.parametrize("layout", ["per_document", "contiguous"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "kimi_linear"])
def test_every_gradient_equals_one_process_on_other_layouts(family, layout, ranks2):
    """Documents of 5, 1, 7 and 11 tokens: each is padded by itself, to a multiple of 4."""
    for difference, error, parameter in ranks2(train, family, 24, [PACKED[0]] * 2, True, layout):
        assert difference < 1e-6 and error < LOOSER.get(family, TOLERANCE), parameter


@pytest.mark.slow
def test_the_page_of_models_lists_what_is_tested():
    """docs/models.md is what ``python -m docs.models`` writes."""
    from docs.models import text

    assert Path("docs/models.md").read_text() == text()


class Family(LightningModule):
    """A family's model in the shortest LightningModule there is."""

    def __init__(self, family):
        super().__init__()
        self.model = make_model(family)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradients_of_trainer(family, degrees):
    _, _, keep = fit(degrees, partial(Family, family), lambda dp: loader(8, 22, 4 // dp))
    return keep.steps[0]


@pytest.mark.parametrize("family", ["gpt_oss", "glm_moe_dsa", "mimo_v2_flash", "kimi_linear", "qwen3_5_moe_text"])
def test_cp_4_and_ep_4_on_the_same_ranks_with_recompute_equal_one_process(family, ranks4):
    _, expected, _ = reference(partial(Family, family), loader(8, 22, 4))
    degrees = LAYOUTS_OF_4[4] | {"recompute": "block"}
    for gradients in ranks4(gradients_of_trainer, family, degrees):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < LOOSER.get(family, TOLERANCE), name
