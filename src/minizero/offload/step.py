"""Chapter 24, offload: master weights and optimizer state wait in host memory, or on disk, for the step.

Only the optimizer reads them, once in a step, element by element, so they need not be where the model computes. What
stays there is the weights that are gathered and, on their way out, gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from minizero.offload.courier import Courier
from minizero.offload.mapped import MappedFile, room_for
from minizero.optimizer import check_elementwise, slice_groups
from minizero.sharding import FlatParameters
from minizero.zero import Zero
from minizero.zero.attached import slices_of

States = dict[Tensor, dict[str, torch.dtype]]  # of each slice: name -> dtype


def probe_states(optimizer: Optimizer) -> States:
    """Which states as large as itself an optimizer will keep for each of its slices: name -> dtype.

    Found by one step of a second optimizer of its class, on parameters of three elements. Raises TypeError if the step
    changes the param groups: offloading makes one step for each unit, so a counter in the groups would run ahead.
    """

    def settings() -> str:
        return repr([{key: value for key, value in g.items() if key != "params"} for g in probe.param_groups])

    groups, cls = optimizer.param_groups, cast(Callable[..., Optimizer], type(optimizer))
    twins = {p: nn.Parameter(torch.ones(3, dtype=p.dtype)) for group in groups for p in group["params"]}
    probe = cls([{**group, "params": [twins[p] for p in group["params"]]} for group in groups])
    before = settings()
    for twin in twins.values():
        twin.grad = torch.ones_like(twin)
    probe.step()
    if settings() != before:
        raise TypeError(
            f"{type(optimizer).__name__}.step() changes its param groups: it cannot be made for one unit at a time"
        )
    return {p: {name: value.dtype for name, value in _like(twin, probe)} for p, twin in twins.items()}


def _like(piece: Tensor, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The states of a slice that have its shape."""
    states = optimizer.state.get(piece, {}).items()
    return [(name, value) for name, value in states if isinstance(value, Tensor) and value.shape == piece.shape]


class Offload:
    """Keeps masters and states of `zero` in host memory or in a file, and makes the optimizer's step on them.

    The step goes through the units one by one: only one unit's pages of the file are in memory, states that the
    optimizer makes as it goes find their place at once, and one unit's new weights travel while the next is updated.
    """

    def __init__(self, zero: Zero, states: States, directory: str | Path | None) -> None:
        self._zero = zero
        self._files: list[MappedFile] = []
        self._courier: Courier | None = None
        self._places: dict[Tensor, dict[str, Tensor]] = {}  # of the states that are in files
        self.flats = [flat for flat in zero.flats if flat.requires_grad]
        masters = [(flat.layout.shard_numel, flat.master.dtype) for flat in self.flats]
        for flat, master in zip(self.flats, self.make_room(states, directory, masters), strict=True):
            flat.set_master(master)
            flat.refresh = partial(self._refresh, flat)  # type: ignore[method-assign]
            flat.take_shard = partial(self._take_shard, flat)  # type: ignore[method-assign]
        self._updated: set[FlatParameters] = set()  # by this step, and sent to the device already
        self.after_step()
        if self.flats[0].full.is_cuda:
            self.use(Courier(self.flats[0].full.device))

    def make_room(self, states: States, directory: str | Path | None, masters: Sequence[Any] = ()) -> list[Tensor]:
        """Tensors for `masters` (elements, dtype), and with a directory a file that has places for `states` too."""
        if directory is None:
            return [torch.empty(numel, dtype=dtype) for numel, dtype in masters]
        sizes = [*masters, *((piece.numel(), dtype) for piece, named in states.items() for dtype in named.values())]
        number = f"-{len(self._files)}" if self._files else ""
        path = Path(directory) / f"rank{dist.get_rank()}{number}.offload"
        file: MappedFile = self._on_all(partial(MappedFile, path, sum(room_for(*each) for each in sizes)))
        self._files.append(file)
        tensors = [file.tensor(*each) for each in masters]
        for piece, named in states.items():
            self._places[piece] = {name: file.tensor(piece.numel(), dtype) for name, dtype in named.items()}
        return tensors

    def use(self, courier: Courier) -> None:
        """Have gradients and weights travel by `courier`."""
        self._courier = courier
        for flat in self.flats:
            flat.add_gradient = partial(courier.bring_down, flat)  # type: ignore[method-assign]

    def _on_all(self, action: Callable[[], Any]) -> Any:
        """Do `action` on all ranks; raise OSError on every rank if one of them got one."""
        complaint, result = "", None
        try:
            result = action()
        except OSError as error:
            complaint = str(error)
        if complaints := dict.fromkeys(filter(None, self._zero.world.everyone(complaint))):
            result = None  # a file that could be made here goes, now
            raise OSError("; ".join(complaints))
        return result

    def check(self) -> None:
        """Raise OSError on every rank if the file of one of them is not as it was."""
        for file in self._files:
            self._on_all(file.check)

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """One step of `optimizer`, without its hooks, unit by unit."""
        whole_step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # torch wraps it to call the hooks
        params = [group["params"] for group in optimizer.param_groups]
        for flat in self.flats:
            mine: set[Tensor] = set(flat.slices)
            try:
                for group, everything in zip(optimizer.param_groups, params, strict=True):
                    group["params"] = [p for p in everything if p in mine]
                whole_step(optimizer)
            finally:
                for group, everything in zip(optimizer.param_groups, params, strict=True):
                    group["params"] = everything
            self.settle(optimizer, flat)
            flat.refresh()
            self._updated.add(flat)
            for file in self._files:
                file.release()

    def settle(self, optimizer: Optimizer, *flats: FlatParameters) -> None:
        """Move states that the optimizer has just made, or loaded, into the file; default: of all units."""
        for piece in [piece for flat in flats or self.flats for piece in flat.slices if piece in self._places]:
            for name, value in _like(piece, optimizer):
                if name not in self._places[piece]:
                    raise TypeError(f"{type(optimizer).__name__} made state {name!r} later than in its first step")
                place = self._places[piece][name]
                if value.data_ptr() != place.data_ptr():
                    optimizer.state[piece][name] = place.copy_(value)

    def close(self) -> None:
        """Remove the files, as happens by itself when nobody needs them. No step can be made any more."""
        for file in self._files:
            file.close()

    def _refresh(self, flat: FlatParameters) -> None:
        """Replaces `flat.refresh`, which every flat gets after a step: `step` has sent these values already."""
        if flat in self._updated:
            return
        if self._courier:
            self._courier.send_up(flat)
        else:
            FlatParameters.refresh(flat)

    def _take_shard(self, flat: FlatParameters) -> None:
        """In place of `flat.take_shard`: before a step only where parameters were changed in place.

        To compare all of them with their masters, as is done where both are on the device, would bring them down.
        """
        if self._zero.is_gathered or self._versions[flat] != _versions(flat):
            FlatParameters.take_shard(flat)

    def after_step(self) -> None:
        """A step is over, hooks and all, or was broken off."""
        self._updated.clear()
        self._versions = {flat: _versions(flat) for flat in self.flats}


def _versions(flat: FlatParameters) -> list[int]:
    return [leaf._version for leaf in flat.leaves]


def offload_optimizer(
    zero: Zero,
    cls: type[Optimizer],
    groups: Iterable[dict[str, Any]] | None = None,
    *,
    directory: str | Path | None = None,
    elementwise: bool = False,
    **options: Any,
) -> Optimizer:
    """`zero.optimizer(cls, groups, ...)`, with master weights and states in host memory or on disk; on all ranks.

    Args:
        zero: the sharded model. Its slices move: this comes before any other optimizer of it, unless that is offloaded.
        cls, groups, elementwise, options: as for `zero.optimizer`.
        directory: where each rank makes its file, which belongs to this run and goes with it; None: host memory. A
            directory on a `tmpfs` is memory.

    Returns the optimizer; it trains bit for bit as without. `optimizer.offload.close()` removes the files of all
    optimizers of `zero`, which otherwise go with them.

    Raises:
        TypeError, KeyError: as `zero.optimizer`; TypeError also for an optimizer that counts its steps in its groups.
        OSError: on all ranks, if one of them has no room for its file or may not use it. Nothing is changed then.
    """
    check_elementwise(cls, elementwise)
    return attach_offloaded(zero, cls(slice_groups(zero.flats, groups), **options), directory, elementwise=True)


def attach_offloaded(
    zero: Zero, optimizer: Optimizer, directory: str | Path | None = None, *, elementwise: bool = False
) -> Optimizer:
    """The same for an optimizer that was made on slices of `zero`, instead of `zero.attach(optimizer)`."""
    zero.attach(optimizer, elementwise=elementwise)
    first: Any = getattr(zero, "offload", None)  # by which the masters are away already
    if first is not None:
        first.make_room(probe_states(optimizer), directory)
    offload = zero.offload = first or Offload(zero, probe_states(optimizer), directory)  # type: ignore[attr-defined]
    add_group = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        before = slices_of(optimizer)
        add_group(param_group)
        try:
            states = probe_states(optimizer)
            offload.make_room({piece: states[piece] for piece in slices_of(optimizer) - before}, directory)
        except OSError:
            optimizer.param_groups.pop()
            raise

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    for piece, states in optimizer.state.items():  # Adagrad makes them in its constructor, where the slices were
        states |= {name: value.to(piece.device) for name, value in states.items() if isinstance(value, Tensor)}
    optimizer.register_load_state_dict_post_hook(offload.settle)
    step = Optimizer.profile_hook_step(lambda optimizer, *_: offload.step(optimizer))  # calls the hooks, once

    def checked_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        offload.check()
        try:
            step(optimizer, *args, **kwargs)
        finally:
            offload.after_step()

    optimizer.step = MethodType(checked_step, optimizer)  # type: ignore[method-assign]
    optimizer.offload = offload  # type: ignore[attr-defined]
    return optimizer
