"""Attention over the cp ranks as one operation in a graph of ``torch.compile``.

What a rank gathers and which pieces its queries see are walks over segments, in eager code. A compiled graph holds the
whole of it as one opaque operation, and another for its gradient, that take the names of process groups and integers:
the graph is whole, it is compiled again when the layout changes and not when the tokens do, and the operations run the
eager code. As in eager mode without a recompute, a graph keeps tensors of this rank and gathers again in its backward
pass. Nothing is gathered ahead in a graph.

Sparse attention (DSA) is in no graph: its calls of ``select_keys`` and ``sparse_attention`` are no torch functions, and
the tracer passes by the mode that takes them over.

Shapes: B batch, L tokens of this rank, H query heads, X channels of a query, V of a value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from lightning_moe_strategy._torch_compat import process_group
from lightning_moe_strategy.collectives import AnyGroup, TwoStepGroup
from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout
from lightning_moe_strategy.context_parallel.visible import Documents
from lightning_moe_strategy.kernels.attention import AttentionKernelName


@dataclass(frozen=True, kw_only=True)
class GraphCall:
    """What an attention over the cp ranks does besides its tensors."""

    layout: SequenceLayout
    """Of the tokens that are given."""
    group: AnyGroup
    scale: float
    documents: Documents
    window: int | None
    kernel: AttentionKernelName
    expanded_bytes: int = 0


@dataclass(frozen=True)
class GraphKind:
    """An autograd function of (query, first, second, sinks, ...) that saves them, its output and the log-sum-exp."""

    function: type[torch.autograd.Function]
    arguments: Callable[[GraphCall], Mapping[str, Any]]
    """The rest of the function's arguments, in order, by the names under which its context keeps them."""
    value_channels: Callable[[Tensor, Tensor, Tensor], int]
    """V, from query, first and second."""


KINDS: dict[str, GraphKind] = {}
"""By name. The files that hold the functions enter theirs."""


def attend_in_graph(
    kind: str, query_BHLX: Tensor, first: Tensor, second: Tensor, sinks_H: Tensor | None, call: GraphCall
) -> Tensor:
    """The attention's output [B, H, L, V], while ``torch.compile`` traces."""
    out: Tensor = torch.ops.lightning_moe.context_parallel_attention(
        query_BHLX, first, second, sinks_H, kind, _names(call.group), _numbers(call), call.scale, call.kernel
    )[0]
    return out


def refuse_in_graph(where: str) -> None:
    """RuntimeError while ``torch.compile`` traces. It then runs the frame as it is, unless a full graph is wanted."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{where}: sparse attention over cp ranks cannot be in a graph of torch.compile, which would attend to "
            "this rank's tokens only. Compile the MLPs and experts alone, or choose fullgraph=False."
        )


def _names(group: AnyGroup) -> str:
    if isinstance(group, TwoStepGroup):
        return f"{group.whole.group_name} {group.inter.group_name} {group.intra.group_name}"
    return str(group.group_name)


def _numbers(call: GraphCall) -> list[int]:
    """Each list behind its length, so that they can be told apart."""
    window = 0 if call.window is None else call.window
    numbers = [window, call.expanded_bytes, call.layout.tail_tokens_per_rank, len(call.documents)]
    for starts in call.documents:
        numbers += [len(starts), *starts]
    for owned in call.layout.segments:
        numbers.append(2 * len(owned))
        for segment in owned:
            numbers += [segment.start, segment.length]
    return numbers


@lru_cache(maxsize=1024)
def _call_of(names: str, numbers: tuple[int, ...], scale: float, kernel: str) -> GraphCall:
    window, expanded_bytes, tail, num_sequences, *rest = numbers
    lists = []
    while rest:
        length = rest[0]
        lists.append(tuple(rest[1 : 1 + length]))
        del rest[: 1 + length]
    segments = tuple(
        tuple(Segment(*pair) for pair in zip(owned[::2], owned[1::2], strict=True)) for owned in lists[num_sequences:]
    )
    return GraphCall(
        layout=SequenceLayout(segments=segments, tail_tokens_per_rank=tail),
        group=_group(names),
        scale=scale,
        documents=tuple(lists[:num_sequences]),
        window=window or None,
        kernel=cast(AttentionKernelName, kernel),
        expanded_bytes=expanded_bytes,
    )


def _group(names: str) -> AnyGroup:
    groups = [process_group(name) for name in names.split()]
    if len(groups) == 1:
        return groups[0]
    whole, inter, intra = groups
    return TwoStepGroup(whole=whole, inter=inter, intra=intra)


class _Context:
    """In place of autograd's, outside of it."""

    needs_input_grad = (True,) * 8

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


@torch.library.custom_op("lightning_moe::context_parallel_attention", mutates_args=())
def _forward(
    query: Tensor,
    first: Tensor,
    second: Tensor,
    sinks_H: Tensor | None,
    kind: str,
    names: str,
    numbers: list[int],
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [B, H, L]."""
    context: Any = _Context()
    arguments = KINDS[kind].arguments(_call_of(names, tuple(numbers), scale, kernel))
    KINDS[kind].function.forward(context, query, first, second, sinks_H, *arguments.values())
    out, lse = context.saved_tensors[3:5]
    return out.contiguous(), lse.contiguous()


@_forward.register_fake
def _(
    query: Tensor, first: Tensor, second: Tensor, sinks_H: Tensor | None, kind: str, *how: Any
) -> tuple[Tensor, Tensor]:
    channels = KINDS[kind].value_channels(query, first, second)
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((*query.shape[:3], channels)), query.new_empty(query.shape[:3], dtype=wide)


@torch.library.custom_op("lightning_moe::context_parallel_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    query: Tensor,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks_H: Tensor | None,
    kind: str,
    names: str,
    numbers: list[int],
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, first, second and sinks; the last is empty without."""
    context: Any = _Context()
    context.save_for_backward(query, first, second, out, lse, sinks_H)
    context.is_gathered = False
    for name, argument in KINDS[kind].arguments(_call_of(names, tuple(numbers), scale, kernel)).items():
        setattr(context, name, argument)
    grads = KINDS[kind].function.backward(context, grad_out)[:4]
    return tuple(query.new_empty(0) if grad is None else grad.contiguous() for grad in grads)  # type: ignore[return-value]


@_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks_H: Tensor | None,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = query.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)
    return query.new_empty(query.shape), first.new_empty(first.shape), second.new_empty(second.shape), grad_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, first, second, sinks_H, *ctx.how = inputs
    ctx.save_for_backward(query, first, second, *output, sinks_H)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    sinks_H = ctx.saved_tensors[-1]
    backward = torch.ops.lightning_moe.context_parallel_attention_backward
    *grads, grad_sinks = backward(grad_out, *ctx.saved_tensors, *ctx.how)
    return *grads, None if sinks_H is None else grad_sinks, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
