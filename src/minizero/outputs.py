"""Chapter 12, gather: where the tensors are in whatever a module returns."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

# Values that hold no tensors, or (modules, functions, classes) none that belong to an output.
_OPAQUE = (
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
        if isinstance(item, _OPAQUE) or id(item) in seen:
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


def _slots(cls: type) -> Sequence[str]:
    slots: str | Sequence[str] = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots
