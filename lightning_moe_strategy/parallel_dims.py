"""The layout of a run: six degrees over the same ranks. Arithmetic alone, so no torch.

``ParallelDims(...).resolve(world_size, ...)`` checks that the ranks can be laid out; ``ResolvedDims`` answers
who shares a group with whom, which axes leave NVLink, and what that costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The degrees a user asks for; ``resolve`` fills in each ``"auto"`` and checks that they fit the world.

    ``d_rep * fsdp * cp == e_rep * e_fsdp * ep == world``. The last axis of each product is innermost:
    its ranks are consecutive and share an NVLink domain when the degree allows it.
    """

    d_rep: int = 1
    """Copies of the dense parameters; their gradients are all-reduced once per step."""
    fsdp: int | Literal["auto"] = "auto"
    """Dense shards beyond those over ``cp``, each with its own samples. Auto: what the other two leave."""
    cp: int = 1
    """GPUs that share one sequence."""
    e_rep: int = 1
    """Copies of the expert parameters, for tens of thousands of GPUs."""
    e_fsdp: int | Literal["auto"] = "auto"
    """Shards of each expert, gathered while the layer before computes. Auto: what the other two leave."""
    ep: int | Literal["auto"] = "auto"
    """GPUs the experts are spread over. Auto: what a given ``e_fsdp`` leaves, else the largest degree that
    stays inside an NVLink domain and divides the number of experts."""
    cp_inter: int = 1
    """Of ``cp``, the number of NVLink domains a sequence is spread over; ``cp / cp_inter`` GPUs in each."""
    nvl: int | Literal["auto"] = "auto"
    """GPUs of one NVLink domain (72 on GB200 NVL72). Auto: the GPUs of one host, too few on NVL72."""

    def __post_init__(self) -> None:
        for name in ("d_rep", "cp", "e_rep", "cp_inter"):
            _check_degree(name, getattr(self, name), auto_allowed=False)
        for name in ("fsdp", "e_fsdp", "ep", "nvl"):
            _check_degree(name, getattr(self, name), auto_allowed=True)
        if self.cp % self.cp_inter:
            remedy = _nearest_divisors("cp_inter", self.cp_inter, self.cp)
            raise ValueError(f"cp_inter({self.cp_inter}) does not divide cp({self.cp}). {remedy}")

    def resolve(self, world_size: int, *, local_world_size: int, num_experts: int | None = None) -> "ResolvedDims":
        """The same degrees as integers; ``ValueError`` with a remedy when they do not fit the world.

        ``world_size`` is the number of ranks, ``local_world_size`` the number of GPUs of one host. ``num_experts`` is
        per layer (the greatest common divisor where layers differ); without it ``ep="auto"`` is 1 and any other goes
        unchecked.
        """
        nvl = local_world_size if self.nvl == "auto" else self.nvl
        ranks_per_domain = _ranks_per_domain(world_size, nvl, local_world_size)

        fsdp = self.fsdp
        if fsdp == "auto":
            fsdp = _what_remains("fsdp", {"d_rep": self.d_rep, "cp": self.cp}, world_size)
        dense_degrees = {"d_rep": self.d_rep, "fsdp": fsdp, "cp": self.cp}
        _check_product(dense_degrees, world_size, ("cp", "d_rep", "fsdp"))

        expert_ranks = _what_remains("e_fsdp * ep", {"e_rep": self.e_rep}, world_size)
        ep, e_fsdp = self.ep, self.e_fsdp
        if ep == "auto" and e_fsdp == "auto":
            # A divisor of the domain: with 72 ranks in each, a group of 16 would straddle two.
            ep = 1 if num_experts is None else math.gcd(expert_ranks, num_experts, ranks_per_domain)
        elif ep == "auto":
            ep = _what_remains("ep", {"e_rep": self.e_rep, "e_fsdp": int(e_fsdp)}, world_size)
        if num_experts is not None and num_experts % ep:
            remedy = _nearest_divisors("ep", ep, math.gcd(num_experts, expert_ranks))
            raise ValueError(f"ep({ep}) does not divide num_experts({num_experts}). {remedy}")
        if e_fsdp == "auto":
            e_fsdp = _what_remains("e_fsdp", {"e_rep": self.e_rep, "ep": ep}, world_size)
        _check_product({"e_rep": self.e_rep, "e_fsdp": e_fsdp, "ep": ep}, world_size, ("e_fsdp", "e_rep"))

        return ResolvedDims(
            d_rep=self.d_rep,
            fsdp=fsdp,
            cp=self.cp,
            e_rep=self.e_rep,
            e_fsdp=e_fsdp,
            ep=ep,
            cp_inter=self.cp_inter,
            nvl=nvl,
            ranks_per_domain=ranks_per_domain,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedDims(ParallelDims):
    """Degrees that fit the world. What ``ParallelDims.resolve`` returns; not built by hand."""

    fsdp: int
    e_fsdp: int
    ep: int
    nvl: int
    ranks_per_domain: int
    """Consecutive ranks that share an NVLink domain. Domains are taken to hold equal shares of the world: 256
    GPUs on NVL72 are 64 of the 72 in each of 4 racks."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.d_rep * self.fsdp * self.cp

    @property
    def dp(self) -> int:
        """Data parallel degree: ranks that read different samples."""
        return self.d_rep * self.fsdp

    @property
    def fsdp_cp(self) -> int:
        """Number of dense shards."""
        return self.fsdp * self.cp

    @property
    def cp_intra(self) -> int:
        """Of ``cp``, the GPUs inside one NVLink domain."""
        return self.cp // self.cp_inter

    def degree(self, axis: str) -> int:
        """Number of ranks in a group of the axis."""
        return self._degree_and_stride(axis)[0]

    def coordinate(self, axis: str, rank: int) -> int:
        """Position of the rank in its group of the axis."""
        degree, stride = self._degree_and_stride(axis)
        return rank // stride % degree

    def group_ranks(self, axis: str, rank: int) -> range:
        """Global ranks of the group of the axis that holds the rank, in order.

        Axes: d_rep, fsdp, cp, cp_inter, cp_intra, dp, fsdp_cp, e_rep, e_fsdp, ep.
        """
        degree, stride = self._degree_and_stride(axis)
        first = rank - rank // stride % degree * stride
        return range(first, first + degree * stride, stride)

    def num_domains(self, axis: str) -> int:
        """NVLink domains that a group of the axis reaches over, at worst; 1 means NVLink alone."""
        degree, stride = self._degree_and_stride(axis)
        firsts = (rank for rank in range(self.world_size) if rank // stride % degree == 0)
        groups = (range(first, first + degree * stride, stride) for first in firsts)
        return max(len({rank // self.ranks_per_domain for rank in group}) for group in groups)

    def warnings(self) -> list[str]:
        """One sentence or two for each communication on the critical path that leaves the NVLink domain."""
        checks = (_ep_warning(self), _cp_warning(self), _fsdp_warning(self))
        return [warning for warning in checks if warning is not None]

    def explain(self) -> str:
        """The layout as a plain-text table: what each axis exchanges, and over which link."""
        dense, expert = (self.d_rep, self.fsdp, self.cp), (self.e_rep, self.e_fsdp, self.ep)
        lines = [
            f"{self.world_size} ranks, {self.world_size // self.ranks_per_domain} NVLink domain(s) of {self.nvl}"
            f" ({self.ranks_per_domain} used in each), data parallel degree {self.dp}",
            f"dense mesh (d_rep, fsdp, cp) = {dense}, expert mesh (e_rep, e_fsdp, ep) = {expert}",
            f"{'axis':<10}{'degree':>7}{'groups':>8}  {'link':<20}exchanged",
        ]
        cp_axes = ("cp",) if self.cp_inter == 1 else ("cp_inter", "cp_intra")
        for axis in ("d_rep", "fsdp_cp", *cp_axes, "e_rep", "e_fsdp", "ep"):
            degree, num_domains = self.degree(axis), self.num_domains(axis)
            link = "-" if degree == 1 else "NVLink" if num_domains == 1 else f"RDMA, {num_domains} domains"
            exchanged = "nothing" if degree == 1 else _EXCHANGED[axis]
            lines.append(f"{axis:<10}{degree:>7}{self.world_size // degree:>8}  {link:<20}{exchanged}")
        return "\n".join(lines)

    def _degree_and_stride(self, axis: str) -> tuple[int, int]:
        return {
            "d_rep": (self.d_rep, self.fsdp_cp),
            "fsdp": (self.fsdp, self.cp),
            "cp": (self.cp, 1),
            "cp_inter": (self.cp_inter, self.cp_intra),
            "cp_intra": (self.cp_intra, 1),
            "dp": (self.dp, self.cp),
            "fsdp_cp": (self.fsdp_cp, 1),
            "e_rep": (self.e_rep, self.e_fsdp * self.ep),
            "e_fsdp": (self.e_fsdp, self.ep),
            "ep": (self.ep, 1),
        }[axis]


_EXCHANGED = {
    "d_rep": "dense gradients, once per step",
    "fsdp_cp": "dense weights (forward, backward), dense gradients",
    "cp": "K and V of every attention layer, on the critical path",
    "cp_inter": "K and V of every attention layer, 1st step, on the critical path",
    "cp_intra": "K and V of every attention layer, 2nd step, on the critical path",
    "e_rep": "expert gradients, once per step",
    "e_fsdp": "expert weights (forward, backward), expert gradients, behind compute",
    "ep": "tokens to experts and back in every layer, on the critical path",
}


def _ep_warning(dims: ResolvedDims) -> str | None:
    num_domains = dims.num_domains("ep")
    if num_domains == 1:
        return None
    return (
        f"ep({dims.ep}) reaches over {num_domains} NVLink domains of {dims.ranks_per_domain} GPUs: up to "
        f"{1 - 1 / num_domains:.0%} of the tokens cross RDMA in every layer and nothing hides them. "
        f"Lower ep to {math.gcd(dims.ep, dims.ranks_per_domain)}, or set nvl if a domain is larger."
    )


def _cp_warning(dims: ResolvedDims) -> str | None:
    axis = "cp" if dims.cp_inter == 1 else "cp_intra"
    num_domains = dims.num_domains(axis)
    if num_domains == 1:
        return None
    cp_inter = dims.cp // math.gcd(dims.cp, dims.ranks_per_domain)
    return (
        f"{axis}({dims.degree(axis)}) reaches over {num_domains} NVLink domains of {dims.ranks_per_domain} "
        f"GPUs: up to {1 - 1 / num_domains:.0%} of K and V cross RDMA in every attention layer and nothing "
        f"hides them. Set cp_inter to {cp_inter} and {(cp_inter - 1) / dims.cp:.0%} do, or set nvl if a "
        "domain is larger."
    )


def _fsdp_warning(dims: ResolvedDims) -> str | None:
    num_domains = dims.num_domains("fsdp_cp")
    if dims.cp_inter > 1 or dims.fsdp == 1 or num_domains == 1:
        return None
    fsdp = math.gcd(dims.fsdp, max(1, dims.ranks_per_domain // dims.cp))
    return (
        f"fsdp({dims.fsdp}) * cp({dims.cp}) = {dims.fsdp_cp} dense shards reach over {num_domains} NVLink "
        f"domains of {dims.ranks_per_domain} GPUs: every micro-batch moves 8 bytes per dense parameter over "
        f"RDMA (BF16 weights twice, FP32 gradients once), which only enough tokens hide. Lower fsdp to "
        f"{fsdp} and raise d_rep to {dims.dp // fsdp} for less traffic and more memory, or set nvl if a "
        "domain is larger."
    )


def _check_degree(name: str, degree: object, *, auto_allowed: bool) -> None:
    if auto_allowed and degree == "auto":
        return
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        kind = 'a positive integer or "auto"' if auto_allowed else "a positive integer"
        raise ValueError(f"{name} must be {kind}, but it is {degree!r}. Set it to 1 to leave the axis out.")


def _check_product(degrees: dict[str, int], world_size: int, adjustable: Sequence[str]) -> None:
    """Raise unless the degrees multiply to the world; the remedy names up to two, each a repair."""
    product = math.prod(degrees.values())
    if product == world_size:
        return
    others = {name: product // degrees[name] for name in adjustable}
    repairs = [f"{name} to {world_size // n}" for name, n in others.items() if world_size % n == 0]
    verb = "Raise" if product < world_size else "Lower"
    remedy = f"{verb} {' or '.join(repairs[:2])}." if repairs else f"Choose divisors of {world_size}."
    raise ValueError(f"{_as_product(degrees)} = {product} GPUs, but the world has {world_size}. {remedy}")


def _what_remains(name: str, degrees: dict[str, int], world_size: int) -> int:
    """The degree that the others leave for ``name``."""
    product = math.prod(degrees.values())
    if world_size % product == 0:
        return world_size // product
    remedy = f"Choose divisors of {world_size}."
    for other, degree in reversed(degrees.items()):
        if world_size % (product // degree) == 0:
            remedy = _nearest_divisors(other, degree, world_size // (product // degree))
            break
    total = f" = {product}" if len(degrees) > 1 else ""
    raise ValueError(
        f"{_as_product(degrees)}{total} does not divide the world of {world_size} GPUs, "
        f"which leaves no whole number for {name}. {remedy}"
    )


def _ranks_per_domain(world_size: int, nvl: int, local_world_size: int) -> int:
    shares = [divisor for divisor in _divisors(world_size) if divisor <= nvl]
    shares_of_whole_hosts = [share for share in shares if share % local_world_size == 0]
    return max(shares_of_whole_hosts or shares)


def _nearest_divisors(name: str, degree: int, number: int) -> str:
    divisors = _divisors(number)
    lower = max(divisor for divisor in divisors if divisor < degree)
    higher = min((divisor for divisor in divisors if divisor > degree), default=None)
    return f"Lower {name} to {lower}" + ("." if higher is None else f" or raise it to {higher}.")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _as_product(degrees: dict[str, int]) -> str:
    return " * ".join(f"{name}({degree})" for name, degree in degrees.items())
