"""The words of a page: its cards, and what its numbers rest on. Formatted here, so that no script rounds or divides."""

from collections.abc import Mapping

from lightning_moe_strategy.plan.differences import Difference
from lightning_moe_strategy.plan.labels import mapping, number
from lightning_moe_strategy.plan.planner import Json, JsonValue


def summary(plan: Mapping[str, object]) -> Json:
    """Verdict and cards of one plan; a card is ``good``, ``bad`` or neither."""
    return {"verdict": str(plan["verdict"]), "fits": bool(plan["fits"]), "cards": [*_cards(plan)]}


def facts(plan: Mapping[str, object]) -> list[list[str]]:
    """(what, value) of the plan as it was asked for, in reading order."""
    layout, parameters = mapping(plan, "layout"), mapping(plan, "parameters")
    per_token = ", ".join(
        f"{name.replace('_', ' ')} {value:.3f}" for name, value in _numbers(plan, "per_token_mb") if value
    )
    efsdp, compute = mapping(plan, "efsdp"), mapping(plan, "compute")
    source = compute["achieved_source"]
    total, active = number(parameters, "total"), number(parameters, "active_per_layer")
    rows = [
        ["Dense mesh", _degrees(layout, "d_rep", "fsdp", "cp", "cp_inter")],
        ["Expert mesh", _degrees(layout, "e_rep", "e_fsdp", "ep")],
        ["Settings", f"micro-batch {plan['micro_batch']}, {_settings(plan)}"],
        ["Parameters", f"{total / 1e9:,.2f} B, {number(parameters, 'expert_share'):.1%} in experts"],
        ["Active in a layer", f"{active / 1e9:,.3f} B parameters for each token"],
        ["Resident", f"{number(plan, 'resident_bytes_per_parameter'):.3g} bytes per parameter"],
        ["MB per token", per_token],
        ["K and V", f"{number(mapping(plan, 'cp'), 'kv_bytes_per_token'):,.0f} bytes per token and layer"],
        [
            "FLOP/s",
            f"{number(compute, 'achieved_tflops'):,.0f} of {number(compute, 'peak_tflops'):,.0f} TFLOP/s: {source}",
        ],
        ["Structural waste", pipeline_text(efsdp)],
        ["Units", "GB is 1e9 bytes; memory, traffic and seconds are those of the busiest GPU"],
    ]
    if plan["days"] is not None:
        rows.insert(0, ["Days", f"{number(plan, 'days'):,.1f} for the whole run"])
    warnings = plan["warnings"]
    assert isinstance(warnings, list)
    return rows + [["Warning", str(warning)] for warning in warnings]


def pipeline_text(efsdp: Mapping[str, object]) -> str:
    """What nothing hides, against the bubble of a pipeline."""
    share, micro_batches = number(efsdp, "structural_share"), number(efsdp, "pipeline_micro_batches_for_equal_bubble")
    bubble = f"a pipeline of e_fsdp stages needs {micro_batches:,.0f} micro-batches for as small a bubble"
    return f"{share:.2%}, the first gather and the last reduction; {bubble}"


def difference_row(difference: Difference) -> tuple[str, str, str, str]:
    """(quantity, seed, exact, why) in words."""
    quantity = f"{difference.quantity}, {difference.unit}" if difference.unit else difference.quantity
    seed, exact = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in (difference.seed, difference.exact)
    )
    return quantity, seed, exact, difference.why


def _cards(plan: Mapping[str, object]) -> list[JsonValue]:
    memory, efsdp = mapping(plan, "memory_gb"), mapping(plan, "efsdp")
    cp, compute = mapping(plan, "cp"), mapping(plan, "compute")
    headroom, hidden = number(memory, "headroom"), bool(efsdp["hidden"])
    left = f"{headroom:,.1f} GB left of {number(memory, 'device'):,.0f}"
    return [
        _card(
            "peak",
            "Peak memory",
            f"{number(memory, 'total'):,.1f} GB",
            left if headroom >= 0 else f"{-headroom:,.1f} GB over {number(memory, 'device'):,.0f}",
            mood="good" if plan["fits"] else "bad",
        ),
        _card(
            "speed",
            "Tokens/s per GPU",
            f"{number(compute, 'tokens_per_second_per_gpu'):,.0f}",
            f"MFU {number(compute, 'mfu'):.1%}",
        ),
        _card(
            "threshold",
            "Tokens to hide eFSDP",
            f"{number(efsdp, 'min_tokens_to_hide'):,.0f}",
            f"of {number(efsdp, 'tokens_per_gpu'):,.0f} on a GPU",
            mood="good" if hidden else "bad",
        ),
        _card(
            "exposed",
            "eFSDP exposed",
            f"{number(efsdp, 'exposed_share'):.1%}",
            f"{number(efsdp, 'gb_per_layer'):,.2f} GB and {_ms(efsdp, 'seconds_per_layer')} per layer",
        ),
        _card(
            "cp",
            "cp over RDMA adds",
            f"+{number(cp, 'extra_time_share'):.1%}",
            f"{number(cp, 'rdma_gb'):,.2f} GB and {_ms(cp, 'rdma_seconds')} per layer",
        ),
        _card("longest", "Longest context", *_longest(plan)),
    ]


def _card(id: str, name: str, value: str, note: str, *, mood: str = "") -> Json:
    return {"id": id, "name": name, "value": value, "note": note, "mood": mood}


def _longest(plan: Mapping[str, object]) -> tuple[str, str]:
    if not plan["fits"]:
        return "-", "this one does not fit"
    if plan["longest_context"] is None:
        return "> 64 x", "this one, on this layout"
    return f"{number(plan, 'longest_context'):,.0f}", "tokens, on this layout"


def _ms(values: Mapping[str, object], key: str) -> str:
    return f"{1e3 * number(values, key):,.1f} ms"


def _settings(plan: Mapping[str, object]) -> str:
    settings = mapping(plan, "settings")
    words = (name if value is True else f"{name} {value}" for name, value in settings.items() if value is not False)
    return ", ".join(words)


def _degrees(layout: Mapping[str, object], *axes: str) -> str:
    return ", ".join(f"{axis} {layout[axis]}" for axis in axes)


def _numbers(plan: Mapping[str, object], key: str) -> list[tuple[str, float]]:
    values = mapping(plan, key)
    return [(name, number(values, name)) for name in values]
