"""Give values to a model that was built on the meta device: the same numbers for every layout.

Each module draws its own full tensors on the CPU from a generator seeded by its name and keeps this rank's part,
so neither the degrees nor the device change a value. Experts are drawn one at a time: no rank ever holds a layer's
experts whole.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import local_slices
from lightning_moe_strategy.sharding import local_tensor

Initializer = Callable[[], object]


def materialize(
    root: nn.Module,
    device: torch.device,
    *,
    seed: int,
    experts: Mapping[str, nn.Module],
    values_will_be_loaded: bool = False,
    given: Collection[str] = (),
) -> None:
    """Move ``root`` to ``device`` and initialise every tensor that was on the meta device.

    A module is initialised by its Hugging Face model's ``_init_weights`` or its own ``reset_parameters``; both are
    expected to set the module's own tensors only. ``seed`` must be the same on all ranks. Modules all of whose tensors
    are ``given`` values afterwards, by their names, are not initialised.

    Raises:
        RuntimeError: a tensor has no initialiser, or its initialiser left it untouched (not when a checkpoint
            will give ``values_will_be_loaded``).
    """
    on_meta = {name: _own_meta_tensors(module) for name, module in root.named_modules()}
    on_meta = {name: own for name, own in on_meta.items() if any(f"{name}.{tensor}" not in given for tensor in own)}
    allocate(root, device)
    expert_names = {id(module): name for name, module in experts.items()}
    untouched: list[str] = []
    for name, module in root.named_modules():
        if name not in on_meta:
            continue
        initialize = _initializer(root, name, module)
        if initialize is None:
            untouched += [f"{name}.{tensor} ({_class_name(module)})" for tensor in on_meta[name]]
        elif id(module) in expert_names:
            untouched += _initialize_experts(module, name, on_meta[name], initialize, seed)
        else:
            untouched += _initialize_whole(module, name, on_meta[name], initialize, seed)
    if untouched and not values_will_be_loaded:
        raise RuntimeError(
            "These tensors were built on the meta device and nothing initialises them: "
            f"{', '.join(untouched[:8])}{', ...' if len(untouched) > 8 else ''}. Give their module a "
            "reset_parameters() that sets its own parameters and buffers, build the module outside of "
            "trainer.init_module(), or resume from a checkpoint."
        )


def allocate(root: nn.Module, device: torch.device) -> None:
    """Move ``root`` to ``device``; what was on the meta device has no values there yet. Tied weights stay tied."""
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    root._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)
    )
    for (first, first_name), *others in tied.values():
        for module, name in others:
            _bind(module, name, _tensor(first, first_name))


def _initialize_whole(
    module: nn.Module, name: str, tensors: list[str], initialize: Initializer, seed: int
) -> list[str]:
    drawn = _draw(module, tensors, initialize, seed=seed, name=name)
    for tensor in tensors:
        _copy_own_part(drawn[tensor], _tensor(module, tensor))
    return [f"{name}.{tensor}" for tensor in tensors if _is_untouched(drawn[tensor])]


def _initialize_experts(
    module: nn.Module, name: str, tensors: list[str], initialize: Initializer, seed: int
) -> list[str]:
    """One expert after another: the module sees itself with a single expert each time."""
    untouched: set[str] = set()
    num_experts = module.num_experts
    for expert in _owned_experts(module, tensors):
        module.num_experts = 1  # type: ignore[assignment]
        try:
            drawn = _draw(module, tensors, initialize, seed=seed, name=f"{name}:{expert}", rows=1)
        finally:
            module.num_experts = num_experts
        for tensor in tensors:
            _copy_own_part(drawn[tensor], _tensor(module, tensor), row=expert)
        untouched |= {f"{name}.{tensor}" for tensor in tensors if _is_untouched(drawn[tensor])}
    return sorted(untouched)


def _initializer(root: nn.Module, name: str, module: nn.Module) -> Initializer | None:
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        ancestor = root.get_submodule(".".join(parts[:length]))
        is_adapter = hasattr(ancestor, "reset_lora_parameters") and parts[length : length + 1] != ["base_layer"]
        if is_adapter:
            return None  # one of PEFT starts as its wrapper says, often at zero, and not as a plain layer
        if hasattr(ancestor, "_init_weights") and hasattr(ancestor, "config"):
            return lambda: ancestor._init_weights(module)  # type: ignore[operator]
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _draw(
    module: nn.Module,
    tensors: list[str],
    initialize: Initializer,
    *,
    seed: int,
    name: str,
    rows: int | None = None,
) -> dict[str, Tensor]:
    """What ``initialize`` writes into whole CPU tensors put in place of the module's shards for a moment."""
    kept = {tensor: _tensor(module, tensor) for tensor in tensors}
    for tensor, own in kept.items():
        shape = own.shape if rows is None else (rows, *own.shape[1:])
        whole = torch.full(shape, _sentinel(own.dtype), dtype=own.dtype, device="cpu")
        _replace(module, tensor, whole, requires_grad=own.requires_grad)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            initialize()
        # Read back by name: an initialiser may bind a new buffer instead of writing into the old one.
        return {tensor: _tensor(module, tensor).detach() for tensor in tensors}
    finally:
        for tensor, own in kept.items():
            _bind(module, tensor, own)


def _copy_own_part(full: Tensor, own: Tensor, row: int | None = None) -> None:
    slices = _own_slices(own)
    with torch.no_grad():
        if row is None:
            local_tensor(own).copy_(full[slices])
        elif slices[0].start <= row < slices[0].stop:
            local_tensor(own)[row - slices[0].start].copy_(full[0][slices[1:]])


def _owned_experts(module: nn.Module, tensors: list[str]) -> list[int]:
    rows = (_own_slices(_tensor(module, tensor))[0] for tensor in tensors)
    return sorted({expert for owned in rows for expert in range(owned.start, owned.stop)})


def _own_slices(tensor: Tensor) -> tuple[slice, ...]:
    if isinstance(tensor, DTensor):
        return local_slices(tensor)
    return tuple(slice(0, length) for length in tensor.shape)


def _own_meta_tensors(module: nn.Module) -> list[str]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta]


def _tensor(module: nn.Module, name: str) -> Tensor:
    tensor = module._parameters[name] if _is_parameter(module, name) else module._buffers[name]
    assert tensor is not None
    return tensor


def _replace(module: nn.Module, name: str, tensor: Tensor, *, requires_grad: bool) -> None:
    is_parameter = _is_parameter(module, name)
    _bind(module, name, nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor)


def _bind(module: nn.Module, name: str, tensor: Tensor) -> None:
    # Past nn.Module.__setattr__: a shard is put back as the very object FSDP knows.
    if _is_parameter(module, name):
        module._parameters[name] = tensor  # type: ignore[assignment]
    else:
        module._buffers[name] = tensor


def _is_parameter(module: nn.Module, name: str) -> bool:
    return name in module._parameters


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_untouched(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor).any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")
