"""The nearest orthogonal matrix, by products of matrices alone.

Shapes: B matrices, M rows, N columns.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
"""Of https://kellerjordan.github.io/posts/muon/: the steepest at zero of those that stay bounded."""

AdjustLR = Literal["original", "match_rms_adamw"]
Packing = Literal["rows", "columns", "alternate columns"]


def orthogonalize(x_BMN: Tensor, *, coefficients: Sequence[float], num_steps: int, eps: float) -> Tensor:
    """``U V^T`` of each ``U S V^T``, in the dtype of ``x_BMN``; singular values end between about 0.7 and 1.2.

    A matrix of zeros stays one.
    """
    a, b, c = coefficients
    is_tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    x = x_BMN.mT if is_tall else x_BMN
    # Products of the shorter side; the Frobenius norm is at least the largest singular value.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if is_tall else x


def unpack(x_BMN: Tensor, num_packed: int, along: Packing) -> Tensor:
    """The matrices that lie packed in each of ``x_BMN``, as a view with one dim more: [B, num_packed, m, n]."""
    *batch, num_rows, num_columns = x_BMN.shape
    if along == "rows":
        return x_BMN.view(*batch, num_packed, num_rows // num_packed, num_columns)
    if along == "columns":
        return x_BMN.view(*batch, num_rows, num_packed, num_columns // num_packed).movedim(-2, -3)
    return x_BMN.view(*batch, num_rows, num_columns // num_packed, num_packed).movedim(-1, -3)


def pack(x_BPMN: Tensor, along: Packing) -> Tensor:
    """The way back from ``unpack``."""
    if along == "rows":
        return x_BPMN.flatten(-3, -2)
    return x_BPMN.movedim(-3, -2 if along == "columns" else -1).flatten(-2)


def adjusted_lr(lr: float, adjust_lr_fn: AdjustLR | None, num_rows: int, num_columns: int) -> float:
    """The step that one matrix takes, by torch's names.

    ``original`` (None): the factor sqrt(max(1, rows / columns)) of Keller Jordan; ``match_rms_adamw``: 0.2 *
    sqrt(max(rows, columns)) of Moonshot, so that a learning rate for AdamW fits.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(num_rows, num_columns))
    return lr * math.sqrt(max(1, num_rows / num_columns))


def require_choice(name: str, value: object, choices: object) -> None:
    """A ValueError that lists what there is to choose from."""
    if value not in get_args(choices):
        raise ValueError(f"{name}({value!r}) must be one of {', '.join(map(repr, get_args(choices)))}.")
