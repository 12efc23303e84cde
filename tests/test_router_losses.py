"""Router losses under a real Trainer on gloo ranks, against autograd in one process on the whole batch.

Shapes: B sequences, S tokens of each, E experts, K experts per token.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel
from lightning_moe_strategy.expert_parallel.routers import shares, shares_backward
from tests.modules import IGNORED, VOCABULARY, HuggingFaceLanguageModel, PlainLanguageModel
from tests.parity import LAYOUTS_OF_4, fit, worst_difference

TOLERANCE = 2e-6
"""Relative, FP32: sums over ranks come in another order."""
LOSSES = dict(sequence_balance_loss=0.7, batch_balance_loss=0.4, router_z_loss=0.2)
LAYOUTS = [LAYOUTS_OF_4[i] for i in (0, 2, 4, 6, 9, 12)]
NUM_SEQUENCES, LENGTH = 4, 20


def name_of(degrees: dict[str, int]) -> str:
    return "-".join(f"{axis}{degree}" for axis, degree in degrees.items())


class PaddedTokens(Dataset):
    """Sequences of unequal length, padded on the right."""

    def __init__(self, num_samples: int, targets: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.targets = targets
        self.ids = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, mask = self.ids[index], torch.arange(LENGTH) < self.lengths[index]
        labels = ids.masked_fill(~mask, IGNORED)
        if self.targets == "shift_labels":
            labels = torch.cat([labels[1:], labels.new_full((1,), IGNORED)])
        return {"input_ids": ids, self.targets: labels, "attention_mask": mask.long()}


def batches(dp: int, *, num_micro_batches: int = 1, targets: str = "shift_labels") -> DataLoader:
    return DataLoader(PaddedTokens(NUM_SEQUENCES * num_micro_batches, targets), batch_size=NUM_SEQUENCES // dp)


class Ours(MoELanguageModel):
    """Our transformer; ``share`` of the loss is left, so that 0 shows the router losses alone."""

    def __init__(self, share: float = 1.0, **sizes: Any) -> None:
        tiny = dict(
            vocab_size=VOCABULARY, hidden=16, heads=2, kv_heads=1, head_dim=8, num_experts=4, moe_intermediate=8
        )
        super().__init__(tiny | sizes)
        self.share = share

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.share

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LossesOfRouters:
    """The three losses of every router of a model, by autograd over plain formulas."""

    def __init__(self, model: nn.Module) -> None:
        self.routed: list[tuple[Tensor, Tensor]] = []
        for name, module in model.named_modules():
            if name.endswith((".router", "mlp.gate")):
                module.register_forward_hook(lambda module, args, out: self.routed.append((out[0], out[2])))

    def means(self, mask_BS: Tensor, scoring: str) -> Tensor:
        values = [self._of_layer(logits, ids, mask_BS, scoring) for logits, ids in self.routed]
        self.routed = []
        return torch.stack(values).mean(0)

    def num_layers(self) -> int:
        return len(self.routed)

    @staticmethod
    def _of_layer(logits: Tensor, ids: Tensor, mask_BS: Tensor, scoring: str) -> Tensor:
        num_experts, top_k = logits.shape[-1], ids.shape[-1]
        logits_BSE = logits.float().view(*mask_BS.shape, num_experts)
        chosen_BSE = torch.zeros_like(logits_BSE).scatter(2, ids.view(*mask_BS.shape, top_k), 1.0)
        scores_BSE = logits_BSE.softmax(-1) if scoring == "softmax" else logits_BSE.sigmoid()
        scores_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)

        def balance(mask_S: Tensor, chosen_SE: Tensor, scores_SE: Tensor) -> Tensor:
            f_E = num_experts / top_k * chosen_SE[mask_S].mean(0)
            return (f_E * scores_SE[mask_S].mean(0)).sum()

        of_sequences = [balance(*row) for row in zip(mask_BS, chosen_BSE, scores_BSE, strict=True)]
        of_batch = balance(mask_BS.flatten(), chosen_BSE.flatten(0, 1), scores_BSE.flatten(0, 1))
        z = logits_BSE[mask_BS].logsumexp(-1).square().mean()
        return torch.stack([torch.stack(of_sequences).mean(), of_batch, z])


def reference(
    make_model: Any, loader: DataLoader, scoring: str, losses: dict[str, float] = LOSSES
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and values of one step over all batches of the loader: each weighs as many as it has labels."""
    torch.manual_seed(0)
    model = make_model().train()
    model.log = lambda *args, **kwargs: None
    observed = LossesOfRouters(model)
    coefficients = torch.tensor([losses.get(name, 0.0) for name in LOSSES])
    total_loss, total_values, num_labels = torch.zeros(()), torch.zeros(3), 0
    for index, batch in enumerate(loader):
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
        count = int((labels != IGNORED).sum())
        loss = model.training_step(batch, index)
        num_layers = observed.num_layers()
        values = observed.means(batch["attention_mask"].bool(), scoring)
        total_loss = total_loss + count * (loss + num_layers * (coefficients * values).sum())
        total_values, num_labels = total_values + count * values.detach(), num_labels + count
    (total_loss / num_labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, total_values / num_labels


def trained(
    degrees: dict[str, Any], make_model: Any, num_micro_batches: int, targets: str, losses: dict[str, float] = LOSSES
) -> tuple[dict[str, Tensor], Tensor, list[float]]:
    make_loader = partial(batches, num_micro_batches=num_micro_batches, targets=targets)
    trainer, model, keep = fit(degrees | losses, make_model, make_loader, accumulate_grad_batches=num_micro_batches)
    metrics = trainer.callback_metrics
    names = ("sequence_balance", "batch_balance", "z")
    values = torch.tensor([float(metrics.get(f"router_loss/{name}", float("nan"))) for name in names])
    return keep.steps[0], values, getattr(model, "losses", [])


def assert_equal(result: Any, expected: tuple[dict[str, Tensor], Tensor]) -> None:
    gradients, values, _ = result
    difference, name = worst_difference(gradients, expected[0])
    assert difference < TOLERANCE, name
    torch.testing.assert_close(values, expected[1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("degrees", LAYOUTS, ids=name_of)
def test_every_gradient_and_value_equals_one_process_on_the_whole_batch(degrees, ranks4):
    expected = reference(Ours, batches(1), "softmax")
    for result in ranks4(trained, degrees, Ours, 1, "shift_labels"):
        assert_equal(result, expected)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_accumulation_and_recompute_change_nothing(scoring, recompute, ranks4):
    make = partial(Ours, scoring=scoring, balance_bias=scoring == "sigmoid")
    expected = reference(make, batches(1, num_micro_batches=3), scoring)
    degrees = dict(fsdp=2, cp=2, e_fsdp=2, ep=2, recompute=recompute)
    for result in ranks4(trained, degrees, make, 3, "shift_labels"):
        assert_equal(result, expected)


def test_layers_of_multi_token_prediction_are_layers_like_others(ranks4):
    make = partial(Ours, mtp_layers=1)
    expected = reference(make, batches(1), "softmax")
    for result in ranks4(trained, LAYOUTS_OF_4[2] | dict(recompute="block"), make, 1, "shift_labels"):
        assert_equal(result, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_one_loss_alone_is_that_of_one_process(name, ranks4):
    make, losses = partial(Ours, share=0.0), {name: 1.0}
    gradients, _ = reference(make, batches(1), "softmax", losses)
    routers = {key for key in gradients if key.endswith("router.weight")}
    assert all(gradients[key].norm() > 1e-4 for key in routers)
    for result, _, _ in ranks4(trained, LAYOUTS_OF_4[2], make, 1, "shift_labels", losses):
        difference, worst = worst_difference(
            {key: result[key] for key in routers}, {key: gradients[key] for key in routers}
        )
        assert difference < 1e-5, worst  # nothing larger beside it


@pytest.mark.parametrize(
    "model_type, scoring", [("qwen3_moe", "softmax"), ("deepseek_v3", "sigmoid"), ("glm4_moe", "sigmoid")]
)
def test_unchanged_hugging_face_models_get_the_same_losses_and_return_theirs(model_type, scoring, ranks4):
    make = partial(HuggingFaceLanguageModel, model_type)
    expected = reference(make, batches(1, targets="labels"), scoring)
    plain = ranks4(trained, LAYOUTS_OF_4[2], make, 1, "labels", {})
    for result, (_, _, losses) in zip(ranks4(trained, LAYOUTS_OF_4[2], make, 1, "labels"), plain, strict=True):
        assert_equal(result, expected)
        assert result[2] == losses


def test_the_batch_loss_of_one_layer_is_transformers_own_over_top_k():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits_TE = torch.randn(40, 4)
    ids_TK = logits_TE.topk(2).indices
    ours = LossesOfRouters._of_layer(logits_TE, ids_TK, torch.ones(2, 20, dtype=torch.bool), "softmax")[1]
    torch.testing.assert_close(ours * 2, load_balancing_loss_func((logits_TE,), num_experts=4, top_k=2))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_gradient_of_shares_is_that_of_autograd(scoring):
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(1, 7, dtype=torch.float64)
    (expected,) = torch.autograd.grad((shares(logits, scoring) * grad).sum(), logits)
    torch.testing.assert_close(shares_backward(grad, logits.detach(), scoring), expected)


def collectives_of_two_steps(
    degrees: dict[str, int], losses: dict[str, float], make_model: Any = Ours, accumulate: int = 2
) -> list[int]:
    """Numbers in every all-reduce of float64 that is not a norm: those of the losses."""
    sizes: list[int] = []
    original = torch.distributed.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64 and tensor.dim():
            sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        make_loader = partial(batches, num_micro_batches=4)
        fit(degrees | losses, make_model, make_loader, max_steps=2, accumulate_grad_batches=accumulate)
    finally:
        torch.distributed.all_reduce = original
    return sizes


def test_a_micro_batch_costs_two_collectives_for_all_layers_and_a_step_one(ranks4):
    sizes = ranks4(collectives_of_two_steps, LAYOUTS_OF_4[2] | dict(recompute="block"), LOSSES)
    of_world, of_sequences = 1 + 2 * (2 * 4 + 2), 2 * (2 * 2 * 4)
    assert sizes == [[of_world, of_sequences, of_world, of_sequences, 4] * 2] * 4
    sizes = ranks4(collectives_of_two_steps, LAYOUTS_OF_4[2] | dict(recompute="block"), dict(router_z_loss=1.0))
    assert sizes == [[of_world, of_world, 4] * 2] * 4
    assert ranks4(collectives_of_two_steps, LAYOUTS_OF_4[2], {}) == [[]] * 4


class Manual(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_gets_the_same_gradients(ranks2):
    expected = reference(Ours, batches(1), "softmax")
    for result in ranks2(trained, dict(fsdp=1, cp=2, e_fsdp=1, ep=2), Manual, 1, "shift_labels"):
        assert_equal(result, expected)


class TwoBackwards(Manual):
    """Half of the loss twice, through one graph."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        half = Ours.training_step(self, batch, batch_idx) / 2
        self.manual_backward(half, retain_graph=True)
        self.manual_backward(half)
        optimizer.step()


def test_a_second_backward_through_a_graph_adds_no_second_gradient(ranks2):
    expected = reference(Ours, batches(1), "softmax")
    for result in ranks2(trained, dict(fsdp=1, cp=2, e_fsdp=1, ep=2), TwoBackwards, 1, "shift_labels"):
        assert_equal(result, expected)


class TwoForwards(Manual):
    """Two passes over the batch, each with a backward of its own, then a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(Ours.training_step(self, batch, batch_idx))
        optimizer.step()


def test_what_a_recompute_routes_is_not_summed_before_the_next_backward(ranks2):
    degrees = dict(fsdp=2, ep=1, recompute="block")
    sizes = ranks2(collectives_of_two_steps, degrees, dict(router_z_loss=1.0), TwoForwards, 1)
    of_world = 1 + 2 * (2 * 4 + 2)
    assert sizes == [[of_world, of_world, 4] * 2] * 2


class Reentrant(HuggingFaceLanguageModel):
    def __init__(self) -> None:
        super().__init__("deepseek_v3")
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=True))

    def on_train_start(self) -> None:
        self.model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())


def error_of(make_model: Any, losses: dict[str, float], degrees: dict[str, int]) -> str:
    try:
        trained(degrees, make_model, 1, "labels", losses)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


class LoneBackward(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()


class Probabilities(HuggingFaceLanguageModel):
    """A router that returns scores in the place of its logits."""

    def __init__(self) -> None:
        super().__init__("qwen3_moe")
        gate = type(self.model.model.layers[0].mlp.gate)

        def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scores_TE = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight).softmax(-1)
            return (scores_TE, *scores_TE.topk(2))

        for layer in self.model.model.layers:
            layer.mlp.gate.__class__ = type("Scores", (gate,), {"forward": forward})


@pytest.mark.parametrize(
    "make_model, losses, words",
    [
        (partial(PlainLanguageModel), LOSSES, "need a router beside.*decoder.blocks.0.sparse.experts"),
        (partial(HuggingFaceLanguageModel, "llama"), LOSSES, "no experts at all"),
        (Probabilities, LOSSES, "layers.0.mlp.gate.*returns scores in their place"),
    ],
    ids=["linear", "dense", "probabilities"],
)
def test_a_router_that_cannot_be_read_is_named(make_model, losses, words, ranks2):
    for error in ranks2(error_of, make_model, losses, dict(fsdp=2, ep=1)):
        assert re.search(words, error), error


def test_a_backward_past_the_strategy_is_an_error(ranks1):
    (error,) = ranks1(error_of, LoneBackward, LOSSES, {})
    assert "manual_backward" in error


def test_reentrant_checkpointing_is_an_error(ranks1):
    (error,) = ranks1(error_of, Reentrant, LOSSES, {})
    assert "use_reentrant=False" in error


@pytest.mark.parametrize("name", LOSSES)
def test_error_names_the_coefficient(name):
    with pytest.raises(ValueError, match=rf"{name}\(-0.1\)"):
        FSDPCPEPStrategy(**{name: -0.1})


def routers_after(degrees: dict[str, int]) -> list[str]:
    """Routers with a forward of their own once the Trainer is done."""
    _, model, _ = fit(degrees | LOSSES, Ours, batches)
    assert isinstance(model, LightningModule)
    return [name for name, module in model.named_modules() if name.endswith("router") and "forward" in vars(module)]


def test_routers_get_their_own_forward_back(ranks2):
    assert ranks2(routers_after, dict(fsdp=2, ep=1)) == [[], []]
