"""Which parameters of a model are matrices for Muon, by where they stand in it."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.units import find_blocks, find_routers

_MUON, _ADAMW = "muon", "adamw"
Kind = tuple[str, int, str, bool]
"""Algorithm, matrices packed in each, packed along, decayed."""


def muon_groups(
    module: nn.Module, *, exclude: Sequence[str] = (), packed: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for ``Muon``: the hidden matrices by Muon, everything else by AdamW.

    Hidden matrices are the weights of two dims inside the repeated blocks, and the stacked weights of experts, each
    expert's its own. AdamW takes what is outside of blocks (embeddings, the head), embeddings and routers inside of
    them, and vectors, which are not decayed. The gate and up projections that experts hold in one tensor are
    two matrices. Frozen parameters are left out.

    Args:
        exclude: patterns of names for AdamW as well, ``"*.lora_?.weight"``.
        packed: how many matrices of equal size lie along the rows of a weight, by patterns of names:
            ``{"*.qkv.weight": 3}``, ``{"*gate_up*": 1}``. The first that fits counts.

    Raises:
        ValueError: the module has no repeated blocks, or a pattern fits no name.
    """
    blocks = find_blocks(module)
    if not blocks:
        raise ValueError(
            f"{type(module).__name__} has no repeated blocks (a ModuleList or Sequential of them), which is where "
            "hidden matrices stand. Give Muon groups of your own: {'params': ..., 'algorithm': 'muon'} and 'adamw'."
        )
    packed = packed or {}
    _require_used([*exclude, *packed], [name for name, _ in module.named_parameters()])
    found: dict[Kind, list[nn.Parameter]] = {}
    for name, parameter, kind in _kinds(module, tuple(blocks)):
        if parameter.requires_grad:
            if any(fnmatchcase(name, pattern) for pattern in exclude):
                kind = (_ADAMW, 1, "rows", kind[3])
            if kind[0] == _MUON:
                kind = next(((_MUON, n, "rows", True) for p, n in packed.items() if fnmatchcase(name, p)), kind)
            found.setdefault(kind, []).append(parameter)
    return [_group(kind, found[kind]) for kind in sorted(found, key=lambda kind: (kind[0] == _ADAMW, kind))]


def _kinds(module: nn.Module, blocks: tuple[str, ...]) -> Iterator[tuple[str, nn.Parameter, Kind]]:
    experts = find_experts(module)
    routers = tuple(find_routers(module, experts))
    modules = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        owner_name, _, own_name = name.rpartition(".")
        is_vector: bool = parameter.ndim < 2 or min(parameter.shape[-2:]) == 1
        if owner_name in experts:
            # Stacked: a bias of experts has two dims.
            is_matrix = parameter.ndim == 3
            yield name, parameter, _expert_kind(experts[owner_name], own_name) if is_matrix else _adamw(decayed=False)
        elif not _is_below(name, blocks) or _is_below(name, routers) or parameter.ndim != 2 or is_vector:
            yield name, parameter, _adamw(decayed=parameter.ndim > 1)
        elif isinstance(modules[owner_name], nn.Embedding):
            yield name, parameter, _adamw(decayed=True)
        else:
            is_packed = "gate_up" in owner_name.rpartition(".")[2]
            yield name, parameter, (_MUON, 2 if is_packed else 1, "rows", True)


def _expert_kind(experts: nn.Module, name: str) -> Kind:
    """Transformers' flags say how its experts hold gate and up."""
    if "gate_up" not in name:
        return _MUON, 1, "rows", True
    if not getattr(experts, "is_transposed", False):
        return _MUON, 2, "rows", True
    return _MUON, 2, "columns" if getattr(experts, "is_concatenated", True) else "alternate columns", True


def _adamw(*, decayed: bool) -> Kind:
    return _ADAMW, 1, "rows", decayed


def _group(kind: Kind, parameters: list[nn.Parameter]) -> dict[str, Any]:
    algorithm, num_packed, along, is_decayed = kind
    group: dict[str, Any] = {"params": parameters, "algorithm": algorithm}
    if num_packed > 1:
        group |= {"num_packed": num_packed, "packed_along": along}
    return group if is_decayed else {**group, "weight_decay": 0.0}


def _is_below(name: str, parents: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in parents)


def _require_used(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} of muon_groups fits no parameter. Some are {', '.join(names[:3])}."
            )
