"""Every private name of torch the package touches, each with the version it was seen in."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def in_backward() -> bool:
    """True while autograd runs a backward pass, so inside a recompute. Seen in torch 2.11-2.13."""
    return bool(torch._C._current_graph_task_id() != -1)


def saved_tensors_hook() -> Callable[..., Any] | None:
    """The hook that gets what autograd saves now; None when it is simply kept. Seen in torch 2.11-2.13."""
    hooks: tuple[Callable[..., Any], ...] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def in_checkpointed_region() -> bool:
    """True where non-reentrant activation checkpointing drops what is saved, or just made it again."""
    return getattr(saved_tensors_hook(), "__module__", None) == "torch.utils.checkpoint"


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of one unit: a list in torch 2.13, one or none in 2.11."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_unsharded(module: FSDPModule) -> bool:
    """Whether a unit's full parameters are in memory now. Seen in torch 2.11-2.13."""
    return any(group.is_unsharded for group in fsdp_groups(module))


def initialize_fsdp_root(root: FSDPModule) -> None:
    """Make ``root`` the root of all units below it, whichever runs first. Seen in torch 2.11-2.13."""
    state: Any = root._get_fsdp_state()
    state._lazy_init()


def set_asynchronous_unshard(root: FSDPModule, enable: bool) -> None:
    """Issue all-gathers as asynchronous work: what gloo needs to overlap. Seen in torch 2.11-2.13."""
    root._set_unshard_async_op(enable)


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor, strided sharding included. Seen in torch 2.11-2.13."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give a process group its timeout; a mesh makes its groups with the default. Seen in torch 2.11-2.13."""
    if dist.get_backend(group) != "fake":
        _set_pg_timeout(timeout, group)
