"""Every private name of torch the package touches, each with the version it was seen in."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only


class OperationMode(TorchDispatchMode):
    """Sees every operation on tensors below autograd, inside custom functions and hooks too. Seen in torch 2.11-2.13.

    A subclass overrides ``run``. One that ``leaves_graphs_alone`` lets ``torch.compile`` compile what it sees, and then
    sees the operations that compiled code calls, without those it has fused.
    """

    leaves_graphs_alone = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return cls.leaves_graphs_alone

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one operation; ``operation(*args, **kwargs)`` computes it."""
        return operation(*args, **kwargs)


def allow_graphs(num_graphs: int) -> None:
    """Let ``torch.compile`` make as many graphs of one function; beyond its limit it stops compiling. Seen in torch
    2.11-2.13.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, num_graphs)


def unsupported_in_graph() -> tuple[type[Exception], ...]:
    """What ``torch.compile(fullgraph=True)`` raises where there is no whole graph. Seen in torch 2.11-2.13."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException,)


def copy_tensors(tree: Any) -> Any:
    """A copy of every tensor in nested tuples and lists. Seen in torch 2.11-2.13."""
    return tree_map_only(Tensor, torch.clone, tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts. Seen in torch 2.11-2.13."""
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


@contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Generator[None, None, None]:
    """Call ``resized`` after every change of a storage's size: how FSDP frees gathered weights. Seen in 2.11-2.13."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def watched_units(around: Callable[[str, Any], AbstractContextManager[None]]) -> Generator[None, None, None]:
    """Run FSDP's steps of every unit inside ``around(step, group)``. Seen in torch 2.11-2.13.

    Steps: ``unshard`` issues a gather, ``wait_for_unshard`` copies it out, ``post_backward`` reduces gradients.
    """
    steps = ("unshard", "wait_for_unshard", "post_backward")
    originals = {step: getattr(FSDPParamGroup, step) for step in steps}

    def watched(step: str) -> Callable[..., Any]:
        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            with around(step, group):
                return originals[step](group, *args, **kwargs)

        return run

    for step in steps:
        setattr(FSDPParamGroup, step, watched(step))
    try:
        yield
    finally:
        for step, original in originals.items():
            setattr(FSDPParamGroup, step, original)


def whole_gradients(group: Any) -> list[Tensor]:
    """A unit's gradients before they are reduced. Seen in torch 2.11-2.13."""
    found: list[Tensor | None] = []
    for parameter in group.fsdp_params:
        found.append(parameter.unsharded_accumulated_grad)
        found.append(parameter.unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None)
    return [gradient for gradient in found if gradient is not None]


def sharded_gradients(group: Any) -> list[Tensor]:
    """A unit's gradients after they were reduced. Seen in torch 2.11-2.13."""
    gradients = (parameter.sharded_param.grad for parameter in group.fsdp_params)
    return [gradient for gradient in gradients if gradient is not None]


def unit_name(group: Any) -> str:
    """The unit's name below its root. Seen in torch 2.11-2.13."""
    return group._module_fqn or ""


def pending_gather(group: Any) -> Literal["none", "freed", "kept"]:
    """Whether a unit's gather is waited for next. ``kept``: its buffer lives until the next unit is copied out of its
    own, as FSDP does in a forward pass with streams. Seen in torch 2.11-2.13.
    """
    result = group._all_gather_result
    if result is None:
        return "none"
    is_forward = group._training_state.name == "FORWARD"
    is_kept = is_forward and result.all_gather_work is None and group._all_gather_process_group.size() > 1
    return "kept" if is_kept else "freed"


def max_held_reductions(group: Any) -> int:
    """Inputs of reduce-scatters that a backward pass holds at a time: 1, settable from torch 2.13 on."""
    return int(getattr(group.comm_ctx, "reduce_scatter_max_input_buffers", 1))


def group_of_collective(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among the arguments of a ``c10d`` operation. Seen in torch 2.11-2.13."""
    boxed = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. Seen in torch 2.11-2.13."""
    resolve: Callable[[Any], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def is_asynchronous(args: tuple[Any, ...]) -> bool:
    """Whether a ``c10d`` operation with these arguments is waited for later: it is unless it says no, and what is said
    by default is left out. Seen in torch 2.11-2.13.
    """
    return not any(argument is False for argument in args)


@contextmanager
def fake_world(world_size: int, rank: int) -> Generator[None, None, None]:
    """A process group of ``world_size`` ranks that are not there: collectives return at once. Seen in 2.11-2.13."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_dtensor_plans()


def forget_dtensor_plans() -> None:
    """Empty DTensor's caches. Their keys hold meshes, equal for every rank and every process group, and their values
    shapes and groups of the rank that came first. Seen in torch 2.11-2.13.
    """
    from torch.distributed.tensor import _redistribute, debug

    # The compiled cache is younger than the Python one.
    clear = getattr(debug, "_clear_sharding_prop_cache", None) or debug._clear_python_sharding_prop_cache
    clear()
    for function in vars(_redistribute).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors made inside have a shape and no values. Seen in torch 2.11-2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values() -> tuple[type[Exception], ...]:
    """What is raised when an operation needs the values of a fake tensor. Seen in torch 2.11-2.13."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )


def random_state(generator: torch.Generator) -> Tensor:
    """A generator's state, also among fake tensors, where ``get_state`` has no values. Seen in torch 2.11-2.13."""
    with _disable_current_modes():
        return generator.get_state()


def is_same_state(some: Tensor, other: Tensor) -> bool:
    """Whether two states of a generator are equal, also among fake tensors. Seen in torch 2.11-2.13."""
    with _disable_current_modes():
        return torch.equal(some, other)


def take_calls(module: nn.Module, taker: Callable[..., Any]) -> None:
    """Have ``taker`` called in place of ``module``, hooks and all; `call_module` undoes it. Seen in 2.11-2.13.

    In place, and of this instance alone.
    """
    module.__dict__["_call_impl"] = taker


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's hooks and its forward, whoever takes its calls. Seen in torch 2.11-2.13."""
    return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def num_changes(tensor: Tensor) -> int:
    """How often a tensor, or a view of it, was changed in place. Seen in torch 2.11-2.13."""
    return tensor._version


def kept_alias(tensor: Tensor) -> Tensor:
    """The same numbers without a graph; `num_changes` are those of ``tensor``, inside an `OperationMode` too. Seen in
    torch 2.11-2.13.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def memory_of(tensor: Tensor) -> int:
    """Equal for tensors in the same memory, also fake ones. Seen in torch 2.11-2.13."""
    where: int = tensor.untyped_storage()._cdata
    return where


def name_of_operation(operation: Any) -> str:
    """``aten::mm`` of any overload; empty for an operator that takes functions. Seen in torch 2.11-2.13."""
    schema = getattr(operation, "_schema", None)
    return "" if schema is None else schema.name


def writes(operation: Any) -> bool:
    """Whether an operation says that it changes an argument. Seen in torch 2.11-2.13."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and schema.is_mutable


def is_same_memory(some: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory, also fake ones. Seen in torch 2.11-2.13."""
    where = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()) for x in (some, other)]
    return where[0] == where[1]


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


def unseen_by_function_modes() -> AbstractContextManager[None]:
    """What is called inside does not reach a ``TorchFunctionMode`` around it. Seen in torch 2.11-2.13."""
    without: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return without


def assert_later(condition: Tensor, message: str) -> None:
    """Fail when a 0-dim condition is false, without a host sync on a GPU. Seen in torch 2.11-2.13."""
    torch._assert_async(condition, message)


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


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long collectives of a group on such a device wait. Seen in torch 2.11-2.13."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def symmetric_memory(
    num_bytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[list[Tensor], list[int], object]:
    """Zeros on every rank's GPU that all ranks of a group can write to: uint8 tensors in rank order, where each begins,
    and what keeps them; every rank calls it. Seen in torch 2.11-2.13.
    """
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)  # from the rendezvous on, others may write
    handle = _symmetric_memory.rendezvous(own, group)
    memories = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
    return memories, list(handle.buffer_ptrs), (own, handle)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is one of ``torch.compile`` or had its ``compile()`` called. Seen in torch 2.11-2.13."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def let_anomaly_detection_see_shards() -> None:
    """Let ``torch.autograd.detect_anomaly`` ask sharded gradients for NaN: all their ranks hear it, by an all-reduce of
    one number. Seen in torch 2.11-2.13.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def any_shard(x: Tensor) -> list[tuple[list[Any], list[Any]]]:
        return [([Replicate()], [Replicate()]), *(([Partial("max")], [Shard(dim)]) for dim in range(x.ndim))]

    register_sharding(torch.ops.aten._is_any_true.default)(any_shard)


def act_as_worker(number: int) -> None:
    """Number and seeds of this worker of a DataLoader become those of worker ``number``. Seen in torch 2.11-2.13."""
    import random

    import numpy as np
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils.worker import _generate_state

    info: Any = get_worker_info()
    base_seed = info.seed - info.id
    object.__setattr__(info, "id", number)  # what is frozen for everyone else
    object.__setattr__(info, "seed", base_seed + number)
    random.seed(info.seed)
    torch.manual_seed(info.seed)
    np.random.seed(_generate_state(base_seed, number))  # type: ignore[no-untyped-call]
