"""What a strategy can be asked once its Trainer has started: degrees, meshes, units, experts, shares of the samples."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_moe_strategy._lightning_compat import ModelParallelStrategy
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.mesh import ResolvedDims
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.units import Unit


class PlacedStrategy(ModelParallelStrategy):
    """A strategy whose module lies on two meshes."""

    _placement: Placement | None = None

    @property
    def placement(self) -> Placement:
        """How the module lies on the ranks; it exists once the Trainer has started its processes."""
        if self._placement is None:
            raise RuntimeError("The placement exists once the Trainer has started its processes.")
        return self._placement

    @property
    def dims(self) -> ResolvedDims:
        """The degrees in use."""
        return self.placement.dims

    @property
    def context_parallel(self) -> ContextParallel:
        """This rank's place in its cp group."""
        return self.placement.context_parallel

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh with axes e_rep, e_fsdp, ep; it exists once the model is set up."""
        assert self.placement.expert is not None
        return self.placement.expert.mesh

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """Every layer's experts by name; empty before the model is set up."""
        return self.placement.experts

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is gathered and freed together, in the order of ``named_modules``."""
        return self.placement.units

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one cp group read the same samples."""
        return {"num_replicas": self.placement.dense.dp_size, "rank": self.placement.dense.dp_rank}
