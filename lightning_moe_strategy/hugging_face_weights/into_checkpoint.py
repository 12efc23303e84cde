"""``lightning-moe import``: a Hugging Face folder becomes a checkpoint that any layout loads, in one process."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from lightning_moe_strategy.checkpoint.progress import Advance, progress
from lightning_moe_strategy.checkpoint.stream import MAX_PART_BYTES, StreamedTensor, write_streamed
from lightning_moe_strategy.hugging_face_weights.conversion import Made
from lightning_moe_strategy.hugging_face_weights.files import WeightFiles, num_elements
from lightning_moe_strategy.hugging_face_weights.model import model_on_meta, plain_config, read_config
from lightning_moe_strategy.hugging_face_weights.pretrained import fill, fitting, refuse_quantised


def into_checkpoint(
    folder: Path, path: str, *, attribute: str = "model", max_part_bytes: int = MAX_PART_BYTES, is_shown: bool = False
) -> int:
    """Write the weights of ``folder``, in FP32, as the checkpoint ``path``; the bytes of its tensors.

    It has weights and no state of a training: ``ckpt_path`` of ``fit`` starts from them, ``HFCausalLM`` loads it.
    ``attribute``: where the LightningModule has its transformers model. No more than ``max_part_bytes`` of a tensor
    and one tensor of the folder are in memory at a time.

    Raises:
        CheckpointError: the folder is quantised, damaged or not that of its configuration; ``path`` cannot be written.
    """
    refuse_quantised(folder)
    config = read_config(folder)
    model = model_on_meta(config, torch.float32)
    files = WeightFiles(folder)
    made = {one.name: one for one in fitting(model, files)}
    tensors = model.state_dict(keep_vars=True)
    name_of = {id(tensors[name]): name for name in made}
    total: int = sum(num_elements(tuple(tensor.shape)) * tensor.element_size() for tensor in tensors.values())
    with progress(f"writing {path}", total, is_shown=is_shown, sums_up=True) as advance:
        streamed = [
            StreamedTensor(
                f"state_dict.{attribute}.{name}",
                tuple(tensor.shape),
                tensor.dtype,
                _rows(files, made[name_of[id(tensor)]], tensor, advance),
            )
            for name, tensor in tensors.items()
        ]
        write_streamed(
            path,
            streamed,
            {
                "epoch": 0,
                "global_step": 0,
                "pytorch-lightning_version": _lightning_version(),
                "callbacks": {},
                "lr_schedulers": [],
                "hparams_name": "kwargs",
                "hyper_parameters": {"config": plain_config(config)},
            },
            versions={
                "lightning-moe-strategy": version("lightning-moe-strategy"),
                "torch": torch.__version__,
                "lightning": _lightning_version(),
            },
            max_part_bytes=max_part_bytes,
        )
    return total


def _rows(files: WeightFiles, made: Made, tensor: Tensor, advance: Advance) -> Callable[[int, int], Tensor]:
    def make(first: int, last: int) -> Tensor:
        rows = [slice(first, last)] if tensor.dim() else []
        box = (*rows, *(slice(0, length) for length in tensor.shape[1:]))
        part = torch.empty([own.stop - own.start for own in box], dtype=tensor.dtype)
        fill(files, made, part, box)
        advance(part.numel() * part.element_size())
        return part

    return make


def _lightning_version() -> str:
    for name in ("lightning", "pytorch-lightning"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise AssertionError("the package needs Lightning")
