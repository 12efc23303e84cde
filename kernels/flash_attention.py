"""Row kernels of FlashAttention: the packages flash-attn-4, flash-attn-3 and flash-attn, and the one in torch.

Called are the functions below the packages' autograd, because the log-sum-exp of a row and its backward pass are kept
apart here. Read in flash-attn-4 4.0.0b36, flash-attn-3 of 2026-08-15, flash-attn 2.8.4 and torch 2.13.

The right end of the window is always 0, which is what causal means. Left out, FlashAttention-2 takes a call whose
documents have one query each for decoding, and orders the log-sum-exp by key head.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.kernels.attention_pieces import OfRows
from lightning_moe_strategy.kernels.attention_rows import RowKernel, Rows


class NotInstalled(Exception):
    """A package is not there, cannot be loaded, or is too old."""


@lru_cache
def flash_kernel(name: str) -> RowKernel | NotInstalled:
    """``flash_attention_4``, ``_3``, ``_2`` or ``torch``, or why there is none."""
    if name == "torch":
        return RowKernel(name, _torch_forward, _torch_backward)
    path, forward, backward, required = _PACKAGES[name]
    try:
        module = import_module(path)
        require(module, required)
    except (ImportError, OSError) as error:  # OSError: a shared library that is not there
        return NotInstalled(f"{path}: {error}")
    except NotInstalled as error:
        return error
    return RowKernel(name, partial(forward, module), partial(backward, module))


def require(module: ModuleType, required: dict[str, tuple[str, ...]]) -> None:
    """NotInstalled where a function lacks a parameter. A torch custom op hides its own and has always had them."""
    for function, names in required.items():
        if not hasattr(module, function):
            raise NotInstalled(f"{module.__name__} has no {function}")
        parameters = inspect.signature(getattr(module, function)).parameters
        is_custom_op = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        missing = [] if is_custom_op else [each for each in names if each not in parameters]
        if missing:
            raise NotInstalled(f"{function} of {module.__name__} does not take {missing[0]}")


def _documents(rows: Rows, device: torch.device) -> dict[str, Any]:
    cu_queries, cu_keys = rows.bounds(device)
    most_queries, most_keys = rows.longest
    return {
        "cu_seqlens_q": cu_queries,
        "cu_seqlens_k": cu_keys,
        "max_seqlen_q": most_queries,
        "max_seqlen_k": most_keys,
    }


def _window(rows: Rows, unbounded: int | None) -> dict[str, Any]:
    left = unbounded if rows.window is None else rows.window - 1
    return {"window_size_left": left, "window_size_right": 0}


def _v4_forward(
    module: ModuleType, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = module._flash_attn_fwd(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
        **_documents(rows, query.device),
        **_window(rows, None),
    )
    return out, lse


def _v4_backward(
    module: ModuleType, of_rows: OfRows, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    grad_query, grad_key, grad_value = module._flash_attn_bwd(
        query,
        key,
        value,
        out,
        grad_out,
        lse,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_documents(rows, query.device),
        **_window(rows, None),
    )
    return grad_query, grad_key, grad_value


def _v3_forward(
    module: ModuleType, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = module._flash_attn_forward(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=True,
        **_documents(rows, query.device),
        **_window(rows, -1),
    )
    return out, lse


def _v3_backward(
    module: ModuleType, of_rows: OfRows, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    grads = _empty_gradients(query, key, value)
    module._flash_attn_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        dq=grads[0],
        dk=grads[1],
        dv=grads[2],
        softmax_scale=scale,
        is_causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_documents(rows, query.device),
        **_window(rows, -1),
    )
    return grads


def _v2_forward(
    module: ModuleType, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = module._flash_attn_varlen_forward(
        query,
        key,
        value,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=True,
        **_documents(rows, query.device),
        **_window(rows, -1),
    )
    return out, lse


def _v2_backward(
    module: ModuleType, of_rows: OfRows, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    grads = _empty_gradients(query, key, value)
    module._flash_attn_varlen_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        dq=grads[0],
        dk=grads[1],
        dv=grads[2],
        dropout_p=0.0,
        softmax_scale=scale,
        causal=True,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_documents(rows, query.device),
        **_window(rows, -1),
    )
    return grads


def _torch_forward(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *_documents(rows, query.device).values(), 0.0, True, False, scale=scale, **_window(rows, -1)
    )
    return out, lse


def _torch_backward(
    of_rows: OfRows, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    # The state of the dropout generator: never read, because nothing is dropped, but the schema asks for it.
    unread = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    documents = _documents(rows, query.device).values()
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, *documents, 0.0, True, *unread, scale=scale, **_window(rows, -1)
    )
    return grad_query, grad_key, grad_value


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    return grad_query, grad_key, grad_value


_WINDOW = ("window_size_left", "window_size_right")
_PACKAGES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], dict[str, tuple[str, ...]]]] = {
    "flash_attention_4": (
        "flash_attn.cute.interface",
        _v4_forward,
        _v4_backward,
        {
            "_flash_attn_fwd": ("cu_seqlens_q", "max_seqlen_q", "return_lse", *_WINDOW),
            "_flash_attn_bwd": ("cu_seqlens_q", "max_seqlen_q", "deterministic", *_WINDOW),
        },
    ),
    "flash_attention_3": (
        "flash_attn_interface",
        _v3_forward,
        _v3_backward,
        {"_flash_attn_forward": _WINDOW, "_flash_attn_backward": ("is_causal", "deterministic", *_WINDOW)},
    ),
    "flash_attention_2": (
        "flash_attn.flash_attn_interface",
        _v2_forward,
        _v2_backward,
        {"_flash_attn_varlen_forward": _WINDOW, "_flash_attn_varlen_backward": ("deterministic", *_WINDOW)},
    ),
}
"""Module, forward, backward, and what its functions must take: all three since 2025-07, flash-attn since 2.7."""
