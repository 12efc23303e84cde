"""Degrees and groups: the arithmetic alone, then the meshes built on fake ranks, then on gloo ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_moe_strategy.mesh import build_dense_meshes, build_expert_meshes
from lightning_moe_strategy.parallel_dims import ParallelDims, ResolvedDims

TIMEOUT = timedelta(seconds=77)
RACKS = ParallelDims(d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64, nvl=72)  # seed: 256 GPUs, 1M context
HOSTS = ParallelDims(d_rep=1, fsdp=32, cp=8, e_fsdp=32, ep=8)  # seed: 256 GPUs without NVL72
DENSE_AXES, EXPERT_AXES = ("d_rep", "fsdp", "cp"), ("e_rep", "e_fsdp", "ep")


def resolve(dims: ParallelDims, world_size: int = 256, num_experts: int | None = 256) -> ResolvedDims:
    return dims.resolve(world_size, local_world_size=4 if dims.nvl == 72 else 8, num_experts=num_experts)


def small(**degrees: int) -> ResolvedDims:
    return ParallelDims(**degrees).resolve(4, local_world_size=4, num_experts=8)


# Degrees


def test_automatic_degrees_take_what_the_given_ones_leave():
    dims = resolve(ParallelDims(d_rep=2, cp=16))
    assert (dims.d_rep, dims.fsdp, dims.cp) == (2, 8, 16)
    assert (dims.e_rep, dims.e_fsdp, dims.ep, dims.nvl) == (1, 32, 8, 8)
    assert (dims.dp, dims.fsdp_cp, dims.world_size, dims.cp_intra) == (16, 128, 256, 16)
    given_shards = resolve(ParallelDims(e_rep=2, e_fsdp=4, nvl=72))
    assert (given_shards.e_rep, given_shards.e_fsdp, given_shards.ep) == (2, 4, 32)


@pytest.mark.parametrize(
    ("world_size", "nvl", "local_world_size", "num_experts", "ep"),
    [
        (256, 72, 4, 256, 64),  # the seed's plan comes out by itself
        (256, "auto", 8, 256, 8),
        (256, 72, 4, 96, 32),  # gcd(96, 256)
        (144, 72, 4, 256, 8),  # 16 would straddle two domains of 72
        (256, 72, 4, None, 1),
        (4, "auto", 4, 6, 2),
    ],
)
def test_automatic_ep_is_the_largest_that_stays_inside_a_domain(world_size, nvl, local_world_size, num_experts, ep):
    dims = ParallelDims(nvl=nvl).resolve(world_size, local_world_size=local_world_size, num_experts=num_experts)
    assert (dims.ep, dims.e_fsdp) == (ep, world_size // ep)
    assert dims.num_domains("ep") == 1


def test_resolving_twice_changes_nothing():
    dims = resolve(RACKS)
    assert dims.resolve(256, local_world_size=4, num_experts=256) == dims


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"d_rep": 4, "fsdp": 1, "cp": 32},
            "d_rep(4) * fsdp(1) * cp(32) = 128 GPUs, but the world has 256. Raise cp to 64 or d_rep to 8.",
        ),
        (
            {"d_rep": 4, "fsdp": 1, "cp": 128},
            "d_rep(4) * fsdp(1) * cp(128) = 512 GPUs, but the world has 256. Lower cp to 64 or d_rep to 2.",
        ),
        (
            {"d_rep": 3, "fsdp": 1, "cp": 5},
            "d_rep(3) * fsdp(1) * cp(5) = 15 GPUs, but the world has 256. Choose divisors of 256.",
        ),
        (
            {"d_rep": 3, "cp": 4},
            "d_rep(3) * cp(4) = 12 does not divide the world of 256 GPUs, which leaves no whole number for "
            "fsdp. Lower d_rep to 2 or raise it to 4.",
        ),
        ({"ep": 6}, "ep(6) does not divide num_experts(64). Lower ep to 4 or raise it to 8."),
        ({"ep": 128}, "ep(128) does not divide num_experts(64). Lower ep to 64."),
        (
            {"e_fsdp": 4, "ep": 8},
            "e_rep(1) * e_fsdp(4) * ep(8) = 32 GPUs, but the world has 256. Raise e_fsdp to 32 or e_rep to 8.",
        ),
        (
            {"e_rep": 3},
            "e_rep(3) does not divide the world of 256 GPUs, which leaves no whole number for e_fsdp * ep."
            " Lower e_rep to 2 or raise it to 4.",
        ),
        (
            {"cp": 8, "cp_inter": 3},
            "cp_inter(3) does not divide cp(8). Lower cp_inter to 2 or raise it to 4.",
        ),
        ({"cp": 0}, "cp must be a positive integer, but it is 0. Set it to 1 to leave the axis out."),
        (
            {"d_rep": True},
            "d_rep must be a positive integer, but it is True. Set it to 1 to leave the axis out.",
        ),
        (
            {"ep": "max"},
            "ep must be a positive integer or \"auto\", but it is 'max'. Set it to 1 to leave the axis out.",
        ),
    ],
)
def test_an_error_names_degrees_values_rule_and_remedy(degrees, message):
    with pytest.raises(ValueError) as error:
        resolve(ParallelDims(**degrees), num_experts=64)
    assert str(error.value) == message


def test_every_remedy_works():
    for repaired in ({"cp": 64}, {"d_rep": 8}):
        assert resolve(ParallelDims(**({"d_rep": 4, "fsdp": 1, "cp": 32} | repaired))).world_size == 256
    for ep in (4, 8):
        assert resolve(ParallelDims(ep=ep), num_experts=64).ep == ep


# Groups


def test_groups_of_every_axis_split_the_world_and_agree_with_the_coordinates():
    dims = ParallelDims(d_rep=2, fsdp=3, cp=4, cp_inter=2, e_rep=2, e_fsdp=2, ep=6).resolve(24, local_world_size=4)
    for axis in (*DENSE_AXES, "cp_inter", "cp_intra", "dp", "fsdp_cp", *EXPERT_AXES):
        groups = {dims.group_ranks(axis, rank) for rank in range(24)}
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            assert len(group) == dims.degree(axis)
            assert [dims.coordinate(axis, rank) for rank in group] == list(range(len(group)))
    for axes in (DENSE_AXES, EXPERT_AXES):
        mesh = torch.arange(24).reshape([dims.degree(axis) for axis in axes])
        for rank in range(24):
            assert mesh[tuple(dims.coordinate(axis, rank) for axis in axes)] == rank


def test_the_table_shows_what_crosses_rdma_in_the_256_gpu_plan():
    table = resolve(RACKS).explain()
    assert "256 ranks, 4 NVLink domain(s) of 72 (64 used in each), data parallel degree 4" in table
    rows = {line.split()[0]: line for line in table.splitlines()[3:]}
    assert {axis for axis, row in rows.items() if "RDMA, 4 domains" in row} == {"d_rep", "e_fsdp"}
    assert {axis for axis, row in rows.items() if "NVLink" in row} == {"fsdp_cp", "cp", "ep"}
    assert rows["e_fsdp"].split()[1:3] == ["4", "64"] and rows["ep"].split()[1:3] == ["64", "4"]
    assert "expert weights" in rows["e_fsdp"] and "nothing" in rows["e_rep"]


def test_the_256_gpu_plan_has_no_warning_and_what_leaves_the_domain_has_one_with_its_cost():
    assert resolve(RACKS).warnings() == []
    (fsdp,) = resolve(HOSTS).warnings()
    assert "fsdp(32) * cp(8) = 256 dense shards reach over 32 NVLink domains of 8 GPUs" in fsdp
    assert "Lower fsdp to 1 and raise d_rep to 32" in fsdp
    ep, cp = resolve(ParallelDims(d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64)).warnings()
    assert "ep(64) reaches over 8 NVLink domains of 8 GPUs: up to 88% of the tokens" in ep
    assert "Lower ep to 8" in ep
    # Seed: of K and V, 7/64 over RDMA with cp = 8 x 8.
    assert "cp(64) reaches over 8 NVLink domains" in cp and "Set cp_inter to 8 and 11% do" in cp
    assert resolve(ParallelDims(d_rep=4, fsdp=1, cp=64, cp_inter=8, ep=8)).warnings() == []


def test_domains_that_a_group_straddles_are_counted():
    dims = ParallelDims(ep=16, nvl=72).resolve(144, local_world_size=4, num_experts=16)
    assert dims.group_ranks("ep", 71) == range(64, 80)
    assert dims.num_domains("ep") == 2 and "Lower ep to 8" in dims.warnings()[0]


# Meshes on fake ranks


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def members(mesh, axis: str) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


@pytest.mark.parametrize("plan", [RACKS, HOSTS], ids=["racks", "hosts"])
@pytest.mark.parametrize("rank", [0, 63, 64, 255])
def test_groups_of_the_meshes_are_those_of_the_arithmetic(plan, rank):
    dims = resolve(plan)
    with fake_rank(rank, 256):
        dense = build_dense_meshes(dims, "cpu", TIMEOUT)
        expert = build_expert_meshes(dims, "cpu", TIMEOUT)
        for mesh, axes in ((dense.mesh, DENSE_AXES), (expert.mesh, EXPERT_AXES)):
            assert mesh.mesh_dim_names == axes
            for axis in axes:
                assert members(mesh, axis) == list(dims.group_ranks(axis, rank))
                assert mesh.get_local_rank(axis) == dims.coordinate(axis, rank)
        shard_axes = ("d_rep", "fsdp_cp") if dims.d_rep > 1 else ("fsdp_cp",)
        assert dense.shard_mesh.mesh_dim_names == shard_axes
        for axis in shard_axes:
            assert members(dense.shard_mesh, axis) == list(dims.group_ranks(axis, rank))
        assert dist.get_process_group_ranks(dense.cp_group) == list(dims.group_ranks("cp", rank))
        assert (dense.dp_rank, dense.dp_size) == (dims.coordinate("dp", rank), dims.dp)
        assert expert.shard_mesh.mesh_dim_names == ("e_fsdp",) and expert.ep_mesh.mesh_dim_names == ("ep",)
        assert members(expert.shard_mesh, "e_fsdp") == list(dims.group_ranks("e_fsdp", rank))
        assert dense.cp_mesh is None


def test_two_dimensional_cp_adds_a_mesh_whose_intra_ranks_are_consecutive():
    dims = resolve(ParallelDims(d_rep=4, fsdp=1, cp=64, cp_inter=8, ep=8))
    with fake_rank(77, 256):
        cp_mesh = build_dense_meshes(dims, "cpu", TIMEOUT).cp_mesh
        assert cp_mesh is not None and cp_mesh.mesh_dim_names == ("cp_inter", "cp_intra")
        assert members(cp_mesh, "cp_intra") == list(range(72, 80))
        assert members(cp_mesh, "cp_inter") == [64 + 5 + 8 * domain for domain in range(8)]


@pytest.mark.parametrize("rank", [0, 12_345])
def test_sixteen_thousand_ranks_build_in_seconds(rank):
    dims = ParallelDims(d_rep=256, fsdp=1, cp=64, e_rep=64, e_fsdp=4, ep=64, nvl=72)
    begin = time.perf_counter()
    resolved = dims.resolve(16_384, local_world_size=4, num_experts=256)
    with fake_rank(rank, 16_384):
        dense = build_dense_meshes(resolved, "cpu", TIMEOUT)
        expert = build_expert_meshes(resolved, "cpu", TIMEOUT)
        assert members(expert.shard_mesh, "e_rep") == list(resolved.group_ranks("e_rep", rank))
        assert members(dense.shard_mesh, "fsdp_cp") == list(resolved.group_ranks("fsdp_cp", rank))
    assert time.perf_counter() - begin < 10  # 0.5 s on one core


# Meshes on gloo ranks


def group_timeouts_and_world_groups() -> tuple[set[timedelta], timedelta, list[str]]:
    def timeout(group: dist.ProcessGroup) -> timedelta:
        return group._get_backend(torch.device("cpu")).options._timeout

    dims = ParallelDims(cp=4, ep=4).resolve(4, local_world_size=4, num_experts=8)
    dense, expert = build_dense_meshes(dims, "cpu", TIMEOUT), build_expert_meshes(dims, "cpu", TIMEOUT)
    groups = [*dense.mesh.get_all_groups(), *dense.shard_mesh.get_all_groups(), *expert.mesh.get_all_groups()]
    names = [group.group_name for group in groups if group.size() == 4]
    return {timeout(group) for group in groups}, timeout(dist.group.WORLD), names


def test_every_group_gets_the_timeout_and_an_axis_over_the_world_its_own_group(ranks4):
    for timeouts, world_timeout, names in ranks4(group_timeouts_and_world_groups):
        assert timeouts == {TIMEOUT} and world_timeout != TIMEOUT
        assert len(set(names)) == 3  # cp, fsdp_cp and ep: three communicators, none of them the world's


class Experts(nn.Module):
    def __init__(self, weight: torch.Tensor, expert_ids: range) -> None:
        super().__init__()
        self.weight, self.expert_ids = nn.Parameter(weight), expert_ids

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_EDD = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.stack([x_TD[e] @ weight_EDD[i] for i, e in enumerate(self.expert_ids)]).square().sum()


def gradient_of_sharded_experts(degrees: dict[str, int]) -> tuple[torch.Tensor, torch.Size, tuple[str, ...]]:
    """Each rank's samples go to the experts of its ep slice; the gradient is summed over e_rep and e_fsdp."""
    meshes = build_expert_meshes(small(**degrees), "cpu", TIMEOUT)
    build_dense_meshes(small(**degrees), "cpu", TIMEOUT)
    ep_rank, ep = meshes.ep_mesh.get_local_rank(), meshes.ep_mesh.size()
    owned = range(8 // ep * ep_rank, 8 // ep * (ep_rank + 1))
    weight_EDD = torch.randn(8, 4, 4)
    experts = Experts(weight_EDD[owned.start : owned.stop].clone(), owned)
    experts.weight = nn.Parameter(DTensor.from_local(experts.weight.data, meshes.ep_mesh, [Shard(0)]))
    fully_shard(experts, mesh=meshes.shard_mesh)
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    experts(samples(dist.get_rank() // ep)).backward()
    assert isinstance(experts.weight.grad, DTensor)
    names = experts.weight.device_mesh.mesh_dim_names
    return experts.weight.grad.full_tensor(), experts.weight.shape, names


def samples(group: int) -> torch.Tensor:
    return torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(group))


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"e_fsdp": 2, "ep": 2}, ("e_fsdp", "ep")),
        ({"e_rep": 2, "e_fsdp": 1, "ep": 2}, ("e_rep", "e_fsdp", "ep")),
        ({"e_rep": 2, "e_fsdp": 2, "ep": 1}, ("e_rep", "e_fsdp", "ep")),
        ({"e_fsdp": 1, "ep": 4}, ("e_fsdp", "ep")),
    ],
)
def test_fsdp_joins_shard_mesh_and_ep_mesh_and_the_gradient_is_that_of_one_process(ranks4, degrees, names):
    torch.manual_seed(0)
    reference = Experts(torch.randn(8, 4, 4), range(8))
    sum(reference(samples(group)) for group in range(4 // degrees["ep"])).backward()
    for gradient, shape, mesh_names in ranks4(gradient_of_sharded_experts, degrees):
        assert shape == (8, 4, 4) and mesh_names == names
        torch.testing.assert_close(gradient, reference.weight.grad, rtol=1e-6, atol=1e-6)
