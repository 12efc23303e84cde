"""What ``Trainer(precision=...)`` may ask for, however it is asked; FP32 norms among BF16 weights."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_strategy import FSDPCPEPStrategy
from lightning_moe_strategy.precision import MeshPrecision
from lightning_moe_strategy.units import find_norms
from tests import test_communication
from tests.flavour import L
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, QUIET, fit

CP2_EP2 = LAYOUTS_OF_4[2]
PLUGINS = L.plugins.precision
RULE = r"must be one of '32-true', 'bf16-mixed', 'bf16-true' with strategy 'fsdp_cp_ep'"


class TransformerEngine(PLUGINS.Precision):
    """Looks like Lightning's, whose package is not installed."""

    precision = "transformer-engine"


def trainer(strategy: Any = None, **options: Any) -> L.Trainer:
    strategy = FSDPCPEPStrategy() if strategy is None else strategy
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **(QUIET | options))


@pytest.mark.parametrize("strategy", [None, "fsdp_cp_ep"])
@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("32", "32-true"),
        ("32-true", "32-true"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_names_and_aliases_are_those_of_lightning(strategy, asked, name):
    plugin = trainer(strategy, precision=asked).strategy.precision_plugin
    assert isinstance(plugin, MeshPrecision) and plugin.precision == name


@pytest.mark.parametrize("strategy", [None, "fsdp_cp_ep"])
@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (PLUGINS.Precision(), "32-true"),
        (PLUGINS.MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (PLUGINS.HalfPrecision("bf16-true"), "bf16-true"),
        (MeshPrecision("bf16"), "bf16-mixed"),
    ],
)
def test_a_plugin_says_the_same_as_its_name(strategy, plugin, name):
    assert trainer(strategy, plugins=[plugin]).strategy.precision_plugin.precision == name


@pytest.mark.parametrize("strategy", [None, "fsdp_cp_ep"])
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"precision": "16-mixed"}, "16-mixed"),
        ({"precision": 16}, "16-mixed"),
        ({"precision": "16-true"}, "16-true"),
        ({"precision": 64}, "64-true"),
        ({"precision": "transformer-engine"}, "transformer-engine"),
        ({"plugins": [PLUGINS.HalfPrecision("16-true")]}, "16-true"),
        ({"plugins": [PLUGINS.DoublePrecision()]}, "64-true"),
        ({"plugins": [TransformerEngine()]}, "transformer-engine"),
    ],
)
def test_what_is_not_offered_is_refused_in_the_same_words_when_the_trainer_is_built(strategy, options, name):
    with pytest.raises(ValueError, match=rf"^precision\('{name}'\) {RULE}.*FP8 kernels"):
        trainer(strategy, **options)


def test_an_fp16_plugin_with_a_scaler_is_refused_too():
    plugin = PLUGINS.MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=rf"^precision\('16-mixed'\) {RULE}"):
        trainer(plugins=[plugin])


def test_a_strategy_of_lightning_keeps_lightnings_own_rules():
    made = L.Trainer(accelerator="cpu", devices=1, precision="64-true", **QUIET)
    assert isinstance(made.precision_plugin, PLUGINS.DoublePrecision)


class Scaled(PLUGINS.MixedPrecision):
    """Would do something in its hooks."""


@pytest.mark.parametrize("plugin", [Scaled("bf16-mixed", "cpu"), PLUGINS.FSDPPrecision("bf16-mixed")])
def test_a_plugin_whose_hooks_would_not_run_is_refused(plugin):
    with pytest.raises(ValueError, match=rf"plugins: {type(plugin).__name__} .*derive your plugin"):
        trainer(plugins=[plugin])


def test_quantized_weights_are_not_taken_for_fp32():
    with pytest.raises(ValueError, match="plugins: BitsandbytesPrecision would be asked for its name"):
        MeshPrecision.taken_from(
            PLUGINS.BitsandbytesPrecision.__new__(PLUGINS.BitsandbytesPrecision),
            fp32_norms=False,
        )


class Counted(MeshPrecision):
    """A user's own."""

    num_clipped = 0

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        self.num_clipped += 1
        super().clip_grad_by_norm(optimizer, clip_val)


def with_own_plugin() -> tuple[list[dict[str, Tensor]], int, bool]:
    plugin = Counted("32-true", error_if_nonfinite=True)
    trained, _, keep = fit(
        CP2_EP2, PlainLanguageModel, lambda dp: loader(16, 24, 8 // dp), plugins=[plugin], shift="module",
        max_steps=2, gradient_clip_val=0.1,
    )  # fmt: skip
    assert trained.precision_plugin is plugin
    return keep.steps, plugin.num_clipped, plugin.error_if_nonfinite


def test_a_users_own_plugin_is_the_one_that_runs(ranks4):
    """Its loss is weighed by tokens all the same: gradients are those without a plugin."""
    for (steps, num_clipped, is_strict), expected in zip(ranks4(with_own_plugin), ranks4(without_plugin), strict=True):
        assert num_clipped == 2 and is_strict
        for mine, theirs in zip(steps, expected, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def without_plugin() -> list[dict[str, Tensor]]:
    _, _, keep = fit(
        CP2_EP2, PlainLanguageModel, lambda dp: loader(16, 24, 8 // dp), shift="module", max_steps=2,
        gradient_clip_val=0.1,
    )  # fmt: skip
    return keep.steps


class SeeNorms(L.Callback):
    """Dtypes of what a norm reads, computes with and returns, and of the linear map behind it."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, ...]] = set()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for module in find_norms(pl_module).values():
            module.forward = partial(self._watched, module, module.forward)

    def _watched(self, module: nn.Module, forward: Any, x: Tensor) -> Tensor:
        out = forward(x)
        self.seen.add(tuple(str(y.dtype).removeprefix("torch.") for y in (x, next(module.parameters()), out)))
        return out


def norms_of_a_fit(kind: str, precision: str, **options: Any) -> tuple[set[tuple[str, ...]], int, Tensor]:
    """What norms see, their units, and all gradients of the first step."""
    make = {"plain": PlainLanguageModel, "qwen3_moe": partial(HuggingFaceLanguageModel, "qwen3_moe")}[kind]
    see = SeeNorms()
    trained, model, keep = fit(
        CP2_EP2 | options, make, lambda dp: loader(8, 24, 8 // dp), callbacks=(see,), precision=precision,
        shift="module" if kind == "plain" else "model",
    )  # fmt: skip
    units = [unit for unit in trained.strategy.units if unit.kind == "norm"]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return see.seen, len(units), torch.cat([gradient.flatten() for gradient in keep.steps[0].values()])


@pytest.mark.parametrize(("kind", "num_norms"), [("plain", 5), ("qwen3_moe", 9)])
def test_norms_compute_in_fp32_if_asked_and_hand_on_the_compute_dtype(kind, num_norms, ranks4):
    """Two in each of two blocks, queries' and keys' of Qwen3, and the last."""
    expected = ranks4(partial(norms_of_a_fit, kind, "32-true", fp32_norms=True))[0]
    assert expected[:2] == ({("float32",) * 3}, 0)
    for dtype, units, options in (("bfloat16", 0, {}), ("float32", num_norms, {"fp32_norms": True})):
        for seen, num_units, gradients in ranks4(partial(norms_of_a_fit, kind, "bf16-mixed", **options)):
            assert num_units == units and seen == {(dtype,) * 3}
            assert (gradients - expected[2]).norm() < 0.05 * expected[2].norm()


def communication_with_fp32_norms() -> dict[str, Any]:
    return test_communication.train(CP2_EP2 | {"fp32_norms": True}, test_communication.make_plain, "bf16-mixed")


def test_units_of_norms_are_gathered_and_reduced_as_often_as_others(ranks4):
    for result in ranks4(communication_with_fp32_norms):
        assert sum("norm" in name for name in result["units"]) == 4 * test_communication.LAYERS + 1
        for step in result["steps"]:
            test_communication.assert_gathered_and_reduced_once(step, result["units"])
        assert result["left"] == [] and result["validated"] == []


def test_fp32_norms_among_bf16_weights_are_refused_when_the_trainer_is_built():
    with pytest.raises(ValueError, match=r"fp32_norms\(True\) needs FP32 weights.*Use 'bf16-mixed'"):
        trainer(FSDPCPEPStrategy(fp32_norms=True), precision="bf16-true")


class Casting(PlainLanguageModel):
    """A user's own autocast around a part of the step."""

    seen: list[torch.dtype] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch.get("position_ids"))
        with torch.autocast("cpu", torch.bfloat16):
            scored = F.linear(logits, torch.eye(logits.shape[-1]))
        Casting.seen.append(scored.dtype)
        return F.cross_entropy(scored.float()[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten().clamp(0))


def cast_in_step() -> list[torch.dtype]:
    Casting.seen = []
    fit(CP2_EP2, Casting, lambda dp: loader(8, 24, 8 // dp), shift="module")
    return Casting.seen


def test_an_autocast_inside_of_a_step_is_the_users(ranks4):
    assert ranks4(cast_in_step) == [[torch.bfloat16]] * 4
