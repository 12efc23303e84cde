"""The collectives the package issues itself; FSDP issues its own.

Every rank of a group calls them in the same order, whatever its data: there is no rank ``if`` around any of them.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TwoStepGroup:
    """Ranks that exchange in two steps: between NVLink domains and inside of one.

    What crosses RDMA is then each rank's own piece and nothing twice. Seed, "What If There's No NVL72?": of a whole
    that is gathered, (inter - 1) / (inter * intra) cross RDMA and (intra - 1) / intra NVLink.
    """

    whole: dist.ProcessGroup
    """All of them; rank ``i * intra.size() + j`` is the j-th of domain i."""
    inter: dist.ProcessGroup
    """The j-th ranks of all domains."""
    intra: dist.ProcessGroup
    """The ranks of this domain."""

    def rank(self) -> int:
        return self.whole.rank()

    def size(self) -> int:
        return self.whole.size()

    @property
    def delivery_order(self) -> tuple[int, ...]:
        """Ranks in the order in which ``all_gather_in_steps`` delivers their pieces."""
        domains, in_domain = self.inter.size(), self.intra.size()
        return tuple(i * in_domain + j for j in range(in_domain) for i in range(domains))


AnyGroup = dist.ProcessGroup | TwoStepGroup


def all_gather_in_steps(x: Tensor, group: AnyGroup) -> Tensor:
    """``x`` of every rank, stacked along dim 0: over RDMA while it is small, then over NVLink. Not differentiable."""
    if not isinstance(group, TwoStepGroup):
        return all_gather_along_dim0(x, group)
    return all_gather_along_dim0(all_gather_along_dim0(x, group.inter), group.intra)


def reduce_scatter_in_steps(x: Tensor, group: AnyGroup) -> Tensor:
    """The way back, summed: NVLink first, so that RDMA carries what one rank in each domain keeps."""
    if not isinstance(group, TwoStepGroup):
        return reduce_scatter_along_dim0(x, group)
    return reduce_scatter_along_dim0(reduce_scatter_along_dim0(x, group.intra), group.inter)


class Transfer:
    """A collective on its way: others compute until somebody reads what it brings.

    One that is dropped before it was waited for ends by itself, as its group's next collectives do: an error between
    issue and wait leaves nothing behind. Each step of two needs what the one before brought. On a GPU the second is
    issued at once, on a stream of its own that waits for the first; on gloo, where only the host can wait, it is issued
    by ``wait``, so that the first alone overlaps.
    """

    def __init__(self, x: Tensor, steps: "Sequence[tuple[_Begin, dist.ProcessGroup]]") -> None:
        """``steps``: how each starts, and among whom. All ranks of a group start and wait in the same order."""
        self._steps = list(steps)
        self._then: Callable[[Tensor], Tensor] | None = None
        self.sent: Tensor | None = None
        """What the backend holds until it was waited for, where nobody else does: a simulation must not free it."""
        self._begin(x)
        while self._steps and _is_ordered_by_device(x, self._steps[0][1]):
            self._follow()

    def wait(self) -> Tensor:
        """The result, which what is issued from now on may read. Once."""
        self._finish()
        while self._steps:
            self._begin(self._result)
            self._finish()
        result, then = self._result, self._then
        del self._result, self._work, self._then, self.sent
        return result if then is None else then(result)

    def then(self, make: "Callable[[Tensor], Tensor]") -> "Transfer":
        """This transfer, whose ``wait`` returns ``make`` of what was brought."""
        self._then = make
        return self

    def _begin(self, x: Tensor) -> None:
        begin, self._group = self._steps.pop(0)
        self._result, self._work = begin(x, self._group)

    def _finish(self) -> None:
        if self._work is not None:
            with waited(self._group):
                self._work.wait()
        for observe in _observers:
            observe(self._result)

    def _follow(self) -> None:
        """Issue the next step on a stream that alone waits for the one before."""
        if not self._result.is_cuda:
            self._begin(self._result)
            return
        main, beside = torch.cuda.current_stream(), _stream_beside(self._result.device)
        with torch.cuda.stream(beside):
            if self._work is not None:
                self._work.wait()
            self._begin(self._result)
        self._result.record_stream(main)  # made for the other stream, read on this one


_Begin = Callable[[Tensor, dist.ProcessGroup], tuple[Tensor, dist.Work | None]]

_observers: list[Callable[[Tensor], None]] = []
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def observed_waits(observe: Callable[[Tensor], None]) -> Generator[None, None, None]:
    """Call ``observe`` with what a step of a ``Transfer`` brought, whenever one is waited for inside."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


Purpose = Literal["", "results", "moved experts"]
"""What is exchanged over ep, where it is not tokens on their way to their experts."""

_timers: list[Callable[[dist.ProcessGroup, str], AbstractContextManager[object]]] = []
_purposes: list[Purpose] = [""]
_UNTIMED = nullcontext()


@contextmanager
def timed_waits(
    around: Callable[[dist.ProcessGroup, str], AbstractContextManager[object]],
) -> Generator[None, None, None]:
    """Enter ``around(group, purpose)`` wherever inside this rank waits for others of a group, or, on a GPU, has the
    current stream wait for them.
    """
    _timers.append(around)
    try:
        yield
    finally:
        _timers.remove(around)


def waited(group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """To be entered around what waits for other ranks of ``group``."""
    return _timers[-1](group, _purposes[-1]) if _timers else _UNTIMED


@contextmanager
def exchanged_for(purpose: Purpose) -> Generator[None, None, None]:
    """What is waited for inside has this purpose."""
    _purposes.append(purpose)
    try:
        yield
    finally:
        _purposes.pop()


def start_gather_in_steps(x: Tensor, group: AnyGroup) -> Transfer:
    """``all_gather_in_steps``, to be waited for where it is read. ``x`` must not change until then."""
    groups = [group.inter, group.intra] if isinstance(group, TwoStepGroup) else [group]
    return Transfer(x, [(_begin_gather, step) for step in groups])


def start_reduce_scatter_in_steps(x: Tensor, group: AnyGroup) -> Transfer:
    """``reduce_scatter_in_steps``, to be waited for where it is read. ``x`` must not change until then."""
    groups = [group.intra, group.inter] if isinstance(group, TwoStepGroup) else [group]
    return Transfer(x, [(_begin_reduce_scatter, step) for step in groups])


def start_all_to_all_rows(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """``all_to_all_rows``, waited for where it is read, outside of autograd. ``rows`` must not change until then."""

    def begin(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
        works: list[dist.Work] = []
        received = _exchange(rows, list(send_counts), list(receive_counts), group, works)
        return received, works[0] if works else None

    transfer = Transfer(rows, [(begin, group)])
    transfer.sent = rows
    return transfer


def _begin_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return gathered, _all_gather(gathered, x.contiguous(), group=group, async_op=True)


def _begin_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    piece = x.new_empty((_rows_of_piece(x, group), *x.shape[1:]))
    return piece, _reduce_scatter(piece, x.contiguous(), group=group, async_op=True)


def _is_ordered_by_device(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a collective can be issued before its input is there. A fake one stands for one on a GPU."""
    return x.is_cuda or dist.get_backend(group) == "fake"


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def all_gather_along_dim0(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of every rank of the group, stacked along dim 0 in rank order. Not differentiable."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    sent = x.contiguous()
    with waited(group):
        _all_gather(gathered, sent, group=group)
    return gathered


def reduce_scatter_along_dim0(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along dim 0 of the sum of ``x`` over the group. Not differentiable."""
    piece = x.new_empty((_rows_of_piece(x, group), *x.shape[1:]))
    sent = x.contiguous()
    with waited(group):
        _reduce_scatter(piece, sent, group=group)
    return piece


def _rows_of_piece(x: Tensor, group: dist.ProcessGroup) -> int:
    if x.shape[0] % group.size():
        raise ValueError(f"dim 0 of {tuple(x.shape)} must be a multiple of the group's {group.size()} ranks.")
    return x.shape[0] // group.size()


def all_to_all_rows(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Rows sent to and received from each rank of the group, in rank order; the gradient goes the way back."""
    received: Tensor = _AllToAllRows.apply(rows, list(send_counts), list(receive_counts), group)  # type: ignore[no-untyped-call]
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts, group):  # type: ignore[no-untyped-def]
        ctx.send_counts, ctx.receive_counts, ctx.group = send_counts, receive_counts, group
        return _exchange(rows, send_counts, receive_counts, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _exchange(grad, ctx.receive_counts, ctx.send_counts, ctx.group), None, None, None


def _exchange(
    rows: Tensor,
    send_counts: list[int],
    receive_counts: list[int],
    group: dist.ProcessGroup,
    works: list[dist.Work] | None = None,
) -> Tensor:
    """``works``: rows are only on their way, and what there is to wait for is added here."""
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    rows, splits = rows.contiguous(), (receive_counts, send_counts)
    if works is None:
        with waited(group):
            dist.all_to_all_single(received, rows, *splits, group=group)
        return received
    work = dist.all_to_all_single(received, rows, *splits, group=group, async_op=True)
    if work is not None:
        works.append(work)
    return received


# torch 2.13 renamed these two and deprecated the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
