"""Chapter 00, the inner side of `%%ranks`: what runs in the kernel of each rank beside the reader's cells.

`kernel` starts each kernel with `main` and a pipe as standard input. A thread obeys the commands that arrive
there, also while the main thread is stuck in a collective; the end of the pipe is the end of the notebook.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Be a Jupyter kernel whose life is tied to the notebook's; the only argument is its connection file."""
    if sys.platform == "linux":  # the only way to die with a parent while C code holds the interpreter
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    commands = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a program that a cell starts must not read our commands
    threading.Thread(target=_obey, args=(commands,), daemon=True).start()
    from minizero.ranks.shell import make_app  # seconds: not before the above

    make_app(sys.argv[1]).start()


def _obey(commands: int) -> None:
    stores: list[Any] = []  # they live as long as this rank
    with open(commands) as lines:
        for line in lines:
            if line == "disconnect\n":
                disconnect()
                stores += _stand_in_for_rank_0()
            elif line == "interrupt\n":
                _interrupt()
    os.killpg(0, signal.SIGKILL)  # end of file: the notebook is gone, so this rank and what it started go too


def _interrupt() -> None:
    """Raise KeyboardInterrupt in the cell; if it is importing, then after that: torch cannot be imported half."""
    while any(code.co_filename.startswith("<frozen importlib") for code in _code_on_stack()):
        time.sleep(0.05)
    stack = {code.co_name for code in _code_on_stack()}
    # between cells, and where a cell's error is told, an interrupt would lose the kernel's reply; __str__ may hang
    if "run_code" in stack and ("tell_error" not in stack or "message_of" in stack):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _code_on_stack() -> Iterator[CodeType]:
    """What the cell is executing, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def disconnect() -> None:
    """Make a collective that this process is waiting in fail now. Call it from another thread.

    NCCL can be told to abort. gloo cannot: what ends its wait is that the connection breaks, so we shut down the TCP
    connections of this machine's ranks. Listening sockets stay (closing one under gloo aborts the process), and so
    does Jupyter, whose sockets are not TCP here.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and "nccl" in dist.get_backend():
        dist.distributed_c10d._abort_process_group()
        return
    for name in os.listdir("/dev/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # closed since it was listed
            continue
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # not a socket
            os.close(descriptor)
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _peer_is_local(connection):
                connection.shutdown(socket.SHUT_RDWR)


def _stand_in_for_rank_0() -> list[Any]:
    """A store, if this rank is joining a process group and nobody has opened one on MASTER_PORT.

    It would try to connect until its timeout, which nothing can interrupt. Once connected, it can be disconnected.
    """
    if not any(code.co_name == "_create_c10d_store" for code in _code_on_stack()):
        return []
    dist = sys.modules["torch.distributed"]
    try:
        return [dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)]
    except RuntimeError:  # the address is in use: there is one
        return []


def _peer_is_local(connection: socket.socket) -> bool:
    try:
        address = ipaddress.ip_address(connection.getpeername()[0])
    except OSError:  # listening, or closed meanwhile
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def close_process_group() -> None:
    """Destroy the process group, if there is one, so that the next cell can make a new one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups are named by a count of attempts, which differs once a rank has failed before or in init_process_group;
    # ranks that disagree about the name would wait for each other.
    dist.distributed_c10d._world.group_count = 0


def save(value: Any, path: str) -> None:
    """Write `value` for the other side of `pull` or `push`; tensors as copies: a view would bring its whole storage."""
    import torch
    from torch.utils._pytree import tree_map

    torch.save(tree_map(_plain, value), path)
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        what = "only tensors, numbers, strings, and lists, tuples and dicts of them can be pulled or pushed"
        raise TypeError(f"{what}, not this {type(value).__name__}") from error


def load(path: str) -> Any:
    """Read what `save` wrote; tensors arrive on the CPU."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _plain(leaf: Any) -> Any:
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().clone()
    return leaf.item() if numpy is not None and isinstance(leaf, numpy.generic) else leaf
