"""``torch.compile`` of every block by itself: FSDP gathers between them, and one graph serves all that are alike.

A block's sparse layer stays eager: its all-to-all has sizes that the host waits for, and its routing is kept for a
recompute. What stands before and behind it is compiled: attention, norms, residual sums, dense MLPs. That is one graph
break a sparse block, two graphs. A kernel of attention is called from the graph, so ``recompute="selective"`` keeps its
output as it does in eager code.

Over cp ranks attention is one operation of the graph, see ``context_parallel/compiled.py``: with ``recompute="block"``
it gathers once more than in eager code. Blocks outside of Hugging Face models are compiled in parts there, their norms
and other children without experts, each one whole graph.
"""

from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from lightning_moe_strategy._torch_compat import allow_graphs, unsupported_in_graph
from lightning_moe_strategy.context_parallel.indexers import is_indexer
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.units import find_norms, find_routers, sparse_layer_of

CompileBlocks = bool | dict[str, Any]

_OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")
_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def require_compile_options(asked: CompileBlocks) -> dict[str, Any] | None:
    """Arguments of ``torch.compile``, None where nothing is to be compiled.

    Raises:
        ValueError: an argument that it does not have, or one that asks for CUDA graphs.
    """
    if asked is False:
        return None
    options = {} if asked is True else dict(asked)
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ValueError(
            f"compile_blocks({asked!r}): torch.compile has no {unknown[0]!r}. Say True, or a dict of "
            f"{', '.join(_OPTIONS)}."
        )
    if options.get("mode") in _CUDA_GRAPHS or (options.get("options") or {}).get("triton.cudagraphs"):
        raise ValueError(
            f"compile_blocks({asked!r}) asks for CUDA graphs, which read weights where FSDP had gathered them the time "
            "before. Use mode='default' or 'max-autotune-no-cudagraphs'."
        )
    return options


def compile_blocks(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    experts: Mapping[str, nn.Module],
    options: Mapping[str, Any],
    *,
    cp: ContextParallel,
) -> None:
    """Compile the forward of each block of ``root``. In place, once, before anything is wrapped around it.

    Modules, parameters and their names stay what they are; hooks, FSDP's among them, stay outside. The first step of
    every stage is watched by ``cp`` and runs as it is written.

    Raises:
        ValueError: a block has sparse attention (DSA), or ``fullgraph`` is asked for and a block has experts.
    """
    for name, module in root.named_modules():
        if is_indexer(module):
            raise ValueError(
                f"compile_blocks: {name} chooses keys (sparse attention, DSA), which are chosen once, kept for a "
                "recompute and shared between blocks by code that a graph would pass by. Leave compile_blocks out."
            )
    # Of Hugging Face, whose attention is called by name.
    in_registry = {
        module for model in root.modules() if hasattr(model, "set_attn_implementation") for module in model.modules()
    }
    for name, block in blocks.items():
        inside = _inside(name, experts)
        if inside and options.get("fullgraph"):
            raise ValueError(
                f"compile_blocks with fullgraph(True): {inside[0]} waits for the host, which no graph can do. Leave "
                "fullgraph out."
            )
        # A graph break would leave a TorchFunctionMode, through which cp takes attention over, to eager code.
        is_in_mode = cp.degree > 1 and block not in in_registry
        parts = _parts(name, block, inside) if is_in_mode else {name: block}
        for path, part in parts.items():
            part.__dict__["forward"] = _Compiled(
                part.forward, path, {**options, "fullgraph": is_in_mode or options.get("fullgraph", False)}, cp
            )
    # Beyond that many torch.compile would leave the rest of the blocks as they are, without an error.
    allow_graphs(4 * len(blocks) + 8)


def keep_sparse_layers_eager(
    root: nn.Module, blocks: Mapping[str, nn.Module], experts: Mapping[str, nn.Module]
) -> None:
    """Leave what routes and sends tokens out of the graphs of ``compile_blocks``, once experts have dispatchers."""
    routers = find_routers(root, experts)
    for name in blocks:
        inside = _inside(name, experts)
        eager = {layer for path in inside if (layer := sparse_layer_of(path)) != name}
        if name in map(sparse_layer_of, inside):  # the block itself routes
            eager |= {*inside, *_inside(name, routers)}
        for path in eager:
            module = root.get_submodule(path)
            module.__dict__["forward"] = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]


class _Compiled:
    """A forward, compiled but in steps that are watched; a replay goes the way of its first pass."""

    def __init__(self, forward: Callable[..., Any], name: str, options: Mapping[str, Any], cp: ContextParallel) -> None:
        self.forward, self.name, self.cp = forward, name, cp
        self.compiled = torch.compile(forward, **options)
        self.watched: LocalSequence | None = None
        """The micro-batch of the last step that was watched, whose backward pass may still come."""
        update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.cp.guard is not None:
            self.watched = self.cp.sequence
        if self.cp.is_off or (self.watched is not None and self.watched is self.cp.sequence):
            return self.forward(*args, **kwargs)
        try:
            return self.compiled(*args, **kwargs)
        except unsupported_in_graph() as error:
            raise ValueError(
                f"compile_blocks: {self.name} cannot be one graph, which cp({self.cp.degree}) > 1 needs: "
                f"{str(error).strip().splitlines()[0]}. Write that part otherwise, choose cp=1, or leave "
                "compile_blocks out."
            ) from error


def _parts(name: str, block: nn.Module, experts: list[str]) -> dict[str, nn.Module]:
    """Children of a block to be compiled one by one: without experts, and more than a product."""
    norms = find_norms(block)
    return {
        f"{name}.{child_name}": child
        for child_name, child in block.named_children()
        if (child_name in norms or next(child.children(), None) is not None)
        and not any(each.startswith(f"{name}.{child_name}.") or each == f"{name}.{child_name}" for each in experts)
    }


def _inside(block: str, modules: Mapping[str, nn.Module]) -> list[str]:
    return [path for path in modules if path.startswith(f"{block}.")]
