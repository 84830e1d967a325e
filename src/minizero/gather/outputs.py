"""Chapter 12, gather: where the tensors are in whatever a module returns."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
    Set,
)
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

# Values that hold no tensors, or (modules, functions, classes) none that belong to an output.
OPAQUE = (
    *(str, bytes, int, float, complex, type(None), Enum, type, nn.Module, torch.dtype, torch.device),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, range),
)
HINT = "let forward return tensors in a tuple, list, dict or dataclass"


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor inside `value`, once: in sequences, mappings, dataclasses and objects with attributes or slots.

    Raises TypeError for an iterator, whose tensors could not be seen without using it up.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, OPAQUE) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, Iterator):
            raise TypeError(f"cannot look for tensors in a {type(item).__name__}: {HINT}")
        else:
            pending += _parts(item)
    return found


def _parts(item: Any) -> list[Any]:
    parts = list(vars(item).values()) if hasattr(item, "__dict__") else []
    parts += [getattr(item, name) for cls in type(item).__mro__ for name in _slots(cls) if hasattr(item, name)]
    if isinstance(item, Mapping):
        parts += item.values()
    elif isinstance(item, Collection) and not hasattr(item, "__array_interface__"):
        parts += item
    return parts


def is_plain(output: Any) -> bool:
    """Whether the output is a value, or a container of nothing, that cannot hide a tensor."""
    if isinstance(output, (str, bytes, int, float, complex, type(None), Enum)):
        return True
    return isinstance(output, Collection) and all(is_plain(part) for part in _parts(output))


def exchange(value: Any, swap: Callable[[Tensor], Tensor], done: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """`value` with swap(tensor) in place of each tensor that `tensors_in` finds.

    Whatever can be changed is changed in place, for somebody else may hold on to it; tuples and frozensets are built
    anew. What else cannot be changed is left as it is.
    """
    done = {} if done is None else done
    if isinstance(value, OPAQUE):
        return value
    if id(value) not in done:
        done[id(value)] = value, value  # it may contain itself
        new = swap(value) if isinstance(value, Tensor) else _exchange_parts(value, swap, done)
        done[id(value)] = value, new
    return done[id(value)][1]


def _exchange_parts(value: Any, swap: Callable[[Tensor], Tensor], done: dict[int, tuple[Any, Any]]) -> Any:
    attributes = dict(getattr(value, "__dict__", ()))
    attributes |= {n: getattr(value, n) for cls in type(value).__mro__ for n in _slots(cls) if hasattr(value, n)}
    for name, old in attributes.items():
        if (new := exchange(old, swap, done)) is not old:
            object.__setattr__(value, name, new)  # also where a dataclass is frozen
    if isinstance(value, Mapping):
        old_parts = list(value.items())
    elif isinstance(value, Sequence | deque):
        old_parts = list(enumerate(value))
    elif isinstance(value, Set):
        old_parts = [(part, part) for part in value]
    else:
        return value
    parts = [(key, old, exchange(old, swap, done)) for key, old in old_parts]
    changed = [(key, new) for key, old, new in parts if new is not old]
    if changed and isinstance(value, tuple | frozenset):
        return rebuilt(value, [new for _, _, new in parts])
    for key, new in changed:
        if isinstance(value, MutableSet):
            value.discard(key)
            value.add(new)
        elif isinstance(value, MutableMapping | MutableSequence):
            value[key] = new
    return value


def rebuilt(value: Any, parts: list[Any]) -> Any:
    """A tuple (of any class, named too) or frozenset like `value` that holds `parts`."""
    kind = type(value)
    try:
        new = tuple.__new__(kind, parts)  # whatever the arguments of its constructor
    except TypeError:  # a frozenset, or what torch.max(x, 0) returns
        new = kind(parts)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _slots(cls: type) -> Sequence[str]:
    slots: str | Sequence[str] = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots
