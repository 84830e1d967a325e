"""Chapter 15, zero: from whole parameters to shards and back, a unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from minizero.collectives import launch_all_gather, on_all_ranks
from minizero.gather import Gatherer, Unit
from minizero.replicate.sending import as_bytes, fill
from minizero.sharding import FlatParameters, ShardedParameter
from minizero.zero.blank import Blanks, UnfilledError
from minizero.zero.plan import Dtypes, Plan, broadcast, materialise
from minizero.zero.state import extra_states, persistent_buffers, plain_copy, tell_loaded


def build_units(
    model: nn.Module,
    plans: Sequence[Plan],
    stage: int,
    dtypes: Mapping[str, Dtypes],
    group: ProcessGroup | None,
    replicas: ProcessGroup | None,
    initialize: Callable[[nn.Module], Any] | None,
) -> list[Unit]:
    """Shard the model as planned, from rank 0's values; stage 3 frees each unit before the next one gets values."""
    built: dict[str, Unit] = {}
    blanks = Blanks(model)
    try:
        for plan in materialise(model, plans, blanks, group, replicas, initialize):
            built[plan.name] = _build_unit(plan, stage, dtypes, group, replicas)
    except UnfilledError:  # on all ranks
        for unit in built.values():
            unit.unshard()
            unit.wait()
            for flat in unit.flats:
                flat.let_go(precise(flat, group))
        blanks.take_back()
        raise
    for buffer in model.buffers():
        broadcast(buffer, group, replicas)
    share_extra_states(model, group, replicas)
    return [built[plan.name] for plan in plans]


def _build_unit(
    plan: Plan,
    stage: int,
    dtypes: Mapping[str, Dtypes],
    group: ProcessGroup | None,
    replicas: ProcessGroup | None,
) -> Unit:
    key = {
        id(p): (str(p.dtype), p.requires_grad, str(dtypes.get(holders[0].full_name))) for p, holders in plan.parameters
    }
    members = sorted(plan.parameters, key=lambda member: key[id(member[0])])
    flats = [
        FlatParameters(list(same), dist.get_rank(group), dist.get_world_size(group), aliased=stage < 3)
        for _, same in groupby(members, key=lambda member: key[id(member[0])])
    ]
    unit = Unit(plan.name, plan.module, flats, group)
    take_from_rank_0(unit, group, replicas)
    for flat in flats if dtypes else ():
        flat.compute_in(*dtypes[flat.names[0]])
    if stage == 3:
        unit.reshard()
    return unit


def share_extra_states(model: nn.Module, group: ProcessGroup | None, replicas: ProcessGroup | None) -> None:
    """Give the modules of every rank the extra states of rank 0's."""
    if extras := extra_states(model):
        theirs = from_rank_0(extras, group, replicas)
        if not is_rank_0(group, replicas):
            tell_loaded(model, theirs)


def is_rank_0(group: ProcessGroup | None, replicas: ProcessGroup | None) -> bool:
    """Whether this is rank 0 of the group, and of the first of its replicas."""
    return dist.get_rank(group) == 0 and (replicas is None or dist.get_rank(replicas) == 0)


def from_rank_0(value: Any, group: ProcessGroup | None, replicas: ProcessGroup | None) -> Any:
    """Rank 0's `value`, with tensors in lists and dicts of it, on all ranks."""
    # as bytes: torch's pickles know some dtypes only
    values = [tree_map_only(Tensor, lambda t: _Packed(as_bytes(t), t.dtype, t.shape), value)]
    with on_all_ranks("send rank 0's values"):
        if replicas is not None:
            dist.broadcast_object_list(values, group=replicas, group_src=0)
        dist.broadcast_object_list(values, group=group, group_src=0)
    return tree_map_only(_Packed, lambda p: p.values.view(p.dtype).view(p.shape), values[0], is_leaf=_is_packed)


class _Packed(NamedTuple):
    values: Tensor
    dtype: torch.dtype
    shape: torch.Size


def _is_packed(value: Any) -> bool:
    return isinstance(value, _Packed)


@torch.no_grad()
def take_from_rank_0(unit: Unit, group: ProcessGroup | None, replicas: ProcessGroup | None) -> None:
    """Give every rank rank 0's full parameters of a unit that is FULL, and cut each rank's shard from them."""
    for flat in unit.flats:
        broadcast(flat.full, group, replicas)
        flat.take_shard()
    mark_changed(unit.flats)


def mark_changed(flats: Sequence[FlatParameters]) -> None:
    """Tell autograd that parameters changed: a graph built before must raise in backward, as in plain torch."""
    for flat in flats:
        torch.autograd.graph.increment_version(flat.leaves)


@contextmanager
def hold_gathered(
    units: Sequence[Unit], gatherer: Gatherer, group: ProcessGroup | None, replicas: ProcessGroup | None
) -> Iterator[None]:
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
            take_from_rank_0(unit, group, replicas)
    finally:
        gatherer.holds = False
        for unit in units if gatherer.frees else ():
            unit.reshard(leaves_memory=True)  # to views of parameters that were taken inside


def precise(flat: FlatParameters, group: ProcessGroup | None) -> Tensor:
    """The values of a FULL FlatParameters, padded_numel elements in the dtype of the master. Call on all ranks.

    Where `full` is a rounded copy the masters are gathered; an element that was changed in `full` counts as changed.
    """
    if flat.full.dtype == flat.master.dtype:
        return flat.full
    whole = torch.empty_like(flat.full, dtype=flat.master.dtype)
    launch_all_gather(whole, flat.master.to(whole.device), group).wait()
    return torch.where(flat.full == whole.to(flat.full.dtype), whole, flat.full.to(whole.dtype))


def read_full_state(
    model: nn.Module, units: Sequence[Unit], gatherer: Gatherer, group: ProcessGroup | None
) -> dict[str, Any]:
    """The plain model's state dict on the CPU of rank 0, {} on other ranks, with one unit whole at a time."""
    is_first, extras = dist.get_rank(group) == 0, extra_states(model)
    state: dict[str, Any] = {}
    for unit in units:
        gatherer.unshard(unit)
        unit.wait()
        for flat in unit.flats:
            values = flat.layout.unflatten(precise(flat, group))
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
    group: ProcessGroup | None,
    replicas: ProcessGroup | None,
) -> None:
    """Send rank 0's `state` to the shards and modules of all ranks, or raise ValueError on all of them first."""
    is_first, buffers, extras = is_rank_0(group, replicas), persistent_buffers(model), list(extra_states(model))
    complaint = from_rank_0(_mismatch(state, units, buffers, extras) if is_first else "", group, replicas)
    if complaint:
        raise ValueError(f"cannot load the state: {complaint}")
    for flat in (flat for unit in units for flat in unit.flats):
        flat.allocate()
        is_rounded = flat.full.dtype != flat.master.dtype
        whole = torch.zeros_like(flat.full, dtype=flat.master.dtype) if is_rounded else flat.full
        for view, holders in zip(flat.layout.unflatten(whole), flat.holders, strict=True) if is_first else ():
            view.copy_(state[holders[0].full_name])
        broadcast(whole, group, replicas)
        flat.master.copy_(flat.cut(whole))
        flat.full.copy_(whole)
        flat.refresh()
        if not flat.aliased:
            flat.free()
        mark_changed([flat])
    for name, buffer in buffers.items():
        if is_first:
            fill(buffer, state[name])
        broadcast(buffer, group, replicas)
    sent = {key: plain_copy(state[key], key) for key in extras} if is_first else None
    tell_loaded(model, from_rank_0(sent, group, replicas) if extras else {})


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
