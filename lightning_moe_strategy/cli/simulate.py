"""Memory, traffic, arithmetic and time of a configured run, from the code that would run.

It takes the model, layout, precision, recompute, clipping and batch of a LightningCLI file to their real world size in
this one process, without a GPU. Data is not read: a batch has the configured number and length of sequences.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_moe_strategy.cli.configured_run import simulate_configured
from lightning_moe_strategy.expert_parallel.assumed_routing import RecordedTokens, RoutingName
from lightning_moe_strategy.plan.cluster import CLUSTERS
from lightning_moe_strategy.simulation.report import Simulation
from lightning_moe_strategy.simulation.trace import to_trace

_EPILOG = """\
--routing FILE is JSON with the tokens each expert got in a run:
  {"tokens_per_expert": {"model.layers.0.mlp.experts": [812, 790, ...], ...}}
by the name of each layer's experts module, or one list for all layers. Proportions count, not the total: every rank
sends by them, and this one receives what the ranks of its ep group send to its experts. ExpertLoadMonitor.last_tokens
holds such counts:
  json.dump({"tokens_per_expert": {name: t.tolist() for name, t in monitor.last_tokens.items()}}, file)

Exit status: 0 simulated, whether it fits or not; 2 bad input.
"""


def run_simulate(arguments: Sequence[str]) -> int:
    """Simulate and print. Exit code 2 and one line for a configuration that cannot be simulated."""
    options = _parser().parse_args(arguments)
    try:
        outputs = _outputs(options)
        simulation = simulate_configured(
            options.config,
            world=options.world,
            rank=options.rank,
            routing=_routing(options.routing),
            cluster=options.cluster,
            achieved_tflops=options.achieved_tflops,
            needs_seconds=options.trace is not None,
        )
        _write(simulation, outputs)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"lightning-moe simulate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(simulation.to_text())
    return 0


_Writer = Callable[[Simulation, Path], None]


def _outputs(options: argparse.Namespace) -> dict[Path, _Writer]:
    """What is to be written where, before anything is computed: a path that cannot be written is known at once."""
    outputs: dict[Path, _Writer] = {}
    for name, write in (("json", _write_json), ("png", _write_png), ("trace", _write_trace)):
        given = getattr(options, name)
        if given is None:
            continue
        path = Path(given)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError(f"--{name}({given}) cannot be written. Give a file in a folder that exists.")
        if path in outputs:
            raise ValueError(f"--{name}({given}) is written by another option too. Give each a file of its own.")
        outputs[path] = write
    return outputs


def _write(simulation: Simulation, outputs: dict[Path, _Writer]) -> None:
    """All files or none: each beside its place first."""
    beside = {path: path.with_name(f"{path.name}.part") for path in outputs}
    try:
        for path, write in outputs.items():
            write(simulation, beside[path])
        for path in outputs:
            beside[path].replace(path)
    finally:
        for part in beside.values():
            part.unlink(missing_ok=True)


def _write_json(simulation: Simulation, path: Path) -> None:
    path.write_text(json.dumps(simulation.to_json(), indent=1, allow_nan=False) + "\n")


def _write_trace(simulation: Simulation, path: Path) -> None:
    path.write_text(json.dumps(to_trace(simulation), allow_nan=False) + "\n")


def _write_png(simulation: Simulation, path: Path) -> None:
    # matplotlib takes a second to import.
    from lightning_moe_strategy.simulation.picture import draw_memory

    draw_memory(simulation, path)


def _routing(given: str) -> RoutingName | RecordedTokens:
    names: dict[str, RoutingName] = {"balanced": "balanced", "worst": "worst"}
    if given in names:
        return names[given]
    try:
        recorded: Any = json.loads(Path(given).read_text())
    except OSError:
        raise ValueError(f"--routing({given}) must be balanced, worst or a JSON file that can be read.") from None
    except ValueError as error:
        raise ValueError(f"--routing({given}) is no JSON: {error}. See lightning-moe simulate --help.") from None
    tokens: Any = recorded.get("tokens_per_expert") if isinstance(recorded, dict) else None
    if not isinstance(tokens, dict | list):
        raise ValueError(
            f"--routing({given}) has no tokens_per_expert with the counts of every layer, or one list for all. See "
            "lightning-moe simulate --help."
        )
    return tokens


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightning-moe simulate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="a LightningCLI file, as 'lightning-moe fit' takes it")
    parser.add_argument(
        "--world", type=int, help="number of GPUs, a multiple of the config's: copies (d_rep, e_rep) are added"
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank whose step is simulated (default: 0)")
    parser.add_argument(
        "--routing",
        default="balanced",
        metavar="balanced|worst|FILE",
        help="worst: every rank sends this one all it can; FILE: tokens go as in a recorded run (default: balanced)",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME|YAML",
        help=f"for the seconds: {', '.join(CLUSTERS)}, or a YAML as 'lightning-moe plan' takes it (default: by the "
        "size of the config's NVLink domains)",
    )
    parser.add_argument(
        "--achieved_tflops", type=float, metavar="N", help="TFLOP/s that a GPU reaches (default: published runs)"
    )
    output = parser.add_argument_group("output, beside the page")
    output.add_argument("--json", metavar="FILE", help="the figures")
    output.add_argument("--png", metavar="FILE", help="memory over the step, a picture")
    output.add_argument(
        "--trace", metavar="FILE", help="compute, NVLink and RDMA over the step, to be opened in ui.perfetto.dev"
    )
    return parser
