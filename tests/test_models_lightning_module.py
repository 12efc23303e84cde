"""Both LightningModules: one loss for every label convention, exact logged means, usual optimizers."""

import dataclasses
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_moe_strategy._lightning_compat import Trainer
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.lightning_module import (
    HFCausalLM,
    MoELanguageModel,
    TokenMean,
    warmup_cosine,
)
from lightning_moe_strategy.models.loss import IGNORE_INDEX, shift_labels

SIZES = {"vocab_size": 61, "hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}
HF_SIZES = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = pytest.mark.parametrize("kind", ["ours", "hugging_face"])


def build(kind, **options):
    torch.manual_seed(0)
    if kind == "ours":
        return MoELanguageModel(SIZES, **options)
    pytest.importorskip("transformers")
    return HFCausalLM(HF_SIZES, **options)


def labelled_batch(num_counted=(8, 3)):
    """Rows of 10 tokens of which the first ``num_counted`` labels are given."""
    torch.manual_seed(1)
    input_ids_BS = torch.randint(61, (len(num_counted), 10))
    labels_BS = input_ids_BS.clone()
    for row, counted in enumerate(num_counted):
        labels_BS[row, counted:] = IGNORE_INDEX
    return {"input_ids": input_ids_BS, "labels": labels_BS}


def with_shift_labels(batch):
    return batch | {"shift_labels": shift_labels(batch["labels"])}


@KINDS
def test_both_label_conventions_give_the_mean_over_counted_targets(kind):
    module, batch = build(kind), labelled_batch()
    targets_T = batch["labels"][:, 1:].flatten()
    logits_TV = module.logits(batch)[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE_INDEX)
    for given in (batch, with_shift_labels(batch)):
        loss, num_tokens = module.loss_and_count(given)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert int(num_tokens) == 7 + 2


@KINDS
def test_shifted_targets_win_over_labels_so_a_piece_of_a_sequence_is_exact(kind):
    module, batch = build(kind), with_shift_labels(labelled_batch(num_counted=(10, 10)))
    whole, num_tokens = module.loss_and_count(batch)
    head = {name: tensor[:, :6] for name, tensor in batch.items()}
    loss, num_head_tokens = module.loss_and_count(head)
    targets_T = batch["shift_labels"][:, :6].flatten()
    expected = F.cross_entropy(module.logits(batch)[:, :6].flatten(0, 1), targets_T)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert (int(num_head_tokens), int(num_tokens)) == (12, 18)


@KINDS
def test_a_batch_without_targets_has_a_zero_loss_and_zero_gradients(kind):
    module = build(kind)
    loss, num_tokens = module.loss_and_count(with_shift_labels(labelled_batch(num_counted=(1, 0))))
    loss.backward()
    assert (loss.item(), int(num_tokens)) == (0.0, 0)
    for name, parameter in module.named_parameters():
        assert parameter.grad is None or parameter.grad.abs().max() == 0, name


@KINDS
def test_position_ids_reach_the_model(kind):
    module, batch = build(kind), labelled_batch()
    positions = torch.arange(10).expand(2, 10)
    torch.testing.assert_close(module.logits(batch | {"position_ids": positions}), module.logits(batch))
    assert not torch.allclose(module.logits(batch | {"position_ids": 7 * positions}), module.logits(batch))


def test_right_padding_changes_no_logits_of_real_tokens():
    module, batch = build("ours"), labelled_batch()
    padded = {"input_ids": F.pad(batch["input_ids"], (0, 4))}
    torch.testing.assert_close(module.logits(padded)[:, :10], module.logits(batch), rtol=1e-6, atol=1e-6)


@KINDS
def test_a_module_built_on_meta_holds_meta_parameters_and_working_metrics(kind):
    with torch.device("meta"):
        module = build(kind)
    assert all(parameter.is_meta for parameter in module.parameters())
    module.val_loss.update(torch.tensor(2.0), weight=torch.tensor(3))
    assert module.val_loss.compute().item() == 2.0


@KINDS
def test_training_logs_the_mean_per_token_of_unequal_batches(kind, tmp_path):
    module = build(kind, learning_rate=1e-3, warmup_steps=1)
    rows = [
        {name: tensor[0] for name, tensor in with_shift_labels(labelled_batch((counted,))).items()}
        for counted in (10, 2, 5, 3)
    ]
    loader = DataLoader(rows, batch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader, loader)
    losses = [module.loss_and_count(batch) for batch in loader]
    total = sum(float(loss.detach()) * int(count) for loss, count in losses)
    expected = total / sum(int(count) for _, count in losses)
    metrics = trainer.callback_metrics
    assert float(metrics["val_loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(metrics["val_perplexity"]) == pytest.approx(math.exp(expected), rel=1e-6)
    assert {"train_loss", "train_loss_step", "train_loss_epoch"} <= set(metrics)
    (tested,) = trainer.test(module, loader, verbose=False)
    assert tested["test_loss"] == pytest.approx(expected, rel=1e-6)
    predictions = trainer.predict(module, loader)
    assert [tuple(prediction.shape) for prediction in predictions] == [(2, 10), (2, 10)]
    (batch, *_) = loader
    assert torch.equal(predictions[0], module.logits(batch).argmax(-1))


def test_a_checkpoint_rebuilds_the_module_from_plain_values(tmp_path):
    module = MoELanguageModel(ModelConfig(**SIZES), learning_rate=0.01, warmup_steps=7)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    loaded = MoELanguageModel.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == module.config
    assert (loaded.learning_rate, loaded.warmup_steps) == (0.01, 7)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


def test_norms_do_not_decay_and_matrices_do(monkeypatch):
    module = build("ours", weight_decay=0.3)
    monkeypatch.setattr(MoELanguageModel, "trainer", SimpleNamespace(estimated_stepping_batches=5))
    decayed, kept = module.configure_optimizers()["optimizer"].param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert all("norm" in names[id(parameter)] for parameter in kept["params"])
    assert not any("norm" in names[id(parameter)] for parameter in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_the_learning_rate_warms_up_and_falls_to_its_share():
    shares = [warmup_cosine(step, 4, 14, 0.1) for step in range(16)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[9] == pytest.approx(0.55)
    assert shares[14] == shares[15] == pytest.approx(0.1)
    assert sorted(shares[4:], reverse=True) == shares[4:]
    assert warmup_cosine(10**9, 4, math.inf, 0.1) == 1.0


def test_means_keep_their_digits_over_a_long_epoch():
    mean = TokenMean()
    for value in [2.0] + [1.0] * 400:
        mean.update(torch.tensor(value), weight=torch.tensor(10**8))
    assert mean.compute().item() == pytest.approx(402 / 401, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, r"learning_rate\(0.0\) must be above 0"),
        ({"weight_decay": -1.0}, r"weight_decay\(-1.0\) must be at least 0"),
        ({"warmup_steps": -1}, r"warmup_steps\(-1\) must be at least 0"),
        ({"final_learning_rate_ratio": 2.0}, r"final_learning_rate_ratio\(2.0\) must be between 0 and 1"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build("ours", **options)


def test_a_hugging_face_config_is_read_from_a_folder_or_refused_by_name(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(**HF_SIZES).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert HFCausalLM(str(path)).model.config.num_experts == 4
    with pytest.raises(ValueError, match=r"config\('nowhere'\) does not exist"):
        HFCausalLM("nowhere")
    with pytest.raises(ValueError, match="no model_type"):
        HFCausalLM({"hidden_size": 3})


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-moe-strategy\[hf\]"):
        HFCausalLM(HF_SIZES)


def test_a_config_object_a_dict_and_a_name_build_the_same_model():
    by_dict = MoELanguageModel(SIZES).config
    assert by_dict == ModelConfig(**SIZES)
    assert MoELanguageModel(by_dict).config == by_dict
    assert MoELanguageModel(dataclasses.asdict(by_dict)).config == by_dict
    assert MoELanguageModel("tiny").config == ModelConfig()
