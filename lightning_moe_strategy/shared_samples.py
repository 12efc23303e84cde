"""Whose samples: the ranks of one cp group read the same, other ranks read others of the same parts.

Checked, as nothing enforces it.
"""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy.context_parallel.batch import Key, items_of
from lightning_moe_strategy.failures.position import ranks_in_words
from lightning_moe_strategy.mesh import ResolvedDims


def require_share(loader: Any, *, name: str, dims: ResolvedDims, rank: int) -> None:
    """ValueError for a loader whose own sampler does not take this rank's share of the samples.

    A sampler has a share when it says ``num_replicas`` and ``rank``. One share for all ranks is the user's choice.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    dp_rank = dims.coordinate("dp", rank)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        num_replicas, share = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if not isinstance(num_replicas, int) or not isinstance(share, int) or num_replicas == 1:
            continue
        if (num_replicas, share) != (dims.dp, dp_rank):
            raise ValueError(
                f"The {type(sampler).__name__} of {name} has num_replicas({num_replicas}) and rank({share}); on rank "
                f"{rank} they must be {dims.dp} and {dp_rank}. The {dims.cp} ranks of a cp group read the same "
                f"samples, so there are d_rep({dims.d_rep}) * fsdp({dims.fsdp}) = {dims.dp} shares of the "
                f"{dims.world_size} ranks. Build it with **trainer.strategy.distributed_sampler_kwargs, or leave it "
                "out: Lightning adds one."
            )


def check_first_batch(batch: Any, *, name: str, dims: ResolvedDims, group: dist.ProcessGroup) -> str:
    """Compare a batch over all ranks, by checksums: what to warn of, empty as a rule.

    Every rank calls it. ValueError, on every rank, when ranks of a cp group hold different batches.
    """
    answers: list[dict[Key, str]] = [{}] * group.size()
    dist.all_gather_object(answers, fingerprints(batch), group=group)
    first_ranks = [dims.group_ranks("cp", rank)[0] for rank in range(len(answers))]
    for rank, first in enumerate(first_ranks):
        different = [key for key in answers[rank] | answers[first] if answers[rank].get(key) != answers[first].get(key)]
        if different:
            raise ValueError(
                f"Ranks {first} and {rank} share one sequence (cp={dims.cp}) but read different batches from {name}: "
                f"{', '.join(map(repr, different))} differ. A sampler of your own, or an iterable dataset, must take "
                "num_replicas and rank from trainer.strategy.distributed_sampler_kwargs; shuffling and augmentation "
                "need the same seed on all ranks of a cp group."
            )
    batches = {tuple(sorted((str(key), value) for key, value in answers[first].items())) for first in first_ranks}
    if len(batches) == dims.dp or not answers[0]:
        return ""
    return (
        f"{name} gives the {dims.dp} shares of the samples only {len(batches)} different first batches: ranks train on "
        "what others train on too. Split an iterable dataset by num_replicas and rank of "
        "trainer.strategy.distributed_sampler_kwargs; with Trainer(use_distributed_sampler=False), hand them to a "
        "sampler."
    )


def parts_number(batch: Any) -> int:
    """Tells which parts a batch has by name: 16 bits, so that squares of it add up over any number of ranks."""
    return zlib.crc32("\n".join(_parts_of(batch)).encode()) & 0xFFFF


def are_alike(num_ranks: int, total: int, total_of_squares: int) -> bool:
    """Whether so many numbers are all the same, by their sum and the sum of their squares."""
    return num_ranks * total_of_squares == total**2


def unlike_parts(batch: Any, *, name: str, group: dist.ProcessGroup) -> str:
    """What to warn of where batches of the ranks have different parts. Every rank calls it."""
    answers: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(answers, _parts_of(batch), group=group)
    some = sorted(set().union(*answers) - set(answers[0]).intersection(*answers))
    lacking = {part: [rank for rank, parts in enumerate(answers) if part not in parts] for part in some}
    said = "; ".join(f"no {part} on {ranks_in_words(ranks)}" for part, ranks in lacking.items())
    return (
        f"Batches of {name} have different parts: {said}. Every rank gathers the weights of every module, so where a "
        "module is called for such a part, ranks that have it wait for those that do not, until the timeout. Give "
        "every rank the part, made up where there is none and without a label, or none of them."
    )


def _parts_of(batch: Any) -> list[str]:
    """Of a mapping. A list may be one of samples, and longer on some ranks."""
    return sorted(repr(key) for key, item in batch.items() if item is not None) if isinstance(batch, Mapping) else []


def fingerprints(batch: Any) -> dict[Key, str]:
    """A checksum of each part of a batch, whatever device its tensors are on. Objects of unknown kinds are left out."""
    found = {}
    for key, item in items_of(batch).items():
        digest = hashlib.blake2b(digest_size=16)
        if _add(digest, item):
            found[key] = digest.hexdigest()
    return found


def _add(digest: "hashlib.blake2b", item: Any) -> bool:
    """Whether there was something to add."""
    if isinstance(item, Tensor):
        digest.update(repr((tuple(item.shape), item.dtype)).encode())
        if item.layout == torch.strided and item.numel():
            digest.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return True
    if isinstance(item, str | bytes | int | float):
        digest.update(repr(item).encode())
        return True
    if isinstance(item, Mapping):
        return any([_add(digest, key) | _add(digest, value) for key, value in item.items()])
    return isinstance(item, list | tuple) and any([_add(digest, value) for value in item])
