"""Chapter 15, zero: from shards to whole parameters and back, a unit at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minizero.collectives import World
from minizero.gather import Gatherer, Unit
from minizero.replicate.sending import fill
from minizero.sharding import ShardedParameter
from minizero.zero.build import mark_changed, precise, start_from_rank_0
from minizero.zero.state import extra_states, persistent_buffers, plain_copy, tell_loaded


@contextmanager
def hold_gathered(units: Sequence[Unit], gatherer: Gatherer, world: World) -> Iterator[None]:
    """All units are FULL inside; rank 0's values are written to all shards at the end. Nested, the outermost counts."""
    if gatherer.holds:
        yield
        return
    try:
        gatherer.holds = True
        for unit in units:
            gatherer.unshard(unit)
        for unit in units:
            unit.wait()
        yield
        for flat in (flat for unit in units for flat in unit.flats):
            flat.adopt()
        for unit in units:
            start_from_rank_0(unit, world)
    finally:
        gatherer.holds = False
        for unit in units if gatherer.frees else ():
            unit.reshard(leaves_memory=True)  # to views of parameters that were taken inside


def read_full_state(model: nn.Module, units: Sequence[Unit], gatherer: Gatherer, world: World) -> dict[str, Any]:
    """The plain model's state dict on the CPU of rank 0, {} on other ranks, with one unit whole at a time."""
    is_first, extras = world.rank == 0, extra_states(model)
    state: dict[str, Any] = {}
    for unit in units:
        gatherer.unshard(unit)
        unit.wait()
        for flat in unit.flats:
            values = flat.layout.unflatten(precise(flat, world))
            for value, holders in zip(values, flat.holders, strict=True) if is_first else ():
                value = value.to("cpu", copy=True)
                state |= {holder.full_name: value for holder in holders}
        gatherer.release(unit)
    if is_first:
        state |= {n: b.detach().resolve_neg().to("cpu", copy=True) for n, b in persistent_buffers(model).items()}
        state |= extras
    return state


@torch.no_grad()
def write_full_state(
    model: nn.Module,
    units: Sequence[Unit],
    state: dict[str, Any],
    world: World,
) -> None:
    """Send rank 0's `state` to the shards and modules of all ranks, or raise ValueError on all of them first."""
    is_first, buffers, extras = world.number == 0, persistent_buffers(model), list(extra_states(model))
    complaint = world.from_first(_mismatch(state, units, buffers, extras) if is_first else "")
    if complaint:
        raise ValueError(f"cannot load the state: {complaint}")
    for flat in (flat for unit in units for flat in unit.flats):
        flat.allocate()
        is_rounded = flat.full.dtype != flat.master.dtype
        whole = torch.zeros_like(flat.full, dtype=flat.master.dtype) if is_rounded else flat.full
        for view, holders in zip(flat.layout.unflatten(whole), flat.holders, strict=True) if is_first else ():
            view.copy_(state[holders[0].full_name])
        world.broadcast(whole)
        flat.master.copy_(flat.cut(whole))
        flat.full.copy_(whole)
        flat.refresh()
        if not flat.aliased:
            flat.free()
        mark_changed([flat])
    for name, buffer in buffers.items():
        if is_first:
            fill(buffer, state[name])
        world.broadcast(buffer)
    sent = {key: plain_copy(state[key], key) for key in extras if is_first}
    tell_loaded(model, world.from_first(sent) if extras else {})


def _mismatch(state: Any, units: Sequence[Unit], buffers: dict[str, Tensor], extras: Sequence[str]) -> str:
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}, not a dict of tensors"
    targets: dict[str, Tensor] = dict(buffers)
    for flat in (flat for unit in units for flat in unit.flats):
        for leaf, holders in zip(flat.leaves, flat.holders, strict=True):
            targets |= {holder.full_name: leaf for holder in holders}
    for name, target in targets.items():
        if name not in state:
            return f"key {name!r} is missing"
        value = state[name]
        if not isinstance(value, Tensor) or isinstance(value, ShardedParameter) or value.is_meta:
            return f"key {name!r} is no tensor with values: {type(value).__name__}"
        if value.layout != torch.strided or value.is_quantized:
            return f"key {name!r} is no dense tensor: {value.layout}, {value.dtype}"
        if value.shape != target.shape:
            return f"key {name!r} has shape {tuple(value.shape)}, the model has {tuple(target.shape)}"
    for key in extras:
        if key not in state:
            return f"key {key!r} is missing"
        try:
            plain_copy(state[key], key)
        except TypeError as error:
            return str(error)
    unknown = sorted(str(name) for name in state.keys() - targets.keys() - {*extras})
    return f"key {unknown[0]!r} is not in the model" if unknown else ""
