"""What every rank, and the one process, leave behind of their steps."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy.verifying.outputs import Kept

Tensors = dict[str, Tensor]


@dataclass(kw_only=True)
class Picks:
    """Which experts a micro-batch's tokens chose on one rank, for the one process to choose them too."""

    place_RL: Tensor
    of_layer: dict[str, list[Tensor]]


@dataclass(kw_only=True)
class RankRecord:
    """Of one rank. Tensors of parameters are whole, and kept by the first rank of every replica alone."""

    rank: int
    dp: int
    """Which of the data parallel groups it is in; ranks of one read the same batches."""
    cp: int
    degrees: dict[str, int] = field(default_factory=dict)
    units: list[tuple[str, str]] = field(default_factory=list)
    """Name and kind of every unit."""
    routers: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Modules as they were done in the first forward."""
    outputs: dict[str, Kept] = field(default_factory=dict)
    """Of the first micro-batch, inputs among them."""
    picks: list[Picks | None] = field(default_factory=list)
    losses: list[list[tuple[float, float | None]]] = field(default_factory=list)
    """Per step and micro-batch: what the step returned, and the labels behind it (None without labels)."""
    gradients: list[Tensors] = field(default_factory=list)
    """Per step of an optimizer, before clipping."""
    parameters: list[Tensors] = field(default_factory=list)
    """After every step."""
    replicas: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Per parameter, which of its replicas this rank holds a part of."""
    digests: list[dict[str, tuple[tuple[int, ...], str]]] = field(default_factory=list)
    """After every step, of every parameter: which shard this rank holds, and its bits in short."""
    counts: list[Tensors] = field(default_factory=list)
    """Per step and layer, tokens that chose each expert."""
    leaked: dict[str, float] | None = None
    """Per module, by how much other documents changed with one. None where there was nothing to try."""
    first_chunk: int = 0
    """Tokens at the start of a sequence that are the same places on every layout; 0 where nothing is split."""
    documents: int = 1
    """In the first sequence."""
    first_document: int = 0
    """Its tokens."""


@dataclass(kw_only=True)
class OutputDifference:
    """Of one module's output, all ranks together."""

    size: float
    """The largest element in one process."""
    difference_N: Tensor
    """Of each compared token the largest difference of a channel, float64."""
    place_N: Tensor
    """Where in its sequence; -1 where rows are no tokens."""


@dataclass(kw_only=True)
class ReferenceRecord:
    """Of the one process."""

    outputs: dict[str, OutputDifference] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    parameters: list[Tensors] = field(default_factory=list)
    counts: list[Tensors] = field(default_factory=list)
    routing: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per layer the largest score that a repeated choice of experts lost, and the largest score."""
    ties: tuple[int, int] = (0, 0)
    """Choices that would have been others, of how many."""


def load(path: Any) -> Any:
    """A record that another process of this check has written."""
    return torch.load(path, weights_only=False, mmap=True)
