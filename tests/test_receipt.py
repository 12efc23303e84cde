"""What compute waits for: found in the right place and to the right length, at no change to a run."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe_strategy import MoELanguageModel, Receipt, collectives, waits
from lightning_moe_strategy._torch_compat import (
    fsdp_groups,
    in_backward,
    set_asynchronous_unshard,
    unit_name,
    watched_units,
)
from lightning_moe_strategy._torch_waits import gather_is_pending
from lightning_moe_strategy.callbacks import receipt as receipt_file
from lightning_moe_strategy.callbacks.receipt_summary import (
    StepReceipt,
    WaitSums,
    receipt_of,
)
from lightning_moe_strategy.expert_parallel.experts import dispatcher_of
from lightning_moe_strategy.mesh import ParallelDims, build_dense_meshes, build_expert_meshes
from lightning_moe_strategy.prefetch_order import UnitPrefetch
from lightning_moe_strategy.sharding import shard
from lightning_moe_strategy.units import plan_units
from lightning_moe_strategy.waits import CATEGORIES, Clock, StepWaits, Wait, WaitWatch
from tests.conftest import _pool
from tests.modules import VOCABULARY, loader
from tests.parity import InOrder, fit

LENGTH, BATCH, LATE = 32, 8, 0.3
MINUTE = timedelta(minutes=1)
SIZES: dict[str, Any] = {"preset": "tiny", "vocab_size": VOCABULARY, "hidden": 32, "layers": 3, "num_experts": 8}
LAYER = "model.layers.1"
ALL_AXES: dict[str, Any] = dict(fsdp=2, cp=2, e_fsdp=2, ep=2)


def make_model() -> MoELanguageModel:
    return MoELanguageModel(SIZES, warmup_steps=0)


def batches(dp: int) -> Any:
    return loader(64 * BATCH, LENGTH, BATCH // dp)


class Steps(Receipt):
    """Keeps every step of this rank, and how often each thing was waited for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"warn_above": None} | options)
        self.steps: list[StepWaits] = []
        self.counts: list[Counter[Wait]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        watch = self._watch
        assert watch is not None
        read = watch._read

        def noted(step: Any) -> StepWaits:
            self.counts.append(Counter(what for what, *_ in step.waits))
            self.steps.append(read(step))
            return self.steps[-1]

        watch._read = noted  # type: ignore[method-assign]


# A rank that is late


def late_in_forward(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_pre_hook(lambda *args: time.sleep(LATE)).remove


def late_in_backward(module: nn.Module) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: time.sleep(LATE))

    return module.register_forward_hook(hook).remove


def late_to(name: str) -> Callable[[nn.Module], Callable[[], None]]:
    """Before a dispatcher's ``dispatch`` or ``combine``."""

    def install(experts: nn.Module) -> Callable[[], None]:
        dispatcher: Any = dispatcher_of(experts)
        run = getattr(dispatcher, name)

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(LATE)
            return run(*args, **kwargs)

        setattr(dispatcher, name, late)
        return lambda: delattr(dispatcher, name)

    return install


def late_unit(step: str, *, backward: bool) -> Callable[[nn.Module], Callable[[], None]]:
    """Before FSDP's ``step`` of a unit."""

    def install(module: nn.Module) -> Callable[[], None]:
        (group,) = fsdp_groups(module)  # type: ignore[arg-type]
        left = [LATE]

        @contextmanager
        def around(name: str, other: Any) -> Iterator[None]:
            if other is group and name == step and in_backward() == backward and left:
                time.sleep(left.pop())
            yield

        stack = ExitStack()
        stack.enter_context(watched_units(around))
        return stack.close

    return install


Late = tuple[str, Callable[[nn.Module], Callable[[], None]], Wait]

LATE_CASES: dict[str, tuple[dict[str, Any], list[Late]]] = {
    "shards": (
        dict(fsdp=2, e_fsdp=2, ep=1),
        [
            (LAYER, late_unit("unshard", backward=False), Wait(LAYER, "dense_gather", False)),
            (f"{LAYER}.mlp.experts", late_unit("unshard", backward=False), Wait(LAYER, "expert_gather", False)),
            (f"{LAYER}.mlp.experts", late_unit("post_backward", backward=True), Wait(LAYER, "reduce_scatter", True)),
            (LAYER, late_unit("post_backward", backward=True), Wait(LAYER, "reduce_scatter", True)),
        ],
    ),
    "replicas": (
        dict(d_rep=2, fsdp=1, e_rep=2, e_fsdp=1, ep=1),
        [(LAYER, late_unit("post_backward", backward=True), Wait(LAYER, "reduce_scatter", True))],
    ),
    "ep": (
        dict(fsdp=2, e_fsdp=1, ep=2),
        [
            (f"{LAYER}.mlp.experts", late_to("dispatch"), Wait(LAYER, "ep_dispatch", False)),
            (f"{LAYER}.mlp.experts", late_to("combine"), Wait(LAYER, "ep_combine", False)),
            (f"{LAYER}.mlp.experts", late_in_backward, Wait(LAYER, "ep_combine", True)),
        ],
    ),
    "symm_mem": (
        dict(fsdp=2, e_fsdp=1, ep=2, dispatcher="symm_mem"),
        [
            (f"{LAYER}.mlp.experts", late_to("dispatch"), Wait(LAYER, "ep_dispatch", False)),
            (f"{LAYER}.mlp.experts", late_to("combine"), Wait(LAYER, "ep_combine", False)),
        ],
    ),
    "cp": (
        dict(fsdp=1, cp=2, e_fsdp=2, ep=1),
        [
            (f"{LAYER}.attention", late_in_forward, Wait(LAYER, "cp_gather", False)),
            (f"{LAYER}.attention", late_in_backward, Wait(LAYER, "cp_gather", True)),
        ],
    ),
}


class LateRank(L.Callback):
    """Rank 1 is late once in every second step, each time for another thing."""

    def __init__(self, cases: list[Late]) -> None:
        self.cases, self.removers = cases, list[Callable[[], None]]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        if batch_idx % 2 and batch_idx // 2 < len(self.cases) and dist.get_rank() == 1:
            name, install, _ = self.cases[batch_idx // 2]
            self.removers = [install(pl_module.get_submodule(name))]

    def on_train_batch_end(self, *args: Any) -> None:
        while self.removers:
            self.removers.pop()()


def waited_for_the_late(name: str, seconds: float) -> list[dict[Wait, float]]:
    global LATE
    LATE = seconds
    degrees, cases = LATE_CASES[name]
    steps = Steps(log_every_n_steps=1000)
    fit(degrees, make_model, batches, callbacks=(LateRank(cases), steps), shift="module", max_steps=2 * len(cases))
    for step in steps.steps:
        assert 0 <= sum(step.waits.values()) <= step.seconds
        assert min(step.waits.values()) >= 0
    return [dict(step.waits) for step in steps.steps]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("replicas", "symm_mem") else ()) for name in LATE_CASES],
)
def test_a_late_rank_is_waited_for_where_it_was_late(name, ranks2):
    wrong: list[Any] = []
    for late in (LATE, 5 * LATE):  # a busy machine makes either rank later than it was told to be
        on_time, _ = ranks2(waited_for_the_late, name, late)
        wrong = []
        for number, (_, _, expected) in enumerate(LATE_CASES[name][1]):
            waits = on_time[2 * number + 1]
            found = max(waits, key=lambda what: waits[what])
            if found != expected or waits[expected] != pytest.approx(late, rel=0.1):
                wrong.append((number, expected, found, waits.get(expected), waits[found]))
        if not wrong:
            return
    raise AssertionError(wrong)


# Hidden or not


class Slow(nn.Module):
    """A block that takes as long as it is told, and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.act = nn.ReLU()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.act(self.linear(x))


class Slows(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Slow(seconds) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def waits_behind_compute(late: float, *, prefetched: bool) -> tuple[float, StepReceipt]:
    """Rank 1 starts each gather of the blocks late, which a block's compute hides where it started ahead."""
    dims = ParallelDims(fsdp=2, e_fsdp=2, ep=1).resolve(2, local_world_size=2, num_experts=None)
    dense, expert = build_dense_meshes(dims, "cpu", MINUTE), build_expert_meshes(dims, "cpu", MINUTE)
    model = Slows(late * 5 / 3)
    units = plan_units(model, {}, separate_routers=False)
    shard(units, dense=dense, expert=expert, compute_dtype=None)
    prefetch = UnitPrefetch(units)
    sums, watch = WaitSums(), WaitWatch(units, device=torch.device("cpu"))

    @contextmanager
    def around(step: str, group: Any) -> Iterator[None]:
        if dist.get_rank() == 1 and step == "unshard" and unit_name(group) and not gather_is_pending(group):
            time.sleep(late if not group.is_unsharded else 0)
        yield

    with torch.no_grad(), watch.opened(), watched_units(around):
        for number in range(3):
            if prefetched:
                set_asynchronous_unshard(prefetch.units[""], True)
                prefetch.before_batch("validate")
            dist.barrier()
            with watch.step():
                model(torch.ones(1, 64))
            if prefetched:
                prefetch.after_evaluation_batch()
            (step,) = watch.take()
            if number:
                sums.add(step)
    numbers = torch.tensor(sums.numbers(watch.layers, rank=0, num_ranks=1))
    receipt = receipt_of(numbers.tolist(), watch.layers, watch.layers[1:], step=2, planned=None)
    assert receipt is not None
    return receipt.exposed["dense_gather"], receipt


def hidden_and_not(late: float) -> list[tuple[float, StepReceipt]]:
    return [waits_behind_compute(late, prefetched=prefetched) for prefetched in (True, False)]


def test_what_compute_hides_is_not_waited_for_and_what_it_does_not_is(ranks2):
    for late in (0.03, 0.1, 0.3):  # a busy machine makes either rank later than it was told to be
        (hidden, _), (exposed, receipt) = ranks2(hidden_and_not, late)[0]
        if hidden < 1.5 * late and exposed == pytest.approx(3 * late, rel=0.15):
            break
    # Nothing runs before the first block: its gather is waited for. The others' start a block ahead.
    assert 0.67 * late < hidden < 1.5 * late and exposed == pytest.approx(3 * late, rel=0.15)
    assert receipt.first_layer("dense_gather") == "blocks.1"


# Nothing else changes


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())


def trained(degrees: dict[str, Any], options: dict[str, Any], steps: Steps | None) -> list[torch.Tensor]:
    losses = Losses()
    callbacks = (losses,) if steps is None else (losses, steps)
    *_, keep = fit(degrees, make_model, batches, callbacks=callbacks, shift="module", max_steps=3, **options)
    return [*losses.losses, *(gradient for step in keep.steps for gradient in step.values())]


def trained_with_and_without(degrees: dict[str, Any], options: dict[str, Any]) -> tuple[bool, list[Counter[Wait]]]:
    steps = Steps()
    pairs = zip(trained(degrees, options, steps), trained(degrees, options, None), strict=True)
    assert all(0 <= sum(each.waits.values()) <= each.seconds and min(each.waits.values()) >= 0 for each in steps.steps)
    return all(torch.equal(one, other) for one, other in pairs), steps.counts


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "block"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"recompute": "selective", "ep_chunks": 2}, marks=pytest.mark.slow),
        pytest.param({"balance": "redundant"}, marks=pytest.mark.slow),
    ],
    ids=["block", "none", "selective-chunks", "redundant"],
)
def test_no_bit_changes_and_recompute_and_accumulation_are_counted_once(settings, ranks4):
    answers = ranks4(trained_with_and_without, ALL_AXES | settings, {"accumulate_grad_batches": 2})
    for is_same, counts in answers:
        assert is_same and len(counts) == 3
        for count in counts:
            by_category = Counter[tuple[str, bool]]()
            for what, number in count.items():
                by_category[what.category, what.in_backward] += number
            # Of each micro-batch: INVARIANTS C1. The root holds nothing; embedding, norm and head beside the blocks.
            assert by_category["dense_gather", False] == 2 * (3 + 3)
            assert by_category["expert_gather", False] == by_category["expert_gather", True] == 2 * 3
            assert by_category["reduce_scatter", True] == 2 * (3 + 3 + 3)
            assert by_category["cp_gather", False] > 0 and by_category["cp_gather", True] > 0
            assert by_category["ep_combine", False] % 6 == 0 and by_category["ep_combine", False] > 0
            assert ("expert_move", False) in by_category or settings.get("balance") != "redundant"
            assert all(layer in ("model.layers.0", "model.layers.1", "model.layers.2")
                       for layer, category, _ in count if category.startswith(("ep_", "cp_")))  # fmt: skip


@pytest.mark.slow
def test_no_bit_changes_in_compiled_blocks(ranks2):
    degrees = dict(fsdp=1, cp=2, e_fsdp=1, ep=2, compile_blocks={"backend": "aot_eager"}, recompute="block")
    answers = ranks2(trained_with_and_without, degrees, {})
    assert all(is_same and count[Wait(LAYER, "cp_gather", True)] for is_same, counts in answers for count in counts)


# A GPU's way, told apart by which stream waits


class HostMarksOnAStream(Clock):
    is_hosts = False

    def __init__(self) -> None:
        self._spare = []

    def mark(self) -> float:
        return time.perf_counter()


def stream_waits() -> Counter[tuple[str, bool]]:
    """torch's stand-ins for streams do nothing, but are called as those of a GPU are."""
    clock, record_event = waits.Clock, torch.cpu.Stream.record_event
    waits.Clock = lambda device: HostMarksOnAStream()  # type: ignore[assignment,misc]
    torch.cpu.Stream.record_event = lambda stream: torch.cpu.Event()  # type: ignore[method-assign]
    steps = Steps()
    try:
        fit(dict(fsdp=2, e_fsdp=2, ep=1), make_model, batches, callbacks=(steps,), shift="module", max_steps=2)
    finally:
        waits.Clock, torch.cpu.Stream.record_event = clock, record_event  # type: ignore[misc,method-assign]
    assert torch.cpu.Stream.wait_event.__qualname__ == "Stream.wait_event"
    found = Counter[tuple[str, bool]]()
    for what, number in steps.counts[1].items():
        found[what.category, what.in_backward] += number
    return found


def test_on_a_gpu_the_waits_of_the_compute_stream_are_timed(ranks2):
    for found in ranks2(stream_waits):
        # Of each gather its event and, on gloo, its work. The streams that gather and reduce wait too, uncounted.
        assert found["expert_gather", False] == found["expert_gather", True] == 2 * 3
        assert found["dense_gather", False] == 2 * (3 + 3)
        # Each reduction but the last is waited for before the next, and the last at the end.
        assert found["reduce_scatter", True] == 3 + 3 + 3


class FakeEvent:
    """Of a device that is two events behind the host."""

    made: list["FakeEvent"] = []
    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made.append(self)

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.now >= self.at + 2

    def synchronize(self) -> None:
        FakeEvent.now = max(FakeEvent.now, self.at + 2)

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self.query() and other.query(), "read before the device has passed it"
        return (other.at - self.at) * 1e3


def test_events_are_read_when_the_device_has_passed_them_and_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.made, FakeEvent.now = [], 0.0
    watch = WaitWatch((), device=torch.device("cuda"))
    what, taken = Wait("", "cp_gather", False), list[StepWaits]()
    for _ in range(50):
        watch.start()
        with watch._timed(what):
            pass
        watch.stop()
        watch.end_step()
        taken += watch.take()
    assert len(taken) == 49  # one behind, without a sync
    taken += watch.take(wait=True)
    assert len(taken) == 50 and all(step == StepWaits(seconds=3.0, waits={what: 1.0}) for step in taken)
    assert len(FakeEvent.made) <= 8


# What a run shows


class Validates(MoELanguageModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        time.sleep(2.0)


class Breaks(MoELanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise RuntimeError("broken on purpose")
        return super().training_step(batch, batch_idx)


def hooks_left(model: Any) -> list[str]:
    left = [name for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
            for module in model.modules() if isinstance(module, FSDPModule)
            for group in fsdp_groups(module) if name in vars(group)]  # fmt: skip
    left += ["all_reduce"] if dist.all_reduce.__module__ != "torch.distributed.distributed_c10d" else []
    return left + ["timers"] * len(collectives._timers)


def shown(folder: str) -> dict[str, Any]:
    """Two fits that log into one folder, with a validation after each second step; then one that breaks."""
    warnings, said = list[str](), list[str]()
    warn, info = receipt_file.rank_zero_warn, receipt_file.rank_zero_info
    receipt_file.rank_zero_warn, receipt_file.rank_zero_info = warnings.append, said.append
    InOrder.val_dataloader = lambda self: loader(BATCH, LENGTH, BATCH)  # type: ignore[method-assign]
    degrees, receipts, left, gathers = dict(fsdp=2, e_fsdp=1, ep=2), [], [], []
    try:
        for max_steps in (5, 7):
            receipt = Steps(cluster="gb200-nvl72", warn_above=0.001, log_every_n_steps=2)
            trainer, model, _ = fit(
                degrees, lambda: Validates(SIZES, warmup_steps=0), batches, callbacks=(receipt,), shift="module",
                max_steps=max_steps, precision="bf16-mixed", val_check_interval=2, num_sanity_val_steps=0,
                logger=CSVLogger(folder, name="", version=""), limit_val_batches=1,
            )  # fmt: skip
            receipts.append(receipt.last)
            gathers += [count[Wait(LAYER, "dense_gather", False)] for count in receipt.counts]
            left += hooks_left(model)
        broken = Breaks(SIZES, warmup_steps=0)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            receipt = Receipt(cluster="gb200-nvl72", warn_above=None, log_every_n_steps=1)
            fit(degrees, lambda: broken, batches, callbacks=(receipt,), shift="module", max_steps=9)
        assert receipt.last is not None and receipt.last.planned is None
        left += hooks_left(broken)
    finally:
        receipt_file.rank_zero_warn, receipt_file.rank_zero_info = warn, info
        del InOrder.val_dataloader
    return {"receipts": receipts, "left": left, "warnings": warnings, "said": said, "gathers": gathers}


@pytest.fixture(scope="module")
def shown_by_a_run(tmp_path_factory: Any) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("receipt")
    return _pool(2)(shown, str(folder)), folder


def test_a_run_keeps_what_it_logs_the_same_on_every_rank(shown_by_a_run):
    (first, second), folder = shown_by_a_run
    for one, other in zip(first["receipts"], second["receipts"], strict=True):
        assert one == other and one.rows and one.exposed_seconds > 0
    whole = first["receipts"][0]
    assert (whole.step, whole.num_steps) == (5, 4)  # without the first
    # Nor with validation: of each step the gathers of a block and its router, and no others.
    assert whole.step_seconds < 2.0 and first["gathers"] == (5 + 7) * [2]
    assert {"dense_gather", "reduce_scatter", "ep_dispatch", "ep_combine", "copies"} <= set(whole.exposed)
    assert sum(whole.exposed.values()) == pytest.approx(whole.exposed_seconds) and whole.exposed_share < 1
    assert whole.exposed_seconds <= whole.most_exposed_seconds


def test_loggers_get_the_figures_and_the_file_a_line_for_each(shown_by_a_run):
    _, folder = shown_by_a_run
    header, *rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    logged = [dict(zip(header, row, strict=True)) for row in rows if row[header.index("receipt/exposed_share")]]
    lines = [json.loads(line) for line in (folder / "receipt.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 2, 4, 6]  # the second fit appends
    assert [line["num_steps"] for line in lines] == [1, 2, 1, 2, 2]
    assert [int(row["step"]) for row in logged] == [2, 4, 6]  # CSVLogger keeps the last fit's
    for row, line in zip(logged, lines[2:], strict=True):
        assert float(row["receipt/exposed_seconds"]) == pytest.approx(sum(line["exposed"].values()), abs=1e-4)
        assert float(row["receipt/exposed_share"]) == pytest.approx(
            sum(line["exposed"].values()) / line["seconds"], abs=1e-3
        )
        for category, seconds in line["exposed"].items():
            assert float(row[f"receipt/{category}_seconds"]) == pytest.approx(seconds, abs=1e-5)
        assert set(line["exposed"]) | {line["worst"]} <= set(CATEGORIES)
        assert line["planned"].keys() >= {"dense_gather", "ep_dispatch"}


def test_the_warning_comes_once_a_fit_and_nothing_is_left_hooked(shown_by_a_run):
    (first, _), _ = shown_by_a_run
    assert len(first["warnings"]) == 2 and first["left"] == []
    (sentence,) = first["said"]  # of the fit in FP32 that broke, once
    assert "Receipt has no prediction: the planner counts precision 'bf16-mixed'" in sentence
    assert "more than warn_above(0.001)" in first["warnings"][0]
