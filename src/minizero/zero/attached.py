"""Chapter 15, zero: the optimizers that know of the sharding, and a watch over those that do not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakSet, finalize, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from minizero.optimizer import slice_groups
from minizero.sharding import FlatParameters, NotCopied

STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__  # what calls the hooks, and every optimizer's step


class Cycle:
    """What only the garbage collector finds."""

    itself: Cycle


def watch_steps(owner: Any, check: Callable[[Any, Optimizer], None]) -> RemovableHandle:
    """Have `check(owner, optimizer)` called before every step of any optimizer, as long as `owner` lives.

    torch keeps such hooks in a table of the process: one that stayed there would be called, and cost, for ever.
    """
    alive = ref(owner)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (it := alive()) is not None:
            check(it, optimizer)

    handle = register_optimizer_step_pre_hook(before)
    _when_gone(owner, handle)
    return handle


def _when_gone(owner: object, handle: RemovableHandle) -> None:
    finalize(owner, _remove, handle).atexit = False


def _remove(handle: RemovableHandle) -> None:
    """Remove a hook from torch's table; garbage is found at any time, but a step that goes through it must not see it.

    Then it goes when garbage is found next.
    """
    frames = [*sys._current_frames().values()]
    while frames and not any(frame.f_code is STEP for frame in frames):
        frames = [frame.f_back for frame in frames if frame.f_back]
    if not frames:
        return handle.remove()
    garbage = Cycle()
    garbage.itself = garbage
    _when_gone(garbage, handle)


def slices_of(optimizer: Optimizer) -> set[Tensor]:
    """What an optimizer updates."""
    return {piece for group in optimizer.param_groups for piece in group["params"]}


class Attached(NotCopied):
    """The optimizers of one Zero. A step of any other one on its parameters or slices raises RuntimeError.

    Such a step would change nothing that lasts, or only this rank's copy: torch's optimizers skip what has no `.grad`.
    """

    def __init__(self, flats: Sequence[FlatParameters]) -> None:
        self._flats, trained = flats, [flat for flat in flats if flat.requires_grad]
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._all: set[Tensor] = {piece for flat in trained for piece in flat.slices}
        self._slices = {
            id(piece): name for flat in trained for name, piece in zip(flat.names, flat.slices, strict=True)
        }
        self._wholes = {
            id(parameter): name
            for flat in trained
            for parameters in (flat.leaves, flat.placeholders)
            for name, parameter in zip(flat.names, parameters, strict=True)
        }
        self._watch = watch_steps(self, Attached._check_other)

    def add(self, optimizer: Optimizer, forget: Callable[[set[Tensor]], None]) -> None:
        """Count `optimizer` in. Raises TypeError, naming what it holds, unless all of that is slices.

        Its `zero_grad()` calls `forget(its slices)` first. Its `add_param_group()` takes parameters of the model.
        """
        for piece in slices_of(optimizer):
            if id(piece) not in self._slices:
                name = repr(self._wholes[id(piece)]) if id(piece) in self._wholes else f"of shape {tuple(piece.shape)}"
                raise TypeError(
                    f"{type(optimizer).__name__} holds parameter {name}, which is no slice of the sharded model: let "
                    f"zero.optimizer({type(optimizer).__name__}, groups, ...) make it"
                )

        def zero_grad(set_to_none: bool = True) -> None:
            forget(slices_of(optimizer))
            type(optimizer).zero_grad(optimizer, set_to_none)

        def add_param_group(param_group: dict[str, Any]) -> None:
            type(optimizer).add_param_group(optimizer, self._sliced(optimizer, param_group))

        methods: dict[str, Any] = {"zero_grad": zero_grad, "add_param_group": add_param_group}
        vars(optimizer).update(methods, _step_supports_amp_scaling=True)  # the last: see check_call
        self._optimizers.add(optimizer)

    def slices(self) -> set[Tensor]:
        """What all of them update together; if there is none, everything that is trained."""
        return {piece for optimizer in self._optimizers for piece in slices_of(optimizer)} or set(self._all)

    def check_call(self, optimizer: Optimizer, arguments: Collection[Any]) -> None:
        """Refuse a step after `unwrap()`, one with a closure, and torch's GradScaler; on all ranks alike.

        `scaler.step()` leaves its mark on an optimizer that says it handles scaling itself. All of ours say so.
        """
        if optimizer not in self._optimizers:
            raise RuntimeError("step() after unwrap(): make an optimizer of the plain model's parameters")
        marks = [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(mark is not None for mark in marks) or any(hasattr(argument, "unscale_") for argument in arguments):
            raise RuntimeError(
                "torch's GradScaler looks at this rank's slices alone: one rank would step where another skips. Use "
                "minizero.precision.LossScaler: loss = scaler.scale_loss(loss); finite = scaler.unscale(zero); step if "
                'finite; scaler.update(finite). Or an engine, by "fp16" in its configuration'
            )
        if any(argument is not None for argument in arguments):
            raise TypeError("step() takes no closure here: run forward and backward before it")

    def close(self) -> None:
        """The model is whole again: other optimizers may step, and these may not."""
        self._watch.remove()
        self._optimizers.clear()

    def _check_other(self, optimizer: Optimizer) -> None:
        if optimizer in self._optimizers:
            return
        cls = type(optimizer).__name__
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if (name := self._wholes.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{cls}.step(): parameter {name!r} is sharded, and this optimizer knows nothing of it: it would "
                    f"change nothing. After sharding, zero.optimizer({cls}, ...) makes one that does"
                )
            if (name := self._slices.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{cls}.step(): it holds the slice of parameter {name!r} and is not attached: no gradient would be "
                    "reduced before, no parameter gathered after it. Call zero.attach(optimizer) first"
                )

    def _sliced(self, optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        """`group`, of parameters of the model, their names or slices, as one of slices that `optimizer` has not yet.

        Raises KeyError for a parameter that is not the model's or not trained, ValueError for one that it has.
        """
        (sliced,) = slice_groups(self._flats, [group])
        pieces = [entry[1] if isinstance(entry, tuple) else entry for entry in sliced["params"]]
        had = slices_of(optimizer)
        for piece in pieces:
            if piece in had:
                raise ValueError(f"parameter {self._slices[id(piece)]!r} would be in two param groups, or twice in one")
            had.add(piece)
        return sliced
