"""Saved on one layout, loaded on another: parameters and optimizer states are the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laid_out import Tensors, adamw, loaded_on, muon, saved_on, sgd

MAKERS = {"adamw": adamw, "muon": muon, "sgd": sgd}

ONE = dict(fsdp=1, ep=1)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, ONE),
    "fsdp2-ep2": (2, dict(fsdp=2, e_fsdp=1, ep=2)),
    "cp2-efsdp2": (2, dict(fsdp=1, cp=2, e_fsdp=2, ep=1)),
    "drep2-erep2": (2, dict(d_rep=2, fsdp=1, e_rep=2, e_fsdp=1, ep=1)),
    "fsdp2-cp2-efsdp2-ep2": (4, dict(fsdp=2, cp=2, e_fsdp=2, ep=2)),
    "cp4-ep4": (4, dict(fsdp=1, cp=4, e_fsdp=1, ep=4)),
    "fsdp4-efsdp4": (4, dict(fsdp=4, cp=1, e_fsdp=4, ep=1)),
    "drep2-cp2-erep2-ep2": (4, dict(d_rep=2, fsdp=1, cp=2, e_rep=2, e_fsdp=1, ep=2)),
    "drep4-erep4": (4, dict(d_rep=4, fsdp=1, e_rep=4, e_fsdp=1, ep=1)),
    "fsdp4-cp2-efsdp4-ep2": (8, dict(fsdp=4, cp=2, e_fsdp=4, ep=2)),
    "drep2-cp4-erep2-efsdp2-ep2": (8, dict(d_rep=2, fsdp=1, cp=4, e_rep=2, e_fsdp=2, ep=2)),
}

PAIRS = [
    # The same layout, more and fewer ranks, replicas on one side only.
    ("fsdp2-cp2-efsdp2-ep2", "fsdp2-cp2-efsdp2-ep2", "adamw", {}),
    ("fsdp2-cp2-efsdp2-ep2", "one", "adamw", {}),
    ("one", "cp4-ep4", "muon", {}),
    ("drep2-cp2-erep2-ep2", "fsdp2-cp2-efsdp2-ep2", "muon", {}),
    # Sizes that the degrees do not divide; fewer experts than e_fsdp * ep cut across their other dims.
    ("fsdp2-cp2-efsdp2-ep2", "cp2-efsdp2", "adamw", dict(num_experts=6, width=18)),
    ("fsdp2-cp2-efsdp2-ep2", "fsdp2-ep2", "muon", dict(num_experts=2)),
    ("cp2-efsdp2", "fsdp4-efsdp4", "sgd", {}),
]
MORE_PAIRS = [
    ("one", "fsdp2-cp2-efsdp2-ep2", "adamw", {}),
    ("fsdp2-cp2-efsdp2-ep2", "cp4-ep4", "adamw", {}),
    ("cp4-ep4", "fsdp4-efsdp4", "adamw", {}),
    ("drep2-cp2-erep2-ep2", "fsdp4-efsdp4", "adamw", {}),
    ("fsdp4-efsdp4", "drep4-erep4", "adamw", {}),
    ("fsdp2-ep2", "drep2-cp2-erep2-ep2", "adamw", {}),
    ("cp2-efsdp2", "fsdp2-ep2", "muon", {}),
    ("fsdp2-cp2-efsdp2-ep2", "drep2-erep2", "muon", {}),
    ("fsdp2-cp2-efsdp2-ep2", "fsdp4-efsdp4", "adamw", dict(num_experts=6, width=18)),
    ("fsdp4-efsdp4", "fsdp2-ep2", "adamw", dict(num_experts=2, width=18)),
    ("fsdp4-cp2-efsdp4-ep2", "fsdp2-cp2-efsdp2-ep2", "adamw", {}),
    ("fsdp2-cp2-efsdp2-ep2", "drep2-cp4-erep2-efsdp2-ep2", "adamw", {}),
    ("drep2-cp4-erep2-efsdp2-ep2", "fsdp4-cp2-efsdp4-ep2", "muon", dict(num_experts=2)),
    ("one", "fsdp4-cp2-efsdp4-ep2", "muon", {}),
]


def label(pair: Any) -> str:
    saved, loaded, optimizer, decoder = pair
    return "-".join([saved, "to", loaded, optimizer, *(f"{name}{value}" for name, value in decoder.items())])


def check(pair: Any, path: Path, pools: dict[int, Any]) -> None:
    saved, loaded, optimizer, decoder = pair
    world, degrees = LAYOUTS[saved]
    before: Tensors = pools[world](saved_on, degrees, str(path), MAKERS[optimizer], decoder)[0]
    world, degrees = LAYOUTS[loaded]
    for rank, (after, _, (num_read, num_held), rest) in enumerate(
        pools[world](loaded_on, degrees, str(path), MAKERS[optimizer], decoder)
    ):
        assert after.keys() == before.keys(), rank
        differing = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
        assert not differing, (rank, differing)
        assert num_read == num_held > 0, "each rank reads its own bytes, once"
        assert rest["epoch"] == 1


@pytest.fixture
def pools(ranks1, ranks2, ranks4, ranks8):
    return {1: ranks1, 2: ranks2, 4: ranks4, 8: ranks8}


@pytest.mark.parametrize("pair", PAIRS, ids=label)
def test_what_was_saved_is_loaded_bit_for_bit_on_another_layout(pair, pools, tmp_path):
    check(pair, tmp_path / "x.ckpt", pools)


@pytest.mark.slow
@pytest.mark.parametrize("pair", MORE_PAIRS, ids=label)
def test_what_was_saved_is_loaded_bit_for_bit_on_more_layouts(pair, pools, tmp_path):
    check(pair, tmp_path / "x.ckpt", pools)
