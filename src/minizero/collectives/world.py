"""Chapter 04, communication: the ranks of a sharded model as one object, and what they do together."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from minizero.collectives.exchange import on_all_ranks
from minizero.collectives.transport import TorchTransport, Transport, companion
from minizero.replicate import check_agreement
from minizero.replicate.sending import as_bytes, send_from_first

T = TypeVar("T")


class World:
    """The ranks that share a copy of a model (`shard`), and those with the same shard of other copies (`replicas`).

    Both are process groups of torch: None is all ranks for `shard`, and for `replicas` that there is one copy. `size`
    ranks share a copy, and this one is `rank` among them; there are `copies`, and it belongs to number `copy`. Of all
    ranks, `count`, it has the `number`. `transport` takes shards and gradients between the ranks of a copy.

    Raises ValueError on a rank that one of the groups does not contain, or that has another place in the transport.
    """

    def __init__(
        self,
        shard: ProcessGroup | None = None,
        replicas: ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.shard, self.replicas = shard, replicas
        self.groups = [shard] if replicas is None else [shard, replicas]  # one after the other they reach all ranks
        if any(dist.get_rank(group) < 0 for group in self.groups):
            raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given")
        self.rank, self.size = dist.get_rank(shard), dist.get_world_size(shard)
        self.copy, self.copies = (dist.get_rank(replicas), dist.get_world_size(replicas)) if replicas else (0, 1)
        self.number, self.count = self.copy * self.size + self.rank, self.copies * self.size
        self.transport: Transport = transport or TorchTransport(shard)
        if (place := (self.transport.rank, self.transport.size)) != (self.rank, self.size):
            raise ValueError(
                f"transport: this is rank {place[0]} of {place[1]} there, and {self.rank} of {self.size} here"
            )

    @property
    def device(self) -> torch.device:
        """Where a tensor has to be that a collective of these ranks sends."""
        on_cuda = dist.get_backend(self.shard) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def beside(self, purpose: str) -> World:
        """The same ranks in gloo groups for `purpose` alone: what they say there meets nothing else on its way."""
        shard, replicas, *_ = [*(companion(group, purpose) for group in self.groups), None]
        return World(shard, replicas)

    def agree(self, mine: list[str], what: str = "models") -> None:
        """Raise ValueError on all ranks, naming the first difference, unless all describe `what` they bring alike."""
        for group in self.groups:
            check_agreement(mine, group, what)

    def everyone(self, value: T) -> list[T]:
        """The values of all ranks, in the order of their numbers, on all of them. They travel as pickles."""
        found: list[Any] = [value]
        for group in self.groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group=group)
            found = [each for part in parts for each in part]
        return found

    def broadcast(self, tensor: Tensor) -> None:
        """Give `tensor` on every rank the values of rank 0's."""
        with on_all_ranks("send rank 0's values"):
            for group in reversed(self.groups):
                send_from_first(tensor, group)

    def from_first(self, value: T) -> T:
        """Rank 0's `value`, with tensors in lists and dicts of it, on all ranks."""
        # as bytes: torch's pickles know some dtypes only
        values: list[Any] = [tree_map_only(Tensor, lambda t: _Packed(as_bytes(t), t.dtype, t.shape), value)]
        with on_all_ranks("send rank 0's values"):
            for group in reversed(self.groups):
                dist.broadcast_object_list(values, group=group, group_src=0)
        theirs: T = tree_map_only(
            _Packed, lambda p: p.values.view(p.dtype).view(p.shape), values[0], is_leaf=_is_packed
        )
        return theirs


class _Packed(NamedTuple):
    values: Tensor
    dtype: torch.dtype
    shape: torch.Size


def _is_packed(value: Any) -> bool:
    return isinstance(value, _Packed)
