"""Chapter 25, checkpoint: each rank writes its shard; any number of ranks, in any stage, goes on from there."""

from __future__ import annotations

import threading
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from minizero.checkpoint.files import Spec, durable
from minizero.checkpoint.manifest import check_tag, read_latest, read_manifest
from minizero.checkpoint.one_file import OneFile, split_extras
from minizero.checkpoint.reading import Reading
from minizero.checkpoint.snapshot import Snapshot, Together
from minizero.collectives import World, on_all_ranks
from minizero.replicate.sending import as_bytes
from minizero.sharding import FlatParameters
from minizero.zero import Zero
from minizero.zero.build import mark_changed
from minizero.zero.state import extra_states, persistent_buffers


def save(
    directory: str | Path,
    tag: str,
    zero: Zero,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
) -> None:
    """Write the checkpoint `directory/tag` and name it in `directory/latest`; call on all ranks, between two steps.

    Saved are parameters, buffers, the random number generators of each rank and, with `optimizer`, its states, options
    and the gradients of an accumulation that is under way. `extra` is anything else, each rank's own: numbers, strings,
    lists, dicts and tensors, such as `{"scheduler": scheduler.state_dict()}`. `directory` must be the same for all
    ranks. With `keep`, only so many of the newest checkpoints stay.

    Raises CheckpointError on all ranks if one fails; then `latest` names what it named before.
    """
    ranks, snapshot = Together(zero), Snapshot()
    ranks.do(f"save {tag!r}", lambda: snapshot.take(ranks, zero, optimizer, tag, step, extra))
    snapshot.write(Path(directory).absolute(), ranks, keep)


class AsyncSaver:
    """Saves in the background: `save()` returns when this rank's shard is copied in host memory.

    One save at a time: the next one waits for it, and raises what went wrong. So does `wait()`, or leaving the context.
    An interpreter that ends waits too; `os._exit()` does not.
    """

    def __init__(self, directory: str | Path, keep: int | None = None) -> None:
        self.directory, self.keep = Path(directory).absolute(), keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, tag: str, zero: Zero, optimizer: Optimizer | None = None, *, step: int, extra: Any = None) -> None:
        """Like the function `save`, but return before the files are written."""
        self.wait()
        ranks, snapshot = Together(zero), Snapshot()

        def take() -> None:
            snapshot.take(ranks, zero, optimizer, tag, step, extra)
            snapshot.copy()

        ranks.do(f"save {tag!r}", take)
        self._thread = threading.Thread(target=self._write, args=[snapshot, ranks], name=f"save {tag}")
        self._thread.start()

    def _write(self, snapshot: Snapshot, ranks: Together) -> None:
        try:
            snapshot.write(self.directory, ranks, self.keep)
        except Exception as error:
            warnings.warn(f"{error}; the next call of the saver will raise this", stacklevel=1)
            self._error = error

    def wait(self) -> None:
        """Block until nothing is being written; raise what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()


# ---- loading -------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What was loaded, and the `extra` that this rank had saved; on another number of ranks, that of rank 0."""

    tag: str
    step: int
    extra: Any


def exists(directory: str | Path, zero: Zero) -> bool:
    """Whether `load` finds a checkpoint in `directory`: rank 0 looks, and all ranks hear it. Call on all ranks.

    A rank that looks itself may not see yet, on a network file system, what the others do: they would wait for it.
    """
    look = partial(read_latest, Path(directory))
    return bool(Together(zero).first_does(f"look for a checkpoint in {directory}", look))


def load(directory: str | Path, zero: Zero, optimizer: Optimizer | None = None, *, tag: str | None = None) -> Loaded:
    """Load the latest checkpoint in `directory`, or the one called `tag`; call on all ranks.

    The number of ranks, the stage and the units may be others than those that saved; each rank reads only what it
    needs. Without `optimizer`, only parameters and buffers are loaded. On the same number of ranks everything is as it
    was, bit by bit; on another one every rank gets the buffers and `extra` of rank 0, and ranks that are new keep their
    random numbers.

    Raises CheckpointError on all ranks, naming the file, parameter or key: before anything is changed, unless a file
    that was whole cannot be read a moment later.
    """
    ranks, directory = Together(zero), Path(directory).absolute()

    def find() -> tuple[str, str]:
        tags = read_latest(directory) if tag is None else [check_tag(tag)]
        if not tags:
            raise FileNotFoundError(f"there is no checkpoint in {directory}: no file named latest")
        return tags[0], read_manifest(directory / tags[0])

    found, text = ranks.first_does(f"find a checkpoint in {directory}", find)
    reading = Reading(directory / found, text, ranks, zero, optimizer)
    ranks.do(f"load {reading.folder}", reading.check_files)
    ranks.do(f"load {reading.folder}", reading.check_content)
    ranks.do(f"load {reading.folder}", reading.apply)
    publish(zero)
    return Loaded(found, reading.manifest.step, reading.rest["extra"])


def publish(zero: Zero) -> None:
    """Make the model hold what the slices hold, the frozen ones too; and let no graph from before run its backward."""
    for flat in zero.flats:
        flat.refresh()
        if flat.aliased:
            with on_all_ranks("gather the parameters that were loaded"):
                zero.world.transport.exact.all_gather(flat.full, flat.shard).wait()
    mark_changed(zero.flats)


# ---- one file of the whole model -----------------------------------------------------------------------------------


def export(path: str | Path, zero: Zero, dtype: torch.dtype | None = None) -> None:
    """Write the whole model as one safetensors file, for plain PyTorch, `transformers` or anyone; call on all ranks.

    It has every key of the plain model's state dict, tied ones with equal values, and rank 0's buffers. Floating-point
    values keep the dtype of the master values, or become `dtype`. Rank 0 gets one flat buffer after the other: it holds
    no more than that besides its shard. Extra states that are no tensors are JSON in the file's metadata:
    `one_file.read` brings them back. Raises CheckpointError on all ranks; then no file is there, or the old one.
    """
    ranks, path = Together(zero), Path(path).absolute()
    kept: dict[str, Any] = persistent_buffers(zero.model)
    ranks.do(f"write {path}", lambda: kept.update(extra_states(zero.model)))
    kept, texts = split_extras(kept)

    def spec(tensor: Tensor, shape: torch.Size) -> Spec:
        return (dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype), tuple(shape)

    specs = {
        holder.full_name: spec(flat.slices[0], shape)
        for flat in zero.flats
        for shape, holders in zip(flat.layout.shapes, flat.holders, strict=True)
        for holder in holders
    }
    specs |= {name: spec(tensor, tensor.shape) for name, tensor in kept.items()}
    out: Any = None

    def begin() -> None:
        nonlocal out
        out = OneFile(stack.enter_context(durable(path)), specs, texts)

    def put_flat(flat: FlatParameters, whole: Tensor) -> None:
        for value, holders in zip(flat.layout.unflatten(whole), flat.holders, strict=True):
            for holder in holders:
                out.put(holder.full_name, value)

    def put_kept() -> None:
        for name, tensor in kept.items():
            out.put(name, tensor)

    with ExitStack() as stack:
        ranks.first_does(f"write {path}", begin)
        for flat in zero.flats:
            whole = gather_to_first(flat, zero.world) if ranks.world.copy == 0 else flat.master
            ranks.first_does(f"write {path}", partial(put_flat, flat, whole))
        ranks.first_does(f"write {path}", put_kept)
        ranks.first_does(f"complete {path}", stack.close)


def gather_to_first(flat: FlatParameters, world: World) -> Tensor:
    """The master values of all ranks, padded, on rank 0; what this rank has, on the others."""
    shard = flat.master.to(flat.full.device)
    if world.rank != 0:
        dist.gather(as_bytes(shard), group=world.shard, group_dst=0)
        return shard
    whole = shard.new_empty(flat.layout.padded_numel)
    parts = [as_bytes(part) for part in whole.view(flat.layout.world, -1)]
    dist.gather(as_bytes(shard), parts, group=world.shard, group_dst=0)
    return whole
