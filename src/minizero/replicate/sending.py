"""Chapter 02, data parallel: one rank's values reach all others, whatever the strides and the dtype of a tensor.

A backend sends memory from where a tensor begins, and knows some dtypes only. So what travels is the values in
row-major order, as bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError, with name, layout and dtype, for what is no block of numbers in memory, and for trained fp8."""
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or is_wrapper:
        kind = type(tensor).__name__ if is_wrapper else "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name!r} is no dense tensor ({kind}, {tensor.dtype}): hold its parts as dense tensors")
    if tensor.requires_grad and tensor.itemsize == 1:
        raise TypeError(f"{name!r} is {tensor.dtype}, whose gradients cannot be added: freeze it, or train it wider")


def as_bytes(tensor: Tensor) -> Tensor:
    """The values in row-major order, uint8, 1-D: the tensor's own memory if that is how they lie, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Write `values` (of the same shape) to where the elements of `tensor` are, and nowhere else.

    Elements that share memory (`expand`, overlapping windows) go on sharing it if their values are equal; if not, the
    tensor gets memory of its own.
    """
    place, values = tensor.detach(), values.detach().to(tensor)
    new = values
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            place, new = place.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    fits = new is values or _equal(new.expand_as(values), values)
    if fits:
        place.copy_(new)
    # 0: no two elements share memory; torch does not look closely, and says 2 for a slice with steps
    if not fits or (torch._debug_has_internal_overlap(place) and not _equal(tensor, values)):
        tensor.data = values.clone(memory_format=torch.contiguous_format)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b))  # NaN equals NaN here


def send_from_first(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Give `tensor` on every rank the values of the group's first rank; shape and dtype are the same on all ranks."""
    if tensor.numel() == 0:
        return
    values = as_bytes(tensor)
    dist.broadcast(values, group=group, group_src=0)
    if values.data_ptr() != tensor.data_ptr():
        fill(tensor, values.view(tensor.dtype).view(tensor.shape))
