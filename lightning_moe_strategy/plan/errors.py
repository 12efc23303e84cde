"""The one exception of the planner, and the nearest names for a word that is not known."""

import difflib
from collections.abc import Iterable


class PlanError(ValueError):
    """Something a user asked for cannot be planned. One line: name, value, rule, remedy."""


def unknown(name: str, value: str, known: Iterable[str], *, remedy: str) -> PlanError:
    """The error for a name outside a list; the list starts with what the user most likely meant."""
    names = list(known)
    near = difflib.get_close_matches(value.lower(), names, n=3, cutoff=0.3)
    ordered = ", ".join([*near, *(other for other in names if other not in near)])
    return PlanError(f"{name}({value!r}) is not known: {ordered}. {remedy}")


def require(name: str, value: object, holds: bool, rule: str, remedy: str) -> None:
    """Raise unless ``holds``: ``name(value) must be rule. remedy``."""
    if not holds:
        raise PlanError(f"{name}({value}) must be {rule}. {remedy}")
