"""Weights of a Hugging Face folder for a model: every rank reads its own part of every tensor, and nothing else.

The headers are compared with the model before anything is read; then each local tensor is filled, piece by piece, from
where its numbers stand in the files.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_strategy._torch_compat import local_slices
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.progress import progress
from lightning_moe_strategy.host_agreement import raise_together
from lightning_moe_strategy.hugging_face_weights.conversion import Made, into_model, out_of_model
from lightning_moe_strategy.hugging_face_weights.files import Box, WeightFiles
from lightning_moe_strategy.hugging_face_weights.model import own_names
from lightning_moe_strategy.sharding import local_tensor

_FOLDER = "_pretrained_folder"
_THREADS = 4  # more of them read one disk no faster
_IS_QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Give a transformers model the weights of a folder that ``save_pretrained`` wrote.

    Now where the model has memory. Where it is on the meta device, the strategy does it when it has sharded the
    model, and every rank reads its own part; unless the Trainer resumes from a checkpoint, which has all values (it
    need not where ``strict_loading`` of the LightningModule is False: then the folder is read, and the checkpoint over
    it). The few weights that transformers computes, and does not put together, every rank reads whole.

    Raises:
        CheckpointError: the folder's tensors are not the model's; nothing was changed.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        setattr(model, _FOLDER, str(folder))
    else:
        PretrainedWeights(model, Path(folder)).load()


def pending_weights(root: nn.Module, group: dist.ProcessGroup) -> dict[str, "PretrainedWeights"]:
    """What `load_pretrained` has left to do inside ``root``, by the name of the model there. Every rank calls it.

    Raises:
        CheckpointError: on every rank, if the folder does not fit on one.
    """
    waiting = waiting_folders(root)
    weights: dict[str, PretrainedWeights] = {}
    if not waiting:
        return weights
    error: Exception | None = None
    try:
        for name, folder in waiting.items():
            weights[name] = PretrainedWeights(root.get_submodule(name), Path(folder))
    except Exception as reason:  # of any kind: the others must hear of it
        error = reason
    raise_together(error, group, "comparing a Hugging Face folder with the model")
    return weights


def waiting_folders(root: nn.Module) -> dict[str, str]:
    """By the name of a model inside ``root``, the folder whose weights `load_pretrained` has left to read."""
    return {name: getattr(module, _FOLDER) for name, module in root.named_modules() if hasattr(module, _FOLDER)}


def names_given(weights: Mapping[str, "PretrainedWeights"]) -> set[str]:
    """Names in the root of all tensors that `load_pending` fills."""
    return {f"{name}.{given}" if name else given for name, pending in weights.items() for given in pending.names}


def load_pending(weights: Mapping[str, "PretrainedWeights"], group: dist.ProcessGroup) -> None:
    """Fill the models, which are sharded by now. Every rank calls it."""
    if not weights:
        return
    error: Exception | None = None
    try:
        for pending in weights.values():
            pending.load(is_shown=group.rank() == 0)
            delattr(pending.model, _FOLDER)
    except Exception as reason:  # of any kind: the others must hear of it
        error = reason
    raise_together(error, group, "reading the weights of a Hugging Face folder")


class PretrainedWeights:
    """A folder that was compared with a model: names, shapes and dtypes fit, and no file is cut short.

    Raises:
        CheckpointError: they do not, or the folder is quantised.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model, self.folder = model, folder
        refuse_quantised(folder)
        self.files = WeightFiles(folder)
        self.made = fitting(model, self.files)
        tensors = model.state_dict(keep_vars=True)
        filled = {id(tensors[made.name]) for made in self.made}
        self.names = {name for name, tensor in tensors.items() if id(tensor) in filled}
        """Of the model's tensors that are filled, tied ones with all their names."""

    def load(self, *, is_shown: bool = False) -> None:
        """Write this rank's part of every tensor of the model, and compare one number of each with the files."""
        tensors = self.model.state_dict(keep_vars=True)
        own = [(made, local_tensor(tensors[made.name].detach()), own_box(tensors[made.name])) for made in self.made]
        total = sum(stored.num_bytes for stored in self.files.tensors.values())
        with progress(f"reading {self.folder}", total, is_shown=is_shown, sums_up=True) as advance:
            share = total / max(1, len(own))

            def fill_one(work: tuple[Made, Tensor, Box]) -> None:
                made, local, box = work
                fill(self.files, made, local, box)
                compare_one_number(self.files, made, local, box)
                advance(int(share))

            with ThreadPoolExecutor(_THREADS) as threads:
                for _ in threads.map(fill_one, own):
                    pass


def fitting(model: nn.Module, files: WeightFiles) -> list[Made]:
    """What to read for every tensor of the model; one of those that are tied is enough.

    Raises:
        CheckpointError: a tensor is missing, left over, of another shape, or of a kind that cannot be cast.
    """
    tensors = model.state_dict(keep_vars=True)
    all_made, unmade = into_model(model, {key: (stored.shape, stored.dtype) for key, stored in files.tensors.items()})
    made = {one.name: one for one in all_made}
    names_of = _names_by_memory(tensors)
    missing = {name for name in tensors if not any(other in made for other in names_of[id(tensors[name])])}
    used = {source for one in all_made for source in one.sources}
    missing, unread = _without_ignored(model, missing, set(files.tensors) - used if not unmade else set())
    wrong = [one for one in made.values() if one.shape != tuple(tensors[one.name].shape)]
    problems = [
        f"{one.name} is {list(one.shape)} there and {list(tensors[one.name].shape)} in the model" for one in wrong
    ]
    absent = _absent(model, files, {*missing, *(one.name for one in wrong)}) if missing or wrong else []
    if absent:
        problems.append(f"the model needs {_some(absent)}, which the files do not have")
    elif unmade:
        problems += unmade.values()
    elif missing:
        problems.append(f"no tensor there makes {_some(sorted(missing))}")
    if unread:
        problems.append(f"the files have {_some(sorted(unread))}, which the model does not have")
    problems += [
        f"{source} is {_name(files.tensors[source].dtype)} and {one.name} {_name(tensors[one.name].dtype)}"
        for one in made.values()
        for source in one.sources
        if not _can_cast(files.tensors[source].dtype, tensors[one.name].dtype)
    ]
    if problems:
        more = f" (and {len(problems) - 6} more)" if len(problems) > 6 else ""
        raise CheckpointError(
            f"{files.folder} does not fit {type(model).__name__}: {'; '.join(problems[:6])}{more}. Build the model "
            "from the config.json of that folder, or give the folder that belongs to it."
        )
    firsts = {id(tensors[name]): name for name in reversed(list(tensors)) if name in made}
    _require_equal_when_tied(files, made, tensors, names_of)
    return [made[name] for name in tensors if firsts.get(id(tensors[name])) == name]


@torch.no_grad()
def fill(files: WeightFiles, made: Made, local: Tensor, box: Box) -> None:
    """Write the ``box`` of a tensor, all of it, into ``local``; what is not there is not read."""
    if local.numel() == 0:
        return
    if made.pieces is None:
        local.copy_(made.compute(files.read_whole)[box])
        return
    num_written = 0
    for piece in made.pieces:
        part = piece.inside(box)
        if part is not None:
            place = tuple(
                slice(there.start - own.start, there.stop - own.start) for there, own in zip(part.box, box, strict=True)
            )
            local[place].copy_(part.arrange(files.read(part.key, part.other_box)))
            num_written += part.num_elements
    assert num_written == local.numel(), f"{made.name}: {num_written} of {local.numel()} elements were given"


def compare_one_number(files: WeightFiles, made: Made, local: Tensor, box: Box) -> None:
    """One element of the filled part against the file, found by its byte and not by a slice.

    Raises:
        CheckpointError: they differ: the files were changed meanwhile, or the disk reads wrong.
    """
    if local.numel() == 0 or made.pieces is None:
        return
    inside = [part for part in (piece.inside(box) for piece in made.pieces) if part is not None]
    seed = zlib.crc32(made.name.encode())
    part = inside[seed % len(inside)]
    where = tuple((seed >> (3 * dim)) % length for dim, length in enumerate(part.lengths))
    other = list(part.other_start)
    for dim, index in zip(part.dims, where, strict=True):
        if dim is not None:
            other[dim] += index
    expected = files.read_element(part.key, tuple(other)).to(local.dtype)
    here = tuple(first + index - own.start for first, index, own in zip(part.start, where, box, strict=True))
    found = local[here].cpu()
    if not torch.equal(expected, found) and not (expected.isnan() and found.isnan()):
        raise CheckpointError(
            f"{made.name} got {found.item()} where {files.tensors[part.key].file} has {expected.item()} for "
            f"{part.key}. The file was written meanwhile, or the disk reads wrong: try again."
        )


def own_box(tensor: Tensor) -> Box:
    """Where this rank's part lies in the whole tensor."""
    if isinstance(tensor, DTensor):
        return local_slices(tensor)
    return tuple(slice(0, length) for length in tensor.shape)


def refuse_quantised(folder: Path) -> None:
    """
    Raises:
        CheckpointError: the folder's weights are quantised, or it has no readable config.json.
    """
    try:
        config: Any = json.loads((folder / "config.json").read_text())
        quantised = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    except (OSError, ValueError, AttributeError) as reason:
        raise CheckpointError(
            f"{folder} has no readable config.json ({reason}). Give the folder of a Hugging Face model."
        ) from reason
    if quantised:
        method = quantised.get("quant_method", "of some kind") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{folder} is quantised ({method}), and training needs its full weights. Give a folder in bf16, or write "
            "one with transformers: from_pretrained(..., quantization_config=...(dequantize=True)).save_pretrained()."
        )


def _without_ignored(model: nn.Module, missing: set[str], unread: set[str]) -> tuple[set[str], set[str]]:
    """Without what transformers takes no notice of: layers for multi-token prediction, tables of old versions."""
    from transformers.utils.loading_report import LoadStateDictInfo

    told = LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=unread,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(told)  # type: ignore[operator]
    return told.missing_keys, told.unexpected_keys


def _absent(model: nn.Module, files: WeightFiles, lacking: set[str]) -> list[str]:
    """Names that a file would have for tensors of the model that lack something, where transformers can say them."""
    try:
        expected = out_of_model(model, own_names(model))
    except CheckpointError:
        return []
    return [one.name for one in expected if one.name not in files.tensors and lacking & set(one.sources)]


def _names_by_memory(tensors: Mapping[str, Tensor]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _require_equal_when_tied(
    files: WeightFiles, made: Mapping[str, Made], tensors: Mapping[str, Tensor], names_of: Mapping[int, Sequence[str]]
) -> None:
    for names in names_of.values():
        stored = [name for name in names if name in made and made[name].pieces is not None]
        for name in stored[1:]:
            box = own_box(tensors[name])
            first, second = (torch.empty([s.stop - s.start for s in box], dtype=tensors[name].dtype) for _ in range(2))
            fill(files, made[stored[0]], first, box)
            fill(files, made[name], second, box)
            if not torch.equal(first, second):
                raise CheckpointError(
                    f"{files.folder} has other numbers for {name} than for {stored[0]}, and the model ties the two. "
                    "Say tie_word_embeddings: false in its config, and they are two."
                )


def _can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if wanted.is_floating_point:
        return stored.is_floating_point and stored not in _IS_QUANTISED
    return stored == wanted


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f", ... ({len(names)})" if len(names) > 6 else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
