"""The likely cause of a difference: a pure function of what differs and what does not.

Each cause is a question about the pattern and a sentence; they are asked in the order of ``CAUSES``, and the first that
fits is told. Nothing here computes with tensors or communicates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MIN_RATIO_SHARE = 1e-3
"""A gradient is a multiple of the right one when what is left without the multiple is below this share of it."""


@dataclass(frozen=True, kw_only=True)
class WrongOutput:
    """The first module in forward order whose output differs."""

    name: str
    difference: float
    is_router: bool
    later_tokens_alone: bool
    """The first chunk of every sequence is right."""
    other_documents_alone: bool
    """The first document of the sequence is right, and there are others."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One parameter's, against that of one process."""

    name: str
    is_expert: bool
    is_wrong: bool
    ratio: float | None
    """By which it is a multiple of the right one; None where it is no multiple."""
    missing_experts: tuple[int, ...] = ()
    """Of a wrong one: experts whose part is zero, or smaller than it should be while that of others is right."""
    right_on_some_replicas: bool = False


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What differs between the ranks and one process."""

    degrees: Mapping[str, int]
    wrong_output: WrongOutput | None = None
    leaked: str | None = None
    """The first module at which other documents change with one."""
    low_precision_routers: Sequence[str] = ()
    """Routers that compute in less than FP32 where they should not."""
    routing_is_wrong: bool = False
    loss_is_wrong: bool = False
    count_ratios: Sequence[float] = ()
    """Of every layer whose counts are wrong, tokens counted over tokens there are."""
    gradients: Sequence[Gradient] = ()
    stale_replicas: Sequence[str] = ()
    """Parameters of which replicas differ after a step."""
    parameters_are_wrong: bool = False
    wrong: Sequence[Gradient] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "wrong", tuple(gradient for gradient in self.gradients if gradient.is_wrong))

    @property
    def forward_is_right(self) -> bool:
        return self.wrong_output is None and not self.routing_is_wrong


def likely_cause(pattern: Pattern) -> str | None:
    """One sentence; None where nothing differs."""
    return next((sentence for cause in CAUSES if (sentence := cause(pattern))), None)


def common_ratio(gradients: Sequence[Gradient]) -> float | None:
    """By which all of them are multiples of the right ones, if it is one number."""
    ratios = [gradient.ratio for gradient in gradients]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return None
    middle = sorted(known)[len(known) // 2]
    return middle if all(abs(ratio - middle) < 1e-2 * abs(middle) for ratio in known) else None


def _leak(pattern: Pattern) -> str | None:
    if pattern.leaked is None:
        return None
    return (
        "A document leak: with one token of the first document changed, tokens of other documents change too. "
        "Attention, a convolution or a state goes on over the end of a document."
    )


def _router_precision(pattern: Pattern) -> str | None:
    output = pattern.wrong_output
    if pattern.low_precision_routers or (output is not None and output.is_router and output.difference < 2e-2):
        return (
            "A router that is not in FP32: its logits are rounded to bf16, and near ties go to other experts. Routers "
            "are units of their own with FP32 parameters; compute their logits in FP32."
        )
    return None


def _positions(pattern: Pattern) -> str | None:
    output = pattern.wrong_output
    if output is None or pattern.degrees["cp"] == 1 or not output.later_tokens_alone or output.other_documents_alone:
        return None
    return (
        "Positions counted on the rank: the first chunk of every sequence is right and what follows is not. Read "
        "batch['position_ids'], which stand for the whole sequence, instead of counting from 0 (keys of other ranks "
        "that an attention does not see look the same)."
    )


def _separated_documents(pattern: Pattern) -> str | None:
    output = pattern.wrong_output
    if output is None or not output.other_documents_alone:
        return None
    return (
        "Packed documents: the first of every sequence is right. In one process the model lets documents see one "
        "another, on the ranks they are kept apart. Hand the model the marks by which it separates them (transformers "
        "separates by position_ids, and only with use_cache=False and without an attention_mask)."
    )


def _forward(pattern: Pattern) -> str | None:
    if pattern.wrong_output is None:
        return None
    return (
        "The forward pass of this module: it mixes tokens in a way that is not taken over (a mean, a shift or a "
        "running sum over the sequence), or its weights on the ranks are not those of one process."
    )


def _routing(pattern: Pattern) -> str | None:
    if not pattern.routing_is_wrong:
        return None
    return "Routers that do not choose token by token: other tokens on the rank change which experts one goes to."


def _counts(pattern: Pattern) -> str | None:
    if not pattern.count_ratios:
        return None
    ratios = {round(ratio, 2) for ratio in pattern.count_ratios}
    if ratios == {2.0}:
        return "Tokens per expert are counted twice: once in the forward pass, and again when it is recomputed."
    return "Tokens per expert are miscounted: padding, or a pass that is none of the training's, is counted as well."


def _loss(pattern: Pattern) -> str | None:
    if not (pattern.loss_is_wrong and pattern.forward_is_right):
        return None
    return (
        "All outputs are right and the loss is not: labels shifted after the sequence was split (the last token of "
        "every chunk then has the wrong label, or none), or a loss that is no mean over the labels that count."
    )


def _stale_replica(pattern: Pattern) -> str | None:
    on_some = any(gradient.right_on_some_replicas for gradient in pattern.wrong)
    if not (pattern.stale_replicas or on_some):
        return None
    axes = [axis for axis in ("d_rep", "e_rep") if pattern.degrees[axis] > 1]
    degrees = " or ".join(f"{axis}({pattern.degrees[axis]})" for axis in axes)
    return (
        f"A stale replica: ranks of {degrees or 'one replica'} that hold the same parameters do not hold the same "
        "values after the step. A gradient was not reduced over the replicas, or one of them did not take the step."
    )


def _constant_ratio(pattern: Pattern) -> str | None:
    experts = [gradient for gradient in pattern.gradients if gradient.is_expert]
    dense = [gradient for gradient in pattern.gradients if not gradient.is_expert]
    for gradients, others, whose, axes in (
        ([*experts, *dense], [], "All gradients", ("cp", "d_rep", "fsdp", "e_fsdp", "ep", "e_rep")),
        (experts, dense, "The gradients of all experts", ("e_fsdp", "ep", "e_rep")),
        (dense, experts, "The gradients of all dense parameters", ("cp", "fsdp", "d_rep")),
    ):
        ratio = common_ratio([gradient for gradient in gradients if gradient.is_wrong])
        if ratio is None or not all(gradient.is_wrong or gradient.ratio is None for gradient in gradients):
            continue
        if not any(other.is_wrong for other in others):
            return f"{whose} are {_as_fraction(ratio)} of what they should be: {_factor(ratio, pattern.degrees, axes)}."
    return None


def _dropped_experts(pattern: Pattern) -> str | None:
    dropped = [gradient for gradient in pattern.wrong if gradient.missing_experts]
    if not dropped or len(dropped) < len(pattern.wrong):
        return None
    experts = sorted({expert for gradient in dropped for expert in gradient.missing_experts})
    named = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
    return f"Gradients of some experts are dropped: those of expert {named} lack tokens, and the others are right."


def _backward(pattern: Pattern) -> str | None:
    if not (pattern.wrong and pattern.forward_is_right):
        return None
    if pattern.degrees["cp"] > 1 and any(not gradient.is_expert for gradient in pattern.wrong):
        return (
            "A gather without its reduce in the backward pass: outputs are right, and so are the gradients behind this "
            "module. What other cp ranks made of the keys and values of this one does not come back to it."
        )
    return "The backward pass of this module: outputs are right, and so are the gradients behind it."


def _optimizer(pattern: Pattern) -> str | None:
    if not pattern.parameters_are_wrong:
        return None
    return "The optimizer's step: gradients are right, and what it makes of them is not (a norm of shards, clipping)."


CAUSES: Sequence[Callable[[Pattern], str | None]] = (
    _leak,
    _router_precision,
    _separated_documents,
    _positions,
    _forward,
    _routing,
    _loss,
    _stale_replica,
    _constant_ratio,
    _dropped_experts,
    _backward,
    _counts,
    _optimizer,
)


def _as_fraction(ratio: float) -> str:
    if ratio and abs(1 / ratio - round(1 / ratio)) < 2e-2 and round(1 / ratio) > 1:
        return f"1/{round(1 / ratio)}"
    return f"{ratio:.3g} times"


def _factor(ratio: float, degrees: Mapping[str, int], axes: Sequence[str]) -> str:
    """Which degree the ratio is, of those that it could be."""
    for sign, text in (
        (-1, "a mean over {axis}({degree}) where a sum belongs"),
        (1, "added up over {axis}({degree}) once too often"),
    ):
        found = [axis for axis in axes if degrees[axis] > 1 and abs(ratio / degrees[axis] ** sign - 1) < 1e-2]
        if found:
            more = f" (or {', '.join(f'{axis}({degrees[axis]})' for axis in found[1:])})" if found[1:] else ""
            return text.format(axis=found[0], degree=degrees[found[0]]) + more
    return "a factor that is no degree of this layout"
