"""Where the ranks lie: the two halves of a layout, and how far each axis reaches over NVLink domains.

The dense mesh (d_rep, fsdp, cp) and the expert mesh (e_rep, e_fsdp, ep) are priced apart and added: a search over
all pairs of them costs little more than one over each.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from lightning_moe_strategy.parallel_dims import ParallelDims, ResolvedDims
from lightning_moe_strategy.plan.cluster import Cluster
from lightning_moe_strategy.plan.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class DenseSide:
    """Degrees of the dense mesh."""

    d_rep: int
    fsdp: int
    cp: int
    cp_inter: int

    @property
    def shards(self) -> int:
        """Ranks that a dense parameter is spread over."""
        return self.fsdp * self.cp

    @property
    def cp_intra(self) -> int:
        """Of ``cp``, the consecutive ranks of one group."""
        return self.cp // self.cp_inter


@dataclass(frozen=True, kw_only=True)
class ExpertSide:
    """Degrees of the expert mesh."""

    e_rep: int
    e_fsdp: int
    ep: int

    @property
    def shards(self) -> int:
        """Ranks that all experts of a layer are spread over."""
        return self.e_fsdp * self.ep


@dataclass(frozen=True, kw_only=True)
class Group:
    """One axis as a collective sees it: its ranks, and the NVLink domains they lie in."""

    degree: int
    domains: int

    @property
    def rdma_share(self) -> float:
        """Share of a gathered whole that a rank receives over RDMA, each remote piece on its own."""
        return 1 - 1 / self.domains if self.degree > 1 else 0.0

    @property
    def nvlink_share(self) -> float:
        """Share of a gathered whole that a rank receives over NVLink."""
        return 1 / self.domains - 1 / self.degree


@lru_cache(maxsize=65536)
def domains_reached(degree: int, stride: int, ranks_per_domain: int) -> int:
    """NVLink domains that a group of ``degree`` ranks, ``stride`` apart, lies in, at worst."""
    if degree == 1:
        return 1
    if stride >= ranks_per_domain:
        return degree
    # No domain between the first and the last rank is stepped over; what counts is how late in one a group starts.
    step = math.gcd(degree * stride, ranks_per_domain)
    latest_start = ranks_per_domain - 1 if stride >= step else ranks_per_domain - step + stride - 1
    return (latest_start + (degree - 1) * stride) // ranks_per_domain + 1


def group(degree: int, stride: int, ranks_per_domain: int) -> Group:
    """The axis of that degree whose neighbours are ``stride`` ranks apart."""
    return Group(degree=degree, domains=domains_reached(degree, stride, ranks_per_domain))


@lru_cache(maxsize=256)
def ranks_per_domain(gpus: int, cluster: Cluster) -> int:
    """GPUs used of each NVLink domain: 64 of 72 for 256 GPUs, so that every domain holds an equal share."""
    return resolve(DenseSide(d_rep=1, fsdp=gpus, cp=1, cp_inter=1), None, gpus, cluster).ranks_per_domain


def resolve(dense: DenseSide, experts: ExpertSide | None, gpus: int, cluster: Cluster) -> ResolvedDims:
    """The layout as the strategy resolves it; its errors as ``PlanError``."""
    expert_degrees = {"e_rep": 1, "e_fsdp": gpus, "ep": 1} if experts is None else vars(experts)
    try:
        dims = ParallelDims(**vars(dense), **expert_degrees, nvl=cluster.nvl)
        return dims.resolve(gpus, local_world_size=math.gcd(gpus, cluster.gpus_per_host))
    except ValueError as error:
        raise PlanError(str(error)) from None


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))
