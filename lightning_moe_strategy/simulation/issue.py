"""What a step hands to the GPU, in the order of issue. Nothing here knows how fast anything is."""

from dataclasses import dataclass

from lightning_moe_strategy.simulation.arithmetic import ComputeKind
from lightning_moe_strategy.simulation.communication import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A product or an attention."""

    phase: str
    moment: int
    """On the clock of ``MemoryWatch``, once its result is allocated."""
    module: str
    kind: ComputeKind
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicate:
    """A collective: FSDP's own run beside compute, and those that are started ahead; the others in its place."""

    phase: str
    moment: int
    collective: Collective
    number: int | None = None
    """Names one that is started ahead, for what waits for it."""
    follows: int | None = None
    """The number of the one whose result this one moves on: the first of two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadWait:
    """Compute needs what a collective that was started ahead brings."""

    phase: str
    moment: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherWait:
    """Compute needs the weights of a unit."""

    phase: str
    moment: int
    unit: str
    is_kept: bool
    """The gathered buffer lives on until the next unit's is copied out, as in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionWait:
    """A unit's gradients are whole: FSDP waits until few enough inputs of reductions before it are held."""

    phase: str
    moment: int
    max_held: int
    """This one's included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    """The end of the forward pass, of the backward pass (which waits for all reductions) or of the step."""

    phase: str
    moment: int


Issue = Compute | Communicate | AheadWait | GatherWait | ReductionWait | PhaseEnd
