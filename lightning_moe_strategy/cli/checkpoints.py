"""``lightning-moe inspect``: what a checkpoint holds and whether it is whole; ``consolidate``: one file of it."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_moe_strategy.checkpoint.progress import size

if TYPE_CHECKING:
    from lightning_moe_strategy.checkpoint.description import Description

_INSPECT = """\
Say what a checkpoint holds, of which layout it is, and whether its files are as they were written:

  lightning-moe inspect runs/tiny_cpu/last.ckpt

Exit status: 0 whole, 1 damaged, incomplete or no checkpoint; 2 bad input. No GPU, no other rank.
"""
_CONSOLIDATE = """\
Write a checkpoint directory as the one file that torch.load and any Lightning Trainer read:

  lightning-moe consolidate --ckpt runs/tiny_cpu/last.ckpt --out last-whole.ckpt

One process, which holds the whole of it in memory. Our own strategy, load_from_checkpoint and trainer.test need no
consolidation: they read the directory.
"""


def run_inspect(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = _parser("inspect", _INSPECT)
    parser.add_argument("checkpoint", help="a directory")
    parser.add_argument("--no-verify", action="store_true", help="do not read the files to compare their checksums")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    from lightning_moe_strategy.checkpoint.description import describe, dtype_of, num_bytes_of
    from lightning_moe_strategy.checkpoint.errors import CheckpointError
    from lightning_moe_strategy.checkpoint.read import open_directory

    try:
        with open_directory(options.checkpoint) as checkpoint:
            found = describe(checkpoint)
            started = time.perf_counter()
            if not options.no_verify:
                checkpoint.verify()
            seconds = None if options.no_verify or not found.is_complete else time.perf_counter() - started
            tensors = checkpoint.tensors() if options.tensors else {}
    except (CheckpointError, OSError) as error:
        print(f"lightning-moe inspect: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found.to_json() | {"is_verified": seconds is not None}, indent=1))
    else:
        print("\n".join(_lines(found, seconds)))
        for stored in tensors.values():
            print(f"  {stored.key}  {dtype_of(stored)} {list(stored.shape)}  {size(num_bytes_of(stored))}")
    return 0


def run_consolidate(arguments: Sequence[str]) -> int:
    """The exit status: 0 written, 2 it cannot be."""
    parser = _parser("consolidate", _CONSOLIDATE)
    parser.add_argument("--ckpt", required=True, metavar="DIR", help="a checkpoint directory")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, a new one")
    parser.add_argument("--weights-only", action="store_true", help="without the state of optimizers")
    options = parser.parse_args(arguments)
    from lightning_moe_strategy.checkpoint.consolidate import consolidate
    from lightning_moe_strategy.checkpoint.errors import CheckpointError

    try:
        num_bytes = consolidate(options.ckpt, options.out, with_optimizers=not options.weights_only)
    except (CheckpointError, OSError) as error:
        parser.error(str(error))
    print(f"{options.out}: {size(num_bytes)}")
    return 0


def _lines(found: "Description", seconds: float | None) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    if found.is_complete:
        lines = [f"{found.path}: complete, written with {versions}"]
        degrees = ", ".join(f"{name} {degree}" for name, degree in found.layout.items() if name != "world_size")
        lines.append(f"  layout: {found.layout.get('world_size')} ranks; {degrees}")
    else:
        lines = [f"{found.path}: without a manifest, as Lightning's ModelParallelStrategy writes it"]
    if found.num_steps is not None:
        lines.append(f"  trained: {found.num_steps:,} steps, in epoch {found.epoch}")
    width = max((len(part.name) for part in found.parts), default=0)
    for part in found.parts:
        numbers = f"{part.num_tensors:>7,} tensors  {size(part.num_bytes):>8}"
        lines.append(f"  {part.name:<{width}}  {numbers}  {', '.join(part.dtypes)}")
    for stored in found.largest[:1]:
        lines.append(f"  largest: {stored.key} {list(stored.shape)}")
    if found.num_file_bytes is not None:
        lines.append(f"  files: {found.num_files} of {size(found.num_file_bytes)}, {_verified(found, seconds)}")
    return lines


def _verified(found: "Description", seconds: float | None) -> str:
    if seconds is None:
        return "not verified"
    rate = (found.num_file_bytes or 0) / max(seconds, 1e-9)
    return f"every byte as it was written ({seconds:.2f} s, {size(rate)}/s)"


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"lightning-moe {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
