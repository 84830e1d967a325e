"""Chapter 15, zero: how a model gets its first values on every rank, and becomes units, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from minizero.collectives import World
from minizero.gather import Unit
from minizero.replicate.sending import fill
from minizero.sharding import FlatParameters
from minizero.zero.blank import Blanks, UnfilledError, meta_tensors
from minizero.zero.plan import Dtypes, Plan
from minizero.zero.state import extra_states, tell_loaded


def build_units(
    model: nn.Module,
    plans: Sequence[Plan],
    stage: int,
    dtypes: Mapping[str, Dtypes],
    world: World,
    initialize: Callable[[nn.Module], Any] | None,
) -> list[Unit]:
    """Shard the model as planned, from rank 0's values; stage 3 frees each unit before the next one gets values."""
    built: dict[str, Unit] = {}
    blanks = Blanks(model)
    try:
        for plan in materialise(model, plans, blanks, world, initialize):
            built[plan.name] = _build_unit(plan, stage, dtypes, world)
    except UnfilledError:  # on all ranks
        for unit in built.values():
            unit.unshard()
            unit.wait()
            for flat in unit.flats:
                flat.let_go(precise(flat, world))
        blanks.take_back()
        raise
    for buffer in model.buffers():
        world.broadcast(buffer)
    share_extra_states(model, world)
    return [built[plan.name] for plan in plans]


def _build_unit(plan: Plan, stage: int, dtypes: Mapping[str, Dtypes], world: World) -> Unit:
    key = {
        id(p): (str(p.dtype), p.requires_grad, str(dtypes.get(holders[0].full_name))) for p, holders in plan.parameters
    }
    members = sorted(plan.parameters, key=lambda member: key[id(member[0])])
    flats = [
        FlatParameters(list(same), world.rank, world.size, aliased=stage < 3)
        for _, same in groupby(members, key=lambda member: key[id(member[0])])
    ]
    unit = Unit(plan.name, plan.module, flats, world)
    start_from_rank_0(unit, world)
    for flat in flats if dtypes else ():
        flat.compute_in(*dtypes[flat.names[0]])
    if stage == 3:
        unit.reshard()
    return unit


def materialise(
    model: nn.Module,
    plans: Sequence[Plan],
    blanks: Blanks,
    world: World,
    initialize: Callable[[nn.Module], Any] | None,
) -> Iterator[Plan]:
    """Yield each plan once its parameters have values; give values, module by module, to those on the meta device.

    The order is that of `model.modules()`, in which most models are built: with the same seed the values are the same,
    and the caller can shard a unit before the next one exists. Every rank draws the same numbers; those of rank 0
    count. Raises TypeError before anything is changed for a module that nothing initialises, and UnfilledError, on all
    ranks, once a module was initialised that has a tensor without values.
    """
    modules = list(model.named_modules())
    for path, module in modules:
        for name, *_ in meta_tensors(module) if initialize is None and not hasattr(module, "reset_parameters") else ():
            raise TypeError(f"module {path!r} has {name!r} on the meta device, no reset_parameters(): pass initialize=")
    position = {id(module): i for i, (_, module) in enumerate(modules)}
    last = {p.name: max((position[id(h.module)] for _, hs in p.parameters for h in hs), default=0) for p in plans}
    complaint = ""
    for i, (path, module) in enumerate(modules):
        if any(True for _ in meta_tensors(module)):
            settled = {name: t.detach().clone() for name, t in _own_tensors(module).items() if not t.is_meta}
            blanks.give(module, world.device)
            (initialize or _reset_parameters)(module)
            for name, value in settled.items():  # a tied weight has its values already
                fill(_own_tensors(module)[name], value)
            if not complaint and (wrong := blanks.left(module)):
                complaint = f"initializing module {path!r} {wrong}"
        is_last = i == len(modules) - 1
        ready = [plan for plan in plans if last[plan.name] == i]
        if (ready or is_last) and (wrong := world.from_first(complaint)):  # rank 0's values count
            raise UnfilledError(wrong)
        for plan in ready:
            plan.parameters = [(hs[0].module._parameters[hs[0].name], hs) for _, hs in plan.parameters]  # type: ignore[misc]
            yield plan


def _reset_parameters(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]  # checked to be there


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}


def share_extra_states(model: nn.Module, world: World) -> None:
    """Give the modules of every rank the extra states of rank 0's."""
    if extras := extra_states(model):
        theirs = world.from_first(extras)
        if world.number != 0:
            tell_loaded(model, theirs)


@torch.no_grad()
def start_from_rank_0(unit: Unit, world: World) -> None:
    """Give every rank rank 0's full parameters of a unit that is FULL, and cut each rank's shard from them."""
    for flat in unit.flats:
        world.broadcast(flat.full)
        flat.take_shard()
    mark_changed(unit.flats)


def mark_changed(flats: Sequence[FlatParameters]) -> None:
    """Tell autograd that parameters changed: a graph built before must raise in backward, as in plain torch."""
    for flat in flats:
        torch.autograd.graph.increment_version(flat.leaves)


def precise(flat: FlatParameters, world: World) -> Tensor:
    """The values of a FULL FlatParameters, padded_numel elements in the dtype of the master. Call on all ranks.

    Where `full` is a rounded copy the masters are gathered; an element that was changed in `full` counts as changed.
    """
    if flat.full.dtype == flat.master.dtype:
        return flat.full
    whole = torch.empty_like(flat.full, dtype=flat.master.dtype)
    world.transport.exact.all_gather(whole, flat.master.to(whole.device)).wait()
    return torch.where(flat.full == whole.to(flat.full.dtype), whole, flat.full.to(whole.dtype))
