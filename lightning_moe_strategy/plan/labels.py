"""What a plan's JSON holds, by key and in words, the same in the terminal and on the page."""

from collections.abc import Mapping


def layout_label(layout: Mapping[str, object]) -> str:
    """Both meshes as ``--compare`` takes them: ``d_rep,fsdp,cp/e_rep,e_fsdp,ep``, a 2-D cp as inter x intra."""
    cp, inter = int(number(layout, "cp")), int(number(layout, "cp_inter"))
    dense = f"{layout['d_rep']},{layout['fsdp']},{f'{inter}x{cp // inter}' if inter > 1 else cp}"
    return f"{dense}/{layout['e_rep']},{layout['e_fsdp']},{layout['ep']}"


def tokens_label(tokens: float) -> str:
    """262144 as 256k, 1048576 as 1M: units of 1024, plain digits for what they do not divide."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size:,.0f}{unit}"
    return f"{tokens:,.0f}"


_BUCKETS = {
    "bf16_copy": "BF16 copy",
    "dsa_topk": "DSA top-k",
    "ep_buffers": "EP buffers",
    "gathered_kv": "gathered K and V",
}
"""Buckets whose name is not what its words say."""


def bucket_label(name: str) -> str:
    """A bucket of ``memory_gb`` in words."""
    return _BUCKETS.get(name, name.replace("_", " "))


def number(values: Mapping[str, object], key: str) -> float:
    """A number of a plan's JSON."""
    value = values[key]
    assert isinstance(value, int | float), (key, value)
    return float(value)


def mapping(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A part of a plan's JSON."""
    value = values[key]
    assert isinstance(value, Mapping), (key, value)
    return value
