"""Chapter 12, gather: which units are gathered ahead of the one that computes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any


class Moment(StrEnum):
    """What a unit is needed for."""

    FORWARD = "forward"
    EVALUATION = "forward without a graph"
    BACKWARD = "backward"
    RECOMPUTATION = "forward inside backward"


class Schedule:
    """Says which units are gathered ahead: here the next `count` in the order of `units`, the root first.

    Chapter 23 has schedules that know better. All ranks must decide alike, so a schedule may look at nothing that
    differs by rank. Each roll call carries `seen`: if it differs between ranks, they decided on different grounds, and
    all of them raise.
    """

    def __init__(self, units: Sequence[Any], count: int = 0) -> None:
        self.units, self.count, self.seen = units, count, 0

    def after(self, unit: Any, moment: Moment) -> Sequence[Any]:
        """`unit` is needed now: the units whose gathers are to be started behind its own."""
        i = self.units.index(unit)
        # Backward goes from the root, whose index is 0, to the last unit, and down from there.
        following = self.units[1 : i or None][::-1] if moment is Moment.BACKWARD else self.units[i + 1 :]
        return () if moment is Moment.RECOMPUTATION else following[: self.count]

    def end(self) -> None:
        """A backward is over."""
