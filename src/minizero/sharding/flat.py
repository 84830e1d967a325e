"""Chapter 11, sharding: flatten, pad, cut.

N is the number of ranks that share one copy of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from minizero.sharding.placeholder import ShardedParameter, plain_name, raise_replaced


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


@dataclass(frozen=True)
class Holder:
    """One place that holds a parameter: `module._parameters[name]`, with `path` leading to the module."""

    module: nn.Module
    name: str
    path: str

    @property
    def full_name(self) -> str:
        """The key in the model's state dict."""
        return plain_name(self.path, self.name)


class FlatParameters:
    """The parameters of a unit that share dtypes and requires_grad, as views of one flat buffer, and this rank's shard.

    `full` has layout.padded_numel elements, `shard` has layout.shard_numel. With `aliased`, `shard` is a part of
    `full`, which then stays (stages 1 and 2); without, it is a tensor of its own and the memory of `full` comes and
    goes (stage 3). `slices[i]` is the part of the master that belongs to parameter i, 1-D, possibly empty: what an
    optimizer on this rank sees. A parameter may be held by several modules (tied weights): `holders[i]` lists them all.

    `master` is the shard itself, until `compute_in` makes it one of higher precision than `full` or `set_master` puts
    it elsewhere. Gradients travel as `wire`.
    """

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, list[Holder]]], rank: int, world: int, aliased: bool
    ) -> None:
        self.leaves, self.holders = [p for p, _ in parameters], [places for _, places in parameters]
        self.names, self.rank = [places[0].full_name for places in self.holders], rank
        first = self.leaves[0]
        self.requires_grad, self.aliased, self.wire = first.requires_grad, aliased, first.dtype
        self.layout = Layout(tuple(p.shape for p in self.leaves), world)
        full = torch.zeros(self.layout.padded_numel, dtype=first.dtype, device=first.device)
        for leaf, view in zip(self.leaves, self.layout.unflatten(full), strict=True):
            view.copy_(leaf.detach())
            leaf.is_sharded_by_minizero = True  # type: ignore[attr-defined]
        self._use(full)
        self.shard = self.master = self.cut(full) if aliased else self.cut(full).clone()
        self.slices = [
            nn.Parameter(self.master[self.layout.slice_of(i, rank)], requires_grad=self.requires_grad)
            for i in range(len(self.leaves))
        ]
        for piece, leaf in zip(self.slices, self.leaves, strict=True):
            piece.__dict__ = leaf.__dict__  # groups can be told apart by attributes of parameters, here too

    def _use(self, full: Tensor) -> None:
        """Make the parameters views of `full`."""
        self.full, self._nbytes = full, full.untyped_storage().nbytes()
        self._views = self.layout.unflatten(full)
        self._nowhere = [torch.full((), torch.nan).to(full).expand(p.shape) for p in self.leaves]
        for leaf, view in zip(self.leaves, self._views, strict=True):
            leaf.data = view
        self.placeholders = [ShardedParameter.stand_for(p, n) for p, n in zip(self.leaves, self.names, strict=True)]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole` (padded_numel elements), a view."""
        return whole.view(self.layout.world, -1)[self.rank]

    def compute_in(self, dtype: torch.dtype, wire: torch.dtype) -> None:
        """Gather as `dtype` and send gradients as `wire` from now on, and keep a master in fp32 at least.

        Call it while FULL, before the optimizer is made. Stage 3 keeps the master alone and rounds it when it sends it:
        `shard` and `master` are one tensor still.
        """
        self.wire = wire
        precise = torch.promote_types(self.full.dtype, torch.float32) if self.requires_grad else self.full.dtype
        if self.full.dtype == dtype == precise:
            return
        master = self.master.to(precise, copy=True)
        self._use(self.full.to(dtype))
        self.shard = self.cut(self.full) if self.aliased else master
        self._update_in(master)

    def set_master(self, master: Tensor) -> None:
        """Let the optimizer update `master` (shard_numel elements on any device, or in a file), which gets the values.

        Call it before the optimizer is made. `shard` stays on the device, in the dtype of `full`.
        """
        master.copy_(self.master)
        if self.shard is self.master:
            self.shard = self.shard.to(self.full.dtype)
        self._update_in(master)

    def _update_in(self, master: Tensor) -> None:
        self.master = master
        for i, piece in enumerate(self.slices):
            piece.data = master[self.layout.slice_of(i, self.rank)]

    def refresh(self) -> None:
        """Round the master to the shard, where these are two tensors: after a step or a load."""
        if self.shard is not self.master:
            self.shard.copy_(self.master)

    def take_shard(self) -> None:
        """Take over this rank's part of `full`. Where that is the master's rounded value, the master stays as it is."""
        part = self.cut(self.full)
        if self.master.dtype != part.dtype:
            precise = self.master.to(part.device)
            self.master.copy_(torch.where(part == precise.to(part.dtype), precise, part))
        elif not (self.aliased and self.shard is self.master):
            self.master.copy_(part)
        self.refresh()

    def allocate(self) -> None:
        """Give `full` its memory again, at the same storage: every view of it, autograd's too, is valid again."""
        self.full.untyped_storage().resize_(self._nbytes)  # [Note: storage that goes and comes back], in __init__.py
        self._point_leaves_at(self._views)

    def free(self, leaves_memory: bool = False) -> None:
        """Take the memory of `full` away. A parameter that somebody kept from before sharding reads NaN.

        With `leaves_memory` the memory is left to those who kept views of it; the next time `full` is other memory.
        """
        self._point_leaves_at(self._nowhere)
        if leaves_memory or not self.full.untyped_storage().resizable():  # a numpy array looks at it
            dtype, device = self.full.dtype, self.full.device
            del self.full, self._views  # first, for if nobody kept a view it goes with them
            self.full = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
            self._views = self.layout.unflatten(self.full)
        self.full.untyped_storage().resize_(0)

    def _point_leaves_at(self, tensors: Sequence[Tensor]) -> None:
        if not self.aliased:
            for leaf, tensor in zip(self.leaves, tensors, strict=True):
                leaf.data = tensor

    def adopt(self) -> None:
        """Take over values that came by `parameter.data = ...`, which moves the parameter out of `full`."""
        for name, leaf, view in zip(self.names, self.leaves, self._views, strict=True):
            if leaf.numel() > 0 and leaf.data_ptr() != view.data_ptr():
                if (leaf.shape, leaf.dtype, leaf.device) != (view.shape, view.dtype, view.device):
                    raise RuntimeError(f"parameter {name!r} was resized, cast or moved after sharding: do that before")
                view.copy_(leaf.detach())
                leaf.data = view

    def let_go(self, whole: Tensor) -> None:
        """End of sharding: the modules keep the parameters, as views of `whole`; they may be sharded anew."""
        for leaf, view in zip(self.leaves, self.layout.unflatten(whole), strict=True):
            leaf.data = view
            del leaf.is_sharded_by_minizero  # type: ignore[attr-defined]

    def show(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put `parameters` (the leaves or the placeholders) where the modules look for them.

        Raises RuntimeError, naming the parameter, if somebody replaced it: the replacement would be lost.
        """
        for parameter, leaf, placeholder, holders in zip(
            parameters, self.leaves, self.placeholders, self.holders, strict=True
        ):
            for holder in holders:
                current = holder.module._parameters.get(holder.name)
                if current is not leaf and current is not placeholder:
                    raise_replaced(holder.full_name)
                holder.module._parameters[holder.name] = parameter

    def add_gradient(self, gradient: Tensor) -> None:
        """Add this rank's shard of the gradient (shard_numel elements) to the `.grad` of the slices."""
        gradient = gradient.to(self.master)
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
