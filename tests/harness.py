"""Run a function on several gloo ranks and bring every result, or the first failure, back to the test.

Ranks come from a forkserver that has torch imported already, so a start costs tens of milliseconds. Each rank has one
thread, its own timeout in the process group, and dies with the test process.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_context = mp.get_context("forkserver")
# torch._dynamo: the first optimizer of a process imports it, which would cost every rank some seconds
_preloaded = ["torch", "torch.distributed", "torch._dynamo", "numpy", "minizero.zero.stages"]
_context.set_forkserver_preload(_preloaded)


def preload(*modules: str) -> None:
    """Have the forkserver import `modules` too; call it while a test module is imported, before any rank starts."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


class RankFailure(AssertionError):
    """At least one rank raised, died or did not answer in time; `ranks` lists the failures in order of time."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def _worker(
    rank: int, world: int, store: str | None, timeout: float, conn: Connection, fn: Callable[..., Any], args: Any
) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan when the forkserver goes
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if store is not None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
        reply: tuple[Any, ...] = ("ok", fn(*args))
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        reply = ("error", traceback.format_exc(), time.monotonic())  # one clock for all processes
    conn.send_bytes(pickle.dumps(reply))
    conn.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destroy_process_group() after a failure can abort or wait for its peers


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float | None = None,
    start_group: bool = True,
) -> list[Any]:
    """Run the module-level function `fn(*args)` on `world` ranks; return what each returned, in rank order.

    `timeout` seconds bound the whole run, `group_timeout` (default: the same) one collective; with `start_group` False
    the process group is left to `fn`. A failing rank raises RankFailure with its traceback first; its peers get two
    seconds to report theirs, then they are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, limit = os.path.join(folder, "store") if start_group else None, group_timeout or timeout
        pipes = [_context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            _context.Process(target=_worker, args=(r, world, store, limit, pipes[r][1], fn, args), daemon=True)
            for r in range(world)
        ]
        try:
            for process, (_, child_end) in zip(ranks, pipes, strict=True):
                process.start()
                child_end.close()
            return _collect([parent_end for parent_end, _ in pipes], timeout)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(connections: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    moments: dict[int, float] = {}  # when they failed: on a busy machine several replies are here before we look
    waiting, deadline = dict(enumerate(connections)), time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for conn in wait(list(waiting.values()), left):
            rank = next(r for r, c in waiting.items() if c is conn)
            del waiting[rank]
            try:
                status, value, *moment = pickle.loads(conn.recv_bytes())
            except EOFError:
                status, value, moment = "error", "the process died without a word", []
            if status == "ok":
                results[rank] = value
            else:
                failures[rank] = value
                moments[rank] = moment[0] if moment else time.monotonic()
                deadline = min(deadline, time.monotonic() + 2.0)
    for rank in waiting:
        failures.setdefault(rank, f"no answer in {timeout:g} s" if len(failures) == 0 else "still waiting: killed")
    if failures:
        failures = dict(sorted(failures.items(), key=lambda failure: moments.get(failure[0], math.inf)))
        text = "\n".join(f"--- rank {r} ---\n{t}" for r, t in failures.items())
        raise RankFailure(text, list(failures))
    return [results[r] for r in sorted(results)]
