"""Chapter 23, overlap: what a rank did and when, seen at the verbs of its units.

`Trace` puts itself around the verbs of a Zero when its `with` block begins and takes itself away at the end, so nothing
is left in the code when it is off. Times are those of the thread that calls: on CUDA, when work was queued and when the
host waited for it. `timeline` brings the records of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Span:
    """What one rank did for one unit, or had under way, from `start` to `end`, in seconds."""

    kind: str
    unit: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class Record:
    """What one rank saw.

    `work` are the spans of its thread, of which no two overlap: it is computing ("forward", "backward"), starting a
    collective ("launch"), blocked by one or by the roll call before it ("wait", "land") or freeing ("reshard"). A
    "late" is a wait for a gather that was started at that moment and not ahead. `flights` are "gather" and "reduce"
    from their start until this rank has waited for them. It does not learn when they arrived in between. `live` are
    the bytes of gathered parameters of each unit (time, unit, bytes), whenever they changed.
    """

    work: list[Span] = field(default_factory=list)
    flights: list[Span] = field(default_factory=list)
    live: list[tuple[float, str, int]] = field(default_factory=list)

    def spent(self, *kinds: str) -> float:
        """Seconds of the thread in work of these kinds."""
        return sum(span.seconds for span in self.work if span.kind in kinds)

    def totals(self) -> list[tuple[float, int]]:
        """(time, bytes of gathered parameters of all units together), whenever they changed."""
        now: dict[str, int] = {}
        found = []
        for time, unit, nbytes in self.live:
            now[unit] = nbytes
            found.append((time, sum(now.values())))
        return found

    def shifted(self, seconds: float) -> Record:
        """The same on a clock that is `seconds` behind."""
        move = [Span(s.kind, s.unit, s.start - seconds, s.end - seconds) for s in (*self.work, *self.flights)]
        live = [(time - seconds, unit, nbytes) for time, unit, nbytes in self.live]
        return Record(move[: len(self.work)], move[len(self.work) :], live)


class Trace:
    """Records what the units of `zero` do on this rank while the `with` block runs.

        with Trace(zero) as trace:
            model(x).backward()
        trace.record.spent("wait", "late")      # seconds
        timeline = merge(trace.record)          # of module timeline, on all ranks

    Before and after it the verbs are as they were: tracing costs nothing when it is off.
    """

    def __init__(self, zero: Any) -> None:
        self.record = Record()
        self._zero = zero
        self._stack: list[tuple[str, str]] = []  # what the thread is doing, the innermost last
        self._since = 0.0
        self._started: dict[Any, float] = {}  # flights under way
        self._needed: Any = None  # the unit that was not here when it was needed
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        gatherer, reducer = self._zero._gatherer, self._zero._reducer
        self._wrap(gatherer, "need", self._need)
        self._wrap(gatherer, "forget_backward", self._forget_backward)
        verbs = {"unshard": self._unshard, "compare": self._compare, "wait": self._wait, "reshard": self._reshard}
        for unit in self._zero.units:
            for name, around in verbs.items():
                self._wrap(unit, name, partial(around, unit))
            begin, end = partial(self._begin, "forward", unit.name), partial(self._end, "forward", unit.name)
            hooks = [
                unit.module.register_forward_pre_hook(lambda *_, begin=begin: begin()),
                unit.module.register_forward_hook(lambda *_, end=end: end(), prepend=True, always_call=True),
            ]
            self._undo += [hook.remove for hook in hooks]
            for bucket in reducer._buckets.get(unit, ()):
                self._wrap(bucket, "launch", partial(self._launch, unit, bucket))
                self._wrap(bucket, "land", partial(self._land, unit, bucket))
            self._measure(unit)
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()
        self._close()
        self._stack.clear()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        verb, before = getattr(owner, name), vars(owner).get(name)
        setattr(owner, name, partial(around, verb))
        self._undo.append(partial(delattr, owner, name) if before is None else partial(setattr, owner, name, before))

    # ---- what the thread does: a stack, and the time belongs to the innermost

    def _close(self) -> None:
        now = perf_counter()
        if self._stack:
            self.record.work.append(Span(*self._stack[-1], self._since, now))
        self._since = now

    def _begin(self, kind: str, unit: str) -> None:
        self._close()
        self._stack.append((kind, unit))

    def _end(self, kind: str, unit: str) -> None:
        if (kind, unit) in self._stack:  # not if it was begun before the trace
            self._close()
            del self._stack[len(self._stack) - 1 - self._stack[::-1].index((kind, unit))]

    @contextmanager
    def _doing(self, kind: str, unit: str) -> Iterator[None]:
        self._begin(kind, unit)
        try:
            yield
        finally:
            self._end(kind, unit)

    def _finish(self, kind: str, unit: Any, key: Any) -> None:
        if key in self._started:
            self.record.flights.append(Span(kind, unit.name, self._started.pop(key), perf_counter()))

    def _measure(self, unit: Any) -> None:
        nbytes = sum(flat.full.untyped_storage().nbytes() for flat in unit.flats)
        self.record.live.append((perf_counter(), unit.name, nbytes))

    # ---- around the verbs

    def _need(self, verb: Callable[..., None], unit: Any, moment: Any) -> None:
        self._needed = unit if unit.state == "SHARDED" else None
        verb(unit, moment)
        if torch._C._current_graph_task_id() != -1 and ("backward", unit.name) not in self._stack:
            self._close()  # the root's backward lies around the others', also where the last of them is reached first
            self._stack.insert(0 if unit is self._zero.units[0] else len(self._stack), ("backward", unit.name))

    def _unshard(self, unit: Any, verb: Callable[..., None], *args: Any) -> None:
        if unit.state != "SHARDED":
            return
        with self._doing("launch", unit.name):
            self._started[unit] = perf_counter()
            verb(*args)
        self._measure(unit)

    def _compare(self, unit: Any, verb: Callable[..., None]) -> None:
        if unit._check:
            with self._doing("wait", unit.name):
                verb()

    def _wait(self, unit: Any, verb: Callable[..., None]) -> None:
        if unit.state == "IN_FLIGHT":
            with self._doing("late" if unit is self._needed else "wait", unit.name):
                verb()
            self._finish("gather", unit, unit)

    def _reshard(self, unit: Any, verb: Callable[..., None]) -> None:
        if unit.state == "SHARDED":
            return
        self._end("backward", unit.name)
        with self._doing("reshard", unit.name):
            verb()
        self._finish("vain", unit, unit)  # it was still in flight
        self._measure(unit)

    def _launch(self, unit: Any, bucket: Any, verb: Callable[..., None], *args: Any) -> None:
        self._end("backward", unit.name)
        with self._doing("launch", unit.name):
            self._started[bucket] = perf_counter()
            verb(*args)

    def _land(self, unit: Any, bucket: Any, verb: Callable[..., None], *args: Any) -> None:
        with self._doing("land", unit.name):
            verb(*args)
        self._finish("reduce", unit, bucket)

    def _forget_backward(self, verb: Callable[[], None]) -> None:
        for unit in self._zero.units:
            self._end("backward", unit.name)
        verb()
