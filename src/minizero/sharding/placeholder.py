"""Chapter 11, sharding: the placeholder a model holds while its weights are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class ShardedAccessError(RuntimeError):
    """A program used the values of a parameter while this rank holds only a shard of it."""


ANEW = "call zero.unwrap() first, change the plain model, and shard it again with a new optimizer"

# What may be asked of a parameter that is away: its description, never its values.
_DESCRIPTION = {
    *("shape", "dtype", "layout", "requires_grad", "is_leaf", "ndim", "names", "size", "numel", "nelement", "dim"),
    *("ndimension", "stride", "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_signed"),
    *("is_sparse", "is_quantized", "is_contiguous", "__hash__", "__len__", "is_mkldnn", "is_nested", "_is_view"),
    *("grad_fn", "output_nr", "retains_grad", "is_inference", "is_shared", "has_names", "_backward_hooks"),
}


class ShardedParameter(nn.Parameter):
    """Stands in a module for a parameter that is sharded: the logical shape and dtype, no values.

    Shapes, dtypes, devices and parameter counts are those of the parameter, and so are the attributes that people set
    on it: the two share one `__dict__`. Anything that would read, change, copy or move its values raises
    ShardedAccessError with the parameter's name. (DeepSpeed shows `Size([0])` here.)
    """

    __slots__ = ("_sharded_home", "_sharded_in_apply", "_sharded_name")  # `__dict__` is the parameter's
    _sharded_name: str
    _sharded_home: torch.device
    _sharded_in_apply: bool

    @staticmethod
    def stand_for(tensor: Tensor, name: str) -> ShardedParameter:
        """A placeholder for `tensor`, a parameter that the model calls `name`, or a view of one."""
        outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        placeholder: ShardedParameter = torch.Tensor._make_subclass(
            _placeholder_class(type(tensor)), outline, tensor.requires_grad
        )
        placeholder._sharded_name, placeholder._sharded_home = name, tensor.device
        placeholder._sharded_in_apply = False
        placeholder.__dict__ = tensor.__dict__
        return placeholder

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedParameter({self._sharded_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse(self._sharded_name, "be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self._sharded_name, "be pickled")

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
            return self._sharded_home if name == "device" else self._sharded_home.type == name.removeprefix("is_")
        # nn.Module._apply, behind model.to(), asks whether it may set p.data to what p.to() returned, and reads p.grad.
        asks_to_set = name == "_has_compatible_shallow_copy_type" and args[0] is args[1]
        in_apply, self._sharded_in_apply = self._sharded_in_apply, asks_to_set
        if self._sharded_in_apply:
            return True
        if in_apply and name == "grad" and kind == "__get__":
            return None
        if _changes_nothing(self, kind, name, args, kwargs or {}):
            return self
        if name == "grad":
            refuse_gradient(self._sharded_name)
        refuse(self._sharded_name, "be used by " + repr(name))


@cache
def _placeholder_class(kind: type[Tensor]) -> type[ShardedParameter]:
    """ShardedParameter, and a `kind` as well if that is a class of the user's: its attributes can tell groups apart."""
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        return ShardedParameter
    return type(f"Sharded{kind.__name__}", (ShardedParameter, kind), {"__slots__": ()})


def _changes_nothing(p: ShardedParameter, kind: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call leaves the parameter as it is, as `model.to(device)` does when it is there already."""
    if name in ("cpu", "cuda", "float", "double", "half", "bfloat16"):
        dtype = {"float": torch.float32, "double": torch.float64}.get(name, getattr(torch, name, None))
        return p._sharded_home.type == name or p.dtype == dtype
    if name == "data" and kind == "__set__":
        return args[1] is p
    if name == "requires_grad_" or (name == "requires_grad" and kind == "__set__"):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        return bool(wanted) == p.requires_grad
    if name != "to":
        return False
    device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
    same_place = device is None or (
        device.type == p._sharded_home.type and device.index in (None, p._sharded_home.index)
    )
    return same_place and dtype in (None, p.dtype) and not kwargs.get("copy")


def refuse(name: str, action: str) -> NoReturn:
    """Raise ShardedAccessError: the parameter `name` cannot `action` while it is sharded."""
    raise ShardedAccessError(
        f"parameter {name!r} is sharded: each rank holds 1/N of it, and it cannot {action} here. Its values are there "
        "inside the forward of the unit it belongs to, or inside `with zero.gathered():`. For all values use "
        "zero.full_state() and zero.load_full_state(); gradients and optimizer state live in the optimizer's slices. "
        f"Change shapes, dtypes, devices, requires_grad and parametrizations before sharding, or {ANEW}"
    )


def raise_replaced(name: str) -> NoReturn:
    """Raise RuntimeError: the model does not hold the parameter `name` that was sharded."""
    raise RuntimeError(
        f"parameter {name!r} was added, replaced or removed after sharding: what is there now would never be trained. "
        f"Resize, parametrize, cast or extend the model before sharding, or {ANEW}"
    )


def refuse_gradient(name: str) -> NoReturn:
    """Raise ShardedAccessError: the gradient of the parameter `name` is not on it."""
    raise ShardedAccessError(
        f"parameter {name!r} is sharded: its gradient is not here but in pieces on all ranks, where torch's clipping "
        "and an optimizer of model.parameters() do not find it. Clip with zero.clip_grad_norm() (an engine clips by "
        'itself, by "gradient_clipping"), step with an optimizer from zero.optimizer(), forget with zero.zero_grad(). '
        "To read, set or clip the pieces by value call zero.reduce() and go through zero.named_slices()"
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
