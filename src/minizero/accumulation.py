"""Chapter 22, accumulation: several backwards before one step, and one division.

One idea: gradients of sums add up, over micro-batches and over ranks alike. So every backward brings the gradient of a
sum, and the step divides once, by the count of all that was summed. Whether gradients travel in every backward or wait
on their rank until the last one (`no_sync`) changes bytes, not values.

Ψ parameters, N ranks, k micro-batches in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from minizero.collectives import World, launch_all_gather, on_all_ranks
from minizero.gather import in_backward
from minizero.memory import check_positive, shard_elements, traffic
from minizero.replicate import Replicated, average_gradients
from minizero.zero import Zero
from minizero.zero.attached import watch_steps

# ---- what it costs -----------------------------------------------------------------------------------------------


def step_traffic(
    params: int, ranks: int, stage: int, micro_batches: int, bytes_per_element: int, held: bool = False
) -> int:
    """Bytes that each rank sends for one step of k = `micro_batches` backwards; `held`: all but the last in `no_sync`.

    An all-gather or reduce-scatter of Ψ elements sends Ψ(N−1)/N. Reduced are gradients in every backward, in stage 1
    and with `held` once. Gathered are weights: in stage 0 with every reduction, which together are an all-reduce, in
    stages 1 and 2 once, after the step, in stage 3 twice for every micro-batch, `held` or not.
    """
    check_positive(micro_batches=micro_batches)
    once = traffic(params, ranks, 0, bytes_per_element) // 2
    traffic(params, ranks, stage, bytes_per_element)  # raises for a stage that there is not
    reductions = 1 if held or stage == 1 else micro_batches
    return once * (reductions + [reductions, 1, 1, 2 * micro_batches][stage])


def gradient_bytes(params: int, ranks: int, stage: int, held: bool = False) -> int:
    """Bytes of fp32 gradients on a rank between two micro-batches: 4Ψ/N where they are reduced at once, else 4Ψ."""
    traffic(params, ranks, stage, 4)
    return 4 * (shard_elements(params, ranks) if stage > 1 and not held else params)


# ---- waiting -----------------------------------------------------------------------------------------------------

_guarded: WeakSet[Replicated] = WeakSet()


@contextmanager
def no_sync(parallel: Zero | Replicated) -> Iterator[None]:
    """Gradients of backwards inside wait on their rank, whole, and add up; nothing is sent. Enter on all ranks alike.

    They leave with the next backward outside. If none comes before, those of `Zero` leave at the step, `clip_grad_norm`
    or `Zero.reduce()`, inside too. With `Replicated`, whose gradients are on the parameters for anyone to use, a step
    then raises RuntimeError on all ranks. It cannot see that you clip before a backward outside: that clips too little.

    A rank keeps 4 bytes for each parameter meanwhile. Stage 1 waits for the step anyway: it has nothing to gain here.
    Stage 3 gathers and frees parameters as always. After an exception in a backward inside, the whole window is
    incomplete: the next backward raises until `zero_grad()`.
    """
    if not isinstance(parallel, Zero | Replicated):
        raise TypeError(f"no_sync() takes a minizero.Zero or a minizero.Replicated, got a {type(parallel).__name__}")
    if in_backward():
        raise RuntimeError("no_sync() inside a backward: enter it before")
    if isinstance(parallel, Replicated) and parallel not in _guarded:
        watch_steps(parallel, _check_step)
        _guarded.add(parallel)
    before, parallel.holds = parallel.holds, True
    try:
        yield
    finally:
        parallel.holds = before


def _check_step(replicated: Replicated, optimizer: Optimizer) -> None:
    if replicated.has_held:
        mine = {id(p) for p in replicated.model.parameters() if p.grad is not None}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "step() with gradients that were held back, other ones on each rank: run the window's last backward "
                "outside no_sync(), or call Window.divide()"
            )


# ---- counting and dividing ---------------------------------------------------------------------------------------


def token_mean(loss_sum: Tensor, tokens: int | Tensor, group: ProcessGroup | None = None) -> Tensor:
    """A loss for each rank whose mean over the ranks is the mean over the tokens of all: loss_sum · N / all tokens.

    Args:
        loss_sum: the sum over this rank's valid tokens, as of `cross_entropy(..., reduction="sum")`.
        tokens: how many these are. If micro-batches follow, all of this rank's before the step, the same in each.
        group: all ranks whose gradients are averaged; default all. Every rank calls this, also one with no token.

    A rank without tokens gets zero with a graph, for its backward has to run like the others'. If no rank has any, the
    loss is zero everywhere, not 0/0.
    """
    count = torch.as_tensor(tokens, dtype=torch.float64, device=loss_sum.device).detach().clone()
    with on_all_ranks("count the tokens"):
        dist.all_reduce(count, group=group)
    if not count >= 0:
        raise ValueError(f"tokens must not be negative; all ranks together have {count.item():g}")
    return loss_sum * (dist.get_world_size(group) / (count.item() or 1.0))


class Window:
    """The micro-batches between two steps: counts them, and divides their gradient once, by all there was.

        window = Window(zero, micro_batches=4)
        for x, y in micro_batches:
            loss = model(x, y)
            window.add(loss)                          # or a sum over n tokens: window.add(loss, n)
            with nullcontext() if window.is_full else no_sync(zero):      # or `loss.backward()` alone
                loss.backward()
            if window.is_full:
                mean = window.divide()                # on all ranks: of all losses, and now the gradient's too
                optimizer.step()
                optimizer.zero_grad()

    Nobody else divides: no loss is scaled by 1/k, no weight by the number of ranks. When the data ends in a window that
    is not full, `divide()` and the step after it count what there is, no more; `forget()` drops it. No gradient is ever
    saved: `state_dict()` in a window that is not full leaves out its micro-batches, and a resumed run repeats them.

    `position` counts this rank's micro-batches in finished windows: its data goes on from there.
    """

    def __init__(self, parallel: Zero | Replicated, micro_batches: int) -> None:
        check_positive(micro_batches=micro_batches)
        self._parallel, self.micro_batches, self.position = parallel, micro_batches, 0
        self._begin()

    def _begin(self) -> None:
        self.filled, self._weight = 0, 0.0
        self._losses: list[Tensor] = []

    @property
    def is_full(self) -> bool:
        """Whether the next thing to do is `divide()`."""
        return self.filled == self.micro_batches

    def add(self, loss: Tensor, weight: float = 1.0) -> None:
        """Count a micro-batch: `loss` is a sum over `weight` tokens or samples, or a mean, which counts once.

        Raises RuntimeError when the window is full, ValueError for a loss or weight that cannot be counted.
        """
        if self.is_full:
            raise RuntimeError(f"the window has its {self.micro_batches} micro-batches: divide() and step first")
        if loss.numel() != 1 or not (isfinite(weight) and weight >= 0):
            raise ValueError(f"a micro-batch has one loss and a weight of 0 or more: {tuple(loss.shape)}, {weight!r}")
        self._losses.append(loss.detach().double())
        self._weight += float(weight)
        self.filled += 1

    @torch.no_grad()
    def divide(self) -> float:
        """Turn the summed gradient into that of the mean over all ranks and micro-batches, and return the mean loss.

        Call it on all ranks, before clipping and the step. Raises RuntimeError on all of them, with nothing changed, if
        they have no micro-batch, or one has more than another. Gradients that were held back are reduced here.
        """
        losses, weights, counts = self._from_all_ranks().T
        if not counts.min() == counts.max() > 0:
            raise RuntimeError(f"each rank must have as many micro-batches, at least one, not {counts.int().tolist()}")
        total = float(weights.sum()) or 1.0  # no token anywhere: sums and gradients are zero
        for gradient in self._gradients():
            gradient.mul_(len(counts) / total)  # the ranks' mean is N times too small
        self.position += self.filled
        self._begin()
        return float(losses.sum()) / total

    def _from_all_ranks(self) -> Tensor:
        """(ranks, 3) float64: each rank's sum of losses, sum of weights and number of micro-batches."""
        world = self._parallel.world if isinstance(self._parallel, Zero) else World(self._parallel.group)
        loss = float(sum(self._losses))
        found = torch.tensor([loss, self._weight, self.filled], dtype=torch.float64, device=world.device)
        for group in world.groups:
            everyone = found.new_empty(dist.get_world_size(group) * found.numel())
            with on_all_ranks("count the micro-batches"):
                launch_all_gather(everyone, found, group).wait()
            found = everyone
        return found.view(-1, 3)

    def _gradients(self) -> list[Tensor]:
        if isinstance(self._parallel, Zero):
            self._parallel.reduce()
            owners: list[Tensor] = [piece for _, piece in self._parallel.named_slices()]
        else:
            if self._parallel.has_held:
                average_gradients(self._parallel.model, self._parallel.group)
                self._parallel.has_held = False
            owners = list(self._parallel.model.parameters())
        return [owner.grad for owner in owners if owner.grad is not None]

    def forget(self) -> None:
        """Drop the window's micro-batches, which count as seen, and all gradients."""
        self._parallel.model.zero_grad()
        self.position += self.filled
        self._begin()

    def state_dict(self) -> dict[str, int]:
        """`position`, and how many micro-batches after it are in no saved weight: `repeat` them."""
        return {"position": self.position, "repeat": self.filled}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the window open when `state` was saved. Forgets all gradients, so call it after other loads."""
        self.forget()
        self.position = state["position"]
