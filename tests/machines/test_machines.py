"""Several machines, played by one: two torchruns that meet over TCP, and slurm/train.sbatch under a Slurm of two nodes.

The Slurm is real (Debian's slurmctld and slurmd, as the user who runs the tests, without munge), its two nodes are two
slurmd on this machine, and their GPUs are empty files. Where Slurm is not installed those tests are skipped.
"""

from __future__ import annotations

import csv
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from plain import assert_within, with_limits
from repository import ROOT

pytestmark = pytest.mark.ch35
SBATCH = ROOT / "slurm" / "train.sbatch"
SIZES = "--layers 2 --width 16 --heads 2 --context 16 --batch 8 --lr 0.01 --warmup 2".split()
needs_slurm = pytest.mark.skipif(
    not all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch")), reason="no Slurm on this machine"
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "IMAGE"} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(
        "\n".join(f"{i * 37 % 90 + 10} has the digits {' and '.join(str(i * 37 % 90 + 10))}" for i in range(1500))
    )
    return path


@pytest.fixture(scope="module")
def alone(text: Path) -> Callable[[list[float]], None]:
    """Asserts that losses are those of six steps in one process."""
    (losses, _), (limits, _) = with_limits(text, 6, batch=8)
    return lambda found: assert_within(found, losses, limits, "losses")


def losses(out: Path) -> list[float]:
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


# ---- two torchruns -----------------------------------------------------------------------------------------------


def test_two_torchruns_are_two_nodes_of_one_run(
    text: Path, alone: Callable[[list[float]], None], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2"]
    command += ["--rdzv_id", "pair", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}"]
    command += [str(ROOT / "scripts" / "train.py"), "--stage", "3", "--steps", "6", *SIZES, "--text", str(text)]
    pair = [
        subprocess.Popen(
            [*command, "--out", str(tmp_path)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in pair]
    finally:
        for process in pair:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in pair] == [0, 0], "\n".join(said)
    assert "stage 3 on 4 cpu rank(s)" in "".join(said)
    alone(losses(tmp_path))


# ---- Slurm -------------------------------------------------------------------------------------------------------

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
GresTypes=gpu
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
TaskPlugin=task/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES
"""


class Cluster:
    """A Slurm of two nodes, n1 and n2, in one folder of this machine."""

    def __init__(self, folder: Path) -> None:
        for name in ("state", "n1", "n2"):
            (folder / name).mkdir()
        for number in range(2):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
        configuration = folder / "slurm.conf"
        settings = {"host": socket.gethostname(), "user": getpass.getuser(), "cpus": os.cpu_count()}
        configuration.write_text(CONFIGURATION.format(folder=folder, ports=free_ports(3), **settings))
        self.folder = folder
        self.environment = {**ENVIRONMENT, "SLURM_CONF": str(configuration)}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        for number, command in enumerate(
            (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"])
        ):
            with (self.folder / f"daemon{number}.log").open("wb") as log:
                self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        wait_for(lambda: self.call("sinfo", "-h", "-o", "%D %T") == "2 idle")
        return self

    def __exit__(self, *failure: object) -> None:
        self.call("scancel", "--user", getpass.getuser())
        wait_for(lambda: not self.call("squeue", "-h"))
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(20)

    def call(self, *command: str | Path) -> str:
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def submit(self, *options: str | Path, **environment: str) -> Job:
        """`slurm/train.sbatch` with options for sbatch, then the file, then options for train.py."""
        command = ["sbatch", "--parsable", "--output", self.folder / "%j.log", "--gpus-per-node", "2", *options]
        environment = {**self.environment, **environment}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip())


class Job:
    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    @property
    def log(self) -> str:
        file = self.cluster.folder / f"{self.number}.log"
        return file.read_text(errors="replace").replace("\r", "\n") if file.exists() else ""

    @property
    def state(self) -> str:
        found = re.search(r"JobState=(\w+)", self.cluster.call("scontrol", "show", "job", self.number))
        assert found
        return found[1]

    def end(self) -> str:
        wait_for(lambda: self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"))
        return self.state


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@needs_slurm
def test_a_slurm_job_of_two_nodes_trains_on_all_their_ranks(
    cluster: Cluster, text: Path, alone: Callable[[list[float]], None], tmp_path: Path
) -> None:
    job = cluster.submit(SBATCH, "--stage", "3", "--steps", "6", *SIZES, "--text", text, "--out", tmp_path)
    assert job.end() == "COMPLETED", job.log
    assert "2 nodes (n[1-2]), 2 ranks on each" in job.log
    assert "stage 3 on 4 cpu rank(s)" in job.log
    alone(losses(tmp_path))


JOIN = """
import os
import sys
import torch.distributed as dist
import minizero

minizero.init_distributed(timeout=60)
dist.barrier()
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n")
sys.stdout.flush()
os._exit(0)
"""


@needs_slurm
def test_F89_tasks_of_srun_are_one_group_and_the_batch_script_is_alone(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    python = f"{sys.executable} {tmp_path / 'join.py'}"
    variables = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT / "src")}  # n1 is no name that leads anywhere
    job = cluster.submit("--nodes", "2", "--ntasks-per-node", "2", "--wrap", f"{python} && srun {python}", **variables)
    assert job.end() == "COMPLETED", job.log
    told = re.findall(r"rank \d of \d", job.log)
    assert (told[0], sorted(told[1:])) == ("rank 0 of 1", [f"rank {rank} of 4" for rank in range(4)])


@needs_slurm
def test_a_job_whose_ranks_cannot_start_fails_on_all_nodes_and_stays_ended(cluster: Cluster, tmp_path: Path) -> None:
    saving = ["--save", tmp_path / "checkpoints", "--resume"]
    job = cluster.submit(SBATCH, "--batch", "3", *saving, "--out", tmp_path)  # four ranks cannot share three sequences
    assert job.end() == "FAILED"
    assert "--batch must be a multiple of the number of ranks, got 3 for 4 ranks" in job.log
    assert "back to the queue" not in job.log


@needs_slurm
def test_a_container_is_started_on_each_node_and_torchrun_in_it(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "apptainer").write_text('#!/bin/sh\necho "on $SLURMD_NODENAME: $*"\n')
    (tmp_path / "apptainer").chmod(0o755)
    job = cluster.submit(SBATCH, "--stage", "2", IMAGE="book.sif", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert job.end() == "COMPLETED"
    for node in ("n1", "n2"):
        assert re.search(
            rf"on {node}: exec --nv .* book.sif torchrun --nnodes 2 .* scripts/train.py --stage 2\n", job.log
        )


@needs_slurm
def test_a_job_whose_time_is_up_saves_is_queued_again_and_goes_on(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    saving = ["--save", tmp_path / "checkpoints", "--resume"]
    job = cluster.submit(SBATCH, "--steps", "100000", *SIZES, *saving, "--text", text, "--out", tmp_path)
    wait_for(lambda: (tmp_path / "loss.csv").exists() and len(losses(tmp_path)) > 3)
    cluster.call("scancel", "--signal=USR1", "--batch", job.number)  # what Slurm sends two minutes before the end
    wait_for(lambda: "resumed after step" in job.log)
    stopped, resumed = (re.search(rf"{what} after step (\d+)", job.log) for what in ("stopped", "resumed"))
    assert stopped
    assert resumed
    assert stopped[1] == resumed[1]
    first, second = job.log.index(f"job {job.number} is out of time: back to the queue"), job.log.index("start 1:")
    assert stopped.start() < first < second < resumed.start()
    cluster.call("scancel", job.number)
    assert job.end() == "CANCELLED"
