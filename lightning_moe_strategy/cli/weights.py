"""``lightning-moe import`` and ``export``: weights of Hugging Face in and out. Help needs no torch."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPES = ("float32", "bfloat16", "float16")

_IMPORT = """\
Write the weights of a Hugging Face folder as a checkpoint that any layout loads:

  lightning-moe import --hf Qwen3-30B-A3B --out start.ckpt
  lightning-moe fit --config my.yaml --ckpt_path start.ckpt

One process, a part of a tensor at a time; weights in FP32, no state of a training. To start a run from such a folder
no import is needed: model.init_args.pretrained of HFCausalLM reads it, every rank its own part.
"""
_EXPORT = """\
Write the weights of a checkpoint as a Hugging Face folder that from_pretrained loads:

  lightning-moe export --ckpt last.ckpt --out trained --config Qwen3-30B-A3B

One process, a tensor at a time: names of single experts, an index, the configuration, and the tokenizer of --config.
The folder appears when it is complete.
"""


def run_import(arguments: Sequence[str]) -> int:
    """The exit status: 0 written, 2 a folder that cannot be imported."""
    parser = _parser("import", _IMPORT)
    parser.add_argument("--hf", required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--out", required=True, metavar="CKPT", help="the checkpoint to write, a new directory")
    parser.add_argument(
        "--attribute",
        default="model",
        metavar="NAME",
        help="where your LightningModule has its transformers model (default: model, as HFCausalLM)",
    )
    options = parser.parse_args(arguments)
    if Path(options.out).exists():
        parser.error(f"--out({options.out}) exists already. Give a new name, or move that one away.")
    _require_folder(parser, "--hf", options.hf)
    from lightning_moe_strategy.checkpoint.errors import CheckpointError

    try:
        _require_transformers()
        from lightning_moe_strategy.hugging_face_weights.into_checkpoint import into_checkpoint

        num_bytes = into_checkpoint(Path(options.hf), options.out, attribute=options.attribute, is_shown=True)
    except CheckpointError as error:
        parser.error(str(error))
    print(f"{options.out}: {_size(num_bytes)} of weights. Start from them: --ckpt_path {options.out}")
    return 0


def run_export(arguments: Sequence[str]) -> int:
    """The exit status: 0 written, 2 a checkpoint that cannot be exported."""
    parser = _parser("export", _EXPORT)
    parser.add_argument("--ckpt", required=True, metavar="CKPT", help="checkpoint, a directory or one file")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write, a new one")
    parser.add_argument(
        "--config",
        metavar="HF_DIR",
        help="folder of the model it was made from: its configuration, its tokenizer and, if it has weights, their "
        "dtypes (default: the configuration in the checkpoint, no tokenizer)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of all weights (default: as in --config)")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one file, as 500MB or 5GB (default: 5GB)"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not read the checkpoint to compare its checksums")
    options = parser.parse_args(arguments)
    max_shard_bytes = _bytes(parser, options.max_shard_size)
    if not Path(options.ckpt).exists():
        parser.error(f"--ckpt({options.ckpt}) does not exist. Give a checkpoint, a directory or one file.")
    if options.config is not None:
        _require_folder(parser, "--config", options.config)
    from lightning_moe_strategy.checkpoint.errors import CheckpointError

    try:
        _require_transformers()
        import torch

        from lightning_moe_strategy.hugging_face_weights.out_of_checkpoint import out_of_checkpoint

        num_bytes = out_of_checkpoint(
            options.ckpt,
            Path(options.out),
            like=None if options.config is None else Path(options.config),
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            max_shard_bytes=max_shard_bytes,
            is_verified=not options.no_verify,
            is_shown=True,
        )
    except CheckpointError as error:
        parser.error(str(error))
    tokenizer = "" if options.config else " No tokenizer: name the folder that has one with --config."
    print(f"{options.out}: {_size(num_bytes)}. Load it with from_pretrained.{tokenizer}")
    return 0


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"lightning-moe {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _require_folder(parser: argparse.ArgumentParser, option: str, folder: str) -> None:
    if not Path(folder).is_dir():
        parser.error(
            f"{option}({folder}) is no folder here, and nothing is downloaded. Fetch the model first: hf download "
            f"{folder} --local-dir DIR"
        )


def _require_transformers() -> None:
    from importlib.util import find_spec

    from lightning_moe_strategy.checkpoint.errors import CheckpointError

    if find_spec("transformers") is None:
        raise CheckpointError("transformers is not installed: pip install 'lightning-moe-strategy[hf]'.")


def _bytes(parser: argparse.ArgumentParser, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        parser.error(f"--max-shard-size({text}) must be a size above 0, as 500MB or 5GB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _size(num_bytes: int) -> str:
    from lightning_moe_strategy.checkpoint.progress import size

    return size(num_bytes)
