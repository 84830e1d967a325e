"""Chapter 04, communication: what N ranks must say to each other, and how many bytes that takes.

Ring algorithms from send and receive, the two collectives that ZeRO is made of, a ledger of bytes, and a cost model.
N is the number of ranks in the group. `group=None` is torch's default process group.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

# torch 2.13 renamed these two; the old names still work there, with a warning for each call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def init_distributed(timeout: float = 60.0) -> torch.device:
    """Join the process group that a launcher (torchrun, deepspeed, srun, `%%ranks`) described in the environment.

    Without a launcher the group has one rank. The backend is NCCL on `cuda:LOCAL_RANK` when this machine has a GPU for
    each of its ranks, else gloo on the CPU. A collective that waits longer than `timeout` seconds raises. Returns the
    device this rank computes on. If a process group exists already, it is kept.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend, limit = ("nccl" if use_cuda else "gloo"), timedelta(seconds=timeout)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit, store=dist.HashStore(), rank=0, world_size=1)
    return device


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


def launch_all_gather(full: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> Work:
    """Start filling `full` (N * n elements) with the `shard`s (n elements) of all ranks; `wait()` before reading it.

    On CUDA the collective runs on NCCL's own stream, after what the current stream has queued, and `wait()` makes the
    current stream wait for it. `shard` must not change until then; it may be this rank's part of `full`.
    """
    with torch.no_grad():
        return _all_gather(full, shard, group=group, async_op=True)


class ReduceScatter:
    """A reduce-scatter that is on its way: the constructor launches it, `land()` waits and gives this rank's shard.

    `full` has N * n elements. What goes over the wire keeps the dtype of `full`; the sum is taken in fp32, or in fp64
    for fp64 input. gloo's reduce_scatter is an all-reduce and a slice, twice the bytes, and in low precision NCCL adds
    in low precision; in both cases the ranks exchange slices and each adds up its own.
    """

    def __init__(self, full: Tensor, group: ProcessGroup | None = None) -> None:
        world = dist.get_world_size(group)
        self._exchanges = full.device.type == "cpu" or full.itemsize < 4
        self._full = full  # the collective reads it until it has landed
        size = full.numel() if self._exchanges else full.numel() // world
        self._received = torch.empty(size, dtype=full.dtype, device=full.device)
        with torch.no_grad():
            if self._exchanges:
                self._work = dist.all_to_all_single(self._received, full, group=group, async_op=True)
            else:
                self._work = _reduce_scatter(self._received, full, group=group, async_op=True)
        self._world = world

    def land(self) -> Tensor:
        """The sum over ranks of this rank's slice: n elements, fp32 or fp64."""
        self._work.wait()
        if not self._exchanges:
            return self._received
        dtype = torch.promote_types(self._received.dtype, torch.float32)
        with torch.no_grad():
            return self._received.view(self._world, -1).sum(0, dtype=dtype)


# ---- counting bytes ----------------------------------------------------------------------------------------------


def ring_bytes(kind: str, nbytes: float, world: int) -> float:
    """Bytes one rank sends for a collective whose full tensor has `nbytes` bytes, with the ring or pairwise algorithm.

    `kind` is "all_gather", "reduce_scatter", "all_to_all", "all_reduce" or "broadcast" (its mean over ranks).
    """
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "broadcast": 1}
    if kind not in rounds:
        raise ValueError(f"kind must be one of {', '.join(rounds)}, got {kind!r}")
    return rounds[kind] * nbytes * (world - 1) / world


def ring_seconds(kind: str, nbytes: float, world: int, alpha: float, beta: float) -> float:
    """Time of a ring collective by the alpha-beta model: `alpha` seconds a message, `beta` seconds a byte.

    A round has N - 1 steps, and each step sends one message of nbytes / N (Thakur, Rabenseifner and Gropp 2005).
    """
    messages = ring_bytes(kind, world, world)
    return messages * alpha + ring_bytes(kind, nbytes, world) * beta


def _in_bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.itemsize
    return sum(_in_bytes(t) for t in tensors)


# c10d operator -> (kind, index of the argument that holds the full tensor)
_OPERATORS: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
_FREE = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_"}


class Ledger(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes that this rank's collectives send, whoever issues them, while its `with` block runs.

        with Ledger() as ledger:
            step()
        ledger.sent["all_gather"], ledger.total        # bytes

    It listens to torch's dispatcher, so DDP, FSDP2 and DeepSpeed are counted like minizero, and nothing is left in the
    code when it is off. gloo's reduce_scatter is booked as what it is on the wire, twice the bytes of a true one.
    A collective the ledger does not know raises NotImplementedError instead of being missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All bytes this rank sent."""
        return sum(self.sent.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._book(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _book(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _FREE or name == "wait_tensor":
            return
        if name not in _OPERATORS:
            raise NotImplementedError(f"the ledger does not know what the collective {name!r} sends")
        kind, index = _OPERATORS[name]
        nbytes = _in_bytes(args[index])
        self.calls[kind] += 1
        if kind != "send":
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            world = ProcessGroup.unbox(boxed).size()
            doubled = kind == "reduce_scatter" and _on_cpu(args[index])
            nbytes = round(ring_bytes(kind, nbytes, world)) * (2 if doubled else 1)
        self.sent[kind] += nbytes


def _on_cpu(tensors: Any) -> bool:
    return tensors.device.type == "cpu" if isinstance(tensors, Tensor) else _on_cpu(tensors[0])
