"""What a strategy can be asked once its Trainer has started: degrees, meshes, units, experts, shares of the samples."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_moe_strategy._lightning_compat import LightningModule, ModelParallelStrategy, is_compiled
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.mesh import ResolvedDims, build_sample_group
from lightning_moe_strategy.placement import Placement
from lightning_moe_strategy.units import Unit


class PlacedStrategy(ModelParallelStrategy):
    """A strategy whose module lies on two meshes."""

    _placement: Placement | None = None
    _mesh_timeout: timedelta
    _module: LightningModule | None = None

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # Here, because it is the last a Trainer does before it refuses the module and says nothing of what to do.
        if is_compiled(module):
            raise RuntimeError(
                "Trainer was given torch.compile(model), one graph around all that is gathered and sent. Pass the "
                "model itself, and compile its blocks: strategy=FSDPCPEPStrategy(compile_blocks=True)."
            )
        self._module = module

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

    @property
    def sample_group(self) -> dist.ProcessGroup:
        """This rank and those that hold other samples, one of every cp group.

        For what is counted by samples: ``process_group`` of a torchmetrics metric, ``sync_dist_group`` of ``self.log``.
        Over all ranks, a sample would count once for each rank of its cp group. Every rank asks for it, in ``setup`` of
        the LightningModule or later.
        """
        return build_sample_group(self.dims, self.root_device.type, self._mesh_timeout)
