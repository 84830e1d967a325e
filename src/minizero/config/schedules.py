"""Chapter 26, config: learning rates that follow the number of optimizer steps, as DeepSpeed's schedules do.

DeepSpeed counts from -1: its schedule is asked for a value before the first step, and then after each. So optimizer
step n, counted from 0, uses the value of iteration n - 1, and a warm-up along the logarithm has two steps at the lowest
rate. Steps that were skipped do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from minizero.collectives import on_all_ranks
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


class Ahead:
    """The step of a schedule, tried before the optimizer's: `take()` makes it come true.

    Both raise before anything is changed, on all ranks: what the schedule raised on its own rank, RuntimeError on the
    others; ValueError if the rates of two ranks differ, now or after the step. `schedule` may be None.
    """

    def __init__(
        self, schedule: Any, optimizer: Optimizer, options: dict[str, Any], group: ProcessGroup | None = None
    ) -> None:
        self._schedule, self._groups, failure = schedule, optimizer.param_groups, None
        self._is_stateful = hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")
        before = self._look()
        try:
            if schedule is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns who is too early
                schedule.step(**options)
        except Exception as error:
            failure = error
        self._after = self._look()
        self._set(before)
        rates = [float(options["lr"]) for options in (*before[0], *self._after[0])]
        everyone: list[Any] = [None] * dist.get_world_size(group)
        with on_all_ranks("compare the learning rates"):
            dist.all_gather_object(everyone, None if failure else rates, group=group)
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(everyone):
            if theirs is None:
                raise RuntimeError(f"the schedule's step raised on rank {rank}: no rank has stepped")
            if not numpy.allclose(theirs, everyone[0], rtol=1e-6, atol=0.0, equal_nan=True):
                raise ValueError(
                    f"learning rates, now and after the step, differ by rank: {everyone[0]} on rank 0, {theirs} on "
                    f"rank {rank}. Give lr_kwargs that are alike on all ranks, as engine.mean_loss() is"
                )

    def _look(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The options of all groups, and the schedule's state."""
        options = [{k: deepcopy(v) for k, v in group.items() if k != "params"} for group in self._groups]
        if self._schedule is None:
            return options, {}
        state = self._schedule.state_dict() if self._is_stateful else vars(self._schedule)
        return options, {k: deepcopy(v) if isinstance(v, list | dict | Tensor) else v for k, v in state.items()}

    def _set(self, seen: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        options, state = seen
        for group, values in zip(self._groups, options, strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        if self._is_stateful:
            self._schedule.load_state_dict(state)
        elif self._schedule is not None:
            vars(self._schedule).update(state)

    def take(self) -> None:
        """Set what was tried."""
        self._set(self._after)


def _per_group(name: str, value: Any, groups: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"{name} must be a number or {groups} numbers, one for each param group, got {len(value)}")
    return list(value)


SCHEDULES: dict[str, type[LRScheduler]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
