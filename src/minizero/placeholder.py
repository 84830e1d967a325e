"""Chapter 11, sharding: the placeholder a model holds while its weights are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class ShardedAccessError(RuntimeError):
    """The values of a parameter were used where only a shard of it is here."""


# What may be asked of a parameter that is away: its description, never its values.
_DESCRIPTION = {
    *("shape", "dtype", "layout", "requires_grad", "is_leaf", "ndim", "names", "size", "numel", "nelement", "dim"),
    *("ndimension", "stride", "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_signed"),
    *("is_sparse", "is_quantized", "is_contiguous", "__hash__", "__len__", "is_mkldnn", "is_nested", "_is_view"),
    *("grad_fn", "output_nr", "retains_grad", "is_inference", "is_shared", "has_names", "_backward_hooks"),
}


class ShardedParameter(nn.Parameter):
    """Stands in a module for a parameter that is sharded: the logical shape and dtype, no values.

    Shapes, dtypes, devices and parameter counts are those of the parameter. Anything that would read, change, copy or
    move its values raises ShardedAccessError with the parameter's name. (DeepSpeed shows `Size([0])` here.)
    """

    parameter_name: str
    home: torch.device
    in_apply = False

    @staticmethod
    def stand_for(parameter: nn.Parameter, name: str) -> ShardedParameter:
        """A placeholder for `parameter`, which the model calls `name`."""
        outline = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        placeholder = torch.Tensor._make_subclass(ShardedParameter, outline, parameter.requires_grad)
        placeholder.parameter_name, placeholder.home = name, parameter.device
        return placeholder

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedParameter({self.parameter_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse(self.parameter_name, "be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self.parameter_name, "be pickled")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Properties arrive as their getter or setter: the property's name is on the object the method is bound to.
        kind: str = func.__name__
        name = func.__self__.__name__ if kind in ("__get__", "__set__") else kind
        self = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedParameter))
        if kind != "__set__" and name in _DESCRIPTION:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if kind == "__get__" and name in ("device", "is_cuda", "is_cpu", "is_meta"):
            return self.home if name == "device" else self.home.type == name.removeprefix("is_")
        # nn.Module._apply, behind model.to(), asks whether it may set p.data to what p.to() returned, and reads p.grad.
        in_apply, self.in_apply = self.in_apply, name == "_has_compatible_shallow_copy_type" and args[0] is args[1]
        if self.in_apply:
            return True
        if in_apply and name == "grad" and kind == "__get__":
            return None
        if _changes_nothing(self, kind, name, args, kwargs or {}):
            return self
        refuse(self.parameter_name, "be used by " + repr(name))


def _changes_nothing(p: ShardedParameter, kind: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call leaves the parameter as it is, as `model.to(device)` does when it is there already."""
    if name in ("cpu", "cuda", "float", "double", "half", "bfloat16"):
        dtype = {"float": torch.float32, "double": torch.float64}.get(name, getattr(torch, name, None))
        return p.home.type == name or p.dtype == dtype
    if name == "data" and kind == "__set__":
        return args[1] is p
    if name == "requires_grad_" or (name == "requires_grad" and kind == "__set__"):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        return bool(wanted) == p.requires_grad
    if name != "to":
        return False
    device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
    same_place = device is None or (device.type == p.home.type and device.index in (None, p.home.index))
    return same_place and dtype in (None, p.dtype) and not kwargs.get("copy")


def refuse(name: str, action: str) -> NoReturn:
    """Raise ShardedAccessError: the parameter `name` cannot `action` while it is sharded."""
    raise ShardedAccessError(
        f"parameter {name!r} is sharded: each rank holds 1/N of it, and it cannot {action} here. Its values are there "
        "inside the forward of the unit it belongs to, or inside `with zero.gathered():`. For all values use "
        "zero.full_state() and zero.load_full_state(); gradients and optimizer state live in the optimizer's slices. "
        "Change shapes, dtypes, devices, requires_grad and parametrizations before sharding."
    )


def plain_name(path: str, name: str) -> str:
    """`path.name` without what the wrappers of torch.compile and of torch's activation checkpointing add to it."""
    full = f"{path}.{name}".removeprefix(".")
    return full.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


class NotCopied:
    """Refuses `copy.deepcopy` and `pickle`: a copy would share buffers, hooks and process group with the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a sharded model cannot be copied: build a plain one and load zero.full_state() into it")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a sharded model cannot be pickled: save zero.full_state() instead")
