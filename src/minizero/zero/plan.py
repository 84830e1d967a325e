"""Chapter 15, zero: which parameters form a unit, and whether all ranks mean the same model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from minizero.collectives import World
from minizero.gather import Unit
from minizero.sharding import Holder, holders_of
from minizero.sharding.placeholder import ANEW, ShardedParameter, raise_replaced
from minizero.zero.state import check_carried


@dataclass
class Plan:
    """A unit to be: `parameters` are those of `module` that belong to no unit inside it, each with its holders."""

    name: str
    module: nn.Module
    parameters: list[tuple[nn.Parameter, list[Holder]]]


class Dtypes(NamedTuple):
    """What a parameter is gathered and computed in, and what its gradient is in on the wire."""

    compute: torch.dtype
    wire: torch.dtype


class DtypePolicy(Protocol):
    """Which dtypes a model computes and sends in; `minizero.precision.Precision` is one."""

    def choose(self, model: nn.Module) -> dict[str, Dtypes]:
        """For the full name of each parameter, its dtypes."""

    def attach(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Hooks that cast what goes into the model and into modules that compute in another dtype."""


def default_units(model: nn.Module) -> list[nn.Module]:
    """The elements of every outermost `nn.ModuleList`: in a transformer, its blocks.

    Elements that are lists or dicts themselves have no forward to gather before; their elements count instead.
    """
    units: list[nn.Module] = []
    for child in model.children():
        inside = _elements(child) if isinstance(child, nn.ModuleList) else default_units(child)
        units += [unit for unit in inside if any(True for _ in unit.parameters())]
    return units


def _elements(container: nn.Module) -> list[nn.Module]:
    return [e for child in container.children() for e in ([child] if _has_forward(child) else _elements(child))]


def _has_forward(module: nn.Module) -> bool:
    # looked up on the instance: torch.compile's wrapper sets it there
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def plan_units(model: nn.Module, units: Iterable[nn.Module] | None) -> list[Plan]:
    """Assign each parameter to the innermost unit around all its holders; the root unit, `model` itself, comes first.

    Raises ValueError or TypeError for a unit or parameter that cannot be sharded.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    plans = {"": Plan("root", model, [])}
    for unit in default_units(model) if units is None else units:
        if id(unit) not in paths:
            raise ValueError(f"units: a {type(unit).__name__} is not a module inside the model")
        if not _has_forward(unit):
            raise ValueError(f"units: {paths[id(unit)]!r} ({type(unit).__name__}) has no forward to gather before")
        plans.setdefault(paths[id(unit)], Plan(paths[id(unit)], unit, []))
    for parameter, holders in holders_of(model):
        _check_parameter(parameter, holders[0].full_name)
        chains = [[u for u in sorted(plans, key=len) if is_inside(holder.path, u)] for holder in holders]
        common = [u for u in chains[0] if all(u in chain for chain in chains)]
        plans[common[-1]].parameters.append((parameter, holders))
    _check_memory(model)
    if not any(plan.parameters for plan in plans.values()):
        raise ValueError("the model has no parameters to shard")
    return [plan for path, plan in plans.items() if plan.parameters or path == ""]


def is_inside(path: str, module: str) -> bool:
    """Whether `path` leads to `module` or into it; the path of the model itself is empty."""
    return module == "" or path == module or path.startswith(module + ".")


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    if hasattr(parameter, "is_sharded_by_minizero") or isinstance(parameter, ShardedParameter):
        raise ValueError(f"parameter {name!r} is sharded already: a model, or a part of it, can be sharded once")
    if hasattr(parameter, "is_replicated_by_minizero"):
        raise ValueError(f"parameter {name!r} is held by a Replicated: a model has one stage")
    if parameter.is_complex():
        raise TypeError(f"parameter {name!r} is complex: hold it as a real tensor (torch.view_as_real) to shard it")
    if isinstance(parameter, nn.UninitializedParameter):
        raise TypeError(f"parameter {name!r} is lazy: run the model once before sharding")


def _check_memory(model: nn.Module) -> None:
    """Two Parameters in one memory are tied for torch; flattened they would be two, and drift apart."""
    ranges = []
    for parameter, holders in holders_of(model):
        if parameter.numel() > 0 and not parameter.is_meta:
            reach = sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            start = parameter.data_ptr()
            ranges.append((start, start + reach * parameter.itemsize, holders[0].full_name))
    ranges.sort()
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise ValueError(f"parameters {first!r} and {second!r} share memory: tie them as one nn.Parameter")


def agree(plans: Sequence[Plan], stage: int, dtypes: Mapping[str, Dtypes], world: World) -> None:
    """Raise ValueError on all ranks, naming the first difference, unless all are about to shard the same model.

    Ranks are counted inside a process group. Also raises, TypeError or ValueError, for a buffer, extra state or
    state-dict hook that could not be sent or saved later, and for a transport that this stage cannot use.
    """
    if stage < 3 and world.transport.exact is not world.transport:
        raise ValueError(f"transport rounds weights: in stage {stage} the shards, parts of them, would be rounded too")
    model = plans[0].module
    problem = check_carried(model, stage)
    sent = {} if problem else dict(model.named_buffers())
    buffers = [f"buffer {name!r}: {tuple(buffer.shape)}, {buffer.dtype}" for name, buffer in sent.items()]
    mine = [f"stage {stage}", f"problem: {problem}", *buffers] + [
        f"unit {plan.name!r}, {name!r}: {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
        + (f", computed in {dtypes[name].compute}, sent in {dtypes[name].wire}" if dtypes else "")
        for plan in plans
        for p, holders in plan.parameters
        for name in [holders[0].full_name]
    ]
    world.agree(mine)
    if problem:
        raise problem


def check_as_planned(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise RuntimeError, naming the parameter, if the model was changed since it was sharded.

    A parameter that was added, replaced, cast, moved, frozen or unfrozen would compute but never be reduced or updated.
    """
    known: set[int] = set()
    for unit in units:
        for flat in unit.flats:
            known |= {id(p) for p in (*flat.leaves, *flat.placeholders)}
            for name, leaf, offset in zip(flat.names, flat.leaves, flat.layout.offsets, strict=False):
                moved = leaf.dtype != flat.full.dtype or (
                    leaf.numel() > 0 and leaf.data_ptr() != flat.full.data_ptr() + offset * flat.full.itemsize
                )
                if flat.aliased and moved:
                    raise RuntimeError(
                        f"parameter {name!r} was cast or moved after sharding: do that before, or {ANEW}"
                    )
                if leaf.requires_grad != flat.requires_grad:
                    raise RuntimeError(f"requires_grad of {name!r} changed after sharding: do that before, or {ANEW}")
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in known:
                raise_replaced(Holder(module, name, path).full_name)
