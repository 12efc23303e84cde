"""docs/lightning.md is true: every name of Lightning has a row, every row a test; what no other test runs, runs here.

On 4 ranks (fsdp 2, cp 2, ep 2) against one process, the same samples in the same order.
"""

import contextlib
import csv
import inspect
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from docs.lightning import missing_rows, missing_tests, text
from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from tests.flavour import FABRIC, FLAVOUR, L
from tests.modules import PlainLanguageModel, RandomTokens
from tests.parity import QUIET, whole

logging.getLogger(L.__name__).setLevel(logging.ERROR)

CP2: dict[str, Any] = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)
FSDP4: dict[str, Any] = dict(fsdp=4, ep=4)
NUM_SAMPLES, LENGTH, BATCH = 16, 8, 4
ROOT = Path(__file__).parents[1]


class Small(PlainLanguageModel):
    """Every stage, a scheduler, logged values."""

    def __init__(self) -> None:
        super().__init__(width=8, num_layers=1)
        self.save_hyperparameters()
        self.lr = 0.1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.decoder(batch["input_ids"], batch.get("position_ids")).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class InOrder(L.LightningDataModule):
    """Batches of four samples over all ranks, in order; equally many labels, as a plain Trainer accumulates means."""

    def train_dataloader(self) -> DataLoader:
        alone = dict(num_replicas=1, rank=0)
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", alone)
        samples = RandomTokens(NUM_SAMPLES, LENGTH, ragged=False)
        sampler: Any = DistributedSampler(samples, shuffle=False, **share)
        return DataLoader(samples, batch_size=BATCH // share["num_replicas"], sampler=sampler)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def trainer_of(degrees: dict[str, Any] | None, kind: Any = FSDPCPEPStrategy, **options: Any) -> L.Trainer:
    """On the ranks of the layout (also other arguments of the strategy), or in one process."""
    options = QUIET | dict(max_epochs=2, use_distributed_sampler=False, num_sanity_val_steps=0) | options
    if degrees is None:
        return L.Trainer(accelerator="cpu", devices=1, **options)
    callbacks = [*options.pop("callbacks", ()), ZigZagContextParallel(shift="module")]
    options = dict(devices=dist.get_world_size()) | options
    return L.Trainer(accelerator="cpu", strategy=kind(**degrees), callbacks=callbacks, **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def run(
    degrees: dict[str, Any] | None,
    make_model: Callable[[], Any] = Small,
    stages: tuple[str, ...] = ("fit",),
    **options: Any,
) -> tuple[Any, L.Trainer, list[str]]:
    """(module, trainer, warnings)."""
    torch.manual_seed(0)
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(degrees, **options)
        for stage in stages:
            getattr(trainer, stage)(model, datamodule=InOrder(), **({} if stage in ("fit", "predict") else QUIETLY))
    return model, trainer, [str(warning.message) for warning in caught]


QUIETLY: dict[str, Any] = dict(verbose=False)


def trained(degrees: dict[str, Any] | None, make: Callable[[], dict[str, Any]], model: Any = Small) -> Any:
    """(weights, steps) after a fit with the options that ``make`` builds."""
    fitted, trainer, _ = run(degrees, model, **make())
    return weights(fitted), trainer.global_step


def require_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, parameter in expected.items():
        torch.testing.assert_close(got[name], parameter, rtol=1e-5, atol=1e-6)


def require_one_process(ranks4: Any, make: Callable[[], dict[str, Any]], model: Any = Small) -> None:
    expected, num_steps = trained(None, make, model)
    for got, steps in ranks4(trained, CP2, make, model):
        assert steps == num_steps > 0
        require_close(got, expected)


# The table


def test_the_page_is_what_its_list_says():
    assert (ROOT / "docs/lightning.md").read_text() == text(), "python -m docs.lightning > docs/lightning.md"


def test_every_name_of_the_installed_lightning_has_one_row():
    assert missing_rows(L) == []


def test_a_name_that_a_new_lightning_brings_is_missed(monkeypatch):
    def init(self, *, accelerator: str = "auto", devices_per_node: int = 1) -> None: ...

    monkeypatch.setattr(L.Trainer, "__init__", init)
    monkeypatch.setattr(L.Callback, "on_everything", lambda self: None, raising=False)
    missing = missing_rows(L)
    assert "Trainer: no row for devices_per_node" in missing and "Callback: no row for on_everything" in missing
    assert "Trainer: barebones is no name of this Lightning" in missing


def test_every_test_that_a_row_names_exists():
    assert missing_tests(ROOT / "tests") == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(FLAVOUR == "pytorch_lightning", reason="this run is the one that the test starts")
def test_the_suite_of_the_strategy_passes_on_the_other_package():
    names = ("strategy", "step_gradient", "logged_means", "precision", "ema", "trainer_limits", "lightning_table")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *(f"tests/test_{name}.py" for name in names)],
        cwd=ROOT,
        env=os.environ | dict(LIGHTNING_MOE_FLAVOUR="pytorch_lightning", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout


# Hooks


def recorded(base: type, also: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> type:
    """A subclass whose hooks append their names to ``called``."""
    names = [name for name in dir(base) if name.startswith("on_") or name in also]
    return type(f"Recorded{base.__name__}", (base,), {n: _recording(base, n) for n in names if n not in but})


def _recording(base: type, name: str) -> Any:
    original = getattr(base, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLED.append(f"{kind}.{name}")
        return original(self, *args, **kwargs)

    kind = next(known.__name__ for known in KINDS if issubclass(base, known))
    hook.__signature__ = inspect.signature(original)
    return hook


CALLED: list[str] = []
KINDS = (L.LightningModule, L.LightningDataModule, L.Callback, L.strategies.Strategy)
SETUP = ("prepare_data", "setup", "teardown")
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
STATE = ("state_dict", "load_state_dict")
STEPS = ("training_step", "validation_step", "test_step", "predict_step", "optimizer_step", "optimizer_zero_grad")
CONFIGURE = ("configure_model", "configure_optimizers", "configure_callbacks", "configure_gradient_clipping")
OF_MODULE = (*SETUP, *STEPS, *CONFIGURE, "backward", "lr_scheduler_step")


class State:
    """Lightning asks for no state that was empty."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"seen": 1}


class CallbackWithState(State, L.Callback):
    pass


class DataWithState(State, InOrder):
    pass


class WithLoaders(Small):
    """Its own data."""


for name in LOADERS:
    setattr(WithLoaders, name, InOrder.train_dataloader)

# A datamodule's transfer hooks go before the module's.
RecordedModule = recorded(Small, OF_MODULE, but=(*TRANSFER, "on_gpu"))
RecordedWithLoaders = recorded(WithLoaders, (*OF_MODULE, *LOADERS, *TRANSFER), but=("on_gpu",))
RecordedData = recorded(DataWithState, (*SETUP, *STATE, *LOADERS, *TRANSFER), but=("on_exception",))
RecordedCallback = recorded(CallbackWithState, ("setup", "teardown", *STATE), but=("on_exception",))
RecordedStrategy = recorded(FSDPCPEPStrategy, STEPS[:5], but=("on_exception",))


def hooks_called(degrees: dict[str, Any] | None, has_datamodule: bool, path: str) -> list[str]:
    torch.manual_seed(0)
    CALLED.clear()
    model: Any = RecordedModule() if has_datamodule else RecordedWithLoaders()
    data: dict[str, Any] = dict(datamodule=RecordedData()) if has_datamodule else {}
    checkpoints = L.callbacks.ModelCheckpoint(path, every_n_epochs=1)
    trainer = trainer_of(
        degrees, RecordedStrategy, callbacks=[RecordedCallback(), checkpoints], num_sanity_val_steps=1,
        limit_train_batches=2, limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1, max_epochs=1,
        gradient_clip_val=1.0, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(model, **data)
    trainer.validate(model, **data, **QUIETLY)
    trainer.test(model, **data, **QUIETLY, ckpt_path=checkpoints.best_model_path)
    trainer.predict(model, **data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, **data, ckpt_path=checkpoints.best_model_path)
    return list(CALLED)


AT_LOADING = ("on_load_checkpoint", "load_state_dict")
"""One process loads before ``on_fit_start``, the strategy after it: once there are shards to load into."""


@pytest.mark.parametrize("has_datamodule", [True, False], ids=["datamodule", "loaders of the module"])
def test_every_hook_runs_as_often_and_in_the_order_of_one_process(has_datamodule, ranks4, tmp_path):
    expected = hooks_called(None, has_datamodule, str(tmp_path / "one"))
    for rank, called in enumerate(ranks4(hooks_called, CP2, has_datamodule, str(tmp_path / "four"))):
        of_strategy = {name.removeprefix("Strategy.") for name in called if name.startswith("Strategy.")}
        assert of_strategy == {name for name in vars(RecordedStrategy) if not name.startswith("_")}
        called = [name for name in called if not name.startswith("Strategy.")]
        due = [name for name in expected if rank == 0 or not name.endswith("prepare_data")]  # once for each host
        assert sorted(called) == sorted(due)
        assert in_order(called) == in_order(due)
    module, data = (RecordedModule, RecordedData) if has_datamodule else (RecordedWithLoaders, None)
    kinds = {"LightningModule": module, "LightningDataModule": data, "Callback": RecordedCallback}
    hooks = {f"{kind}.{name}" for kind, cls in kinds.items() for name in vars(cls or type) if name in HOOK_NAMES}
    assert hooks - set(expected) == set()


HOOK_NAMES = {name for kind in (RecordedWithLoaders, RecordedData, RecordedCallback) for name in vars(kind)} - {
    "__module__", "__doc__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip


def in_order(called: list[str]) -> list[str]:
    return [name for name in called if not name.endswith(AT_LOADING)]


class Failing(Small):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        raise OverflowError("the step failed")


class HearsErrors:
    def on_exception(self, *args: Any) -> None:
        CALLED.append(f"{type(self).__name__} hears {type(args[-1]).__name__}")


class DataHears(HearsErrors, InOrder):
    pass


class CallbackHears(HearsErrors, L.Callback):
    pass


class StrategyHears(FSDPCPEPStrategy):
    def on_exception(self, exception: BaseException) -> None:
        CALLED.append(f"{type(self).__name__} hears {type(exception).__name__}")
        super().on_exception(exception)


def heard() -> list[str]:
    CALLED.clear()
    try:
        trainer_of(CP2, StrategyHears, callbacks=[CallbackHears()]).fit(Failing(), datamodule=DataHears())
    except OverflowError:
        return list(CALLED)
    return ["no error"]


def test_an_error_on_every_rank_reaches_its_hooks(ranks4):
    names = ("CallbackHears", "DataHears", "StrategyHears")
    assert [sorted(found) for found in ranks4(heard)] == [[f"{name} hears OverflowError" for name in names]] * 4


# The options of a Trainer


class Noted(L.Callback):
    """What the Trainer set up, as a step finds it."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "anomaly": torch.is_anomaly_enabled(),
            "profiled": sorted(
                name for name in trainer.profiler.recorded_durations if "_step" in name and "Strategy" in name
            ),
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        }


def many_options(degrees: dict[str, Any] | None, folder: str) -> Any:
    """(weights, steps, what a callback noted, what was printed)."""
    noted, stopping = Noted(), L.callbacks.EarlyStopping("val", patience=0, stopping_threshold=1e9)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model, trainer, _ = run(
            degrees, callbacks=[stopping, noted], logger=L.loggers.CSVLogger(folder, version=0), log_every_n_steps=2,
            default_root_dir=folder, deterministic=True, benchmark=True, detect_anomaly=True, profiler="simple",
            enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True, enable_autolog_hparams=True,
            accumulate_grad_batches=2, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_epochs=5,
            min_epochs=2, min_steps=6, max_time="00:01:00:00",
        )  # fmt: skip
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    return weights(model), trainer.global_step, noted.seen, printed.getvalue()


def test_many_options_at_once_do_what_they_do_in_one_process(ranks4, tmp_path):
    expected, num_steps, plain, _ = many_options(None, str(tmp_path / "one"))
    answers = ranks4(many_options, CP2, str(tmp_path / "four"))
    for got, steps, seen, _ in answers:
        assert steps == num_steps == 6  # early stopping waits for min_steps
        require_close(got, expected)
        assert seen["deterministic"] and seen["benchmark"] and seen["anomaly"]
        assert seen["profiled"] == [name.replace("SingleDevice", "FSDPCPEP") for name in plain["profiled"]]
        assert seen["callbacks"][:2] == plain["callbacks"][:2] == ["EarlyStopping", "Noted"]
        assert seen["callbacks"][-1] == plain["callbacks"][-1] == "ModelCheckpoint"
    one, four = (tmp_path / where / "lightning_logs/version_0" for where in ("one", "four"))
    assert logged(one) == {key: pytest.approx(value, rel=1e-4) for key, value in logged(four).items()} != {}
    assert (four / "hparams.yaml").exists() and [path.is_dir() for path in (four / "checkpoints").iterdir()] == [True]
    total = sum(parameter.numel() for parameter in expected.values())
    assert f"{total / 1000:.1f} K" in answers[0][3]  # shards are counted as what they are shards of


def logged(folder: Path) -> dict[tuple[str, str], float]:
    """By step and name."""
    rows = csv.DictReader((folder / "metrics.csv").open())
    return {(row["step"], name): float(row[name]) for row in rows for name in ("train", "val") if row[name]}


def counted() -> tuple[bool, int]:
    bar = L.callbacks.TQDMProgressBar(refresh_rate=1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(CP2, callbacks=[bar], enable_progress_bar=True, max_epochs=1)
    return bar.is_disabled, bar.train_progress_bar.n


def test_a_progress_bar_counts_on_rank_0_alone(ranks4):
    assert ranks4(counted) == [(False, 4), (True, 0), (True, 0), (True, 0)]


def barebones() -> dict[str, Any]:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    return dict(barebones=True, max_steps=2, **dict.fromkeys(names))


def test_barebones_takes_the_steps_of_one_process(ranks4):
    require_one_process(ranks4, barebones)


class TwoNodes(FABRIC.plugins.environments.TorchElasticEnvironment):
    """The four ranks stand on two hosts."""

    def local_rank(self) -> int:
        return super().local_rank() % 2

    def node_rank(self) -> int:
        return self.global_rank() // 2


def two_nodes() -> tuple[int, int, int, int, bool]:
    environment = TwoNodes()
    _, trainer, _ = run(CP2, devices=2, num_nodes=2, plugins=[environment], fast_dev_run=1)
    is_used = trainer.strategy.cluster_environment is environment
    return trainer.world_size, trainer.node_rank, trainer.local_rank, trainer.global_step, is_used


def test_nodes_and_devices_of_a_users_environment_make_the_world(ranks4):
    assert ranks4(two_nodes) == [(4, rank // 2, rank % 2, 1, True) for rank in range(4)]


def limited(degrees: dict[str, Any] | None) -> tuple[float, int]:
    _, trainer, _ = run(degrees, stages=("test",), limit_test_batches=2)
    model, predicting, _ = run(degrees, stages=(), limit_predict_batches=0.5)
    return float(trainer.callback_metrics["test"]), len(predicting.predict(model, datamodule=InOrder()))


def test_limits_of_test_and_predict_count_batches_as_in_one_process(ranks4):
    loss, num_predicted = limited(None)
    assert num_predicted == 2
    assert ranks4(limited, CP2) == [(pytest.approx(loss, rel=1e-5), num_predicted)] * 4


class NotANumber(Small):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1)


def anomaly() -> str:
    try:
        run(CP2, NotANumber, detect_anomaly=True)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_anomalies_are_detected_on_every_rank(ranks4):
    assert all("returned nan values" in error for error in ranks4(anomaly))


class Stages(Small):
    """Notes whether evaluation runs in inference mode."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        super().validation_step(batch, batch_idx)


def after_validation(degrees: dict[str, Any]) -> Any:
    utilities = sys.modules[f"{L.__name__}.loops.utilities"]
    is_initialized = utilities._distributed_is_initialized
    utilities._distributed_is_initialized = lambda: False  # as with NCCL: over gloo, Lightning uses no_grad itself
    try:
        return weights(run(degrees, Stages, ("validate", "fit"), inference_mode=True)[0])
    finally:
        utilities._distributed_is_initialized = is_initialized


def test_a_module_that_was_validated_in_inference_mode_can_be_trained(ranks4):
    expected, _ = trained(None, dict)
    for got in ranks4(after_validation, CP2):
        require_close(got, expected)


# What a module asks of its Trainer and strategy


class Asking(Small):
    """Builds itself late, shows an example of its input, and talks to other ranks."""

    def __init__(self, example: bool) -> None:
        super().__init__()
        self.told: dict[str, Any] = {}
        if example:
            self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids)

    def on_train_start(self) -> None:
        strategy, rank = self.trainer.strategy, self.global_rank
        ours = torch.tensor([rank + 1.0])
        self.told = dict(
            gathered=self.all_gather(ours).flatten().tolist(),
            of_samples=self.all_gather(ours, group=strategy.sample_group).flatten().tolist(),
            broadcast=strategy.broadcast(f"from {rank}", src=2),
            mean=float(strategy.reduce(ours.clone())),
            total=float(strategy.reduce(ours.clone(), reduce_op="sum")),
            all=strategy.reduce_boolean_decision(rank != 1),
            any=strategy.reduce_boolean_decision(rank == 1, all=False),
            ranks=(strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size),
            is_zero=strategy.is_global_zero,
            mesh=self.device_mesh.mesh_dim_names,
        )
        strategy.barrier("told")
        self.print(f"rank {rank} prints")


def asked(example: bool) -> tuple[dict[str, Any], str]:
    torch.manual_seed(0)
    model = Asking(example)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer_of(FSDP4 if example else CP2, fast_dev_run=1, enable_model_summary=True).fit(
            model, datamodule=InOrder()
        )
    return model.told, printed.getvalue()


@pytest.mark.parametrize("example", [False, True], ids=["alone", "example_input_array"])
def test_ranks_talk_to_each_other_through_module_and_strategy(example, ranks4):
    for rank, (told, printed) in enumerate(ranks4(asked, example)):
        assert told["gathered"] == [1, 2, 3, 4]
        assert told["of_samples"] == ([1, 2, 3, 4] if example else [1 + rank % 2, 3 + rank % 2])
        assert told["broadcast"] == "from 2" and (told["mean"], told["total"]) == (2.5, 10.0)
        assert told["all"] is False and told["any"] is True
        assert told["ranks"] == (rank, rank, 0, 4) and told["is_zero"] == (rank == 0)
        assert told["mesh"] == ("d_rep", "fsdp", "cp")
        assert printed.count("prints") == (rank == 0)
        assert ("Out sizes" in printed) == (example and rank == 0)


class Late(Small):
    """Has its decoder from a hook that Lightning has replaced by ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.late = self.decoder
        del self.decoder

    def configure_sharded_model(self) -> None:
        self.decoder = self.late


def late() -> dict[str, Any]:
    return dict(max_steps=2)


def test_what_configure_sharded_model_builds_trains_as_in_one_process(ranks4):
    """It runs after ``setup`` and before sharding, as ``configure_model`` does."""
    require_one_process(ranks4, late, Late)


def one_file(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, trainer, _ = run(CP2 | dict(save_distributed_checkpoint=False), max_steps=1)
    trainer.save_checkpoint(path)
    return weights(model), weights(Small.load_from_checkpoint(path))


def test_a_checkpoint_of_one_file_is_loaded_without_a_trainer(ranks4, tmp_path):
    for expected, got in ranks4(one_file, str(tmp_path / "one.ckpt")):
        assert all(torch.equal(got[name], expected[name]) for name in expected)
