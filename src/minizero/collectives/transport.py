"""Chapter 04, communication: one object says how shards and gradients travel, and in what form.

ZeRO needs four verbs of the ranks that share a copy of a model. A new way between them (shared memory, a hierarchy of
machines) is a class with these four; a new form on the wire (8 bits, compressed) is a `Format` with two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minizero.collectives.exchange import (
    ROLL_CALL_TAG,
    Exchange,
    ReduceScatter,
    launch_all_gather,
    launch_all_to_all,
    timeout_of,
)

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


class Flight(Protocol):
    """A collective that is on its way."""

    def wait(self) -> Any:
        """Return when what it brings can be read, and what it sent can be changed."""


class Reduction(Protocol):
    """A reduce-scatter that is on its way."""

    buffers: list[Tensor]  # that nobody reads any more once it has landed

    def land(self) -> Tensor:
        """The sum over ranks of this rank's slice: n elements, fp32 or fp64."""


class Transport(Protocol):
    """How N ranks talk. All of them call the same verbs in the same order; a verb starts a collective."""

    rank: int
    size: int  # N

    @property
    def exact(self) -> Transport:
        """The transport for values that must arrive as they are: itself, unless its `all_gather` rounds."""

    def all_gather(self, full: Tensor, shard: Tensor) -> Flight:
        """Fill `full` (N * n elements) with the `shard`s (n elements) of all ranks, rounded to the dtype of `full`."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> Flight:
        """Send the r-th of N equal parts of `sent` to rank r. This rank's own part may stay away from `received`."""

    def reduce_scatter(self, full: Tensor, allocate: Callable[[Tensor], Tensor] = torch.empty_like) -> Reduction:
        """Add up the ranks' `full`s (N * n elements), of which each rank gets its slice. `allocate` makes buffers."""

    def call(self, number: int) -> Callable[[], list[int]]:
        """Tell all ranks a number of 63 bits; the function returned waits for theirs, in rank order.

        It must not be mistaken for anything else that is on its way.
        """


class TorchTransport:
    """torch.distributed between the ranks of `group`: messages on gloo, collectives on NCCL. Implements `Transport`."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        # NCCL has no tags to keep the roll and the weights apart
        self._aside = companion(group, "roll call") if dist.get_backend(group) == "nccl" else group

    @property
    def exact(self) -> Transport:
        """Itself: it sends bytes."""
        return self

    def all_gather(self, full: Tensor, shard: Tensor) -> Flight:
        """See `launch_all_gather`."""
        return launch_all_gather(full, shard, self.group)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Flight:
        """See `launch_all_to_all`."""
        return launch_all_to_all(received, sent, self.group)

    def reduce_scatter(self, full: Tensor, allocate: Callable[[Tensor], Tensor] = torch.empty_like) -> Reduction:
        """See `ReduceScatter`."""
        return ReduceScatter(full, self.group, allocate)

    def call(self, number: int) -> Callable[[], list[int]]:
        """Eight bytes to each rank, with a tag of their own."""
        mine, all_ranks = torch.tensor([number], device="cpu"), torch.full((self.size,), number, device="cpu")
        work = Exchange(all_ranks.split(1), [mine] * self.size, self._aside, ROLL_CALL_TAG)

        def hear() -> list[int]:
            work.wait()
            return all_ranks.tolist()

        return hear


# ---- what is sent: as it is, or in another form ------------------------------------------------------------------


class Format(Protocol):
    """What is sent in place of values, such as 8-bit numbers and a scale."""

    def encode(self, values: Tensor) -> Tensor:
        """What to send for `values` (1-D): a 1-D tensor whose length and dtype depend on those of `values` alone."""

    def decode(self, sent: Tensor, values: Tensor) -> None:
        """Write to `values` what `sent` stands for."""


class Encoded:
    """Sends weights, gradients or both in another form by another transport. Implements `Transport`.

    Gathered weights are rounded on all ranks alike, the shards stay as they are. Of gradients a rank adds up, in fp32,
    what came from the others and its own, which went nowhere and is exact.
    """

    def __init__(self, inner: Transport, weights: Format | None = None, gradients: Format | None = None) -> None:
        self._inner, self._weights, self._gradients = inner, weights, gradients
        self.rank, self.size, self.all_to_all, self.call = inner.rank, inner.size, inner.all_to_all, inner.call

    @property
    def exact(self) -> Transport:
        """The transport inside, if weights are sent in another form."""
        return self._inner.exact if self._weights else self

    def all_gather(self, full: Tensor, shard: Tensor) -> Flight:
        """Gather what `shard` is encoded as; `wait()` decodes it into `full`, this rank's own too."""
        if self._weights is None:
            return self._inner.all_gather(full, shard)
        return _EncodedGather(full, shard, self._inner, self._weights)

    def reduce_scatter(self, full: Tensor, allocate: Callable[[Tensor], Tensor] = torch.empty_like) -> Reduction:
        """Exchange encoded slices of `full`; `land()` decodes and adds them."""
        if self._gradients is None:
            return self._inner.reduce_scatter(full, allocate)
        return _EncodedReduction(full, self._inner, self._gradients)


class _EncodedGather:
    def __init__(self, full: Tensor, shard: Tensor, transport: Transport, form: Format) -> None:
        mine = form.encode(shard.detach())
        self._places, self._form = full.detach().tensor_split(transport.size), form
        self._sent = mine.new_empty(transport.size * mine.numel())
        self._work = transport.all_gather(self._sent, mine)

    @torch.no_grad()
    def wait(self) -> None:
        self._work.wait()
        for sent, place in zip(self._sent.tensor_split(len(self._places)), self._places, strict=True):
            self._form.decode(sent, place)


class _EncodedReduction:
    def __init__(self, full: Tensor, transport: Transport, form: Format) -> None:
        self.buffers, self._form, self._rank = [full], form, transport.rank
        self._slices = full.detach().tensor_split(transport.size)
        self._sent = torch.cat([form.encode(values) for values in self._slices])
        self._received = torch.empty_like(self._sent)
        self._work = transport.all_to_all(self._received, self._sent)

    def land(self) -> Tensor:
        self._work.wait()
        mine = self._slices[self._rank]
        total = mine.to(torch.promote_types(mine.dtype, torch.float32), copy=True)
        arrived = torch.empty_like(total)
        for rank, sent in enumerate(self._received.tensor_split(len(self._slices))):
            if rank != self._rank:
                self._form.decode(sent, arrived)
                total += arrived
        return total
