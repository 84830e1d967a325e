"""Chapter 04, communication: collectives match by order alone, so ranks say what they are about to do.

`group=None` is torch's default process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from minizero.collectives.exchange import ROLL_CALL_TAG, Exchange, on_all_ranks, timeout_of

_companions: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = WeakKeyDictionary()


def companion(group: ProcessGroup | None, purpose: str) -> ProcessGroup:
    """A gloo group of the same ranks for `purpose` alone, as long as `group` lives; the first call is one on all ranks.

    What travels there cannot be taken for what the group itself, or another purpose, has on the way.
    """
    companions = _companions.setdefault(group or dist.distributed_c10d._get_default_group(), {})
    if purpose not in companions:
        # local synchronization: only this group's ranks take part; other groups can be made at the same time
        companions[purpose] = dist.new_group(
            dist.get_process_group_ranks(group), timeout_of(group), "gloo", use_local_synchronization=True
        )
    return companions[purpose]


class RollCall:
    """Ranks say which unit they gather; a difference raises on every rank, before anyone computes with wrong values.

    Collectives match by their order alone: if rank 0 gathers unit a while rank 1 gathers unit b of the same size, each
    silently gets half of the other's weights. Eight bytes to each rank, ahead of the weights, prevent it.
    """

    def __init__(self, names: Sequence[str], group: ProcessGroup | None) -> None:
        self.names = names
        # NCCL has no tags to keep the roll and the weights apart
        self._group = companion(group, "roll call") if dist.get_backend(group) == "nccl" else group

    def call(self, index: int, seen: int = 0) -> Callable[[], None]:
        """Announce the unit `index`; the function returned waits for the others and compares.

        `seen`, of 31 bits, is compared as well: ranks that will decide differently hear of it before they do.
        """
        world, number = dist.get_world_size(self._group), index + len(self.names) * seen
        mine, all_ranks = torch.tensor([number], device="cpu"), torch.full((world, 1), number, device="cpu")
        work = Exchange(all_ranks.unbind(), [mine] * world, self._group, ROLL_CALL_TAG)

        def check() -> None:
            with on_all_ranks(action := f"gather unit {self.names[index]!r}"):
                work.wait()
            if (all_ranks != number).any():
                difference = self._difference(all_ranks.flatten().tolist())
                raise RuntimeError(f"rank {dist.get_rank()} could not {action}: {difference}")

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
