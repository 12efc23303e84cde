"""Loading: all, or what fits; optimizers without a step; files of other Trainers; directories where a file is due."""

import io
import pickle
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel
from lightning_moe_strategy.checkpoint import progress
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.load import load
from lightning_moe_strategy.checkpoint.manifest import FileRecord, Manifest
from lightning_moe_strategy.checkpoint.read import open_directory
from lightning_moe_strategy.checkpoint.reader import ItemReader
from lightning_moe_strategy.checkpoint.safe_metadata import Item
from lightning_moe_strategy.checkpoint.storage import storage_of
from lightning_moe_strategy.checkpoint.verify import share_of
from tests.flavour import Trainer
from tests.laid_out import adamw, gathered, load_again, muon, placed, save, sgd, step
from tests.modules import PlainLanguageModel, loader
from tests.parity import QUIET, fit

HERE, THERE = dict(fsdp=2, e_fsdp=1, ep=2), dict(fsdp=1, cp=2, e_fsdp=2, ep=1)
MAKERS = {"adamw": adamw, "muon": muon, "sgd": sgd}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    both = [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]
    return sorted([*both, *(found.keys() ^ expected.keys())])


def torch_directory(path: Path, state: dict[str, Any], **rest: Any) -> None:
    """As Lightning's ModelParallelStrategy writes it."""
    save_by_torch(state, checkpoint_id=path, no_dist=True)
    torch.save(rest, path / "meta.pt")


# Without a Trainer.


def goes_on_as_if_unbroken(path: str) -> dict[str, list[str]]:
    found = {}
    for name, make in MAKERS.items():
        model = placed(HERE)
        optimizer = make(model)
        for number in range(2):
            step(model, optimizer, number)
        save(f"{path}/{name}", model, optimizer)
        step(model, optimizer, 2)
        again = placed(HERE)
        fresh = make(again)
        fresh.step = None  # a step, even of zero gradients, would count
        load_again(f"{path}/{name}", again, fresh)
        del fresh.step
        found[name] = [n for n in gathered(again, fresh) if "norm.bias." in n and n.startswith("0.norm")]
        step(again, fresh, 2)
        found[name] += differing(gathered(again, fresh), gathered(model, optimizer))
    return found


def test_a_loaded_optimizer_goes_on_as_if_unbroken_and_loading_makes_no_step(ranks2, tmp_path):
    # A parameter that never had a gradient has no state then, and gets none.
    for found in ranks2(goes_on_as_if_unbroken, str(tmp_path)):
        assert found == {"adamw": [], "muon": [], "sgd": []}


def loads_what_fits(path: str) -> Any:
    model = placed(HERE)
    save(f"{path}/x", model, adamw(model))
    other = placed(HERE)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(9)
    other.bias = nn.Parameter(torch.full((3,), 5.0))
    del other.positions
    loaded = load_again(f"{path}/x", other, adamw(other), strict=False)
    kept = gathered(other)
    bias = kept.pop("bias")
    expected = gathered(model)
    expected.pop("positions.weight")
    return differing(kept, expected), bias.tolist(), loaded.notes


def test_not_strict_loads_what_both_have_and_says_the_rest_by_name(ranks2, tmp_path):
    for wrong, bias, notes in ranks2(loads_what_fits, str(tmp_path)):
        assert not wrong and bias == [5.0] * 3
        said = " ".join(notes)
        assert "1 of the tensors keep the values they have, as it has none: bias (3,)." in said
        assert "1 of the tensors are not in the model: positions.weight" in said
        assert "Parameters of optimizer group 0 differ: the checkpoint lacks bias; the module's lacks positions" in said


def test_weights_of_another_precision_are_converted_and_it_is_said(tmp_path):
    model, other = nn.Linear(70, 90), nn.Linear(70, 90)
    torch_directory(tmp_path / "x", {"state_dict": get_model_state_dict(model.bfloat16())})
    loaded = load(str(tmp_path / "x"), other, None)
    assert torch.equal(other.weight, model.weight.float()) and torch.equal(other.bias, model.bias.float())
    assert loaded.notes == ["2 tensors are converted from torch.bfloat16 to torch.float32."]
    assert not loaded.is_verified and not loaded.has_optimizers


class ByRows(torch.optim.Optimizer):
    """A state that is not as large as its parameter, one of another dtype, and a nested one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["rows"] = torch.zeros(len(parameter))
                    state["sum"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["rows"] += parameter.grad.reshape(len(parameter), -1).sum(1)
                state["sum"] += parameter.grad
                parameter.data.sub_(group["lr"] * state["sum"].to(parameter.dtype))


def test_states_of_any_shape_and_dtype_come_back(tmp_path):
    model, again = nn.Linear(6, 5), nn.Linear(6, 5)
    optimizer, fresh = ByRows(model.parameters()), ByRows(again.parameters())
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    state = {
        "state_dict": get_model_state_dict(model),
        "optimizer_0": get_optimizer_state_dict(model, optimizer),
    }
    torch_directory(tmp_path / "x", state, epoch=3)
    load(str(tmp_path / "x"), again, [fresh])
    for mine, saved in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, saved)
        assert fresh.state[mine].keys() == {"rows", "sum"}
        assert all(torch.equal(fresh.state[mine][key], value) for key, value in optimizer.state[saved].items())
        assert fresh.state[mine]["sum"].dtype == torch.float64


def test_a_file_whose_states_are_numbered_by_groups_loads_into_groups_of_another_order_of_names(tmp_path):
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        decayed, others = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
        return model, torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=0.1)

    (model, optimizer), (again, fresh) = build(), build()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 2}
    torch.save(content, tmp_path / "x.ckpt")
    fresh.param_groups[0]["initial_lr"] = 0.5  # of a scheduler that came later: stays
    loaded = load(str(tmp_path / "x.ckpt"), again, [fresh])
    assert loaded.rest == {"epoch": 2} and loaded.is_verified
    assert fresh.param_groups[0]["initial_lr"] == 0.5
    assert not differing(gathered(again, fresh), gathered(model, optimizer))


class WithExtraState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return {"calls": 3, "table": torch.arange(4)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_a_module_comes_back(tmp_path):
    torch_directory(tmp_path / "x", {"state_dict": get_model_state_dict(WithExtraState())})
    again = WithExtraState()
    load(str(tmp_path / "x"), again, None)
    assert again.extra["calls"] == 3 and again.extra["table"].tolist() == [0, 1, 2, 3]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_every_kind_of_tensor_is_read_bit_for_bit_and_only_the_bytes_that_are_asked_for(tmp_path):
    tensors = {
        "large": torch.randn(300, 200, 9),
        "narrow": torch.randn(5000, 3),
        "transposed": torch.randn(30, 20).t(),
        "number": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "bool": torch.rand(50) > 0.5,
        "bfloat16": torch.randn(3000, 20).bfloat16(),
        "float8": torch.randn(100, 300).to(torch.float8_e4m3fn),
        "uint16": torch.arange(9000).to(torch.uint16),
    }
    torch_directory(tmp_path / "x", {"state_dict": tensors})
    with open_directory(str(tmp_path / "x")) as saved:
        for name, tensor in tensors.items():
            before = saved.num_bytes_read
            read = saved.tensor(f"state_dict.{name}")
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            assert torch.equal(
                read.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
            )
            assert saved.num_bytes_read - before == tensor.numel() * tensor.itemsize, name
        with pytest.raises(CheckpointError, match=r"no tensor 'state_dict.other'"):
            saved.tensor("state_dict.other")


BOXES = [
    (slice(5, 20), slice(0, 64), slice(0, 1100)),  # rows: one run
    (slice(3, 9), slice(10, 50), slice(0, 1100)),  # a long run of each row
    (slice(1, 3), slice(3, 6), slice(20, 1095)),  # runs just long enough
    (slice(1, 7), slice(3, 60), slice(10, 200)),  # short runs
    (slice(39, 40), slice(63, 64), slice(1099, 1100)),
]


@pytest.mark.parametrize("place", ["disk", "memory://reader"])
def test_a_part_of_a_tensor_is_read_from_where_it_lies(place, tmp_path):
    tensor = torch.randn(40, 64, 1100)
    torch_directory(tmp_path / "x", {"state_dict": {"w": tensor}})
    path = str(tmp_path / "x")
    if place != "disk":
        path = f"{place}/x"
        import_module("fsspec").filesystem("memory").put(str(tmp_path / "x"), "/reader/x", recursive=True)
    file = next(file for file in (tmp_path / "x").glob("*.distcp"))
    reader = ItemReader(storage_of(path), path)
    rows = reader.rows(Item(file.name, 0, file.stat().st_size))
    assert rows is not None
    for box in BOXES:
        before = reader.num_bytes_read
        # Into a part of a tensor, and into another dtype.
        around = torch.zeros(tensor[box].shape[0] + 2, *tensor[box].shape[1:])
        reader.copy(rows, box, around[1:-1])
        assert torch.equal(around[1:-1], tensor[box]) and not around[0].any() and not around[-1].any()
        assert reader.num_bytes_read - before == tensor[box].numel() * 4
        half = torch.empty(tensor[box].shape, dtype=torch.bfloat16)
        reader.copy(rows, box, half)
        assert torch.equal(half, tensor[box].bfloat16())
    reader.close()


def test_a_checkpoint_in_a_store_that_fsspec_reaches_is_read(tmp_path):
    tensors = {"large": torch.randn(300, 200), "narrow": torch.randn(5000, 3)}
    torch_directory(tmp_path / "x", {"state_dict": tensors}, epoch=4)
    import_module("fsspec").filesystem("memory").put(str(tmp_path / "x"), "/run/x.ckpt", recursive=True)
    with open_directory("memory://run/x.ckpt") as saved:
        assert saved.rest() == {"epoch": 4}
        assert all(torch.equal(saved.tensor(f"state_dict.{name}"), tensor) for name, tensor in tensors.items())


def test_every_file_is_verified_by_one_rank_and_all_read_about_as_much():
    files = {f"f{i}": FileRecord(num_bytes=size, crc32=0) for i, size in enumerate([90, 10, 50, 40, 30, 30, 20, 30])}
    manifest = Manifest(versions={}, layout={}, tensors={}, files=files)
    shares = [share_of(manifest, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert {sum(files[name].num_bytes for name in share) for share in shares} == {100}


# With a Trainer.


class Trained(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__(optimizer="adamw", learning_rate=0.01, num_layers=1)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class Partly(Trained):
    """Another head, for what was learnt."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.decoder.value = nn.Linear(16, 1)


def batches(dp: int) -> Any:
    return loader(64, 12, 8 // dp)


def all_of(trainer: Any, model: nn.Module) -> dict[str, Tensor]:
    return gathered(model, *trainer.strategy.optimizers)


def train_and_save(folder: str) -> Any:
    trainer, model, _ = fit(HERE, Trained, batches, shift="module", max_steps=2)
    trainer.save_checkpoint(f"{folder}/x.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    after_two = all_of(trainer, model)
    trainer, model, _ = fit(
        HERE | {"save_distributed_checkpoint": False}, Trained, batches, shift="module", max_steps=2
    )
    trainer.save_checkpoint(f"{folder}/file.ckpt")
    return after_two


def resume(path: str, degrees: dict[str, int], make_model: Any = Trained) -> Any:
    """What was loaded, the steps then made, and what was said of it."""
    seen: dict[str, Any] = {}

    class Look(FSDPCPEPStrategy):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            found = super().load_checkpoint(*args, **kwargs)
            seen["tensors"] = gathered(self.model, *self.optimizers)
            return found

    torch.manual_seed(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=Look(**degrees), callbacks=[ZigZagContextParallel(shift="module")],
            **(QUIET | dict(limit_val_batches=0, max_steps=3)),
        )  # fmt: skip
        trainer.fit(make_model(), batches(1), ckpt_path=path)
    said = [str(warning.message) for warning in caught if str(warning.message).startswith("checkpoint(")]
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return seen["tensors"], trainer.global_step, said, lr


def evaluate(path: str) -> Any:
    model = Trained()
    strategy = FSDPCPEPStrategy(**THERE)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[ZigZagContextParallel(shift="module")], **QUIET
    )
    trainer.validate(model, batches(1), ckpt_path=path, verbose=False)
    return gathered(model), len(strategy.optimizers)


_saved: dict[str, Any] = {}


@pytest.fixture
def saved(ranks2, tmp_path_factory):
    """The folder of the checkpoints, and what was in the model and the optimizer."""
    if not _saved:
        _saved["folder"] = tmp_path_factory.mktemp("saved")
        _saved["tensors"] = ranks2(train_and_save, str(_saved["folder"]))[0]
    return _saved["folder"], _saved["tensors"]


@pytest.mark.parametrize("name", ["x.ckpt", "file.ckpt"])
def test_fit_goes_on_from_a_directory_and_from_a_file_on_another_layout(name, saved, ranks2):
    folder, tensors = saved
    for loaded, steps, said, lr in ranks2(resume, str(folder / name), THERE):
        assert not differing(loaded, tensors)
        assert steps == 3 and not said and lr == pytest.approx(0.01 * 0.1**3)


def test_evaluation_loads_the_weights_alone(saved, ranks2):
    folder, tensors = saved
    for loaded, num_optimizers in ranks2(evaluate, str(folder / "x.ckpt")):
        assert num_optimizers == 0
        assert not differing(loaded, {name: tensors[name] for name in loaded})


def test_fit_goes_on_from_weights_alone_and_says_that_the_optimizer_starts_anew(saved, ranks2):
    folder, tensors = saved
    for loaded, steps, said, lr in ranks2(resume, str(folder / "weights.ckpt"), HERE):
        assert not differing(loaded, {name: tensor for name, tensor in tensors.items() if not name.startswith("0.")})
        assert steps == 3 and lr == pytest.approx(0.001)
        if said:  # rank 0
            assert "holds weights only: optimizers and learning-rate schedulers start anew at step 2." in said[0]


def test_a_directory_of_lightnings_own_strategy_loads_with_a_word_that_it_is_not_verified(saved, ranks2, tmp_path):
    folder, tensors = saved
    path = tmp_path / "theirs.ckpt"
    path.mkdir()
    for file in (folder / "x.ckpt").iterdir():
        if file.name != "manifest.json":
            (path / file.name).write_bytes(file.read_bytes())
    metadata = FileSystemReader(path).read_metadata()
    metadata.storage_meta = StorageMeta(checkpoint_id=path)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    results = ranks2(resume, str(path), THERE)
    for loaded, steps, _, _ in results:
        assert not differing(loaded, tensors) and steps == 3
    assert any("has no manifest" in words and "cannot be verified" in words for words in results[0][2])


def test_strict_loading_of_the_module_decides_whether_a_part_is_enough(saved, ranks2):
    folder, tensors = saved
    for loaded, steps, said, _ in ranks2(resume, str(folder / "x.ckpt"), HERE, Partly):
        assert steps == 3
        added = {name for name in loaded if ".value." in name}
        assert added and not differing({n: t for n, t in loaded.items() if n not in added}, tensors)
        if said:
            assert "keep the values they have, as it has none: decoder.value.bias (1,); decoder.value.weight" in said[0]


def test_load_from_checkpoint_takes_a_directory(saved):
    folder, tensors = saved
    model = Trained.load_from_checkpoint(folder / "x.ckpt", map_location="cpu")
    assert not differing(model.state_dict(), {n: t for n, t in tensors.items() if not n.startswith("0.")})


def test_a_trainer_of_one_process_tests_and_trains_on_from_a_directory(saved):
    folder, tensors = saved
    model = Trained()
    Trainer(accelerator="cpu", devices=1, strategy="auto", **QUIET).test(
        model, batches(1), ckpt_path=folder / "x.ckpt", verbose=False
    )
    assert not differing(model.state_dict(), {n: t for n, t in tensors.items() if not n.startswith("0.")})
    states = {}

    class Look(Trained):
        def on_train_start(self) -> None:
            states.update(all_of(self.trainer, self))

    trainer = Trainer(accelerator="cpu", devices=1, strategy="auto", **(QUIET | dict(limit_val_batches=0, max_steps=3)))
    trainer.fit(Look(), batches(1), ckpt_path=folder / "x.ckpt")
    assert trainer.global_step == 3 and not differing(states, tensors)


def test_a_file_of_one_process_goes_on_on_two_ranks(ranks2, tmp_path):
    trainer = Trainer(accelerator="cpu", devices=1, strategy="auto", **(QUIET | dict(limit_val_batches=0, max_steps=2)))
    model = Trained()
    trainer.fit(model, batches(1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    for loaded, steps, said, _ in ranks2(resume, str(tmp_path / "x.ckpt"), HERE):
        assert not differing(loaded, all_of(trainer, model)) and steps == 3 and not said


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_load_shows_bytes_and_rate_on_a_terminal_and_nothing_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = {}
    for stream, seconds in ((Screen(), 0.0), (Screen(), 60.0), (io.StringIO(), 0.0)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "_SECONDS_UNSEEN", seconds)
        with progress.progress("Loading the checkpoint", 2_000_000) as advance:
            for _ in range(4):
                advance(500_000)
        shown[type(stream).__name__, seconds] = stream.getvalue()
    assert "Loading the checkpoint" in shown["Screen", 0.0] and "MB" in shown["Screen", 0.0]
    assert not shown["Screen", 60.0].strip() and not shown["StringIO", 0.0]
