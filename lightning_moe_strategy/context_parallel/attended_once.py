"""Where attention over the cp ranks lets somebody keep what it has computed, and hand it over in a second pass.

The modes of a recompute see operations one by one, and attention over gathered keys is many: pieces, merges, and keys
and values that are expanded for them. What the backward pass needs of all that is the output and its log-sum-exp.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Attend = Callable[[], tuple[Tensor, Tensor]]
"""Computes the output and its log-sum-exp."""

_once: ContextVar[Callable[[Attend], tuple[Tensor, Tensor]] | None] = ContextVar("attended_once", default=None)


def attended_once(attend: Attend) -> tuple[Tensor, Tensor]:
    """``attend()``, or what it has returned in the first pass through the block that calls it."""
    once = _once.get()
    return attend() if once is None else once(attend)


@contextmanager
def attending_by(once: Callable[[Attend], tuple[Tensor, Tensor]] | None) -> Generator[None, None, None]:
    """``attended_once`` is ``once`` inside, in this thread; None computes."""
    outer = _once.set(once)
    try:
        yield
    finally:
        _once.reset(outer)
