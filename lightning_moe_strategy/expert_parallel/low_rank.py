"""LoRA of PEFT on stacked experts (``LoraConfig(target_parameters=[...])``): a rank adapts the experts it computes.

PEFT wraps the experts module, once per parameter, and for a forward replaces the parameter by its sum with a product
of two thin matrices, for all experts. Here the sum is formed where this rank's parameters are looked up, for its own
experts. The thin matrices are those of all experts on every rank, dense parameters of the block like any adapter.

Shapes: E experts in all, L experts of this rank, R rank of the adapter, I and O inputs and outputs of a projection.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy.expert_parallel.experts import adds_to_parameter

_BASE = "base_layer"


def adapt_low_rank(root: nn.Module, experts: Mapping[str, nn.Module], ep_rank: int) -> None:
    """Let the wrappers of PEFT around attached experts add their product to this rank's experts only. In place.

    ``ep_rank`` holds the experts from ``ep_rank * L`` on. ValueError for a parameter that has no matrix per expert.
    """
    for name, module in experts.items():
        while name.rpartition(".")[2] == _BASE:
            name = name.rpartition(".")[0]
            wrapper: Any = root.get_submodule(name)
            if not all(hasattr(wrapper, part) for part in ("lora_A", "lora_B", "parameter_name", "_activate_lora")):
                continue
            if getattr(module, wrapper.parameter_name).dim() != 3:
                raise ValueError(
                    f"{name} adapts {wrapper.parameter_name} {list(getattr(module, wrapper.parameter_name).shape)} by "
                    "LoRA; of experts only parameters [experts, rows, columns] can be. Leave it out of "
                    "LoraConfig(target_parameters=...)."
                )
            # PEFT's own, of 0.21; what it does when adapters are off or merged stays PEFT's.
            wrapper._activate_lora = MethodType(partial(_add_while_active, ep_rank), wrapper)


@contextmanager
def _add_while_active(ep_rank: int, wrapper: Any, active_adapters: Sequence[str]) -> Generator[None, None, None]:
    experts: nn.Module = wrapper.get_base_layer()
    adapters = [adapter for adapter in active_adapters if adapter in wrapper.lora_A]
    if not adapters:
        yield
        return
    with adds_to_parameter(experts, wrapper.parameter_name, partial(_adapted, wrapper, adapters, ep_rank)):
        yield


def _adapted(wrapper: Any, adapters: Sequence[str], ep_rank: int, local: Tensor) -> Tensor:
    """``local`` [L, O, I], or [L, I, O] where that is how the experts keep it, plus what the adapters add."""
    num_local = local.shape[0]
    first = ep_rank * num_local
    order = "eoi" if wrapper._did_swap_in_out_features else "eio"
    for adapter in adapters:
        down_RI, up_OR = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        down_LRI = down_RI.reshape(wrapper.num_experts, -1, down_RI.shape[1])[first : first + num_local]
        up_ORL = up_OR.reshape(up_OR.shape[0], -1, wrapper.num_experts)[..., first : first + num_local]
        product = torch.einsum(f"ore,eri->{order}", up_ORL, down_LRI) * wrapper.scaling[adapter]
        local = local + product.to(local.dtype)
    return local
