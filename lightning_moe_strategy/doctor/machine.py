"""What the doctor finds on this machine: GPUs, links between them and between hosts, addresses, memory for workers."""

import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_moe_strategy.doctor.finding import Finding

INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 1 << 30
"""Bytes. Docker gives 64 MiB, which one worker of a DataLoader may fill."""
LEAST_DISK = 10 << 30
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "ranks hang for ever where one fails: unset it"),
    "CUDA_LAUNCH_BLOCKING": ("1", "nothing overlaps any more: unset it after debugging"),
    "NCCL_P2P_DISABLE": ("1", "NVLink is not used: unset it"),
    "NCCL_IB_DISABLE": ("1", "RDMA is not used: unset it where there is any"),
}
"""Of the environment: the value that costs, and what it does."""


def gpus(torch: Any) -> Iterator[Finding]:
    """Name, memory and compute capability, or why there is none."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        each = [torch.cuda.get_device_properties(index) for index in range(count)]
        kinds = sorted({f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}" for p in each})
        yield Finding("GPUs", f"{count} x " + "; ".join(kinds))
        if min(p.major for p in each) < 8:
            yield Finding("GPUs", "BF16 needs compute capability 8.0", "advice", "train with precision='32-true'")
        return
    if output_of("nvidia-smi", "-L"):
        yield Finding(
            "GPUs", "nvidia-smi lists some, and torch sees none", "broken",
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}: install one that this driver can run",
        )  # fmt: skip
        return
    yield Finding("GPUs", "no GPU: training runs on the CPU, over gloo")


def nvlink(torch: Any, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The GPUs of one NVLink domain, as far as one host can tell: what ``nvl`` should be."""
    if not torch.cuda.is_available():
        yield Finding("NVLink domain", "no GPU")
        return
    here = torch.cuda.device_count()
    linked = linked_gpus(output_of("nvidia-smi", "topo", "-m"))
    auto = int(environment.get("LOCAL_WORLD_SIZE", here))
    if fabric := fabric_of(output_of("nvidia-smi", "-q")):
        yield Finding(
            "NVLink domain", f"spans hosts (fabric {fabric}); nvl='auto' takes {auto}, the GPUs of this host", "advice",
            "give the strategy nvl=, the GPUs of the whole domain: 72 on GB200 NVL72",
        )  # fmt: skip
    elif here > 1 and linked < here:
        yield Finding(
            "NVLink domain", f"{linked} of {here} GPUs of this host", "advice",
            f"nvl='auto' takes {auto}: give nvl={linked}, or the all-to-all of ep leaves NVLink",
        )  # fmt: skip
    else:
        yield Finding("NVLink domain", f"{max(linked, 1)} GPUs, on this host; nvl='auto' takes {auto}")


def linked_gpus(topology: str) -> int:
    """The most GPUs that are all joined by NVLink, from ``nvidia-smi topo -m``; 0 where it says nothing."""
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    peers = [{column for column, cell in enumerate(row[1 : len(rows) + 1]) if cell.startswith("NV") or cell == "X"}
             for row in rows]  # fmt: skip
    return max((len(set.intersection(*(peers[peer] for peer in group))) for group in peers), default=0)


def fabric_of(description: str) -> str:
    """Of a domain that spans hosts, from ``nvidia-smi -q``: its cluster; empty where there is none."""
    found = re.search(r"ClusterUUID\s*:\s*([0-9a-fA-F-]+)", description)
    is_ready = re.search(r"Fabric\s*\n\s*State\s*:\s*Completed", description)
    return found[1] if found and is_ready and set(found[1]) - set("0-") else ""


def rdma(has_gpu: bool, root: Path | None = None) -> Iterator[Finding]:
    """Devices with an active port."""
    devices = []
    for device in sorted((root or INFINIBAND).glob("*")):
        ports = [port for port in device.glob("ports/*") if "ACTIVE" in _read(port / "state")]
        rates = sorted({_read(port / "rate").split(" (")[0] for port in ports})
        devices.append(f"{device.name} ({', '.join(rates) if ports else 'no active port'})")
    if not devices:
        remedy = "hosts exchange over TCP; in a container, map /dev/infiniband and /sys/class/infiniband"
        yield Finding("RDMA", "no device", "advice" if has_gpu else "fine", remedy if has_gpu else "")
        return
    yield Finding("RDMA", ", ".join(devices))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY:
        shown = f"locked memory is limited to {locked / 2**10:.0f} KiB"
        yield Finding("RDMA", shown, "broken", "NCCL cannot register memory: ulimit -l unlimited")


def addresses(torch: Any, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Where gloo listens, and whether the names of interfaces and hosts that are set exist."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = environment.get(variable, "")
        if asked and not asked.startswith("^") and not _exists(asked, names, is_prefix=variable.startswith("NCCL")):
            remedy = f"set it to one of {', '.join(names)}, or unset it"
            yield Finding("network", f"{variable}={asked} is no interface here", "broken", remedy)
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    if environment.get("GLOO_SOCKET_IFNAME"):
        yield Finding("network", f"gloo listens on {environment['GLOO_SOCKET_IFNAME']}")
    elif not address:
        yield Finding(
            "network", f"host name {host} has no address: gloo listens on loopback, and other hosts cannot reach it",
            "advice", "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface between hosts",
        )  # fmt: skip
    elif not _is_here(address):
        yield Finding(
            "network", f"host name {host} is {address}, which is no address of this machine", "broken",
            "gloo cannot listen there: correct /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )  # fmt: skip
    else:
        reach = " (loopback: one host only)" if address.startswith("127.") else ""
        yield Finding("network", f"gloo listens on {address}, host name {host}{reach}")
    try:
        torch.distributed.ProcessGroupGloo.create_default_device()
    except (RuntimeError, ValueError) as error:
        yield Finding("network", f"gloo cannot open a device: {error}", "broken", "set GLOO_SOCKET_IFNAME=lo to try")
    main = environment.get("MASTER_ADDR")
    if main and not _resolves(main):
        yield Finding("network", f"MASTER_ADDR={main} has no address", "broken", "ranks would wait for it: correct it")


def _exists(asked: str, names: list[str], *, is_prefix: bool) -> bool:
    """NCCL takes beginnings of names, ``=`` before an exact one; gloo takes names."""
    exact = asked.startswith("=") or not is_prefix
    wanted = asked.lstrip("=").split(",")
    return any(name == each if exact else name.startswith(each) for name in names for each in wanted)


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _is_here(address: str) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def room(folder: Path) -> Iterator[Finding]:
    """Shared memory for the workers of a DataLoader, and the disk of the checkpoints."""
    if not SHARED_MEMORY.is_dir():
        yield Finding("/dev/shm", "is not there", "advice", "DataLoader(num_workers=...) needs it")
    else:
        free = shutil.disk_usage(SHARED_MEMORY).free
        is_little = free < LEAST_SHARED_MEMORY
        remedy = "workers of a DataLoader may end with a bus error: docker run --shm-size=8g" if is_little else ""
        yield Finding("/dev/shm", f"{free / 2**30:.1f} GiB free", "advice" if is_little else "fine", remedy)
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("checkpoints", f"{place} cannot be written", "broken", "choose another --dir, or allow it")
        return
    remedy = "a checkpoint of N parameters with AdamW in FP32 takes 12 N bytes" if free < LEAST_DISK else ""
    yield Finding("checkpoints", f"{free / 2**30:.0f} GiB free in {place}", "advice" if remedy else "fine", remedy)


def settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that were set once for debugging, and cost."""
    for name, (value, effect) in _SETTINGS.items():
        if environment.get(name) == value:
            yield Finding("environment", f"{name}={value}", "advice", effect)


def output_of(*command: str) -> str:
    """What a tool prints; empty where it is not there, fails, or takes long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
