"""``lightning-moe doctor`` on planted machines: what it finds, what it says to do, and with which exit status."""

import json
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_moe_strategy.cli import doctor as command
from lightning_moe_strategy.doctor import diagnose as doctor
from lightning_moe_strategy.doctor import machine
from lightning_moe_strategy.doctor.finding import Finding
from lightning_moe_strategy.kernels import flash_attention

NVL72 = "    Fabric\n        State                    : Completed\n        Status : Success\n        CliqueId : 4\n"
CLUSTER = "        ClusterUUID                       : 8a7bc-12\n"
TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-15
GPU1\tNV18\t X \tSYS\tSYS\tPIX\t0-15
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t16-31
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t16-31
NIC0\tPIX\tPIX\tSYS\tSYS\t X
"""


def status(findings: list[Finding] | Iterator[Finding], words: str = "") -> str:
    """Of the one finding that has these words."""
    (found,) = [each for each in findings if words in f"{each.subject} {each.found} {each.remedy}"]
    return found.status


def fake_torch(num_gpus: int, *, major: int = 9) -> Any:
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30, major=major, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: num_gpus > 0, device_count=lambda: num_gpus, get_device_properties=lambda index: gpu
    )
    return SimpleNamespace(cuda=cuda, __version__="2.13.0", version=SimpleNamespace(cuda="13.0"))


def tools(monkeypatch: pytest.MonkeyPatch, **outputs: str) -> None:
    """What nvidia-smi prints, by its first argument."""
    monkeypatch.setattr(machine, "output_of", lambda *words: outputs.get(words[1].strip("-"), ""))


def test_this_machine_trains_and_the_report_fits_a_screen(capsys, tmp_path):
    assert command.run_doctor(["--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("Training would work here.") and len(shown.splitlines()) <= 40
    for words in (f"torch {torch.__version__}", "lightning 2.", "no GPU", "all_to_all", "gloo listens on", "/dev/shm"):
        assert words in shown
    assert "Trainer(strategy='fsdp_cp_ep') works with no import" in shown


def test_the_exit_status_is_that_of_the_worst_finding(monkeypatch, capsys):
    for found, code in ((["fine", "advice"], 0), (["advice", "broken", "fine"], 1)):
        findings = [Finding(f"subject {each}", "found", each, f"do {each}" * (each != "fine")) for each in found]
        monkeypatch.setattr(command, "diagnose", lambda folder, findings=findings: findings)
        assert command.run_doctor(["--json"]) == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["works"] is (code == 0) and [each["status"] for each in answer["findings"]] == found
        assert command.run_doctor([]) == code
        shown = capsys.readouterr().out
        assert ("-> do broken" in shown and "1 broken" in shown) == (code == 1) and "-> do advice" in shown


# Packages


def test_a_package_that_is_missing_old_or_cannot_be_loaded_is_told_apart(monkeypatch):
    def versions(**planted: str | None) -> list[Finding]:
        def version(name: str) -> str:
            found = planted.get(name.replace("-", "_"), known.get(name) if name != "flash-attn" else None)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(doctor.metadata, "version", version)
        return list(doctor.versions())

    names = ("torch", "lightning", "pytorch-lightning", "transformers", "triton", "numpy", "torchmetrics", "rich",
             "jsonargparse", "tokenizers", "matplotlib", "plotly", "isal")  # fmt: skip
    known = {name: metadata.version(name) for name in names}
    assert {each.status for each in versions()} == {"fine"}
    assert status(versions(torch="2.9.1"), "outside >=2.11") == "broken"
    assert status(versions(transformers="4.57.0"), "outside") == "advice"
    assert status(versions(numpy=None), "not installed pip install 'numpy>=") == "broken"
    assert status(versions(flash_attn="2.1.0"), "2.1.0, outside") == "advice"
    assert {each.status for each in versions(lightning=None)} == {"fine"}  # the other flavour is there
    both = versions(lightning=None, pytorch_lightning=None)
    assert status(both, "pip install 'lightning") == "broken"


def test_a_package_that_is_half_there_is_a_finding_and_no_crash(monkeypatch, capsys):
    real = doctor.importlib.import_module

    def importing(name: str, *args: Any) -> Any:
        if name.startswith(("lightning.", "pytorch_lightning")) or name in ("lightning", "torchmetrics"):
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name, *args)

    monkeypatch.setattr(doctor.importlib, "import_module", importing)
    assert command.run_doctor([]) == 1
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "cannot be imported: OSError: libcudart.so.13" in shown and "Training would not work here" in shown

    def fails(torch: Any) -> Iterator[Finding]:
        yield Finding("attention", "half")
        raise AttributeError("no such kernel")

    found = doctor._probe("attention", fails, None)
    assert [each.status for each in found] == ["fine", "broken"] and "no such kernel (test_doctor.py:" in found[1].found


@pytest.mark.parametrize(
    ("entry_points", "switch", "words", "expected"),
    [
        (True, None, "works with no import", "fine"),
        (True, "0", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off", "advice"),
        (False, None, "no entry point", "advice"),
    ],
)
def test_the_registration_of_the_name_is_examined(monkeypatch, entry_points, switch, words, expected):
    point = SimpleNamespace(value="lightning_moe_strategy._autoload:install")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [point] * entry_points)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    if switch is not None:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", switch)
    found = list(doctor.registration())
    assert status(found, words) == expected and len(found) == 1


def test_a_name_that_is_not_registered_is_broken(monkeypatch):
    strategies = sys.modules["lightning.pytorch.strategies"]
    monkeypatch.setattr(strategies, "StrategyRegistry", {})
    assert status(doctor.registration(), "does not know 'fsdp_cp_ep'") == "broken"


def test_an_old_python_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_PYTHON", (9, 0))
    assert status(doctor.python(), "install Python 9.0") == "broken"


# GPUs and links


def test_gpus_are_listed_and_a_driver_that_torch_cannot_use_is_broken(monkeypatch):
    tools(monkeypatch)
    (found,) = machine.gpus(fake_torch(8))
    assert found.found == "8 x NVIDIA H200, 141 GiB, sm_90" and found.status == "fine"
    assert status(machine.gpus(fake_torch(1, major=7)), "BF16 needs") == "advice"
    assert status(machine.gpus(fake_torch(0)), "no GPU") == "fine"
    tools(monkeypatch, L="GPU 0: NVIDIA H200\n")
    assert status(machine.gpus(fake_torch(0)), "built for CUDA 13.0") == "broken"


def test_the_nvlink_domain_is_read_from_topology_and_fabric(monkeypatch):
    assert machine.linked_gpus(TOPOLOGY) == 2 and machine.linked_gpus("") == 0
    assert machine.linked_gpus(TOPOLOGY.replace("SYS", "NV12")) == 4
    assert machine.fabric_of(NVL72 + CLUSTER) == "8a7bc-12"
    assert machine.fabric_of(NVL72 + CLUSTER.replace("8a7bc-12", "0000-00")) == ""
    assert machine.fabric_of(NVL72.replace("Completed", "N/A") + CLUSTER) == ""
    tools(monkeypatch, topo=TOPOLOGY)
    assert status(machine.nvlink(fake_torch(4), {}), "give nvl=2") == "advice"
    tools(monkeypatch, topo=TOPOLOGY.replace("SYS", "NV12"))
    assert status(machine.nvlink(fake_torch(4), {}), "4 GPUs, on this host; nvl='auto' takes 4") == "fine"
    tools(monkeypatch, q=NVL72 + CLUSTER)
    assert status(machine.nvlink(fake_torch(4), {"LOCAL_WORLD_SIZE": "4"}), "72 on GB200 NVL72") == "advice"
    assert status(machine.nvlink(fake_torch(0), {}), "no GPU") == "fine"


def test_rdma_devices_and_locked_memory_are_examined(monkeypatch, tmp_path):
    assert status(machine.rdma(True, tmp_path), "map /dev/infiniband") == "advice"
    assert status(machine.rdma(False, tmp_path), "no device") == "fine"
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (machine.resource.RLIM_INFINITY,) * 2)
    (found,) = machine.rdma(True, tmp_path)
    assert found.found == "mlx5_0 (400 Gb/sec), mlx5_1 (no active port)"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (64 << 10, 64 << 10))
    assert status(machine.rdma(True, tmp_path), "64 KiB") == "broken"


# Attention and kernels


def test_attention_is_what_the_real_choice_gives_and_says_why_not_the_others(monkeypatch):
    (found,) = doctor.attention(torch)
    assert found.found.startswith("pieces, in BF16 with heads of 128 channels on cpu")
    error = (
        "attention_kernel('flash_attention_3') needs a CUDA GPU of compute capability 9.x. Leave the choice to 'auto'."
    )
    assert doctor._reason(error) == "flash_attention_3: needs a CUDA GPU of compute capability 9.x"
    assert "torch references" in next(iter(doctor.kernels(torch))).found
    assert isinstance(flash_attention.flash_kernel("flash_attention_4"), flash_attention.NotInstalled)


# Addresses, memory, settings


def addresses(**environment: str) -> list[Finding]:
    return list(machine.addresses(torch, environment))


def test_a_host_name_without_an_address_is_told_before_a_run_hangs(monkeypatch):
    def unknown(name: str, port: object = None) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(machine.socket, "gethostbyname", unknown)
    assert status(addresses(), "has no address: gloo listens on loopback") == "advice"
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda name: "192.0.2.7")
    assert status(addresses(), "192.0.2.7, which is no address of this machine") == "broken"
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert status(addresses(), "loopback: one host only") == "fine"
    monkeypatch.setattr(machine.socket, "getaddrinfo", unknown)
    assert status(addresses(MASTER_ADDR="nowhere"), "MASTER_ADDR=nowhere has no address") == "broken"


@pytest.mark.parametrize(
    ("variable", "value", "is_there"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("GLOO_SOCKET_IFNAME", "eth77", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "eth77,=lo", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
    ],
)
def test_an_interface_that_is_not_there_is_broken(monkeypatch, variable, value, is_there):
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: [(1, "lo")])
    broken = [each for each in addresses(**{variable: value}) if f"{variable}={value} is no interface" in each.found]
    assert bool(broken) is not is_there and all(each.status == "broken" for each in broken)


def test_little_shared_memory_or_disk_and_a_folder_that_cannot_be_written_are_told(monkeypatch, tmp_path):
    def free(**bytes_free: int) -> None:
        monkeypatch.setattr(
            machine.shutil,
            "disk_usage",
            lambda path: SimpleNamespace(free=bytes_free["shm" if path == Path("/dev/shm") else "disk"]),
        )

    free(shm=64 << 20, disk=100 << 30)
    assert status(machine.room(tmp_path / "later" / "deep"), "--shm-size") == "advice"
    free(shm=8 << 30, disk=1 << 30)
    assert status(machine.room(tmp_path), "12 N bytes") == "advice"
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert status(machine.room(tmp_path), "cannot be written") == "broken"
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert status(machine.room(tmp_path), "is not there") == "advice"


def test_a_variable_that_was_set_for_debugging_is_told():
    found = list(machine.settings({"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"}))
    assert [each.found for each in found] == ["CUDA_LAUNCH_BLOCKING=1"] and found[0].status == "advice"
