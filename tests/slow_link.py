"""A slow link between ranks that takes no processor: collectives that run as always, and whose `wait()` sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from minizero.collectives import TorchTransport
from minizero.collectives.transport import Flight


class SlowLink(TorchTransport):
    """One link that carries one gather after another: `seconds(nbytes)` each, of all of a rank's gathers."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self._seconds, self._free = seconds, 0.0

    def all_gather(self, full: Tensor, shard: Tensor) -> Flight:
        self._free = max(self._free, time.perf_counter()) + self._seconds(full.numel() * full.itemsize)
        return SlowFlight(super().all_gather(full, shard), self._free)


class SlowFlight:
    """A collective that arrives at a moment of `perf_counter`, not before."""

    def __init__(self, flight: Flight, arrives: float) -> None:
        self._flight, self._arrives = flight, arrives

    def wait(self) -> None:
        """Sleep until then."""
        self._flight.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))
