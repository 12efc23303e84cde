"""How a step's gradient comes about under a real Trainer: skipped steps, several optimizers, sums, when it is reduced.

What a user decides by hand (two optimizers, own accumulation) is compared with the same module under a plain Trainer in
one process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import DataLoader, Dataset

from lightning_moe_strategy import FSDPCPEPStrategy, summed_gradients
from tests.flavour import L
from tests.modules import IGNORED, VOCABULARY, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, QUIET, fit, reference, whole, worst_difference

TOLERANCE = 2e-6
"""As in test_strategy.py."""

NUM_SAMPLES, LENGTH = 8, 24
CP2, FSDP2, REPLICAS = LAYOUTS_OF_4[2], LAYOUTS_OF_4[7], LAYOUTS_OF_4[9]


def many_batches(dp: int, *, num_batches: int = 6) -> DataLoader:
    """Batches of ``NUM_SAMPLES``, whose numbers of labels differ."""
    return loader(num_batches * NUM_SAMPLES, LENGTH, NUM_SAMPLES // dp)


def assert_close(gradients: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    difference, name = worst_difference(gradients, expected)
    assert difference < tolerance, name


class EverySecondStep(PlainLanguageModel):
    """Looks at a batch and steps on the next, as a user who skips bad batches may write it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


def first_gradient(degrees: dict[str, int], make_model: Callable[[], Any], **options: Any) -> dict[str, Tensor]:
    return fit(degrees, make_model, many_batches, **options)[2].steps[0]


def test_a_step_that_the_user_left_out_does_not_weigh_on_the_next(ranks4):
    second = list(many_batches(1))[1]
    _, expected, _ = reference(PlainLanguageModel, [second])
    for gradients in ranks4(partial(first_gradient, shift="module", max_steps=2), CP2, EverySecondStep):
        assert_close(gradients, expected[0])


class TwoOptimizers(PlainLanguageModel):
    """A decoder and a critic of its states. Both losses reach both, and nothing is toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(VOCABULARY, 8), nn.GELU(), nn.Linear(8, 1))

    def critic_loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch.get("position_ids"))
        says_even = self.critic(logits).squeeze(-1)[:, :-1]
        labels = batch["labels"][:, 1:]
        counts = labels != IGNORED
        losses = F.binary_cross_entropy_with_logits(says_even, (labels % 2 == 0).float(), reduction="none")
        return (losses * counts).sum() / counts.sum().clamp(min=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        of_decoder, of_critic = self.optimizers()
        self.manual_backward(self.loss(batch) + 0.1 * self.critic_loss(batch))
        of_decoder.step()
        self.manual_backward(self.critic_loss(batch))  # on top of what the critic has from the first loss
        of_critic.step()
        of_decoder.zero_grad()
        of_critic.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.decoder.parameters(), lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)


class OwnAccumulation(PlainLanguageModel):
    """Accumulates three micro-batches and clips by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def trained_by_hand(degrees: dict[str, int], make_model: Callable[[], Any]) -> dict[str, Tensor]:
    _, model, _ = fit(degrees, make_model, many_batches, shift="module", max_steps=-1, max_epochs=1)
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make_model", [TwoOptimizers, OwnAccumulation])
@pytest.mark.parametrize("degrees", [CP2, REPLICAS], ids=["cp2", "e_rep2"])
def test_what_is_optimized_by_hand_ends_as_under_a_plain_trainer(make_model, degrees, ranks4):
    torch.manual_seed(0)
    model = make_model()
    L.Trainer(**QUIET, accelerator="cpu", devices=1, max_epochs=1).fit(model, many_batches(1))
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters in ranks4(trained_by_hand, degrees, make_model):
        assert_close(parameters, expected, 1e-5)  # of six steps


class Summed(PlainLanguageModel):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch.get("position_ids"))[:, :-1].flatten(0, 1)
        return 1e-2 * F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("num_accumulated", [1, 3])
@pytest.mark.parametrize("degrees", [CP2, FSDP2], ids=["cp2", "d_rep2"])
def test_a_loss_that_is_a_sum_is_added_up_and_never_divided(degrees, num_accumulated, ranks4):
    first = [next(iter(loader(6 * NUM_SAMPLES, LENGTH, num_accumulated * NUM_SAMPLES)))]
    _, expected, _ = reference(Summed, first)
    options = dict(shift="module", accumulate_grad_batches=num_accumulated)
    for gradients in ranks4(partial(first_gradient, **options), degrees | {"loss_reduction": "sum"}, Summed):
        assert_close(gradients, expected[0])


def reduced_gradients(degrees: dict[str, int]) -> tuple[dict[str, Tensor], int, list[str]]:
    """Of one step of three micro-batches: gradients, reductions per unit, and what was said."""
    num_reductions = 0
    said: list[str] = []
    reduce = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_reductions
        num_reductions += 1
        return reduce(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_reduce", counted)
        patch.setattr(summed_gradients, "rank_zero_info", said.append)
        trainer, _, keep = fit(degrees, PlainLanguageModel, many_batches, shift="module", accumulate_grad_batches=3)
    units = sum(any(True for _ in unit.module._get_fsdp_state()._fsdp_param_groups) for unit in trainer.strategy.units)
    assert num_reductions % units == 0
    return keep.steps[0], num_reductions // units, said


@pytest.mark.parametrize("degrees", [CP2, FSDP2, REPLICAS], ids=["cp2", "d_rep2", "e_rep2"])
def test_gradients_reduced_once_a_step_equal_those_of_one_large_batch(degrees, ranks4):
    first = [next(iter(loader(6 * NUM_SAMPLES, LENGTH, 3 * NUM_SAMPLES)))]
    model, expected, _ = reference(PlainLanguageModel, first)
    whole_gradients = sum(
        parameter.numel() // (degrees["ep"] if "experts" in name else 1) for name, parameter in model.named_parameters()
    )
    for gradients, num_reductions, said in ranks4(reduced_gradients, degrees | {"gradient_sync": "step"}):
        assert_close(gradients, expected[0])
        assert num_reductions == 1
        (price,) = said
        assert f"{whole_gradients * 4 / 1e9:.3g} GB" in price
    assert [n for _, n, _ in ranks4(reduced_gradients, degrees)] == [3] * 4


def classes_of_images(dp: int) -> DataLoader:
    return DataLoader(Images(), batch_size=NUM_SAMPLES // dp)


class Images(Dataset):
    def __len__(self) -> int:
        return 4 * NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 5, generator=generator), torch.tensor(index % 4)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(15, 8), nn.GELU(), nn.Linear(8, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self.layers(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradient_and_sayings(degrees: dict[str, int]) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summed_gradients, "rank_zero_info", said.append)
        keep = fit(degrees, Classifier, classes_of_images, max_steps=2, accumulate_grad_batches=2)[2]
    return keep.steps[0], said


def test_losses_without_labels_per_token_are_averaged_and_that_is_said_once(ranks4):
    _, expected, _ = reference(Classifier, [next(iter(DataLoader(Images(), batch_size=2 * NUM_SAMPLES)))])
    for gradients, said in ranks4(gradient_and_sayings, dict(fsdp=4)):
        assert_close(gradients, expected[0])
        (sentence,) = said
        assert "plain mean" in sentence


@pytest.mark.parametrize(("name", "value"), [("loss_reduction", "max"), ("gradient_sync", "never")])
def test_wrong_names_are_refused_with_the_known_ones(name, value):
    with pytest.raises(ValueError, match=rf"{name}\('{value}'\) must be"):
        FSDPCPEPStrategy(**{name: value})


def error_of_fit(degrees: dict[str, Any]) -> str:
    try:
        fit(degrees, OwnAccumulation, many_batches, shift="module")
    except ValueError as error:
        return str(error)
    return ""


def test_a_loss_of_indexers_is_refused_where_nothing_divides_the_step(ranks2):
    for error in ranks2(error_of_fit, dict(fsdp=2, ep=1, indexer_loss_weight=0.5)):
        assert error.startswith("indexer_loss_weight(0.5) needs automatic_optimization")
