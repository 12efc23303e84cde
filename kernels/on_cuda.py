"""Which implementation of a kernel runs: Triton's for tensors on a GPU, plain torch's for all others.

A kernel is written twice, under one name and with one signature. The torch function says what is computed, is the
reference of the tests and runs on a CPU; the Triton one is its fast form, in a ``triton_*.py`` file beside it.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its kernels in Python, on CPU tensors. Triton reads the variable when a kernel is defined, so do we."""


def triton_on_cuda(
    module: str, *, dtypes: tuple[torch.dtype, ...] | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate the torch reference: on CUDA the function of the same name in ``kernels/<module>.py`` runs instead.

    The first argument decides: a plain CUDA tensor of one of ``dtypes`` (None: any), with Triton installed. Fake
    tensors and code that is being compiled keep the reference, which is ``function.__wrapped__``.
    """

    def decorate(reference: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(reference)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            x = args[0]
            if not isinstance(x, Tensor) or not _takes_triton(x, dtypes):
                return reference(*args, **kwargs)
            # Triton launches on the current device, wherever the tensors are. -1, the CPU, changes nothing.
            with torch.cuda.device(x.get_device()):
                result: Result = _kernel(module, reference.__name__)(*args, **kwargs)
            return result

        return run

    return decorate


def _takes_triton(x: Tensor, dtypes: tuple[torch.dtype, ...] | None) -> bool:
    if type(x) not in (Tensor, nn.Parameter) or torch.compiler.is_compiling():
        return False
    return (x.is_cuda or IS_INTERPRETED) and (dtypes is None or x.dtype in dtypes) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel(module: str, name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(importlib.import_module(f"lightning_moe_strategy.kernels.{module}"), name)
    return kernel
