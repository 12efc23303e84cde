"""A wrong setting is one error with the same words for every rank, raised before a weight has changed.

Every message names the thing, its value, the rule it breaks and what to do instead.
"""

import logging
import re
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_strategy import FSDPCPEPStrategy, strategy
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, RandomTokens, SparseLayer
from tests.parity import QUIET, fit, whole

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

CP2: dict[str, Any] = dict(fsdp=1, cp=2, e_fsdp=2, ep=1)
LENGTH = 24


def refusal(
    degrees: dict[str, Any], make_model: Any, data: type[RandomTokens] = RandomTokens, shift: str = "module"
) -> tuple[str, bool]:
    """What a rank is told, and whether every weight is still the one the model was built with."""

    def make_loader(dp: int) -> DataLoader:
        return DataLoader(data(8, LENGTH), batch_size=8 // dp)

    built: list[tuple[L.LightningModule, dict[str, Tensor]]] = []

    def build() -> L.LightningModule:
        model = make_model()
        built.append((model, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return model

    try:
        fit(degrees, build, make_loader, shift=shift)
    except (ValueError, RuntimeError) as error:
        ((model, before),) = built
        after = {name: whole(p.detach()) for name, p in model.named_parameters()}
        assert before.keys() == after.keys()
        return f"{type(error).__name__}: {error}", all(torch.equal(after[name], p) for name, p in before.items())
    return "no error", False


def check(answers: list[tuple[str, bool]], *words: str) -> None:
    for rank, (error, unchanged) in enumerate(answers):
        assert error.startswith("ValueError: ") and not [word for word in words if word not in error], error
        assert unchanged, f"rank {rank} changed a weight"
    told = {re.sub(r"^ValueError: (On rank \d+: )?", "", error) for error, _ in answers}
    assert len(told) == 1, told


# When the Trainer is built


def trainer_error(degrees: dict[str, Any]) -> str:
    try:
        L.Trainer(accelerator="cpu", devices=4, strategy=FSDPCPEPStrategy(**degrees), **QUIET)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            dict(d_rep=1, fsdp=1, cp=2),
            "d_rep(1) * fsdp(1) * cp(2) = 2 GPUs, but the world has 4. Raise cp to 4 or d_rep to 2.",
        ),
        (
            dict(e_rep=1, e_fsdp=4, ep=4),
            "e_rep(1) * e_fsdp(4) * ep(4) = 16 GPUs, but the world has 4. Lower e_fsdp to 1.",
        ),
        (
            dict(cp=3),
            "d_rep(1) * cp(3) = 3 does not divide the world of 4 GPUs, which leaves no whole number for fsdp. "
            "Lower cp to 2 or raise it to 4.",
        ),
    ],
    ids=["dense", "expert", "auto"],
)
def test_degrees_that_do_not_multiply_to_the_world_end_the_trainers_constructor(degrees, message, ranks4):
    assert ranks4(trainer_error, degrees) == [message] * 4


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_launcher_that_forks_or_spawns_is_refused(start_method):
    with pytest.raises(
        ValueError, match=rf"start_method\('{start_method}'\) is not supported: .* Leave start_method out"
    ):
        FSDPCPEPStrategy(start_method=start_method)


def test_a_notebook_is_told_to_become_a_script(monkeypatch):
    monkeypatch.setattr(strategy, "IS_INTERACTIVE", True)
    with pytest.raises(RuntimeError, match=r"'fsdp_cp_ep' cannot start .* notebook .* run it with python, torchrun"):
        L.Trainer(accelerator="cpu", devices=2, strategy=FSDPCPEPStrategy(), **QUIET)


# When the model is set up


class SeparateExperts(PlainLanguageModel):
    """Experts as many projects had them once: one MLP each."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.decoder.blocks:
            block.sparse = OneByOne()


class OneByOne(SparseLayer):
    def __init__(self) -> None:
        super().__init__(width=16, num_experts=4, top_k=2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x_BSD: Tensor) -> Tensor:
        scores_BSE = self.router(x_BSD).softmax(-1)
        return sum(scores_BSE[..., e, None] * expert(x_BSD) for e, expert in enumerate(self.experts))


class SixExperts(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__(num_experts=6)


def test_experts_that_ep_does_not_divide(ranks4):
    answers = ranks4(refusal, dict(fsdp=4, e_fsdp=1, ep=4), SixExperts)
    check(answers, "ep(4) does not divide num_experts(6)", "Lower ep to 2")


def test_experts_that_no_adapter_knows(ranks2):
    answers = ranks2(refusal, dict(fsdp=2, e_fsdp=1, ep=2), SeparateExperts)
    check(
        answers,
        "ep(2) spreads the experts",
        "decoder.blocks.0.sparse.experts: its 4 experts are separate modules in a ModuleList",
        "decoder.blocks.1.sparse.experts",
        "Set ep=1",
        "stacked on dim 0",
    )


def hugging_face_with_dropout() -> HuggingFaceLanguageModel:
    return HuggingFaceLanguageModel(attention_dropout=0.1)


def test_attention_dropout_of_a_hugging_face_model_under_cp(ranks2):
    answers = ranks2(partial(refusal, shift="auto"), CP2, hugging_face_with_dropout)
    check(answers, "model.model.layers.0.self_attn has attention_dropout(0.1) > 0", "Set attention_dropout=0.0")


# At the first batch


class Short(RandomTokens):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[:3] for name, x in super().__getitem__(index).items()}


class ShortOnOneRank(RandomTokens):
    """Two data parallel ranks take turns: the second reads the odd samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[: 3 if index % 2 else LENGTH] for name, x in super().__getitem__(index).items()}


class PaddedOnTheLeft(RandomTokens):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) >= (5 if index == 1 else 0)).long()
        return super().__getitem__(index) | {"attention_mask": mask}


def test_sequences_shorter_than_the_chunks_of_cp(ranks2):
    answers = ranks2(refusal, CP2, PlainLanguageModel, Short)
    check(answers, "The sequence has 3 tokens, fewer than 2 * cp(2) = 4 chunks", "Use longer sequences or a smaller cp")


def test_a_short_sequence_on_one_data_parallel_rank_stops_every_rank(ranks4):
    answers = ranks4(refusal, dict(fsdp=2, cp=2, e_fsdp=2, ep=2), PlainLanguageModel, ShortOnOneRank)
    check(answers, "The sequence has 3 tokens, fewer than 2 * cp(2) = 4 chunks", "Use longer sequences or a smaller cp")
    assert [error.startswith("ValueError: On rank 2: ") for error, _ in answers] == [True, True, False, True]


def test_padding_on_the_left_under_cp(ranks2):
    answers = ranks2(partial(refusal, shift="auto"), CP2, HuggingFaceLanguageModel, PaddedOnTheLeft)
    check(answers, "attention_mask has a hole or padding on the left", "cp > 1", "Pad on the right")


class OtherAttention(PlainLanguageModel):
    """The hand-written model with one call of its second block changed."""

    arguments: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        attend_with(self.decoder.blocks[1], self.arguments)


class _Attend:
    def __init__(self, block: nn.Module, arguments: dict[str, Any]) -> None:
        self.block, self.arguments = block, arguments

    def __call__(self, x_BSD: Tensor) -> Tensor:
        block: Any = self.block
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in block.qkv(block.norm(x_BSD)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, **self.arguments)
        x_BSD = x_BSD + block.out(attended.transpose(1, 2).flatten(2))
        return x_BSD + block.sparse(block.sparse_norm(x_BSD))


def attend_with(block: nn.Module, arguments: dict[str, Any]) -> None:
    block.forward = _Attend(block, arguments)  # type: ignore[assignment]


class Masked(OtherAttention):
    arguments = dict(attn_mask=torch.zeros(1))


class Bidirectional(OtherAttention):
    arguments = dict(is_causal=False)


class WithDropout(OtherAttention):
    arguments = dict(is_causal=True, dropout_p=0.1)


@pytest.mark.parametrize(
    ("make_model", "what", "remedy"),
    [
        (Masked, "attn_mask", "Pass is_causal=True and no mask"),
        (Bidirectional, "is_causal=False", "Pass is_causal=True"),
        (WithDropout, "dropout_p(0.1) > 0", "Set the attention dropout to 0"),
    ],
    ids=["mask", "bidirectional", "dropout"],
)
def test_attention_that_cp_cannot_split_exactly(make_model, what, remedy, ranks2):
    answers = ranks2(refusal, CP2, make_model)
    check(answers, f"decoder.blocks.1 uses {what}; cp=2 cannot split that along the sequence", remedy)


@pytest.mark.parametrize("make_model", [PlainLanguageModel, HuggingFaceLanguageModel])
def test_the_same_run_without_the_mistake_trains(make_model, ranks2):
    shift = "module" if make_model is PlainLanguageModel else "auto"
    assert ranks2(partial(refusal, shift=shift), CP2, make_model) == [("no error", False)] * 2


# In a YAML file

YAML = """
trainer:
  accelerator: cpu
  devices: 4
  logger: false
  enable_checkpointing: false
  strategy: {class_path: lightning_moe_strategy.FSDPCPEPStrategy, init_args: {cp: 2, ep: 2}}
model: {class_path: lightning_moe_strategy.MoELanguageModel, init_args: {model: tiny}}
data: {class_path: lightning_moe_strategy.TextDataModule, init_args: {files: [corpus.txt]}}
"""


def run_yaml(text: str, tmp_path: Any) -> None:
    from lightning_moe_strategy.cli.training import run

    path = tmp_path / "config.yaml"
    path.write_text(text)
    run(["fit", "--config", str(path)])


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("enable_checkpointing", "enable_checkpoints", ["'trainer.enable_checkpoints'", "--help"]),
        ("ep: 2", "expert_parallel: 2", ["FSDPCPEPStrategy", "'expert_parallel'", "--help"]),
        ("init_args: {model: tiny}", "init_args: {preset: tiny}", ["MoELanguageModel", "'preset'", "--help"]),
        ("files:", "paths:", ["TextDataModule", "'paths'", "--help"]),
        ("data:", "dataset:", ["'dataset", "--help"]),
    ],
    ids=["trainer", "strategy", "model", "data", "top"],
)
def test_an_unknown_key_is_named_and_nothing_is_built(right, wrong, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_yaml(YAML.replace(right, wrong), tmp_path)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert not [word for word in words if word not in error], error


def test_a_corpus_that_does_not_exist_is_named(tmp_path):
    missing = str(tmp_path / "corpus.txt")
    with pytest.raises(ValueError, match=r"files: '.*/corpus\.txt' is not a file\. Check the path"):
        run_yaml(YAML.replace("corpus.txt", missing), tmp_path)
