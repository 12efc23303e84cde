"""``lightning-moe export``: a checkpoint becomes a folder that ``from_pretrained`` loads, a tensor at a time."""

import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_moe_strategy.checkpoint.progress import progress
from lightning_moe_strategy.checkpoint.publish import discard_staging, publish, staging_of
from lightning_moe_strategy.checkpoint.read import open_checkpoint
from lightning_moe_strategy.checkpoint.single_file import SingleFile
from lightning_moe_strategy.hugging_face_weights.conversion import Made, out_of_model
from lightning_moe_strategy.hugging_face_weights.files import INDEX, SINGLE, WeightFiles
from lightning_moe_strategy.hugging_face_weights.model import (
    Config,
    config_from,
    model_on_meta,
    own_names,
    read_config,
)
from lightning_moe_strategy.hugging_face_weights.shards import NewTensor, ShardWriter

_COPIED = (
    "tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json", "*.model", "*.tiktoken", "*processor_config.json", "LICENSE*",
)  # fmt: skip
"""Of the folder that gives the configuration: what a model needs to be used, beside its weights."""


Saved = OpenCheckpoint | SingleFile


def out_of_checkpoint(
    checkpoint: str,
    folder: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    is_verified: bool = True,
    is_shown: bool = False,
) -> int:
    """Write the weights of ``checkpoint`` into the new ``folder``; the bytes of its tensors.

    ``like``: a Hugging Face folder that gives configuration and tokenizer; without it, the configuration is the one of
    the checkpoint's hyperparameters, and there is no tokenizer. ``dtype`` is that of all weights; without it, each has
    the one it has in the files of ``like``, or that of the configuration, or, where that says none, the checkpoint's.
    In memory are one tensor of the checkpoint and one of the folder. ``is_verified``: compare the checkpoint's
    checksums first, which reads all of it.

    Raises:
        CheckpointError: the checkpoint has not the weights of that configuration, or the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already. Give a new folder, or move that one away.")
    with open_checkpoint(checkpoint) as saved:
        config = read_config(like) if like is not None else _config_of(saved)
        wanted = dtype or getattr(config, "dtype", None)
        model = model_on_meta(config, wanted)
        weights = _weights_of(saved, model)
        made = out_of_model(model, list(weights))
        dtypes = _dtypes(made, model, weights, like=like if dtype is None else None, is_given=wanted is not None)
        new = [NewTensor(name=one.name, dtype=dtypes[one.name], shape=one.shape) for one in made]
        if is_verified:
            with progress(
                f"verifying {checkpoint}", saved.num_bytes_to_verify(), is_shown=is_shown, sums_up=True
            ) as advance:
                saved.verify(advance=advance)
        with _written_aside(folder) as staging:
            values = _made_values(made, lambda name: saved.whole(weights[name]))
            num_bytes = _write(staging, new, values, max_shard_bytes, f"writing {folder}", is_shown=is_shown)
            _write_rest(staging, config, model, like, _main_dtype(new))
    return num_bytes


@contextmanager
def _written_aside(folder: Path) -> Generator[Path, None, None]:
    """What is written into the path becomes ``folder`` at the end, or is gone if that is not reached."""
    path = os.fspath(folder).rstrip("/")
    staging = Path(staging_of(path))
    try:
        discard_staging(path)
        staging.mkdir(parents=True)
        yield staging
        publish(path)
    except BaseException as error:
        with suppress(OSError):
            discard_staging(path)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{folder} was not written: {type(error).__name__}: {error}. Free space there, or give another --out."
            ) from error
        raise


def _write(
    staging: Path,
    new: Sequence[NewTensor],
    values: Iterable[Tensor],
    max_shard_bytes: int,
    doing: str,
    *,
    is_shown: bool,
) -> int:
    writer = ShardWriter(staging, new, max_shard_bytes)
    try:
        with progress(doing, writer.num_bytes, is_shown=is_shown, sums_up=True) as advance:
            for tensor, value in zip(new, values, strict=True):
                writer.write(tensor.name, value)
                advance(tensor.num_bytes)
        writer.close()
    finally:
        writer.abandon()
    return writer.num_bytes


def _made_values(made: Sequence[Made], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """In their order. What the last one was made of stays in memory if the next is made of it as well."""
    loaded: dict[str, Tensor] = {}
    for one in made:
        for name in set(loaded) - set(one.sources):
            del loaded[name]
        for name in one.sources:
            if name not in loaded:
                loaded[name] = read(name)
        yield _values(one, loaded)


def _values(made: Made, loaded: Mapping[str, Tensor]) -> Tensor:
    if made.pieces is None:
        return made.compute(lambda name: loaded[name])
    parts = [(piece.box, piece.arrange(loaded[piece.key][piece.other_box])) for piece in made.pieces]
    if len(parts) == 1:
        return parts[0][1]
    whole = torch.empty(made.shape, dtype=parts[0][1].dtype)
    for box, part in parts:
        whole[box].copy_(part)
    return whole


def _dtypes(
    made: Sequence[Made], model: nn.Module, weights: Mapping[str, Any], *, like: Path | None, is_given: bool
) -> dict[str, torch.dtype]:
    """Of every tensor of the folder."""
    stored = WeightFiles(like).tensors if like is not None and _has_weights(like) else {}
    built = model.state_dict(keep_vars=True)
    dtypes: dict[str, torch.dtype] = {}
    for one in made:
        kept = weights[one.sources[0]].dtype
        if one.name in stored:
            dtypes[one.name] = stored[one.name].dtype
        else:
            dtypes[one.name] = built[one.sources[0]].dtype if is_given and kept.is_floating_point else kept
    return dtypes


def _has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def _main_dtype(new: Sequence[NewTensor]) -> torch.dtype:
    """The one of most bytes."""
    num_bytes: dict[torch.dtype, int] = {}
    for tensor in new:
        num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def _write_rest(staging: Path, config: Config, model: nn.Module, like: Path | None, dtype: torch.dtype) -> None:
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(str(staging))
    for pattern in _COPIED if like is not None else ():
        for file in sorted(like.glob(pattern)):  # type: ignore[union-attr]
            if file.is_file():
                shutil.copyfile(file, staging / file.name)


def _config_of(saved: Saved) -> Config:
    values: Any = saved.rest().get("hyper_parameters", {}).get("config")
    if isinstance(values, dict) and "model_type" in values:
        return config_from(values)
    if isinstance(values, str):
        return read_config(values)
    raise CheckpointError(
        f"checkpoint({saved.path!r}) has no Hugging Face configuration among its hyperparameters. Give the folder of "
        "the model it was made from: --config HF_DIR."
    )


def _weights_of(saved: Saved, model: nn.Module) -> dict[str, Any]:
    """What the checkpoint has of each of the model's tensors, whatever attribute the LightningModule has the model in.

    Raises:
        CheckpointError: it lacks tensors, or they have other shapes.
    """
    found, names = saved.weights(), own_names(model)
    prefixes = {name.removesuffix(names[0]) for name in found if f".{name}".endswith(f".{names[0]}")} or {""}
    prefix = min(prefixes, key=lambda prefix: (sum(prefix + name not in found for name in names), prefix))
    tensors = model.state_dict()
    missing = [name for name in names if prefix + name not in found]
    wrong = [
        f"{name} ({list(found[prefix + name].shape)} there, {list(tensors[name].shape)} by the configuration)"
        for name in names
        if name not in missing and tuple(found[prefix + name].shape) != tuple(tensors[name].shape)
    ]
    if missing or wrong:
        lacks = f"lacks {', '.join(missing[:4])}{f', ... ({len(missing)})' if len(missing) > 4 else ''}"
        other = f"has other shapes: {'; '.join(wrong[:4])}"
        raise CheckpointError(
            f"checkpoint({saved.path!r}) has not the weights of {type(model).__name__}: it "
            f"{' and '.join(words for words, some in ((lacks, missing), (other, wrong)) if some)}. Give the "
            "configuration it was trained with: --config HF_DIR. Adapters (LoRA) have to be merged first."
        )
    return {name: found[prefix + name] for name in names}
