"""What random numbers come next in this process: torch on CPU and GPU, Python's ``random``, NumPy."""

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NAMES = ("torch", "cuda", "python", "numpy")


@dataclass(frozen=True)
class RandomState:
    """Of all generators that are not somebody's own; 12 KB."""

    torch: Tensor
    cuda: Tensor | None
    """Of the rank's GPU; None without one."""
    python: Any
    numpy: Any

    def as_plain(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and tuples: what ``torch.load(weights_only=True)`` reads."""
        kind, keys, *rest = self.numpy
        words = torch.from_numpy(keys.astype(np.int64))
        version, of_python, gauss = self.python
        python = [version, torch.tensor(of_python), gauss]  # 625 numbers one by one take longer than all else
        return dict(zip(_NAMES, (self.torch, self.cuda, python, [str(kind), words, *rest]), strict=True))

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> "RandomState":
        version, of_python, gauss = plain["python"]
        kind, keys, *rest = plain["numpy"]
        numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        return RandomState(plain["torch"], plain["cuda"], (version, tuple(of_python.tolist()), gauss), numpy)


def random_state(device: torch.device | None = None) -> RandomState:
    """As it is now; of the generator of ``device`` too, if that is a GPU."""
    cuda = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    return RandomState(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())


def set_random_state(state: RandomState, device: torch.device | None = None) -> None:
    """A GPU's is left as it is where ``state`` was taken without one."""
    torch.set_rng_state(state.torch)
    if state.cuda is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.cuda, device)
    random.setstate(state.python)
    np.random.set_state(state.numpy)


@contextmanager
def random_state_of(state: RandomState) -> Generator[None, None, None]:
    """Inside, numbers on the CPU come from ``state``; after it they go on as if nothing had been drawn."""
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)


def derived_state(state: RandomState, number: int) -> RandomState:
    """Another stream for each ``number``, the same whenever it is asked for.

    Its seeds are SHA-256 of ``state`` and the number.
    """
    digest = hashlib.sha256(state.torch.numpy().tobytes() + number.to_bytes(8, "big")).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits
    cuda = None
    if state.cuda is not None:
        # The layout of a GPU's state: seed and offset, 8 bytes each.
        cuda = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8)
    words = np.random.RandomState(np.frombuffer(digest, dtype=np.uint32)).get_state()
    return RandomState(torch.Generator().manual_seed(seed).get_state(), cuda, random.Random(seed).getstate(), words)
