"""Chapter 00, a group of ranks: start them, run a cell on all of them, stop all when one fails, leave none behind."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from IPython.core.error import UsageError
from IPython.display import display

from minizero.rank_kernel import Failure, LiveText, Rank

TIMEOUT = 90.0  # seconds for a cell: less than the 120 s that tools which execute notebooks allow
_START_TIMEOUT = 60.0
_QUIET_TIMEOUT = 10.0  # for our own requests, which no reader sees
_WORKER = "__import__('minizero.rank_worker').rank_worker"
# What is sent to the ranks still running, and when (seconds after the reason to stop). Broken connections come first: a
# peer that waited for a failed rank then says where it waited. Interrupts are for ranks that compute or sleep.
_STOP = [(0.0, "disconnect")]
_STOP += [(seconds, word) for seconds in (0.5, 2.0, 4.0, 8.0, 12.0) for word in ("interrupt", "disconnect")]
_PATIENCE = 15.0  # seconds after which a rank that has not stopped is given up


class RankError(RuntimeError):
    """A cell failed on at least one rank. `rank`, `name` and `message` tell the root cause."""

    def __init__(self, headline: str, cause: Failure, notes: Sequence[str] = ()) -> None:
        super().__init__("\n".join([headline, *notes]))
        self.rank, self.name, self.message = cause.rank, cause.name, cause.message
        self._traceback = cause.traceback

    def _render_traceback_(self) -> list[str]:  # what IPython shows
        return [*self._traceback, f"\x1b[31mRankError\x1b[39m: {self}"]


class Ranks:
    """A group of `world` ranks that run the same cells. They end with `stop`, or with this process, however it ends."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {world}")
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
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
        deadline = time.monotonic() + _START_TIMEOUT
        for rank in self._ranks:
            while not rank.answers():
                if not rank.alive or time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank.rank} did not start: {rank.last_words}")
        self._quietly("pass", self._ranks, _START_TIMEOUT)
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
        shutil.rmtree(self.folder, ignore_errors=True)

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
            stop = _Stop([], "")
        text.show(self._text(chosen), final=True)
        for rank in chosen:
            for bundle in rank.output.rich:
                display({"text/plain": f"rank {rank.rank}:"}, raw=True)
                display(bundle, raw=True)
        if stop is not None:
            error = stop.error(chosen)
            self._quietly(f"{_WORKER}.close_process_group()")
            raise error

    def pull(self, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Values of `expression` on `ranks` (default: all); see `minizero.ranks.pull`."""
        import torch  # only the notebooks that pull need it in this process

        compile(expression, "pull", "eval")
        chosen = self._choose(ranks)
        self._quietly(f"{_WORKER}.save(({expression}), {str(self.folder)!r})", chosen, TIMEOUT)
        for rank in chosen:
            if rank.busy or rank.failure:
                failure = rank.failure or Failure(rank.rank, "TimeoutError", f"no answer within {TIMEOUT:g} s", [], 0.0)
                raise RankError(f"cannot pull {expression!r} from {failure}", replace(failure, traceback=[]))
        files = [self.folder / f"{rank.rank}.pt" for rank in chosen]
        return [torch.load(file, map_location="cpu", weights_only=True) for file in files]

    def _choose(self, ranks: Sequence[int] | None) -> list[Rank]:
        for number in ranks or ():
            if not 0 <= number < self.world:
                raise UsageError(f"there is no rank {number}: the ranks are 0 to {self.world - 1}")
        chosen = [rank for rank in self._ranks if ranks is None or rank.rank in ranks]
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
        self._quietly(f"__import__('os').environ['MASTER_PORT'] = '{self._port.getsockname()[1]}'")

    def _quietly(self, code: str, ranks: list[Rank] | None = None, timeout: float = _QUIET_TIMEOUT) -> None:
        """Run `code` on `ranks` (default: all that are free), unseen. Failures are left in the ranks."""
        ranks = [rank for rank in self._ranks if rank.alive and not rank.busy] if ranks is None else ranks
        for rank in ranks:
            rank.start(code, silent=True)
        self._wait(ranks, timeout, None)

    def _wait(self, ranks: list[Rank], timeout: float, text: LiveText | None) -> _Stop | None:
        """Wait until all have answered or been stopped. Returns how they were stopped, if so.

        Without `text` nothing is shown, and a failure on one rank is no reason to stop the others.
        """
        poller, deadline, stop = zmq.Poller(), time.monotonic() + timeout, None
        for channel in (channel for rank in ranks for channel in rank.sockets):
            poller.register(channel, zmq.POLLIN)
        with _noted_interrupts() as interrupts:
            while running := [rank for rank in ranks if rank.busy]:
                poller.poll(100)
                for rank in ranks:
                    rank.receive()
                if text is not None:
                    text.show(self._text(ranks))
                if stop is None:
                    late = f"no answer within {timeout:g} s" if time.monotonic() > deadline else ""
                    failed = text is not None and any(rank.failure and rank.failure.urgent for rank in ranks)
                    if failed or interrupts or late:
                        stop = _Stop(running, "" if failed else "interrupted" if interrupts else late)
                elif len(interrupts) > 1 or not stop.go_on():
                    break
        return stop

    def _text(self, ranks: list[Rank]) -> str:
        width = len(str(self.world - 1))
        return "\n".join(f"[{rank.rank:{width}}] {line}".rstrip() for rank in ranks for line in rank.output.lines)


class _Stop:
    """Stops the ranks that are still running, by and by. `reason` is empty if the reason is that a rank failed."""

    def __init__(self, running: list[Rank], reason: str) -> None:
        self.running, self.reason = running, reason
        self._since, self._steps = time.monotonic(), _STOP.copy()
        self.go_on()

    def go_on(self) -> bool:
        """Do what is due by now. False once there is nothing left to try."""
        elapsed = time.monotonic() - self._since
        while self._steps and elapsed >= self._steps[0][0]:
            word = self._steps.pop(0)[1]
            for rank in self.running:
                if rank.busy:
                    rank.command(word)
        return elapsed < _PATIENCE

    def error(self, ranks: list[Rank]) -> RankError:
        """What to raise: the root cause, then what became of the other ranks and what can be done."""
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        failures.sort(key=lambda failure: (failure.name != "Died", failure.follows, failure.when))
        notes = [f"rank {rank.rank} did not stop" for rank in ranks if rank.busy]
        if self.reason:
            names = ", ".join(str(rank.rank) for rank in self.running)
            headline = f"{self.reason}: rank {names}"
            name = "KeyboardInterrupt" if self.reason == "interrupted" else "TimeoutError"
            cause = Failure(self.running[0].rank, name, self.reason, [], self._since)
        else:
            cause, *others = failures
            headline = str(cause)
            if len(failures) == len(ranks) > 1 and all(failure.like(cause) for failure in others):
                cause = min(failures, key=lambda failure: failure.rank)
                headline, others = f"every rank: {cause.name}: {cause.message}", []
            failures = others
        for failure in sorted(failures, key=lambda failure: failure.rank):
            place = f"rank {failure.rank} was stopped at {failure.place}"
            notes.append(place if failure.follows else f"also {failure}")
        if any(rank.busy or not rank.alive for rank in ranks):
            notes.append("`%ranks restart` starts all ranks anew.")
        else:
            notes.append("Variables are kept; process groups have been closed.")
        return RankError(headline, cause, notes)


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Note interrupts in a list instead of raising: an exception between two messages would lose one."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield interrupts
        return
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
