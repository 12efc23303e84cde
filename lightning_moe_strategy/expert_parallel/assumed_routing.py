"""Where rows go in a simulation, whose tensors have no values that say so.

Shapes: E experts of a layer, P ranks of the ep group, L experts of each of them (E = P * L).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import Literal

from torch import Tensor

RoutingName = Literal["balanced", "worst"]


@dataclass(frozen=True)
class RecordedRouting:
    """Tokens per expert of one layer, as a run counted them: every rank sends in these proportions."""

    tokens_E: tuple[float, ...]


AssumedRouting = RoutingName | RecordedRouting
"""``balanced``: every expert gets as many rows. ``worst``: all that can be sent to one rank comes to this one."""

RecordedTokens = Mapping[str, Sequence[float] | Tensor] | Sequence[float]
"""Tokens per expert by the name of each layer's experts module, or one list for all layers."""


def routing_by_layer(tokens: RecordedTokens, num_experts: Mapping[str, int]) -> dict[str, RecordedRouting]:
    """The routing of every layer of a model, whose numbers of experts are given by name.

    Raises:
        ValueError: a layer missing or unknown, a list of another length, or numbers that are no counts.
    """
    given = tokens if isinstance(tokens, Mapping) else dict.fromkeys(num_experts, tokens)
    by_layer = {name: counts.tolist() if isinstance(counts, Tensor) else counts for name, counts in given.items()}
    unknown, missing = sorted(set(by_layer) - set(num_experts)), sorted(set(num_experts) - set(by_layer))
    if unknown or missing:
        wrong = [f"{len(unknown)} unknown, first {unknown[0]!r}"] if unknown else []
        wrong += [f"{len(missing)} missing, first {missing[0]!r}"] if missing else []
        raise ValueError(
            f"routing must name the experts of every layer: {'; '.join(wrong)}. The model has "
            f"{_some_names(list(num_experts))}."
        )
    for name, counts in by_layer.items():
        _check_counts(name, counts, num_experts[name])
    return {name: RecordedRouting(tuple(by_layer[name])) for name in num_experts}


def assumed_counts(
    routing: AssumedRouting, num_tokens: int, top_k: int, *, rank: int, num_ranks: int, num_local_experts: int
) -> tuple[list[int], list[list[int]]]:
    """Rows that ``rank`` sends to each rank, and receives from each rank for each of its own experts [P][L].

    Raises:
        ValueError: a recorded routing that gives one expert more than one row of every token.
    """
    num_rows = num_tokens * top_k
    if isinstance(routing, RecordedRouting):
        rows_E = _in_proportion(num_rows, routing.tokens_E)
        if max(rows_E) > num_tokens:
            busiest = rows_E.index(max(rows_E))
            raise ValueError(
                f"routing gives expert {busiest} {rows_E[busiest] / num_rows:.1%} of a layer's rows, but a token picks "
                f"an expert once: at most 1 / top_k({top_k}) = {1 / top_k:.1%}. Record tokens per expert of this model."
            )
        starts = range(0, len(rows_E), num_local_experts)
        num_sent = [sum(rows_E[start : start + num_local_experts]) for start in starts]
        own = rows_E[rank * num_local_experts : (rank + 1) * num_local_experts]
        return num_sent, [list(own) for _ in range(num_ranks)]
    num_sent = _even_parts(num_rows, num_ranks)
    if routing == "balanced":
        # Every rank sends as many rows to this one as this one sends to the rank that gets most.
        num_received = num_sent[0]
    else:
        # The ids of a token differ, so at most L of its rows can come to the same rank.
        num_received = num_tokens * min(top_k, num_local_experts)
    return num_sent, [_even_parts(num_received, num_local_experts) for _ in range(num_ranks)]


def assumed_counts_of_all(
    routing: AssumedRouting, num_tokens: int, top_k: int, *, rank: int, num_ranks: int, num_local_experts: int
) -> list[list[int]]:
    """Rows of every rank for every expert [P][E], each rank with as many tokens. ``worst``: most go to ``rank``.

    Raises:
        ValueError: as `assumed_counts`.
    """
    where: dict[str, int] = dict(rank=rank, num_ranks=num_ranks, num_local_experts=num_local_experts)
    if isinstance(routing, RecordedRouting):
        assumed_counts(routing, num_tokens, top_k, **where)
        return [_in_proportion(num_tokens * top_k, routing.tokens_E) for _ in range(num_ranks)]
    if routing == "balanced":
        of_homes = _even_parts(num_tokens * top_k, num_ranks)
        # Each rank sends its odd rows to others, so that every home gets as many.
        homes = [[of_homes[(home - source) % num_ranks] for home in range(num_ranks)] for source in range(num_ranks)]
    else:
        here = num_tokens * min(top_k, num_local_experts)
        elsewhere = _even_parts(num_tokens * top_k - here, num_ranks - 1)
        homes = [[*elsewhere[:rank], here, *elsewhere[rank:]]] * num_ranks
    return [[rows for home in of_rank for rows in _even_parts(home, num_local_experts)] for of_rank in homes]


def _in_proportion(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts: rounded down, and what is left to the largest remainders, the first of equal ones."""
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    shares = [weight * total / whole for weight in exact]
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - shares[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _even_parts(total: int, num_parts: int) -> list[int]:
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _check_counts(name: str, counts: object, num_experts: int) -> None:
    if isinstance(counts, str) or not isinstance(counts, Sequence) or len(counts) != num_experts:
        size = (
            f"{len(counts)} numbers" if isinstance(counts, Sequence) and not isinstance(counts, str) else repr(counts)
        )
        raise ValueError(
            f"routing of {name} has {size}, but the layer has num_experts({num_experts}). Give one number per expert."
        )
    for expert, count in enumerate(counts):
        is_number = isinstance(count, int | float) and not isinstance(count, bool)
        if not is_number or not isfinite(count) or count < 0:
            raise ValueError(f"routing of {name} has {count!r} for expert {expert}: give a count of at least 0.")
    if not any(counts):
        raise ValueError(f"routing of {name} has no tokens at all: give counts with a sum above 0.")


def _some_names(names: list[str]) -> str:
    if not names:
        return "no experts"
    return repr(names[0]) if len(names) == 1 else f"{len(names)}, from {names[0]!r} to {names[-1]!r}"
