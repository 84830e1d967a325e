"""Chapter 11, sharding: flatten, pad, cut; and the placeholder a model holds while its weights are elsewhere.

N is the number of ranks that share one copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat buffer that N ranks cut into equal shards. All numbers are elements.

    Parameters follow each other in the order given, each in its logical (row-major) order; zeros fill the end up to a
    multiple of N. Padding is for transport only: no slice, norm or state ever contains it.
    """

    shapes: tuple[torch.Size, ...]
    world: int

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"world must be at least 1, got {self.world}")

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins; one more entry for where the last one ends."""
        return tuple(accumulate(self.numels, initial=0))

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return self.offsets[-1]

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard: numel / N, rounded up."""
        return -(-self.numel // self.world)

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer: N shards."""
        return self.shard_numel * self.world

    def slice_of(self, index: int, rank: int) -> slice:
        """Which part of `rank`'s shard belongs to parameter `index`; an empty slice when none does."""
        start = rank * self.shard_numel
        inside = (min(max(edge - start, 0), self.shard_numel) for edge in self.offsets[index : index + 2])
        return slice(*inside)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` (padded_numel elements), one per parameter, in their shapes."""
        edges = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [flat[start:stop].view(shape) for start, stop, shape in edges]


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
        # nn.Module._apply, behind model.to(), asks whether it may set p.data to what p.to() returned, reads p.grad, sets.
        in_apply, self.in_apply = self.in_apply, name == "_has_compatible_shallow_copy_type" and args[0] is args[1]
        if self.in_apply:
            return True
        if in_apply and name == "grad" and kind == "__get__":
            return None
        if _changes_nothing(self, kind, name, args, kwargs or {}):
            return self
        refuse(self.parameter_name, "be gathered by " + repr(name))


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


@dataclass(frozen=True)
class Holder:
    """One place that holds a parameter: `module._parameters[name]`, with `path` leading to the module."""

    module: nn.Module
    name: str
    path: str

    @property
    def full_name(self) -> str:
        """The key in the model's state dict; torch.compile's wrapper leaves no trace in it."""
        return f"{self.path}.{self.name}".removeprefix(".").replace("_orig_mod.", "")


class FlatParameters:
    """The parameters of a unit that share dtype and requires_grad, as views of one flat buffer, and this rank's shard.

    `full` has layout.padded_numel elements, `shard` has layout.shard_numel. With `aliased`, `shard` is a part of
    `full`, which then stays (stages 1 and 2); without, it is a tensor of its own and the memory of `full` comes and
    goes (stage 3). `slices[i]` is the part of the shard that belongs to parameter i, 1-D, possibly empty: what an
    optimizer on this rank sees. A parameter may be held by several modules (tied weights): `holders[i]` lists them all.
    """

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, list[Holder]]], rank: int, world: int, aliased: bool
    ) -> None:
        self.leaves, self.holders = [p for p, _ in parameters], [places for _, places in parameters]
        self.names, self.rank = [places[0].full_name for places in self.holders], rank
        first = self.leaves[0]
        self.requires_grad, self.aliased = first.requires_grad, aliased
        self.layout = Layout(tuple(p.shape for p in self.leaves), world)
        self.full = torch.zeros(self.layout.padded_numel, dtype=first.dtype, device=first.device)
        for leaf, view in zip(self.leaves, self.layout.unflatten(self.full), strict=True):
            view.copy_(leaf.detach())
            leaf.data = view
            leaf.is_sharded_by_minizero = True  # type: ignore[attr-defined]
        part = self.full.view(world, -1)[rank]
        self.shard = part if aliased else part.clone()
        self.placeholders = [ShardedParameter.stand_for(p, n) for p, n in zip(self.leaves, self.names, strict=True)]
        self.slices = [
            nn.Parameter(self.shard[self.layout.slice_of(i, rank)], requires_grad=self.requires_grad)
            for i in range(len(self.leaves))
        ]
        self._nbytes = self.full.untyped_storage().nbytes()

    def take_shard(self) -> None:
        """Copy this rank's part of `full` into the shard, which the optimizer's slices look at."""
        if not self.aliased:
            self.shard.copy_(self.full.view(self.layout.world, -1)[self.rank])

    def allocate(self) -> None:
        """Give `full` its memory again, at the same storage: every view of it, autograd's too, is valid again."""
        self.full.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        """Take the memory of `full` away. Views of it remain and must not be read: `show(self.placeholders)` first."""
        self.full.untyped_storage().resize_(0)

    def let_go(self) -> None:
        """End of sharding: the modules keep the full parameters, which may be sharded anew."""
        for leaf in self.leaves:
            del leaf.is_sharded_by_minizero  # type: ignore[attr-defined]

    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put `parameters` (the leaves or the placeholders) where the modules look for them."""
        for parameter, holders in zip(parameters, self.holders, strict=True):
            for holder in holders:
                holder.module._parameters[holder.name] = parameter

    def add_gradient(self, gradient: Tensor) -> None:
        """Add this rank's shard of the gradient (shard_numel elements) to the `.grad` of the slices."""
        for i, piece in enumerate(self.slices):
            part = gradient[self.layout.slice_of(i, self.rank)]
            if piece.grad is None:
                piece.grad = part
            else:
                piece.grad += part


def holders_of(model: nn.Module) -> list[tuple[nn.Parameter, list[Holder]]]:
    """Each parameter of `model` once, with all its holders; the first is where `named_parameters()` finds it."""
    found: dict[int, tuple[nn.Parameter, list[Holder]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append(Holder(module, name, path))
    return list(found.values())


class NotCopied:
    """Refuses `copy.deepcopy` and `pickle`: a copy would share buffers, hooks and process group with the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a sharded model cannot be copied: build a plain one and load zero.full_state() into it")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a sharded model cannot be pickled: save zero.full_state() instead")
