"""``balance="bias"`` under a real Trainer on gloo ranks, against a plain loop in one process that counts for itself.

Shapes: E experts, K experts per token, B sequences, S tokens of each.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_strategy import FSDPCPEPStrategy
from lightning_moe_strategy.callbacks.expert_load_report import skew
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.expert_parallel.balance import BalanceBias, biases_as_buffers
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, find_experts
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, tiny_hf_config
from tests.parity import LAYOUTS_OF_4, InOrder, fit
from tests.test_router_losses import NUM_SEQUENCES, Ours, PaddedTokens, Reentrant, name_of

RATE = 0.05
BIASED = dict(balance="bias", balance_bias_rate=RATE)
MICRO_BATCHES, ACCUMULATE = 7, 3
Sigmoid = partial(Ours, scoring="sigmoid", balance_bias=True)


def batches(dp: int, *, targets: str = "shift_labels", num_micro_batches: int = MICRO_BATCHES) -> DataLoader:
    return DataLoader(PaddedTokens(NUM_SEQUENCES * num_micro_batches, targets), batch_size=NUM_SEQUENCES // dp)


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if name.endswith(("_bias", "biases"))}


def after_a_plain_loop(make_model: Any, targets: str = "shift_labels") -> dict[str, Tensor]:
    """Biases after an epoch whose last step has one micro-batch in place of three."""
    torch.manual_seed(0)
    model = make_model().train()
    model.log = lambda *args, **kwargs: None
    optimizer = model.configure_optimizers()
    routed: dict[nn.Module, list[Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith((".router", "mlp.gate")) and biases(module):
            routed[module] = []
            module.register_forward_hook(lambda module, args, out: routed[module].append(out[2]))
    losses, num_labels = [], 0
    for index, batch in enumerate(batches(1, targets=targets)):
        mask_T = batch["attention_mask"].bool().flatten()
        loss = model.training_step(batch, index)
        for ids in routed.values():
            ids[-1] = ids[-1][mask_T]
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
        losses.append(loss * (labels != -100).sum())
        num_labels += int((labels != -100).sum())
        if (index + 1) % ACCUMULATE and index + 1 < MICRO_BATCHES:
            continue
        optimizer.zero_grad()
        (sum(losses) / num_labels).backward()
        optimizer.step()
        losses, num_labels = [], 0
        for module, ids in routed.items():
            move(module, torch.cat(ids))
            ids.clear()
    return biases(model)


def move(router: nn.Module, ids_TK: Tensor) -> None:
    (bias_E,) = [b for name, b in router.named_buffers() if name.endswith("bias")]
    load_E = torch.zeros(len(bias_E)).index_add(0, ids_TK.flatten(), torch.ones(ids_TK.numel()))
    delta_E = RATE * (load_E.mean() - load_E).sign()
    bias_E += delta_E - delta_E.mean()


class KeepBiases(Callback):
    """After every training batch, and where they lie."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []
        self.addresses: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.after.append(biases(pl_module))
        self.addresses.add(tuple(b.data_ptr() for n, b in pl_module.named_buffers() if n.endswith("_bias")))


class Validated(Ours):
    def __init__(self) -> None:
        super().__init__(scoring="sigmoid", balance_bias=True)

    num_validated = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        Validated.num_validated += 1
        with torch.enable_grad():
            self.model(batch["input_ids"], batch.get("position_ids"))


def trained(
    degrees: dict[str, Any], make_model: Any, targets: str = "shift_labels", **options: Any
) -> list[dict[str, Tensor]]:
    keep = KeepBiases()
    options = dict(max_steps=-1, max_epochs=1, accumulate_grad_batches=ACCUMULATE) | options
    fit(degrees | BIASED, make_model, partial(batches, targets=targets), callbacks=(keep,), **options)
    assert len(keep.addresses) == 1  # in place
    return keep.after


def assert_moved(results: list[list[dict[str, Tensor]]], expected: dict[str, Tensor]) -> None:
    """The same bits on all ranks, those of the loop, moved with every step and not with every micro-batch."""
    for after in results:
        assert after[-1].keys() == expected.keys() and expected
        for name, bias_E in after[-1].items():
            torch.testing.assert_close(bias_E, expected[name], rtol=0.0, atol=1e-6)
            assert torch.equal(bias_E, results[0][-1][name])
            assert bias_E.abs().max() > RATE / 2 and bias_E.sum().abs() < 1e-6
            steps = [bool((b[name] != a[name]).any()) for a, b in zip(after[:-1], after[1:], strict=True)]
            assert not steps[0] and not steps[2] and not steps[3]


@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[i] for i in (0, 2, 4, 9)], ids=name_of)
def test_biases_move_once_a_step_by_the_loads_of_all_ranks(degrees, ranks4):
    assert_moved(ranks4(trained, degrees, Sigmoid), after_a_plain_loop(Sigmoid))


def test_recompute_does_not_count_tokens_twice(ranks4):
    degrees = LAYOUTS_OF_4[2] | dict(recompute="block")
    assert_moved(ranks4(trained, degrees, Sigmoid), after_a_plain_loop(Sigmoid))


def trained_and_validated() -> list[dict[str, Tensor]]:
    """A datamodule's loaders are the only ones that Lightning asks for."""
    InOrder.val_dataloader = lambda self: DataLoader(  # type: ignore[method-assign]
        PaddedTokens(NUM_SEQUENCES, "shift_labels"), batch_size=1
    )
    try:
        Validated.num_validated = 0
        after = trained(dict(fsdp=2, ep=2), Validated, val_check_interval=2, num_sanity_val_steps=2)
        assert Validated.num_validated > 2
        return after
    finally:
        del InOrder.val_dataloader


def test_evaluation_and_the_sanity_check_move_nothing(ranks2):
    assert_moved(ranks2(trained_and_validated), after_a_plain_loop(Sigmoid))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_unchanged_hugging_face_models_are_balanced(model_type, ranks4):
    make = partial(HuggingFaceLanguageModel, model_type)
    assert_moved(ranks4(trained, LAYOUTS_OF_4[2], make, "labels"), after_a_plain_loop(make, "labels"))


class WithoutOneBias(Ours):
    def __init__(self) -> None:
        super().__init__(scoring="sigmoid", balance_bias=True)
        for name, module in self.named_modules():
            if name.endswith("layers.0.mlp.router"):
                module.balance_bias = None


def test_a_layer_without_a_bias_is_left_alone(ranks2):
    expected = after_a_plain_loop(WithoutOneBias)
    assert len(expected) == 1
    assert_moved(ranks2(trained, dict(fsdp=2, ep=2), WithoutOneBias), expected)


def error_of(make_model: Any) -> str:
    try:
        fit(dict(fsdp=2, ep=1) | BIASED, make_model, partial(batches, targets="labels"), shift="module")
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_without_any_bias_is_an_error(ranks2):
    for error in ranks2(error_of, PlainLanguageModel):
        assert "balance='bias'" in error and "none of 2 layers" in error and "batch_balance_loss" in error


class Still(Ours):
    """Its weights stay as they are: only loads move its biases."""

    def __init__(self) -> None:
        super().__init__(scoring="sigmoid", balance_bias=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class TwoOptimizers(Still):
    """Manual optimization, three micro-batches a step, two optimizers that step one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % ACCUMULATE == 0 or batch_idx + 1 == MICRO_BATCHES:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [torch.optim.SGD([first], lr=0.0), torch.optim.SGD(others, lr=0.0)]


def test_manual_optimization_with_two_optimizers_moves_once_a_step(ranks4):
    run = partial(trained, accumulate_grad_batches=1)
    assert_moved(ranks4(run, LAYOUTS_OF_4[2], TwoOptimizers), after_a_plain_loop(Still))


class SkipsTheFirst(Ours):
    """Its first step is not taken, and each has a forward without gradients beside the one that is trained on."""

    def __init__(self) -> None:
        super().__init__(scoring="sigmoid", balance_bias=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.model(torch.zeros_like(batch["input_ids"]))
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 0:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def after_the_second_batch_alone() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Sigmoid()
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module.register_forward_hook(lambda module, args, out: move(module, out[2][mask_T]))
    batch = list(batches(1))[1]
    mask_T = batch["attention_mask"].bool().flatten()
    model.model(batch["input_ids"])
    return biases(model)


def test_only_tokens_that_a_step_was_taken_on_count(ranks2):
    expected = after_the_second_batch_alone()
    run = partial(trained, accumulate_grad_batches=1, limit_train_batches=2)
    for first, second in ranks2(run, dict(fsdp=2, ep=2), SkipsTheFirst):
        for name, bias_E in expected.items():
            assert not first[name].any() and bias_E.any()
            torch.testing.assert_close(second[name], bias_E, rtol=0.0, atol=1e-6)


def saved(degrees: dict[str, int], make_model: Any, targets: str, directory: str) -> dict[str, Tensor]:
    options = dict(max_steps=1)
    make_loader = partial(batches, targets=targets)
    trainer, model, _ = fit(degrees | BIASED, make_model, make_loader, **options)
    trainer.save_checkpoint(Path(directory) / "checkpoint")
    return biases(model)


def resumed(degrees: dict[str, int], make_model: Any, targets: str, directory: str) -> list[dict[str, Tensor]]:
    keep, start = KeepBiases(), AtStart()
    path = str(Path(directory) / "checkpoint")
    make_loader = partial(batches, targets=targets)
    fit(degrees | BIASED, make_model, make_loader, callbacks=(keep, start), max_steps=2, ckpt_path=path)
    return [start.biases, keep.after[-1]]


class AtStart(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.biases = biases(pl_module)


@pytest.mark.parametrize(
    "make_model, targets",
    [(Sigmoid, "shift_labels"), (partial(HuggingFaceLanguageModel, "afmoe", num_dense_layers=1), "labels")],
    ids=["buffer", "parameter"],
)
def test_a_resumed_fit_goes_on_from_the_biases_on_another_layout(make_model, targets, ranks4, tmp_path):
    before = ranks4(saved, LAYOUTS_OF_4[2], make_model, targets, str(tmp_path))[0]
    assert before and all(bias_E.any() for bias_E in before.values())
    for start, end in ranks4(resumed, LAYOUTS_OF_4[7], make_model, targets, str(tmp_path)):
        assert all(torch.equal(start[name], bias_E) for name, bias_E in before.items())
        assert any(not torch.equal(end[name], bias_E) for name, bias_E in before.items())


def dtypes(precision: str) -> set[str]:
    make = partial(HuggingFaceLanguageModel, "afmoe", num_dense_layers=1)
    _, model, _ = fit(dict(fsdp=2, ep=1) | BIASED, make, partial(batches, targets="labels"), precision=precision)
    return {str(bias.dtype) for bias in biases(model).values()}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_biases_are_fp32_in_every_precision(precision, ranks2):
    assert ranks2(dtypes, precision) == [{"torch.float32"}] * 2


@pytest.mark.parametrize(
    "model_type, leaf",
    [
        ("deepseek_v3", "gate.e_score_correction_bias"),
        ("ernie4_5_moe", "gate.moe_statics.e_score_correction_bias"),
        ("hy_v3", "mlp.e_score_correction_bias"),
        ("afmoe", "mlp.expert_bias"),
        ("laguna", "gate.e_score_correction_bias"),
    ],
)
def test_every_place_where_transformers_keeps_a_bias_is_known(model_type, leaf):
    from transformers import AutoModelForCausalLM

    sizes = dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1, num_dense_layers=1)
    model = AutoModelForCausalLM.from_config(tiny_hf_config(model_type, **sizes)).to(torch.bfloat16)
    state = model.state_dict()
    biases_as_buffers(model, find_experts(model), required=True)
    assert model.state_dict().keys() == state.keys()
    found = [name for name, buffer in model.named_buffers() if name.endswith(leaf)]
    assert found and all(model.get_buffer(name).dtype == torch.float32 for name in found)
    assert not any(name in dict(model.named_parameters()) for name in found)


def test_a_bias_for_other_choices_than_experts_is_an_error():
    model = Sigmoid()
    for module in model.modules():
        if hasattr(module, "balance_bias"):
            module.balance_bias = torch.zeros(5)
    with pytest.raises(ValueError, match=r"balance_bias beside .*experts has 5 values for num_experts\(4\)"):
        biases_as_buffers(model, find_experts(model), required=True)


def moved_by_hand(with_gradients: bool) -> tuple[list[float], bool]:
    """Bias after two micro-batches of four tokens, the last of each padding, with one expert per token and rank."""
    model = Sigmoid(num_experts=4, layers=1, top_k=1)
    experts = find_experts(model)
    ((name, module),) = experts.items()
    undo = attach(module, LocalDispatcher(4))
    bias_E = model.get_submodule(name.rpartition(".")[0]).router.balance_bias
    balance = BalanceBias(model, experts, rate=0.1, device=torch.device("cpu"))
    is_real = torch.tensor([[True, True, True, False]])
    ids_TK = torch.tensor([[dist.get_rank()], [0], [0], [3]])
    for _ in range(2):
        balance.start_micro_batch(MicroBatch(num_tokens=3, num_loss_tokens=None, real_tokens_BL=is_real))
        with torch.set_grad_enabled(with_gradients):
            module(torch.randn(4, 16), ids_TK, torch.ones(4, 1))
        balance.before_backward()
    balance.update()
    balance.update()  # another optimizer of the same step
    balance.close()
    undo()
    return bias_E.tolist(), bias_E is model.get_submodule(name.rpartition(".")[0]).router.balance_bias


def test_the_update_is_the_centred_sign_of_mean_minus_load(ranks2):
    # Loads 10, 2, 0, 0 of a mean of 3: signs -1, 1, 1, 1, less their mean of a half.
    for bias_E, is_in_place in ranks2(moved_by_hand, True):
        assert bias_E == pytest.approx([-0.15, 0.05, 0.05, 0.05]) and is_in_place
    for bias_E, _ in ranks2(moved_by_hand, False):
        assert bias_E == [0.0] * 4


def skew_before_and_after(num_steps: int) -> tuple[float, float]:
    """Of a model whose router prefers one expert, all else at rest."""
    model = Sigmoid(num_experts=8, layers=1).requires_grad_(True)
    experts = find_experts(model)
    ((name, module),) = experts.items()
    undo = attach(module, LocalDispatcher(8))
    router = model.get_submodule(name.rpartition(".")[0]).router
    with torch.no_grad():
        router.weight.normal_(std=0.2)
        router.weight[0] += 0.3
        router.weight[1:3] -= 0.2
    balance = BalanceBias(model, experts, rate=0.01, device=torch.device("cpu"))
    skews, micro_batch = [], MicroBatch(num_tokens=512, num_loss_tokens=None)
    tokens = torch.randn(512, 16) + 0.3
    for _ in range(num_steps):
        balance.start_micro_batch(micro_batch)
        _, weights, ids = router(tokens)
        module(tokens, ids, weights)
        balance.before_backward()
        balance.update()
        skews.append(skew(ids.flatten().bincount(minlength=8)))
    balance.close()
    undo()
    return skews[0], sum(skews[-10:]) / 10


def test_a_skewed_model_is_even_after_two_hundred_steps(ranks1):
    ((before, after),) = ranks1(skew_before_and_after, 200)
    assert before > 2.0 and after < 1.15


def warnings_of(make_model: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("lightning_moe_strategy.callbacks.balance.rank_zero_warn", said.append)
        fit(BIASED, make_model, partial(batches, targets="labels"), max_steps=2)
    return said


def test_a_checkpointing_that_hides_all_tokens_is_warned_of(ranks1):
    (said,) = ranks1(warnings_of, Reentrant)[0]
    assert "use_reentrant=True" in said
    assert not ranks1(warnings_of, partial(HuggingFaceLanguageModel, "deepseek_v3"))[0]


@pytest.mark.parametrize(
    "options, words", [(dict(balance="biases"), r"balance\('biases'\)"), (dict(balance_bias_rate=0.0), r"rate\(0.0\)")]
)
def test_error_names_the_option(options, words):
    with pytest.raises(ValueError, match=words):
        FSDPCPEPStrategy(**options)
