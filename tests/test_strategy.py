"""The strategy under a real Trainer on gloo ranks, against one process. REF is a plain loop over whole batches."""

import logging
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_strategy import ExpertLoadMonitor, FSDPCPEPStrategy, ZigZagContextParallel
from tests.flavour import L
from tests.modules import (
    IGNORED,
    VOCABULARY,
    HuggingFaceLanguageModel,
    PlainLanguageModel,
    RandomTokens,
    loader,
)
from tests.parity import LAYOUTS_OF_4, QUIET, fit, reference, whole, worst_difference

TOLERANCE = 2e-6
"""Relative, FP32: sums over ranks come in another order (measured up to 9e-7)."""

logging.getLogger(L.__name__).setLevel(logging.ERROR)

NUM_SAMPLES, LENGTH = 8, 24


def batches(dp: int, **options: Any) -> DataLoader:
    return loader(NUM_SAMPLES, LENGTH, NUM_SAMPLES // dp, **options)


def gradients_of_first_step(degrees: dict[str, int], make_model: Any, **options: Any) -> dict[str, Tensor]:
    _, _, keep = fit(degrees, make_model, batches, **options)
    return keep.steps[0]


@pytest.mark.parametrize("degrees", LAYOUTS_OF_4, ids=lambda d: "-".join(f"{k}{v}" for k, v in d.items()))
def test_every_gradient_equals_one_process_on_every_layout(degrees, ranks4):
    _, expected, _ = reference(PlainLanguageModel, batches(1))
    for gradients in ranks4(partial(gradients_of_first_step, shift="module"), degrees, PlainLanguageModel):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


def test_every_gradient_equals_one_process_with_all_six_degrees_at_two(ranks8):
    degrees = dict(d_rep=2, fsdp=2, cp=2, e_rep=2, e_fsdp=2, ep=2)
    _, expected, _ = reference(PlainLanguageModel, batches(1))
    for gradients in ranks8(partial(gradients_of_first_step, shift="module"), degrees, PlainLanguageModel):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[2], LAYOUTS_OF_4[4]], ids=["cp2-ep2", "cp4-ep4"])
def test_every_gradient_of_unchanged_hugging_face_models_equals_one_process(model_type, degrees, ranks4):
    make = partial(HuggingFaceLanguageModel, model_type)
    _, expected, _ = reference(make, batches(1))
    for gradients in ranks4(gradients_of_first_step, degrees, make):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


def test_tied_embeddings_have_one_gradient_equal_to_one_process(ranks4):
    make = partial(HuggingFaceLanguageModel, "qwen3_moe", tie_word_embeddings=True)
    _, expected, _ = reference(make, batches(1))
    for gradients in ranks4(gradients_of_first_step, LAYOUTS_OF_4[2], make):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


class FrozenExperts(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for block in self.decoder.blocks:
            block.sparse.experts.requires_grad_(False)


class FrozenDense(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("experts" in name)


def clipped_step(degrees: dict[str, int], make_model: Any, clip: float) -> tuple[float, dict[str, Tensor]]:
    trainer, model, _ = fit(degrees, make_model, batches, shift="module", gradient_clip_val=clip)
    norm = float(trainer.precision_plugin.last_gradient_norm)
    return norm, {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make_model", [PlainLanguageModel, FrozenExperts, FrozenDense])
@pytest.mark.parametrize(
    "degrees", [LAYOUTS_OF_4[2], LAYOUTS_OF_4[8], LAYOUTS_OF_4[11]], ids=["cp2", "e_rep2", "d_rep4"]
)
def test_the_clipped_norm_is_the_norm_of_the_whole_gradients(make_model, degrees, ranks4):
    model, expected, _ = reference(make_model, batches(1), clip=0.05)
    norm = torch.cat([gradient.flatten() for gradient in expected[0].values()]).norm()
    for measured, parameters in ranks4(clipped_step, degrees, make_model, 0.05):
        assert measured == pytest.approx(float(norm), rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def clipped_values(degrees: dict[str, int]) -> float:
    class Largest(L.Callback):
        value = 0.0

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = [whole(p.grad) for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                self.value = max(float(gradient.abs().max()) for gradient in gradients)

    largest = Largest()
    fit(
        degrees, PlainLanguageModel, batches, shift="module", callbacks=(largest,), max_steps=2,
        gradient_clip_val=1e-3, gradient_clip_algorithm="value",
    )  # fmt: skip
    return largest.value


def test_values_are_clipped_on_both_meshes(ranks4):
    assert ranks4(clipped_values, LAYOUTS_OF_4[2]) == [pytest.approx(1e-3)] * 4


class Exploding(PlainLanguageModel):
    scale = 1e30

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * self.scale


class NotFinite(Exploding):
    scale = float("inf")


def norm_of_huge_gradients(degrees: dict[str, int]) -> float:
    return clipped_step(degrees, Exploding, 1.0)[0]


def test_huge_finite_gradients_do_not_overflow_the_norm(ranks4):
    assert all(1e25 < norm < float("inf") for norm in ranks4(norm_of_huge_gradients, LAYOUTS_OF_4[2]))


def error_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fit_with_error(degrees: dict[str, Any], make_model: Any, length: int = LENGTH, **options: Any) -> str:
    def make(dp: int) -> DataLoader:
        return loader(NUM_SAMPLES, length, max(1, NUM_SAMPLES // dp))

    return error_of(fit, degrees, make_model, make, **options)


def test_a_norm_that_is_not_finite_raises_when_asked(ranks4):
    degrees = dict(LAYOUTS_OF_4[2], error_if_nonfinite=True)
    errors = ranks4(partial(fit_with_error, shift="module", gradient_clip_val=1.0), degrees, NotFinite)
    assert all("total gradient norm is nan" in error or "norm is inf" in error for error in errors), errors


def replica_bits(degrees: dict[str, int], optimizer: str) -> list[bytes]:
    _, model, _ = fit(
        degrees,
        partial(PlainLanguageModel, optimizer=optimizer, learning_rate=1e-2),
        lambda dp: loader(3 * NUM_SAMPLES, LENGTH, NUM_SAMPLES // dp),
        shift="module",
        max_steps=3,
    )
    return [whole(parameter.detach()).numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "degrees", [LAYOUTS_OF_4[6], LAYOUTS_OF_4[8], LAYOUTS_OF_4[9]], ids=["d_rep2", "e_rep2", "both"]
)
def test_replicas_are_bitwise_equal_after_every_step(degrees, ranks4):
    first, *others = ranks4(replica_bits, degrees, "adamw")
    assert all(other == first for other in others)


def losses_of_steps(degrees: dict[str, int], make_model: Any, shift: str, num_steps: int) -> list[tuple[float, int]]:
    """This rank's loss and token count of every step."""
    counts: list[int] = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            counts.append(int(trainer.strategy.micro_batch.num_loss_tokens))

    def make(dp: int) -> DataLoader:
        return loader(num_steps * NUM_SAMPLES, LENGTH, NUM_SAMPLES // dp)

    _, model, _ = fit(degrees, make_model, make, shift=shift, max_steps=num_steps, callbacks=(Count(),))
    return list(zip(model.losses, counts, strict=True))


@pytest.mark.parametrize(
    ("make_model", "shift"), [(PlainLanguageModel, "module"), (HuggingFaceLanguageModel, "auto")], ids=["plain", "hf"]
)
@pytest.mark.parametrize("degrees", [{}, LAYOUTS_OF_4[2]], ids=["string", "cp2-ep2"])
def test_the_first_five_losses_equal_one_process(make_model, shift, degrees, ranks4):
    _, _, expected = reference(make_model, loader(5 * NUM_SAMPLES, LENGTH, NUM_SAMPLES), num_steps=5)
    degrees = degrees or dict(fsdp=4)
    per_rank = ranks4(losses_of_steps, degrees, make_model, shift, 5)
    for step, loss in enumerate(expected):
        here = [rank[step] for rank in per_rank]
        mean = sum(value * count for value, count in here if count) / sum(count for _, count in here)
        assert mean == pytest.approx(loss, rel=1e-5)


class PromptsOnly(RandomTokens):
    """The second half of the samples, so half of the data parallel ranks, has no label that counts."""

    def __init__(self) -> None:
        super().__init__(NUM_SAMPLES, LENGTH)
        self.labels[1::2] = IGNORED


def gradients_with_prompt_only_ranks(degrees: dict[str, int]) -> dict[str, Tensor]:
    def make(dp: int) -> DataLoader:
        return DataLoader(PromptsOnly(), batch_size=NUM_SAMPLES // dp)

    return fit(degrees, PlainLanguageModel, make, shift="module")[2].steps[0]


def test_ranks_without_a_single_label_change_nothing(ranks4):
    _, expected, _ = reference(PlainLanguageModel, DataLoader(PromptsOnly(), batch_size=NUM_SAMPLES))
    for gradients in ranks4(gradients_with_prompt_only_ranks, LAYOUTS_OF_4[7]):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


def accumulated_gradients(degrees: dict[str, int]) -> dict[str, Tensor]:
    def make(dp: int) -> DataLoader:
        return loader(NUM_SAMPLES, LENGTH, NUM_SAMPLES // dp // 2)

    return fit(degrees, PlainLanguageModel, make, shift="module", accumulate_grad_batches=2)[2].steps[0]


@pytest.mark.parametrize(
    "degrees", [LAYOUTS_OF_4[2], LAYOUTS_OF_4[6], LAYOUTS_OF_4[9]], ids=["cp2", "d_rep2", "e_rep2"]
)
def test_two_accumulated_micro_batches_equal_one_of_twice_the_size(degrees, ranks4):
    _, expected, _ = reference(PlainLanguageModel, batches(1))
    for gradients in ranks4(accumulated_gradients, degrees):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


class Targets(RandomTokens):
    """Targets that are shifted already."""

    def __getitem__(self, index: int) -> Any:
        shifted = F.pad(self.labels[index][1:], (0, 1), value=IGNORED)
        return {"input_ids": self.input_ids[index], "targets": shifted}


class TargetsModel(PlainLanguageModel):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch.get("position_ids"))
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)


def gradients_on_targets(degrees: dict[str, int], length: int) -> dict[str, Tensor]:
    def make(dp: int) -> DataLoader:
        return DataLoader(Targets(NUM_SAMPLES, length), batch_size=NUM_SAMPLES // dp)

    return fit(degrees, TargetsModel, make)[2].steps[0]


@pytest.mark.parametrize("length", [24, 21], ids=["divides", "padded"])
def test_targets_that_are_shifted_already_are_split_as_they_are(length, ranks4):
    data = DataLoader(Targets(NUM_SAMPLES, length), batch_size=NUM_SAMPLES)
    _, expected, _ = reference(TargetsModel, data)
    for gradients in ranks4(gradients_on_targets, LAYOUTS_OF_4[2], length):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name


def gradients_in_bf16(degrees: dict[str, int]) -> tuple[dict[str, Tensor], set[str]]:
    _, model, keep = fit(degrees, HuggingFaceLanguageModel, batches, precision="bf16-mixed")
    return keep.steps[0], {str(parameter.dtype) for parameter in model.parameters()}


def bf16_in_one_process() -> dict[str, Tensor]:
    """BF16 weights and compute, routers in FP32, no FSDP: where near ties fall another way than in FP32."""
    torch.manual_seed(0)
    model = HuggingFaceLanguageModel().bfloat16()
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.float().register_forward_pre_hook(lambda gate, args: (args[0].float(),))
    model.training_step(next(iter(batches(1))), 0).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def test_bf16_mixed_keeps_fp32_masters_and_computes_as_one_process_in_bf16(ranks4):
    expected = bf16_in_one_process()
    for gradients, dtypes in ranks4(gradients_in_bf16, LAYOUTS_OF_4[2]):
        assert dtypes == {"torch.float32"}
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        # BF16 keeps 8 bits, so 4e-3 per rounding; sums over ranks are FP32 here and BF16 there.
        difference, name = worst_difference(gradients, expected)
        assert difference < 3e-2, name


def router_dtypes(degrees: dict[str, int]) -> list[str]:
    seen: list[str] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for name, module in pl_module.named_modules():
                if name.endswith("mlp.gate"):
                    module.register_forward_hook(lambda m, args, out: seen.extend(str(t.dtype) for t in out[:2]))
                if name.endswith("mlp.experts"):
                    module.register_forward_pre_hook(lambda m, args: seen.append(str(args[2].dtype)))

    fit(degrees, HuggingFaceLanguageModel, batches, precision="bf16-mixed", callbacks=(Watch(),))
    return seen


def test_router_logits_scores_and_routing_weights_are_fp32_under_bf16(ranks4):
    for dtypes in ranks4(router_dtypes, LAYOUTS_OF_4[2]):
        assert len(dtypes) == 6 and set(dtypes) == {"torch.float32"}


def test_other_precisions_are_refused_before_any_process_starts():
    for precision in ("16-true", "64-true", "16-mixed"):
        error = error_of(
            L.Trainer, accelerator="cpu", devices=1, strategy=FSDPCPEPStrategy(), precision=precision, **QUIET
        )
        assert "bf16-mixed" in error, error


class ShardedByHand(PlainLanguageModel):
    """Built in configure_model, and only once."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None

    def configure_model(self) -> None:
        if self.decoder is None:
            self.decoder = PlainLanguageModel().decoder


def fit_then_validate(degrees: dict[str, int], directory: str) -> dict[str, Any]:
    trainer, model, _ = fit(
        degrees,
        ShardedByHand,
        batches,
        shift="module",
        max_steps=2,
        enable_checkpointing=True,
        callbacks=(L.callbacks.ModelCheckpoint(directory, save_last=True, every_n_train_steps=1, filename="{step}"),),
        max_epochs=2,
    )
    again = trainer.validate(model, batches(2), verbose=False)[0]["val_loss"]
    other = L.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=trainer.strategy.__class__(**degrees),
        callbacks=[ZigZagContextParallel(shift="module")], use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    with_other = other.validate(model, batches(2), verbose=False)[0]["val_loss"]
    state = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return {"again": again, "other": with_other, "state": state}


def resume(degrees: dict[str, int], path: str) -> tuple[int, dict[str, Tensor]]:
    class BeforeTraining(L.Callback):
        state: dict[str, Tensor] = {}

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.state = {name: whole(p.detach()).clone() for name, p in pl_module.named_parameters()}

    before = BeforeTraining()
    trainer, _, _ = fit(
        degrees, PlainLanguageModel, batches, shift="module", max_steps=3, max_epochs=3, callbacks=(before,),
        ckpt_path=path,
    )  # fmt: skip
    return trainer.global_step, before.state


def test_fit_validate_save_and_resume_on_another_layout(ranks4, tmp_path):
    results = ranks4(fit_then_validate, LAYOUTS_OF_4[2], str(tmp_path))
    assert all(result["again"] == result["other"] for result in results)
    for step, state in ranks4(resume, LAYOUTS_OF_4[4], str(tmp_path / "last.ckpt")):
        assert step == 3
        for name, value in results[0]["state"].items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_rank_is_one_process(precision, ranks1):
    expected = (
        bf16_in_one_process() if precision == "bf16-mixed" else reference(HuggingFaceLanguageModel, batches(1))[1][0]
    )
    fit_one = partial(gradients_of_first_step, precision=precision)
    difference, name = worst_difference(ranks1(fit_one, {}, HuggingFaceLanguageModel)[0], expected)
    assert difference < (3e-2 if precision == "bf16-mixed" else TOLERANCE), name


def test_a_checkpoint_of_one_rank_resumes_on_four(ranks1, ranks4, tmp_path):
    (result,) = ranks1(fit_then_validate, {}, str(tmp_path))
    assert result["again"] == result["other"]
    for _, state in ranks4(resume, LAYOUTS_OF_4[2], str(tmp_path / "last.ckpt")):
        for name, value in result["state"].items():
            assert torch.equal(state[name], value), name


def other_degrees_for_the_same_model(degrees: dict[str, int], others: dict[str, int]) -> str:
    _, model, _ = fit(degrees, PlainLanguageModel, batches, shift="module")
    return error_of(fit, others, lambda: model, batches, shift="module")


def test_a_sharded_model_refuses_a_trainer_with_other_degrees(ranks4):
    for error in ranks4(other_degrees_for_the_same_model, LAYOUTS_OF_4[0], LAYOUTS_OF_4[1]):
        assert "sharded by an earlier Trainer" in error


class RebuiltEveryTime(PlainLanguageModel):
    def configure_model(self) -> None:
        self.decoder = PlainLanguageModel().decoder


def validate_a_rebuilt_model(degrees: dict[str, int]) -> str:
    trainer, model, _ = fit(degrees, RebuiltEveryTime, batches, shift="module")
    return error_of(trainer.validate, model, batches(4), verbose=False)


def test_a_configure_model_that_replaces_sharded_modules_is_an_error(ranks4):
    assert all("return early" in error for error in ranks4(validate_a_rebuilt_model, LAYOUTS_OF_4[0]))


def samples_read(degrees: dict[str, int]) -> list[list[int]]:
    seen: list[list[int]] = []

    class Watch(PlainLanguageModel):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(batch["input_ids"].flatten().tolist())
            return batch

    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=4, max_epochs=1, **QUIET, strategy=FSDPCPEPStrategy(**degrees),
        callbacks=[ZigZagContextParallel(shift="module")],
    )  # fmt: skip
    trainer.fit(Watch(), loader(NUM_SAMPLES, LENGTH, 2))
    return seen


def test_lightnings_own_sampler_gives_ranks_of_a_cp_group_the_same_samples(ranks4):
    first, second, third, fourth = ranks4(samples_read, LAYOUTS_OF_4[2])
    assert first == second and third == fourth
    assert not set(map(tuple, first)) & set(map(tuple, third))


def ranks_started_with_other_seeds(degrees: dict[str, int]) -> list[bytes]:
    def make() -> PlainLanguageModel:
        torch.manual_seed(torch.distributed.get_rank())
        return PlainLanguageModel(learning_rate=0.0)

    _, model, _ = fit(degrees, make, batches, shift="module")
    return [whole(parameter.detach()).numpy().tobytes() for parameter in model.parameters()]


def test_ranks_that_were_seeded_differently_start_from_rank_zero(ranks4):
    first, *others = ranks4(ranks_started_with_other_seeds, LAYOUTS_OF_4[8])
    expected = ranks4(partial(gradients_of_first_step, shift="module"), LAYOUTS_OF_4[8], PlainLanguageModel)
    assert expected and all(other == first for other in others)


def fit_on_meta(degrees: dict[str, int]) -> list[bytes]:
    def make() -> PlainLanguageModel:
        with torch.device("meta"):
            return PlainLanguageModel(learning_rate=0.0)

    _, model, _ = fit(degrees, make, batches, shift="module")
    return [whole(parameter.detach()).numpy().tobytes() for parameter in model.parameters()]


def test_a_model_on_meta_starts_from_the_same_numbers_on_every_layout(ranks4):
    first = ranks4(fit_on_meta, LAYOUTS_OF_4[2])[0]
    assert first == ranks4(fit_on_meta, LAYOUTS_OF_4[4])[0]


def tokens_routed(degrees: dict[str, int], make_model: Any, shift: str, length: int) -> dict[str, Tensor]:
    class Total(L.Callback):
        tokens: dict[str, Tensor] = {}

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor = next(c for c in trainer.callbacks if isinstance(c, ExpertLoadMonitor))
            self.tokens = monitor.tokens_on_this_rank("train")

    def make(dp: int) -> DataLoader:
        return loader(NUM_SAMPLES, length, NUM_SAMPLES // dp // 2)

    total = Total()
    fit(degrees, make_model, make, shift=shift, callbacks=(total,), accumulate_grad_batches=2)
    return total.tokens


@pytest.mark.parametrize(
    ("make_model", "shift"), [(PlainLanguageModel, "module"), (HuggingFaceLanguageModel, "auto")], ids=["plain", "hf"]
)
def test_each_layer_counts_tokens_times_k_whatever_the_padding_and_accumulation(make_model, shift, ranks4):
    length, top_k = 21, 2  # padded to 24, and one dummy on each rank where the module shifts
    per_rank = ranks4(tokens_routed, LAYOUTS_OF_4[2], make_model, shift, length)
    for layer in per_rank[0]:
        assert sum(int(tokens[layer].sum()) for tokens in per_rank) == NUM_SAMPLES * length * top_k


def fit_with_init_module(degrees: dict[str, int], build: str) -> list[bytes]:
    trainer = L.Trainer(
        accelerator="cpu", devices=4, max_steps=1, **QUIET, strategy=FSDPCPEPStrategy(**degrees, init_seed=7),
        callbacks=[ZigZagContextParallel(shift="module")],
    )  # fmt: skip
    if build == "init_module":
        with trainer.init_module(empty_init=True):
            model = PlainLanguageModel(learning_rate=0.0)
    else:
        with torch.device("meta"):
            model = PlainLanguageModel(learning_rate=0.0)
    assert all(parameter.is_meta for parameter in model.parameters())
    trainer.fit(model, batches(2))
    return [whole(parameter.detach()).numpy().tobytes() for parameter in model.parameters()]


def test_trainer_init_module_builds_on_meta_and_takes_the_seed(ranks4):
    assert ranks4(fit_with_init_module, LAYOUTS_OF_4[2], "init_module") == ranks4(
        fit_with_init_module, LAYOUTS_OF_4[4], "device"
    )


def dtypes_in_bf16_true(degrees: dict[str, int]) -> tuple[set[str], list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDPCPEPStrategy().precision_plugin = SimpleNamespace(precision="bf16-true")
    trainer, model, _ = fit(degrees, HuggingFaceLanguageModel, batches, precision="bf16-true", max_steps=2)
    state = [str(p.dtype) for p in model.parameters()]
    buffers = sorted({str(buffer.dtype) for buffer in model.buffers()})
    return set(state), buffers, " ".join(str(warning.message) for warning in caught)


def test_bf16_true_keeps_bf16_weights_and_fp32_buffers_and_warns(ranks2):
    results = ranks2(dtypes_in_bf16_true, dict(fsdp=2, e_fsdp=1, ep=2))
    for parameters, buffers, _ in results:
        assert parameters == {"torch.bfloat16"} and buffers == ["torch.float32"]
    assert "no FP32 master weights" in results[0][2]


class Predicting(PlainLanguageModel):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        callback = next(c for c in self.trainer.callbacks if isinstance(c, ZigZagContextParallel))
        return callback.restore(self.decoder(batch["input_ids"], batch["position_ids"]))


def predictions(degrees: dict[str, int], length: int) -> list[Tensor]:
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=4, **QUIET, strategy=FSDPCPEPStrategy(**degrees),
        callbacks=[ZigZagContextParallel(shift="none")],
    )  # fmt: skip
    return trainer.predict(Predicting(), loader(4, length, 2))


def test_predictions_are_restored_to_the_order_of_the_sequence(ranks4):
    length = 21  # padded to 24
    torch.manual_seed(0)
    model = PlainLanguageModel()
    expected = [model.decoder(batch["input_ids"]).detach() for batch in loader(4, length, 2)]
    # Ranks of one dp index read every second sample.
    for rank, outputs in enumerate(ranks4(predictions, LAYOUTS_OF_4[2], length)):
        for output, sample in zip(torch.cat(outputs), torch.cat(expected)[rank // 2 :: 2], strict=True):
            torch.testing.assert_close(output, sample, rtol=1e-5, atol=1e-5)


class ManualOptimization(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def manual_step(degrees: dict[str, int]) -> dict[str, Tensor]:
    _, model, _ = fit(degrees, ManualOptimization, batches, shift="module")
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def test_manual_optimization_takes_the_same_step(ranks4):
    model, _, _ = reference(PlainLanguageModel, batches(1), clip=0.05)
    for parameters in ranks4(manual_step, LAYOUTS_OF_4[2]):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


class WithOwnScale(PlainLanguageModel):
    """The LightningModule itself holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((VOCABULARY,), 0.7))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch.get("position_ids")) * self.temperature
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def test_parameters_of_the_lightning_module_itself_are_gathered_in_its_steps(ranks4):
    _, expected, _ = reference(WithOwnScale, batches(1))
    for gradients in ranks4(partial(gradients_of_first_step, shift="module"), LAYOUTS_OF_4[2], WithOwnScale):
        difference, name = worst_difference(gradients, expected[0])
        assert difference < TOLERANCE, name
