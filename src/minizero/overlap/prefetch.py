"""Chapter 23, overlap: gather ahead in the order in which units are really used, as far as a budget reaches.

The verbs stay those of chapter 12; what is here decides when `unshard` is called. A guess may be wrong: then a unit was
gathered in vain and is freed again. No value depends on the guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minizero.gather import Moment, Schedule, State, Unit


def full_bytes(unit: Unit) -> int:
    """Bytes of a unit's parameters while it is whole, padding included."""
    return sum(flat.full.numel() * flat.full.itemsize for flat in unit.flats)


class Recorded(Schedule):
    """Expects each pass to use the units in the order in which the last pass of its kind did.

    The root is left out: its own forward and backward lie around those of the others, and nothing comes before them.
    Forward with a graph and forward without one each have a record of their own; the first of all is expected in the
    order of `units`. Backward is expected in the reverse of the last forward, unless the last backward was not (as with
    recomputation of several units at once). `fits` says how many of the units that come next, nearest first, may be in
    flight or waiting. What was gathered ahead and is not expected any more is resharded, so that the budget holds after
    a wrong guess too.
    """

    def __init__(self, units: Sequence[Unit], fits: Callable[[Sequence[Unit]], int]) -> None:
        super().__init__(units)
        self._fits = fits
        self._orders: dict[Moment, list[Unit]] = {Moment.FORWARD: list(units[1:])}
        self._running: Moment | None = None
        self._used: list[Unit] = []  # in the pass that runs
        self._position = 0  # in the order that is expected, behind the unit that was used last
        self._waiting: list[Unit] = []  # gathered ahead and not used yet

    def after(self, unit: Unit, moment: Moment) -> Sequence[Unit]:
        """`unit` is needed now: the units whose gathers are to be started behind its own."""
        kind = Moment.BACKWARD if moment is Moment.RECOMPUTATION else moment
        is_root = unit is self.units[0]
        if kind is not self._running or (is_root and kind is not Moment.BACKWARD):
            self.end()
            self._running = kind
        order = self._order(kind)
        if not is_root and self._used[-1:] != [unit]:  # recomputed, and then its backward: that is one use
            self._used.append(unit)
            self.seen = (31 * self.seen + self.units.index(unit) + 1) % 2**31
            self._position = _behind(unit, order, self._position)
        following = dict.fromkeys(u for u in order[self._position :] if u is not unit and u.flats)
        wanted = list(following)[: self._fits(list(following))]
        for idle in self._waiting:
            if idle is not unit and idle not in wanted:
                idle.reshard()
        self._waiting = [u for u in wanted if u.state == State.SHARDED or u in self._waiting]
        return wanted

    def end(self) -> None:
        """A forward or a backward is over, or one begins and the last did not come to its end."""
        if self._running is Moment.BACKWARD and self._used == self._orders[Moment.FORWARD][::-1]:
            self._orders.pop(Moment.BACKWARD, None)
        elif self._running is not None:
            self._orders[self._running] = self._used
        self._running, self._used, self._position, self._waiting = None, [], 0, []

    def _order(self, kind: Moment) -> list[Unit]:
        forward = self._orders[Moment.FORWARD]
        return self._orders.get(kind, forward[::-1] if kind is Moment.BACKWARD else forward)


def _behind(unit: Unit, order: Sequence[Unit], start: int) -> int:
    """The position after the next `unit` in `order`, from `start` on and then from the beginning; else the end."""
    places = (*range(start, len(order)), *range(min(start, len(order))))
    return next((i + 1 for i in places if order[i] is unit), len(order))


@dataclass(frozen=True)
class ByCount:
    """At most `count` units gathered ahead: `Zero(model, prefetch=ByCount(2))`. 0 gathers nothing ahead."""

    count: int

    def __post_init__(self) -> None:
        _check("count", self.count)

    def __call__(self, units: Sequence[Unit]) -> Schedule:
        """The schedule for a Zero's units."""
        return Recorded(units, lambda following: self.count)


@dataclass(frozen=True)
class ByBytes:
    """At most `nbytes` bytes of gathered parameters in flight or waiting. A larger unit is never gathered ahead."""

    nbytes: int

    def __post_init__(self) -> None:
        _check("nbytes", self.nbytes)

    def __call__(self, units: Sequence[Unit]) -> Schedule:
        """The schedule for a Zero's units."""
        sizes = {id(unit): full_bytes(unit) for unit in units}

        def fits(following: Sequence[Unit]) -> int:
            total = 0
            for n, unit in enumerate(following):
                total += sizes[id(unit)]
                if total > self.nbytes:
                    return n
            return len(following)

        return Recorded(units, fits)


def _check(name: str, value: int) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be an integer of 0 or more, got {value!r}")
