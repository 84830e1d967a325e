"""Chapter 15, zero: what a state dict holds besides parameters, and what modules do when one is made or loaded.

A module may add a value of its own (`get_extra_state`), and hooks or methods may do anything. Full states and
checkpoints hold parameters, persistent buffers and extra states under their own names: a model whose state dict is
something else is refused before it is sharded. What modules do when a state dict is loaded is done here too, with
stand-ins for the values, which are in place already.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves_with_path, tree_map_with_path

from minizero.replicate.sending import check_tensor, fill
from minizero.sharding import holders_of
from minizero.sharding.placeholder import ShardedAccessError, ShardedParameter, plain_name

# The dtypes that a file can hold, by their names in the safetensors format.
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state dict, by name."""
    return {
        plain_name(path, name): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


# ---- extra states


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Copies of what modules add by `get_extra_state`, by their keys in the state dict; tensors on the CPU.

    Raises TypeError, naming the module, for a value that would need pickle: loading a pickle runs code.
    """
    return {
        plain_name(path, "_extra_state"): plain_copy(module.get_extra_state(), f"the extra state of {path or 'root'!r}")
        for path, module in model.named_modules(remove_duplicate=False)
        if "get_extra_state" in _own_methods(module)
    }


def plain_copy(value: Any, path: str) -> Any:
    """A copy of numbers, strings, bytes, tensors, and lists, tuples, dicts of them. Else TypeError with `path`."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Tensor):
        check_tensor(path, value.detach())
        if value.is_meta or value.dtype not in SAFETENSORS_DTYPES:
            raise TypeError(f"{path} is a tensor ({value.dtype}, {value.device}) that cannot be saved")
        return value.detach().to("cpu", copy=True)
    if type(value) is BytesIO:
        return BytesIO(value.getvalue())
    if type(value) in (list, tuple):
        return type(value)(plain_copy(v, f"{path}/{i}") for i, v in enumerate(value))
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        copied = {plain_copy(k, f"{path}/key"): plain_copy(v, f"{path}/{k}") for k, v in value.items()}
        return Counter(copied) if type(value) is Counter else copied
    kind = type(value).__name__
    raise TypeError(f"{path} is of type {kind}: only numbers, strings, bytes, lists, dicts and tensors are saved")


# ---- hooks and methods of modules

_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_EXTRA = ("get_extra_state", "set_extra_state")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _own_methods(module: nn.Module) -> set[str]:
    """Which of the methods behind a state dict are not `nn.Module`'s, by the class or set on the instance."""
    methods = {name: getattr(getattr(module, name), "__func__", None) for name in (*_METHODS, *_EXTRA)}
    return {name for name, method in methods.items() if method is not getattr(nn.Module, name)}


def _interferes(module: nn.Module) -> bool:
    return bool(_own_methods(module)) or any(getattr(module, hooks) for hooks in _HOOKS)


class Stored(ShardedParameter):
    """In a state dict, stands for a value that is in place: copied to its place it does nothing, else it raises."""

    place: Tensor

    @staticmethod
    def at(place: Tensor, name: str) -> Stored:
        """A stand-in for the values of `place`, which the state dict calls `name`."""
        nowhere = torch.empty(place.shape, dtype=place.dtype, device="meta")  # `place` may be a placeholder itself
        stored = torch.Tensor._make_subclass(Stored, nowhere, place.requires_grad)
        stored._sharded_in_apply, stored.place = False, place
        stored._sharded_name, stored._sharded_home = name, place.device
        return stored

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "copy_" and isinstance(args[1], Stored) and args[1].place is args[0]:
            return args[0]
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except ShardedAccessError:
            name = next(a._sharded_name for a in args if isinstance(a, ShardedParameter))
            raise ShardedAccessError(f"the values of {name!r} were used by {func.__name__!r}") from None


def tell_loaded(model: nn.Module, extras: Mapping[str, Any]) -> None:
    """Have modules do what they do when a state dict is loaded: hooks, methods, `set_extra_state` with `extras`.

    Parameters and buffers have their values already. A tensor of `extras` goes to the device of the one it replaces.
    """
    if not any(_interferes(module) for module in model.modules()):
        return
    state = model.state_dict(keep_vars=True)
    told: Any = OrderedDict()
    for key, value in state.items():
        name = plain_name("", key)
        told[key] = _on_devices_of(value, extras[name]) if name in extras else Stored.at(value, name)
    told._metadata = getattr(state, "_metadata", {})
    model.load_state_dict(told)


def _on_devices_of(old: Any, new: Any) -> Any:
    devices = {path: leaf.device for path, leaf in tree_leaves_with_path(old) if isinstance(leaf, Tensor)}
    return tree_map_with_path(lambda path, t: t.to(devices.get(path, t.device)) if isinstance(t, Tensor) else t, new)


# ---- before sharding


def check_carried(model: nn.Module, stage: int) -> TypeError | ValueError | None:
    """Why the state of `model` cannot be sent, saved and loaded in this stage, if it cannot. Nothing is changed."""
    try:
        _check_tensors(model)
    except (TypeError, ValueError) as error:
        return error
    interfering = [(path, m) for path, m in model.named_modules() if _interferes(m)]
    if not interfering:
        return None
    try:
        for path, module in interfering:
            if len(one := _own_methods(module) & {*_EXTRA}) == 1:
                raise TypeError(f"module {path or 'root'!r} has {one.pop()} without the other, set or get")
        with _sharded(model) if stage == 3 else nullcontext():
            extras = extra_states(model)
            _compare(model, extras)
            tell_loaded(model, extras)
    except Exception as error:  # whatever the modules' own code raises
        names = ", ".join(f"{path or 'root'!r} ({type(module).__name__})" for path, module in interfering[:5])
        return TypeError(
            f"{error}. Modules with state-dict hooks, methods or an extra state of their own: {names}. A full state "
            "and a checkpoint hold parameters, persistent buffers and plain extra states, each under its own name: "
            "remove the hook or method before sharding, or return numbers, lists, dicts and tensors as the extra state"
        )
    return None


def _compare(model: nn.Module, extras: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, unless the state dict is parameters, persistent buffers and extra states."""
    here: dict[str, Any] = persistent_buffers(model)
    here |= {holder.full_name: p for p, holders in holders_of(model) for holder in holders}
    state = {plain_name("", key): value for key, value in model.state_dict(keep_vars=True).items()}
    for key in sorted((here | dict(extras)).keys() ^ state.keys()):
        where = "state dict, not in the model" if key in state else "model, not in its state dict"
        raise ValueError(f"{key!r} is in the {where}")
    for key, tensor in here.items():
        if state[key] is not tensor:
            raise ValueError(f"{key!r} in the state dict is another tensor than the model's")


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    """Inside, the model holds placeholders, as it will in stage 3: who uses values finds out now."""
    found = holders_of(model)
    try:
        for parameter, holders in found:
            for holder in holders:
                holder.module._parameters[holder.name] = ShardedParameter.stand_for(parameter, holders[0].full_name)
        yield
    finally:
        for parameter, holder in ((parameter, holder) for parameter, holders in found for holder in holders):
            holder.module._parameters[holder.name] = parameter


def _check_tensors(model: nn.Module) -> None:
    parameters = {holders[0].full_name: parameter for parameter, holders in holders_of(model)}
    buffers = {plain_name("", name): buffer for name, buffer in model.named_buffers()}
    persistent = persistent_buffers(model)
    for name, tensor in (*parameters.items(), *buffers.items(), *persistent.items()):
        check_tensor(name, tensor)
        if tensor.dtype not in SAFETENSORS_DTYPES and (name in parameters or name in persistent):
            raise TypeError(
                f"{name!r} is {tensor.dtype}, which a checkpoint cannot hold: use another dtype, or "
                "(torch.view_as_real) a real tensor; a buffer can be registered with persistent=False"
            )
    lying_at = defaultdict(list)
    for name, parameter in parameters.items():
        if not parameter.is_meta and parameter.numel():
            lying_at[parameter.untyped_storage().data_ptr()].append((name, parameter))
    for name, buffer in buffers.items():
        there = lying_at.get(buffer.untyped_storage().data_ptr(), ()) if not buffer.is_meta and buffer.numel() else ()
        for other, parameter in there:
            if share_memory(buffer, parameter):
                raise ValueError(
                    f"buffer {name!r} shares memory with parameter {other!r}, which moves when it is sharded: the "
                    "buffer would not follow. Compute it in forward, or copy it"
                )


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of `a` lies where one of `b` does, in the same storage."""
    touched = torch.zeros(a.untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(t: Tensor) -> Tensor:
        strides = [stride * t.itemsize for stride in t.stride()]
        return touched.as_strided((*t.shape, t.itemsize), (*strides, 1), t.storage_offset() * t.itemsize)

    fill(bytes_of(a), torch.ones((), dtype=torch.bool).expand(*a.shape, a.itemsize))
    return bool(bytes_of(b).any())
