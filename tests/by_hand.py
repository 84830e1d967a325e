"""Mixed precision of several ranks in one process, written out: what `Zero(dtypes=...)` must equal bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minizero.precision import Precision
from minizero.zero import Zero


class ByHand:
    """An fp32 `master` and a rounded copy of it, `low`, that computes; gradients are rounded to the wire and summed.

    Batches are listed by rank, as for `reference.Pair`.
    """

    def __init__(self, master: nn.Module, precision: Precision, optimizer: Any, **options: Any) -> None:
        self.master, self.low, self.precision = master, copy.deepcopy(master), precision
        self.dtypes = precision.choose(master)
        for name, parameter in self.low.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name].compute)
        list(precision.attach(self.low))
        self.optimizer = optimizer(master.parameters(), **options)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters."""
        for low, master in zip(self.low.parameters(), self.master.parameters(), strict=True):
            low.copy_(master)

    def backward(self, loss_of: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> list[Tensor]:
        """Add the mean over ranks of the gradients to those of the masters; the loss of each rank."""
        losses, sums = [], {name: torch.zeros_like(p) for name, p in self.master.named_parameters()}
        for batch in batches:
            self.low.zero_grad()
            losses.append(loss_of(self.low, batch))
            losses[-1].backward()
            for name, parameter in self.low.named_parameters():
                if parameter.grad is not None:
                    sums[name] += parameter.grad.to(self.dtypes[name].wire).to(sums[name].dtype)
        for name, parameter in self.master.named_parameters():
            mean = sums[name] / len(batches)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        return [loss.detach() for loss in losses]

    def step(self) -> None:
        """Step the masters, forget their gradients, round."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()

    def check(self, zero: Zero) -> None:
        """The sharded model's masters and its gathered parameters have these bits."""
        state = zero.full_state()
        if dist.get_rank() == 0:
            for name, master in self.master.named_parameters():
                assert state[name].dtype == master.dtype, f"{name}: master in {state[name].dtype}"
                assert torch.equal(state[name], master), f"{name}: masters differ"
        with zero.gathered():
            found = dict(zero.model.named_parameters())
            for name, low in self.low.named_parameters():
                assert found[name].dtype == low.dtype, f"{name}: computed in {found[name].dtype}"
                assert torch.equal(found[name], low), f"{name}: rounded values differ"
