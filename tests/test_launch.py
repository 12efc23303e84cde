"""Runs as they are launched, and how they end: one rank that fails ends all, with its error and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = ROOT / "docs" / "launch"
BIN = Path(sys.executable).parent
FAILING = str(ROOT / "tests" / "scripts" / "failing.py")
TINY = ROOT / "configs" / "tiny_cpu.yaml"
SECONDS_TO_END = 10
LIMIT = 5
"""Seconds of every collective, of a run that hangs."""
LAUNCHERS_VARIABLES = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|TORCHELASTIC_|PET_|SLURM_|LOCAL_WORLD|GROUP_)")


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    """Both streams, as a terminal shows them."""
    seconds: float
    """From the failure to the end of the last process."""
    left: list[str]
    """Processes of the run that were there after the first had ended and some seconds had passed."""
    is_port_open: bool

    def count(self, words: str) -> int:
        return self.output.count(words)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not LAUNCHERS_VARIABLES.match(name)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"} | more


def ended(*command: str, folder: Path) -> Ended:
    """A run that is to fail, until the last of its processes is gone."""
    mark = uuid.uuid4().hex
    path = folder / "output"
    with path.open("w") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment(LAUNCH_TEST=mark), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = started.wait(timeout=200)
            until = time.monotonic() + SECONDS_TO_END
            while (left := marked(mark)) and time.monotonic() < until:
                time.sleep(0.1)
            end = time.time()
        finally:
            for process in marked(mark):
                os.kill(int(process.split()[0]), signal.SIGKILL)
    text = path.read_text()
    failed = [float(at) for at in re.findall(r"^FAILS ([\d.]+)$", text, re.MULTILINE)]
    (port,) = set(re.findall(r"^PORT (\d+)$", text, re.MULTILINE)) or {"0"}
    return Ended(code, text, end - min(failed, default=0.0), left, int(port) in listening_ports())


def marked(mark: str) -> list[str]:
    """Processes that were started with this mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"LAUNCH_TEST={mark}".encode() in (process / "environ").read_bytes():
                found.append(f"{process.name} {(process / 'cmdline').read_text()}")
        except OSError:
            continue
    return found


def listening_ports() -> set[int]:
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"}


def check_end(run: Ended, *, seconds: float = SECONDS_TO_END) -> None:
    assert run.code != 0 and "ENDED" not in run.output, run.output[-4000:]
    assert not run.left and not run.is_port_open, run.left
    assert run.seconds < seconds, run.output[-4000:]


def last_line(run: Ended) -> str:
    return run.output.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_error_of_the_rank_that_raises_is_shown_once_and_last(tmp_path):
    run = ended(sys.executable, FAILING, "raise", "2", "4", folder=tmp_path)
    check_end(run)
    assert run.code == 1
    assert run.count("ValueError: loss is nan") == 1 and last_line(run) == "[rank2]: ValueError: loss is nan"
    assert re.search(r"Rank 2 of 4 failed first, with ValueError at step 2, failing\.py:\d+ in fail\.", run.output)
    assert run.count("Traceback") == 1 and "by peer" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), [("setup", "ValueError: loss is nan"), ("worker", "sample is damaged")])
def test_an_error_before_or_beside_the_step_ends_all_ranks(tmp_path, how, error):
    run = ended(sys.executable, FAILING, how, "1", "2", folder=tmp_path)
    check_end(run)
    assert "Rank 1 of 2 failed first" in run.output and run.count("Rank 1 of 2") == 1
    assert error in run.output and run.count("Traceback (most recent call last):\n[rank0]") == 0


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path):
    run = ended(sys.executable, FAILING, "kill", "2", "4", folder=tmp_path)
    check_end(run)
    assert re.search(r"^Rank 2 of 4 is gone: process \d+ was ended by SIGKILL on host ", run.output, re.MULTILINE)
    waited = r"waited for it  ranks 0-1, 3: all-gather of parameters, axis fsdp_cp, among ranks 0-3, forward of layer "
    assert re.search(waited + r"decoder\.", run.output), run.output[-3000:]
    assert run.count("is gone") == 1 and "Traceback" not in run.output


@pytest.mark.slow
def test_the_rank_that_started_the_others_may_be_killed(tmp_path):
    run = ended(sys.executable, FAILING, "kill", "0", "2", folder=tmp_path)
    check_end(run)
    assert run.code == -signal.SIGKILL
    assert run.count("Rank 0 of 2 is gone") == 1


@pytest.mark.slow
def test_a_collective_that_a_stopped_rank_never_joins_is_named_with_layer_and_rank(tmp_path):
    run = ended(sys.executable, FAILING, "stop", "3", "4", str(LIMIT), folder=tmp_path)
    check_end(run, seconds=LIMIT + SECONDS_TO_END)
    assert run.count("A collective did not end within timeout=120 s") == 1 and "Traceback" not in run.output
    place = r"axis ep \(rows of the experts\), among ranks 2-3, forward of layer decoder\.blocks\.1\.sparse"
    assert re.search(f"s: all_to_all_single, {place}", run.output), run.output[-3000:]
    assert re.search(f"waiting  rank 2: all_to_all_single, {place}", run.output)
    assert re.search(r"waiting  ranks 0-1: all-gather of parameters, axis fsdp_cp, among ranks 0-3", run.output)
    assert re.search(r"missing  rank 3: process \d+ on host \S+ is stopped", run.output)


@pytest.mark.slow
def test_torchrun_shows_the_first_error_as_the_root_cause(tmp_path):
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    run = ended(*torchrun, FAILING, "raise", "1", "2", folder=tmp_path)
    check_end(run)
    root_cause = run.output.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 ", root_cause) and "ValueError: loss is nan" in root_cause
    assert "by peer" not in run.output


@pytest.mark.slow
def test_a_program_may_go_on_after_an_error_that_all_ranks_raise(tmp_path):
    run = ended(sys.executable, FAILING, "caught", "0", "2", folder=tmp_path)
    assert run.code == 0 and run.count("ENDED") == 2 and not run.left, run.output[-3000:]
    assert "failed first" not in run.output


# Launchers


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces that only reach each other: name, interface, address of each."""
    number = os.getpid()
    hosts = [(f"moe-{number}-{i}", f"moe{i}", f"10.78.0.{i + 1}") for i in range(2)]
    try:
        for name, _, _ in hosts:
            shell("ip", "netns", "add", name)
        (first, near, _), (second, far, _) = hosts
        shell("ip", "link", "add", near, "netns", first, "type", "veth", "peer", "name", far, "netns", second)
        for name, interface, address in hosts:
            shell("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            shell("ip", "-n", name, "link", "set", interface, "up")
            shell("ip", "-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name, _, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def shell(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def why_no_namespaces() -> str:
    """One sentence, empty where this user can make them."""
    trial = f"moe-trial-{os.getpid()}"
    try:
        shell("ip", "netns", "add", trial)
        shell("ip", "netns", "del", trial)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs root and iproute2 to make network namespaces: {error}"
    return ""


def few_steps(folder: Path, *, num_steps: int = 3) -> list[str]:
    """Options of ``fit`` for the configuration of the demo."""
    return [
        f"--trainer.max_steps={num_steps}", "--trainer.log_every_n_steps=1", f"--trainer.default_root_dir={folder}",
        f"--trainer.logger.init_args.save_dir={folder}", "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false", "--trainer.callbacks=[]", "--trainer.enable_model_summary=false",
    ]  # fmt: skip


def losses(folder: Path) -> list[str]:
    """As they were written, every digit."""
    (path,) = folder.glob("**/metrics.csv")
    names, *rows = [line.split(",") for line in path.read_text().splitlines()]
    column = next(i for i, name in enumerate(names) if name in ("train_loss", "train_loss_step"))
    return [row[column] for row in rows if row[column]]


def together(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> None:
    """Programs that run at the same time, all of which must end well."""
    started = []
    for number, (command, variables) in enumerate(zip(commands, environments, strict=True)):
        output = (folder / f"output-{number}").open("w")
        started.append(subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output))
    try:
        codes = [process.wait(timeout=250) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = [(folder / f"output-{number}").read_text()[-3000:] for number in range(len(started))]
    assert codes == [0] * len(codes), "\n".join(texts)


@pytest.fixture(scope="module")
def losses_of_one_host(tmp_path_factory: Any) -> list[str]:
    folder = tmp_path_factory.mktemp("one")
    command = ["bash", str(FILES / "torchrun.sh"), *few_steps(folder)]
    together([command], [environment(CONFIG=str(TINY), GPUS="4", PORT="0")], folder)
    return losses(folder)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces() or "-")
def test_two_hosts_train_as_one_does_bit_for_bit(losses_of_one_host, tmp_path):
    with two_hosts() as hosts:
        commands, environments = [], []
        for name, interface, address in hosts:
            script = ["bash", str(FILES / "torchrun.sh"), *few_steps(tmp_path)]
            commands.append(["ip", "netns", "exec", name, *script])
            environments.append(
                environment(
                    CONFIG=str(TINY),
                    GPUS="2",
                    NNODES="2",
                    MAIN=hosts[0][2],
                    GLOO_SOCKET_IFNAME=interface,
                    PET_LOCAL_ADDR=address,
                    PET_RDZV_CONF=f"is_host={address == hosts[0][2]}",
                )  # fmt: skip
            )
        together(commands, environments, tmp_path)
    assert losses(tmp_path) == losses_of_one_host and len(losses_of_one_host) == 3


SRUN = """#!/bin/bash
# What srun does for the ranks of this job: a task each, with its own SLURM_*.
shift  # --kill-on-bad-exit=1
tasks=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
pids=()
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) SLURM_NODEID=$((task / SLURM_NTASKS_PER_NODE)) \\
    SLURM_NTASKS=$tasks "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


@pytest.mark.slow
def test_the_sbatch_file_trains_under_slurm(losses_of_one_host, tmp_path):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    variables = environment(
        CONFIG=str(TINY), SLURM_NNODES="2", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_ID=str(10_000 + os.getpid() % 9_000),
        SLURM_JOB_NAME="moe", SLURM_NODELIST="localhost", MASTER_ADDR="127.0.0.1",
    )  # fmt: skip
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    together([["bash", str(FILES / "train.sbatch"), *few_steps(tmp_path)]], [variables], tmp_path)
    assert losses(tmp_path) == losses_of_one_host


def containers(path: Path) -> Iterator[dict[str, Any]]:
    """Of all pods that a file of Kubernetes describes."""
    for document in yaml.safe_load_all(path.read_text()):
        found = [document]
        while found:
            each = found.pop()
            if isinstance(each, dict):
                yield from each.get("containers", ())
                found += each.values()
            elif isinstance(each, list):
                found += each


@pytest.mark.slow
def test_the_pods_of_the_pytorchjob_train(losses_of_one_host, tmp_path):
    """Its own command line, with what the operator gives a pod, on two processes a pod."""
    (container,) = containers(FILES / "pytorchjob.yaml")
    command = [
        word.replace("=8", "=2").replace("/config/run.yaml", str(TINY)) for word in container["command"]
    ] + few_steps(tmp_path)
    variables = environment(PET_NNODES="2", PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="localhost:29433")
    together([command] * 2, [variables] * 2, tmp_path)
    assert losses(tmp_path) == losses_of_one_host


def test_the_files_of_kubernetes_agree_with_themselves():
    for name in ("pytorchjob.yaml", "job.yaml"):
        (container,) = containers(FILES / name)
        options = dict(word.lstrip("-").split("=") for word in container["command"] if "=" in word)
        assert (
            options["nproc-per-node"]
            == options["trainer.devices"]
            == str(container["resources"]["limits"]["nvidia.com/gpu"])
        )
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        assert {"/dev/shm", "/config"} <= mounted and options["config"].startswith("/config/")
    documents = {each["kind"]: each for each in yaml.safe_load_all((FILES / "job.yaml").read_text())}
    service, job = documents["Service"], documents["Job"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert options["rdzv-endpoint"].split(":")[0] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert options["nnodes"] == options["trainer.num_nodes"] == str(job["spec"]["completions"])
    (kubeflow,) = yaml.safe_load_all((FILES / "pytorchjob.yaml").read_text())
    (worker,) = kubeflow["spec"]["pytorchReplicaSpecs"].values()
    assert worker["replicas"] == 2 and worker["template"]["spec"]["containers"][0]["name"] == "pytorch"


@pytest.mark.parametrize("name", ["train.sbatch", "torchrun.sh"])
def test_the_scripts_are_bash(name):
    subprocess.run(["bash", "-n", str(FILES / name)], check=True)
