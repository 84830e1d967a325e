"""Chapter 04, communication: collectives match by order alone, so ranks say what they are about to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from minizero.collectives.exchange import on_all_ranks
from minizero.collectives.transport import Transport


class RollCall:
    """Ranks say which unit they gather; a difference raises on every rank, before anyone computes with wrong values.

    Collectives match by their order alone: if rank 0 gathers unit a while rank 1 gathers unit b of the same size, each
    silently gets half of the other's weights. Eight bytes to each rank, ahead of the weights, prevent it.
    """

    def __init__(self, names: Sequence[str], transport: Transport) -> None:
        self.names, self._transport = names, transport

    def call(self, index: int, seen: int = 0) -> Callable[[], None]:
        """Announce the unit `index`; the function returned waits for the others and compares.

        `seen`, of 31 bits, is compared as well: ranks that will decide differently hear of it before they do.
        """
        number = index + len(self.names) * seen
        hear = self._transport.call(number)

        def check() -> None:
            with on_all_ranks(action := f"gather unit {self.names[index]!r}"):
                numbers = hear()
            if any(other != number for other in numbers):
                raise RuntimeError(f"rank {dist.get_rank()} could not {action}: {self._difference(numbers)}")

        return check

    def _difference(self, numbers: Sequence[int]) -> str:
        """What is wrong, if rank r called `numbers[r]`."""
        units = [self.names[number % len(self.names)] for number in numbers]
        if len(set(units)) > 1:
            calls = ", ".join(f"rank {rank}: {unit!r}" for rank, unit in enumerate(units))
            what = f"ranks gather different units ({calls})"
        else:
            # They would gather different ones ahead, and the error would name those.
            seen = [number // len(self.names) for number in numbers]
            others = [rank for rank in range(len(seen)) if seen[rank] != seen[0]]
            what = f"all ranks are at this unit, but ranks {others} ran other units before it than rank 0"
        return (
            f"{what}. With stage 3 every rank must run the same units in the same order; for loops that differ by rank "
            "use `with zero.gathered():`"
        )
