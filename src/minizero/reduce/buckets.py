"""Chapter 13, reduce: gradients leave as shards, in one order on every rank.

Each parameter's gradient is moved into its unit's bucket as soon as autograd has it. A full bucket is launched as a
reduce-scatter; when that lands, this rank has the mean over ranks of its own shard, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from minizero.collectives import World, on_all_ranks
from minizero.collectives.transport import Reduction
from minizero.gather import State, Unit
from minizero.reduce.spares import Spares
from minizero.sharding import FlatParameters, NotCopied


class Bucket(NotCopied):
    """The full gradient of one FlatParameters (padded_numel elements) while this rank collects it, in the wire's dtype.

    A parameter that got no gradient counts as zero: its optimizer state decays as with a gradient of zeros, on all
    ranks alike, also when it was used on some of them.
    """

    def __init__(self, flat: FlatParameters, world: World, spares: Spares) -> None:
        self.flat, self._world, self._spares = flat, world, spares
        self._gradients: Tensor | None = None
        self.collected: set[int] = set()  # since the last launch
        self.missing: set[int] = set()  # in this pass over the unit; reentrant checkpointing makes several
        self.forgotten: set[int] = set()  # on all ranks alike, since the last backward: for them nothing lands
        self._flights: list[Reduction] = []
        self.expect_all()

    def collect(self, index: int) -> None:
        """Move the gradient of parameter `index` from the parameter into the bucket, or add it to what is there."""
        leaf, layout = self.flat.leaves[index], self.flat.layout
        if leaf.grad is None:
            return
        gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
        leaf.grad = None
        if self._gradients is None:
            self._gradients = self._spares.take(self.flat.full, self.flat.wire)
        if index in self.collected and self._gradients.itemsize < 4:
            self._gradients = self._gradients.float()  # in bf16, 256 + 1 is 256
        part = self._gradients[layout.offsets[index] : layout.offsets[index + 1]].view(gradient.shape)
        if index in self.collected:  # by an earlier backward, or for another use: reentrant checkpointing has several
            part += gradient
        else:
            part.copy_(gradient)
        self.collected.add(index)
        self.missing.discard(index)

    def expect_all(self) -> None:
        """A pass begins: the gradient of every parameter is to come."""
        self.missing.update(range(len(self.flat.leaves)))

    def launch(self) -> None:
        """Start the reduce-scatter of what is here, with zeros for what is not."""
        layout = self.flat.layout
        if self._gradients is None:
            self._gradients = self._spares.take(self.flat.full, self.flat.wire)
        for index in range(len(self.flat.leaves)):
            if index not in self.collected:
                self._gradients[layout.offsets[index] : layout.offsets[index + 1]].zero_()
        self._gradients[layout.numel :].zero_()
        gradients = self._gradients.to(self.flat.wire)
        self._flights.append(self._world.transport.reduce_scatter(gradients, self._spares.take))
        self.drop()

    def wait(self) -> Tensor:
        """Wait for the oldest reduction in flight; return this rank's shard of its sum (shard_numel elements)."""
        flight = self._flights.pop(0)
        total = flight.land()
        self._spares.give(flight.buffers)
        return total

    def land(self) -> None:
        """Wait for the sum, add it over the copies, divide, and add the mean to the gradients of the slices."""
        total = self.wait()
        if self._world.replicas is not None:
            dist.all_reduce(total, group=self._world.replicas)
        without = [piece for piece in map(self.flat.slices.__getitem__, self.forgotten) if piece.grad is None]
        self.flat.add_gradient(total.div_(self._world.count))
        for piece in without:
            piece.grad = None

    def drop(self) -> None:
        """Forget what was collected."""
        self._gradients = None
        self.collected.clear()
        self.expect_all()

    def forget(self, slices: set[Tensor]) -> None:
        """Forget what was collected for the parameters of these slices, until a backward brings more."""
        self.forgotten.update(index for index, piece in enumerate(self.flat.slices) if piece in slices)
        self.collected -= self.forgotten
        if not self.collected:
            self.drop()


class Reducer(NotCopied):
    """Launches the units' reductions in the reverse order of `units`, whatever order this rank's graph has.

    Collectives match by order. A rank whose batch skips a branch completes its buckets in another order, or not at
    all, so a complete unit waits for those before it, and the end of backward launches the rest. While `holds` is set
    nothing is launched, and the gradients of one backward after another add up in the buckets; so it is from the start
    with `in_backward` False (stage 1). `begin_backward` is called for each gradient that autograd has, and says whether
    this is a backward inside another. `release` is called when a unit's gradients are all here: backward needs its
    parameters no more.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: World,
        in_backward: bool,
        begin_backward: Callable[[], bool],
        release: Callable[[Unit], None],
    ) -> None:
        self.holds = not in_backward
        self._begin_backward, self._release = begin_backward, release
        self._order = [unit for unit in reversed(units) if unit.is_trained]
        self._spares = Spares()
        self._buckets: dict[Unit, list[Bucket]] = {}
        for unit in self._order:
            self._buckets[unit] = [Bucket(flat, world, self._spares) for flat in unit.flats if flat.requires_grad]
        self._complete: set[Unit] = set()
        self._launched = 0  # how many units of the order this backward has launched
        self.flying: list[Unit] = []

    def attach(self) -> Iterator[RemovableHandle]:
        """Hear of each gradient when autograd has accumulated it."""
        for u, unit in enumerate(self._order):
            for b, bucket in enumerate(self._buckets[unit]):
                for index, leaf in enumerate(bucket.flat.leaves):
                    # Weakly: these hooks live in C++, where Python's garbage collector sees no cycle to break.
                    yield leaf.register_post_accumulate_grad_hook(partial(_hear, ref(self), u, b, index))

    @torch.no_grad()
    def on_gradient(self, u: int, b: int, index: int) -> None:
        """Autograd has accumulated the gradient of a parameter: `index` in bucket `b` of unit `u` of the order."""
        is_nested, unit = self._begin_backward(), self._order[u]
        if unit.state == State.IN_FLIGHT:
            raise RuntimeError(
                f"unit {unit.name!r}: backward computed with parameters that had not arrived. Was what its forward "
                "returned changed in place? Return a tensor of its own"
            )
        buckets = self._buckets[unit]
        buckets[b].collect(index)
        unit.use.is_in_parts |= is_nested and not unit.use.is_recomputed
        if unit.use.is_in_parts or any(bucket.missing for bucket in buckets):
            return
        for bucket in buckets:
            bucket.expect_all()
        unit.use.awaits_gradients, unit.use.has_all_gradients = False, True
        self._release(unit)
        if not self.holds and (unit.use.calls < 2 or not unit.use.is_recomputed):  # else more follow, and one reduction
            self._complete.add(unit)
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._launched < len(self._order) and self._order[self._launched] in self._complete:
            self._launch(self._order[self._launched])
            self._launched += 1

    def _launch(self, unit: Unit) -> None:
        for bucket in self._buckets[unit]:
            bucket.launch()
        self.flying.append(unit)
        while len(self.flying) > 1:  # one in flight hides behind backward; more would only hold memory
            self._land_first()

    def _land_first(self) -> None:
        unit = self.flying.pop(0)
        with on_all_ranks(f"reduce unit {unit.name!r}"):
            for bucket in self._buckets[unit]:
                bucket.land()

    def finish(self) -> None:
        """End of backward: reduce what is left, or, while gradients are held back, expect all of them again."""
        if self.holds:
            for bucket in self.buckets():
                bucket.expect_all()
        else:
            self.reduce_all()

    @torch.no_grad()
    def reduce_all(self) -> None:
        """Launch in order what backward has not, and what came after a launch; land everything."""
        for unit in self._order[self._launched :]:
            self._launch(unit)
        for unit in self._order:
            if any(bucket.collected for bucket in self._buckets[unit]):
                self._launch(unit)
        while self.flying:
            self._land_first()
        self._complete.clear()
        self._launched = 0
        self._spares.clear()

    def begin(self) -> None:
        """A backward begins: gradients of all parameters are to come."""
        for bucket in self.buckets():
            bucket.forgotten.clear()

    def has_forgotten(self, slices: Collection[Tensor]) -> bool:
        """Whether none of these slices is to get anything from what is here; the same answer on all ranks."""
        known = {bucket.flat.slices[index] for bucket in self.buckets() for index in bucket.forgotten}
        return known.issuperset(slices)

    def waiting(self) -> list[Tensor]:
        """The gradients in the buckets, which no rank has reduced yet: flat, padded_numel elements each."""
        return [bucket._gradients for bucket in self.buckets() if bucket._gradients is not None]

    def drop(self) -> None:
        """Wait for what is on its way and throw it away, and what has begun to leave: a backward that raised."""
        for bucket in (bucket for unit in self.flying for bucket in self._buckets[unit]):
            with suppress(RuntimeError):  # a message that nobody receives would be taken for the next
                bucket.wait()
        self.flying.clear()
        self._complete.clear()
        self._launched = 0
        for bucket in self.buckets():
            bucket.drop()
            for leaf in bucket.flat.leaves:
                Tensor.grad.__set__(leaf, None)  # type: ignore[union-attr]  # whatever its class says

    def forget(self, slices: set[Tensor]) -> None:
        """Forget the gradients of these slices that have not become shards. Call on all ranks alike."""
        for bucket in self.buckets():
            bucket.forget(slices)

    def buckets(self) -> Iterator[Bucket]:
        """Of all units, in the order in which they are reduced."""
        return (bucket for buckets in self._buckets.values() for bucket in buckets)


def _hear(reducer: ref[Reducer], u: int, b: int, index: int, leaf: Tensor) -> None:
    if (alive := reducer()) is not None:
        alive.on_gradient(u, b, index)
