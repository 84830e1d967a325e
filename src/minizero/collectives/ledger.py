"""Chapter 04, communication: how many bytes a collective sends, by theory and by listening.

N is the number of ranks in the group.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from minizero.collectives.exchange import ALL_GATHER_TAG, ALL_TO_ALL_TAG, ROLL_CALL_TAG


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
# What the messages of an Exchange add up to; a roll call is a small all-gather.
_TAGS = {ALL_GATHER_TAG: "all_gather", ROLL_CALL_TAG: "all_gather", ALL_TO_ALL_TAG: "all_to_all"}
_FREE = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_"}


class Ledger(TorchDispatchMode):
    """Counts the bytes that this rank's collectives send, whoever issues them, while its `with` block runs.

        with Ledger() as ledger:
            step()
        ledger.sent["all_gather"], ledger.total        # bytes

    It listens to torch's dispatcher, so DDP, FSDP2 and DeepSpeed are counted like minizero, and nothing is left in the
    code when it is off. gloo's reduce_scatter is booked as what it is on the wire, twice the bytes of a true one;
    minizero's exchanges on gloo as the collectives they make up, though they are N - 1 messages, and as many `calls`.
    A collective the ledger does not know raises NotImplementedError instead of being missed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        if kind == "send":
            kind = _TAGS.get(args[3], kind)
        else:
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            world = ProcessGroup.unbox(boxed).size()
            doubled = kind == "reduce_scatter" and _on_cpu(args[index])
            nbytes = round(ring_bytes(kind, nbytes, world)) * (2 if doubled else 1)
        self.calls[kind] += 1
        self.sent[kind] += nbytes


def _on_cpu(tensors: Any) -> bool:
    return tensors.device.type == "cpu" if isinstance(tensors, Tensor) else _on_cpu(tensors[0])
