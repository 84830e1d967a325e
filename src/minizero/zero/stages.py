"""Chapter 15, zero: put together. Three stages are two switches on the same verbs.

| stage | gradients are reduced | parameters after use | a rank keeps between steps                 |
|-------|-----------------------|----------------------|--------------------------------------------|
| 1     | at the step           | stay                 | parameters, 1/N of the optimizer state     |
| 2     | in backward           | stay                 | the same; no full gradient                 |
| 3     | in backward           | leave                | 1/N of parameters and of optimizer state   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from minizero.collectives import Transport, World
from minizero.gather import Gatherer, Schedule, State, Unit, in_backward
from minizero.optimizer import check_elementwise, check_state, clip_grad_norm, slice_groups
from minizero.reduce import Reducer
from minizero.sharding import NotCopied
from minizero.zero import elsewhere
from minizero.zero.attached import Attached
from minizero.zero.backward import Backward
from minizero.zero.build import build_units, mark_changed, precise
from minizero.zero.plan import DtypePolicy, agree, check_as_planned, plan_units
from minizero.zero.whole import hold_gathered, read_full_state, write_full_state


class Zero(NotCopied):
    """Shards `model` in place over the ranks of `group`; go on calling `model(...)` and `loss.backward()`.

    Args:
        model: any module. All ranks start from rank 0's parameters and buffers. Parameters on the meta device are
            initialised here, unit by unit. Buffers stay whole, and from then on each rank has its own.
        units: the modules whose parameters are gathered together, in the order forward uses them; what is in none of
            them belongs to the root unit. Default: the elements of every outermost `nn.ModuleList`.
        stage: 1, 2 or 3, see the table above (Rajbhandari et al. 2020, section 5).
        group: the ranks that share one copy of the model; default all.
        replicas: the ranks that hold the same shard of other copies; their gradients are averaged too.
        prefetch: how many units are gathered ahead of the one that computes (stage 3), in the order of `units`; or what
            makes a schedule for the units, as `overlap.ByCount(2)` does.
        initialize: called once with each module that had parameters or buffers on the meta device; default
            `module.reset_parameters()`.
        dtypes: what to compute and send in, if not in the parameters' own dtype: a `minizero.precision.Precision`.
        transport: how shards and gradients travel inside `group`, if not as they are and by torch's collectives.

    Raises on all ranks, before anything is changed: ValueError or TypeError naming the argument, module or parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[nn.Module] | None = None,
        *,
        stage: int = 3,
        group: ProcessGroup | None = None,
        replicas: ProcessGroup | None = None,
        prefetch: int | Callable[[Sequence[Unit]], Schedule] = 1,
        initialize: Callable[[nn.Module], Any] | None = None,
        dtypes: DtypePolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, got {stage!r} (stage 0 is minizero.Replicated)")
        if not callable(prefetch) and prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more units, got {prefetch!r}")
        self.model, self.stage, self.world = model, stage, World(group, replicas, transport)
        plans, chosen = plan_units(model, units), dtypes.choose(model) if dtypes else {}
        agree(plans, stage, chosen, self.world)
        self.units = build_units(model, plans, stage, chosen, self.world, initialize)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self._attached = Attached(self.flats)
        self._backward = Backward(self._attached.slices)
        schedule = prefetch(self.units) if callable(prefetch) else Schedule(self.units, prefetch)
        self._gatherer = Gatherer(schedule, self.world, stage == 3, self._backward.begin)
        self._reducer = Reducer(self.units, self.world, stage > 1, self._backward.begin, self._gatherer.release)
        self._backward.gatherer, self._backward.reducer = self._gatherer, self._reducer
        self._handles = [*self._gatherer.attach(), *self._reducer.attach(), *(dtypes.attach(model) if dtypes else ())]
        self._handles.append(model.register_forward_pre_hook(self._before_model, prepend=True))
        elsewhere.mark(self._reducer)
        model.zero_grad = self.zero_grad  # type: ignore[method-assign]  # gradients are where it would not look

    @torch.compiler.disable
    def _before_model(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._backward.recover()
            check_as_planned(self.model, self.units)

    def reduce(self) -> None:
        """See to it that the slices hold the gradients; call on all ranks before you read them. Step and clipping do.

        What was held back, as always in stage 1, is reduced here.
        """
        self._backward.reduce()

    def unreduced(self) -> list[Tensor]:
        """The gradients that wait on this rank, whole, for the step or for `reduce`: a flat buffer of each unit."""
        return self._reducer.waiting()

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for the step or for `reduce`, on all ranks alike."""
        return self._backward.has_unreduced

    @property
    def holds(self) -> bool:
        """While it is set, backwards reduce nothing, as in stage 1: see `accumulation.no_sync`."""
        return self._reducer.holds

    @holds.setter
    def holds(self, value: bool) -> None:
        self._reducer.holds = value

    def optimizer(
        self,
        cls: type[Optimizer],
        groups: Iterable[dict[str, Any]] | None = None,
        *,
        elementwise: bool = False,
        **options: Any,
    ) -> Optimizer:
        """An optimizer of class `cls` on this rank's slices; `step()` and `zero_grad()` work as always.

        `groups` are torch's param groups, whose "params" are parameters of the model or their names; default: all
        that are trained, in one group. `options` go to `cls`. Raises TypeError for an optimizer that is not known to
        be element-wise, unless `elementwise` says it is; KeyError for a parameter that is not there or not trained.
        """
        check_elementwise(cls, elementwise)
        return self.attach(cls(slice_groups(self.flats, groups), **options), elementwise=True)

    def attach(self, optimizer: Optimizer, *, elementwise: bool = False) -> Optimizer:
        """Have an optimizer whose parameters are slices reduce before its step, and spread what it changed after it.

        Its `zero_grad()` forgets the gradients of its own slices, wherever they are; its `add_param_group()` takes what
        `groups` above take. Raises TypeError as `optimizer()`, and for one that holds anything but slices.
        """
        check_elementwise(type(optimizer), elementwise)
        self._attached.add(optimizer, self._backward.forget)
        optimizer.register_load_state_dict_pre_hook(check_state)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._attached.check_call(optimizer, [*args[1:], *kwargs.values()])  # torch passes the optimizer itself first
        if self.is_gathered:
            raise RuntimeError("step() inside gathered(): the full parameters would overwrite what it changes")
        self.reduce()
        for flat in self.flats:
            if flat.aliased and flat.shard is not flat.master:
                flat.take_shard()  # parameters that the user changed in place would be overwritten after the step

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for flat in self.flats:
            flat.refresh()
        if self.stage < 3:
            for unit in self.units:
                unit.state = State.SHARDED  # this rank has new values for its own shard only
                unit.unshard()
            for unit in self.units:
                unit.wait()
        mark_changed(self.flats)

    def named_slices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, slice) of every trained parameter: this rank's elements of it, 1-D, possibly none."""
        for flat in self.flats:
            if flat.requires_grad:
                yield from zip(flat.names, flat.slices, strict=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; `model.zero_grad` comes here too."""
        pieces: set[Tensor] = {piece for _, piece in self.named_slices()}
        self._backward.forget(pieces)
        for piece in pieces:
            piece.grad = None if set_to_none or piece.grad is None else piece.grad.zero_()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip by the norm over all parameters and ranks; call on all ranks. See optimizer.clip_grad_norm."""
        self.reduce()
        return clip_grad_norm([piece for _, piece in self.named_slices()], max_norm, norm_type, self.world.shard)

    @property
    def is_gathered(self) -> bool:
        """Whether this is inside `gathered()`."""
        return self._gatherer.holds

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside, for reading, generating or surgery; enter and leave on all ranks.

        On leaving, rank 0's values are written to the shards of all ranks; older graphs can run no backward then.
        Inside, ranks may run the model as often as each likes. After an exception nothing is written: stage 3 forgets
        the changes, stages 1 and 2, which hand out the live parameters, keep them on the rank that made them.
        """
        self._backward.recover()
        with hold_gathered(self.units, self._gatherer, self.world):
            yield

    def full_state(self) -> dict[str, Any]:
        """The plain model's state dict, on the CPU of rank 0; other ranks get {}. Call on all ranks of `group`.

        One unit at a time is whole, so no rank but 0 needs memory for more than that. Buffers are rank 0's own.
        """
        self._backward.recover()
        return read_full_state(self.model, self.units, self._gatherer, self.world)

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load a plain model's state dict; call on all ranks, only the one of rank 0 is read.

        Raises ValueError on all ranks, and changes nothing, naming a key that is missing, unknown or of another shape.
        """
        self._backward.recover()
        if self.is_gathered:
            raise RuntimeError("load_full_state() inside gathered(): leave the context first")
        write_full_state(self.model, self.units, state, self.world)

    def unwrap(self) -> nn.Module:
        """Give the plain model back, whole on every rank, hooks gone; call on all. Optimizers of this Zero are done."""
        with self.gathered():
            self._gatherer.frees = False
        for handle in self._handles:
            handle.remove()
        for flat in self.flats:
            flat.let_go(precise(flat, self.world))
        elsewhere.unmark(self._reducer)
        self._attached.close()
        del self.model.zero_grad
        return self.model
