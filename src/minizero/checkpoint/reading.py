"""Chapter 25, checkpoint: reading one, which changes nothing until all of it has been looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from minizero.checkpoint.files import check_plain, checksum, decode
from minizero.checkpoint.manifest import Manifest, dtype_of, file_of, moves, parse_manifest
from minizero.checkpoint.snapshot import Together, group_names, set_random_states
from minizero.replicate.sending import fill
from minizero.zero import Zero
from minizero.zero.state import SAFETENSORS_DTYPES, extra_states, persistent_buffers, tell_loaded

# Options that learning rate schedulers write into the groups, when they are made.
SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise whatever is wrong with a file's content as a ValueError that begins with its path."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


class Reading:
    """A checkpoint on its way into a Zero: `check_files` and `check_content` change nothing, `apply` does it."""

    def __init__(self, folder: Path, text: str, ranks: Together, zero: Zero, optimizer: Optimizer | None) -> None:
        self.folder, self.text, self.ranks, self.zero, self.optimizer = folder, text, ranks, zero, optimizer
        self.manifest: Manifest
        self.rest: dict[str, Any] = {}  # of this rank, or of rank 0
        self.tensors: dict[str, Tensor] = {}  # of the same file: all that is not cut
        self.random: dict[str, Any] | None = None

    def check_files(self) -> None:
        """Sizes and checksums of all files, each looked at by one rank."""
        self.manifest = parse_manifest(self.text, self.folder)
        count = self.ranks.world.count
        for name, file in list(self.manifest.files.items())[self.ranks.world.number :: count]:
            size = check_plain(self.folder / name)
            if size != file.nbytes:
                raise ValueError(f"{self.folder / name} has {size} bytes, the manifest says {file.nbytes}")
            if checksum(self.folder / name) != file.crc32:
                raise ValueError(f"{self.folder / name} is damaged, or the file of another checkpoint or rank")

    def check_content(self) -> None:
        """Whether the checkpoint fits the model and the optimizer, and its files what the manifest says."""
        kinds = ("master",) if self.optimizer is None else ("master", "grad", "state/")
        self.moves = moves(self.manifest, self.zero.flats, kinds)
        for number, group in groupby(self.moves, key=lambda move: move.number):
            path = self.folder / file_of(number)
            with naming(path), safe_open(path, "pt") as file:
                for move in group:
                    there = file.get_slice(move.key)
                    if (there.get_dtype(), there.get_shape()) != (SAFETENSORS_DTYPES[move.dtype], [move.numel]):
                        raise ValueError(f"{move.key!r} is {there.get_dtype()} {there.get_shape()}")
        same = (self.manifest.world, self.manifest.replicas) == (self.ranks.world.size, self.ranks.world.copies)
        path = self.folder / file_of(self.ranks.world.number if same else 0)
        with naming(path):
            self.tensors, self.rest = read_rest(path)
            self._check_buffers()
        if self.optimizer is not None:
            self._check_groups(self.optimizer)
            for name, _ in self.zero.named_slices():
                if not isinstance(self.rest["states"].get(name), dict):
                    raise ValueError(f"{path}: no optimizer state of {name!r}")
            if self.ranks.world.number < len(self.manifest.files):
                path = self.folder / file_of(self.ranks.world.number)
                with naming(path):
                    self.random = read_rest(path)[1]["random"]
                    set_random_states(self.random, only_try=True)

    def _check_buffers(self) -> None:
        buffers = {f"buffer/{name}": buffer for name, buffer in persistent_buffers(self.zero.model).items()}
        saved = {name: tensor for name, tensor in self.tensors.items() if name.startswith("buffer/")}
        for name in sorted(buffers.keys() | saved.keys()):
            theirs, ours = (
                f"{found[name].dtype} {tuple(found[name].shape)}" if name in found else "not there"
                for found in (saved, buffers)
            )
            if theirs != ours:
                raise ValueError(f"{name!r} is {theirs} in the file, and {ours} in the model")
        for key in sorted(self.rest["modules"].keys() ^ extra_states(self.zero.model).keys()):
            where = "file" if key in self.rest["modules"] else "model"
            raise ValueError(f"extra state {key!r} is in the {where} only")

    def _check_groups(self, optimizer: Optimizer) -> None:
        saved, here = self.manifest.groups, group_names(self.zero, optimizer)
        if saved is None:
            raise ValueError("the checkpoint was saved without an optimizer")
        if len(saved) != len(here):
            raise ValueError(f"the optimizer has {len(here)} parameter groups, the checkpoint {len(saved)}")
        for number, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
            for name in sorted({*theirs} ^ {*ours}):
                where = "the optimizer" if name in ours else "the checkpoint"
                raise ValueError(f"parameter group {number}: {name!r} is in it in {where} only")
            options = {*dict(self.rest["options"][number])}, {*optimizer.param_groups[number]} - {"params"}
            for key in sorted((options[0] ^ options[1]) - SCHEDULERS):
                where = "the optimizer" if key in options[1] else "the checkpoint"
                raise ValueError(f"parameter group {number}: option {key!r} is in {where} only: is it another class?")

    # ---- and now for good

    @torch.no_grad()
    def apply(self) -> None:
        """Write the values into this rank's slices, buffers, optimizer and generators."""
        self.zero.zero_grad()
        targets: dict[tuple[str, str], Tensor] = {}
        for flat in self.zero.flats:
            targets |= {(n, "master"): piece for n, piece in zip(flat.names, flat.slices, strict=True)}
        if self.optimizer is not None:
            targets |= self._make_room(self.optimizer)
        for number, group in groupby(self.moves, key=lambda move: move.number):
            with safe_open(self.folder / file_of(number), "pt") as file:
                for move in group:
                    targets[move.name, move.kind][move.target] = file.get_slice(move.key)[move.part]
        for name, buffer in persistent_buffers(self.zero.model).items():
            fill(buffer, self.tensors[f"buffer/{name}"])
        tell_loaded(self.zero.model, self.rest["modules"])
        if self.optimizer is not None:
            for ours, theirs in zip(self.optimizer.param_groups, self.rest["options"], strict=True):
                ours.update(theirs)  # the dict stays: schedulers hold it
            for hook in self.optimizer._optimizer_load_state_dict_post_hooks.values():
                hook(self.optimizer)
        if self.random is not None:
            set_random_states(self.random)

    def _make_room(self, optimizer: Optimizer) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Give every slice the states that it had; yields the tensors that are to be filled, by name and kind."""
        names = {id(piece): name for name, piece in self.zero.named_slices()}
        saved = {p.name: p for flat in self.manifest.flats for p in flat.parameters}
        for group, piece in [(g, piece) for g in optimizer.param_groups for piece in g["params"]]:
            name, state = names[id(piece)], optimizer.state[piece]
            before = dict(state)
            state.clear()
            for kind, dtype in saved[name].dtypes.items():
                old = piece.grad if kind == "grad" else before.get(kind.removeprefix("state/"))
                tensor: Tensor = torch.empty(0) if old is None else old
                if (tensor.shape, tensor.dtype) != (piece.shape, dtype_of(dtype)):
                    tensor = torch.empty_like(piece, dtype=dtype_of(dtype), requires_grad=False)
                if kind == "grad":
                    piece.grad = tensor
                elif kind != "master":
                    state[kind.removeprefix("state/")] = tensor
                yield (name, kind), piece if kind == "master" else tensor
            for key, value in self.rest["states"][name].items():  # step counts are where the class has them
                moves = isinstance(value, Tensor) and (key != "step" or group.get("fused") or group.get("capturable"))
                state[key] = value.to(piece.device) if moves else value
            if not state:
                del optimizer.state[piece]


def read_rest(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a rank's file holds besides tensors that are cut: the other tensors by name, and all other values."""
    with safe_open(path, "pt") as file:
        # copies: what the library returns keeps the file open, and changes with it
        tensors = {n: file.get_tensor(n).clone() for n in file.keys() if n.startswith(("buffer/", "rest/"))}  # noqa: SIM118
        rest = decode(json.loads(file.metadata()["minizero"]), tensors)
    rest.setdefault("modules", {})  # minizero before there were any
    kinds = {key: type(value) for key, value in rest.items() if key != "extra"}
    if "extra" not in rest or kinds != {"random": dict, "states": dict, "options": list, "modules": dict}:
        raise ValueError("the metadata are not minizero's")
    return tensors, rest
