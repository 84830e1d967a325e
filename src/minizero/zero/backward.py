"""Chapter 15, zero: the backward that runs, and what one that raised has left behind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from minizero.gather import Gatherer
from minizero.reduce import Reducer
from minizero.sharding import NotCopied


class Backward(NotCopied):
    """What begins a backward, what ends it, and what is left to do after it.

    `number` is autograd's for the backward that runs, None when none does. `has_unreduced` says that gradients wait on
    their ranks. `spoiled` are slices whose gradients a backward that raised has left incomplete; `slices()` are those
    that the optimizers know. `gatherer` and `reducer` call `begin`, and are set by whoever makes them.
    """

    gatherer: Gatherer
    reducer: Reducer

    def __init__(self, slices: Callable[[], set[Tensor]]) -> None:
        self._slices = slices
        self.number: int | None = None
        self.has_unreduced, self.spoiled = False, set[Tensor]()

    def begin(self) -> bool:
        """A hook reports that a backward runs. Returns True if it runs inside another one (reentrant checkpointing)."""
        current: int = torch._C._current_graph_task_id()
        if self.number is None:
            self._check_complete()  # other ranks may have more gradients than this one: better nobody goes on
            self.number, self.has_unreduced = current, True
            self.reducer.begin()
            Variable._execution_engine.queue_callback(self._end)
        return current != self.number

    def _end(self) -> None:
        self.reducer.finish()
        self.has_unreduced = self.reducer.holds
        self.gatherer.forget_backward()
        self.gatherer.reshard_all()
        self.number = None

    def recover(self) -> None:
        """After a forward or backward that did not end: reshard, and forget gradients that are not shards yet."""
        if self.number is not None or self.reducer.flying:
            self.number, self.spoiled = None, self._slices()
            self.reducer.drop()
            self.gatherer.forget_backward()
        self.gatherer.reshard_all()

    def reduce(self) -> None:
        """Reduce what was held back. Raises RuntimeError if a gradient is incomplete."""
        self.recover()
        self._check_complete()
        if self.has_unreduced:
            self.reducer.reduce_all()
            self.has_unreduced = False

    def _check_complete(self) -> None:
        if self.spoiled:
            raise RuntimeError("the last backward raised and its gradients are incomplete: call zero_grad() first")

    def forget(self, slices: set[Tensor]) -> None:
        """Forget the gradients of `slices` that are not on them yet."""
        self.recover()
        self.reducer.forget(slices)
        self.spoiled -= slices
        self.has_unreduced &= not self.reducer.has_forgotten(self._slices())
