"""Which optimizers compute on shards what they compute in one process."""

import inspect
from collections.abc import Iterable

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "sgd")
"""Modules of ``torch.optim`` whose update of a number depends on nothing else (AdamW is Adam there); compared with one
process in tests/test_optimizers.py."""

REFUSED = {
    "torch.optim._adafactor": (
        "Adafactor keeps means over rows and columns, which DTensor cannot take of shards: use AdamW, or Muon of "
        "lightning_moe_strategy, which keeps half the state of AdamW"
    ),
    "torch.optim.lbfgs": "LBFGS makes one vector of all parameters, which lie on two meshes: use AdamW",
    "torch.optim.rprop": "Rprop writes where a product is positive, which DTensor cannot: use AdamW",
    "torch.optim.sparse_adam": "SparseAdam takes sparse gradients, which FSDP does not reduce: use AdamW",
}


def unvouched(optimizers: Iterable[Optimizer]) -> list[str]:
    """A sentence for each kind of optimizer with sharded parameters that nothing here vouches for.

    Raises:
        ValueError: one is known not to work on shards.
    """
    sentences: dict[str, None] = {}
    for optimizer in optimizers:
        if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
            continue
        home, name = home_of_step(optimizer), type(optimizer).__name__
        if home in REFUSED:
            raise ValueError(f"the optimizer {name} cannot run on sharded parameters. {REFUSED[home]}.")
        if home == "torch.optim._muon":
            sentences[
                "torch.optim.Muon gathers every matrix on every rank and rounds its sums to BF16 there, and takes no "
                "stacked experts: lightning_moe_strategy.Muon does neither."
            ] = None
        elif not is_vouched(home):
            sentences[
                f"the optimizer {name} ({home}) sees the shards of each parameter as a DTensor. That is exact where "
                "the update of a number depends on no other number; compare a few steps with one process where it does."
            ] = None
    return list(sentences)


def is_vouched(home: str) -> bool:
    """Whether this package vouches for optimizers whose ``step`` is defined in this module."""
    is_ours = home.partition(".")[0] == __name__.partition(".")[0]
    return is_ours or home in {f"torch.optim.{name}" for name in ELEMENTWISE}


def home_of_step(optimizer: Optimizer) -> str:
    """The module that defines its ``step``: a subclass that keeps its parent's computes what that does."""
    # torch wraps the step of every class, a subclass's inherited one too.
    home: str = inspect.unwrap(type(optimizer).step).__module__
    return home
