"""ShardedEMA against torch's averages of the gathered weights, and against Lightning's callback in one process."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_moe_strategy import FSDPCPEPStrategy, ShardedEMA, ZigZagContextParallel
from lightning_moe_strategy.sharding import local_tensor
from tests.flavour import L
from tests.modules import PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, QUIET, fit, whole

BATCH, LENGTH, NUM_STEPS = 8, 24, 6
DECAY = 0.7

Weights = dict[str, Tensor]


def batches(dp: int) -> DataLoader:
    return loader(NUM_STEPS * BATCH, LENGTH, BATCH // dp)


def gathered(tensors: Any) -> Weights:
    return {name: whole(tensor.detach()).clone() for name, tensor in dict(tensors).items()}


class KeepWeights(L.Callback):
    """The whole weights after every step."""

    def __init__(self) -> None:
        self.steps: list[Weights] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.steps.append(gathered(pl_module.named_parameters()))


class WithBuffer(PlainLanguageModel):
    """A buffer that moves, a parameter of its own and one that is frozen."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.01, optimizer="adamw")
        self.register_buffer("steps_seen", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.decoder.norm.bias.requires_grad_(False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.training:
            self.steps_seen += 1
        return super().loss(batch) * self.scale.mean()


def averaged(
    degrees: dict[str, int], make_model: Any = WithBuffer, *, callbacks: tuple[Any, ...] = (), ema: Any = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    ema = ema or ShardedEMA(DECAY, update_every=2, start_step=1, use_buffers=True)
    keep = KeepWeights()
    options = dict(max_steps=NUM_STEPS) | options
    trainer, model, _ = fit(degrees, make_model, batches, shift="module", callbacks=(keep, ema, *callbacks), **options)
    return {
        "averages": gathered(ema.averages),
        "weights": gathered(model.named_parameters()),
        "steps": keep.steps,
        "bytes": sum(local_tensor(a).nbytes for a in ema.averages.values()),
        "dtypes": {str(a.dtype) for a in ema.averages.values()},
        "step": trainer.global_step,
    }


@pytest.mark.parametrize("degrees", [LAYOUTS_OF_4[2], LAYOUTS_OF_4[9]], ids=["cp2-ep2", "both-replicas"])
def test_averages_of_shards_are_those_of_the_whole_weights_to_the_bit(degrees, ranks4):
    average = get_ema_multi_avg_fn(DECAY)
    for result in ranks4(averaged, degrees):
        updates = result["steps"][2::2]  # steps 2 and 4, counted from 0
        names = [name for name in updates[0] if name != "decoder.norm.bias"]
        expected = [updates[0][name].clone() for name in names]
        for weights in updates[1:]:
            average(expected, [weights[name] for name in names], torch.tensor(1))
        assert result["averages"].keys() == {*names, "steps_seen"}
        for name, tensor in zip(names, expected, strict=True):
            assert torch.equal(result["averages"][name], tensor), name
        torch.testing.assert_close(result["averages"]["steps_seen"], torch.full((3,), DECAY * 3 + (1 - DECAY) * 5))


def lightnings_own() -> Weights:
    """One process, no strategy."""
    torch.manual_seed(0)
    model = PlainLanguageModel()
    callback = L.callbacks.EMAWeightAveraging(
        decay=DECAY, update_every_n_steps=2, update_starting_at_step=1, use_buffers=False
    )
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=NUM_STEPS, callbacks=[callback], **QUIET)
    trainer.fit(model, batches(1))
    return gathered(model.named_parameters())  # at the end of training it leaves the averages there


def test_averages_equal_lightnings_callback_in_one_process(ranks1, ranks4):
    own = ranks1(lightnings_own)[0]
    run = partial(averaged, make_model=PlainLanguageModel, ema=ShardedEMA(DECAY, update_every=2, start_step=1))
    for result in ranks4(run, LAYOUTS_OF_4[2]):
        for name, expected in own.items():
            torch.testing.assert_close(result["averages"][name], expected, rtol=1e-5, atol=1e-6)


class WatchEvaluation(L.Callback):
    """Weights that an evaluation ran with, and those of a checkpoint that is saved in the midst of it."""

    def __init__(self, path: str | None = None) -> None:
        self.path, self.seen = path, list[Weights]()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.datamodule is not None:
            trainer.datamodule.val_dataloader = lambda: loader(4, LENGTH, 2)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(gathered(pl_module.named_parameters()))
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def evaluated(degrees: dict[str, int], path: str | None = None, **options: Any) -> dict[str, Any]:
    ema, watch = ShardedEMA(DECAY, use_buffers=True), WatchEvaluation(path)
    options = dict(limit_val_batches=1, val_check_interval=3, num_sanity_val_steps=0) | options
    result = averaged(degrees, WithBuffer, ema=ema, callbacks=(watch,), **options)
    return result | {"seen": watch.seen, "ema": None}


def test_validation_runs_with_the_averages_and_training_goes_on_as_without(ranks4, tmp_path):
    without = ranks4(averaged, LAYOUTS_OF_4[2])[0]["steps"]
    result = ranks4(evaluated, LAYOUTS_OF_4[2], str(tmp_path / "in_validation"))[0]
    assert len(result["seen"]) == 2
    for weights, expected in zip(result["steps"], without, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    at_end = result["seen"][-1]
    assert all(torch.equal(at_end[name], value) for name, value in result["averages"].items() if name in at_end)
    assert not torch.equal(at_end["scale"], result["weights"]["scale"])
    # Saved while the averages were in the module.
    loaded = ranks4(resumed, LAYOUTS_OF_4[2], str(tmp_path / "in_validation"))[0]
    for kind in ("weights", "averages"):
        assert all(torch.equal(loaded[kind][name], value) for name, value in result[kind].items()), kind


class ReadBeforeTraining(L.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ema = next(c for c in trainer.callbacks if isinstance(c, ShardedEMA))
        self.averages = gathered(ema.averages)
        self.weights = gathered(pl_module.named_parameters())


def resumed(degrees: dict[str, int], path: str, *, max_steps: int = NUM_STEPS + 1, **options: Any) -> dict[str, Any]:
    before = ReadBeforeTraining()
    ema = ShardedEMA(DECAY, use_buffers=True)
    result = averaged(
        degrees, WithBuffer, ema=ema, callbacks=(before,), ckpt_path=path, max_steps=max_steps, max_epochs=4, **options
    )
    return {"averages": before.averages, "weights": before.weights, "after": result}


def saved(degrees: dict[str, int], path: str, **options: Any) -> dict[str, Any]:
    checkpoint = L.callbacks.ModelCheckpoint(path, save_last=True, every_n_train_steps=3, filename="{step}")
    ema = ShardedEMA(DECAY, use_buffers=True)
    return averaged(degrees, WithBuffer, ema=ema, callbacks=(checkpoint,), enable_checkpointing=True, **options)


@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "one-file"])
def test_averages_are_saved_and_resumed_on_another_layout(is_directory, ranks4, tmp_path):
    degrees = LAYOUTS_OF_4[2] | {"save_distributed_checkpoint": is_directory}
    result = ranks4(saved, degrees, str(tmp_path))[0]
    assert (tmp_path / "last.ckpt").is_dir() == is_directory
    degrees = LAYOUTS_OF_4[9] | {"save_distributed_checkpoint": is_directory}
    for loaded in ranks4(resumed, degrees, str(tmp_path / "last.ckpt")):
        for kind in ("averages", "weights"):
            assert loaded[kind].keys() == result[kind].keys()
            assert all(torch.equal(loaded[kind][name], value) for name, value in result[kind].items()), kind
        after, weight = loaded["after"], loaded["after"]["steps"][-1]["scale"]
        torch.testing.assert_close(
            after["averages"]["scale"], result["averages"]["scale"].lerp(weight, 1 - DECAY), rtol=1e-6, atol=0
        )


class Failing(WithBuffer):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        raise RuntimeError("as a user's step may")


def stopped_by_an_exception(degrees: dict[str, int]) -> tuple[list[Weights], Weights]:
    keep, ema = KeepWeights(), ShardedEMA(DECAY)
    holder: list[Any] = []

    def make() -> Failing:
        holder.append(Failing())
        return holder[0]

    with pytest.raises(RuntimeError, match="as a user's"):
        fit(degrees, make, batches, shift="module", callbacks=(keep, ema, WatchEvaluation()), max_steps=4,
            val_check_interval=3, num_sanity_val_steps=0)  # fmt: skip
    assert ema.averages
    return keep.steps, gathered(holder[0].named_parameters())


def test_an_exception_in_validation_leaves_the_weights_of_training(ranks4):
    for steps, weights in ranks4(stopped_by_an_exception, LAYOUTS_OF_4[2]):
        assert len(steps) == 3
        assert all(torch.equal(weights[name], value) for name, value in steps[-1].items())


def test_bf16_weights_have_fp32_averages_and_survive_evaluation_to_the_bit(ranks4):
    run = partial(evaluated, precision="bf16-true")
    result = ranks4(run, LAYOUTS_OF_4[2])[0]
    assert result["dtypes"] == {"torch.float32"} and result["weights"]["scale"].dtype == torch.bfloat16
    without = ranks4(partial(averaged, precision="bf16-true"), LAYOUTS_OF_4[2])[0]["steps"]
    for weights, expected in zip(result["steps"], without, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_the_memory_is_four_bytes_for_each_trained_number_of_the_rank(ranks4):
    results = ranks4(partial(averaged, make_model=PlainLanguageModel, ema=ShardedEMA(DECAY)), LAYOUTS_OF_4[0])
    assert sum(result["bytes"] for result in results) == 4 * sum(p.numel() for p in PlainLanguageModel().parameters())


def export(degrees: dict[str, int], path: str) -> tuple[Weights, Weights, Weights]:
    ema = ShardedEMA(DECAY)
    trainer, model, _ = fit(degrees, PlainLanguageModel, batches, shift="module", callbacks=(ema,), max_steps=3)
    before = gathered(model.named_parameters())
    with ema.averaged_weights(model):
        trainer.save_checkpoint(path, weights_only=True)
        with pytest.raises(RuntimeError, match="in the module now"):
            _ = ema.averages
    after = gathered(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return gathered(ema.averages), before, after


def validated(degrees: dict[str, int], path: str, callbacks: list[Any]) -> Weights:
    watch = WatchEvaluation()
    trainer = L.Trainer(
        accelerator="cpu", devices=4, strategy=FSDPCPEPStrategy(**degrees), use_distributed_sampler=False,
        callbacks=[*callbacks, watch, ZigZagContextParallel(shift="module")], **QUIET,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(PlainLanguageModel(), loader(4, LENGTH, 2), ckpt_path=path, verbose=False)
    return watch.seen[0]


def test_averaged_weights_can_be_saved_as_the_weights_of_the_model(ranks4, tmp_path):
    path = str(tmp_path / "averaged")
    averages, weights, _ = ranks4(export, LAYOUTS_OF_4[2], path)[0]
    loaded = ranks4(validated, LAYOUTS_OF_4[4], path, [])[0]
    assert all(torch.equal(loaded[name], value) for name, value in averages.items())
    assert not torch.equal(loaded["decoder.head.weight"], weights["decoder.head.weight"])


def test_evaluating_a_checkpoint_uses_its_averages(ranks4, tmp_path):
    run = partial(saved, max_steps=3)
    result = ranks4(run, LAYOUTS_OF_4[2], str(tmp_path))[0]
    seen = ranks4(validated_with_buffer, LAYOUTS_OF_4[4], str(tmp_path / "last.ckpt"))[0]
    assert all(torch.equal(value, result["averages"].get(name, value)) for name, value in seen.items())
    assert not torch.equal(seen["scale"], result["weights"]["scale"])


def validated_with_buffer(degrees: dict[str, int], path: str) -> Weights:
    watch = WatchEvaluation()
    trainer = L.Trainer(
        accelerator="cpu", devices=4, strategy=FSDPCPEPStrategy(**degrees), use_distributed_sampler=False,
        callbacks=[ShardedEMA(DECAY, use_buffers=True), watch, ZigZagContextParallel(shift="module")], **QUIET,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(WithBuffer(), loader(4, LENGTH, 2), ckpt_path=path, verbose=False)
    return watch.seen[0]


def refused(kind: str) -> str:
    callback = L.callbacks.EMAWeightAveraging() if kind == "ema" else L.callbacks.StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(ValueError, match="ShardedEMA") as error:
        fit({}, PlainLanguageModel, batches, shift="module", callbacks=(callback,))
    return str(error.value)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_lightnings_own_averages_are_refused_with_the_name_of_ours(kind, ranks1):
    assert "copies the whole module on every rank" in ranks1(refused, kind)[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"decay": 1.5}, r"decay\(1.5\) must be between 0 and 1"),
        ({"update_every": 0}, r"update_every\(0\) must be at least 1"),
        ({"start_step": -1}, r"start_step\(-1\) must be at least 0"),
    ],
)
def test_errors_name_the_option(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ShardedEMA(**options)


def test_there_is_nothing_to_swap_before_the_first_update():
    with pytest.raises(RuntimeError, match="no averages yet"), ShardedEMA().averaged_weights(nn.Linear(1, 1)):
        pass
    assert ShardedEMA().averages == {}
