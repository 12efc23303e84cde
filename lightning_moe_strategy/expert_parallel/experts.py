"""Find the experts of a model, whoever wrote it, and make them compute where their rows are sent.

An experts module is one whose

* ``forward(hidden_TD, expert_ids_TK, weights_TK) -> y_TD`` is called with these three by position, and returns each
  token's weighted sum over its experts;
* ``num_experts`` says how many experts it holds, and its forward believes it;
* parameters are all its own and stacked: dim 0 is ``num_experts``.

It learns nothing of ranks: during a forward it sees this rank's parameters and ``num_experts`` of this rank. The
experts of transformers (classes under ``@use_experts_implementation``) and our own are such modules, and so is any
hand-written one; what else it holds (buffers, activation, clamps) is its business.

Shapes: T tokens, K experts per token, D hidden size, E experts in all, L experts of this rank.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import in_backward
from lightning_moe_strategy.expert_parallel.chunks import Chunking, bytes_of_row, run_in_chunks
from lightning_moe_strategy.expert_parallel.dispatch import EPDispatcher
from lightning_moe_strategy.expert_parallel.local_math import LocalMath, LocalRows, choose_local_math
from lightning_moe_strategy.expert_parallel.splits import Splits

RoutingObserver = Callable[[Tensor], None]

_attached: WeakKeyDictionary[nn.Module, EPDispatcher] = WeakKeyDictionary()
_observers: WeakKeyDictionary[nn.Module, list[RoutingObserver]] = WeakKeyDictionary()

_BESIDE = "_runs_while_rows_travel"
_ADDED = "_added_to_parameters"


def find_experts(root: nn.Module) -> dict[str, nn.Module]:
    """Every experts module below ``root``, by name, in the order of the model."""
    return {name: module for name, module in root.named_modules() if _is_experts(module)}


def unknown_experts(root: nn.Module) -> list[tuple[str, str]]:
    """Modules that hold experts but cannot be spread over ranks: name and reason."""
    known = find_experts(root)
    reasons = {
        name: reason
        for name, module in root.named_modules()
        if name not in known and (reason := _why_unknown(name, module)) is not None
    }
    # A block that holds an experts module, known or not, is not one itself.
    return [
        (name, reason)
        for name, reason in reasons.items()
        if not any(other.startswith(f"{name}.") for other in (*known, *reasons) if name)
    ]


def require_experts(root: nn.Module, ep: int) -> dict[str, nn.Module]:
    """`find_experts`, and an error that says what to do when ``ep`` ranks cannot share these experts."""
    experts = find_experts(root)
    if ep == 1:
        return experts
    unknown = unknown_experts(root)
    problems = [f"{name or 'the model itself'}: {reason}" for name, reason in unknown]
    problems += [
        f"{name}: num_experts({module.num_experts}) is no multiple of ep"
        for name, module in experts.items()
        if _num_experts(module) % ep
    ]
    if not experts and not unknown:
        problems = ["no experts were found in the model"]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(
            f"ep({ep}) spreads the experts of every layer over {ep} ranks, which cannot be done here:{listed}\n"
            "Set ep=1, or an ep that divides every num_experts, or write the experts as one module with "
            "forward(hidden_TD, expert_ids_TK, weights_TK), num_experts, and parameters stacked on dim 0."
        )
    return experts


def attach(experts: nn.Module, dispatcher: EPDispatcher, chunking: Chunking | None = None) -> Callable[[], None]:
    """Make ``experts`` send its rows through ``dispatcher``, in chunks or all at once. Returns how to undo it.

    Only this instance's forward changes. Its parameters may be spread later, but before the first forward: DTensors
    of E experts, sharded on dim 0 over ep, or plain tensors of this rank's L experts.
    """
    if _num_experts(experts) != dispatcher.num_experts:
        raise ValueError(
            f"the dispatcher's num_experts({dispatcher.num_experts}) must be the module's "
            f"({_num_experts(experts)}): make one dispatcher per layer."
        )
    if experts in _attached:
        raise RuntimeError(f"{type(experts).__name__} has a dispatcher already: undo the first attach.")
    local_math = choose_local_math(experts)
    had_forward = experts.__dict__.get("forward")

    def forward(self: nn.Module, hidden_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, /) -> Tensor:
        if hidden_TD.dim() != 2 or not hidden_TD.shape[:1] == expert_ids_TK.shape[:1] == weights_TK.shape[:1]:
            raise ValueError(
                f"experts take hidden [T, D], ids [T, K] and weights [T, K], not {tuple(hidden_TD.shape)}, "
                f"{tuple(expert_ids_TK.shape)} and {tuple(weights_TK.shape)}: flatten batch and sequence first."
            )
        _observe(self, expert_ids_TK)
        local = _local_parameters(self, dispatcher.num_local_experts)
        run = _Run(self, dispatcher, local_math, tuple(local))
        tokens, parameters = (hidden_TD, expert_ids_TK, weights_TK), list(local.values())
        if chunking is None or chunking.is_off:
            return run(None, *tokens, parameters, _work_beside(self, dispatcher))
        bytes_per_row = bytes_of_row(hidden_TD.shape[1], parameters)
        chunks = chunking.choose(dispatcher, expert_ids_TK, bytes_per_row=bytes_per_row)
        if len(chunks) == 1:
            return run(chunks[0].splits, *tokens, parameters, _work_beside(self, dispatcher))
        return run_in_chunks(run, chunks, tokens, parameters)

    def undo() -> None:
        del experts.forward
        if had_forward is not None:
            experts.forward = had_forward
        _attached.pop(experts, None)

    # A bound method and not a closure over the module: a deep copy of the model then runs the copy.
    experts.forward = MethodType(forward, experts)
    _attached[experts] = dispatcher
    return undo


def dispatcher_of(experts: nn.Module) -> EPDispatcher | None:
    """The dispatcher that ``attach`` gave an experts module."""
    return _attached.get(experts)


def run_beside(experts: nn.Module, work: Callable[[EPDispatcher], Callable[[], object] | None]) -> None:
    """Ask ``work(dispatcher)``, once a forward of an attached module, for something to be run while its rows travel.

    None is nothing. A forward in several chunks, which records no graph, does not ask.
    """
    experts.__dict__[_BESIDE] = work  # of the instance, so that a deep copy of the model asks its own


def _work_beside(experts: nn.Module, dispatcher: EPDispatcher) -> Callable[[], object] | None:
    work = experts.__dict__.get(_BESIDE)
    return None if work is None else work(dispatcher)


def routing_observers(experts: nn.Module) -> list[RoutingObserver]:
    """The functions called with ``expert_ids_TK`` once per forward of an attached module; append to the list.

    A forward that activation recompute runs again is not a new one, and is not observed.
    """
    return _observers.setdefault(experts, [])


@contextmanager
def adds_to_parameter(experts: nn.Module, name: str, add: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Forwards inside compute with ``add(local)`` for this rank's part of one parameter, [L, ...]."""
    added = experts.__dict__.setdefault(_ADDED, {})
    added[name] = add
    try:
        yield
    finally:
        del added[name]


def _observe(experts: nn.Module, expert_ids_TK: Tensor) -> None:
    if not in_backward():
        for observer in _observers.get(experts, ()):
            observer(expert_ids_TK)


class _Run:
    """From tokens to their results: out to the ranks of their experts, through these, and back."""

    def __init__(
        self, experts: nn.Module, dispatcher: EPDispatcher, local_math: LocalMath, names: tuple[str, ...]
    ) -> None:
        self.experts, self.dispatcher, self.local_math, self.names = experts, dispatcher, local_math, names

    def __call__(
        self,
        splits: Splits | None,
        hidden_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        parameters: Sequence[Tensor],
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        plan = self.dispatcher.plan(expert_ids_TK, splits)
        # A dispatcher of a user need not know of it.
        options = {} if meanwhile is None else {"meanwhile": meanwhile}
        rows_RD, probs_R, offsets_L = self.dispatcher.dispatch(hidden_TD, weights_TK, plan, **options)
        rows = LocalRows(
            rows_RD=rows_RD,
            probs_R=probs_R,
            offsets_L=offsets_L,
            weights_dtype=weights_TK.dtype,
            gathered_from=plan.copied_from,
            end_early=plan.rows_end_early,
        )
        local = dict(zip(self.names, plan.weights_of_rows(parameters), strict=True))
        with _only_local_experts(self.experts, local, offsets_L.shape[0]):
            rows_RD = self.local_math(self.experts, rows)
        return self.dispatcher.combine(rows_RD.to(hidden_TD.dtype), plan)


def _local_parameters(experts: nn.Module, num_local_experts: int) -> dict[str, Tensor]:
    """This rank's part of every parameter of its own, by name."""
    whole = {name: parameter for name, parameter in experts._parameters.items() if parameter is not None}
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in whole.items()}
    for name, tensor in local.items():
        if tensor.shape[0] != num_local_experts:
            raise RuntimeError(
                f"{type(experts).__name__}.{name} holds {tensor.shape[0]} experts on this rank, but it is sent rows "
                f"of {num_local_experts} (num_experts={_num_experts(experts)}): spread it over ep, as a DTensor "
                "sharded on dim 0, before the first forward."
            )
    return local | {name: add(local[name]) for name, add in experts.__dict__.get(_ADDED, {}).items()}


@contextmanager
def _only_local_experts(experts: nn.Module, local: Mapping[str, Tensor], num_local_experts: int) -> Iterator[None]:
    """The module as its forward should see it on this rank: local tensors, local count."""
    parameters, num_experts = experts._parameters, _num_experts(experts)
    whole = {name: parameters[name] for name in local}
    parameters.update(local)  # type: ignore[arg-type]  # what a module looks up need not be an nn.Parameter
    experts.num_experts = num_local_experts  # type: ignore[assignment]
    try:
        yield
    finally:
        parameters.update(whole)
        experts.num_experts = num_experts  # type: ignore[assignment]


def _is_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "num_experts", None), int) and _why_not_experts(module) is None


def _num_experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]


def _why_not_experts(module: nn.Module) -> str | None:
    """The first rule of an experts module that is broken, or None."""
    own = dict(module.named_parameters(recurse=False))
    if not any(parameter.dim() >= 3 for parameter in own.values()):
        return "its weights are not stacked in one tensor per projection"
    if not isinstance(getattr(module, "num_experts", None), int):
        return "it has no attribute num_experts"
    for name, parameter in module.named_parameters():
        if name not in own:
            return f"its parameter {name} belongs to a submodule, which all experts share"
        if not parameter.dim() or parameter.shape[0] != _num_experts(module):
            return f"dim 0 of {name} {list(parameter.shape)} is not its num_experts({_num_experts(module)})"
    takes = list(inspect.signature(type(module).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in takes if parameter.kind in kinds]
    required = [parameter for parameter in positional if parameter.default is inspect.Parameter.empty]
    if len(positional) < 3 or len(required) > 3 or _has_required_keywords(takes):
        names = ", ".join(parameter.name for parameter in takes)
        return f"its forward takes ({names}), not hidden states, expert ids and weights"
    return None


def _has_required_keywords(parameters: list[inspect.Parameter]) -> bool:
    return any(
        parameter.kind == inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
        for parameter in parameters
    )


def _why_unknown(name: str, module: nn.Module) -> str | None:
    """Why a module that is not known looks like experts all the same, or None when it does not."""
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    # Shared experts see every token, they are a dense MLP; a router has num_experts too.
    if "expert" not in words or re.search(r"shared_?expert|router|(gate|gating)\b", words):
        return None
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return f"its {len(module)} experts are separate modules in a {type(module).__name__}"
    return _why_not_experts(module) if _holds_many(module) else None


def _holds_many(module: nn.Module) -> bool:
    """Whether a module named like experts holds more than one of them."""
    stacked = any(parameter.dim() >= 3 for parameter in module.parameters(recurse=False))
    return stacked or isinstance(getattr(module, "num_experts", None), int)
