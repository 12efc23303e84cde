"""Write docs/lightning.md: what a Trainer can be told and what a module can do under the strategy.

    python -m docs.lightning > docs/lightning.md

tests/test_lightning_table.py holds the lists of docs/lightning_rows.py: every name of the installed Lightning stands in
one of them, and every test that a row names exists.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from docs.lightning_rows import SECTIONS, UNCONCERNED, Row

HEADER = """\
# Lightning

What Lightning 2.6 offers, under `Trainer(strategy="fsdp_cp_ep")`. `works`: the test behind the link ran it on 2 to 4
ranks, against one process where it changes numbers. `refused`: an error before a rank computes, which says why and what
to do; the test holds its words. Nothing is silently ignored. Both packages, `lightning` and `pytorch_lightning`.

Written by `docs/lightning.py`. [tests/test_lightning_table.py](../tests/test_lightning_table.py) fails when the
installed Lightning has a name without a row, or a row names a test that does not exist. Tests run on CPUs over gloo.
"""

FOOTER = """\

Without a row, as no strategy is concerned: {names}.
"""


def text() -> str:
    """The whole page."""
    unconcerned = sorted(set().union(*UNCONCERNED.values()))
    tables = "".join(_table(title, rows) for title, rows in SECTIONS.values())
    return HEADER + tables + FOOTER.format(names=_code(unconcerned))


def _table(title: str, rows: tuple[Row, ...]) -> str:
    lines = (f"| {_code(row.names.split())} | {row.verdict} | {row.note} | {_link(row.tests)} |\n" for row in rows)
    return f"\n## {title}\n\n| name | verdict | | test |\n|---|---|---|---|\n" + "".join(lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _link(test: str) -> str:
    file, name = test.split("::")
    return f"[{name.replace('_', ' ')}](../tests/test_{file}.py)"


def missing_rows(lightning: ModuleType) -> list[str]:
    """Names of ``lightning`` (``lightning.pytorch``) without a row, and rows of names that it does not have."""
    problems = []
    for section, installed in _installed(lightning):
        _, rows = SECTIONS[section]
        listed = {name for row in rows for name in row.names.split()}
        without = UNCONCERNED.get(section, set())
        problems += [f"{section}: no row for {name}" for name in sorted(installed - listed - without)]
        problems += [
            f"{section}: {name} is no name of this Lightning" for name in sorted((listed | without) - installed)
        ]
    return problems


def _installed(lightning: ModuleType) -> Iterator[tuple[str, set[str]]]:
    from torch import nn

    trainer = lightning.Trainer
    yield "Trainer", _parameters(trainer.__init__)
    yield "Runs", set().union(*map(_parameters, (trainer.fit, trainer.validate, trainer.test, trainer.predict)))
    own = [kind for kind in lightning.LightningModule.__mro__ if kind not in nn.Module.__mro__]
    yield "LightningModule", _public(own)
    yield "LightningDataModule", _public(lightning.LightningDataModule.__mro__)
    yield "Callback", _public(lightning.Callback.__mro__)
    yield "Callbacks", set(lightning.callbacks.__all__)
    yield "Strategy", _public(lightning.strategies.ModelParallelStrategy.__mro__)


def _parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}  # type: ignore[arg-type]


def _public(kinds: "tuple[type, ...] | list[type]") -> set[str]:
    return {name for kind in kinds if kind is not object for name in vars(kind) if not name.startswith("_")}


def missing_tests(folder: Path) -> list[str]:
    """Tests that a row names and ``folder`` does not have."""
    named = {row.tests for _, rows in SECTIONS.values() for row in rows}
    return sorted(test for test in named if test.split("::")[1] not in _tests_in(folder, test.split("::")[0]))


def _tests_in(folder: Path, name: str) -> set[str]:
    path = folder / f"test_{name}.py"
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return {node.name.removeprefix("test_") for node in tree.body if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    print(text(), end="")
