"""Chapter 04, communication: what N ranks must say to each other, and how many bytes that takes.

Ring algorithms from send and receive, and the two collectives that ZeRO is made of.
N is the number of ranks in the group. `group=None` is torch's default process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# torch 2.13 renamed these two; the old names still work there, with a warning for each call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- rings: every rank talks to its two neighbours only ----------------------------------------------------------


def _pass_right(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None) -> None:
    """Send one chunk to rank + 1 while receiving another from rank - 1."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % world)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % world)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _ring_gather(chunks: list[Tensor], group: ProcessGroup | None) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world - 1):
        _pass_right(chunks[(rank - step) % world], chunks[(rank - step - 1) % world], group)


def _ring_reduce(chunks: list[Tensor], group: ProcessGroup | None) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world - 1):
        mine = chunks[(rank - step - 2) % world]
        arriving = torch.empty_like(mine)
        _pass_right(chunks[(rank - step - 1) % world], arriving, group)
        mine += arriving


def ring_all_gather(full: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> None:
    """Fill `full` (N * n elements) on every rank with the ranks' `shard`s (n elements each), in rank order.

    In each of N - 1 steps a rank passes on the chunk it got in the step before, so it sends (N - 1) / N of `full`.
    """
    _check_full_and_shard(full, shard, group)
    chunks = list(full.chunk(dist.get_world_size(group)))
    chunks[dist.get_rank(group)].copy_(shard)
    _ring_gather(chunks, group)


def ring_reduce_scatter(shard: Tensor, full: Tensor, group: ProcessGroup | None = None) -> None:
    """Give rank r in `shard` (n elements) the sum over ranks of the r-th chunk of `full` (N * n elements).

    A chunk travels once round the ring and collects one addend a stop: (N - 1) / N of `full` sent. `full` is kept.
    """
    _check_full_and_shard(full, shard, group)
    chunks = list(full.clone().chunk(dist.get_world_size(group)))
    _ring_reduce(chunks, group)
    shard.copy_(chunks[dist.get_rank(group)])


def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replace `tensor` on every rank by the sum over ranks: a reduce-scatter, then an all-gather, 2 (N - 1) / N sent.

    Any length works: the chunks need not be equal (Patarasuk and Yuan 2009, section 3).
    """
    chunks = list(tensor.view(-1).tensor_split(dist.get_world_size(group)))
    _ring_reduce(chunks, group)
    _ring_gather(chunks, group)


def _check_full_and_shard(full: Tensor, shard: Tensor, group: ProcessGroup | None) -> None:
    world = dist.get_world_size(group)
    if full.dim() != 1 or shard.dim() != 1 or full.numel() != world * shard.numel():
        raise ValueError(
            f"full must be 1-D with world size x shard elements, got full {tuple(full.shape)}, "
            f"shard {tuple(shard.shape)}, {world} ranks"
        )


# ---- what ZeRO calls: the backend's own collectives, and a reduce-scatter that is one everywhere -----------------

# A tag keeps apart what is on the way at the same time, and tells a ledger what a message is part of.
ALL_GATHER_TAG, ALL_TO_ALL_TAG, ROLL_CALL_TAG = 1, 2, 3


class Exchange:
    """Messages without a middleman: `outgoing[r]` goes to rank r, and what rank r sends here lands in `incoming[r]`.

    Both have one tensor for each rank of the group; those of this rank itself are left alone.
    """

    def __init__(
        self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], group: ProcessGroup | None, tag: int
    ) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        others = [(rank + step) % world for step in range(1, world)]
        self._works = [dist.irecv(incoming[r], group=group, tag=tag, group_src=r) for r in others]
        self._works += [dist.isend(outgoing[r], group=group, tag=tag, group_dst=r) for r in others]

    def wait(self) -> None:
        """Block until all messages are here and this rank's have left; again, return at once."""
        while self._works:
            self._works.pop().wait()  # type: ignore[union-attr]  # None is for ranks outside the group


def launch_all_gather(full: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> Work | Exchange:
    """Start filling `full` (N * n elements) with the `shard`s (n elements) of all ranks; `wait()` before reading it.

    On CUDA the collective runs on NCCL's own stream, after what the current stream has queued, and `wait()` makes the
    current stream wait for it. On the CPU the ranks exchange their shards: gloo's own all-gather fills a buffer and
    then copies it. `shard` may be this rank's part of `full`; else it is copied there first, in the dtype of `full`.
    Bytes travel: no backend knows every dtype.
    """
    _check_full_and_shard(full, shard, group)
    with torch.no_grad():
        places = list(full.view(dist.get_world_size(group), -1))
        mine = places[dist.get_rank(group)]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        places = [place.view(torch.uint8) for place in places]
        mine = places[dist.get_rank(group)]
        if full.device.type == "cpu":
            return Exchange(places, [mine] * len(places), group, ALL_GATHER_TAG)
        work: Work = _all_gather(full.view(torch.uint8), mine, group=group, async_op=True)
    return work


def launch_all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup | None = None) -> Work | Exchange:
    """Start sending the r-th of N equal parts of `sent` to rank r; rank r's part for this rank lands in `received`.

    On the CPU this rank's own part stays where it is, and its place in `received` as it was.
    """
    if sent.device.type == "cpu":
        places, parts = (t.detach().view(dist.get_world_size(group), -1).unbind() for t in (received, sent))
        return Exchange(places, parts, group, ALL_TO_ALL_TAG)
    work: Work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return work


class ReduceScatter:
    """A reduce-scatter that is on its way: the constructor launches it, `land()` waits and gives this rank's shard.

    `full` has N * n elements. What goes over the wire keeps the dtype of `full`; the sum is taken in fp32, or in fp64
    for fp64 input. gloo's reduce_scatter is an all-reduce and a slice, twice the bytes, and in low precision NCCL adds
    in low precision; in both cases the ranks exchange slices and each adds up its own, which takes a second buffer of
    N * n elements. `allocate(like)` makes it; both buffers are free again, as `buffers`, after `land()`.
    """

    def __init__(
        self,
        full: Tensor,
        group: ProcessGroup | None = None,
        allocate: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._exchanges = full.device.type == "cpu" or full.itemsize < 4
        self._received = allocate(full) if self._exchanges else full.new_empty(full.numel() // world)
        self.buffers = [full, self._received] if self._exchanges else [full]
        self._slices = full.detach().view(world, -1).unbind()
        with torch.no_grad():
            if self._exchanges:
                self._work = launch_all_to_all(self._received, full, group)
            else:
                self._work = _reduce_scatter(self._received, full, group=group, async_op=True)

    def land(self) -> Tensor:
        """The sum over ranks of this rank's slice: n elements, fp32 or fp64."""
        self._work.wait()
        if not self._exchanges:
            return self._received
        dtype = torch.promote_types(self._received.dtype, torch.float32)
        addends = list(self._received.detach().view(len(self._slices), -1))
        addends[self._rank] = self._slices[self._rank]  # this rank's own, which went nowhere
        first, *others = addends
        total: Tensor = sum((other.to(dtype) for other in others), first.to(dtype, copy=not others))
        return total


def over_ranks(operation: Literal["mean", "max"], values: Sequence[float], device: torch.device) -> list[float]:
    """Element by element over the ranks, in float64, the same list on all: their losses become the batch's loss.

    A collective of the default group: each rank gives equally many numbers. They travel on `device`.
    """
    result = torch.tensor(values, dtype=torch.float64, device=device)
    with on_all_ranks(f"take the {operation} over the ranks"):
        dist.all_reduce(result, dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM)
    return [value / (dist.get_world_size() if operation == "mean" else 1) for value in result.tolist()]


@contextmanager
def on_all_ranks(action: str) -> Iterator[None]:
    """Say in the error of a collective that failed what it was for, and what is usually wrong."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not {action}: {error}. All ranks of the group must take part, each within "
            "the group's timeout: was this called on one rank only, or did a rank fail?"
        ) from error


def timeout_of(group: ProcessGroup | None) -> timedelta:
    """How long a collective of `group` waits before it raises."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    process_group = group or dist.distributed_c10d._get_default_group()
    timeout: timedelta = process_group._get_backend(torch.device(device)).options._timeout
    return timeout
