"""Which attention kernel runs: the lightest one that is installed and can do what is asked.

On a GPU a row kernel computes a segment of queries in one call, packed documents included; without one, and on a CPU,
the segment is computed in pieces that are merged. Nothing is ever as large as queries times keys.

Shapes: B batch, L queries, S keys, H query heads, G key heads, D channels of a query or key head, E channels of a value
head.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.attention_pieces import PieceKernel, piece_kernel
from lightning_moe_strategy.kernels.attention_rows import REFERENCE, RowKernel
from lightning_moe_strategy.kernels.flash_attention import NotInstalled, flash_kernel

AttentionKernelName = Literal[
    "auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "torch", "pieces", "reference"
]
"""``torch`` is the FlashAttention-2 inside torch; ``reference`` plain arithmetic on any device."""


def attention_kernel_for(
    query_BHLD: Tensor, value_BGSE: Tensor, name: AttentionKernelName = "auto", *, window: int | None = None
) -> RowKernel | PieceKernel:
    """The kernel for tensors like these; its ``name`` says which it is.

    ``auto`` takes the first of flash-attn-4, flash-attn-3, flash-attn, torch's own and the pieces that is installed and
    has no limit in the way: device, dtype, head dims, window, determinism.

    Raises:
        ValueError: a name that is unknown, or a kernel asked for by name that is not installed or cannot do this.
    """
    require_attention_kernel(name)
    if name == "reference":
        return REFERENCE
    for each in _LIMITS if name == "auto" else () if name == "pieces" else (name,):
        head_dims, reason = _head_dims(each, query_BHLD, value_BGSE, window)
        if head_dims is None:
            if name != "auto":
                raise ValueError(f"attention_kernel({name!r}) {reason}. Leave the choice to 'auto'.")
            continue
        kernel = flash_kernel(each)
        if isinstance(kernel, RowKernel):
            return _with_head_dims(kernel, head_dims)
    return piece_kernel(query_BHLD, value_BGSE)


def _with_head_dims(kernel: RowKernel, head_dims: tuple[int, int]) -> RowKernel:
    return dataclasses.replace(kernel, head_dims=lambda head_dim_qk, head_dim_v: head_dims)


def require_attention_kernel(name: AttentionKernelName) -> None:
    """ValueError for a name that is unknown, or a kernel that is not installed here."""
    if name not in get_args(AttentionKernelName):
        raise ValueError(f"attention_kernel({name!r}) must be one of {get_args(AttentionKernelName)}.")
    kernel = flash_kernel(name) if name in _LIMITS else None
    if isinstance(kernel, NotInstalled):
        raise ValueError(
            f"attention_kernel({name!r}) cannot be loaded: {kernel}. Install it, or leave the choice to 'auto'."
        )


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Of forward and backward, in FP16 and BF16."""

    capabilities: tuple[int, ...]
    """Major compute capabilities of the GPU."""
    head_dims: Callable[[int, int, int], tuple[int, int] | None]
    """Major capability, D, E -> what the kernel takes of at least that width."""
    deterministic_up_to: int = 256
    """Channels of a head whose backward pass has a fixed order."""
    windows_up_to: Callable[[int], int] = lambda major: 256
    """Major capability -> channels of a head that go with a window."""


def _equal(major: int, head_dim_qk: int, head_dim_v: int) -> tuple[int, int] | None:
    width = _multiple_of_8(max(head_dim_qk, head_dim_v))
    return (width, width) if width <= 256 else None


def _equal_or_latent(major: int, head_dim_qk: int, head_dim_v: int) -> tuple[int, int] | None:
    """(192, 128) is what keys and values expanded from DeepSeek's latents have."""
    is_latent = 128 < head_dim_qk <= 192 and 96 < head_dim_v <= 128
    return (192, 128) if is_latent else _equal(major, head_dim_qk, head_dim_v)


def _equal_latent_or_256(major: int, head_dim_qk: int, head_dim_v: int) -> tuple[int, int] | None:
    """On Blackwell nothing lies between 128 and 256 but (192, 128)."""
    dims = _equal_or_latent(major, head_dim_qk, head_dim_v)
    return (256, 256) if major != 9 and dims is not None and dims[1] > 128 else dims


def _multiple_of_8(width: int) -> int:
    return -(-width // 8) * 8


_LIMITS = {
    "flash_attention_4": _Limits(
        capabilities=(9, 10, 11),
        head_dims=_equal_latent_or_256,
        windows_up_to=lambda major: 256 if major == 9 else 192,
    ),
    "flash_attention_3": _Limits(capabilities=(9,), head_dims=_equal_or_latent, deterministic_up_to=192),
    "flash_attention_2": _Limits(capabilities=(8, 9, 10, 11, 12), head_dims=_equal),
    "torch": _Limits(capabilities=(8, 9, 10, 11, 12), head_dims=_equal),
}
"""In the order of preference; read in the sources named in ``flash_attention.py``."""


def _head_dims(name: str, query: Tensor, value: Tensor, window: int | None) -> tuple[tuple[int, int] | None, str]:
    """What the kernel takes for tensors like these, or None and why it takes none."""
    limits, major = _LIMITS[name], capability(query.device)[0]
    if major not in limits.capabilities:
        return None, f"needs a CUDA GPU of compute capability {' or '.join(map(str, limits.capabilities))}.x"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return None, f"computes in FP16 and BF16, and the query is {query.dtype}"
    head_dims = limits.head_dims(major, query.shape[-1], value.shape[-1])
    shown = f"heads of {query.shape[-1]} and {value.shape[-1]} channels"
    if head_dims is None:
        return None, f"has no {shown}: at most 256"
    if window is not None and max(head_dims) > limits.windows_up_to(major):
        return None, f"has no window({window}) with {shown}"
    if torch.are_deterministic_algorithms_enabled() and max(head_dims) > limits.deterministic_up_to:
        return None, f"is not deterministic with {shown}"
    return head_dims, ""


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, (0, 0) for what is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)
