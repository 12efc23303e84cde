"""The machines: memory, links and FLOP/s of one GPU, and how many share NVLink. Every number has its source.

Bytes and bytes/s are decimal; links count one direction.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_moe_strategy.plan.errors import PlanError, require, unknown

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One kind of machine. A YAML of a user's own has these fields; ``base`` names the preset it changes."""

    name: str
    gpu: str
    """Name of one GPU in sentences."""
    nvl: int
    """GPUs of one NVLink domain."""
    gpus_per_host: int
    memory_bytes: float
    """Of one GPU, as the driver reports it."""
    nvlink_bytes_per_second: float
    """Usable by one GPU, one direction."""
    rdma_bytes_per_second: float
    """Usable by one GPU, one direction."""
    peak_flops: float
    """Dense bf16 of the data sheet, in FLOP/s."""
    achieved_flops: float
    """bf16 FLOP/s a training run reaches in its linear layers."""
    source: str = ""
    """Where the achieved rate comes from."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                holds = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
                require(f"cluster {self.name} {field.name}", value, holds, "a number above 0", "Correct the file.")
        if self.nvl % self.gpus_per_host:
            raise PlanError(
                f"gpus_per_host({self.gpus_per_host}) must divide nvl({self.nvl}) of cluster {self.name}: a host "
                "lies in one NVLink domain. Correct the file."
            )


# Usable NVLink: 720 GB/s of 900 on Blackwell and 370 of 450 on Hopper, the rates NCCL plans with (18 links of 40.1
# and 20.6 GB/s; NVIDIA/nccl issues 1807 and 1374). A point-to-point copy on GB200 measured 770 GB/s
# (Azure/AI-benchmarking-guide issue 7), an all-reduce over 72 of them 835 GB/s (coreweave/nccl-tests pull 43).
_BLACKWELL_NVLINK = 720e9
_HOPPER_NVLINK = 370e9

# Usable RDMA: 90 % of one 400 or 800 Gb/s port per GPU. Seed, "Hiding eFSDP Communication": 45 GB/s, and 90 GB/s for
# the 800 Gb/s of GB300 and B300.
_RDMA_400 = 45e9
_RDMA_800 = 90e9

# DeepSeek-V3 671B in bf16 on 256 GB200, EP 64 and FSDP without pipeline, the layout of this project:
# pytorch/torchtitan pull 2207. GB300 has the same dense bf16 peak; no bf16 run on it was found.
_GB200_ACHIEVED = 576e12
_GB200_SOURCE = "DeepSeek-V3 on 256 GB200, bf16 (torchtitan pull 2207)"

# 17.3 % MFU of 2.25 PFLOP/s on 8 B200 (pytorch/torchtitan pull 2389). B300 has the same dense bf16 peak.
_B200_ACHIEVED = 389e12
_B200_SOURCE = "a mixture of experts on 8 B200 at 17.3 % MFU (torchtitan pull 2389)"

# Qwen3-30B-A3B on 8 H100, EP 8, 4k tokens (NeMo Automodel, docs/performance-summary). H200 has the same tensor cores.
_H100_ACHIEVED = 277e12
_H100_SOURCE = "Qwen3-30B-A3B on 8 H100 (NeMo Automodel performance summary)"

# Peaks without sparsity: 2.5 PFLOP/s for the 1,200 W parts of the NVL72 racks (360 PFLOP/s sparse per rack, NVIDIA's
# data sheet), 2.25 for HGX B200 and B300 (36 PFLOP/s sparse per 8), 0.989 for H100 and H200 SXM.
CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            name="gb200-nvl72",
            gpu="GB200",
            nvl=72,
            gpus_per_host=4,
            memory_bytes=189_471 * MIB,  # nvidia-smi; 186 GB on the data sheet, 200 in the seed
            nvlink_bytes_per_second=_BLACKWELL_NVLINK,
            rdma_bytes_per_second=_RDMA_400,
            peak_flops=2.5e15,
            achieved_flops=_GB200_ACHIEVED,
            source=_GB200_SOURCE,
        ),
        Cluster(
            name="gb300-nvl72",
            gpu="GB300",
            nvl=72,
            gpus_per_host=4,
            memory_bytes=284_208 * MIB,  # nvidia-smi
            nvlink_bytes_per_second=_BLACKWELL_NVLINK,
            rdma_bytes_per_second=_RDMA_800,
            peak_flops=2.5e15,
            achieved_flops=_GB200_ACHIEVED,
            source=_GB200_SOURCE,
        ),
        Cluster(
            name="b200-nvl8",
            gpu="B200",
            nvl=8,
            gpus_per_host=8,
            memory_bytes=183_359 * MIB,  # nvidia-smi
            nvlink_bytes_per_second=_BLACKWELL_NVLINK,
            rdma_bytes_per_second=_RDMA_400,
            peak_flops=2.25e15,
            achieved_flops=_B200_ACHIEVED,
            source=_B200_SOURCE,
        ),
        Cluster(
            name="b300-nvl8",
            gpu="B300",
            nvl=8,
            gpus_per_host=8,
            memory_bytes=275_040 * MIB,  # nvidia-smi; the seed counts 309 GB, the 288 GiB that are soldered
            nvlink_bytes_per_second=_BLACKWELL_NVLINK,
            rdma_bytes_per_second=_RDMA_800,
            peak_flops=2.25e15,
            achieved_flops=_B200_ACHIEVED,
            source=_B200_SOURCE,
        ),
        Cluster(
            name="h200-nvl8",
            gpu="H200",
            nvl=8,
            gpus_per_host=8,
            memory_bytes=143_771 * MIB,  # nvidia-smi
            nvlink_bytes_per_second=_HOPPER_NVLINK,
            rdma_bytes_per_second=_RDMA_400,
            peak_flops=0.989e15,
            achieved_flops=_H100_ACHIEVED,
            source=_H100_SOURCE,
        ),
        Cluster(
            name="h100-nvl8",
            gpu="H100",
            nvl=8,
            gpus_per_host=8,
            memory_bytes=81_559 * MIB,  # nvidia-smi, modal-labs/modal-client pull 2797
            nvlink_bytes_per_second=_HOPPER_NVLINK,
            rdma_bytes_per_second=_RDMA_400,
            peak_flops=0.989e15,
            achieved_flops=_H100_ACHIEVED,
            source=_H100_SOURCE,
        ),
    )
}


def load_cluster(cluster: str) -> Cluster:
    """A preset by name, or the cluster of a user's YAML.

    Raises:
        PlanError: no such name or file, a field missing, unknown or not positive.
    """
    path = Path(cluster)
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path)
    if cluster.lower() not in CLUSTERS:
        raise unknown("cluster", cluster, CLUSTERS, remedy="Choose one, or give the path of a YAML with its numbers.")
    return CLUSTERS[cluster.lower()]


def _from_yaml(path: Path) -> Cluster:
    import yaml

    try:
        values: Any = yaml.safe_load(path.read_text())
    except OSError:
        raise PlanError(f"cluster({str(path)!r}) cannot be read. Give an existing YAML or a preset's name.") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"cluster({str(path)!r}) is not readable YAML: {reason}. Correct the file.") from None
    if not isinstance(values, Mapping):
        raise PlanError(f"cluster({str(path)!r}) holds no mapping. Give the fields of Cluster, base among them.")
    given = dict(values)
    base = dataclasses.asdict(load_cluster(str(given.pop("base")))) if "base" in given else {}
    merged = {"name": path.stem, "gpu": path.stem, **base, **given}
    fields = {field.name: field for field in dataclasses.fields(Cluster)}
    if strange := sorted(set(merged) - set(fields)):
        raise PlanError(f"cluster({str(path)!r}) has unknown fields {strange}. Choose from: {', '.join(fields)}.")
    missing = [name for name, field in fields.items() if name not in merged and field.default is dataclasses.MISSING]
    if missing:
        raise PlanError(f"cluster({str(path)!r}) lacks {', '.join(missing)}. Add them, or a base: gb200-nvl72.")
    return Cluster(**{**merged, "name": str(given.get("name", path.stem))})
