"""Chapter 26, config: learning rates that follow the number of optimizer steps, as DeepSpeed's schedules do.

DeepSpeed counts from -1: its schedule is asked for a value before the first step, and then after each. So optimizer
step n, counted from 0, uses the value of iteration n - 1, and a warm-up along the logarithm has two steps at the lowest
rate. Steps that were skipped do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from minizero.memory import check_positive


def warmup(iteration: int, steps: int, kind: str = "log") -> float:
    """How much of the warm-up over `steps` steps is done: 0 to 1. `kind` is "log" or "linear"."""
    if iteration >= steps:
        return 1.0
    if iteration < 0:
        return 0.0
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


class _Warmup(LRScheduler):
    """What the three have in common; `get_lr` of a subclass is asked at construction and after each step."""

    def __init__(
        self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        check_positive(warmup_num_steps=warmup_num_steps)
        if warmup_type not in ("log", "linear"):
            raise ValueError(f"warmup_type must be 'log' or 'linear', got {warmup_type!r}")
        if last_batch_iteration != -1:
            raise ValueError("last_batch_iteration: load a checkpoint, which knows where its schedule was")
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer)

    @property
    def iteration(self) -> int:
        """DeepSpeed's count, -1 before the first step."""
        return int(self.last_epoch) - 1

    def warmed(self) -> float:
        """How much of the warm-up is done."""
        return warmup(self.iteration, self.warmup_num_steps, self.warmup_type)


class WarmupLR(_Warmup):
    """From the lowest rate to the highest over the warm-up, then constant. Rates: a number, or one for each group."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        highest = [group["lr"] for group in groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group("warmup_min_lr", warmup_min_lr, len(groups))
        self.max_lrs = _per_group("warmup_max_lr", highest, len(groups))
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the next step."""
        return [low + (high - low) * self.gamma() for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def gamma(self) -> float:
        """0: the lowest rate, 1: the highest."""
        return self.warmed()


class WarmupDecayLR(WarmupLR):
    """The same warm-up, then down to the lowest rate along a line that ends at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def gamma(self) -> float:
        """0: the lowest rate, 1: the highest."""
        if self.iteration < self.warmup_num_steps:
            return self.warmed()
        left = self.total_num_steps - self.iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """The optimizer's own rate, times a ratio: a warm-up from `warmup_min_ratio` to 1, a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the next step."""
        return [lr * self.ratio() for lr in self.base_lrs]

    def ratio(self) -> float:
        """The rate as a part of the optimizer's own. DeepSpeed's first step has 0, whatever `warmup_min_ratio` is."""
        if self.iteration < 0:
            return 0.0
        if self.iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self.warmed() * (1 - self.warmup_min_ratio)
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.iteration - self.warmup_num_steps + 1) / steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


def _per_group(name: str, value: Any, groups: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"{name} must be a number or {groups} numbers, one for each param group, got {len(value)}")
    return list(value)


SCHEDULES: dict[str, type[LRScheduler]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
