"""What a rank of parity.py or bench.py does around its work: a clean start, a count of its memory, a clean end."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from minizero import GPT, GPTConfig, init_distributed


def run_rank(work: Callable[[torch.device], None], timeout: float) -> None:
    """Join the group, do `work(device)`, and leave: exit code 0, or a traceback and 1. Does not return.

    A rank still here after `timeout` seconds prints where it stands; one collective may wait a third of that. The exit
    is a hard one because gloo's and DeepSpeed's threads can abort an interpreter that shuts down in the usual way.
    """
    faulthandler.dump_traceback_later(timeout, exit=True)
    code = 1
    try:
        device = init_distributed(timeout / 3)
        os.environ.setdefault("DS_ACCELERATOR", device.type)  # before anyone imports deepspeed
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        work(device)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def build_model(config: GPTConfig, dtype: torch.dtype, device: torch.device) -> GPT:
    """The same weights on every rank and in every run: drawn from seed 0 in fp32 on the CPU, then cast and moved."""
    torch.manual_seed(0)
    return GPT(config).to(dtype).to(device)


def over_ranks(operation: Literal["mean", "max"], values: Sequence[float], device: torch.device) -> list[float]:
    """Element by element over the ranks, the same list on all: their losses become the loss on the whole batch."""
    result = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM)
    return [value / (dist.get_world_size() if operation == "mean" else 1) for value in result.tolist()]


# ---- memory, seen from two sides ---------------------------------------------------------------------------------


def live_storages() -> dict[int, int]:
    """Address -> bytes of every tensor storage that a Python object of this process can reach, gradients included.

    Two views of one storage count once, storages without memory (meta tensors, freed ones) not at all. Buffers that
    only C++ holds, like the buckets of torch's DDP, are not seen: `allocated_bytes` sees those.
    """
    found: dict[int, int] = {}
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # tensor subclasses answer for themselves, not for their storage
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        grads = [Tensor.grad.__get__(tensor) for tensor in tensors if tensor.is_leaf]  # a sharded parameter says where
        tensors += [grad for grad in grads if grad is not None]
        for tensor in tensors:
            # a DTensor is a wrapper without memory; its local tensor is in the list too
            if tensor.device.type != "meta" and not hasattr(tensor, "__tensor_flatten__"):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


class _MallInfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def allocated_bytes(device: torch.device) -> int | None:
    """Live bytes of the allocator that gives tensors their memory: CUDA's caching one, or glibc's malloc on the CPU.

    The second counts everything in the process, all threads, to the byte. None without glibc 2.33 or newer.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class MemoryMark:
    """Remembers what lives at this moment; asked later, says how many bytes live besides."""

    def __init__(self, device: torch.device) -> None:
        torch.optim.SGD([torch.zeros(1)])  # the first optimizer makes torch import 24 MB of code: let that be past
        self.device = device
        self._storages, self._allocated = set(live_storages()), allocated_bytes(device)

    def tensors(self) -> int:
        """Bytes of the tensor storages that were not there.

        A thread of gloo can hold the tensors of an operation for a moment after its end, so the least of some looks
        counts.
        """
        looks = []
        for _ in range(5):
            new = [nbytes for address, nbytes in live_storages().items() if address not in self._storages]
            looks.append(sum(new))
            time.sleep(0.02)
        return min(looks)

    def allocated(self) -> int:
        """Bytes of the allocator, -1 where it cannot be asked."""
        now = allocated_bytes(self.device)
        return -1 if now is None or self._allocated is None else now - self._allocated
