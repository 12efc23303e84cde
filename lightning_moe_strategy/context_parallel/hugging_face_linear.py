"""Linear attention of unchanged Hugging Face models: Gated DeltaNet (Qwen3-Next, Qwen3.5) and Kimi Delta Attention.

Such a layer calls a convolution and a scan by name, whatever stands behind the names: transformers' own torch code, or
causal-conv1d and flash-linear-attention where they are installed. The names are rebound once in the module that
defines the layer, to functions that do what they did for every layer but the adapted ones.

Whose call it is they learn from a context variable that is set inside the layer's own ``forward``: so it is right in an
activation recompute too, in whatever thread that runs.

Shapes: B batch, C channels, L tokens of this rank, G key heads, H value heads, D and E channels.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn

from lightning_moe_strategy.context_parallel.convolution import convolve_over_chunks
from lightning_moe_strategy.context_parallel.linear import affine_over_chunks
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT

_FORWARD = "_context_parallel_linear_forward"
_DOCUMENT_MARKS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def is_linear_attention(module: nn.Module) -> bool:
    """Whether ``adapt_linear_attention`` knows the functions that the module's forward calls."""
    return not _SCANS.isdisjoint(_known_calls(module))


def adapt_linear_attention(layer: nn.Module, block: str, cp: ContextParallel) -> None:
    """Let a layer that ``is_linear_attention`` work on this rank's part of every sequence.

    A second call only hands over the new ``block``, the name of the block that holds the layer, and ``cp``.
    """
    wrapper: _LayerForward | None = layer.__dict__.get(_FORWARD)
    if wrapper is None:
        names = _known_calls(layer)
        wrapper = layer.__dict__[_FORWARD] = layer.__dict__["forward"] = _LayerForward(layer.forward, names)
        scope = _function(layer).__globals__
        for name in names:
            if not isinstance(scope[name], _Rebound):
                scope[name] = _Rebound(scope[name], name)
    wrapper.block, wrapper.cp = block, cp


class _LayerForward:
    """A layer's forward, which says whose calls those of its functions are."""

    block: str
    cp: ContextParallel

    def __init__(self, forward: Callable[..., Any], names: frozenset[str]) -> None:
        update_wrapper(self, forward)  # first: it copies the attributes of a wrapper that is there already
        self.forward, self.names = forward, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.cp.is_off:
            return self.forward(*args, **kwargs)
        # The cache that stands in the model's arguments remembers nothing; without one no state is asked for.
        if "cache" in kwargs:
            kwargs["cache"] = None
        call = _Call(self.block, self.cp)
        token = _CALL.set(call)
        try:
            result = self.forward(*args, **kwargs)
        finally:
            _CALL.reset(token)
        missing = sorted(self.names - call.taken_over)
        if missing:
            raise RuntimeError(
                f"{self.block} did not call {', '.join(missing)} by the name that was taken over: with "
                f"cp={self.cp.degree} its linear attention saw this rank's tokens only. Do not replace the function "
                "or the layer after the Trainer has set up the model; a kernel of your own belongs there before."
            )
        return result


class _Call:
    """One forward of an adapted layer."""

    def __init__(self, block: str, cp: ContextParallel) -> None:
        self.block, self.cp = block, cp
        self.taken_over: set[str] = set()

    def sequence(self, options: Mapping[str, Any]) -> LocalSequence:
        """The current one. ValueError when the call marks documents that the batch does not."""
        sequence = self.cp.current
        marks = [name for name in _DOCUMENT_MARKS if options.get(name) is not None]
        if marks and sequence.documents == ONE_DOCUMENT:
            raise ValueError(
                f"{marks[0]} is given, but the batch marks no packed documents. Put the marks into the batch, so that "
                "they are known for the whole sequence before it is split."
            )
        return sequence


_CALL: ContextVar[_Call | None] = ContextVar("linear_attention_call", default=None)


class _Rebound:
    """What a name in a modeling module stands for: the function that was there, over the whole sequence if it must."""

    def __init__(self, original: Callable[..., Any], name: str) -> None:
        update_wrapper(self, original)  # first: it copies the original's attributes
        self.original, self.name = original, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _CALL.get()
        if call is None:
            return self.original(*args, **kwargs)
        call.taken_over.add(self.name)
        try:
            return _KNOWN[self.name](call, self.original, *args, **kwargs)
        except ValueError as error:
            raise ValueError(f"Linear attention in {call.block}: {error}") from error


def _convolve(
    call: _Call,
    convolution: Callable[..., Tensor],
    x_BCL: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Signature and result of ``causal_conv1d_fn``, after its first two arguments."""
    sequence = call.sequence(options)
    return convolve_over_chunks(
        lambda x: convolution(x, weight, bias, activation=activation, **_of_one_document(options)),
        x_BCL,
        width=weight.shape[-1],
        layout=sequence.layout,
        group=call.cp.group,
        documents=sequence.documents,
    )


def _scan(
    call: _Call,
    scan: Callable[..., tuple[Tensor, Tensor | None]],
    query_BLGD: Tensor,
    key_BLGD: Tensor,
    value_BLHE: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Signature and result of the chunked delta rules, after its first two arguments."""
    if initial_state is not None or output_final_state:
        raise ValueError("a state from or for a cache needs the whole sequence. Use cp=1 to generate.")
    sequence = call.sequence(options)
    out = affine_over_chunks(
        partial(scan, **_of_one_document(options)),
        query_BLGD,
        key_BLGD,
        value_BLHE,
        gates={"g": g, "beta": beta},
        layout=sequence.layout,
        group=call.cp.group,
        documents=sequence.documents,
    )
    call.cp.note_attention(call.block)
    return out, None


_SCANS = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
_KNOWN: Mapping[str, Callable[..., Any]] = {"causal_conv1d_fn": _convolve, **dict.fromkeys(_SCANS, _scan)}


def _of_one_document(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _DOCUMENT_MARKS}


def _known_calls(module: nn.Module) -> frozenset[str]:
    """Those of the functions above that the source of the module's forward names."""
    code = getattr(_function(module), "__code__", None)
    return frozenset() if code is None else frozenset(_KNOWN).intersection(code.co_names)


def _function(module: nn.Module) -> Any:
    """The class's forward without its decorators."""
    return inspect.unwrap(type(module).forward)
