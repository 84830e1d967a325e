"""Start the ranks of one measurement: what torchrun does, in one small file, with two things torchrun does not do.

A failed run shows the traceback of the rank that failed *first*, and the ranks can live in a network of their own, in
which the loopback interface counts their bytes and nothing else. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


class RankFailure(Exception):
    """At least one rank failed; `ranks` lists the failed ones in order of time, the message shows their output so."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def launch(script: Path, arguments: list[str], world: int, timeout: float) -> None:
    """Run `python -P script *arguments` as `world` ranks with torchrun's environment variables, and wait for them all.

    They import what lies in scripts/, and not from the folder of the script.

    Rank 0 keeps this terminal's stdout; what the ranks write to stderr is shown only if one fails. When one does, its
    peers get a second to fail too, then they are killed. Raises RankFailure for that, and after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(world)]
        port = _free_port()
        ranks = [_start([sys.executable, "-P", str(script), *arguments], r, world, port, logs[r]) for r in range(world)]
        try:
            failed, why = _wait(ranks, timeout)
            # a rank writes its traceback just before it dies, and its peers notice only then
            failed.sort(key=lambda rank: logs[rank].stat().st_mtime_ns)
            if failed:
                text = "\n".join(f"--- rank {r}: {why[r]} ---\n{logs[r].read_text().strip()}" for r in failed)
                raise RankFailure(text, failed)
        finally:
            for process in ranks:
                _kill(process)


_SCRIPTS = str(Path(__file__).resolve().parents[1])  # where `compare` is, which ranks import too


def _start(command: list[str], rank: int, world: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, [_SCRIPTS, os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
        "DEEPSPEED_LOG_LEVEL": "error",
    }
    with log.open("wb") as errors:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=None if rank == 0 else errors,
            stderr=errors,
            start_new_session=True,  # a rank and the compilers it may start can be killed together
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> tuple[list[int], list[str]]:
    """Wait until all have ended, or one has failed and its peers had a second; say who failed, and each rank's fate."""
    deadline, failing = time.monotonic() + timeout, False
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if not failing and any(codes):
            failing, deadline = True, min(deadline, time.monotonic() + 1.0)
        time.sleep(0.02)
    late = "killed, it was still waiting" if any(codes) else f"no end after {timeout:g} s"
    why = [late if code is None else f"exit code {code}" for code in codes]
    ended = [rank for rank, code in enumerate(codes) if code]
    return ended or [rank for rank, code in enumerate(codes) if code is None], why


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


DEEPSPEED_SECONDS = 1800.0


def prepare_deepspeed() -> None:
    """Run deepspeed_op.py, quick when it was run before. Raises RankFailure when DeepSpeed cannot be used here.

    Ranks that meet an operator not compiled yet wait for each other, or for a compiler that was killed long ago.
    """
    try:
        launch(Path(__file__).with_name("deepspeed_op.py"), [], 1, DEEPSPEED_SECONDS + 5)
    except RankFailure as failure:
        hint = "\nIf a compilation was interrupted before, delete ~/.cache/torch_extensions and try again."
        is_late = "Timeout (" in str(failure)  # what faulthandler writes
        raise RankFailure(f"DeepSpeed cannot be used:\n{failure}{hint if is_late else ''}", failure.ranks) from None


# ---- a network with nothing in it but our ranks ------------------------------------------------------------------

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x1 | 0x40


def enter_empty_network() -> str | None:
    """Move this process, and all it starts from now on, into a fresh network with a loopback interface of its own.

    Returns None, or the reason why that cannot be done here. Root may always do it; other users where the kernel lets
    them make a user namespace, which needs a process with one thread.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWNET) != 0:
        if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return f"no network namespace: {os.strerror(ctypes.get_errno())}"
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as control:  # `ip link set lo up`, without needing ip
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP_RUNNING, b""))
    return None


def loopback_bytes() -> int:
    """Bytes that went through this process's loopback interface so far, TCP/IP headers included, each counted once."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])  # the eight before are about receiving
    raise RuntimeError("this network has no loopback interface")
