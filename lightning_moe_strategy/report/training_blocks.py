"""Loss, speed, learning rate, phases, waits and memory of a run as blocks of its page."""

from collections.abc import Sequence

from lightning_moe_strategy.report.blocks import Block, thinning_words
from lightning_moe_strategy.report.figures import Line, bar_figure, line_figure, stacked_figure
from lightning_moe_strategy.report.metrics import Curve, Metrics
from lightning_moe_strategy.report.run_files import ReceiptLog

MAX_OTHERS = 12
"""Metrics of the user's own that get a figure; the rest is named."""
MAX_BARS = 400
PHASES = ("data", "forward", "backward", "optimizer")
_OURS = ("expert_load/", "seconds/", "plan_check/", "receipt/", "lr-")
_ELSEWHERE = (
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "tokens_seen",
    "mfu",
    "lr",
    "learning_rate",
    "hp_metric",
)
_NOT_TRAINING = ("val", "test", "router_loss/", *_OURS)
_TRAIN_LOSSES = ("train_loss_step", "train_loss", "train/loss_step", "train/loss", "loss_step", "loss")


def training_loss(metrics: Metrics) -> Curve | None:
    """The loss that is trained: by its usual names, else the first metric that is called a loss."""
    found = metrics.find(*_TRAIN_LOSSES)
    others = [name for name in _losses(metrics) if not name.startswith(_NOT_TRAINING)]
    return found or next((metrics.curves[name] for name in others), None)


def validation_loss(metrics: Metrics) -> Curve | None:
    """Of validation; None where it is not logged."""
    return next((metrics.curves[name] for name in _losses(metrics) if name.startswith("val")), None)


def training_blocks(metrics: Metrics, receipt: ReceiptLog | None) -> list[Block]:
    """In reading order; what the run did not log says what logs it."""
    return [
        _loss_block(metrics),
        _speed_block(metrics),
        _mfu_block(metrics),
        _rate_block(metrics),
        _phase_block(metrics),
        _receipt_block(receipt),
        _memory_block(metrics),
        *_other_blocks(metrics),
    ]


def _losses(metrics: Metrics) -> list[str]:
    return [name for name in metrics.curves if "loss" in name.lower() and not name.startswith(("router_loss/", *_OURS))]


def _lines(curves: Sequence[Curve]) -> list[Line]:
    thinned = [curve.thinned() for curve in curves]
    return [Line(name=curve.name, x=curve.steps, y=curve.values) for curve in thinned]


def _loss_block(metrics: Metrics) -> Block:
    curves = [metrics.curves[name] for name in _losses(metrics) if not name.endswith("_epoch")]
    if not curves:
        missing = (
            metrics.problem or "No metric is called a loss: log it in training_step, self.log('train_loss', loss)."
        )
        return Block(id="loss", title="Loss", missing=missing, is_wide=True)
    caption = (
        f"As the run logged it, over optimizer steps. A gap is a value that was not finite.{thinning_words(curves)}"
    )
    figure = line_figure(_lines(curves), y_title="nats per token")
    return Block(id="loss", title="Loss", caption=caption, drawings=[figure], is_wide=True)


def _speed_block(metrics: Metrics) -> Block:
    curve = metrics.find("tokens_per_second")
    if curve is None:
        missing = metrics.problem or (
            "ThroughputMonitor logs it from its second reading on, every 10 steps; the strategy adds it. A shorter run "
            "needs ThroughputMonitor(every_n_steps=1)."
        )
        return Block(id="speed", title="Tokens per second", missing=missing)
    caption = f"All ranks together; a dip is time that something else took.{thinning_words([curve])}"
    figure = line_figure(_lines([curve]), y_title="tokens/s")
    return Block(id="speed", title="Tokens per second", caption=caption, drawings=[figure])


def _mfu_block(metrics: Metrics) -> Block:
    curve = metrics.find("mfu")
    if curve is None:
        missing = metrics.problem or (
            "ThroughputMonitor logs it where it knows the GPU's peak and the model's FLOPs: "
            "ThroughputMonitor(peak_flops=...) gives the first, a ModelConfig or a Hugging Face config the second."
        )
        return Block(id="mfu", title="Model FLOPs utilisation", missing=missing)
    percent = Curve(name="MFU", steps=curve.steps, values=[100 * value for value in curve.values])
    words = thinning_words([curve])
    caption = f"The model's own FLOPs over the peak of the GPUs; nothing that is computed again counts.{words}"
    figure = line_figure(_lines([percent]), y_title="% of the peak")
    return Block(id="mfu", title="Model FLOPs utilisation", caption=caption, drawings=[figure])


def _rate_block(metrics: Metrics) -> Block:
    names = [name for name in metrics.curves if name.startswith("lr-") or name in ("lr", "learning_rate")]
    curves = [metrics.curves[name] for name in names]
    if not curves:
        missing = metrics.problem or "Lightning's LearningRateMonitor() among the callbacks logs it."
        return Block(id="rate", title="Learning rate", missing=missing)
    caption = f"Of every parameter group.{thinning_words(curves)}"
    figure = line_figure(_lines(curves), y_title="learning rate")
    return Block(id="rate", title="Learning rate", caption=caption, drawings=[figure])


def _phase_block(metrics: Metrics) -> Block:
    found = [metrics.find(f"seconds/{phase}") for phase in PHASES]
    curves = [curve for curve in found if curve is not None]
    if not curves:
        missing = metrics.problem or (
            "ThroughputMonitor logs the seconds of each phase from its second reading on; the strategy adds it."
        )
        return Block(id="phases", title="Phases of a step", missing=missing)
    # Stacked areas need the same steps: every curve of the monitor has them.
    lines = [
        Line(
            name=curve.name.removeprefix("seconds/"), x=curve.steps[:: _every(curve)], y=curve.values[:: _every(curve)]
        )
        for curve in curves
    ]
    caption = "Seconds of an optimizer step, mean over the ranks, one phase above the other; their top is the step."
    figure = stacked_figure(lines, y_title="seconds")
    return Block(id="phases", title="Phases of a step", caption=caption, drawings=[figure])


def _every(curve: Curve) -> int:
    return -(-len(curve.values) // MAX_BARS)


def _receipt_block(receipt: ReceiptLog | None) -> Block:
    title = "What the step waited for"
    if receipt is None:
        missing = "The callback Receipt() writes receipt.jsonl: seconds that compute waited for communication."
        return Block(id="receipt", title=title, missing=missing)
    drawn = receipt.averaged(MAX_BARS)
    steps, totals = [line.step for line in drawn.lines], receipt.exposed_seconds
    lines = [
        Line(name=_words(name), x=steps, y=[line.exposed.get(name, 0.0) for line in drawn.lines]) for name in totals
    ]
    first = f" The first layer that was not hidden: {receipt.first_layer}." if receipt.first_layer else ""
    averaged = "" if drawn is receipt else f" Averages of neighbours are drawn, of {len(receipt.lines):,} readings."
    caption = (
        f"Seconds of a step in which compute waited for communication: {receipt.exposed_share:.1%} of the time."
        f"{first}{averaged}"
    )
    num_steps, planned = sum(line.num_steps for line in receipt.lines), receipt.planned
    rows = [
        [_words(name), _ms(seconds / num_steps), f"{seconds / receipt.seconds:.1%}"]
        + ([_ms(planned[name]) if name in planned else ""] if planned else [])
        for name, seconds in totals.items()
    ]
    return Block(
        id="receipt",
        title=title,
        caption=caption,
        drawings=[stacked_figure(lines, y_title="seconds of a step")] if lines else [],
        head=("waited for", "mean of a step", "share", *(["planned"] if planned else [])),
        rows=rows,
    )


def _words(category: str) -> str:
    return category.replace("_", " ")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _memory_block(metrics: Metrics) -> Block:
    measured, planned = (metrics.find(f"plan_check/{name}_gb") for name in ("measured", "predicted"))
    if measured is None:
        missing = metrics.problem or "PlanCheck() among the callbacks logs the peak of the second step beside its plan."
        return Block(id="memory", title="Memory, planned and measured", missing=missing)
    bars = {"measured": measured.last} if planned is None else {"planned": planned.last, "measured": measured.last}
    caption = "Peak of tensors in the second step, on the rank with most. " + (
        "PlanCheck had no plan for this run: its log line says why."
        if planned is None
        else f"Measured over planned: {measured.last / planned.last:.3f}."
        if planned.last
        else ""
    )
    in_mb = max(bars.values()) < 1
    scale, unit = (1e3, "MB") if in_mb else (1.0, "GB")
    heights = [scale * value for value in bars.values()]
    figure = bar_figure(Line(name="peak", x=[*bars], y=heights), y_title=unit, x_title="", highest=max(heights))
    return Block(id="memory", title="Memory, planned and measured", caption=caption, drawings=[figure])


def _other_blocks(metrics: Metrics) -> list[Block]:
    drawn = {*_losses(metrics), *_ELSEWHERE}
    names = [name for name in metrics.curves if name not in drawn and not name.startswith(_OURS)]
    blocks = [
        Block(
            id=f"metric-{index}",
            title=name,
            caption=f"As the run logged it.{thinning_words([metrics.curves[name]])}",
            drawings=[line_figure(_lines([metrics.curves[name]]), y_title="")],
        )
        for index, name in enumerate(names[:MAX_OTHERS])
    ]
    if len(names) > MAX_OTHERS:
        rest = names[MAX_OTHERS:]
        words = (
            f"{len(rest):,} more are in {metrics.source}: {', '.join(rest[:40])}{', ...' if len(rest) > 40 else '.'}"
        )
        blocks.append(Block(id="more", title="More metrics", caption=words, is_wide=True))
    return blocks
