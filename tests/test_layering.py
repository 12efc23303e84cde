"""Imports run downwards only, by the floors of the design; every rule is shown to catch a planted file."""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_moe_strategy"
ROOT = Path(__file__).parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 70
FACE = 6  # the package's own __init__ stands above all: importing a name from it would import everything

FLOORS = {
    **dict.fromkeys(("__main__", "cli", "configs"), 5),
    **dict.fromkeys(("strategy", "precision", "callbacks", "_lightning_compat"), 4),
    **dict.fromkeys(("placed_strategy", "summed_gradients", "logged_means", "rehearsal", "verification"), 4),
    **dict.fromkeys(("models.lightning_module", "models.data", "verifying"), 4),
    **dict.fromkeys(("data_agreement", "agreed_loader", "trainer_limits", "saving", "_lightning_checkpoints"), 4),
    **dict.fromkeys(("resuming", "loading", "failures.watch", "doctor"), 4),
    "failures": 3,
    **dict.fromkeys((), 3),
    **dict.fromkeys(("random_states", "indexed_reader", "data_position"), 3),
    **dict.fromkeys(("sharding", "initialization", "placement", "token_mean", "units", "recompute", "simulate"), 3),
    **dict.fromkeys(("simulation", "prefetch_order", "token_watch", "comparison", "waits"), 3),
    **dict.fromkeys(("whole_scalars", "stale_parameters"), 3),
    **dict.fromkeys(("recomputed_operations", "compiled_blocks"), 3),
    **dict.fromkeys(("optimizers", "sharded_state"), 3),
    **dict.fromkeys(("context_parallel", "expert_parallel", "checkpoint", "shared_samples"), 3),
    **dict.fromkeys(("hugging_face_weights",), 3),
    **dict.fromkeys(("models",), 2),
    **dict.fromkeys(("mesh", "parallel_dims", "collectives", "host_agreement", "plan", "report"), 1),
    **dict.fromkeys(("_torch_compat", "_torch_waits"), 1),
    **dict.fromkeys(("kernels", "_autoload"), 0),
}
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
STANDARD_LIBRARY_ONLY = ("", "_autoload")
TORCH_FREE = ("plan", "parallel_dims", "report")
TORCH_PRIVATE = ("_torch_compat", "_torch_waits")


def violations(root: Path) -> list[str]:
    """``path:line: what is wrong`` for every broken rule in the package that lies in ``root``."""
    files = dict(package_files(root))
    found = []
    for module, path in files.items():
        source = path.read_text()
        tree = ast.parse(source)
        problems = [*import_problems(module, tree, set(files)), *size_problems(source, tree)]
        found += [f"{path.relative_to(root)}:{line}: {problem}" for line, problem in problems]
    return found


def package_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Module names without the package's own name, links to the root folders followed."""
    for folder, _, names in os.walk(root / PACKAGE, followlinks=True):
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(root / PACKAGE).with_suffix("").parts
                yield ".".join(part for part in parts if part != "__init__"), path


def import_problems(module: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    floor = floor_of(module)
    if floor is None:
        yield 1, f"{module} has no floor: give it one in FLOORS"
        return
    for line, name, is_relative in imports(tree):
        if is_relative:
            yield line, "relative import"
        elif name.split(".")[0] == PACKAGE:
            target = resolve(name, modules)
            target_floor = floor_of(target)
            if module not in STANDARD_LIBRARY_ONLY and target_floor is not None and target_floor > floor:
                yield line, f"{module or PACKAGE} (floor {floor}) imports {target or PACKAGE} (floor {target_floor})"
        else:
            problem = external_problem(module, floor, name)
            if problem:
                yield line, problem
    if module in STANDARD_LIBRARY_ONLY:
        for line, name, _ in imports(ast.Module([node for node in tree.body if is_import(node)], [])):
            if name.split(".")[0] not in sys.stdlib_module_names and name != f"{PACKAGE}._autoload":
                yield line, f"imports {name} when torch is imported: the standard library only"


def external_problem(module: str, floor: int, name: str) -> str | None:
    room = module.split(".")[0]
    if begins(name, "callbacks", "models", "kernels", "configs"):
        return f"imports {name}, which is importable from the repository alone: {PACKAGE}.{name}"
    if begins(name, *LIGHTNING) and module != "_lightning_compat":
        return f"imports {name}: Lightning comes from {PACKAGE}._lightning_compat, on floor 4"
    if begins(name, "torch") and room in TORCH_FREE:
        return f"imports {name} in {room}, which needs no torch"
    if begins(name, "torch.distributed") and (floor == 0 or (room == "models" and floor == 2)):
        return f"{room} uses torch.distributed: neither a model nor a kernel asks for its rank"
    if begins(name, "torch") and any(is_private(part) for part in name.split(".")) and module not in TORCH_PRIVATE:
        return f"imports {name}: private names of torch live in _torch_compat"
    if floor == 0 and room == "kernels" and not begins(name, "torch", "triton", *sys.stdlib_module_names):
        return f"a kernel imports {name}: torch and triton only"
    return None


def size_problems(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield num_lines, f"{num_lines} lines, at most {MAX_FILE_LINES}: cut the file by idea"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, is it relative) of every import, and of every use of ``torch.distributed`` without one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}", node.level > 0) for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield node.lineno, "torch.distributed", False


def floor_of(module: str) -> int | None:
    if not module:
        return FACE
    rooms = [room for room in FLOORS if begins(module, room)]
    return FLOORS[max(rooms, key=len)] if rooms else None


def resolve(name: str, modules: set[str]) -> str:
    """The module of the package that an import of ``name`` reaches; empty for the package itself."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts)


def begins(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_the_package_keeps_every_rule():
    assert violations(ROOT) == []


def test_every_room_of_the_package_is_read():
    modules = dict(package_files(ROOT))
    assert {"", "_autoload", "mesh", "callbacks.prefetch", "models.config", "kernels.routing"} <= set(modules)


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("mesh.py", f"from {PACKAGE} import strategy", "mesh (floor 1) imports strategy (floor 4)"),
        ("kernels/mlp.py", f"def f():\n    import {PACKAGE}.mesh", "kernels.mlp (floor 0) imports mesh (floor 1)"),
        ("models/moe.py", f"from {PACKAGE}.models.data import x", "models.moe (floor 2) imports models.data (floor 4)"),
        ("strategy.py", f"from {PACKAGE} import ParallelDims", f"strategy (floor 4) imports {PACKAGE} (floor 6)"),
        ("models/moe.py", "import torch.distributed as dist", "models uses torch.distributed"),
        ("models/moe.py", "import torch\ntorch.distributed.get_rank()", "moe.py:2: models uses torch.distributed"),
        ("models/moe.py", "from torch.distributed.tensor import DTensor", "models uses torch.distributed"),
        ("kernels/mlp.py", "from torch import distributed", "kernels uses torch.distributed"),
        ("models/moe.py", "from lightning.pytorch import LightningModule", "Lightning comes from"),
        ("callbacks/zigzag.py", "import pytorch_lightning as pl", "Lightning comes from"),
        ("plan/memory.py", "from torch import nn", "plan, which needs no torch"),
        ("plan/memory.py", "from . import page", "relative import"),
        ("strategy.py", "import models.config", f"alone: {PACKAGE}.models.config"),
        ("strategy.py", "from callbacks import zigzag", f"alone: {PACKAGE}.callbacks.zigzag"),
        ("sharding.py", "from torch.distributed.tensor._utils import x", "private names of torch"),
        ("kernels/mlp.py", "import numpy", "torch and triton only"),
        ("_autoload.py", "import torch", "the standard library only"),
        ("__init__.py", f"from {PACKAGE}.mesh import DenseMeshes", "the standard library only"),
        ("utils.py", "", "utils has no floor"),
        ("mesh.py", "x = 1\n" * 401, "401 lines, at most 400"),
        ("mesh.py", "def f():\n" + "    x = 1\n" * 70, "f has 71 lines, at most 70"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, path, source, problem):
    (tmp_path / PACKAGE).mkdir()
    for room in ("", "callbacks", "models", "kernels", "plan"):
        folder = tmp_path / "rooms" / room if room in ("callbacks", "models", "kernels") else tmp_path / PACKAGE / room
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(f"from {PACKAGE} import _autoload\n" if not room else "")
        if "rooms" in folder.parts:
            (tmp_path / PACKAGE / room).symlink_to(folder)
    for clean in ("mesh", "strategy", "_autoload", "models/data", "models/config"):
        (tmp_path / PACKAGE / f"{clean}.py").write_text("import os\n")
    assert violations(tmp_path) == []
    (tmp_path / PACKAGE / path).write_text(source)
    (found,) = violations(tmp_path)
    assert problem in found
