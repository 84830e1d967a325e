"""Chapter 25, checkpoint: files that are whole or not there, and in which no code can hide.

A tensor file is what the safetensors library reads: 8 bytes with the length of a header, the header (JSON: name, dtype,
shape and place of each tensor), then the bytes of the tensors. Written by hand it needs no second copy of anything.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from minizero.replicate.sending import as_bytes
from minizero.zero.state import SAFETENSORS_DTYPES

PARTIAL = ".partial"  # ends the name of what is not complete
CHUNK = 1 << 22


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when all of it is on the disk; after an exception it was never there."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk: without it, a power cut can undo a rename that a program has seen."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_plain(path: Path) -> int:
    """The size in bytes of a file that is one: raises OSError for a link, a folder, a pipe, or nothing at all."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no plain file: links, folders and devices are not followed")
    return status.st_size


def read_text(path: Path, limit: int = 1 << 28) -> str:
    """A small text file. Raises OSError or ValueError (naming it) if it is no file, too large, or no text."""
    if check_plain(path) > limit:
        raise ValueError(f"{path} has more than {limit} bytes: this is not what it should be")
    return path.read_text(encoding="utf-8")


def checksum(path: Path) -> int:
    """CRC-32 of a file: it tells a damaged or exchanged file, not one that somebody forged."""
    value = 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(CHUNK))
        while length := file.readinto(buffer):
            value = zlib.crc32(buffer[:length], value)
    return value


# ---- tensors -------------------------------------------------------------------------------------------------------

Spec = tuple[torch.dtype, tuple[int, ...]]  # of a tensor that need not exist yet


def tensor_header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file begins with, and where in it the bytes of each tensor go, in that order.

    Large elements first, so that each tensor begins at a multiple of its element size; gaps are not allowed.
    Raises TypeError, naming the tensor, for a dtype that has no name in the format.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    places, end = {}, 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in SAFETENSORS_DTYPES:
            raise TypeError(f"{name!r} is {dtype}, which cannot be saved")
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        places[name] = start
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + start for name, start in places.items()}


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major, in pieces that fit a cache; no copy if it is contiguous and on the CPU."""
    row = as_bytes(tensor.detach().cpu())
    # not by way of numpy(), which would forbid the storage to be resized, for good
    view = memoryview((ctypes.c_ubyte * row.nbytes).from_address(row.data_ptr())).cast("B") if row.nbytes else b""
    for start in range(0, len(view), CHUNK):
        yield memoryview(view)[start : start + CHUNK]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, int]:
    """Write a safetensors file, tensor by tensor; returns its size and checksum."""
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    head, places = tensor_header(specs, metadata)
    value = zlib.crc32(head)
    with durable(path) as file:
        file.write(head)
        for name in places:
            for piece in pieces_of(tensors[name]):
                value = zlib.crc32(piece, value)
                file.write(piece)
        size = file.tell()
    return size, value


# ---- other values --------------------------------------------------------------------------------------------------


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON can hold it; tensors in it go into `tensors`, under names that begin with `path`.

    Numbers, strings, None, bytes, lists, tuples, dicts with any such keys, Counters and tensors come back as they were.
    Anything else raises TypeError with its path: it would need pickle, and loading a pickle runs code.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        name = f"{path}#{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if type(value) in (bytes, BytesIO):
        data = value if isinstance(value, bytes) else value.getvalue()
        return {type(value).__name__: encode(torch.tensor(list(data), dtype=torch.uint8), path, tensors)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, dict) and type(value).__name__ in _DICTS:
        items = [[encode(k, f"{path}/key", tensors), encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {type(value).__name__: items}
    raise TypeError(
        f"{path} is of type {type(value).__name__}: only numbers, strings, bytes, lists, dicts and tensors are saved"
    )


_DICTS = {"dict": dict, "OrderedDict": dict, "defaultdict": dict, "Counter": Counter}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Raises KeyError, TypeError or ValueError for what `encode` cannot have written."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("bytes", "BytesIO"):
        data = bytes(decode(content, tensors).tolist())
        return data if kind == "bytes" else BytesIO(data)
    if kind in ("list", "tuple"):
        return [list, tuple][kind == "tuple"](decode(v, tensors) for v in content)
    return _DICTS[kind]({decode(k, tensors): decode(v, tensors) for k, v in content})


def to_text(value: Any, path: str) -> str:
    """`value` as JSON, its tensors too: for small ones. Raises as `encode`."""
    tensors: dict[str, Tensor] = {}
    encoded, inside = encode(value, path, tensors), {}
    for name, tensor in tensors.items():
        data = base64.b64encode(b"".join(pieces_of(tensor))).decode()
        inside[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]
    return json.dumps([encoded, inside])


def from_text(text: str) -> Any:
    """The inverse of `to_text`."""
    encoded, inside = json.loads(text)
    tensors = {}
    for name, (dtype, shape, data) in inside.items():
        flat = torch.tensor(list(base64.b64decode(data)), dtype=torch.uint8)
        tensors[name] = flat.view(getattr(torch, dtype)).view(shape)
    return decode(encoded, tensors)
