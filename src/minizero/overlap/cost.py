"""Chapter 23, overlap: what it saves, on paper: when ranks wait, and how many tokens hide a gather."""

from __future__ import annotations

from collections.abc import Sequence


def waits(compute: Sequence[float], gather: Sequence[float], count: int) -> list[float]:
    """Seconds a rank waits before each use of a pass, if one link carries its gathers, one after another.

    Args:
        compute: seconds that each use computes, in their order.
        gather: seconds that each use's gather takes on the link, for instance `ring_seconds("all_gather", …)`.
        count: how many uses are gathered ahead of the one that computes.
    """
    if len(compute) != len(gather):
        raise ValueError(f"compute and gather must be of one length, got {len(compute)} and {len(gather)}")
    clock = link = 0.0
    arrivals: list[float] = []
    lost: list[float] = []

    def launch(until: int) -> None:
        nonlocal link
        for seconds in gather[len(arrivals) : until]:
            link = max(link, clock) + seconds
            arrivals.append(link)

    for i, seconds in enumerate(compute):
        launch(i + 1 + count)
        lost.append(max(0.0, arrivals[i] - clock))
        clock += lost[-1] + seconds
    return lost


def tokens_to_hide(flops: float, bandwidth: float, bytes_per_element: float, world: int) -> float:
    """Tokens that one rank must have in a micro-batch so that a unit computes as long as the next one's gather takes.

    A unit of P parameters computes 2 P FLOPs a token in forward while P · bytes_per_element · (N − 1) / N bytes arrive;
    backward computes twice as much, with a reduce-scatter of as many bytes beside the gather. P cancels. `flops` are
    those a rank reaches in a second, `bandwidth` the bytes that it receives in one; the latency is left out.
    """
    return flops * bytes_per_element * (world - 1) / world / (2 * bandwidth)
