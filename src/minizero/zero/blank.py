"""Chapter 15, zero: memory for tensors of the meta device, blank, so that what nobody fills shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UnfilledError(ValueError):
    """A tensor of a model that was built on the meta device got memory, and no values."""


def make_blank(tensor: Tensor) -> None:
    """Fill `tensor` with what no initialisation leaves: NaN, or in whole numbers and booleans bytes of 0xA5."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        else:
            words = _words(tensor)
            words.fill_(_blank_word(words))


def is_blank(tensor: Tensor) -> bool:
    """Whether elements are still as `make_blank` left them.

    A whole number could be meant to look so. By chance, as in packed weights, one in 2^bits does; 16 times as many are
    no chance.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        return bool((tensor.float() if tensor.itemsize == 1 else tensor).isnan().any())
    words = _words(tensor.detach())
    left = int((words == _blank_word(words)).sum())
    is_chance = tensor.dtype is not torch.bool and left <= 16 * tensor.numel() / 2 ** (8 * tensor.itemsize)
    return left > 0 and (left == tensor.numel() or not is_chance)


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(_WORDS[tensor.itemsize])


def _blank_word(words: Tensor) -> int:
    return int.from_bytes(b"\xa5" * words.itemsize, "little", signed=True)


def meta_tensors(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """(name, container, key, tensor) of each meta tensor of a module: a parameter, a buffer, or kept as an attribute.

    `container[key]` is the tensor; attributes are looked for in lists, tuples and dicts too.
    """
    for name, value in vars(module).items():
        places: list[tuple[str, Any, Any, Any]] = [(name, vars(module), name, value)]
        if isinstance(value, dict):
            is_registered = name in ("_parameters", "_buffers")
            places = [(str(key) if is_registered else name, value, key, part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            places = [(name, value, i, part) for i, part in enumerate(value)]
        yield from (place for place in places if isinstance(place[-1], Tensor) and place[-1].is_meta)


class Blanks:
    """Gives memory to the meta tensors of `model`, a module's at a time, at every place that holds them.

    A tensor that several modules hold stays one tensor. A parameter keeps its class and the attributes set on it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[Any, Any]]] = {}  # by the id of a meta tensor, which `_metas` keeps alive
        self._metas: list[Tensor] = []
        self._given: dict[str, tuple[Tensor, Tensor]] = {}  # to the module that is being filled, by name
        for module in model.modules():
            for _, container, key, tensor in meta_tensors(module):
                self._metas.append(tensor)
                self._places.setdefault(id(tensor), []).append((container, key))

    def give(self, module: nn.Module, device: torch.device) -> None:
        """Put blank tensors on `device` in place of the module's parameters and buffers on the meta device."""
        self._given = {}
        for name, container, _, old in list(meta_tensors(module)):
            if container is module._parameters or container is module._buffers:
                new = torch.empty_like(old, device=device).detach()
                make_blank(new)
                if isinstance(old, nn.Parameter):
                    new = torch.Tensor._make_subclass(type(old), new, old.requires_grad)
                    vars(new).update(vars(old))
                self._given[name] = old, new
                self._put(old, new)

    def left(self, module: nn.Module) -> str:
        """Once the module was initialised: what is wrong with it, or an empty string."""
        own = {**module._parameters, **module._buffers}
        for name, (old, new) in self._given.items():
            current = own.get(name)
            if current is new and is_blank(new):
                return f"left values of {name!r} unset ({new.dtype}, {tuple(new.shape)})"
            if isinstance(current, nn.Parameter) and current is not new:
                vars(current).update({key: value for key, value in vars(old).items() if not hasattr(current, key)})
                self._put(old, current)
        for name, *_ in meta_tensors(module):
            return f"left {name!r} on the meta device, without values"
        return ""

    def take_back(self) -> None:
        """Put the meta tensors back, wherever they were."""
        for tensor in self._metas:
            self._put(tensor, tensor)

    def _put(self, old: Tensor, new: Tensor) -> None:
        for container, key in self._places.get(id(old), ()):
            if not isinstance(container, tuple):
                container[key] = new
