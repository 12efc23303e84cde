"""The first lines of a report: one sentence, a few cards, and what the run was."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_moe_strategy.report.expert_series import Series
from lightning_moe_strategy.report.layer_names import short_names
from lightning_moe_strategy.report.load_arithmetic import dead_experts, rank_loads, skew
from lightning_moe_strategy.report.load_blocks import steps_of
from lightning_moe_strategy.report.metrics import Metrics
from lightning_moe_strategy.report.run_files import ReceiptLog
from lightning_moe_strategy.report.training_blocks import training_loss, validation_loss

Card = dict[str, str]
NOT_LOGGED = "-"
WIDE_EXPOSURE = 0.1
"""Share of a step above which waiting is shown as bad."""


def headline(metrics: Metrics, description: Mapping[str, object]) -> tuple[str, bool]:
    """What happened in one sentence, and whether the run ended with a finite loss."""
    loss, step = training_loss(metrics), metrics.last_step
    if step is None:
        return metrics.problem or "Nothing was logged.", False
    words = [f"Logged to step {step:,}"]
    max_steps = description.get("max_steps")
    if isinstance(max_steps, int) and max_steps > 0:
        words[0] += f" of {max_steps:,}"
    tokens = metrics.find("tokens_seen")
    if tokens is not None:
        words.append(f"{tokens.last:,.0f} tokens seen")
    if loss is None:
        return f"{', '.join(words)}.", True
    words.append(f"{loss.name} from {loss.values[0]:.3f} to {loss.last:.3f}")
    return f"{', '.join(words)}.", math.isfinite(loss.last)


def cards(metrics: Metrics, series: Series | None, receipt: ReceiptLog | None) -> list[Card]:
    """Those a reader looks for first. What was not logged stays, as ``-``."""
    return [
        _loss_card(metrics),
        _speed_card(metrics),
        _mfu_card(metrics),
        _exposed_card(receipt),
        _skew_card(metrics, series),
        _dead_card(metrics, series),
        _memory_card(metrics),
    ]


def facts(description: Mapping[str, object], sources: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(what, value): layout, model and versions, then where the page's numbers come from."""
    if not description:
        return [
            ("Layout and versions", "There is no run.json: ExpertLoadMonitor, which the strategy adds, writes it."),
            *sources,
        ]
    layout, versions = description.get("layout"), description.get("versions")
    rows = [
        ("Started", f"{description.get('started')}, at step {description.get('first_step')}"),
        ("Layout", _layout_words(layout, description)),
        ("Model", _model_words(description)),
        (
            "Experts",
            f"{description.get('experts_per_layer')} in each of {description.get('layers_with_experts')} layers",
        ),
        (
            "Settings",
            f"precision {description.get('precision')}, recompute {description.get('recompute')}, balance "
            f"{description.get('balance')}, accumulate_grad_batches {description.get('accumulate_grad_batches')}",
        ),
    ]
    if isinstance(versions, Mapping):
        rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return [*rows, *sources]


def _layout_words(layout: object, description: Mapping[str, object]) -> str:
    world = f"{description.get('world')} ranks on {description.get('device')}"
    if not isinstance(layout, Mapping) or not layout:
        return world
    axes = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep")
    dense, expert = (", ".join(f"{axis} {layout.get(axis)}" for axis in part) for part in (axes[:3], axes[3:]))
    inter = f" (cp_inter {layout['cp_inter']})" if layout.get("cp_inter", 1) != 1 else ""
    return f"{world}; dense mesh {dense}{inter}; expert mesh {expert}"


def _model_words(description: Mapping[str, object]) -> str:
    total, of_experts = description.get("parameters"), description.get("expert_parameters")
    if not isinstance(total, int) or not isinstance(of_experts, int) or not total:
        return str(description.get("model"))
    trained = description.get("trained_parameters")
    words = f"{description.get('model')}, {_count(total)} parameters, {of_experts / total:.1%} in experts"
    return words if trained == total or not isinstance(trained, int) else f"{words}, {_count(trained)} trained"


def _count(number: int) -> str:
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= size:
            return f"{number / size:,.2f}{unit}"
    return f"{number:,}"


def _card(id: str, name: str, value: str, note: str, *, mood: str = "") -> Card:
    return {"id": id, "name": name, "value": value, "note": note, "mood": mood}


def _loss_card(metrics: Metrics) -> Card:
    loss, validation = training_loss(metrics), validation_loss(metrics)
    if loss is None:
        if validation is None:
            return _card("final-loss", "Final loss", NOT_LOGGED, "no metric is called a loss")
        return _card("final-loss", "Final loss", f"{validation.last:.3f}", validation.name)
    note = f"{loss.name}, step {loss.steps[-1]:,}"
    if validation is not None:
        note = f"{validation.name} {validation.last:.3f}"
    return _card("final-loss", "Final loss", f"{loss.last:.3f}", note, mood="" if math.isfinite(loss.last) else "bad")


def _speed_card(metrics: Metrics) -> Card:
    speed, of_one = metrics.find("tokens_per_second"), metrics.find("tokens_per_second_per_gpu")
    if speed is None:
        return _card("tokens-per-second", "Tokens/s", NOT_LOGGED, "by ThroughputMonitor")
    note = f"median of {len(speed.values):,}" + ("" if of_one is None else f", {of_one.median:,.0f} of a rank")
    return _card("tokens-per-second", "Tokens/s", f"{speed.median:,.0f}", note)


def _mfu_card(metrics: Metrics) -> Card:
    mfu = metrics.find("mfu")
    if mfu is None:
        return _card("utilisation", "MFU", NOT_LOGGED, "needs the GPU's peak")
    return _card("utilisation", "MFU", f"{mfu.median:.1%}", f"median; last {mfu.last:.1%}")


def _exposed_card(receipt: ReceiptLog | None) -> Card:
    if receipt is None:
        return _card("exposed", "Exposed share", NOT_LOGGED, "by Receipt()")
    share, categories = receipt.exposed_share, [*receipt.exposed_seconds]
    note = f"most for {categories[0].replace('_', ' ')}" if categories else "nothing was waited for"
    mood = "bad" if share > WIDE_EXPOSURE else "good"
    return _card("exposed", "Exposed share", f"{share:.1%}", note, mood=mood)


def _skew_card(metrics: Metrics, series: Series | None) -> Card:
    if series is not None and series.windows:
        window = series.windows[-1]
        experts = float(np.mean([skew(layer) for layer in window.tokens]))
        ranks = float(np.mean([skew(rank_loads(layer, window.ep)) for layer in window.tokens]))
        return _card("last-skew", "Skew", f"{experts:.2f}", f"ranks {ranks:.2f}, {steps_of(window)}")
    logged, of_ranks = metrics.find("expert_load/train/skew"), metrics.find("expert_load/train/rank_skew")
    if logged is None:
        return _card("last-skew", "Skew", NOT_LOGGED, "by ExpertLoadMonitor")
    ranks_note = "" if of_ranks is None else f"ranks {of_ranks.last:.2f}, "
    return _card("last-skew", "Skew", f"{logged.last:.2f}", f"{ranks_note}step {logged.steps[-1]:,}")


def _dead_card(metrics: Metrics, series: Series | None) -> Card:
    if series is not None and series.windows:
        counts = [dead_experts(layer) for layer in series.windows[-1].tokens]
        total, most = sum(counts), max(counts)
        where = f"most, {most}, in layer {short_names(series.layers)[counts.index(most)]}"
        note = where if total else f"of {sum(series.num_experts):,}"
        return _card("dead-experts", "Dead experts", f"{total:,}", note, mood="bad" if total else "good")
    logged = metrics.find("expert_load/train/dead_experts")
    if logged is None:
        return _card("dead-experts", "Dead experts", NOT_LOGGED, "by ExpertLoadMonitor")
    return _card("dead-experts", "Dead experts", f"{logged.last:,.0f}", f"of all layers, step {logged.steps[-1]:,}")


def _memory_card(metrics: Metrics) -> Card:
    measured, planned = (metrics.find(f"plan_check/{name}_gb") for name in ("measured", "predicted"))
    if measured is None:
        return _card("peak", "Peak memory", NOT_LOGGED, "by PlanCheck()")
    note = "without a plan" if planned is None else f"planned {_bytes(planned.last)}"
    return _card("peak", "Peak memory", _bytes(measured.last), note)


def _bytes(gb: float) -> str:
    return f"{gb:,.1f} GB" if gb >= 1 else f"{1e3 * gb:,.2f} MB"
