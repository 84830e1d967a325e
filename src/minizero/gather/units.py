"""Chapter 12, gather: a unit's parameters arrive before it is used, leave after, and come again for backward.

A unit is SHARDED (this rank holds 1/N of it), IN_FLIGHT (its all-gather is running) or FULL. `unshard` starts the
all-gather, `wait` ends it, `reshard` lets the full parameters go. Hooks call these verbs at the right moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from minizero.collectives import RollCall, World, on_all_ranks
from minizero.collectives.transport import Flight
from minizero.gather.ahead import Moment, Schedule
from minizero.gather.leaving import check_unchanged, put_stand_ins, versions, with_own_memory
from minizero.gather.outputs import HINT, is_plain, tensors_in
from minizero.gather.use import Use, in_backward
from minizero.sharding import FlatParameters, NotCopied


class State(StrEnum):
    """Where a unit's parameters are."""

    SHARDED = "SHARDED"
    IN_FLIGHT = "IN_FLIGHT"
    FULL = "FULL"


class Unit(NotCopied):
    """Parameters that are gathered and freed together: those of `module` that belong to no unit inside it.

    `flats` holds them by dtypes and requires_grad. Between uses a rank has `flat.shard` of each, 1/N of the elements.
    """

    def __init__(self, name: str, module: nn.Module, flats: list[FlatParameters], world: World) -> None:
        self.name, self.module, self.flats = name, module, flats
        self.state = State.FULL
        self.is_trained = any(flat.requires_grad for flat in flats)
        self.has_frozen = not all(flat.requires_grad for flat in flats)
        self.use = Use()
        self.versions_before: dict[str, int] = {}  # at the beginning of its forward
        self._transport = world.transport
        self._works: list[Flight] = []
        self._check: Callable[[], None] | None = None
        self._modules = list(module.modules())

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {sum(f.layout.numel for f in self.flats)} parameters, {self.state})"

    def unshard(self, roll_call: Callable[[], Callable[[], None]] | None = None, exact: bool = True) -> None:
        """Start the all-gather, if the unit is SHARDED; `exact` says that the transport may not round."""
        if self.state != State.SHARDED:
            return
        self._check = roll_call() if roll_call else None
        transport = self._transport.exact if exact else self._transport
        for flat in self.flats:
            if flat.aliased and not flat.requires_grad:
                continue  # stages 1 and 2 never let go of it, and no step changes it
            flat.allocate()
            self._works.append(transport.all_gather(flat.full, flat.shard))
        self.state = State.IN_FLIGHT

    def compare(self) -> None:
        """Wait for the other ranks' answers to the roll call. Raises RuntimeError if one gathers something else."""
        if self._check:
            self._check()
            self._check = None

    def wait(self) -> None:
        """Wait for the all-gather and put the parameters into the modules. Raises RuntimeError naming the unit."""
        if self.state != State.IN_FLIGHT:
            return
        self.compare()
        with on_all_ranks(f"gather unit {self.name!r}"):
            while self._works:
                self._works.pop().wait()
        for flat in self.flats:
            flat.show(flat.leaves)
        self.state = State.FULL

    def _abandon(self) -> None:
        """Wait for an all-gather that nobody needs any more, and ignore its errors.

        It still writes into memory that is about to go, and the next one would take its messages for its own.
        """
        with suppress(RuntimeError):
            if self._check:
                self._check()
        while self._works:
            with suppress(RuntimeError):
                self._works.pop().wait()

    def reshard(self, leaves_memory: bool = False) -> None:
        """Free the full parameters and leave placeholders in the modules; only the shards stay.

        With `leaves_memory`, views of parameters stay valid: their memory goes when the last of them does.
        """
        if self.state == State.SHARDED:
            return
        if self.state == State.IN_FLIGHT:
            self._abandon()
        else:
            put_stand_ins(self._modules, self.flats)
        for flat in self.flats:
            flat.show(flat.placeholders)
            flat.free(leaves_memory)
        self.state = State.SHARDED


class Gatherer(NotCopied):
    """Calls the units' verbs from module hooks: before and after each forward, and before each backward.

    While a unit computes, the units that `schedule` returns are gathered. `units` are its units, the root first.
    `begin_backward` is called whenever a backward reaches a unit. With `frees` False (stages 1 and 2) parameters stay.
    """

    def __init__(self, schedule: Schedule, world: World, frees: bool, begin_backward: Callable[[], bool]) -> None:
        self.schedule, self.frees, self.begin_backward = schedule, frees, begin_backward
        self.units = units = schedule.units
        self.holds = False  # inside `gathered()` nothing is resharded
        self._in_forward = self._root_has_graph = False
        self._index = {id(unit): i for i, unit in enumerate(units)}
        self._roll_call = RollCall([u.name for u in units], world.transport) if frees and world.size > 1 else None

    def attach(self) -> Iterator[RemovableHandle]:
        """Register the hooks of every unit."""
        for unit in self.units:
            before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
            yield unit.module.register_forward_pre_hook(before, prepend=True)  # the user's may read parameters
            yield unit.module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def unshard(self, unit: Unit, exact: bool = True) -> None:
        """Start a unit's all-gather, with its name called out to the other ranks."""
        index, seen = self._index[id(unit)], self.schedule.seen
        unit.unshard(partial(self._roll_call.call, index, seen) if self._roll_call else None, exact)

    def need(self, unit: Unit, moment: Moment | None) -> None:
        """Have the unit here, and those that the schedule expects next on their way; with None, only the unit."""
        self.unshard(unit, exact=self.holds)
        unit.compare()  # ranks that agree here agree on what is next: that need not wait until this one is here
        if self.frees and not self.holds and moment:
            for ahead in self.schedule.after(unit, moment):
                self.unshard(ahead, exact=False)
        unit.wait()

    def reshard_all(self) -> None:
        """Leave every unit SHARDED, also after an error that no hook heard of."""
        for unit in self.units:
            if self.frees and not self.holds:
                unit.reshard()

    def forget_backward(self) -> None:
        """A backward is over, or will not go on."""
        for unit in self.units:
            unit.use = Use()
        self.schedule.end()

    def release(self, unit: Unit) -> None:
        """Reshard a unit, unless backward can still need its parameters."""
        if self.frees and not self.holds and not unit.use.in_backward:
            unit.reshard()

    @torch.compiler.disable
    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        i, has_graph, recomputes = self._index[id(unit)], torch.is_grad_enabled(), in_backward()
        if i == 0:
            self._in_forward, self._root_has_graph = True, has_graph
        if self._root_has_graph and not recomputes:
            unit.use.calls += 1
            unit.use.is_recomputed |= not has_graph
        moment = Moment.RECOMPUTATION if recomputes else Moment.FORWARD if self._root_has_graph else Moment.EVALUATION
        # Without the root's forward around it, nobody would reshard a unit that was gathered ahead in vain.
        self.need(unit, moment if self._in_forward or recomputes else None)
        unit.versions_before = versions(unit.flats)

    @torch.compiler.disable
    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        leaving = self.units if unit is self.units[0] else [unit]
        self._in_forward &= leaving is not self.units
        if self.frees and not self.holds:
            flats = [flat for unit in leaving if unit.state == State.FULL for flat in unit.flats]
            output = with_own_memory(output, (args, kwargs), unit.name, flats)
        if torch.is_grad_enabled():
            self._expect_backward(unit, (args, kwargs), output)
        if not in_backward():  # else it is recomputed for its own backward, which comes right now
            for done in leaving:
                self.release(done)
        before, unit.versions_before = unit.versions_before, {}  # if the next gather fails there is nothing to compare
        if not self.holds:
            check_unchanged(before, unit.flats, unit.name)
        return output

    def _expect_backward(self, unit: Unit, inputs: Any, output: Any) -> None:
        # [Note: how backward is heard of], in __init__.py. Frozen parameters have no gradient that tells when backward
        # has left: with them, and only then, it has also to reach the inputs before the parameters may go.
        sources = [t for t in tensors_in(inputs) if t.requires_grad] if self.frees and unit.has_frozen else []
        call = object() if sources else None
        if sources:
            register_multi_grad_hook(sources, partial(self._after_backward, unit, call))
        tensors = tensors_in(output)
        if self.frees and unit.is_trained and not tensors and not is_plain(output):
            raise TypeError(f"unit {unit.name!r}: no tensor found in its output, a {type(output).__name__}: {HINT}")
        # A caller who changes a view in place takes its hooks out of the graph; those of the tensor it looks at stay.
        bases = [t._base for t in tensors if t._base is not None]
        for tensor in {id(t): t for t in (*tensors, *bases)}.values():
            if tensor.grad_fn is not None:  # a hook on a leaf would stay there for ever, and be called too late
                tensor.register_hook(partial(self._before_backward, unit, call))

    def _before_backward(self, unit: Unit, call: object | None, gradient: Tensor) -> None:
        if torch.is_grad_enabled() and self.frees and not self.holds:
            raise RuntimeError(
                f"unit {unit.name!r}: create_graph=True would keep parameters that stage 3 frees; use stage 1 or 2, or "
                "run forward and backward inside `with zero.gathered():`"
            )
        self.begin_backward()
        use = unit.use
        if use.has_all_gradients and use.calls == 1 and not use.is_recomputed and unit.state == State.SHARDED:
            return  # its output contains what another unit made, and backward has come to that one
        has_begun = use.in_backward  # by another tensor of its output
        use.awaits_gradients = unit.is_trained
        if call is not None:
            use.calls_in_backward.add(call)
        self.need(unit, None if has_begun else Moment.BACKWARD)

    def _after_backward(self, unit: Unit, call: object, gradients: Any) -> None:
        unit.use.calls_in_backward.discard(call)
        self.release(unit)
