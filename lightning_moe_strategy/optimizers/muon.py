"""Muon for the matrices of a model on two meshes, and AdamW for what is not one, in one optimizer.

Shapes: L matrices stacked in one parameter on this rank (1 for a plain weight), M rows, N columns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lightning_moe_strategy.optimizers.newton_schulz import (
    KELLER_JORDAN,
    AdjustLR,
    Packing,
    adjusted_lr,
    orthogonalize,
    pack,
    require_choice,
    unpack,
)
from lightning_moe_strategy.optimizers.shards import like_shards
from lightning_moe_strategy.optimizers.whole_matrices import ROUND_NUMEL, Cut, Piece, cut_of, transform_whole
from lightning_moe_strategy.sharding import local_tensor

Group = dict[str, Any]


class Muon(Optimizer):
    """Momentum, orthogonalized, for matrices; AdamW for groups that say ``"algorithm": "adamw"``.

    The numbers are those of one process on every layout, and of ``torch.optim.Muon`` where that applies. Options have
    torch's names and defaults. Experts that lie whole on a rank are updated there; of weights that are cut into
    shards, each rank puts together a share, and every element travels twice in the dtype of the iteration.

    Args:
        params: parameters or groups, best those of ``muon_groups(module)``. A parameter of two dims is a matrix, one
            of three a stack of matrices. Beside the options below a group may say ``algorithm`` (``"muon"``,
            ``"adamw"``), ``num_packed`` matrices of equal size in each, and where they are ``packed_along``:
            ``"rows"``, ``"columns"`` or ``"alternate columns"``. They are orthogonalized one by one.
        lr: of matrices, and of AdamW where ``adjust_lr_fn="match_rms_adamw"`` makes one fit both.
        weight_decay: of matrices and AdamW's, decoupled: a step takes ``lr * weight_decay`` of a weight.
        momentum: what stays of the average of gradients at a step, 0 to 1.
        nesterov: orthogonalize the average one step ahead.
        ns_coefficients: three, of the polynomial of an iteration (Newton-Schulz).
        eps: the least that a matrix is divided by in place of its norm, before the first iteration.
        ns_steps: iterations.
        adjust_lr_fn: of a matrix [M, N], ``"original"`` (or None) times ``sqrt(max(1, M / N))``, ``"match_rms_adamw"``
            times ``0.2 sqrt(max(M, N))``.
        adamw_lr: of groups for AdamW that have no ``lr`` of their own.
        betas: of AdamW.
        adamw_eps: of AdamW.
        ns_dtype: of the iteration and of what travels; None is BF16 on a GPU and FP32 on a CPU.

    Raises:
        ValueError: a matrix that is none, or an option that does not exist.
    """

    reads_placements = True
    """A simulation must give it the sharded parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = KELLER_JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLR | None = None,
        ns_dtype: torch.dtype | None = None,
        adamw_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ) -> None:
        self._adamw_lr = lr if adamw_lr is None and adjust_lr_fn == "match_rms_adamw" else adamw_lr
        super().__init__(
            params,
            dict(
                algorithm="muon", num_packed=1, packed_along="rows", lr=lr, weight_decay=weight_decay,
                momentum=momentum, nesterov=nesterov, ns_coefficients=tuple(ns_coefficients), eps=eps,
                ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, ns_dtype=ns_dtype, betas=betas, adamw_eps=adamw_eps,
                foreach=None,
            ),
        )  # fmt: skip

    def add_param_group(self, param_group: Group) -> None:
        if param_group.get("algorithm") == "adamw" and "lr" not in param_group:
            if self._adamw_lr is None:
                raise ValueError(
                    "adamw_lr(None) must be given where groups are for AdamW: a step of Muon is larger by sqrt of the "
                    "matrix. Give it, or set adjust_lr_fn='match_rms_adamw' to use lr for both."
                )
            param_group["lr"] = self._adamw_lr
        super().add_param_group(param_group)
        _require_valid(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. All ranks call it: shards of matrices are exchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained and group["algorithm"] == "adamw":
                self._step_adamw(group, trained)
            elif trained:
                self._step_muon(group, trained)
        return loss

    def _step_muon(self, group: Group, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = like_shards(_gradient(parameter))
        weights = [local_tensor(parameter.detach()) for parameter in parameters]
        gradients = [local_tensor(_gradient(parameter)) for parameter in parameters]
        momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_mul_(weights, 1 - float(group["lr"]) * group["weight_decay"])
        pieces = [
            piece
            for parameter, *tensors in zip(parameters, weights, gradients, momenta, strict=True)
            for piece in _pieces(group, parameter.shape, cut_of(parameter), *map(_as_stack, tensors))
        ]
        transform_whole(pieces, partial(_orthogonalized, group))

    def _step_adamw(self, group: Group, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = like_shards(parameter), like_shards(parameter)
        states = [self.state[parameter] for parameter in parameters]
        # Of one dtype and device each: a foreach loop sorts them itself.
        adamw(
            [local_tensor(parameter.detach()) for parameter in parameters],
            [local_tensor(_gradient(parameter)) for parameter in parameters],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _pieces(
    group: Group, shape: torch.Size, cut: Cut, weight: Tensor, gradient: Tensor, momentum: Tensor
) -> Iterator[Piece]:
    """The stacks of one parameter that one rank orthogonalizes at a time. Tensors: [L, M, N] of this rank."""
    num_rows, num_columns = shape[-2:]
    # A matrix that is cut goes to one rank by itself, so that ranks share them evenly.
    at_a_time = 1 if cut.group is not None else max(1, ROUND_NUMEL // max(1, num_rows * num_columns))
    dtype = group["ns_dtype"] or (torch.bfloat16 if weight.is_cuda else torch.float32)
    step = -adjusted_lr(float(group["lr"]), group["adjust_lr_fn"], *_matrix_shape(group, num_rows, num_columns))

    def take(part: slice) -> Tensor:
        some = gradient[part].lerp(momentum[part], group["momentum"]) if group["nesterov"] else momentum[part]
        return some.to(dtype)

    def put(part: slice, update: Tensor) -> None:
        weight[part].add_(update, alpha=step)

    for start in range(0, weight.shape[0], at_a_time):
        part = slice(start, min(start + at_a_time, weight.shape[0]))
        whole = (part.stop - start, num_rows, num_columns)
        yield Piece(shape=whole, cut=cut, take=partial(take, part), put=partial(put, part))


def _orthogonalized(group: Group, x_LMN: Tensor) -> Tensor:
    num_packed, along = group["num_packed"], group["packed_along"]
    x_LPMN = unpack(x_LMN, num_packed, along)
    result_BMN = orthogonalize(
        x_LPMN.flatten(0, 1), coefficients=group["ns_coefficients"], num_steps=group["ns_steps"], eps=group["eps"]
    )
    return pack(result_BMN.view_as(x_LPMN), along)


def _matrix_shape(group: Group, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Of each of the matrices that are packed."""
    if group["packed_along"] == "rows":
        return num_rows // group["num_packed"], num_columns
    return num_rows, num_columns // group["num_packed"]


def _as_stack(x: Tensor) -> Tensor:
    return x[None] if x.ndim == 2 else x


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _require_valid(group: Group) -> None:
    if group["algorithm"] not in ("muon", "adamw"):
        raise ValueError(f"algorithm({group['algorithm']!r}) of a parameter group must be 'muon' or 'adamw'.")
    for name, is_valid, rule in (
        ("lr", float(group["lr"]) >= 0, "at least 0"),
        ("weight_decay", group["weight_decay"] >= 0, "at least 0"),
        ("momentum", 0 <= group["momentum"] < 1, "at least 0 and below 1"),
        ("ns_steps", 0 < group["ns_steps"] < 100, "between 1 and 99"),
        ("ns_coefficients", len(group["ns_coefficients"]) == 3, "three numbers"),
    ):
        if not is_valid:
            raise ValueError(f"{name}({group[name]}) of Muon must be {rule}.")
    if group["adjust_lr_fn"] is not None:
        require_choice("adjust_lr_fn", group["adjust_lr_fn"], AdjustLR)
    require_choice("packed_along", group["packed_along"], Packing)
    if group["algorithm"] == "adamw":
        return
    for shape, _ in groupby(parameter.shape for parameter in group["params"]):
        packed_dim = -2 if group["packed_along"] == "rows" else -1
        if len(shape) not in (2, 3):
            raise ValueError(
                f"a parameter {tuple(shape)} is no matrix and no stack of matrices, which Muon takes: put it into a "
                "group with algorithm='adamw', or take the groups of muon_groups(module)."
            )
        if shape[packed_dim] % group["num_packed"]:
            raise ValueError(
                f"num_packed({group['num_packed']}) must divide dim {packed_dim} of {tuple(shape)}: matrices that are "
                "packed have equal sizes."
            )
