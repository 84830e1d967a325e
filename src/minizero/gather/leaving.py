"""Chapter 12, gather: what outlives a unit's forward must not look at memory that goes with the unit.

A view of a parameter, `self.weight[:n]`, has no memory of its own. Read after the memory was freed it ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from minizero.gather.outputs import HINT, OPAQUE, exchange, rebuilt, tensors_in
from minizero.sharding import FlatParameters, ShardedParameter

_LARGEST = 1000  # elements of a container that is searched; a longer one is a vocabulary, and would take time

_INTERNAL = vars(nn.Module()).keys() - {"_buffers"}  # what every module has: its parameters, its parts, its hooks

_PLAIN = {type(None), bool, int, float, str}


def owner_of(value: Tensor, flats: Iterable[FlatParameters]) -> str | None:
    """The name of the parameter in `flats` whose memory the tensor looks at; None if it has other memory."""
    address = _address(value)
    for flat in flats if address > 0 else ():
        place = (address - flat.full.data_ptr()) // flat.full.itemsize
        if 0 <= place < flat.full.numel():
            return next(name for name, stop in zip(flat.names, flat.layout.offsets[1:], strict=True) if place < stop)
    return None


def _address(value: Tensor) -> int:
    try:
        if value.layout is torch.sparse_coo:
            value = value._values()
        elif value.layout is not torch.strided:
            value = value.values()
        return int(value.data_ptr())
    except RuntimeError:  # a tensor that only stands for one, as those of torch.func do
        return 0


def with_own_memory(output: Any, inputs: Any, unit: str, flats: Sequence[FlatParameters]) -> Any:
    """`output`, with copies in place of the tensors that look at the memory of `flats`; gradients flow through them.

    Containers that can be changed are changed in place, those among `inputs` too: a cache that was passed in stays.
    Raises TypeError, naming unit and parameter, for a container that can neither be changed nor built anew, and for an
    iterator.
    """

    def copied(value: Tensor) -> Tensor:
        if owner_of(value, flats) is None:
            return value
        # whatever mode this is: a parameter as output requires a gradient also when it is returned without a graph
        with torch.inference_mode(False), torch.set_grad_enabled(value.requires_grad):
            return value.clone()

    _exchange_kept(inputs, copied, depth=4, into_objects=True)
    if any(owner_of(tensor, flats) for tensor in tensors_in(output)):
        with suppress(RecursionError):
            output = exchange(output, copied)
        for name in filter(None, (owner_of(tensor, flats) for tensor in tensors_in(output))):
            raise TypeError(
                f"unit {unit!r} returns a view of parameter {name!r}, whose memory leaves with the unit, in a "
                f"container that cannot be changed: return a copy of it (.clone()), or {HINT}"
            )
    return output


def put_stand_ins(modules: Iterable[nn.Module], flats: Sequence[FlatParameters]) -> None:
    """Where an attribute or buffer of a module is a view of a parameter in `flats`, put a placeholder in its place.

    Attributes are tensors, or lists, tuples and dicts of tensors. A forward that sets the attribute anew is served by
    that; one that relies on what an earlier one left gets ShardedAccessError with the parameter's name.
    """

    def stand_in(value: Tensor) -> Tensor:
        # a parameter itself has no memory while it is sharded, and reads NaN
        name = None if isinstance(value, nn.Parameter) else owner_of(value, flats)
        return value if name is None else ShardedParameter.stand_for(value, f"{name}, kept as an attribute")

    for module in modules if flats else ():
        attributes = vars(module)
        kept = {key: value for key, value in attributes.items() if key not in _INTERNAL and type(value) not in _PLAIN}
        attributes.update(_exchange_kept(kept, stand_in, depth=3, into_objects=False))


def _exchange_kept(values: Any, swap: Callable[[Tensor], Tensor], depth: int, into_objects: bool) -> Any:
    """`values` (a list, tuple or dict) with swap(tensor) in place of each tensor; lists and dicts are changed in place.

    This is asked at every use of a unit: unlike `exchange` it goes `depth` levels deep, and not into large containers.
    """
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        new = value
        if isinstance(value, Tensor):
            new = swap(value)
        elif depth > 0 and isinstance(value, (list, tuple, dict)) and len(value) <= _LARGEST:
            new = _exchange_kept(value, swap, depth - 1, into_objects)
        elif depth > 0 and into_objects and hasattr(value, "__dict__") and not isinstance(value, OPAQUE):
            _exchange_kept(vars(value), swap, depth - 1, into_objects)
        if new is not value:
            if isinstance(values, tuple):
                return rebuilt(values, [_exchange_kept([part], swap, depth, into_objects)[0] for part in values])
            values[key] = new
    return values


def versions(flats: Iterable[FlatParameters]) -> dict[str, int]:
    """How often each parameter was changed in place, by name, as autograd counts it."""
    return {n: leaf._version for flat in flats for n, leaf in zip(flat.names, flat.leaves, strict=True)}


def check_unchanged(before: Mapping[str, int], flats: Iterable[FlatParameters], unit: str) -> None:
    """Raise RuntimeError, naming the parameter, if a forward changed one in place: `before` are its `versions`."""
    for name, version in versions(flats).items():
        if version != before.get(name, version):
            raise RuntimeError(
                f"parameter {name!r} was changed in place by the forward of unit {unit!r}: no other rank and "
                "no shard would learn of it. Change parameters inside `with zero.gathered():`"
            )
