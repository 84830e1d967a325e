"""Chapter 04, communication: what a launcher tells a process, and how the process joins the others.

torchrun, deepspeed and `%%ranks` say RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. mpirun and srun have words of
their own. They are read here as well: N processes that nobody put into one group are N trainings, each of which
believes that it is alone.
"""

from __future__ import annotations

import os
import re
import socket
import warnings
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

TORCHRUN = "start it with `torchrun --nproc_per_node N script.py`, which sets all of them"
# launcher: its variables of rank, world, local rank and local world; the first name that is there counts
LAUNCHERS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "mpirun (Open MPI)": (
        ["OMPI_COMM_WORLD_RANK"],
        ["OMPI_COMM_WORLD_SIZE"],
        ["OMPI_COMM_WORLD_LOCAL_RANK"],
        ["OMPI_COMM_WORLD_LOCAL_SIZE"],
    ),
    "mpirun (PMI)": (
        ["PMI_RANK"],
        ["PMI_SIZE"],
        ["PMI_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"],
        ["PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"],
    ),
    "srun": (["SLURM_PROCID"], ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"], ["SLURM_LOCALID"], []),
}
# What tells a job from others on the machine, so that they do not meet at one port; all its ranks have it alike. mpirun
# inside of a Slurm job is a step of its own on some of the nodes.
JOB_IDS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID")
STEP_IDS = ("SLURM_JOB_ID", "SLURM_STEP_ID")


class LaunchError(ValueError):
    """The environment describes no group that this process could join."""


class Place(NamedTuple):
    """A process among all that were started together; `local` counts those of its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = ""  # who said so; nobody did if empty


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """What the launcher says, or a place alone if there is none.

    RANK and WORLD_SIZE come first: who wants single processes under `srun` sets RANK=0 WORLD_SIZE=1. Raises LaunchError
    naming the variable, if one is missing, no number, or out of range.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = (["RANK"], ["WORLD_SIZE"], ["LOCAL_RANK"], ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
        return _read(environment, "the environment", *names)
    for launcher, names in LAUNCHERS.items():
        if launcher == "srun" and not _is_task(environment):
            continue
        if names[0][0] in environment or names[1][0] in environment:
            place = _read(environment, launcher, *names)
            return place if place.world > 1 else Place()
    if "PMIX_RANK" in environment and "PMIX_NAMESPACE" in environment and "SLURM_JOB_ID" not in environment:
        raise LaunchError(f"a PMIx launcher started this process, and does not say how many there are: {TORCHRUN}")
    return Place()


def _read(
    environment: Mapping[str, str],
    launcher: str,
    ranks: list[str],
    worlds: list[str],
    local_ranks: list[str],
    local_worlds: list[str],
) -> Place:
    def number(names: list[str], default: int | None, lowest: int, limit: int | None) -> int:
        name = next((name for name in names if name in environment), None)
        if name is None and default is not None:
            return default
        if name is None:
            there = ranks[0] if ranks[0] in environment else worlds[0]
            raise LaunchError(f"{launcher} sets {there} but not {names[0]}: {TORCHRUN}")
        text = environment[name]
        if not re.fullmatch(r"[0-9]+", text) or int(text) < lowest or (limit is not None and int(text) >= limit):
            end = "" if limit is None else f" and below {limit}"
            raise LaunchError(f"{name} must be a whole number from {lowest}{end}, got {text!r}: {TORCHRUN}")
        return int(text)

    world = number(worlds, None, 1, None)
    rank = number(ranks, None, 0, world)
    # who does not say how many ranks a machine has is taken to have one machine
    here = _tasks_here(environment, world) if launcher == "srun" else world
    local_world = number(local_worlds, min(here, world), 1, world + 1)
    return Place(rank, world, number(local_ranks, rank % local_world, 0, local_world), local_world, launcher)


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether `srun` started this. A batch script or a shell of a job has SLURM_PROCID=0 as well, and is no step."""
    if "SLURM_STEP_NUM_TASKS" in environment or "SLURM_STEP_ID" in environment:
        return True
    number = environment.get("SLURM_PROCID")
    return number is not None and (number != "0" or "SLURM_JOB_ID" not in environment)


def _tasks_here(environment: Mapping[str, str], world: int) -> int:
    """How many tasks of this step the node has: SLURM_STEP_TASKS_PER_NODE is "4(x2),3", a number for each node."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else world


def meeting_point(place: Place, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """(host, port) where the ranks find each other, the same for all; rank 0 listens there.

    MASTER_ADDR and MASTER_PORT if they are set. Else the first node of the Slurm step, or this machine if it has all
    ranks; and a port below those that the system gives away, derived from the number of the job. Raises LaunchError.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if place.launcher == "the environment" and not (host and port):
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise LaunchError(f"RANK and WORLD_SIZE are set but not {missing}: {TORCHRUN}")
    if not host:
        nodes = first_node(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
        if place.local_world == place.world:
            host = "127.0.0.1"
        elif nodes and place.launcher == "srun":
            host = nodes
        else:
            raise LaunchError(
                f"{place.launcher} started ranks on several machines, and does not say where they meet: set "
                "MASTER_ADDR to the host of rank 0 (Open MPI: `mpirun -x MASTER_ADDR=host`), or start torchrun on each"
            )
    if not port:
        names = STEP_IDS if place.launcher == "srun" else JOB_IDS
        job = "/".join([place.launcher, str(os.getuid()), *(environment.get(name, "") for name in names)])
        port = str(10000 + zlib.crc32(job.encode()) % 20000)
    if not re.fullmatch(r"[0-9]+", port) or not 0 < int(port) < 65536:
        raise LaunchError(f"MASTER_PORT must be a whole number from 1 to 65535, got {port!r}")
    return host, int(port)


def first_node(nodes: str) -> str:
    """The first name of a list of Slurm's: "gpu003" of "gpu[003-005,9],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


# ---- joining


def init_distributed(timeout: float = 60.0) -> torch.device:
    """Join the process group that a launcher described in the environment; returns the device to compute on.

    Launchers are torchrun, deepspeed, `%%ranks`, srun and mpirun; without one the group has one rank. The backend is
    NCCL if every rank has a GPU of its own: that of its local rank among those it sees, so the only one if it sees one.
    Else it is gloo on the CPU, with a warning where a GPU stays unused. A collective that waits longer than `timeout`
    seconds raises. A process group that exists already is kept. Raises LaunchError if the environment makes no sense.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    if dist.is_initialized():
        place = find_place() if dist.get_backend() != "gloo" and torch.cuda.is_available() else None
        device = torch.device("cpu") if place is None else torch.device("cuda", own_gpu(place)[0])
    else:
        place, limit = find_place(), timedelta(seconds=timeout)
        store = _meet(place, limit)
        device, why = choose_device(store, place)
        if why and place.rank == 0:
            warnings.warn(why, stacklevel=2)
        backend, store = "nccl" if device.type == "cuda" else "gloo", PrefixStore("ranks", store)
        dist.init_process_group(backend, timeout=limit, store=store, rank=place.rank, world_size=place.world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _meet(place: Place, limit: timedelta) -> Store:
    """The store through which the ranks find each other."""
    if place.world == 1 and "MASTER_ADDR" not in os.environ:
        return HashStore()
    host, port = meeting_point(place)
    if place.launcher == "the environment":
        store: Store = next(rendezvous("env://", place.rank, place.world, timeout=limit))[0]
        store.set_timeout(limit)
        return store
    try:
        return TCPStore(host, port, place.world, is_master=place.rank == 0, timeout=limit)
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"rank {place.rank} of {place.world}, as {place.launcher} numbers them, could not meet the others at "
            f"{host}:{port}: {error}. MASTER_ADDR and MASTER_PORT, if set, say another place"
        ) from error


def own_gpu(place: Place) -> tuple[int, str]:
    """(number among the GPUs that this process sees, what tells it from all others); without a GPU (0, "")."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return 0, ""
    index = place.local_rank % count
    return index, f"{socket.gethostname()}/{torch.cuda.get_device_properties(index).uuid}"


def choose_device(store: Store, place: Place) -> tuple[torch.device, str]:
    """A GPU for each rank, or the CPU for all: (device, warning if a GPU stays unused). All ranks choose alike."""
    index, name = own_gpu(place)
    store.add("GPUs", int(bool(name)))
    if not name:
        store.set("without", f"rank {place.rank} sees no GPU")
    elif store.add(name, 1) > 1:
        store.set("without", f"rank {place.rank} (local rank {place.local_rank}) sees no GPU that no other rank uses")
    if store.add("chosen", 1) == place.world:
        store.set("all have chosen", "")
    store.wait(["all have chosen"])
    if not store.check(["without"]):
        return torch.device("cuda", index), ""
    if store.add("GPUs", 0) == 0:
        return torch.device("cpu"), ""
    return torch.device("cpu"), (
        f"all ranks compute on the CPU: {store.get('without').decode()}, and NCCL wants one for each. Start as many "
        "ranks as there are GPUs, or show each rank one of its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task)"
    )
