"""A layout small enough for this machine: as asked for, as configured, or shrunk to degrees of two."""

import math
from collections.abc import Mapping

from lightning_moe_strategy.parallel_dims import ParallelDims, ResolvedDims

Degree = int | str
MAX_WORLD = 8
"""Ranks of a configured layout that are started as they are; a larger one is shrunk."""
MAX_ASKED_WORLD = 64

_AXES = ("d_rep", "fsdp", "cp", "e_rep", "e_fsdp", "ep", "cp_inter")
_MAY_BE_AUTO = ("fsdp", "e_fsdp", "ep")


def parse_layout(text: str) -> dict[str, Degree]:
    """Degrees by name from ``fsdp=2,cp=2,e_fsdp=2,ep=2``. ValueError for what is no such list."""
    degrees: dict[str, Degree] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _AXES or not (value.isdecimal() or value == "auto"):
            raise ValueError(
                f"--layout({text}) has {part.strip()!r}: write axis=degree, axes {', '.join(_AXES)}, as "
                "fsdp=2,cp=2,e_fsdp=2,ep=2."
            )
        degrees[name] = int(value) if value.isdecimal() else value
    if not degrees:
        raise ValueError("--layout is empty: write axis=degree, as fsdp=2,cp=2,e_fsdp=2,ep=2.")
    return degrees


def world_of(degrees: Mapping[str, Degree]) -> int:
    """The ranks of a layout; where both meshes have an ``"auto"``, the fewest that both fit into.

    Raises:
        ValueError: degrees that fit no world, or one too large for a machine.
    """
    unknown = sorted(set(degrees) - set(_AXES))
    if unknown:
        raise ValueError(f"layout has {', '.join(unknown)}: its axes are {', '.join(_AXES)}.")
    meshes = (("d_rep", "fsdp", "cp"), ("e_rep", "e_fsdp", "ep"))
    products = [math.prod(x for name in mesh if isinstance(x := degrees.get(name, 1), int)) for mesh in meshes]
    is_open = [any(not isinstance(degrees.get(name, _default(name)), int) for name in mesh) for mesh in meshes]
    closed = [product for product, has_auto in zip(products, is_open, strict=True) if not has_auto]
    world = closed[0] if closed else math.lcm(*products)
    if world > MAX_ASKED_WORLD:
        raise ValueError(
            f"layout {describe(degrees)} has {world} ranks, more than {MAX_ASKED_WORLD} processes of one machine. "
            "Lower its degrees: what is wrong with 64 ranks is wrong with 2, axis by axis."
        )
    _dims(degrees).resolve(world, local_world_size=world)  # says what does not fit
    return world


def shrunk(dims: ResolvedDims) -> dict[str, Degree]:
    """Every degree above 1 as 2, and the smaller of the two meshes filled up by its shards."""
    small: dict[str, int] = {name: min(2, dims.degree(name)) for name in _AXES}
    small["cp"] = 4 if small["cp_inter"] == 2 and dims.cp_intra > 1 else small["cp"]
    dense = small["d_rep"] * small["fsdp"] * small["cp"]
    experts = small["e_rep"] * small["e_fsdp"] * small["ep"]
    world = math.lcm(dense, experts)
    small["fsdp"] *= world // dense
    small["e_fsdp"] *= world // experts
    return dict(small)


def describe(degrees: Mapping[str, Degree]) -> str:
    """Of a layout, what is not 1: ``fsdp=2, cp=2``."""
    named = [f"{name}={degrees[name]}" for name in _AXES if degrees.get(name, 1) != 1]
    return ", ".join(named) or "one rank"


def degrees_of(dims: ParallelDims) -> dict[str, Degree]:
    return {name: getattr(dims, name) for name in _AXES}


def _dims(degrees: Mapping[str, Degree]) -> ParallelDims:
    return ParallelDims(**dict(degrees))  # type: ignore[arg-type]  # it checks them itself


def _default(name: str) -> Degree:
    return "auto" if name in _MAY_BE_AUTO else 1
