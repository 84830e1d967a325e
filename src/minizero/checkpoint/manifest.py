"""Chapter 25, checkpoint: the manifest says what the files of a checkpoint hold, and where each element is.

A checkpoint is a folder: one safetensors file for each rank, and `manifest.json`. Beside the folders lies `latest`, a
text file with their names, newest first. All of them are read as if a stranger had written them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from minizero.checkpoint.files import PARTIAL, read_text
from minizero.sharding import FlatParameters, Layout


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file, parameter or key and the rank."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SavedParameter(_Strict):
    """A parameter, and the dtype of each kind of element-wise value saved for it: "master", "grad", "state/exp_avg".

    `aliases` are its other names in the state dict, if it is tied.
    """

    name: str
    shape: tuple[NonNegativeInt, ...]
    dtypes: dict[str, str]
    aliases: list[str] = []


class SavedFlat(_Strict):
    """Parameters that shared a flat buffer, in order: with the number of ranks, this is their `Layout`."""

    unit: str
    requires_grad: bool
    parameters: list[SavedParameter]

    def layout(self, world: int) -> Layout:
        """How `world` ranks cut the buffer."""
        return Layout(tuple(torch.Size(p.shape) for p in self.parameters), world)


class SavedFile(_Strict):
    """What a rank's file must be like."""

    nbytes: NonNegativeInt
    crc32: NonNegativeInt


class Manifest(_Strict):
    """The content of `manifest.json`. `groups` are the names of the parameters in each of the optimizer's groups."""

    format: Literal["minizero checkpoint 1"] = "minizero checkpoint 1"
    tag: str
    step: NonNegativeInt
    stage: int
    world: PositiveInt
    replicas: PositiveInt
    flats: list[SavedFlat]
    groups: list[list[str]] | None
    files: dict[str, SavedFile]


def file_of(number: int) -> str:
    """The name of a rank's file in a checkpoint's folder."""
    return f"rank-{number:05}.safetensors"


def check_tag(tag: str) -> str:
    """Raise ValueError unless `tag` is a folder name that leads nowhere else."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,99}", tag) or tag.endswith(PARTIAL):
        raise ValueError(f"tag {tag!r} must be letters, digits and any of _ . = -, and not end in {PARTIAL}")
    return tag


def read_latest(directory: Path) -> list[str]:
    """The tags in `latest`, newest first; none if there is no such file."""
    path = directory / "latest"
    if not path.exists() and not path.is_symlink():
        return []
    try:
        return [check_tag(line) for line in read_text(path, 1 << 20).splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_manifest(folder: Path) -> str:
    """The text of the manifest in `folder`, which must be a folder and no link to one."""
    if folder.is_symlink() or not folder.is_dir():
        raise OSError(f"{folder} is no folder")
    return read_text(folder / "manifest.json")


def parse_manifest(text: str, folder: Path) -> Manifest:
    """Check the text of a manifest. Raises ValueError naming the file and the key."""
    path = folder / "manifest.json"
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}") from None
    if manifest.tag != folder.name:
        raise ValueError(f"{path} is the manifest of {manifest.tag!r}")
    count = manifest.world * manifest.replicas
    if count != len(manifest.files) or set(manifest.files) != {file_of(i) for i in range(count)}:
        raise ValueError(f"{path}: files: must be those of {count} ranks, there are {sorted(manifest.files)[:3]} ...")
    names = [name for flat in manifest.flats for p in flat.parameters for name in (p.name, *p.aliases)]
    if len(names) != len(set(names)):
        raise ValueError(f"{path}: flats: a parameter is there twice")
    return manifest


# ---- where each element is -----------------------------------------------------------------------------------------


def span(layout: Layout, index: int, rank: int) -> range:
    """Which elements of parameter `index`, counted from its own first, lie in `rank`'s shard."""
    inside, start = layout.slice_of(index, rank), rank * layout.shard_numel - layout.offsets[index]
    return range(start + inside.start, start + inside.stop)


def sources(saved: Layout, index: int, wanted: range) -> Iterator[tuple[int, slice, slice]]:
    """Where the elements `wanted` of parameter `index` are: (rank, part of that rank's slice, part of `wanted`)."""
    if len(wanted) == 0:
        return
    first, last = ((saved.offsets[index] + i) // saved.shard_numel for i in (wanted[0], wanted[-1]))
    for rank in range(first, last + 1):
        there = span(saved, index, rank)
        start, stop = max(there.start, wanted.start), min(there.stop, wanted.stop)
        yield (
            rank,
            slice(start - there.start, stop - there.start),
            slice(start - wanted.start, stop - wanted.start),
        )


class Move(NamedTuple):
    """Elements to be read: those at `part` of the tensor `key`, which has `numel` elements, in the file of `number`.

    They become the elements `target` of what this rank keeps of the kind `kind` for the parameter `name`.
    """

    number: int
    key: str
    dtype: torch.dtype
    numel: int
    part: slice
    name: str
    kind: str
    target: slice


def moves(manifest: Manifest, flats: Sequence[FlatParameters], kinds: Sequence[str]) -> list[Move]:
    """All that this rank has to read, in the order of the files: of each file only the ranges it needs.

    `kinds` are beginnings of the kinds wanted: ("master",) leaves the optimizer out. Raises ValueError, naming the
    parameter, if the checkpoint is of another model.
    """
    here = {name: (flat, i) for flat in flats for i, name in enumerate(flat.names)}
    saved = {p.name: (flat, i) for flat in manifest.flats for i, p in enumerate(flat.parameters)}
    for name in sorted(here.keys() ^ saved.keys()):
        raise ValueError(f"parameter {name!r} is not in the {'checkpoint' if name in here else 'model'}")
    for name, (flat, i) in here.items():
        parameter = saved[name][0].parameters[saved[name][1]]
        theirs = parameter.shape, parameter.dtypes.get("master")
        ours = tuple(flat.layout.shapes[i]), dtype_name(flat.slices[i].dtype)
        if theirs != ours:
            raise ValueError(f"parameter {name!r} was saved as {theirs[1]} {theirs[0]}, here it is {ours[1]} {ours[0]}")
    layouts = {id(flat): flat.layout(manifest.world) for flat in manifest.flats}
    found = []
    for name, (flat, i) in here.items():
        there, j = saved[name]
        layout, wanted = layouts[id(there)], span(flat.layout, i, flat.rank)
        for kind, dtype in there.parameters[j].dtypes.items():
            if kind.startswith(tuple(kinds)):
                for rank, part, target in sources(layout, j, wanted):
                    numel = len(span(layout, j, rank))
                    found.append(Move(rank, f"{kind}/{name}", dtype_of(dtype), numel, part, name, kind, target))
    return sorted(found, key=lambda move: move.number)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse. Raises ValueError for what is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
