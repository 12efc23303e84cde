"""``ZigZagContextParallel(verify_cp=True)``: what passes, what is found, and that training knows nothing of it."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel, verification
from lightning_moe_strategy.context_parallel.batch import find_sequences
from lightning_moe_strategy.context_parallel.documents import find_documents
from lightning_moe_strategy.context_parallel.piece import SplitSettings, cut_piece, piece_length
from lightning_moe_strategy.models.lightning_module import MoELanguageModel
from tests.families import make_model
from tests.modules import Block, PlainDecoder, PlainLanguageModel
from tests.parity import QUIET, InOrder

LENGTH = 22
CP2_EP2 = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)
PACKED = ([0, 5, 6, 13], [0, 9, 18, 20])


class Tokens(Dataset):
    """Random sequences whose labels are partly ignored; ``packed`` ones have positions that start again."""

    def __init__(self, packed=False, num_without_labels=0):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 60, (16, LENGTH), generator=generator)
        self.packed, self.num_without_labels = packed, num_without_labels

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: LENGTH if index < self.num_without_labels else 7] = -100
        item = {"input_ids": self.ids[index], "labels": labels}
        if self.packed:
            starts = PACKED[index % 2]
            ends = [*starts[1:], LENGTH]
            item["position_ids"] = torch.cat([torch.arange(e - s) for s, e in zip(starts, ends, strict=True)])
        return item


class Family(LightningModule):
    """A Hugging Face model in the shortest LightningModule there is."""

    def __init__(self, family):
        super().__init__()
        self.model = make_model(family)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    make,
    degrees=CP2_EP2,
    *,
    verify=True,
    num_steps=1,
    data=(),
    callbacks=(),
    precision="32-true",
    logger=False,
    **settings,
):
    """What was said, and the module after training."""
    said = []
    original, verification.rank_zero_info = verification.rank_zero_info, said.append
    torch.manual_seed(0)
    try:
        module = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator="cpu",
                devices=torch.distributed.get_world_size(),
                strategy=FSDPCPEPStrategy(**degrees),
                callbacks=[*callbacks, ZigZagContextParallel(verify_cp=verify, **settings)],
                precision=precision,
                **(QUIET | dict(max_steps=num_steps, use_distributed_sampler=False, logger=logger)),
            )
            trainer.fit(module, datamodule=InOrder(DataLoader(Tokens(**dict(data)), batch_size=2)))
    finally:
        verification.rank_zero_info = original
    return said, module


def passes(make, degrees=CP2_EP2, **options):
    said, _ = train(make, degrees, **options)
    return said


def fails(make, degrees, options=()):
    with pytest.raises(RuntimeError) as error:
        train(make, degrees, **dict(options))
    return str(error.value)


def check_pass(results, words="the model is what it is in one process"):
    for said in results:
        (text,) = said
        assert words in text


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa", "kimi_linear"])
def test_a_hugging_face_model_passes(family, ranks4):
    check_pass(ranks4(passes, partial(Family, family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v32", "qwen3_next", "mimo_v2_flash", "afmoe"])
def test_rarer_hugging_face_models_pass(family, ranks4):
    check_pass(ranks4(passes, partial(Family, family)))


def ours(model, recompute="none"):
    return passes(partial(MoELanguageModel, model), CP2_EP2 | dict(recompute=recompute), shift="module")


@pytest.mark.parametrize(("model", "recompute"), [("tiny", "block"), ("tiny-dsa", "none"), ("tiny-dsa", "block")])
def test_our_own_models_pass(model, recompute, ranks4):
    check_pass(ranks4(ours, model, recompute))


def test_a_model_of_the_user_passes_on_an_uneven_cp_in_two_steps(ranks4):
    """cp in two steps: 22 tokens in 8 chunks."""
    degrees = dict(fsdp=1, cp=4, cp_inter=2, e_fsdp=1, ep=4, recompute="block")
    check_pass(ranks4(partial(passes, PlainLanguageModel, degrees, shift="module")))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_packed_batch_passes(family, ranks2):
    options = dict(data=dict(packed=True), degrees=dict(fsdp=1, cp=2, ep=2))
    check_pass(ranks2(partial(passes, partial(Family, family), **options)))


def test_bf16_passes_with_its_own_tolerance(ranks2):
    said = ranks2(partial(passes, PlainLanguageModel, dict(cp=2, ep=2), precision="bf16-mixed", shift="module"))
    check_pass(said, "tolerance 3e-02 for bfloat16")


class MixingBlock(Block):
    """Attention, and one more way from token to token, written so that no refusal sees it."""

    def __init__(self, how):
        super().__init__(16, 2, 4, 2)
        self.how = how

    def forward(self, x_BSD):
        mixed = {
            "mean": lambda x: torch.einsum("bsd->bd", x)[:, None].expand_as(x) / x.shape[1],
            "roll": lambda x: torch.cat([x[:, -1:], x[:, :-1]], 1),
            "cumsum": lambda x: torch.ones(x.shape[1], x.shape[1]).tril() @ x / 8,
        }[self.how]
        return super().forward(x_BSD + 0.1 * mixed(x_BSD))


class Mixes(PlainLanguageModel):
    def __init__(self, how):
        super().__init__()
        self.decoder.blocks[1] = MixingBlock(how)


class CountsPositions(PlainLanguageModel):
    def loss(self, batch):
        return super().loss({key: x for key, x in batch.items() if key != "position_ids"})


class CountsWithPenalty(PlainLanguageModel):
    """Its loss is no mean over the labels that count."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + batch["input_ids"].float().mean() ** 2


class RollsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.roll(1, dims=1)


class MixesBackward(PlainLanguageModel):
    def __init__(self):
        super().__init__()
        self.decoder.blocks[1].norm.register_forward_hook(lambda module, args, output: RollsGradients.apply(output))


def check_failure(results, *words):
    assert len(results) > 1
    for text in results:
        assert text == results[0], "every rank says the same"
        for word in words:
            assert word in text, text


@pytest.mark.parametrize("how", ["mean", "roll", "cumsum"])
def test_tokens_that_are_mixed_quietly_are_found(how, ranks2):
    found = ranks2(fails, partial(Mixes, how), dict(cp=2, ep=2), (("shift", "module"),))
    check_failure(
        found, "first module whose output differs is decoder.blocks.1:", "Gradients that differ most: decoder."
    )


def test_positions_counted_from_0_are_found(ranks2):
    options = (("shift", "module"), ("positions", "none"))
    found = ranks2(fails, CountsPositions, dict(cp=2, ep=2), options)
    check_failure(found, "the loss by", "the logits (output of decoder) by", "counts positions from 0")


def test_a_wrong_promise_about_documents_is_found(ranks2):
    options = (("shift", "module"), ("documents", "separate"), ("data", (("packed", True),)))
    check_failure(ranks2(fails, PlainLanguageModel, dict(cp=2, ep=2), options), "As one document the same tokens are")


def test_a_loss_that_is_no_mean_over_labels_is_found(ranks2):
    found = ranks2(fails, CountsWithPenalty, dict(cp=2, ep=2), (("shift", "module"),))
    check_failure(found, "differ the loss by", "All outputs are equal, so it is the loss")


def test_a_backward_pass_that_mixes_tokens_is_found(ranks2):
    found = ranks2(fails, MixesBackward, dict(cp=2, ep=2), (("shift", "module"),))
    check_failure(found, "so it is the backward pass", "decoder.")


class Busy(PlainLanguageModel):
    """Draws from every generator, counts, keeps metrics and buffers, has dropout, and logs."""

    def __init__(self):
        super().__init__(optimizer="adamw", learning_rate=0.01)
        self.dropout = nn.Dropout(0.2)
        self.mean = MeanMetric()
        self.register_buffer("calls", torch.zeros(1))
        self.running, self.notes, self.num_calls = torch.zeros(2), {"seen": []}, 0
        self.draws = []

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.running[0] += 1
        self.num_calls += 1
        self.notes["seen"].append(batch_idx)
        self.draws.append((random.random(), np.random.rand(), float(torch.rand(()))))
        self.decoder.norm.weight.register_hook(lambda gradient: gradient)
        loss = self.loss(batch)
        noise = self.dropout(torch.ones(8)).mean()
        self.mean(loss.detach())
        self.logger.log_metrics({"called": 1.0}, step=batch_idx)
        self.log("mean", self.mean, on_step=True, prog_bar=True)
        self.losses.append(float(loss.detach()))
        return loss * (1 + 0.1 * noise)


class Remember(Callback):
    def __init__(self):
        self.metrics, self.results = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.results.append(sorted(trainer._results))


class Recorder(DummyLogger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((sorted(metrics), step))


def everything(make, verify):
    """All that a run leaves behind."""
    random.seed(1)
    np.random.seed(1)
    remember, logger = Remember(), Recorder()
    options = dict(verify=verify, num_steps=3, shift="module", callbacks=[remember], logger=logger)
    _, module = train(make, CP2_EP2, **options)
    weights = {name: p.to_local() for name, p in module.named_parameters()}
    state = module.calls, module.running, module.num_calls, module.notes, module.draws, module.losses
    said = remember.metrics, remember.results, logger.lines
    monitor = next(c for c in module.trainer.callbacks if type(c).__name__ == "ExpertLoadMonitor")
    after = random.random(), np.random.rand(), float(torch.rand(()))
    return weights, state, said, monitor.last_tokens, after


def same_with_and_without():
    with_check, without = everything(Busy, True), everything(Busy, False)
    weights, others = with_check[0], without[0]
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert repr(with_check[1:]) == repr(without[1:])
    return True


@pytest.mark.slow
def test_training_after_the_check_is_bitwise_the_same(ranks4):
    assert all(ranks4(same_with_and_without))


SEEN = []


class Guarded(PlainLanguageModel):
    def training_step(self, batch, batch_idx):
        SEEN.append((self.trainer.strategy.context_parallel.guard is not None, batch["input_ids"].shape[1]))
        return super().training_step(batch, batch_idx)


def guarded_steps():
    SEEN.clear()
    train(Guarded, CP2_EP2, num_steps=2, shift="module")
    return SEEN


def test_the_first_step_is_watched_after_the_check_as_it_was_in_it(ranks4):
    """Split, whole, then two steps of training; a rank holds 12 of 22 or 21 tokens, a dummy among them."""
    assert ranks4(guarded_steps) == [[(True, 13), (False, 21), (True, 13), (False, 13)]] * 4


def test_a_batch_without_labels_leaves_the_check_to_the_next(ranks2):
    options = dict(data=dict(num_without_labels=2), num_steps=3, shift="module")
    check_pass(ranks2(partial(passes, PlainLanguageModel, dict(cp=2, ep=2), **options)), "tokens of batch 1, ")


class Drops(PlainLanguageModel):
    """Another mask for another number of tokens."""

    def __init__(self):
        super().__init__()
        self.decoder.norm.register_forward_hook(lambda module, args, output: F.dropout(output, 0.3))


def test_dropout_does_not_count_as_a_difference(ranks2):
    check_pass(ranks2(partial(passes, Drops, dict(cp=2, ep=2), shift="module")))


class Manual(PlainLanguageModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def refused():
    with pytest.raises(ValueError, match=r"verify_cp=True runs training_step twice.*Manual .*steps its optimizer"):
        train(Manual, dict(cp=2, ep=2), shift="module")
    return True


def test_manual_optimization_is_refused(ranks2):
    assert all(ranks2(refused))


class TiedRouter(PlainLanguageModel):
    """Scores that are equal but for rounding, which here goes the other way where there are more tokens."""

    def __init__(self):
        super().__init__()
        for block in self.decoder.blocks:
            block.sparse.router.register_forward_hook(self.almost_equal)

    @staticmethod
    def almost_equal(module, args, scores):
        return scores * (1e-6 if scores.shape[0] < 30 else -1e-6)


def test_ties_of_experts_are_said_and_compared_with_the_same_experts(ranks2):
    said = ranks2(partial(passes, TiedRouter, dict(cp=2, ep=2), shift="module"))
    check_pass(said, "84 of 84 choices of experts were ties within rounding")


class ChoosesBySequence(PlainLanguageModel):
    """A router whose scores depend on the other tokens."""

    def __init__(self):
        super().__init__()
        router = self.decoder.blocks[1].sparse.router
        router.register_forward_hook(lambda module, args, scores: scores - scores.mean(0, keepdim=True))


def test_a_router_that_looks_at_other_tokens_is_found(ranks2):
    found = ranks2(fails, ChoosesBySequence, dict(cp=2, ep=2), (("shift", "module"),))
    check_failure(found, "the choice of experts by")


def cut(items, degree=2, **options):
    fields = find_sequences(items, sequence_keys=None, labels_key=None)
    settings = SplitSettings(shift="model", ignore_index=-100, pad_token_id=0, layout="zigzag")
    return cut_piece(items, fields, settings, degree=degree, **options)


def test_a_piece_holds_labels_and_the_start_of_a_document():
    ids = torch.arange(4000).view(2, 2000)
    labels = ids.clone()
    labels[:, :1200] = -100
    piece = cut({"input_ids": ids, "labels": labels, "names": ["a", "b"], "lengths": torch.ones(2)})
    tokens = piece.fields.num_tokens
    assert tokens == 255 and piece.num_counted > 200 and piece.items["position_ids"].tolist() == [[*range(tokens)]] * 2
    ends = torch.tensor([0, 1500, 2000, 3700, 4000], dtype=torch.int32)
    packed = {"input_ids": ids, "labels": ids, "cu_seq_lens_q": ends}
    piece = cut(packed)
    documents = find_documents(piece.items, batch_size=2, num_tokens=tokens)
    assert documents == piece.documents and max(map(len, documents)) == 2
    assert piece.items["cu_seq_lens_q"].dtype == torch.int32
    one = cut(packed, as_one_document=True)
    assert one.documents == ((0,),) and one.items["cu_seq_lens_q"].tolist() == [0, tokens, 2 * tokens]


@pytest.mark.parametrize("degree", [2, 3, 4, 16, 64, 128])
def test_every_rank_owns_a_part_of_a_piece_and_padding_is_checked(degree):
    for num_tokens in (2 * degree, 2 * degree + 1, 4 * degree, 10**6):
        length = piece_length(num_tokens, degree)
        assert 2 * degree <= length <= min(num_tokens, max(256, 4 * degree))
        assert length % (2 * degree) or num_tokens == 2 * degree


def test_what_is_dropped_or_drawn_in_the_check_is_its_mean():
    from lightning_moe_strategy.rehearsal import _NoRandomness

    with _NoRandomness():
        x = torch.ones(5, requires_grad=True)
        F.dropout(x, 0.5).sum().backward()
        assert torch.equal(x.grad, torch.full((5,), 2.0))
        assert torch.rand(3).tolist() == [0.5] * 3 and torch.randn_like(x).tolist() == [0.0] * 5
        assert torch.empty(2).uniform_(1, 3).tolist() == [2.0] * 2 and torch.empty(2).normal_(4).tolist() == [4.0] * 2
        assert torch.bernoulli(torch.tensor([0.2, 0.7])).tolist() == [0.0, 1.0]


def test_a_decoder_counts_from_0_in_one_process():
    """What the tests above rely on."""
    torch.manual_seed(0)
    decoder, ids = PlainDecoder(), torch.arange(6)[None]
    assert torch.equal(decoder(ids), decoder(ids, torch.arange(6)[None]))
