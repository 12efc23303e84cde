"""Cut an arbitrary module tree into units: what is gathered, computed and freed together.

A unit is one ``fully_shard`` group: the repeated blocks, inside each its experts and (under mixed precision) its
FP32 router, and outside of them the embedding, the head and whatever else holds parameters. Nothing here
communicates; ``sharding.py`` does.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

UnitKind = Literal["block", "experts", "router", "norm", "outer", "rest"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One ``fully_shard`` group."""

    name: str
    module: nn.Module
    kind: UnitKind
    """``outer``: embedding, head, norms between them. ``rest``: what a parent of other units holds itself."""

    @property
    def depth(self) -> int:
        return self.name.count(".") + bool(self.name)


def plan_units(
    root: nn.Module, experts: Mapping[str, nn.Module], *, separate_routers: bool, separate_norms: bool = False
) -> tuple[Unit, ...]:
    """Every unit of ``root`` in the order of ``named_modules`` (a parent before its children), the root included.

    A weight that several modules share (tied embeddings) belongs to the unit of their closest common parent, and
    those modules with it: one storage, one unit, one gradient.
    """
    blocks = find_blocks(root)
    kinds: dict[str, UnitKind] = {name: "outer" for name in _outer_names(root, "", blocks)}
    kinds |= {name: "block" for name in blocks}
    for owners in _owners_of_tied_weights(root):
        parent = _closest_with_forward(root, _common_parent(owners))
        split = [name for name in kinds if name != parent and any(_contains(name, o) for o in owners)]
        # A unit that holds all owners already keeps them together.
        if not any(_contains(name, parent) for name in split):
            kinds = {name: kind for name, kind in kinds.items() if name not in split}
            kinds.setdefault(parent, "rest")
    kinds |= {name: "experts" for name in experts}
    if separate_routers:
        kinds |= {name: "router" for name in find_routers(root, experts)}
    if separate_norms:
        kinds |= {name: "norm" for name in find_norms(root) if kinds.get(name, "outer") == "outer"}
    kinds |= {name: "rest" for name in _owners_of_loose_parameters(root, kinds)}
    kinds[""] = "rest"
    return tuple(
        Unit(name=name, module=module, kind=kinds[name]) for name, module in root.named_modules() if name in kinds
    )


def find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks: the composite items of every outermost ``ModuleList`` or ``Sequential``.

    An item counts when it has children and a forward of its own: a list of plain linear layers is no list of blocks.
    """
    blocks: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            if is_list and _has_children(child) and _has_forward(child) and _has_parameters(child):
                blocks[full_name] = child
            else:
                visit(child, full_name)

    visit(root, "")
    return blocks


def find_routers(root: nn.Module, experts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Siblings of an experts module whose parameters all have one row per expert."""
    modules = dict(root.named_modules())
    routers = {}
    for experts_name, experts_module in experts.items():
        parent_name = sparse_layer_of(experts_name)
        for child_name, child in modules[parent_name].named_children():
            shapes = [parameter.shape for parameter in child.parameters()]
            if experts_module in child.modules() or not shapes:
                continue
            if all(len(shape) and shape[0] == experts_module.num_experts for shape in shapes):
                routers[f"{parent_name}.{child_name}" if parent_name else child_name] = child
    return routers


def find_norms(root: nn.Module) -> dict[str, nn.Module]:
    """Modules without children whose class is called a norm and whose parameters are vectors."""
    return {
        name: module
        for name, module in root.named_modules()
        if "norm" in type(module).__name__.lower()
        and not _has_children(module)
        and _has_parameters(module)
        and all(parameter.dim() == 1 for parameter in module.parameters())
    }


def sparse_layer_of(experts_name: str) -> str:
    """Name of the module that holds an experts module and its router. PEFT's wrappers around experts are no layers."""
    parent = experts_name.rpartition(".")[0]
    return sparse_layer_of(parent) if experts_name.rpartition(".")[2] == "base_layer" else parent


def _outer_names(module: nn.Module, name: str, blocks: Mapping[str, nn.Module]) -> list[str]:
    """Outermost modules with parameters and a forward that hold no block, below ``module``."""
    names: list[str] = []
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        if full_name in blocks or not _has_parameters(child):
            continue
        if _has_forward(child) and not any(_contains(full_name, block) for block in blocks):
            names.append(full_name)
        else:
            names += _outer_names(child, full_name, blocks)
    return names


def _owners_of_tied_weights(root: nn.Module) -> list[list[str]]:
    """For each parameter of several modules, their names; one module under two names is one module."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name.rpartition(".")[0])
    return [names for names in owners.values() if len({id(root.get_submodule(name)) for name in names}) > 1]


def _common_parent(names: Iterable[str]) -> str:
    paths = [name.split(".") if name else [] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _owners_of_loose_parameters(root: nn.Module, kinds: Mapping[str, UnitKind]) -> set[str]:
    """Closest parents, with a forward, of the parameters that no unit holds yet."""
    owners = {name.rpartition(".")[0] for name, _ in root.named_parameters()}
    loose = {owner for owner in owners if not any(_contains(unit, owner) for unit in kinds)}
    return {_closest_with_forward(root, owner) for owner in loose}


def _closest_with_forward(root: nn.Module, name: str) -> str:
    while name and not _has_forward(root.get_submodule(name)):
        name = name.rpartition(".")[0]
    return name


def _contains(parent: str, name: str) -> bool:
    return not parent or name == parent or name.startswith(f"{parent}.")


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
