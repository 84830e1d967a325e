"""Chapter 25, checkpoint: what a rank has to save, and how all ranks make a checkpoint of it, or none does."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from minizero.checkpoint.files import PARTIAL, check_plain, durable, encode, flush_folder, write_tensors
from minizero.checkpoint.manifest import CheckpointError, Manifest, check_tag, dtype_name, file_of, read_latest
from minizero.collectives import on_all_ranks
from minizero.sharding import FlatParameters
from minizero.zero import Zero
from minizero.zero.state import extra_states, persistent_buffers

T = TypeVar("T")


class Together:
    """All ranks of a `Zero`, and how they do something together: what goes wrong on one has gone wrong on all."""

    def __init__(self, zero: Zero) -> None:
        self.world = zero.world.beside("save")  # saves run in the background

    def do(self, what: str, work: Callable[[], T]) -> list[T]:
        """What `work()` returned on each rank, in the order of their numbers.

        Raises CheckpointError on all ranks, with the words of the first that failed, if it raised on any.
        """
        cause: Exception | None = None
        try:
            mine: tuple[bool, Any] = True, work()
        except Exception as error:
            cause, mine = error, (False, f"{type(error).__name__}: {error}")
        with on_all_ranks(what):
            everyone = self.world.everyone(mine)
        for rank, (worked, answer) in enumerate(everyone):
            if not worked:
                raise CheckpointError(f"could not {what}: rank {rank}: {answer}") from cause
        return [answer for _, answer in everyone]

    def first_does(self, what: str, work: Callable[[], T]) -> T:
        """What `work()` returned on rank 0, on all ranks; or CheckpointError on all."""
        answers = self.do(what, lambda: work() if self.world.number == 0 else None)
        return answers[0]  # type: ignore[return-value]


# ---- what a rank has -----------------------------------------------------------------------------------------------


def get_random_states() -> dict[str, Any]:
    """The states of all global generators of random numbers: torch's, Python's, numpy's and this rank's GPU's."""
    _, keys, *rest = numpy.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy.asarray(keys).tolist(), *rest),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any], only_try: bool = False) -> None:
    """Set them. With `only_try`, set new generators instead: an invalid state then raises before harm is done."""
    keys, *rest = states["numpy"]
    numpy_state = ("MT19937", numpy.asarray(keys, dtype=numpy.uint32), *rest)
    if only_try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        numpy.random.RandomState().set_state(numpy_state)
        return
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy.random.set_state(numpy_state)
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def group_names(zero: Zero, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of the optimizer. Raises ValueError for a group that is not zero's."""
    names = {id(piece): name for name, piece in zero.named_slices()}
    try:
        return [[names[id(piece)] for piece in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ValueError("the optimizer holds tensors that are no slices of this Zero: use zero.optimizer()") from None


def cut_tensors(flat: FlatParameters, index: int, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """All that this rank keeps for its slice of a parameter and that is cut like it, by kind.

    Raises TypeError for a state that is neither cut like the parameter nor a single number.
    """
    piece = flat.slices[index]
    found = {"master": piece.detach()}
    if optimizer is not None:
        found |= {} if piece.grad is None else {"grad": piece.grad}
        for key, value in optimizer.state.get(piece, {}).items():
            if isinstance(value, Tensor) and value.shape == piece.shape:
                found[f"state/{key}"] = value
            elif isinstance(value, Tensor) and value.dim() > 0:
                raise TypeError(f"state {key!r} of parameter {flat.names[index]!r} is not element-wise")
    return found


class Snapshot:
    """What a rank is going to write: the tensors and the metadata of its file, and the manifest without the files."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        self.manifest: dict[str, Any] = {}

    def take(self, ranks: Together, zero: Zero, optimizer: Optimizer | None, tag: str, step: int, extra: Any) -> None:
        """Look at all there is to save, without a copy. Raises RuntimeError in the middle of a step."""
        if zero.is_gathered or zero.has_unreduced:
            where = "inside gathered()" if zero.is_gathered else "before the gradients of a backward are reduced"
            raise RuntimeError(f"{where}, the slices do not hold all there is: save after the step")
        self.tensors |= {f"buffer/{n}": b.detach() for n, b in persistent_buffers(zero.model).items()}
        states: dict[str, Any] = {}  # of the optimizer: what is not cut
        groups = optimizer.param_groups if optimizer is not None else []
        updated = {id(piece) for group in groups for piece in group["params"]}
        flats = []
        for unit, flat in [(u, flat) for u in zero.units for flat in u.flats]:
            saved = []
            if flat.aliased and flat.shard is not flat.master:
                flat.take_shard()  # what was changed in place since the last step
            for i, (name, piece) in enumerate(zip(flat.names, flat.slices, strict=True)):
                cut = cut_tensors(flat, i, optimizer if id(piece) in updated else None)
                if ranks.world.copy == 0:
                    self.tensors |= {f"{kind}/{name}": value for kind, value in cut.items()}
                state = optimizer.state.get(piece, {}) if optimizer is not None else {}
                states[name] = {key: value for key, value in state.items() if f"state/{key}" not in cut}
                dtypes = {kind: dtype_name(value.dtype) for kind, value in cut.items()}
                aliases = [holder.full_name for holder in flat.holders[i][1:]]
                shape = list(flat.layout.shapes[i])
                saved.append({"name": name, "shape": shape, "dtypes": dtypes, "aliases": aliases})
            flats.append({"unit": unit.name, "requires_grad": flat.requires_grad, "parameters": saved})
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        rest = {"extra": extra, "random": get_random_states(), "states": states, "options": options}
        rest["modules"] = extra_states(zero.model)
        self.metadata = {"minizero": json.dumps(encode(rest, "rest", self.tensors))}
        self.manifest = {"tag": check_tag(tag), "step": step, "stage": zero.stage, "flats": flats}
        self.manifest |= {"world": ranks.world.size, "replicas": ranks.world.copies}
        self.manifest["groups"] = None if optimizer is None else group_names(zero, optimizer)

    def copy(self) -> None:
        """Keep copies in host memory instead, so that training may go on."""
        self.tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}

    # ---- making it a checkpoint

    def write(self, directory: Path, ranks: Together, keep: int | None) -> None:
        """Make the snapshots of all ranks a checkpoint. Whenever this is killed, `latest` names a whole one.

        The folder grows under another name; it gets its own when every rank's file and then the manifest are on disk.
        """
        folder, partial = directory / self.manifest["tag"], directory / (self.manifest["tag"] + PARTIAL)
        before = ranks.first_does(f"begin checkpoint {folder}", lambda: begin(directory, partial, folder.name, keep))
        mine = partial / file_of(ranks.world.number)
        written = ranks.do(f"write checkpoint {folder}", lambda: write_tensors(mine, self.tensors, self.metadata))

        def complete() -> None:
            files = {file_of(i): {"nbytes": nbytes, "crc32": crc32} for i, (nbytes, crc32) in enumerate(written)}
            for name, expected in files.items():
                if check_plain(partial / name) != expected["nbytes"]:
                    raise OSError(f"{partial / name} is not what its rank has written: is it the same folder there?")
            manifest = Manifest.model_validate_json(json.dumps(self.manifest | {"files": files}))
            with durable(partial / "manifest.json") as file:
                file.write(manifest.model_dump_json(indent=1).encode())
            complete_folder(directory, partial, folder)
            name_latest(directory, [folder.name, *(tag for tag in before if tag != folder.name)], keep)

        ranks.first_does(f"complete checkpoint {folder}", complete)


def begin(directory: Path, partial: Path, tag: str, keep: int | None) -> list[str]:
    """Make the folder to write into, and take away what killed saves have left; returns the tags in `latest`."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob("*" + PARTIAL):
        remove(left)
    tags = read_latest(directory)
    if tags[:1] == [tag]:
        raise FileExistsError(f"{directory / tag} is the latest checkpoint: save under another tag")
    partial.mkdir()
    return tags


def complete_folder(directory: Path, partial: Path, folder: Path) -> None:
    """Give the folder its name. One that has this name already is older, or its save was killed: it is removed."""
    if folder.exists():
        aside = directory / (folder.name + ".old" + PARTIAL)
        folder.replace(aside)
        remove(aside)
    partial.replace(folder)
    flush_folder(directory)


def name_latest(directory: Path, tags: list[str], keep: int | None) -> None:
    """Write `latest`, and then remove the checkpoints that are no longer in it."""
    with durable(directory / "latest") as file:
        file.write("".join(f"{tag}\n" for tag in tags[:keep]).encode())
    for tag in tags[len(tags[:keep]) :]:
        if (directory / tag).exists():
            aside = directory / (tag + PARTIAL)
            (directory / tag).replace(aside)  # so that it is never half a checkpoint
            remove(aside)


def remove(path: Path) -> None:
    """A folder and all in it, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
