"""What a training batch costs beside its arithmetic: collectives, waits for a device, walks over the modules.

Counted and not timed, on two ranks, from the end of one batch to the end of the next, loader and callbacks included.
The counts may fall and must not rise.
"""

import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_moe_strategy import ExpertLoadMonitor, collectives
from tests.flavour import Callback
from tests.modules import HuggingFaceLanguageModel, loader
from tests.parity import fit

NUM_LAYERS, NUM_BATCHES = 2, 6
FIRST_STEADY = 3
"""Of the batches: those before look at the data, show the order of the units and check the step."""

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_to_all_single", "broadcast", "barrier")  # fmt: skip
"""Of torch.distributed. Those of objects are made of these."""

WAITS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.__bool__, Tensor.__int__,
         Tensor.__float__, Tensor.__index__)  # fmt: skip
"""What makes the host wait for a GPU, if the tensor is on one."""

PACKAGE = "lightning_moe_strategy"


@dataclass
class Work:
    """Of the host, in a time."""

    collectives: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By kind, dtype and mesh axis."""
    waits: Counter[str] = field(default_factory=Counter)
    """For numbers of tensors, by the file of the package that waits."""
    walks: Counter[str] = field(default_factory=Counter)
    """Over all modules of the LightningModule, by the file of the package that walks."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.collectives + other.collectives, self.waits + other.waits, self.walks + other.walks)


Now = Callable[[], Work]


@contextmanager
def counted_collectives(now: Now) -> Generator[None, None, None]:
    depth = [0]

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        kind = name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not depth[0]:  # one may be made of another
                given = [*args, *kwargs.values()]
                dtype = next((str(x.dtype).removeprefix("torch.") for x in given if isinstance(x, Tensor)), "")
                group = next((x for x in given if isinstance(x, dist.ProcessGroup)), dist.group.WORLD)
                axis = "world" if group is dist.group.WORLD else group.group_desc.removeprefix("mesh_")
                now().collectives[kind, dtype, axis] += 1
            depth[0] += 1
            try:
                return collective(*args, **kwargs)
            finally:
                depth[0] -= 1

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                collective = getattr(dist, name)
                patched = counting(name, collective)
                patch.setattr(dist, name, patched)
                patch.setattr(dist.distributed_c10d, name, patched)
                for ours in [ours for ours, value in vars(collectives).items() if value is collective]:
                    patch.setattr(collectives, ours, patched)
        yield


class Waits(TorchFunctionMode):
    def __init__(self, now: Now) -> None:
        super().__init__()
        self.now = now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS and (file := file_that_calls()) is not None:
            self.now().waits[file] += 1
        return func(*args, **(kwargs or {}))


def file_that_calls() -> str | None:
    """The innermost file of the package; None where that of a test is further in."""
    frame = sys._getframe(2)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if PACKAGE in parts:
            return "/".join(parts[parts.index(PACKAGE) + 1 :])
        if "tests" in parts:
            return None
        frame = frame.f_back
    return None


@contextmanager
def counted_walks(now: Now) -> Generator[None, None, None]:
    walk = nn.Module.named_modules

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, HuggingFaceLanguageModel) and (file := file_that_calls()) is not None:
            now().walks[file] += 1
        return walk(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", counted)
        yield


def works_of_batches(layouts: Mapping[str, dict[str, Any]]) -> dict[str, Work]:
    """On this rank, by layout: of two batches once all is in its stride."""
    return {name: work_of_two_batches(layout) for name, layout in layouts.items()}


def work_of_two_batches(layout: dict[str, Any], *callbacks: Callback) -> Work:
    works = [Work()]

    class Next(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            works.append(Work())

    def now() -> Work:
        return works[-1]

    options = dict(layout)
    trainer_options = dict(max_epochs=1, max_steps=-1, accumulate_grad_batches=options.pop("accumulated", 1))
    with counted_collectives(now), counted_walks(now), Waits(now):
        fit(options, HuggingFaceLanguageModel, lambda dp: loader(4 * NUM_BATCHES, 24, 4 // dp),
            callbacks=(*callbacks, Next(), ExpertLoadMonitor(plot=False)), **trainer_options)  # fmt: skip
    assert len(works) == NUM_BATCHES + 1
    return works[FIRST_STEADY] + works[FIRST_STEADY + 1]


LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": dict(fsdp=2, ep=2),
    "cp": dict(fsdp=1, cp=2, ep=2),
    "fsdp": dict(fsdp=2, ep=1),
    "accumulated": dict(fsdp=2, ep=1, accumulated=2),
}
NUM_DENSE_UNITS = NUM_LAYERS + 3  # embedding, norm, head

AGREED = {("all_reduce", "int64", "world"): 3, ("broadcast", "int64", "world"): 1}
"""Of a batch: who has one; whether all could take it up; whether all have a loss. Lightning asks for SIGTERM."""
DENSE = {
    ("all_gather", "float32", "fsdp_cp"): 2 * NUM_DENSE_UNITS - 1,  # not the embedding in the backward pass
    ("reduce_scatter", "float32", "fsdp_cp"): NUM_DENSE_UNITS,
}
EXPERTS = {
    ("all_gather", "float32", "e_fsdp"): 2 * NUM_LAYERS,
    ("reduce_scatter", "float32", "e_fsdp"): NUM_LAYERS,
}
EXCHANGED = {
    # Counts, and which token goes where; rows and their weights there, rows back, and the same backward.
    ("all_to_all", "int32", "ep"): 2 * NUM_LAYERS,
    ("all_to_all", "float32", "ep"): 6 * NUM_LAYERS,
}
# Keys and values, forward and again backward.
ATTENDED = {("all_gather", "float32", "cp"): 4 * NUM_LAYERS, ("reduce_scatter", "float32", "cp"): 2 * NUM_LAYERS}
OF_A_BATCH: dict[str, dict[tuple[str, str, str], int]] = {
    "ep": AGREED | DENSE | EXCHANGED,
    "cp": AGREED | DENSE | EXCHANGED | ATTENDED,
    "fsdp": AGREED | DENSE | EXPERTS,
    "accumulated": AGREED | DENSE | EXPERTS,
}
OF_A_STEP = {("all_reduce", "int64", "world"): 1}
"""Its tokens."""

WAITS_OF_A_BATCH: dict[str, int] = {
    "host_agreement.py": 3,  # of tensors that are on the CPU anyway
    "_lightning_compat.py": 1,  # Lightning's own, in a run that it begins
    "expert_parallel/splits.py": NUM_LAYERS,
    "kernels/swiglu.py": NUM_LAYERS,  # of the reference for CPUs
    "context_parallel/batch.py": 1,  # of which tokens are padding, on the CPU
}

_found: list[dict[str, Work]] = []


def found_in(ranks2: Any, layout: str) -> list[Work]:
    if not _found:
        _found.extend(ranks2(works_of_batches, LAYOUTS))
    return [of_rank[layout] for of_rank in _found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_batches_take_no_more_collectives_than_these(layout, ranks2):
    num_steps = 1 if layout == "accumulated" else 2
    most = Counter({kind: 2 * number for kind, number in OF_A_BATCH[layout].items()})
    most += Counter({kind: num_steps * number for kind, number in OF_A_STEP.items()})
    for work in found_in(ranks2, layout):
        assert work.collectives[("all_gather", "float32", "fsdp_cp")] > 0
        assert work.collectives - most == Counter()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_for_the_split_of_each_layers_tokens_and_for_little_else(layout, ranks2):
    most = Counter({file: 2 * number for file, number in WAITS_OF_A_BATCH.items()})
    for work in found_in(ranks2, layout):
        assert work.waits["host_agreement.py"] > 0
        assert work.waits - most == Counter()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_are_walked_for_their_gradients_alone(layout, ranks2):
    """A walk over the 50,000 modules of a large model takes the host 30 ms."""
    for work in found_in(ranks2, layout):
        assert work.walks - Counter({"summed_gradients.py": 2}) == Counter()


def one_more_collective(layout: dict[str, Any]) -> Work:
    class OneMore(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            dist.all_reduce(torch.zeros(1, dtype=torch.int64))

    return work_of_two_batches(layout, OneMore())


def test_one_collective_more_would_be_seen(ranks2):
    plain = found_in(ranks2, "fsdp")[0].collectives
    assert ranks2(one_more_collective, LAYOUTS["fsdp"])[0].collectives - plain == {("all_reduce", "int64", "world"): 2}
