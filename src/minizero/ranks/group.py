"""Chapter 00, a group of ranks: start them, run a cell on all of them, stop all when one fails, leave none behind."""

from __future__ import annotations

import atexit
import keyword
import operator
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from IPython.core.error import UsageError
from IPython.display import display

from minizero.ranks.kernel import Failure, LiveText, Rank
from minizero.ranks.output import alike, ranks_named, together
from minizero.ranks.stop import RankError, Stop, noted_interrupts
from minizero.ranks.worker import load, save

TIMEOUT = 90.0  # seconds for a cell: less than the 120 s that tools which execute notebooks allow
_START_TIMEOUT = 60.0  # seconds for all ranks together, and
_START_EACH = 10.0  # for each: they may share one core
_QUIET_TIMEOUT = 30.0  # for our own requests, which no reader sees
_ROOM = 75  # bytes of the path of the folder's parent
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # where the folder goes if TMPDIR is longer
_UNKNOWN = ["A rank knows what `%%ranks` cells made on it; `%%ranks --local` runs a cell there and in the notebook."]
_WORKER = "__import__('minizero.ranks.worker').ranks.worker"


class Ranks:
    """A group of `world` ranks that run the same cells. They end with `stop`, or with this process, however it ends."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {world}")
        self.world = world
        self.folder, self._janitor = _make_folder()
        self._context: zmq.Context[Any] = zmq.Context()
        self._port = socket.socket()
        self._ranks: list[Rank] = []
        atexit.register(self.stop)
        try:
            for rank in range(world):
                self._ranks.append(Rank(rank, world, str(self.folder), self._context))
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT + _START_EACH * self.world
        for rank in self._ranks:
            while not rank.answers():
                if not rank.alive or time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank.rank} did not start: {rank.last_words}")
        self._quietly(dict.fromkeys(self._ranks, "pass"), _START_TIMEOUT)
        for rank in self._ranks:
            if rank.busy or rank.failure:
                raise RuntimeError(f"rank {rank.rank} did not start: {rank.failure or rank.last_words}")

    @property
    def healthy(self) -> bool:
        """Whether every rank is alive and has answered its last request."""
        for rank in self._ranks:
            rank.receive()
        return bool(self._ranks) and all(rank.alive and not rank.busy for rank in self._ranks)

    def stop(self) -> None:
        """End all ranks and what they started. A second call does nothing."""
        atexit.unregister(self.stop)
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._port.close()
        self._context.destroy(linger=0)
        self._janitor.communicate(b"\n")

    def run(self, code: str, ranks: Sequence[int] | None = None, timeout: float = TIMEOUT) -> None:
        """Run `code` on `ranks` (default: all), showing their output as it comes, in rank order.

        When one fails, when the notebook is interrupted, and after `timeout` seconds, the ranks still running are
        stopped, also inside a collective. Process groups are then closed on all ranks, variables stay, and RankError is
        raised.
        """
        chosen = self._choose(ranks)
        self._give_new_port()
        for rank in chosen:
            rank.start(code)
        text = LiveText()
        stop = self._wait(chosen, timeout, text)
        if stop is None and any(rank.failure for rank in chosen):
            stop = Stop([], "")
        text.show(together([(rank.rank, rank.output.lines) for rank in chosen]), final=True)
        for ranks_alike, bundles in alike([(rank.rank, rank.output.rich) for rank in chosen if rank.output.rich]):
            for bundle in bundles:
                display({"text/plain": f"{ranks_named(ranks_alike)}:"}, raw=True)
                display(bundle, raw=True)
        if stop is not None:
            error = stop.error(chosen)
            self._quietly(self._all_free(f"{_WORKER}.close_process_group()"))
            raise error

    def pull(self, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Values of `expression` on `ranks` (default: all); see `minizero.ranks.pull`."""
        compile(expression, "pull", "eval")
        chosen = self._choose(ranks)
        files = {rank: str(self.folder / f"{rank.rank}.pt") for rank in chosen}
        self._carry({rank: f"{_WORKER}.save(({expression}), {file!r})" for rank, file in files.items()}, expression)
        return [load(file) for file in files.values()]

    def push(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> None:
        """Make `name` a copy of `value` on `ranks` (default: all); see `minizero.ranks.push`."""
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"push gives a value a name: push('rate', 0.1); {name!r} is no name")
        chosen = self._choose(ranks)
        file = str(self.folder / "pushed.pt")
        save(value, file)
        self._carry(dict.fromkeys(chosen, f"{name} = {_WORKER}.load({file!r})"), name, "push", "to")

    def _carry(self, codes: dict[Rank, str], what: str, verb: str = "pull", way: str = "from") -> None:
        """Run on each rank its code, unseen; RankError tells of the first that fails."""
        self._quietly(codes, TIMEOUT)
        for rank in codes:
            if rank.busy or rank.failure:
                failure = rank.failure or Failure(rank.rank, "TimeoutError", f"no answer within {TIMEOUT:g} s", 0.0)
                hint = _UNKNOWN if failure.name == "NameError" else []
                raise RankError(f"cannot {verb} {what!r} {way} {failure}", replace(failure, traceback=[]), hint)

    def _choose(self, ranks: Sequence[int] | None) -> list[Rank]:
        try:
            numbers = None if ranks is None else [operator.index(number) for number in ranks]
        except TypeError:
            raise UsageError(f"ranks are a list of their numbers, as in [0, 2], not {ranks!r}") from None
        for number in numbers or ():
            if not 0 <= number < self.world:
                raise UsageError(f"there is no rank {number}: the ranks are 0 to {self.world - 1}")
        chosen = [rank for rank in self._ranks if numbers is None or rank.rank in numbers]
        for rank in chosen:
            rank.receive()
            if not rank.alive or rank.busy:
                state = "is still busy with an earlier cell" if rank.alive else "has ended"
                raise UsageError(f"rank {rank.rank} {state}; `%ranks restart` starts all ranks anew")
        return chosen

    def _give_new_port(self) -> None:
        """Tell all ranks a MASTER_PORT for a process group that the cell may make: the last one may still be in use.

        We keep it bound, so that nobody else on this machine is given it; with SO_REUSEADDR, rank 0 can bind it too.
        """
        self._port.close()
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        self._quietly(self._all_free(f"__import__('os').environ['MASTER_PORT'] = '{port}'"))

    def _quietly(self, codes: dict[Rank, str], timeout: float = _QUIET_TIMEOUT) -> None:
        """Run on each rank its code, unseen. Failures are left in the ranks."""
        for rank, code in codes.items():
            rank.start(code, silent=True)
        self._wait(list(codes), timeout, None)

    def _all_free(self, code: str) -> dict[Rank, str]:
        """The same code for all ranks that can run it now."""
        return {rank: code for rank in self._ranks if rank.alive and not rank.busy}

    def _wait(self, ranks: list[Rank], timeout: float, text: LiveText | None) -> Stop | None:
        """Wait until all have answered or been stopped. Returns how they were stopped, if so.

        Without `text` nothing is shown, and a failure on one rank is no reason to stop the others.
        """
        poller, deadline, stop = zmq.Poller(), time.monotonic() + timeout, None
        for channel in (channel for rank in ranks for channel in rank.sockets):
            poller.register(channel, zmq.POLLIN)
        with noted_interrupts() as interrupts:
            while running := [rank for rank in ranks if rank.busy]:
                poller.poll(100)
                for rank in ranks:
                    rank.receive()
                if text is not None:
                    text.show(together([(rank.rank, rank.output.lines) for rank in ranks], live=True))
                if stop is None:
                    late = f"no answer within {timeout:g} s" if time.monotonic() > deadline else ""
                    failed = text is not None and any(rank.failure and rank.failure.urgent for rank in ranks)
                    if failed or interrupts or late:
                        stop = Stop(running, "" if failed else "interrupted" if interrupts else late)
                elif len(interrupts) > 1 or not stop.go_on():
                    break
        return stop


def _make_folder() -> tuple[Path, subprocess.Popen[bytes]]:
    """A new folder, and a process that removes it: when it reads a line, or when this process ends, however that comes.

    The path of a socket in it has room for some hundred bytes; a long TMPDIR does not fit.
    """
    parents = [parent for parent in (tempfile.gettempdir(), *_SHORT) if len(os.fsencode(parent)) <= _ROOM]
    usable = [parent for parent in parents if os.access(parent, os.W_OK | os.X_OK)]
    if not usable:
        raise RuntimeError(f"ranks need a writable folder with a path of at most {_ROOM} bytes: set TMPDIR to one")
    folder = tempfile.mkdtemp(prefix="ranks-", dir=usable[0])
    remove = 'read line; rm -rf "$0" || { sleep 1; rm -rf "$0"; }'  # again if a dying rank has written meanwhile
    janitor = subprocess.Popen(
        ["sh", "-c", remove, folder], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    return Path(folder), janitor
