"""``lightning-moe plan``: what a run needs of every GPU and link, before one is rented. Starts without torch."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.planner import Json, JsonValue, Plan, PlanRequest, compare, parse_layout, plan, search

_EPILOG = """\
examples:
  lightning-moe plan --model glm-5.2 --cluster gb200-nvl72 --gpus 256 --context 1M
  lightning-moe plan --model path/to/config.json --cluster h200-nvl8 --gpus 64 --context 128k --search
  lightning-moe plan --model glm-5.2 --gpus 256 --context 1M --compare 4,1,64/4,64 2,2,64/4,64
  lightning-moe plan --model glm-5.2 --gpus 256 --context 1M --assumptions seed --json
  lightning-moe plan --model glm-5.2 --gpus 256 --context 1M --html plan.html

Degrees left out are chosen, as --search ranks them. Exit status: 0 planned, whether it fits or not; 2 bad input.
"""

_CONTEXT_UNITS = {"k": 1024, "m": 1024**2}
_TOKEN_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

_DEGREES = {
    "d_rep": "copies of the dense parameters",
    "fsdp": "dense shards beyond those over cp, each with its own samples",
    "cp": "GPUs that share one sequence",
    "cp_inter": "of cp, the NVLink domains that a sequence is spread over (2-D context parallel)",
    "e_rep": "copies of the expert parameters",
    "e_fsdp": "shards of each expert, gathered while the layer before computes",
    "ep": "GPUs that the experts are spread over",
}
_CHOICES = {
    "recompute": "what is computed again in the backward pass",
    "dispatcher": "how tokens travel to experts",
    "balance": "routing to provide memory for (default: worst under the seed's assumptions, else balanced)",
    "optimizer": "its state is part of the memory",
    "assumptions": "exact: counted from the dimensions; seed: the round numbers of the design's derivation",
}


def run_plan(arguments: Sequence[str]) -> int:
    """Plan what the arguments ask for and print it; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.html is not None and options.compare:
        parser.error("--html shows one plan, --compare two. Leave one of them out.")
    try:
        _plan_and_print(options)
        sys.stdout.flush()
    except PlanError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # Its reader, such as head, has what it wanted; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _plan_and_print(options: argparse.Namespace) -> None:
    given = vars(options)
    names = {field.name for field in dataclasses.fields(PlanRequest)}
    request = PlanRequest(**{name: value for name, value in given.items() if name in names})
    if options.compare:
        _print_comparison(request, options)
        return
    plans = search(request, limit=20) if options.search else [plan(request)]
    # The page comes first: where it cannot be written, nothing has been printed.
    if options.html is not None:
        from lightning_moe_strategy.plan.page import write_page

        write_page(plans[0], Path(options.html))
    if options.json:
        found: list[JsonValue] = [each.to_json() for each in plans]
        _print_json(found if options.search else found[0])
        return
    from lightning_moe_strategy.plan.table import print_plan, print_ranking

    if options.search:
        print_ranking(plans)
    else:
        print_plan(plans[0])
    if options.html is not None:
        print(f"page: {options.html}")


def _print_comparison(request: PlanRequest, options: argparse.Namespace) -> None:
    layouts: list[str] = options.compare
    first, second = (_plan_layout(request, layout) for layout in layouts)
    rows = compare(first, second)
    if options.json:
        json_rows: list[JsonValue] = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
        comparison: Json = {"first": first.to_json(), "second": second.to_json(), "rows": json_rows}
        _print_json(comparison)
        return
    from lightning_moe_strategy.plan.table import print_comparison

    print_comparison(first, second, rows, names=(layouts[0], layouts[1]))


def _plan_layout(request: PlanRequest, layout: str) -> Plan:
    degrees: dict[str, Any] = dict(parse_layout(layout))
    return plan(dataclasses.replace(request, **degrees))


def _print_json(value: JsonValue) -> None:
    # JSON has no Infinity: what cannot be expressed must fail here, not in whoever reads it.
    print(json.dumps(value, indent=2, allow_nan=False))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, whatever line breaks a user's own words bring along.
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightning-moe plan",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", metavar="M", required=True, help="a preset, a Hugging Face config.json, or a YAML of ours"
    )
    parser.add_argument("--cluster", metavar="C", help=f"a preset or a YAML (default: {PlanRequest.cluster})")
    parser.add_argument("--gpus", type=int, metavar="N", help=f"number of GPUs (default: {PlanRequest.gpus})")
    parser.add_argument(
        "--context", type=_context, metavar="N", help="tokens of one sequence, like 262144, 256k or 1M (default: 1M)"
    )
    degrees = parser.add_argument_group("degrees, each chosen when left out")
    for name, meaning in _DEGREES.items():
        degrees.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--micro_batch", type=int, metavar="N", help="sequences of a micro-batch in each cp group (default: 1)"
    )
    hints = get_type_hints(PlanRequest)
    for name, meaning in _CHOICES.items():
        default = getattr(PlanRequest, name)
        choices = _literals(hints[name])
        shown = meaning if default is None else f"{meaning} (default: {default})"
        work.add_argument(f"--{name}", choices=choices, help=shown)
    _add_chunks(work)
    work.add_argument(
        "--achieved_tflops", type=float, metavar="N", help="TFLOP/s that a GPU reaches (default: published runs)"
    )
    work.add_argument("--tokens", type=_tokens, metavar="N", help="tokens of the whole run, like 15T, for its days")
    work.add_argument(
        "--fa4_pr_2816",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="sparse attention kernels that keep less, as ours (FA4 PR 2816; default: no under the seed's, else yes)",
    )
    work.add_argument(
        "--fa4_token_chunk",
        type=int,
        metavar="N",
        help="tokens whose dS that kernel has in memory at a time, 0 a whole sequence's (default: none, as ours)",
    )
    output = parser.add_argument_group("output")
    kind = output.add_mutually_exclusive_group()
    kind.add_argument("--search", action="store_true", default=False, help="rank the layouts of the world")
    kind.add_argument(
        "--compare",
        nargs=2,
        default=None,
        metavar=("A", "B"),
        help="two layouts side by side, each d_rep,fsdp,cp/e_fsdp,ep or d_rep,fsdp,cp/e_rep,e_fsdp,ep; 2-D cp as 8x8",
    )
    output.add_argument("--json", action="store_true", default=False, help="print JSON instead of tables")
    output.add_argument("--html", default=None, metavar="FILE", help="write a page with sliders, readable offline")
    return parser


def _literals(hint: object) -> list[str]:
    """The strings of ``Literal[...]`` or of ``Literal[...] | None``."""
    if getattr(hint, "__origin__", None) is Literal:
        return list(get_args(hint))
    return [word for part in get_args(hint) for word in _literals(part)]


def _add_chunks(work: "argparse._ArgumentGroup") -> None:
    work.add_argument(
        "--ep_chunks",
        type=_chunks,
        metavar="none|adaptive|N",
        help=f"parts of a layer's tokens that go through its experts in turn (default: {PlanRequest.ep_chunks})",
    )
    work.add_argument(
        "--ep_chunk_bytes",
        type=int,
        metavar="N",
        help="of expert rows, what adaptive chunks stay below (default: 1.5 times those of even routing)",
    )


def _chunks(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _context(text: str) -> int:
    return int(_with_unit(text, _CONTEXT_UNITS, "a whole number of tokens such as 262144, 256k (1024) or 1M (1024^2)"))


def _tokens(text: str) -> float:
    return _with_unit(text, _TOKEN_UNITS, "a number of tokens such as 2e12 or 15T")


def _with_unit(text: str, units: dict[str, float] | dict[str, int], rule: str) -> float:
    unit = text[-1:].lower()
    digits, factor = (text[:-1], units[unit]) if unit in units else (text, 1)
    try:
        value = float(digits) * factor
    except ValueError:
        value = float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"{text!r} must be {rule}.")
    if units is _CONTEXT_UNITS and value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be {rule}.")
    return value
