"""Names of layers as an axis has room for."""

from collections.abc import Sequence


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the parts all of them share: ``layers.3.mlp.experts`` among its like is ``3``."""
    parts = [name.split(".") for name in names]
    shortest = min(len(part) for part in parts)
    first = _num_shared(parts)
    last = min(_num_shared([part[::-1] for part in parts]), shortest - first)
    if first + last >= shortest:
        return list(names)
    return [".".join(part[first : len(part) - last]) for part in parts]


def _num_shared(parts: Sequence[Sequence[str]]) -> int:
    num_same = 0
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        num_same += 1
    return num_same
