"""A slow link between ranks that takes no processor: collectives that run as always, and whose `wait()` sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import minizero.gather.units


class SlowLink:
    """One link that carries one gather after another: `seconds(nbytes)` each, of all of a rank's gathers."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds, self._free = seconds, 0.0
        self._launch = minizero.gather.units.launch_all_gather

    def install(self) -> None:
        """From now on this rank's gathers take the slow link."""
        minizero.gather.units.launch_all_gather = self.launch  # type: ignore[attr-defined]

    def launch(self, full: Any, *args: Any) -> SlowWork:
        """As minizero.collectives.launch_all_gather."""
        self._free = max(self._free, time.perf_counter()) + self._seconds(full.numel() * full.itemsize)
        return SlowWork(self._launch(full, *args), self._free)


class SlowWork:
    """A collective that arrives at a moment of `perf_counter`, not before."""

    def __init__(self, work: Any, arrives: float) -> None:
        self._work, self._arrives = work, arrives

    def wait(self) -> None:
        """Sleep until then."""
        self._work.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))
