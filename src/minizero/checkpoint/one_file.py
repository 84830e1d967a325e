"""Chapter 25, checkpoint: from a sharded checkpoint to one file, without the model and without its ranks.

    python -m minizero.checkpoint FOLDER OUT.safetensors [--tag TAG]

FOLDER is where `latest` lies, or one checkpoint in it. The file has every key of the plain model's state dict, also the
second of two that are tied. It is written in pieces: no more than `CHUNK` bytes of it are in memory at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from safetensors import safe_open
from torch import Tensor

from minizero.checkpoint.files import (
    CHUNK,
    Spec,
    check_plain,
    checksum,
    durable,
    from_text,
    pieces_of,
    tensor_header,
    to_text,
)
from minizero.checkpoint.manifest import (
    Manifest,
    check_tag,
    dtype_of,
    file_of,
    parse_manifest,
    read_latest,
    read_manifest,
    span,
)
from minizero.checkpoint.reading import naming, read_rest
from minizero.zero.state import SAFETENSORS_DTYPES


def split_extras(extras: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Extra states as a file of tensors holds them: those that are tensors, and JSON of the others for its metadata."""
    tensors = {key: value for key, value in extras.items() if isinstance(value, Tensor)}
    return tensors, {key: to_text(value, key) for key, value in extras.items() if key not in tensors}


def read(path: str | Path) -> dict[str, Any]:
    """The state dict in a file that `export` or `merge` wrote, extra states included: `load_state_dict` takes it."""
    with naming(Path(path)), safe_open(path, "pt") as file:
        state: dict[str, Any] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        texts = {key: text for key, text in (file.metadata() or {}).items() if key.endswith("_extra_state")}
        return state | {key: from_text(text) for key, text in texts.items()}


class OneFile:
    """A file of tensors to which each is written where it belongs, in any order and in parts, as `specs` says."""

    def __init__(self, file: BinaryIO, specs: Mapping[str, Spec], texts: Mapping[str, str]) -> None:
        self._file, self._specs = file, specs
        head, self._places = tensor_header(specs, {"format": "pt"} | dict(texts))
        file.write(head)

    def put(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write the elements of `name` from `start` on, in its dtype."""
        dtype, _ = self._specs[name]
        self._file.seek(self._places[name] + start * dtype.itemsize)
        self._file.writelines(pieces_of(values.to(dtype)))


class Piece(NamedTuple):
    """`numel` elements of a rank's file, under `key`: those of the parameter with these `names` from `start` on."""

    names: list[str]
    key: str
    dtype: str
    start: int
    numel: int


def merge(folder: str | Path, path: str | Path, tag: str | None = None) -> Path:
    """Write the parameters, buffers and extra states (rank 0's) of a checkpoint into one new file; returns its folder.

    Raises OSError or ValueError, naming the file or key, if something is missing or damaged, or if `path` is there.
    """
    folder, path = find(Path(folder), tag), Path(path)
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} is there already: name another file")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.absolute().parent}")
    manifest = parse_manifest(read_manifest(folder), folder)
    for name in {file_of(number) for number in range(manifest.world)}:
        check_file(folder, name, manifest)
    with naming(folder / file_of(0)):
        tensors, rest = read_rest(folder / file_of(0))
        kept, texts = split_extras(rest["modules"])
    kept |= {name.removeprefix("buffer/"): t for name, t in tensors.items() if name.startswith("buffer/")}
    specs: dict[str, Spec] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in kept.items()}
    for saved in (p for flat in manifest.flats for p in flat.parameters):
        specs |= dict.fromkeys([saved.name, *saved.aliases], (dtype_of(saved.dtypes["master"]), saved.shape))
    with durable(path) as file:
        out = OneFile(file, specs, texts)
        for name, tensor in kept.items():
            out.put(name, tensor)
        for number in range(manifest.world):
            for piece, at, values in parts_of(folder / file_of(number), pieces(manifest, number)):
                for name in piece.names:
                    out.put(name, values, piece.start + at)
    return folder


def find(folder: Path, tag: str | None) -> Path:
    """The checkpoint that is meant: `folder` itself, or the one called `tag` in it, or the one that is in `latest`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if tag is None and (folder / "manifest.json").exists():
        return folder.absolute()
    tags = [check_tag(tag)] if tag is not None else read_latest(folder)
    if not tags:
        raise FileNotFoundError(f"there is no checkpoint in {folder}: no file named latest, and no manifest.json")
    if not (folder / tags[0]).is_dir():
        raise FileNotFoundError(f"there is no checkpoint {tags[0]!r} in {folder}; latest has {read_latest(folder)}")
    return (folder / tags[0]).absolute()


def check_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise OSError or ValueError unless the file is as the manifest says."""
    size, expected = check_plain(folder / name), manifest.files[name]
    if size != expected.nbytes:
        raise ValueError(f"{folder / name} has {size} bytes, the manifest says {expected.nbytes}")
    if checksum(folder / name) != expected.crc32:
        raise ValueError(f"{folder / name} is damaged, or the file of another checkpoint or rank")


def pieces(manifest: Manifest, number: int) -> Iterator[Piece]:
    """What the file of a rank has of each parameter."""
    for flat in manifest.flats:
        layout = flat.layout(manifest.world)
        for i, saved in enumerate(flat.parameters):
            here = span(layout, i, number)
            names = [saved.name, *saved.aliases]
            yield Piece(names, f"master/{saved.name}", saved.dtypes["master"], here.start, len(here))


def parts_of(path: Path, wanted: Iterator[Piece]) -> Iterator[tuple[Piece, int, Tensor]]:
    """Read the pieces in parts of at most CHUNK bytes: (piece, where in it the part begins, values)."""
    with naming(path), safe_open(path, "pt", backend="pread") as file:
        for piece in wanted:
            there, dtype = file.get_slice(piece.key), dtype_of(piece.dtype)
            if (there.get_dtype(), there.get_shape()) != (SAFETENSORS_DTYPES.get(dtype), [piece.numel]):
                raise ValueError(f"{piece.key!r} is {there.get_dtype()} {there.get_shape()}")
            step = CHUNK // dtype.itemsize
            for at in range(0, piece.numel, step):
                yield piece, at, there[at : min(at + step, piece.numel)]


def main(arguments: Sequence[str] | None = None) -> None:
    """What `python -m minizero.checkpoint` does; exit code 1 and one line if it cannot."""
    parser = argparse.ArgumentParser("python -m minizero.checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of checkpoints, or a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write, which must not be there")
    parser.add_argument("--tag", help="which checkpoint; default: the latest")
    options = parser.parse_args(arguments)
    try:
        found = merge(options.folder, options.out, options.tag)
    except (OSError, ValueError) as error:
        parser.exit(1, f"could not write {options.out}: {error}\n")
    print(f"{found} -> {options.out}: {options.out.stat().st_size:,} bytes")
