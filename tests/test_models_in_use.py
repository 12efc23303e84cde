"""What users' models do that a textbook's do not: used twice, not used at all, loose parameters, buffers, wrappers.

Models are given to ``verify``: losses, outputs of modules token by token, routing, gradients and parameters of three
steps. What ``verify`` does not do (two fits, own optimizers) is held against a plain Trainer in one process, as in
test_projects.py.
"""

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_strategy import ZigZagContextParallel, verify
from lightning_moe_strategy.initialization import materialize
from lightning_moe_strategy.stale_parameters import hand_over_parameters, remember_parameters
from lightning_moe_strategy.units import find_blocks, find_routers, plan_units
from tests.flavour import L
from tests.modules import IGNORED, VOCABULARY, Block, PlainLanguageModel, SparseLayer, loader
from tests.test_projects import (
    CP2_EP2,
    FSDP4,
    TOLERANCE,
    WITH_CP,
    assert_same_ten_steps,
    error_of,
    fit_on_rank,
    on_rank,
    one_process,
    parameters_of,
    share_of_batch,
)

logging.getLogger(L.__name__).setLevel(logging.ERROR)

SHIFTED = dict(shift="module")


class Tokens(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return loader(80, 24, self.batch_size)


class Used(PlainLanguageModel):
    """Logs its loss, trains slowly enough that no routing of the ten steps is a near tie."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=0.05, **options)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.decoder(batch["input_ids"], batch.get("position_ids"))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"][:, 1:]
        return F.cross_entropy(self.logits(batch)[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class SharedBlock(Used):
    """One block, the deeper the more often it is used (ALBERT, universal transformers)."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
        x = self.decoder.embedding(batch["input_ids"]) + self.decoder.positions(positions)
        for _ in range(3):
            x = self.decoder.blocks[0](x)
        return self.decoder.head(self.decoder.norm(x))


class ModelTwice(Used):
    """The whole model runs twice before one backward pass, as consistency losses do."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        reversed_ids = batch | {"input_ids": (batch["input_ids"] + 1) % VOCABULARY}
        return super().loss(batch) + 0.5 * super().loss(reversed_ids)


class BranchNotTaken(Used):
    """Layer drop by step: every third step leaves out the second block, experts and all; a spare layer never runs."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.spare = nn.Linear(16, 16)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
        x = self.decoder.embedding(batch["input_ids"]) + self.decoder.positions(positions)
        for index, block in enumerate(self.decoder.blocks):
            if index != 1 or self.global_step % 3 != 1:
                x = block(x)
        return self.decoder.head(self.decoder.norm(x))


class LooseParameters(Used):
    """Parameters of the LightningModule itself, of a plain container, and in a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((VOCABULARY,), 0.7))
        self.scales = nn.ParameterList([torch.ones(16), torch.ones(16)])
        self.gates = nn.ParameterDict({"out": torch.ones(VOCABULARY)})

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
        x = self.decoder.embedding(batch["input_ids"]) + self.decoder.positions(positions)
        for block, scale in zip(self.decoder.blocks, self.scales, strict=True):
            x = block(x) * scale
        return self.decoder.head(self.decoder.norm(x)) * self.temperature * self.gates["out"]


class DenseBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Block(width, 2, 4, 2)
        self.attention.sparse = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


class SomeLayersAndBuffers(Used):
    """Experts in every second layer; persistent and other buffers, one of which counts."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.decoder.blocks[0] = DenseBlock(16)
        self.decoder.blocks[2] = DenseBlock(16)
        self.register_buffer("mean_logits", torch.zeros(VOCABULARY))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, VOCABULARY), persistent=False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        self.num_steps += 1
        return super().logits(batch) * self.scale + self.mean_logits


class TwoSparseLayersInOneBlock(Used):
    """Experts of different counts in one block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.decoder.blocks:
            block.sparse = nn.Sequential(SparseLayer(16, 4, 2), SparseLayer(16, 8, 2))


MODELS = [
    SharedBlock,
    ModelTwice,
    BranchNotTaken,
    LooseParameters,
    SomeLayersAndBuffers,
    TwoSparseLayersInOneBlock,
]


@pytest.mark.parametrize("degrees", WITH_CP)
@pytest.mark.parametrize("make", MODELS)
def test_it_trains_as_in_one_process(make, degrees):
    torch.manual_seed(0)
    zigzag = ZigZagContextParallel(**SHIFTED)
    result = verify(make(), Tokens(share_of_batch(degrees)), degrees, steps=3, zigzag=zigzag)
    assert result.passed, result.text
    wrong = [row for row in result.rows if row.difference > min(row.tolerance, TOLERANCE)]
    assert not wrong and {row.step for row in result.rows if row.kind == "gradient"} == {0, 1, 2}, wrong


class BuiltAgain(Used):
    """``configure_model`` runs before every fit and builds what is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None

    def configure_model(self) -> None:
        if self.decoder is None:
            torch.manual_seed(3)
            self.decoder = Used().decoder


def fit_and_fit_on(degrees: dict[str, int]) -> Any:
    trainer, module, first = fit_on_rank(degrees, BuiltAgain, Tokens, zigzag=SHIFTED, max_steps=4)
    trainer.validate(module, Tokens(4).train_dataloader(), verbose=False)
    second = fit_on_rank(degrees, lambda: module, Tokens, zigzag=SHIFTED, max_steps=6)[2]
    return first + second, parameters_of(module)


def test_configure_model_is_called_again_for_every_stage(ranks4):
    _, module, first = one_process(BuiltAgain, Tokens, max_steps=4)
    _, module, second = one_process(lambda: module, Tokens, max_steps=6)
    assert_same_ten_steps(ranks4(fit_and_fit_on, CP2_EP2), module, first + second)


class OptimizerOfInit(Used):
    """Builds its optimizer in __init__, when parameters are whole: LightningCLI does so too."""

    kind: Any = torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        self.own = self.kind(self.parameters(), lr=2e-3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.own


class WithState(OptimizerOfInit):
    kind = torch.optim.Adagrad


class Foreign(Used):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3, 2))], lr=0.1)


def test_an_optimizer_built_before_sharding_steps_the_sharded_parameters(ranks4):
    _, module, losses = one_process(OptimizerOfInit, Tokens)
    per_rank = ranks4(partial(on_rank, zigzag=SHIFTED), CP2_EP2, OptimizerOfInit, Tokens)
    assert_same_ten_steps(per_rank, module, losses)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [(WithState, "Adagrad was built before decoder"), (Foreign, r"SGD trains a parameter [3, 2] (group 0, place")],
)
def test_an_optimizer_that_cannot_be_handed_over_is_refused(make, sentence, ranks4):
    for message in ranks4(partial(error_of, on_rank, FSDP4, make, Tokens)):
        assert sentence in message, message


def test_frozen_parameters_outside_of_the_module_do_not_matter():
    module = nn.Linear(2, 2)
    remember_parameters(module)
    optimizer = torch.optim.SGD([*module.parameters(), torch.ones(2)], lr=0.1)
    hand_over_parameters(module, [optimizer])
    assert optimizer.param_groups[0]["params"][0] is module.weight


class WrappedExperts(nn.Module):
    """What PEFT makes of an experts module."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)})

    def reset_lora_parameters(self) -> None: ...

    def forward(self, *args: Any) -> Tensor:
        return self.base_layer(*args)


def test_the_router_of_wrapped_experts_is_found_and_their_adapters_are_none():
    model = Used()
    for block in model.decoder.blocks:
        block.sparse.experts = WrappedExperts(block.sparse.experts)
    experts = {f"decoder.blocks.{i}.sparse.experts.base_layer": b.sparse.experts.base_layer
               for i, b in enumerate(model.decoder.blocks)}  # fmt: skip
    assert list(find_routers(model, experts)) == [f"decoder.blocks.{i}.sparse.router" for i in range(2)]
    kinds = {unit.name: unit.kind for unit in plan_units(model, experts, separate_routers=True)}
    assert list(find_blocks(model)) == [name for name, kind in kinds.items() if kind == "block"]
    assert kinds["decoder.blocks.1.sparse.experts.base_layer"] == "experts"


def test_adapters_on_the_meta_device_are_not_initialised_as_plain_layers():
    with torch.device("meta"):
        model = WrappedExperts(nn.Linear(16, 16))
    with pytest.raises(RuntimeError, match=r"nothing initialises them: lora_A\.default\.weight"):
        materialize(model, torch.device("cpu"), seed=0, experts={})


class EncoderDecoder(L.LightningModule):
    """Shifts its decoder's inputs, so that every label counts, the first too."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = dict(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
        self.model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_every_label_of_an_encoder_decoder_weighs_the_same(ranks2):
    _, module, losses = one_process(EncoderDecoder, Tokens)
    assert_same_ten_steps(ranks2(on_rank, dict(fsdp=2), EncoderDecoder, Tokens), module, losses)
