"""Plans as tables for a terminal, at most 100 columns wide."""

import os
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_moe_strategy.plan.labels import bucket_label, layout_label, mapping, number, tokens_label
from lightning_moe_strategy.plan.planner import ComparisonRow, Plan
from lightning_moe_strategy.plan.summary import difference_row, pipeline_text

WIDTH = 100
BAR_WIDTH = 40


def print_plan(plan: Plan, *, console: Console | None = None) -> None:
    """Layout, memory by bucket, traffic and time of a layer, what the seed says otherwise, warnings, verdict."""
    console, values = console or _console(), plan.to_json()
    console.print(_heading(plan, values))
    for table in (_layout_table(values), _memory_table(values), _layer_table(values)):
        console.print(table)
    console.print(Text(_in_words(values), end="\n\n"))
    if plan.differences:
        console.print(_difference_table(plan))
    for warning in plan.warnings:
        console.print(Text(warning, style="yellow"))
    console.print(_verdict(plan))


def print_ranking(plans: Sequence[Plan], *, console: Console | None = None) -> None:
    """The layouts that a search found, best first, then the verdict on the best."""
    console = console or _console()
    console.print(_heading(plans[0], plans[0].to_json()))
    table = _table("layouts, best first: d_rep,fsdp,cp/e_rep,e_fsdp,ep")
    for name in ("tok/s/GPU", "MFU", "peak GB", "left GB", "tokens", "hides from", "shows", "cp adds"):
        table.add_column(name, justify="right")
    table.columns[0].header = "layout"
    for plan in plans:
        values = plan.to_json()
        memory, efsdp, compute = mapping(values, "memory_gb"), mapping(values, "efsdp"), mapping(values, "compute")
        table.add_row(
            layout_label(mapping(values, "layout")),
            f"{number(compute, 'tokens_per_second_per_gpu'):,.0f}",
            f"{number(compute, 'mfu'):.1%}",
            f"{number(memory, 'total'):,.1f}",
            Text(f"{number(memory, 'headroom'):,.1f}", style="green" if plan.fits else "red"),
            f"{number(efsdp, 'tokens_per_gpu'):,.0f}",
            f"{number(efsdp, 'min_tokens_to_hide'):,.0f}",
            f"{number(efsdp, 'exposed_share'):.1%}",
            f"{number(mapping(values, 'cp'), 'extra_time_share'):.1%}",
        )
    table.caption = "tokens: per GPU and micro-batch, those there and those that hide eFSDP; shows: share of the time"
    table.caption_justify = "left"
    console.print(table)
    console.print(_verdict(plans[0]))


def print_comparison(
    first: Plan,
    second: Plan,
    rows: Sequence[ComparisonRow],
    *,
    names: tuple[str, str],
    console: Console | None = None,
) -> None:
    """The quantities in which two plans differ, then both verdicts."""
    console = console or _console()
    table = _table("two layouts")
    table.columns[0].header = "quantity"
    table.add_column("unit")
    for name in (*names, "B / A"):
        table.add_column(name, justify="right")
    differing = [row for row in rows if row.first != row.second]
    for row in differing:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        table.add_row(row.quantity, row.unit, _digits(row.first), _digits(row.second), ratio)
    console.print(table)
    console.print(f"{len(rows) - len(differing)} quantities are equal.")
    for name, plan in zip(names, (first, second), strict=True):
        console.print(Text.assemble((f"{name}: ", "bold"), _verdict(plan)))


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _console() -> Console:
    # Where no terminal tells its width, rich would take 80 columns.
    width = None if os.isatty(1) or "COLUMNS" in os.environ else WIDTH
    return Console(width=width, highlight=False)


def _heading(plan: Plan, values: Mapping[str, object]) -> Text:
    request = plan.request
    where = f"{number(values, 'world'):,.0f} GPUs of {request.cluster}"
    work = f"{tokens_label(request.context)} tokens of context, micro-batch {request.micro_batch}"
    return Text(f"{request.model} on {where}, {work}, {values['assumptions']} assumptions", style="bold")


def _verdict(plan: Plan) -> Text:
    return Text(plan.verdict, style="green" if plan.fits else "red")


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(no_wrap=True)
    return table


def _layout_table(values: Mapping[str, object]) -> Table:
    layout, parameters = mapping(values, "layout"), mapping(values, "parameters")
    table = _table("layout")
    table.columns[0].header = "mesh"
    for name in ("degrees", "holds"):
        table.add_column(name)
    total, expert_share = number(parameters, "total"), number(parameters, "expert_share")
    inter = int(number(layout, "cp_inter"))
    cp = f"cp {layout['cp']}" + (f" ({inter} x {int(number(layout, 'cp')) // inter})" if inter > 1 else "")
    dense = f"d_rep {layout['d_rep']}, fsdp {layout['fsdp']}, {cp}"
    expert = f"e_rep {layout['e_rep']}, e_fsdp {layout['e_fsdp']}, ep {layout['ep']}"
    table.add_row("dense", dense, f"{total * (1 - expert_share) / 1e9:,.2f} B parameters, sequences over cp")
    table.add_row("experts", expert, f"{total * expert_share / 1e9:,.2f} B parameters ({expert_share:.1%})")
    return table


def _memory_table(values: Mapping[str, object]) -> Table:
    memory = mapping(values, "memory_gb")
    buckets, device, total = mapping(memory, "buckets"), number(memory, "device"), number(memory, "total")
    table = _table(f"memory of a GPU at the peak ({memory['peak_moment']})")
    table.columns[0].header = "bucket"
    table.add_column("GB", justify="right", no_wrap=True, min_width=8)
    table.add_column(f"of {device:,.1f} GB", width=BAR_WIDTH, no_wrap=True)
    for name in buckets:
        gb = number(buckets, name)
        table.add_row(bucket_label(name), f"{gb:,.2f}", _bar(gb, device, "blue"))
    table.add_section()
    fits = bool(values["fits"])
    table.add_row("peak", f"{total:,.2f}", _bar(total, device, "green" if fits else "red"), style="bold")
    table.add_row("headroom", f"{number(memory, 'headroom'):,.2f}", "")
    return table


def _bar(gb: float, device: float, style: str) -> Text:
    """A bar whose full width is the GPU; what does not fit on it ends in an arrow."""
    if gb > device:
        return Text("█" * (BAR_WIDTH - 1) + "▶", style=style)
    eighths = round(8 * BAR_WIDTH * gb / device)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=style)


def _layer_table(values: Mapping[str, object]) -> Table:
    axes, compute = mapping(values, "traffic_gb_per_layer"), mapping(values, "compute")
    table = _table("one layer: GB that a GPU receives, and milliseconds")
    table.columns[0].header = "axis"
    for name in ("forward RDMA", "NVLink", "backward RDMA", "NVLink", "ms"):
        table.add_column(name, justify="right")
    table.add_column("")
    seconds = number(compute, "layer_seconds")
    forward, backward = (1e3 * number(compute, f"{name}_seconds") for name in ("forward", "backward"))
    table.add_row("compute", *[""] * 4, f"{1e3 * seconds:,.2f}", f"{forward:,.1f} + {backward:,.1f}")
    for axis in axes:
        traffic = mapping(axes, axis)
        links = ("forward_rdma", "forward_nvlink", "backward_rdma", "backward_nvlink")
        sizes = [f"{number(traffic, link):,.3f}" if traffic[link] else "" for link in links]
        table.add_row(axis, *sizes, f"{1e3 * number(traffic, 'seconds'):,.2f}", _when(traffic))
    return table


def _when(traffic: Mapping[str, object]) -> str:
    if traffic["per_step"]:
        return "once per step"
    return "behind compute" if traffic["behind_compute"] else "critical path"


def _in_words(values: Mapping[str, object]) -> str:
    efsdp, cp, compute = mapping(values, "efsdp"), mapping(values, "cp"), mapping(values, "compute")
    tokens, threshold = number(efsdp, "tokens_per_gpu"), number(efsdp, "min_tokens_to_hide")
    hides = f"eFSDP hides from {threshold:,.0f} tokens per GPU, {tokens:,.0f} are there"
    extra = f"cp over RDMA adds {number(cp, 'extra_time_share'):.1%}"
    lines = [
        f"{hides}; {number(efsdp, 'exposed_share'):.1%} of a step shows; {extra}",
        f"structural waste {pipeline_text(efsdp)}",
        f"{number(compute, 'tokens_per_second_per_gpu'):,.0f} tokens/s per GPU, MFU {number(compute, 'mfu'):.1%}, at "
        f"{number(compute, 'achieved_tflops'):,.0f} TFLOP/s: {compute['achieved_source']}",
    ]
    saved = mapping(values, "checkpoint")
    lines.append(
        f"a checkpoint has {number(saved, 'total_gb'):,.0f} GB; async_save keeps "
        f"{number(saved, 'async_snapshot_gb'):,.1f} GB of host memory per GPU, "
        f"{number(saved, 'async_snapshot_gb_per_host'):,.0f} per host"
    )
    if values["days"] is not None:
        lines.append(f"{number(values, 'days'):,.1f} days for all tokens")
    return "\n".join(lines)


def _difference_table(plan: Plan) -> Table:
    table = _table("where the seed's round numbers differ from exact dimensions")
    table.columns[0].header = "quantity"
    for name in ("seed", "exact"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for quantity, seed, exact, why in map(difference_row, plan.differences):
        table.add_row(quantity, seed, exact, why)
    return table
