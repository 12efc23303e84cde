"""Tensors that lie on the ranks as another does, made without asking DTensor for shapes."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_strategy.sharding import local_tensor


def like_shards(tensor: Tensor, make: Callable[[Tensor], Tensor] = torch.zeros_like) -> Tensor:
    """``make`` of this rank's part, as a tensor that is whole over the same ranks: checkpoints reshard it."""
    local = make(local_tensor(tensor.detach()))
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
