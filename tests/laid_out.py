"""A small model and its optimizer on any layout, without a Trainer: trained a little, saved, loaded, gathered whole."""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from lightning_moe_strategy import Muon, muon_groups
from lightning_moe_strategy.checkpoint.load import Loaded, load
from lightning_moe_strategy.checkpoint.save import save_directory
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.mesh import ParallelDims, build_dense_meshes
from lightning_moe_strategy.placement import Placement, common_num_experts, place
from lightning_moe_strategy.saving import Saving
from lightning_moe_strategy.sharding import local_tensor
from tests.modules import VOCABULARY, PlainDecoder
from tests.parity import whole

Tensors = dict[str, Tensor]
MINUTE = timedelta(minutes=1)
ABOUT: dict[str, Any] = dict(versions={"torch": torch.__version__})


def placed(degrees: dict[str, int], **decoder: Any) -> nn.Module:
    """A decoder whose values are drawn anew, on this rank's share of ``degrees``."""
    world = dist.get_world_size()
    num_words = decoder.pop("num_words", VOCABULARY)
    model = PlainDecoder(**{"num_layers": 1, **decoder})
    if num_words != VOCABULARY:
        width = model.embedding.embedding_dim
        model.embedding, model.head = nn.Embedding(num_words, width), nn.Linear(width, num_words, bias=False)
    dims = ParallelDims(**degrees).resolve(world, local_world_size=world, num_experts=None)
    dense = build_dense_meshes(dims, "cpu", MINUTE)
    placement = Placement(dims=dims, dense=dense, context_parallel=ContextParallel(dense.cp_group, None))
    placement.experts = find_experts(model)
    placement.dims = ParallelDims(**degrees).resolve(
        world, local_world_size=world, num_experts=common_num_experts(placement.experts)
    )
    place(model, placement, device=torch.device("cpu"), timeout=MINUTE, compute_dtype=None, init_seed=3)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model, packed={"*.qkv.weight": 3}), lr=0.02, adamw_lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without any state."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """With gradients that depend on the name and the number alone; ``norm.bias`` never has one."""
    for name, parameter in model.named_parameters():
        if name == "norm.bias":
            continue
        gradient = drawn(f"{name} {number}", parameter.shape)
        if isinstance(parameter.data, Tensor) and hasattr(parameter, "device_mesh"):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            local = local_tensor(gradient)
            assert local.shape == local_tensor(parameter).shape
        parameter.grad = gradient
    optimizer.step()


def drawn(name: str, shape: torch.Size) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(path: str, model: nn.Module, *optimizers: torch.optim.Optimizer, **rest: Any) -> None:
    """As the strategy does, every rank."""
    group = dist.group.WORLD
    assert group is not None
    saving: Any = _Saver(model)
    sharded = {"state_dict": Saving.lightning_module_state_dict(saving)}
    sharded |= {f"optimizer_{i}": Saving.optimizer_state(saving, o) for i, o in enumerate(optimizers)}
    save_directory(path, sharded, rest, layout={"world_size": group.size()}, **ABOUT, group=group)


class _Saver:
    """As much of a strategy as its methods ask for."""

    _save_distributed_checkpoint = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def load_again(path: str, model: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> Loaded:
    group = dist.group.WORLD
    return load(path, model, optimizers, group=group, **options)


def gathered(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Tensors:
    """Whole tensors by name, those of the optimizers too."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: whole(tensor.detach()).clone() for name, tensor in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"{index}.{names[parameter]}.{key}"] = whole(value).clone()
    return found


def saved_on(degrees: dict[str, int], path: str, make_optimizer: Callable[..., Any], decoder: dict[str, Any]) -> Any:
    """Train two steps and save. Whole tensors, as one process has them after the same steps."""
    model = placed(degrees, **decoder)
    optimizer = make_optimizer(model)
    for number in range(2):
        step(model, optimizer, number)
    save(path, model, optimizer, epoch=1)
    return gathered(model, optimizer)


def loaded_on(degrees: dict[str, int], path: str, make_optimizer: Callable[..., Any], decoder: dict[str, Any]) -> Any:
    """Whole tensors after loading, after one step more, and of this rank the bytes that it read and that it holds."""
    model = placed(degrees, **decoder)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    optimizer = make_optimizer(model)
    loaded = load_again(path, model, optimizer)
    tensors = gathered(model, optimizer)
    held = [*model.state_dict().values()]
    held += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    num_bytes = sum(local_tensor(t).numel() * t.dtype.itemsize for t in held)
    step(model, optimizer, 2)
    return tensors, gathered(model, optimizer), (loaded.num_bytes_read, num_bytes), loaded.rest
