"""``manifest.json``, written last: what a checkpoint directory holds, and the sign that it is complete."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_moe_strategy.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""What torch.distributed.checkpoint writes: the place of every tensor in the files."""
REST = "meta.pt"
"""All that lies on no mesh: loops, callbacks, schedulers, hyperparameters. The name is Lightning's."""
FORMAT = 1


@dataclass(frozen=True)
class FileRecord:
    """One file of the directory."""

    num_bytes: int
    crc32: int
    """The CRC-32 of ZIP, of all its bytes."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor, whole, however many ranks it lies on."""

    dtype: str
    """As in ``torch.float32``, without ``torch.``."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What stands in a checkpoint directory."""

    format: int = FORMAT
    versions: Mapping[str, str]
    """Of this package, torch and Lightning, by name."""
    layout: Mapping[str, int]
    """Degrees by name, and ``world_size``."""
    tensors: Mapping[str, TensorRecord]
    """By their key in the files, ``state_dict.<parameter>``, ``optimizer_0.state.<parameter>.exp_avg``."""
    files: Mapping[str, FileRecord]
    """By their name in the directory, all but the manifest itself."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str, where: str) -> "Manifest":
        """``where``: the checkpoint, for the error.

        Raises:
            CheckpointError: not JSON, not a manifest, or of a newer format.
        """
        try:
            content = json.loads(text)
            found_format = _integer(content["format"])
        except (ValueError, KeyError, TypeError) as reason:
            raise _damaged(where, reason) from reason
        if found_format > FORMAT:
            raise CheckpointError(
                f"checkpoint({where!r}) has format {found_format}, and this version reads up to {FORMAT}. Install the "
                f"version of lightning-moe-strategy that wrote it ({content.get('versions')}) or a newer one."
            )
        try:
            return _manifest(content)
        except (ValueError, KeyError, TypeError, AttributeError) as reason:
            raise _damaged(where, reason) from reason


def _manifest(content: Mapping[str, Any]) -> Manifest:
    return Manifest(
        format=_integer(content["format"]),
        versions={str(name): str(version) for name, version in content["versions"].items()},
        layout={str(name): _integer(degree) for name, degree in content["layout"].items()},
        tensors={
            str(key): TensorRecord(str(record["dtype"]), tuple(_integer(length) for length in record["shape"]))
            for key, record in content["tensors"].items()
        },
        files={
            _plain_name(name): FileRecord(_integer(record["num_bytes"]), _integer(record["crc32"]))
            for name, record in content["files"].items()
        },
    )


def _damaged(where: str, reason: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint({where!r}) has a damaged {MANIFEST} ({type(reason).__name__}: {reason}). Use another checkpoint."
    )


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} must be a whole number")
    return value


def _plain_name(name: str) -> str:
    """Inside the directory, and nowhere else on the machine."""
    if not name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} must be the name of a file in the directory")
    return name
