"""Whether training would work with what is installed here, on this machine: versions, devices, kernels, registration.

Each probe stands by itself: a package that is half installed is a finding, and no reason for the others to fail.
"""

import importlib
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_moe_strategy._autoload import STRATEGY_NAME, flavour
from lightning_moe_strategy.doctor import machine
from lightning_moe_strategy.doctor.finding import Finding

LEAST_PYTHON = (3, 11)
_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Of each flavour, what users import."""
_NOT_IMPORTED = ("pytorch-lightning", "flash-attn", "flash-attn-4", "triton", "datasets", "transformers")
"""Whether these can be loaded shows where they are used; to load them all would take seconds."""
_SHOWN = ("torch", "lightning", "pytorch-lightning", "transformers", "triton", "flash-attn", "flash-attn-4", "datasets")
_BESIDE = ("flash-attn-3", "flash-linear-attention", "causal-conv1d")
"""Used by kernels or by transformers when they are there, in no range that this package asks for."""
_HEAD_DIM = 128


def diagnose(checkpoints: Path | None = None) -> list[Finding]:
    """All that the doctor finds, with a GPU or without; nothing is trained. ``checkpoints``: where they will lie."""
    torch = _imported("torch")
    findings = [*_probe("Python", python), *_probe("packages", versions), *_probe(STRATEGY_NAME, registration)]
    if torch is not None:
        environment = os.environ
        findings += _probe("GPUs", machine.gpus, torch)
        findings += _probe("NVLink domain", machine.nvlink, torch, environment)
        findings += _probe("RDMA", machine.rdma, torch.cuda.is_available())
        findings += _probe("attention", attention, torch)
        findings += _probe("kernels", kernels, torch)
        findings += _probe("dispatchers", dispatchers, torch)
        findings += _probe("network", machine.addresses, torch, environment)
    findings += _probe("room", machine.room, checkpoints or Path.cwd())
    return findings + list(_probe("environment", machine.settings, os.environ))


def _probe(subject: str, probe: Callable[..., Iterator[Finding]], *args: object) -> list[Finding]:
    """What a probe finds until it fails, if it does."""
    found: list[Finding] = []
    try:
        found.extend(probe(*args))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        shown = f"could not be examined: {_in_one_line(error)} ({Path(where.filename).name}:{where.lineno})"
        found.append(Finding(subject, shown, "broken", "reinstall what the message names"))
    return found


def python() -> Iterator[Finding]:
    shown = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < LEAST_PYTHON:
        yield Finding("Python", shown, "broken", f"install Python {'.'.join(map(str, LEAST_PYTHON))} or later")
    else:
        yield Finding("Python", shown)


def versions() -> Iterator[Finding]:
    """Of the packages that this one requires and can use, against the ranges in its own metadata."""
    from packaging.requirements import Requirement

    required = [Requirement(line) for line in metadata.requires("lightning-moe-strategy") or ()]
    needed = {each.name: each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})}
    extras = {each.name: each for each in required if each.name not in needed}
    fine, missing = [], []
    flavours = [name for name in ("lightning", "pytorch-lightning") if _version(name) is not None]
    for name, requirement in {**extras, **needed}.items():
        version, is_needed = _version(name), name in needed
        if name in ("lightning", "pytorch-lightning"):
            is_needed = name in flavours or not flavours  # either will do
        if version is None:
            if is_needed and name in needed:
                yield Finding(
                    name, "not installed", "broken", f"pip install '{requirement.name}{requirement.specifier}'"
                )
            elif name in _SHOWN:
                missing.append(name)
            continue
        wrong = "" if requirement.specifier.contains(version, prereleases=True) else f"outside {requirement.specifier}"
        error = "" if name in _NOT_IMPORTED or not (is_needed and name in _SHOWN) else _import_error(name)
        if wrong or error:
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            found = f"{version}, {wrong}" if wrong else f"{version} cannot be imported: {error}"
            yield Finding(name, found, "broken" if is_needed else "advice", remedy)
        elif name in _SHOWN:
            fine.append(f"{name} {version}")
    beside = {name: _version(name) for name in _BESIDE}
    fine += [f"{name} {version}" for name, version in beside.items() if version is not None]
    missing += [name for name, version in beside.items() if version is None]
    yield Finding("packages", ", ".join(sorted(fine, key=lambda shown: _rank(shown.split()[0]))))
    if missing:
        yield Finding("not installed", ", ".join(sorted(missing, key=_rank)) + " (each optional)")


def _rank(name: str) -> int:
    order = (*_SHOWN, *_BESIDE)
    return order.index(name) if name in order else len(order)


def registration() -> Iterator[Finding]:
    """Whether ``Trainer(strategy="fsdp_cp_ep")`` works in a program that does not import this package."""
    points = metadata.entry_points(group="torch.backends")
    is_found = any(point.value.startswith("lightning_moe_strategy.") for point in points)
    is_off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
    by_hand = "programs must `import lightning_moe_strategy` themselves"
    if not is_found:
        yield Finding("registration", "no entry point: this package is not installed", "advice",
                      f"pip install it; until then {by_hand}")  # fmt: skip
    elif is_off:
        yield Finding(
            "registration", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off", "advice", f"unset it, or {by_hand}"
        )
    root = _ROOTS[flavour()]
    registry = importlib.import_module(f"{root}.strategies").StrategyRegistry
    if STRATEGY_NAME not in registry:
        remedy = "import lightning_moe_strategy before the Trainer, and report it"
        yield Finding("registration", f"{root} does not know {STRATEGY_NAME!r}", "broken", remedy)
        return
    registry.get(STRATEGY_NAME)
    if is_found and not is_off:
        yield Finding("registration", f"Trainer(strategy={STRATEGY_NAME!r}) works with no import ({root})")


def attention(torch: Any) -> Iterator[Finding]:
    """The kernel that attention takes, and why none of those before it in the order."""
    from lightning_moe_strategy.kernels.attention import attention_kernel_for

    device = "cuda" if torch.cuda.is_available() else "cpu"
    query = torch.empty(1, 1, 1, _HEAD_DIM, dtype=torch.bfloat16, device=device)
    chosen = attention_kernel_for(query, query).name
    reasons = []
    for name in ("flash_attention_4", "flash_attention_3", "flash_attention_2", "torch"):
        if name == chosen:
            break
        try:
            attention_kernel_for(query, query, name)
        except ValueError as error:
            reasons.append(_reason(str(error)))
    shown = f"{chosen}, in BF16 with heads of {_HEAD_DIM} channels on {device}"
    yield Finding("attention", shown + (f" (not {'; not '.join(reasons)})" if reasons and device == "cuda" else ""))
    if device == "cuda" and chosen == "pieces":
        yield Finding("attention", "no flash attention runs on this GPU", "advice", "pip install flash-attn")


def _reason(error: str) -> str:
    """``flash_attention_3: needs ...`` of ``attention_kernel('flash_attention_3') needs .... Leave ...``."""
    name, _, reason = error.removeprefix("attention_kernel('").partition("') ")
    return f"{name}: {reason.rpartition('. ')[0] or reason}"


def kernels(torch: Any) -> Iterator[Finding]:
    """What routing, expert MLP and rows are computed with."""
    from lightning_moe_strategy.kernels.on_cuda import _takes_triton

    if not torch.cuda.is_available():
        yield Finding("kernels", "the torch references, as on every CPU")
    elif _takes_triton(torch.empty(1, device="cuda"), None):
        yield Finding("kernels", "Triton on CUDA")
    else:
        yield Finding("kernels", "the torch references: Triton is not there", "advice", "pip install 'triton>=3.6'")


def dispatchers(torch: Any) -> Iterator[Finding]:
    """What ``dispatcher=`` takes."""
    from lightning_moe_strategy.expert_parallel.registry import known_dispatchers

    names = ", ".join(known_dispatchers())
    yield Finding("dispatchers", f"{names}; auto is all_to_all where ep > 1, local where it is 1")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _imported(module: str) -> Any:
    """The module, or None where it cannot be imported, whatever it raises."""
    try:
        return importlib.import_module(module)
    except Exception:
        return None


def _import_error(distribution: str) -> str:
    try:
        importlib.import_module(distribution)
    except Exception as error:
        return _in_one_line(error)
    return ""


def _in_one_line(error: BaseException) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
