"""Chapter 00, how a cell on several ranks ends badly: the ranks still running are stopped, and RankError tells why."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from minizero.ranks.errors import wrapped
from minizero.ranks.kernel import Failure, Rank
from minizero.ranks.output import alike, ranks_named, spans

# What is sent to the ranks still running, and when (seconds after the reason to stop). Broken connections come first: a
# peer that waited for a failed rank then says where it waited. They do not come at once: ranks that fail alike end by
# themselves, and gloo can miss a connection that breaks while its message is on the way. Interrupts are for ranks that
# compute or sleep.
_STOP = [(0.25, "disconnect")]
_STOP += [(seconds, word) for seconds in (0.5, 2.0, 4.0, 8.0, 12.0) for word in ("interrupt", "disconnect")]
_PATIENCE = 15.0  # seconds after which a rank that has not stopped is given up


class RankError(RuntimeError):
    """A cell failed on at least one rank. `rank`, `name` and `message` tell the root cause."""

    def __init__(self, headline: str, cause: Failure, notes: Sequence[str] = ()) -> None:
        super().__init__("\n".join([headline, *notes]))
        self.rank, self.name, self.message = cause.rank, cause.name, cause.message
        self._traceback = cause.traceback

    def _render_traceback_(self) -> list[str]:  # what IPython shows
        name, *rest = wrapped(f"RankError: {self}")
        return [*self._traceback, name.replace("RankError", "\x1b[31mRankError\x1b[39m", 1), *rest]


class Stop:
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
        busy = spans(rank.rank for rank in ranks if rank.busy)
        notes = [f"{ranks_named(busy)} did not stop"] if busy else []
        if self.reason:
            headline = f"{self.reason}: {ranks_named(spans(rank.rank for rank in self.running))}"
            name = "KeyboardInterrupt" if self.reason == "interrupted" else "TimeoutError"
            cause = Failure(self.running[0].rank, name, self.reason, self._since)
        else:
            same = sorted((one for one in failures if one.like(failures[0])), key=lambda one: one.rank)
            who = "every rank" if len(same) == len(ranks) > 1 else ranks_named(spans(one.rank for one in same))
            cause, headline = same[0], f"{who}: {same[0].words}"
            failures = [one for one in failures if one not in same]
        notes += _others(sorted(failures, key=lambda failure: failure.rank))
        if any(rank.busy or not rank.alive for rank in ranks):
            notes.append("`%ranks restart` starts all ranks anew.")
        else:
            notes.append("Variables are kept; process groups have been closed.")
        return RankError(headline, cause, notes)


def _others(failures: list[Failure]) -> list[str]:
    """A line for each way in which ranks ended that are not the cause."""
    places = alike([(one.rank, one.place or "a place it did not tell") for one in failures if one.follows])
    stopped = [
        f"{ranks_named(ranks)} {'was' if ranks.isdigit() else 'were'} stopped at {place}" for ranks, place in places
    ]
    others = alike([(one.rank, one.words) for one in failures if not one.follows])
    return [f"also {ranks_named(ranks)}: {words}" for ranks, words in others] + stopped


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
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
