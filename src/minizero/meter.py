"""Chapter 01, the memory wall: what lives in this process now, in bytes, seen from two sides.

Python knows every tensor that the program can reach, the allocator every byte that it gave out. Neither side sees what
the other is blind to, so chapters measure with both. All figures are of this rank alone: no function here is a
collective, and ranks may call them at different times.
"""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Any

import torch
from torch import Tensor


def live_storages() -> dict[int, int]:
    """Address -> bytes of every tensor storage that a Python object of this process can reach, gradients included.

    Two views of one storage count once, storages without memory (meta tensors, freed ones) not at all. Buffers that
    only C++ holds, like the buckets of torch's DDP, are not seen: `allocated_bytes` sees those.
    """
    found: dict[int, int] = {}
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # tensor subclasses answer for themselves, not for their storage
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        grad_of: Any = Tensor.grad  # a sharded parameter has a `grad` of its own, which says where it is
        grads = [grad_of.__get__(tensor) for tensor in tensors if tensor.is_leaf]
        tensors += [grad for grad in grads if grad is not None]
        for tensor in tensors:
            # a DTensor is a wrapper without memory; its local tensor is in the list too
            if tensor.device.type != "meta" and not hasattr(tensor, "__tensor_flatten__"):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: sizes in bytes, and counts."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def allocated_bytes(device: torch.device) -> int | None:
    """Live bytes of the allocator that gives tensors their memory: CUDA's caching one, or glibc's malloc on the CPU.

    The second counts everything in the process, all threads, to the byte: also what is no tensor. None where nobody
    can be asked: without glibc 2.33 or newer.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


class MemoryMark:
    """Remembers what lives at this moment; asked later, says how many bytes live besides.

    `device` is where tensors are expected: the allocator asked is that device's, while storages count on any device.
    """

    def __init__(self, device: torch.device) -> None:
        torch.optim.SGD([torch.zeros(1)])  # the first optimizer makes torch import 24 MB of code: let that be past
        self.device = device
        self._storages, self._allocated = set(live_storages()), allocated_bytes(device)

    def tensors(self) -> int:
        """Bytes of the tensor storages that were not there.

        A thread of gloo can hold the tensors of an operation for a moment after its end, so the least of some looks
        counts. That takes a tenth of a second.
        """
        looks = []
        for _ in range(5):
            new = [nbytes for address, nbytes in live_storages().items() if address not in self._storages]
            looks.append(sum(new))
            time.sleep(0.02)
        return min(looks)

    def allocated(self) -> int:
        """Bytes that the allocator gave out since, less what it got back, or -1 where it cannot be asked."""
        now = allocated_bytes(self.device)
        return -1 if now is None or self._allocated is None else now - self._allocated
