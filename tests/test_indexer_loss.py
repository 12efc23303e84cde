"""Training indexers: the gradient of one process with an explicit divergence, on every layout; nothing else changes.

The reference is transformers' own model, eager, and autograd through the divergence of scores of all keys from the
attention that the model returns, of the keys that were chosen.

Shapes: B batch, S tokens, H heads; I heads of the indexer, J channels of each.
"""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Subset

from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel
from lightning_moe_strategy.callbacks.indexer_divergence import IndexerDivergence
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.indexers import IndexerLoss, is_indexer, train_indexers
from lightning_moe_strategy.kernels.key_selection import select_keys
from lightning_moe_strategy.kernels.sparse_attention import sparse_attention
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.simulate import simulate
from tests.families import make_model
from tests.modules import VOCABULARY, RandomTokens, loader
from tests.parity import LAYOUTS_OF_4, fit, reference, worst_difference
from tests.test_context_parallel_families import PACKED, make_batch
from tests.test_context_parallel_sparse import Gathers, split_over_ranks
from tests.test_zigzag import attach

WEIGHT = 0.7
TOLERANCE = 1e-6
"""Norm of a gradient's error over its norm, FP32."""

HUGGING_FACE = ["deepseek_v32", "glm_moe_dsa"]
SIZES = {"preset": "tiny-dsa", "vocab_size": VOCABULARY, "hidden": 48, "heads": 3, "index_heads": 12, "index_top_k": 5}


def make_spread_model(family):
    return spread(make_model(family))


def spread(model, factor=15.0):
    """Index scores so far from the attention that a gradient is their difference and not its rounding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".indexer." in name and parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def index_scores(indexer, hidden, q_resid, position_embeddings):
    """scores_BSS of an indexer of transformers, all keys, with a graph to its parameters alone."""
    hidden, q_resid = hidden.detach(), q_resid.detach()
    module = sys.modules[type(indexer).__module__]
    turn = module.apply_rotary_pos_emb_interleave if "Glm" in type(indexer).__name__ else module.apply_rotary_pos_emb
    rope = indexer.qk_rope_head_dim
    query_BSIJ = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key_BS1J = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    turned = turn(query_BSIJ[..., :rope], key_BS1J[..., :rope], *position_embeddings, unsqueeze_dim=2)
    query_BSIJ, key_BS1J = (
        torch.cat([front, x[..., rope:]], -1) for front, x in zip(turned, (query_BSIJ, key_BS1J), strict=True)
    )
    products_BSIS = torch.einsum("bqij,bkj->bqik", query_BSIJ, key_BS1J[:, :, 0]).mul(indexer.softmax_scale).relu()
    weights_BSI = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return torch.einsum("bqi,bqik->bqk", weights_BSI, products_BSIS)


class Divergence:
    """Sums up the divergence of every layer with an indexer, while a model of transformers runs."""

    def __init__(self, model, is_real_BS=None):
        self.total, self.is_real_BS = torch.zeros(()), is_real_BS
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_hook(self.chosen)
                layer.self_attn.register_forward_hook(self.attended)

    def chosen(self, indexer, args, ids):
        self.scores, self.ids = index_scores(indexer, *args[:3]), ids

    def attended(self, attention, args, output):
        attention_BSS = output[1].detach().sum(1)
        target = attention_BSS / attention_BSS.sum(-1, keepdim=True)
        is_chosen = torch.zeros_like(target, dtype=torch.bool).scatter(-1, self.ids.long(), True).tril()
        log_predicted = self.scores.masked_fill(~is_chosen, -torch.inf).log_softmax(-1).masked_fill(~is_chosen, 0.0)
        kl_BS = (torch.xlogy(target, target) - target * log_predicted).sum(-1)
        self.total = self.total + (kl_BS if self.is_real_BS is None else kl_BS[self.is_real_BS]).sum()


def expected_gradients(family, batch, packed):
    """One process, one document at a time."""
    model = make_spread_model(family)
    targets = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), -100)], 1)
    count, num_tokens = (targets != -100).sum(), targets.shape[1]
    mask = batch.get("attention_mask")
    divergence = Divergence(model)
    loss = 0.0
    for row, starts in enumerate(packed or [[0], [0]]):
        for start, end in zip(starts, [*starts[1:], num_tokens], strict=True):
            divergence.is_real_BS = None if mask is None else mask[row : row + 1, start:end].bool()
            ids, labels = batch["input_ids"][row : row + 1, start:end], targets[row : row + 1, start:end]
            loss = loss + model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=count).loss
    (loss + WEIGHT * divergence.total / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, float(
        divergence.total.detach()
    )


def adapted(family, recompute, with_loss=True):
    """A model on this rank, its callback and strategy."""
    model = make_spread_model(family)
    blocks = {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}
    callback = ZigZagContextParallel()
    cp = attach(callback, model).context_parallel
    if with_loss:
        cp.indexer_loss = IndexerLoss(WEIGHT)
        train_indexers(model)
    adapt_attention(model, blocks, cp)
    if recompute:
        recompute_blocks(model, blocks, {}, indexers_are_trained=with_loss)
    return model, callback, callback._strategy


def summed_gradients(model, callback, strategy, batch):
    """Of the mean over all labels of the batch, on all ranks; nothing where none has one."""
    local = callback.split(batch, "train")
    with strategy.context_parallel.step("train"):
        loss = model(**local, use_cache=False).loss
    count = strategy.micro_batch.num_loss_tokens
    dist.all_reduce(total := count.clone())
    (loss * count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= total
    return gradients


def train(family, packed, recompute, num_padding):
    batch = make_batch(24, packed)
    if num_padding:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -num_padding:] = 0
        batch["labels"][1, -num_padding:] = -100
    expected, total = expected_gradients(family, batch, packed)
    model, callback, strategy = adapted(family, recompute)
    gradients = summed_gradients(model, callback, strategy, batch)
    assert sum("indexer" in name for name in gradients) == 5 * sum(map(is_indexer, model.modules()))
    sums = strategy.context_parallel.indexer_loss.take_sums(torch.device("cpu"))
    dist.all_reduce(sums)
    return *worst_difference(gradients, expected), float(sums[0]) / total - 1, float(sums[1])


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("packed", "num_padding"), [(None, 0), (PACKED, 0), (None, 5)], ids=["one document", "packed", "padded"]
)
@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_every_gradient_and_the_divergence_are_those_of_one_process(
    family, degree, packed, num_padding, recompute, request
):
    """Layers of glm_moe_dsa share, and then the layer with the indexer alone trains it."""
    ranks = request.getfixturevalue(f"ranks{degree}")
    for error, name, off, num_terms in ranks(train, family, packed, recompute, num_padding):
        assert error < TOLERANCE, name
        assert abs(off) < 1e-5 and num_terms == 2 * (48 - num_padding)


def with_and_without(family, recompute):
    """Names of the gradients that the loss changes, and what is gathered and reduced with and without it."""
    results = []
    for with_loss in (True, False):
        with Gathers() as gathers:
            gradients = summed_gradients(*adapted(family, recompute, with_loss), make_batch(24, None))
        results.append((gradients, gathers.gathered, gathers.reduced))
    (ours, gathered, reduced), (plain, gathered_before, reduced_before) = results
    changed = {name for name, x in ours.items() if name not in plain or not torch.equal(x, plain[name])}
    return changed, plain.keys() <= ours.keys(), sorted(gathered), gathered_before, sorted(reduced), reduced_before


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_only_indexers_change_and_only_index_keys_travel_once_more(recompute, ranks2):
    for changed, all_there, gathered, before, reduced, reduced_before in ranks2(
        with_and_without, "glm_moe_dsa", recompute
    ):
        assert all_there and len(changed) == 10 and all(".indexer." in name for name in changed)
        index_key = (16, torch.float32)
        assert gathered == sorted([*before, index_key, index_key])
        assert reduced == sorted([*reduced_before, index_key, index_key])


class Explicit(TorchFunctionMode):
    """Sums up the divergence of our own model in one process, in plain torch and over all keys."""

    def __init__(self):
        super().__init__()
        self.total, self.index = torch.zeros(()), (None,) * 4

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is select_keys:
            self.index = (*args[:3], result)
        elif func is sparse_attention and args[2] is self.index[3]:
            self.add(*self.index, *args[:2], args[4])
            self.index = (None,) * 4  # layers that share the keys train nothing
        return result

    def add(self, index_query, index_key, index_weights, ids, query, latent, scale):
        num_keys = latent.shape[1]
        is_chosen = F.one_hot(ids.long() + 1, num_keys + 1).sum(-2)[..., 1:].bool()
        scores = torch.einsum(
            "bqi,bqik->bqk", index_weights, torch.einsum("bqij,bkj->bqik", index_query, index_key).relu()
        )
        attention = torch.einsum("bqhm,bkm->bqhk", query, latent).detach() * scale
        target = attention.masked_fill(~is_chosen[:, :, None], -torch.inf).softmax(-1).sum(2)
        target = target / target.sum(-1, keepdim=True)
        log_predicted = scores.masked_fill(~is_chosen, -torch.inf).log_softmax(-1).masked_fill(~is_chosen, 0.0)
        self.total = self.total + (torch.xlogy(target, target) - target * log_predicted).sum()


class Ours(MoELanguageModel):
    """4 layers, of which the first and the third have an indexer; ``explicit`` adds the loss in one process."""

    def __init__(self, explicit=False, **sizes):
        super().__init__(SIZES | sizes, learning_rate=0.03, weight_decay=0.0)
        spread(self)
        self.explicit = explicit
        if explicit:
            train_indexers(self)

    def training_step(self, batch, batch_idx):
        if not self.explicit:
            return super().training_step(batch, batch_idx)
        with Explicit() as divergence:
            loss = super().training_step(batch, batch_idx)
        self.mean_kl = float(divergence.total.detach()) / (2 * batch["input_ids"].numel())
        return loss + WEIGHT * divergence.total / (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Family(LightningModule):
    """A model of transformers in the shortest LightningModule there is."""

    def __init__(self, family, explicit=False):
        super().__init__()
        self.model = make_spread_model(family)
        self.divergence = Divergence(self.model) if explicit else None

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        if self.divergence is None:
            return loss
        self.mean_kl = float(self.divergence.total.detach()) / (2 * batch["input_ids"].numel())
        return loss + WEIGHT * self.divergence.total / (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODULES = {"tiny-dsa": Ours, "glm_moe_dsa": partial(Family, "glm_moe_dsa")}
OPTION = {"indexer_loss_weight": WEIGHT}


def trained(kind, strategy, num_micro_batches=1):
    """Gradients of a Trainer's step, what it logged, and how many parameters of indexers its optimizer has."""
    shift = "module" if kind == "tiny-dsa" else "auto"
    trainer, module, keep = fit(
        OPTION | strategy,
        MODULES[kind],
        lambda dp: loader(8, 21, 8 // dp // num_micro_batches),
        shift=shift,
        accumulate_grad_batches=num_micro_batches,
    )
    indexers = {p for m in module.modules() if is_indexer(m) for p in m.parameters()}
    optimized = {p for group in trainer.optimizers[0].param_groups for p in group["params"]}
    return keep.steps[0], float(trainer.callback_metrics["indexer_kl"]), len(indexers & optimized)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    ("degrees", "recompute", "num_micro_batches"),
    [
        (LAYOUTS_OF_4[0], "none", 2),
        (LAYOUTS_OF_4[0], "block", 1),
        (LAYOUTS_OF_4[2], "none", 1),
        (LAYOUTS_OF_4[2], "block", 2),
        (LAYOUTS_OF_4[12], "block", 1),
    ],
    ids=str,
)
def test_a_trainer_on_four_ranks_has_the_gradients_of_one_process(kind, degrees, recompute, num_micro_batches, ranks4):
    """21 tokens with labels on some: the split adds padding, and for our own model a dummy token."""
    module, expected, _ = reference(partial(MODULES[kind], explicit=True), loader(8, 21, 8))
    for gradients, kl, num_optimized in ranks4(trained, kind, degrees | {"recompute": recompute}, num_micro_batches):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < 2 * TOLERANCE, name
        assert num_optimized == 10 and abs(kl / module.mean_kl - 1) < 1e-5


class Recorded(IndexerDivergence):
    """``indexer_kl`` of every step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.steps.append(float(self.last_kl))


class IndexersAlone(Ours):
    """All else is frozen."""

    def configure_optimizers(self):
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".indexer." in name)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def twenty_steps(precision):
    kept, two = Recorded(), RandomTokens(2, 24)
    _, module, _ = fit(
        OPTION | dict(fsdp=1, cp=2, recompute="block"),
        IndexersAlone,
        lambda dp: DataLoader(Subset(two, [0, 1] * 20), batch_size=2),
        shift="module",
        callbacks=(kept,),
        max_steps=20,
        precision=precision,
    )
    return kept.steps, {p.dtype for p in module.parameters()}


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_the_divergence_falls_when_indexers_alone_are_trained(precision, ranks2):
    results = ranks2(twenty_steps, precision)
    for steps, dtypes in results:
        assert len(steps) == 20 and steps[-1] < 0.3 * steps[0]
        assert dtypes == {torch.float32}
    assert results[0][0] == results[1][0]


def changed_in_our_model():
    gradients = []
    for loss in (IndexerLoss(WEIGHT), None):
        torch.manual_seed(0)
        model = spread(MoETransformer(ModelConfig.resolve(SIZES | {"dense_first_layers": 4})))
        if loss is not None:
            train_indexers(model)
        cp, own = split_over_ranks(model, 24)
        cp.indexer_loss = loss
        ids_BS = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
        with cp.step("train"):
            model(ids_BS[:, own], cp.current.position_ids_BL).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    ours, plain = gradients
    return {name for name, x in ours.items() if name not in plain or not torch.equal(x, plain[name])}


def test_only_indexers_of_our_model_change(ranks2):
    for changed in ranks2(changed_in_our_model):
        assert len(changed) == 10 and all(".indexer." in name for name in changed)


def kept_and_reduced():
    """Tokens of all tensors that are kept, and dtypes of what travels, of our own model in bf16 on two ranks."""
    model = MoETransformer(ModelConfig.resolve(SIZES | {"dense_first_layers": 4})).bfloat16()
    train_indexers(model)
    cp, own = split_over_ranks(model, 72)
    cp.indexer_loss = IndexerLoss(WEIGHT)
    kept, index_key = [], ModelConfig.resolve(SIZES).index_head_dim
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        with cp.step("train"):
            out = model(torch.randint(VOCABULARY, (2, len(own))), cp.current.position_ids_BL)
    with Gathers() as backward:
        out.float().square().sum().backward()
    is_index_key = [channels == index_key for channels, _ in backward.reduced]
    reduced = [(dtype, bf16) for (_, dtype), bf16 in zip(backward.reduced, backward.reduced_bf16, strict=True)]
    travelled = [pair for pair, is_key in zip(reduced, is_index_key, strict=True) if is_key]
    return [shape for shape in kept if shape[:2] == (2, 72)], travelled


def test_only_tensors_of_this_rank_are_kept_and_key_gradients_are_summed_in_fp32(ranks2):
    for whole, travelled in ranks2(kept_and_reduced):
        assert not whole
        assert travelled == [(torch.float32, False)] * 2


def simulated(cp, recompute, weight):
    sizes = SIZES | {"num_experts": 8, "dense_first_layers": 1}
    ids_BS = torch.zeros(8 // cp, 64, dtype=torch.int64)
    return simulate(
        partial(MoELanguageModel, sizes),
        ParallelDims(fsdp=8 // cp, cp=cp, e_fsdp=1, ep=8, nvl=8),
        {"input_ids": ids_BS, "labels": ids_BS, "shift_labels": ids_BS},
        world_size=8,
        local_world_size=8,
        precision="bf16-mixed",
        recompute=recompute,
        indexer_loss_weight=weight,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "recompute"), [(1, "none"), (4, "block")])
def test_a_simulation_counts_the_loss_once_and_in_the_backward_pass(cp, recompute):
    plain, trains = simulated(cp, recompute, 0.0), simulated(cp, recompute, 1.0)
    config = ModelConfig.resolve(SIZES)
    flops = {key: count for key, count in trains.flops.items() if "indexer_loss" in str(key)}
    assert {key[0] for key in flops} == {"backward"}
    pairs = (8 // cp) * (64 // cp) * config.index_top_k
    per_pair = config.heads * (config.kv_lora + config.rope_head_dim)
    per_pair += config.index_heads * (3 * config.index_head_dim + 2)
    assert sum(flops.values()) == 2 * 2 * pairs * per_pair
    assert {key for key in trains.flops if "select_keys" in str(key)} == {
        key for key in plain.flops if "select_keys" in str(key)
    }
    key_numbers = 2 * (8 // cp) * 64 * config.index_head_dim
    for collective, bytes_per_number in (("all_gather", 2), ("reduce_scatter", 4)):
        more = trains.num_bytes.get(("cp", collective), 0) - plain.num_bytes.get(("cp", collective), 0)
        assert more == (key_numbers * bytes_per_number if cp > 1 else 0)


def test_a_model_without_an_indexer_is_refused():
    with pytest.raises(ValueError, match=r"indexer_loss_weight > 0 trains the indexers.*Linear has none.*tiny-dsa"):
        train_indexers(torch.nn.Linear(1, 1))


def refused(*steps):
    try:
        for weight, module in steps:
            fit({"indexer_loss_weight": weight}, lambda module=module: module, lambda dp: loader(2, 24, 2))
    except ValueError as error:
        return str(error)
    return "passed"


def other_model():
    return refused((1.0, MoELanguageModel("tiny")))


def other_weight():
    module = MODULES["glm_moe_dsa"]()
    return refused((1.0, module), (1.0, module), (0.5, module))


def test_a_trainer_refuses_a_model_without_an_indexer_and_another_weight_for_the_same_module(ranks1):
    (answer,) = ranks1(other_model)
    assert "MoELanguageModel has none" in answer
    (answer,) = ranks1(other_weight)
    assert "indexer_loss_weight 1.0, now 0.5" in answer


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_refused(weight):
    with pytest.raises(ValueError, match=rf"indexer_loss_weight\({weight}\) must be finite and above 0"):
        FSDPCPEPStrategy(indexer_loss_weight=weight)


def test_padding_weighs_nothing_and_a_step_without_labels_takes_the_mean():
    loss, cpu = IndexerLoss(0.5), torch.device("cpu")
    real_BL = torch.tensor([[True, True, False, True], [True, False, False, False]])
    weights_BL = loss.token_weights(real_BL, (2, 4), cpu, are_counted=True)
    assert torch.equal(weights_BL, 0.5 * real_BL)
    assert torch.equal(loss.token_weights(real_BL, (2, 4), cpu, are_counted=False), 0.125 * real_BL)
    loss.add(torch.full((2, 4), 3.0), weights_BL)
    assert loss.take_sums(cpu).tolist() == [12.0, 4.0] and loss.take_sums(cpu).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"Attention over \(2, 3\).*in a batch of \(2, 4\) with padding"):
        loss.token_weights(real_BL, (2, 3), cpu, are_counted=True)
