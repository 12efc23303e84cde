"""How many copies of tokens travel in a simulation, where rows are known and tokens are not.

Shapes: E experts of a layer, P ranks of the ep group, L experts of each of them (E = P * L).
"""

from collections.abc import Sequence
from functools import cache

from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting, RecordedRouting
from lightning_moe_strategy.plan.workload import distinct_ranks


def assumed_copies(
    routing: AssumedRouting,
    num_tokens: int,
    rows_sent: Sequence[int],
    rows_received: Sequence[int],
    *,
    rank: int,
    num_local_experts: int,
) -> tuple[list[int], list[int]]:
    """Copies that ``rank`` sends to each rank, and receives from each, all with as many tokens: the mean over tokens.

    ``worst``: what comes here is one copy of every token.
    """
    num_ranks = len(rows_sent)
    if not num_tokens:
        return [0] * num_ranks, [0] * num_ranks
    top_k = sum(rows_sent) // num_tokens
    if isinstance(routing, RecordedRouting) and len(set(routing.tokens_E)) > 1:
        shares = _shares(routing.tokens_E, num_ranks, top_k)
    else:
        share = distinct_ranks(top_k, num_ranks, num_ranks * num_local_experts) / num_ranks
        shares = (share,) * num_ranks

    def copies(rows: int, share: float) -> int:
        most_of_a_token = min(top_k, num_local_experts)
        return min(rows, num_tokens, max(round(num_tokens * share), -(-rows // most_of_a_token)))

    sent = [copies(rows, share) for rows, share in zip(rows_sent, shares, strict=True)]
    if routing == "worst":
        return sent, [min(rows, num_tokens) for rows in rows_received]
    return sent, [copies(rows, shares[rank]) for rows in rows_received]


@cache
def _shares(tokens_E: tuple[float, ...], num_ranks: int, top_k: int) -> tuple[float, ...]:
    """Of tokens, those with an expert on each rank: K experts drawn without replacement, each as often as recorded.

    Experts are chosen or not independently of each other, given that K are chosen.
    """
    total, num_local_experts = sum(tokens_E), len(tokens_E) // num_ranks
    chances = [min(1.0, tokens * top_k / total) for tokens in tokens_E]
    all_chosen = _chance_of(top_k, chances)
    shares = []
    for start in range(0, len(chances), num_local_experts):
        none_here = 1.0
        for chance in chances[start : start + num_local_experts]:
            none_here *= 1 - chance
        elsewhere = _chance_of(top_k, chances[:start] + chances[start + num_local_experts :])
        shares.append(1 - none_here * elsewhere / all_chosen)
    return tuple(shares)


def _chance_of(count: int, chances: Sequence[float]) -> float:
    """That ``count`` of independent events happen."""
    by_count = [1.0] + [0.0] * count
    for chance in chances:
        for number in range(count, 0, -1):
            by_count[number] += (by_count[number - 1] - by_count[number]) * chance
        by_count[0] *= 1 - chance
    return by_count[count]
