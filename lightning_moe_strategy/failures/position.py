"""Where a thread stands: the collective it waits in, among whom and for which layer; else its line of code.

Read from the frames of a thread that runs, or of an exception, when somebody asks: a step pays nothing for it.
"""

import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe_strategy._torch_compat import fsdp_groups, unit_name

_AXIS_CARRIES = {
    "ep": "rows of the experts",
    "cp": "keys and values",
    "cp_inter": "keys and values",
    "cp_intra": "keys and values",
}
_OF_FSDP = {
    "unshard": ("all-gather of parameters", "_all_gather_process_group"),
    "wait_for_unshard": ("all-gather of parameters", "_all_gather_process_group"),
    "post_backward": ("reduction of gradients", "_reduce_scatter_process_group"),
    "finalize_backward": ("reduction of gradients", "_reduce_scatter_process_group"),
}
"""Methods of FSDP's parameter groups that wait, and the group they wait for. Seen in torch 2.11-2.13."""
_PASSED_THROUGH = ("torch/_ops.py", "torch/utils/_contextlib.py", "torch/autograd/profiler.py", "contextlib.py")
"""Files that stand between a collective and who calls it."""
_OWN_COLLECTIVES = "lightning_moe_strategy/collectives.py"
_PACKAGE = f"{os.sep}lightning_moe_strategy{os.sep}"
_OF_OTHERS = (
    f"{os.sep}site-packages{os.sep}",
    sysconfig.get_paths()["stdlib"] + os.sep,
    f"{os.sep}bin{os.sep}lightning-moe",
    "<frozen ",
    "<string>",
)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Of one thread of one rank. Ranks that wait for each other have the same ``collective`` and ``group``."""

    collective: str = ""
    """Empty where no collective is waited for."""
    group: str = ""
    """torch's name of the process group, the same on all its ranks."""
    axis: str = ""
    """Of the mesh, ``"world"`` for all ranks."""
    ranks: tuple[int, ...] = ()
    """Of the group."""
    layer: str = ""
    """Name of the unit or of the module that is run, as in ``named_modules``."""
    phase: str = ""
    """``forward``, ``backward``, or ``recompute``: forward inside of a backward pass."""
    line: str = ""
    """The innermost line of the user's code, else of any code."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        return cls(**values | {"ranks": tuple(values["ranks"])})

    def in_words(self) -> str:
        """One line."""
        if not self.collective:
            place = f" ({self.phase} of {self.layer})" if self.layer else ""
            return f"in no collective: {self.line}{place}"
        parts = [self.collective]
        if self.axis:
            carried = _AXIS_CARRIES.get(self.axis)
            parts.append(f"axis {self.axis}" + (f" ({carried})" if carried else ""))
        if self.ranks:
            parts.append(f"among {ranks_in_words(self.ranks)}")
        if self.layer or self.phase:
            parts.append(" of ".join(filter(None, (self.phase, f"layer {self.layer}" if self.layer else ""))))
        return ", ".join(parts) + (f" [{self.line}]" if self.line else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def position_of_thread(thread: int, module: nn.Module | None) -> Position:
    """Of a thread of this process by its ``ident``, as of now. ``module`` names the layers."""
    frame = sys._current_frames().get(thread)
    return _position(list(_outwards(frame)), module)


def position_of_error(traceback: TracebackType | None, module: nn.Module | None) -> Position:
    """Of an exception, where it was raised."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _position(frames[::-1], module)


class Standstill:
    """For how long a thread has stood at one instruction, and in one batch."""

    def __init__(self, thread: int) -> None:
        self._thread, self._num_moves = thread, 0
        self._at, self._since = (0, 0, 0), time.monotonic()

    def move(self) -> None:
        """It is elsewhere now: a frame cannot be told from a later one in its place."""
        self._num_moves += 1

    def seconds(self) -> float:
        """Seen when it is asked: ask often."""
        frame = sys._current_frames().get(self._thread)
        at = (self._num_moves, 0, 0) if frame is None else (self._num_moves, id(frame), frame.f_lasti)
        if at != self._at:
            self._at, self._since = at, time.monotonic()
        return time.monotonic() - self._since


_Frames = list[tuple[FrameType, int]]
"""Innermost first, each with its line."""


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _position(frames: _Frames, module: nn.Module | None) -> Position:
    collective, group, layer = _collective(frames)
    names = {} if module is None else {id(each): name for name, each in module.named_modules()}
    depth_of_module = None
    for depth, (frame, _) in enumerate(frames):
        name = names.get(id(frame.f_locals.get("self"))) if frame.f_code.co_name in ("forward", "_forward") else None
        if name is not None:
            layer, depth_of_module = layer or name, depth
            break
    depth_of_backward = next((d for d, (f, _) in enumerate(frames) if _is_backward(f)), None)
    if depth_of_backward is None:
        phase = "" if depth_of_module is None else "forward"
    else:
        is_inside = depth_of_module is not None and depth_of_module < depth_of_backward
        phase = "recompute" if is_inside else "backward"
        if not is_inside:
            layer = (_layer_in_backward(module) if not collective or not _is_of_unit(frames) else layer) or layer
    return Position(
        collective=collective,
        group="" if group is None else str(group.group_name),
        axis="" if group is None else _axis(group),
        ranks=() if group is None else tuple(dist.get_process_group_ranks(group)),
        layer=layer,
        phase=phase,
        line=_line(frames),
    )


def _collective(frames: _Frames) -> tuple[str, dist.ProcessGroup | None, str]:
    """What is waited for, among whom, and the unit it belongs to. Nothing where other code runs inside."""
    name, unit = "", ""
    group: dist.ProcessGroup | None = None
    for frame, _ in frames:
        path, function = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
        of_fsdp = _OF_FSDP.get(function) if path.endswith("_fsdp_param_group.py") else None
        if of_fsdp is not None:
            owner = frame.f_locals["self"]
            # HSDP's all-reduce among copies has been named already.
            group = group or getattr(owner, of_fsdp[1], None)
            return of_fsdp[0], group, unit_name(owner) or "the root"
        if path.endswith("torch/distributed/distributed_c10d.py"):
            if not function.startswith("_") and function != "wrapper":
                name, group = function, _group_in(frame) or group
        elif path.endswith(_OWN_COLLECTIVES):
            name, group = name or "exchange", group or _group_in(frame)
        elif "/torch/distributed/" in path:
            if "_functional_collectives" in path:
                name, group = name or function, group or _group_in(frame)
        elif not path.endswith(_PASSED_THROUGH):
            break
    if name and group is None and dist.is_initialized():
        group = dist.group.WORLD
    return name, group, unit


def _is_of_unit(frames: _Frames) -> bool:
    return any(
        frame.f_code.co_name in _OF_FSDP and frame.f_code.co_filename.endswith("_fsdp_param_group.py")
        for frame, _ in frames
    )


def _group_in(frame: FrameType) -> dist.ProcessGroup | None:
    found = frame.f_locals.get("group")
    if found is None:
        found = getattr(frame.f_locals.get("self"), "_group", None)  # a Transfer of this package
    return found if isinstance(found, dist.ProcessGroup) else None


def _axis(group: dist.ProcessGroup) -> str:
    if group is dist.group.WORLD:
        return "world"
    described = str(group.group_desc)
    return described.removeprefix("mesh_") if described.startswith("mesh_") else "hosts"


def _is_backward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_engine_run_backward"


def _layer_in_backward(module: nn.Module | None) -> str:
    """The innermost unit whose backward pass has begun and has not ended."""
    name = ""
    for each_name, each in () if module is None else module.named_modules():
        if isinstance(each, FSDPModule) and any(_is_in_backward(group) for group in fsdp_groups(each)):
            name = each_name if len(each_name) >= len(name) else name
    return name


def _is_in_backward(group: Any) -> bool:
    return bool(group._training_state.name == "PRE_BACKWARD")


def _line(frames: _Frames) -> str:
    """``train.py:21 in training_step``."""
    for frame, number in frames:
        if not _is_of_others(frame.f_code.co_filename):
            return _shown(frame, number)
    return _shown(*frames[0]) if frames else ""


def _is_of_others(path: str) -> bool:
    return _PACKAGE in path or any(part in path for part in _OF_OTHERS)


def _shown(frame: FrameType, number: int) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{number} in {frame.f_code.co_name}"


def summary_of(exception: BaseException) -> str:
    """``ValueError: loss is nan``, the first line of its words."""
    words = str(exception).strip().splitlines()
    return type(exception).__name__ + (f": {words[0]}" if words else "")


_SIGNS = (
    "connection closed", "connection reset", "connection refused", "connection was", "closed by peer", "reset by peer",
    "timed out", "timeout", "broken pipe", "socket", "aborted", "remote process exited", "nccl",
)  # fmt: skip


def is_of_collective(exception: BaseException, position: Position) -> bool:
    """Whether a collective failed because of another rank: what happened, happened elsewhere.

    An error about the arguments of a collective is this rank's own.
    """
    if isinstance(exception, dist.DistError):
        return True
    words = str(exception).lower()
    return isinstance(exception, RuntimeError) and bool(position.collective) and any(sign in words for sign in _SIGNS)


def is_timeout(words: Iterable[str]) -> bool:
    """Whether a collective waited until its timeout, from what its error says."""
    return any("timed out" in each.lower() or "timeout" in each.lower() for each in words)
