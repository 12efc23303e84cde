"""A plan as one HTML page, readable offline, with sliders that step through plans computed here.

Every value on the page comes from the planner: its script only looks up what was computed for a position of the
sliders.
"""

import dataclasses
import html
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.figures import (
    THEMES,
    Curves,
    Figure,
    context_figure,
    memory_figure,
    overlap_figure,
    ranking_figure,
)
from lightning_moe_strategy.plan.labels import layout_label, tokens_label
from lightning_moe_strategy.plan.page_template import TEMPLATE
from lightning_moe_strategy.plan.planner import Json, Plan
from lightning_moe_strategy.plan.search import Degrees, Evaluation, divides_context, price, ranked, with_workload
from lightning_moe_strategy.plan.summary import difference_row, facts, summary

CONTEXT_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
RDMA_FACTORS = (1 / 2, 1, 2, 4)
FLOPS_FACTORS = (1 / 2, 1, 2, 4)
"""Steps of the sliders around the plan. FLOP/s stay below the peak of the GPU."""
NUM_RANKED = 10
NUM_CURVES = 4
"""Layouts whose peak is drawn over the context: the plan's, then the best of other degrees of cp."""

_FIGURES = (
    ("memory", "Memory at the peak", "What one GPU holds when it holds most, bucket by bucket."),
    ("overlap", "Does eFSDP hide?", "Traffic of a layer does not grow with tokens; compute does, at this context."),
    ("reach", "How long a context fits", "Peak of this layout and of the best others as the sequence grows."),
    (
        "ranking",
        "Layouts that fit, best first",
        "The best of the world: d_rep,fsdp,cp/e_rep,e_fsdp,ep. Bold: this plan.",
    ),
)


def write_page(shown: Plan, path: Path) -> None:
    """Write the page of a plan; the file appears complete or not at all.

    Raises:
        PlanError: the file cannot be written there.
    """
    with _renamed_when_complete(path) as unfinished:
        unfinished.write_text(page_html(shown), encoding="utf-8")


def page_html(shown: Plan) -> str:
    """The page's HTML, plotly.js (about 5 MB) included."""
    from plotly.offline import get_plotlyjs

    request, cluster = shown.request, shown.workload.cluster
    data = json.dumps(_data(shown), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = f"{shown.workload.model.name} on {request.gpus:,} {cluster.gpu}"
    words = f"{tokens_label(request.context)} tokens of context, {cluster.name}, {request.assumptions} assumptions"
    filled = TEMPLATE.replace("{{title}}", html.escape(title)).replace("{{subtitle}}", html.escape(words))
    return filled.replace("{{data}}", data).replace("{{plotly}}", get_plotlyjs())


@dataclass(frozen=True)
class _Slider:
    id: str
    name: str
    values: tuple[float, ...]
    label: Callable[[float], str]
    plan: float
    """Of the values, the plan's own."""

    def to_json(self) -> Json:
        steps, start = [self.label(value) for value in self.values], self.values.index(self.plan)
        return {"id": self.id, "name": self.name, "steps": [*steps], "start": start, "last": len(steps) - 1}


class _Shelf:
    """Values by number, equal ones once: most figures do not change with most sliders."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self._numbers: dict[str, int] = {}

    def put(self, value: object) -> int:
        number = self._numbers.setdefault(json.dumps(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def _data(shown: Plan) -> dict[str, object]:
    """All that the script reads: sliders, their states, and the summaries and drawings that the states number."""
    sliders = _sliders(shown)
    contexts, bandwidths, flops = (slider.values for slider in sliders)
    curves = _curves(shown, contexts)
    summaries, drawings = _Shelf(), [_Shelf() for _ in _FIGURES]

    def state(context: float, bandwidth: float, achieved: float) -> Json:
        here = _at(shown, int(context), bandwidth, achieved)
        values = here.to_json()
        figures = _draw(here, values, curves)
        numbers = [shelf.put(figure) for shelf, figure in zip(drawings, figures, strict=True)]
        return {"summary": summaries.put(summary(values)), "figures": [*numbers]}

    states = [[[state(context, rdma, rate) for rate in flops] for rdma in bandwidths] for context in contexts]
    figures = [
        {"id": name, "title": title, "caption": caption, "drawings": shelf.values}
        for (name, title, caption), shelf in zip(_FIGURES, drawings, strict=True)
    ]
    return {
        "sliders": [slider.to_json() for slider in sliders],
        "states": states,
        "summaries": summaries.values,
        "figures": figures,
        "facts": facts(shown.to_json()),
        "differences": [[*difference_row(each)] for each in shown.differences],
        "themes": THEMES,
    }


def _at(shown: Plan, context: int, rdma_bytes_per_second: float, achieved_flops: float) -> Plan:
    """The layout of the plan in another place of the sliders."""
    cluster = dataclasses.replace(shown.workload.cluster, rdma_bytes_per_second=rdma_bytes_per_second)
    changes = {"context": context, "cluster": cluster, "achieved_flops": achieved_flops}
    arithmetic = with_workload(shown.evaluation.arithmetic, **changes)
    request = dataclasses.replace(shown.request, context=context, achieved_tflops=achieved_flops / 1e12)
    return Plan(request, price(arithmetic, shown.evaluation.dense.side, shown.evaluation.experts.side))


def _draw(here: Plan, values: Json, curves: Curves) -> list[Figure]:
    """The figures of one place of the sliders, in the order of ``_FIGURES``."""
    evaluation, work = here.evaluation, here.workload
    best = [each for each in ranked(evaluation.arithmetic, Degrees())[:NUM_RANKED] if each.fits]
    if here.fits and _label(evaluation) not in map(_label, best):
        best.append(evaluation)
    return [
        memory_figure(values),
        overlap_figure(values, evaluation.dense.links + evaluation.experts.links),
        context_figure(curves, context=work.context, device_gb=work.cluster.memory_bytes / 1e9),
        ranking_figure(best, chosen=_label(evaluation)),
    ]


def _sliders(shown: Plan) -> tuple[_Slider, _Slider, _Slider]:
    work, cp = shown.workload, shown.evaluation.dense.side.cp
    tokens = [work.context * factor for factor in CONTEXT_FACTORS]
    contexts = tuple(int(n) for n in tokens if n == int(n) and divides_context(int(n), cp))
    bandwidths = tuple(work.cluster.rdma_bytes_per_second * factor for factor in RDMA_FACTORS)
    rates = [work.achieved_flops * factor for factor in FLOPS_FACTORS]
    flops = tuple(rate for rate in rates if rate <= max(work.cluster.peak_flops, work.achieved_flops))
    return (
        _Slider("context", "Context", contexts, lambda n: f"{tokens_label(n)} tokens", work.context),
        _Slider(
            "rdma",
            "RDMA of one GPU",
            bandwidths,
            lambda n: f"{n / 1e9:,.4g} GB/s",
            work.cluster.rdma_bytes_per_second,
        ),
        _Slider("flops", "One GPU achieves", flops, lambda n: f"{n / 1e12:,.4g} TFLOP/s", work.achieved_flops),
    )


def _curves(shown: Plan, contexts: Sequence[float]) -> Curves:
    """Peak GB over context: the plan's layout, then the best one of each other cp at the plan's own context."""
    arithmetic = shown.evaluation.arithmetic
    by_cp: dict[tuple[int, int], Evaluation] = {}
    for evaluation in (shown.evaluation, *ranked(arithmetic, Degrees())):
        by_cp.setdefault((evaluation.dense.side.cp, evaluation.dense.side.cp_inter), evaluation)
    curves = {}
    for evaluation in [*by_cp.values()][:NUM_CURVES]:
        dense, experts = evaluation.dense.side, evaluation.experts.side
        points = [int(context) for context in contexts if divides_context(int(context), dense.cp)]
        longer = [price(with_workload(arithmetic, context=context), dense, experts) for context in points]
        totals = [each.peak.total / 1e9 for each in longer]
        curves[_label(evaluation)] = list(zip(points, totals, strict=True))
    return curves


def _label(evaluation: Evaluation) -> str:
    return layout_label({**vars(evaluation.dense.side), **vars(evaluation.experts.side)})


@contextmanager
def _renamed_when_complete(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which replaces it when the block ends well."""
    refusal = f"html({str(path)!r}) cannot be written: {{reason}}. Give a file in a folder you may write to."
    unfinished = path.parent / f".{path.name}.{os.getpid()}.unfinished"
    try:
        if path.exists() and not path.is_file():
            raise PlanError(refusal.format(reason="it is a folder" if path.is_dir() else "it is not a plain file"))
        # Only a file that did not exist before may be removed below.
        unfinished.touch(exist_ok=False)
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(refusal.format(reason=error.strerror or error)) from None
