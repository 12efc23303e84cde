"""Whoever reads the reference guesses nothing: public names, their methods and arguments are documented."""

import ast
import inspect
import re
from typing import Any
from unittest import mock

import pytest

from tests.code_blocks import DOCS, public_objects


def test_the_reference_has_every_public_name():
    listed = set(re.findall(r"^::: lightning_moe_strategy\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE))
    assert listed == set(public_objects())


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_a_public_name_its_methods_and_arguments_are_documented(name: str):
    assert undocumented(name, public_objects()[name]) == []


def undocumented(name: str, found: Any) -> list[str]:
    """What a reader of the reference would have to guess."""
    if not inspect.isclass(found):
        return missing_arguments(name, found, inspect.getdoc(found) or "")
    text = "\n".join(filter(None, (inspect.getdoc(found), inspect.getdoc(found.__init__))))
    own = ast.parse(inspect.getsource(found)).body[0]
    assert isinstance(own, ast.ClassDef)
    documented = {field for field, _ in documented_fields(own)}
    problems = [f"{name} has no docstring"] if not inspect.getdoc(found) else []
    for parameter in list(inspect.signature(found.__init__).parameters)[1:]:
        if parameter not in documented and not re.search(rf"^\s*{parameter}: ", text, re.MULTILINE):
            problems.append(f"{name}({parameter})")
    for attribute, value in public_methods(found).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        problems += missing_arguments(f"{name}.{attribute}", function, inspect.getdoc(function) or "")
    return problems


def documented_fields(own: ast.ClassDef) -> list[tuple[str, str]]:
    """Names of a dataclass's fields that a string follows."""
    pairs = zip(own.body, own.body[1:], strict=False)
    return [
        (field.target.id, text.value.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    ]


def public_methods(found: type) -> dict[str, Any]:
    """Of the package's own classes; what Lightning or torch define first is theirs to document."""
    ours = [kind for kind in found.__mro__ if kind.__module__.startswith("lightning_moe_strategy")]
    theirs = {name for kind in found.__mro__ if kind not in ours for name in vars(kind)}
    public = {name: value for kind in reversed(ours) for name, value in vars(kind).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in public.items()
        if name not in theirs and (callable(value) or isinstance(value, property | classmethod | staticmethod))
    }


def missing_arguments(name: str, function: Any, text: str) -> list[str]:
    if not text:
        return [f"{name} has no docstring"]
    parameters = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
    return [f"{name}({each})" for each in parameters if not re.search(rf"\b{each}\b", text)]


def test_what_is_not_documented_is_found():
    class Half:
        """Something."""

        def __init__(self, size: int) -> None: ...

        def grow(self, by: int) -> None:
            """More."""

        def shrink(self) -> None: ...

    Half.__module__ = "lightning_moe_strategy.half"
    source = "class Half:\n    x: int = 0\n"
    with mock.patch("inspect.getsource", lambda _: source):
        assert undocumented("Half", Half) == ["Half(size)", "Half.grow(by)", "Half.shrink has no docstring"]
