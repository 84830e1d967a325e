"""Chapter 26, config: `training_data=` for all ranks, each sample on one of them, in another order in each epoch.

A data set with a length is shuffled alike on all ranks, from the number of the epoch, and each takes its share. A
stream has an order of its own: all ranks read all of it, and each keeps every N-th sample. Which rank gets what is thus
decided without a word between them, and it is right only if all of them begin with the same. So they compare that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from minizero.replicate import check_agreement

YOUR_OWN = "or loop over a DataLoader of your own, and give each rank its share"


def check_data(data: Any) -> None:
    """Raise TypeError, with the way that works, for what cannot be shared out."""
    if isinstance(data, DataLoader):
        raise TypeError("training_data= takes the data set, and makes the DataLoader: loop over yours without it")
    if isinstance(data, IterableDataset):
        return
    if hasattr(data, "__next__"):
        raise TypeError(
            f"training_data= is a {type(data).__name__}, and ends with one epoch: give a list or a data set"
        )
    if isinstance(data, Mapping | str) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        how = "give one with a length and items by number, or a torch.utils.data.IterableDataset"
        raise TypeError(f"training_data= is a {type(data).__name__}: {how}")


class Shuffled(DistributedSampler[Any]):
    """This rank's samples in an epoch, from the `start`-th on."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.start, None)


class EveryNth(IterableDataset[Any]):
    """This rank's samples of a stream, from the `start`-th on: of each N samples one. Fewer than N at its end are left.

    So all ranks have equally many. Raises ValueError on all of them if the stream begins with other samples on one:
    then it shares itself out already, or is shuffled without a seed, and every N-th of it would be the wrong share.
    """

    start = 0

    def __init__(self, stream: Any, world: int, rank: int, group: ProcessGroup | None) -> None:
        self.stream, self.world, self.rank, self.group = stream, world, rank, group

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        some = list(islice(samples, self.world))
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, fingerprint(some), group=self.group)
        if len(set(everyone)) > 1:
            other = next(rank for rank, each in enumerate(everyone) if each != everyone[0])
            raise ValueError(
                f"training_data= begins with other samples on rank {other} than on rank 0. Each rank keeps every "
                f"{self.world}-th sample of what must be the same stream on all: seed its order, {YOUR_OWN}"
            )
        count = 0
        while len(some) == self.world:
            if count >= self.start:
                yield some[self.rank]
            count += 1
            some = list(islice(samples, self.world))


def fingerprint(value: Any) -> str:
    """Equal on two ranks for equal tensors, arrays, numbers and text, in lists, tuples and dicts."""
    if isinstance(value, Mapping):
        value = [[key, value[key]] for key in value]
    if isinstance(value, list | tuple):
        text = repr([fingerprint(each) for each in value]).encode()
    elif isinstance(value, Tensor | numpy.ndarray):
        array = value.detach().cpu().contiguous().view(-1) if isinstance(value, Tensor) else value
        if isinstance(array, Tensor):
            array = array.view(torch.uint8).numpy()
        text = str((value.dtype, tuple(value.shape))).encode() + array.tobytes()
    elif isinstance(value, str | bytes | int | float | bool | None):
        text = repr(value).encode()
    else:
        text = type(value).__name__.encode()  # what it holds is not looked at
    return hashlib.sha256(text).hexdigest()


class Feed(DataLoader[Any]):
    """This rank's micro-batches; iterate on all ranks alike. Each `for` is an epoch, and has an order of its own.

    `set_epoch` chooses the epoch of the next `for`; a data set with a `set_epoch` is told too. After a checkpoint was
    loaded, the next `for` is the rest of the epoch in which it was saved.
    """

    def __init__(
        self,
        data: Any,
        batch: int,
        place: tuple[int, int],
        group: ProcessGroup | None,
        at_end: Callable[[], None],
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
    ) -> None:
        rank, self.world = place
        is_stream = isinstance(data, IterableDataset)
        self.source, self.group, self.at_end = data, group, at_end
        self.epoch = self.seen = 0  # the epoch that runs, or the next one; samples of it, of all ranks
        self._has_begun = False
        self._shares: Any = EveryNth(data, self.world, rank, group) if is_stream else Shuffled(data, self.world, rank)
        options: dict[str, Any] = {"collate_fn": collate_fn, "drop_last": drop_last}
        options |= {} if is_stream else {"sampler": self._shares}
        dataset: Any = self._shares if is_stream else data
        super().__init__(dataset, batch, **options)

    def set_epoch(self, epoch: int) -> None:
        """Let the next `for` be this epoch, from its beginning."""
        self.load_state_dict({"epoch": epoch, "seen": 0})

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many samples of it all ranks together have had."""
        return {"epoch": self.epoch, "seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next `for` be the rest of that epoch."""
        self.epoch, self.seen, self._has_begun = state["epoch"], state["seen"], False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._has_begun:  # by another iterator, which is not at its end: that epoch is over
            self.set_epoch(self.epoch + 1)
        check_agreement([f"sample {self.seen} of epoch {self.epoch}"], self.group, "places in training_data")
        for told in (self._shares, self.source):
            if hasattr(told, "set_epoch"):
                told.set_epoch(self.epoch)
        self._shares.start, self._has_begun = self.seen // self.world, True
        epoch, samples = self.epoch, self.batch_size * self.world  # type: ignore[operator]
        try:
            for batch in super().__iter__():
                self.seen += samples
                yield batch
        except GeneratorExit:  # a loop that was left: its epoch is over as well
            self._end(epoch)
            raise
        self._end(epoch)
        self.at_end()

    def _end(self, epoch: int) -> None:
        if self.epoch == epoch and self._has_begun:
            self.set_epoch(epoch + 1)
