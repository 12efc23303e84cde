"""Multi-token prediction: what transformers computes, and in training the same on every layout as in one process.

Shapes: B batch, S sequence, T tokens, D hidden, V vocabulary, M depths.
"""

import dataclasses
from functools import partial

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel, ZigZagContextParallel
from lightning_moe_strategy._torch_compat import OperationMode, tensors_in
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.models.config import PRESETS, ModelConfig
from lightning_moe_strategy.models.loss import IGNORE_INDEX, shift_labels
from lightning_moe_strategy.models.multi_token_prediction import projected_cross_entropy_sum
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.plan.model import mtp_parameters
from lightning_moe_strategy.plan.presets import MODELS
from lightning_moe_strategy.simulate import simulate
from lightning_moe_strategy.units import find_blocks
from tests.modules import VOCABULARY
from tests.modules import loader as plain_loader
from tests.parity import QUIET, fit, reference, worst_difference
from tests.test_communication import assert_gathered_and_reduced_once, train
from tests.test_models_transformer import DEEPSEEK_NAMES, SIZES, published_name
from tests.test_zigzag import attach

TOLERANCE = 1e-6
"""Norm of a gradient's error over its norm, FP32."""

DEPTHS = 2
NUM_TOKENS = 22
LENGTHS = [9, 2, 11]
"""Of packed documents: one ends inside a chunk, one is as short as the prediction reaches."""

OURS = {
    "softmax": {"preset": "tiny", "kv_heads": 2},
    "latent": {"preset": "tiny-mla"},
    "sparse": {"preset": "tiny-dsa", "index_heads": 12, "index_top_k": 5},
    "tied": {"preset": "tiny", "tie_embeddings": True},
}


class Samples(Dataset):
    """Rows of random tokens; ``kind`` says which targets count and whether rows pack documents."""

    def __init__(self, num_samples, kind):
        generator = torch.Generator().manual_seed(2)
        self.input_ids = torch.randint(1, VOCABULARY, (num_samples, NUM_TOKENS), generator=generator)
        self.targets = torch.randint(1, VOCABULARY, (num_samples, NUM_TOKENS), generator=generator)
        if kind == "prompts":
            # Answers begin where the last chunk of cp=2, and one of cp=4, does: the rank before it has no target of
            # its own, and its last token's at depth 1 is the first of them.
            self.targets[:, :18] = IGNORE_INDEX
            self.targets[0] = IGNORE_INDEX
        self.positions = None
        if kind == "packed":
            self.positions = torch.cat([torch.arange(length) for length in LENGTHS])
            self.targets[:, torch.tensor(LENGTHS).cumsum(0) - 1] = IGNORE_INDEX

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        sample = {"input_ids": self.input_ids[index], "shift_labels": self.targets[index]}
        return sample if self.positions is None else sample | {"position_ids": self.positions}


def loader(kind, num_samples, batch_size):
    return DataLoader(Samples(num_samples, kind), batch_size=batch_size)


class Model(MoELanguageModel):
    """Weights large enough for every token to matter, and small enough not to multiply rounding; plain SGD."""

    def __init__(self, kind, depths=DEPTHS):
        sizes = {"vocab_size": VOCABULARY, "hidden": 32, "layers": 2, "mtp_layers": depths, "mtp_loss": 0.3}
        super().__init__(OURS[kind] | sizes)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append((float(loss.detach()), int((batch["shift_labels"] != IGNORE_INDEX).sum())))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Alone(Model):
    """The reference of packed documents: each in a row of its own, which a model in one process keeps apart."""

    def training_step(self, batch, batch_idx):
        total = torch.zeros(())
        num_tokens = (batch["shift_labels"] != IGNORE_INDEX).sum()
        pieces = [batch[key].split(LENGTHS, 1) for key in ("input_ids", "shift_labels")]
        for ids_BS, targets_BS in zip(*pieces, strict=True):
            document = {"input_ids": ids_BS.contiguous(), "shift_labels": targets_BS.contiguous()}
            total += super().training_step(document, 0) * (targets_BS != IGNORE_INDEX).sum()
        return total / num_tokens


def depth_losses(model, input_ids_BS, targets_BS):
    """Of every depth, the mean loss over the tokens that count at depth 0, from whole logits and plain slices."""
    config, num_tokens = model.config, (targets_BS != IGNORE_INDEX).sum()
    places_1S = torch.arange(input_ids_BS.shape[1])[None]
    x_BSD = embedded_BSD = model.embed(input_ids_BS)
    for block in model.layers:
        x_BSD = block(x_BSD, places_1S)
    hidden_BSD = model.norm(x_BSD)
    losses = [F.cross_entropy(model.head(hidden_BSD).flatten(0, 1), targets_BS.flatten(), reduction="sum")]
    for depth, layer in enumerate(model.mtp_layers, start=1):
        later_BSD = torch.cat([embedded_BSD[:, depth:], torch.zeros_like(embedded_BSD[:, :depth])], 1)
        pair = torch.cat([layer.embed_norm(later_BSD), layer.hidden_norm(hidden_BSD)], -1)
        hidden_BSD = layer.norm(layer.block(layer.eh_proj(pair), places_1S))
        logits_BSV = model.head(hidden_BSD)[:, :-depth]
        targets = targets_BS[:, depth:].masked_fill(targets_BS[:, :-depth] == IGNORE_INDEX, IGNORE_INDEX)
        losses.append(F.cross_entropy(logits_BSV.flatten(0, 1), targets.flatten(), reduction="sum"))
    assert len(losses) == 1 + config.mtp_layers
    return torch.stack(losses) / num_tokens


@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_the_loss_is_the_main_one_and_the_weighted_mean_of_all_depths(kind):
    module, batch = Model(kind), next(iter(loader("prompts", 3, 3)))
    logged = {}
    module.log = lambda name, metric, **_: logged.update({name: float(metric.compute())})
    loss = module.training_step(batch, 0)
    main, *further = depth_losses(module.model, batch["input_ids"], batch["shift_labels"])
    torch.testing.assert_close(loss, main + 0.3 * torch.stack(further).mean())
    assert logged["train_loss"] == pytest.approx(float(main))
    assert logged["train_mtp_loss"] == pytest.approx(float(sum(further)) / DEPTHS)
    torch.testing.assert_close(module.loss_and_count(batch)[0], main)


def test_without_mtp_layers_nothing_is_there():
    model = Model("softmax", depths=0)
    assert not [name for name in model.state_dict() if "mtp" in name] and not hasattr(model, "train_mtp_loss")
    assert all(config.mtp_layers == 0 for config in PRESETS.values())


@pytest.mark.parametrize("preset", ["glm-5.2", "deepseek-v3"])
def test_the_planner_counts_what_a_layer_has(preset):
    with torch.device("meta"):
        model = MoETransformer(dataclasses.replace(PRESETS[preset], layers=4, mtp_layers=1))
    assert sum(p.numel() for p in model.mtp_layers.parameters()) == mtp_parameters(MODELS[preset])
    indexers = sum(p.numel() for name, p in model.named_parameters() if ".indexer." in name)
    assert indexers == model.config.indexer_parameters


MTP_NAMES = DEEPSEEK_NAMES | {
    "embed_norm.": "enorm.",
    "hidden_norm.": "hnorm.",
    "block.attention.": "mtp_block.self_attn.",
    "block.attention_norm.": "mtp_block.input_layernorm.",
    "block.mlp_norm.": "mtp_block.post_attention_layernorm.",
    "block.mlp.": "mtp_block.mlp.",
}


def published_layer_name(name):
    for ours in sorted((key for key in MTP_NAMES if not key.startswith(".")), key=len, reverse=True):
        if (
            name.startswith(ours)
            and ours in ("embed_norm.", "hidden_norm.")
            or name.startswith(ours)
            and "block" in ours
        ):
            name = name.replace(ours, MTP_NAMES[ours], 1)
            break
    for ours, theirs in MTP_NAMES.items():
        if ours.startswith(".") and ours not in (".attention.", ".attention_norm.", ".mlp_norm."):
            name = name.replace(ours, theirs)
    return name.replace("norm.", "post_norm.", 1) if name.startswith("norm.") else name


def test_a_depth_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    latent = dict(
        n_routed_experts=8, n_group=1, topk_group=1, q_lora_rank=20, kv_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, num_key_value_heads=6, first_k_dense_replace=1, n_shared_experts=1,
        num_mtp_layers=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    hf_config = transformers.DeepseekV3Config(**SIZES, **latent)
    published = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    further = MtpModel(published, 2)
    for module in (published, further):
        module.set_experts_implementation("eager")
    config = ModelConfig(
        vocab_size=97, hidden=48, intermediate=56, layers=3, heads=6, moe_intermediate=24, top_k=3, attention="mla",
        q_lora=20, kv_lora=24, rope_head_dim=8, nope_head_dim=16, v_head_dim=12, dense_first_layers=1, num_experts=8,
        shared_experts=1, scoring="sigmoid", routed_scaling=2.5, balance_bias=True, mtp_layers=2,
    )  # fmt: skip
    ours = MoETransformer(config)
    for tensor in ours.state_dict().values():
        tensor.normal_(std=0.2)
    main = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith("mtp_layers.")}
    published.load_state_dict({published_name(name, DEEPSEEK_NAMES): tensor for name, tensor in main.items()})
    for depth in range(2):
        state = ours.mtp_layers[depth].state_dict()
        further.layers[depth].load_state_dict({published_layer_name(name): tensor for name, tensor in state.items()})

    ids_BS = torch.randint(97, (2, 19))
    outputs = []
    for layer in ours.mtp_layers:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    ours(ids_BS, None, ids_BS)
    hidden_BSD = published.model(ids_BS).last_hidden_state
    for depth, output_BSD in enumerate(outputs):
        # Theirs is given shifted tokens, and their positions; ours reads zeros where there are none.
        num_shifts = depth + 1
        later_BS = ids_BS[:, num_shifts:]
        hidden_BSD = further.forward_layer(
            depth,
            hidden_BSD[:, : later_BS.shape[1]],
            torch.arange(num_shifts, 19)[None].expand(2, -1),
            None,
            input_ids=later_BS,
        )
        torch.testing.assert_close(output_BSD[:, : later_BS.shape[1]], hidden_BSD, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 30, 64])
def test_the_loss_of_a_projection_is_that_of_whole_logits(chunk_tokens):
    x_TD = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    targets_T = torch.randint(13, (30,)).masked_fill(torch.rand(30) < 0.3, IGNORE_INDEX)
    expected = F.cross_entropy(x_TD @ weight_VD.t(), targets_T, ignore_index=IGNORE_INDEX, reduction="sum")
    loss = projected_cross_entropy_sum(x_TD, weight_VD, targets_T, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(loss, expected)
    for got, wanted in zip(
        torch.autograd.grad(3 * loss, (x_TD, weight_VD)),
        torch.autograd.grad(3 * expected, (x_TD, weight_VD)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


class LargestTensor(OperationMode):
    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def run(self, operation, args, kwargs):
        result = operation(*args, **kwargs)
        self.num_elements = max([self.num_elements, *(tensor.numel() for tensor in tensors_in(result))])
        return result


def test_a_projection_never_holds_the_logits_of_all_tokens():
    x_TD, weight_VD = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    with LargestTensor() as largest:
        projected_cross_entropy_sum(x_TD, weight_VD, torch.randint(50, (64,)), chunk_tokens=8).backward()
    assert largest.num_elements == 8 * 50


def test_a_bf16_weight_sums_the_gradients_of_chunks_in_fp32():
    x_TD = torch.randn(256, 16, dtype=torch.bfloat16)
    targets_T = torch.randint(40, (256,))
    gradients = []
    for chunk_tokens in (1, 256):
        weight_VD = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        projected_cross_entropy_sum(x_TD, weight_VD, targets_T, chunk_tokens=chunk_tokens).backward()
        gradients.append(weight_VD.grad.float())
    # One rounding of the sum and one of each chunk's gradient, not one for each of 256 sums (5e-2).
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 6e-3


def train_on_ranks(degrees, kind, data):
    """This rank's gradients of two steps, its losses with their counts, and what was logged."""
    trainer, model, keep = fit(
        degrees,
        partial(Model, kind),
        lambda dp: loader(data, 8, 4 // dp),
        max_steps=2,
        callback_options={"documents": "separate"} if data == "packed" else None,
    )
    return keep.steps, model.losses, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_as_one_process(results, kind, data):
    make = partial(Alone if data == "packed" else Model, kind)
    _, expected, losses = reference(make, loader(data, 8, 4), num_steps=2)
    for steps, _, _ in results:
        for step, gradients in enumerate(steps):
            difference, name = worst_difference(gradients, expected[step])
            assert difference < TOLERANCE, (step, name, difference)
    totals = []
    for step, loss in enumerate(losses):
        parts = [local_losses[step] for _, local_losses, _ in results]
        num_tokens = sum(count for _, count in parts)
        totals.append((sum(part * count for part, count in parts), num_tokens))
        assert totals[-1][0] / num_tokens == pytest.approx(loss, rel=TOLERANCE)
    mean = sum(total for total, _ in totals) / sum(num_tokens for _, num_tokens in totals)
    for _, _, logged in results:
        # The main loss and the depths' apart, each a mean over the tokens of all ranks and both steps.
        assert logged["train_loss_epoch"] + 0.3 * logged["train_mtp_loss_epoch"] == pytest.approx(mean, rel=1e-5)


CP_2, CP_4 = dict(fsdp=1, cp=2, e_fsdp=1, ep=2), dict(fsdp=1, cp=4, e_fsdp=2, ep=2)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("softmax", "prompts"),
        ("latent", "packed"),
        ("sparse", "plain"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("softmax", "packed"), ("latent", "prompts"), ("sparse", "packed"), ("sparse", "prompts"))
        ),
    ],
)
def test_two_cp_ranks_train_as_one_process(kind, data, ranks2):
    assert_as_one_process(ranks2(train_on_ranks, CP_2, kind, data), kind, data)


@pytest.mark.parametrize(
    ("degrees", "kind", "data", "options"),
    [
        (CP_4, "latent", "packed", {"recompute": "block"}),
        (dict(fsdp=2, cp=2, e_fsdp=1, ep=4), "tied", "prompts", {}),
        pytest.param(CP_4, "softmax", "prompts", {}, marks=pytest.mark.slow),
        pytest.param(CP_4 | {"cp_inter": 2}, "sparse", "plain", {"recompute": "block"}, marks=pytest.mark.slow),
        pytest.param(
            dict(d_rep=2, fsdp=2, cp=1, e_fsdp=2, ep=2),
            "latent",
            "prompts",
            {"recompute": "block"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_four_ranks_train_as_one_process(degrees, kind, data, options, ranks4):
    results = ranks4(train_on_ranks, degrees | options, kind, data)
    assert_as_one_process(results, kind, data)


def test_accumulated_micro_batches_are_one_batch(ranks2):
    results = ranks2(accumulated, CP_2)
    _, expected, _ = reference(partial(Model, "softmax"), loader("prompts", 8, 8))
    for (gradients,) in results:
        assert worst_difference(gradients, expected[0])[0] < TOLERANCE


def accumulated(degrees):
    make = partial(Model, "softmax")
    _, _, keep = fit(degrees, make, lambda dp: loader("prompts", 8, 2), max_steps=1, accumulate_grad_batches=4)
    return keep.steps


class Counted(MoELanguageModel):
    """Shifts the labels of a batch itself, before it is split."""

    def __init__(self):
        super().__init__({"preset": "tiny-mla", "vocab_size": VOCABULARY, "hidden": 32, "mtp_layers": DEPTHS})

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"input_ids": batch["input_ids"], "shift_labels": shift_labels(batch["labels"])}


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_each_unit_is_gathered_once_in_each_pass_that_reads_it_and_reduced_once(precision, ranks4):
    for result in ranks4(train, dict(fsdp=2, cp=2, e_fsdp=2, ep=2), Counted, precision):
        units = set(result["units"])
        assert {"model.mtp_layers.1", "model.mtp_layers.1.block.mlp.experts", "model.embed", "model.head"} <= units
        for step in result["steps"]:
            assert_gathered_and_reduced_once(step, units)
        assert result["left"] == [] and result["validated"] == []


def test_validation_and_prediction_leave_the_depths_out(ranks2):
    torch.manual_seed(0)
    module, batch = Model("softmax"), next(iter(loader("prompts", 4, 4)))
    expected = float(module.loss_and_count(batch)[0].detach())
    for result in ranks2(evaluate, CP_2):
        assert result["val_loss"] == pytest.approx(expected, rel=TOLERANCE)
        assert torch.equal(result["predicted"], module.predict_step(batch, 0))


def evaluate(degrees):
    torch.manual_seed(0)
    callback = ZigZagContextParallel()
    options = QUIET | dict(accelerator="cpu", devices=2, use_distributed_sampler=False)
    trainer = L.Trainer(strategy=FSDPCPEPStrategy(**degrees), callbacks=[callback], **options)
    model = Model("softmax")
    # Nothing runs the depths here, and nothing may miss their attention.
    (metrics,) = trainer.validate(model, loader("prompts", 4, 4), verbose=False)
    (predicted,) = trainer.predict(model, loader("prompts", 4, 4))
    return {"val_loss": metrics["val_loss"], "predicted": callback.restore(predicted)}


def test_labels_that_the_module_shifts_are_shifted_further_by_the_depths(ranks2):
    _, expected, _ = reference(WithLabels, labels_loader())
    for steps in ranks2(train_with_labels):
        assert worst_difference(steps[0], expected[0])[0] < TOLERANCE


class WithLabels(Model):
    def __init__(self):
        super().__init__("latent")

    def training_step(self, batch, batch_idx):
        return MoELanguageModel.training_step(self, batch, batch_idx)


def labels_loader():
    return plain_loader(4, NUM_TOKENS, 4)


def train_with_labels():
    return fit(CP_2, WithLabels, lambda dp: labels_loader(), shift="module")[2].steps


def leaks(degrees):
    """What the middle document of three gives and gets at every depth: (changes after another one's token changes,
    gradients at another one's embeddings, changes after its own does)."""
    model = Model("latent").model
    callback = ZigZagContextParallel(documents="separate")
    cp = attach(callback, model).context_parallel
    adapt_attention(model, find_blocks(model), cp)
    batch = next(iter(loader("packed", 2, 2)))
    outputs, embedded = [], []
    for layer in model.mtp_layers:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    model.embed.register_forward_hook(lambda module, args, output: (output.retain_grad(), embedded.append(output))[0])

    def run(changed_place=None):
        outputs.clear()
        ids_BS = batch["input_ids"].clone()
        if changed_place is not None:
            ids_BS[:, changed_place] = ids_BS[:, changed_place] % (VOCABULARY - 1) + 1
        local = callback.split(batch | {"input_ids": ids_BS}, "train")
        with cp.step("train"):
            model(local["input_ids"], local["position_ids"], local["shift_labels"])
        return torch.stack(outputs)

    first, middle, _ = LENGTHS
    hidden_MBLD = run()
    own_L = cp.layout.token_ids(cp.rank)
    is_middle_L = (own_L >= first) & (own_L < first + middle)
    (hidden_MBLD * is_middle_L[:, None]).square().sum().backward()
    got = embedded[0].grad[:, ~is_middle_L].abs().sum()
    # The first token of the last document and the last one of the first: what stands beside the middle one.
    others = [run(place)[:, :, is_middle_L] - hidden_MBLD[:, :, is_middle_L] for place in (first - 1, first + middle)]
    own = run(first + middle - 1)[:, :, is_middle_L] - hidden_MBLD[:, :, is_middle_L]
    return torch.stack([sum(other.abs().sum() for other in others), got, own.abs().sum()]).detach()


def test_no_depth_reads_from_another_document(ranks2):
    changed, gradient, own = torch.stack(ranks2(leaks, CP_2)).sum(0).tolist()
    assert changed < 1e-4 and gradient == 0.0 and own > 0.1


def test_the_simulator_runs_a_model_with_depths():
    sizes = {"preset": "tiny", "vocab_size": VOCABULARY, "mtp_layers": 1}
    found = [
        simulate(
            partial(MoELanguageModel, sizes | {"mtp_layers": depths}, warmup_steps=0),
            ParallelDims(fsdp=1, cp=4, e_fsdp=1, ep=4),
            {name: torch.zeros(1, 64, dtype=torch.long) for name in ("input_ids", "shift_labels")},
            world_size=4,
            local_world_size=4,
            recompute="block",
        )
        for depths in (0, 1)
    ]
    assert found[1].peak_bytes > found[0].peak_bytes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"mtp_layers": -1}, r"mtp_layers\(-1\) must be at least 0"),
        ({"mtp_layers": 1, "mtp_loss": 0.0}, r"mtp_loss\(0.0\) must be above 0 with mtp_layers\(1\)"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)
