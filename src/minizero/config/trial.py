"""Chapter 26, config: what a file names is tried on one element, before a rank waits and before anything is changed.

A name and its options can be wrong in many ways, and a constructor or a step is the first to know. Found there, after
the model is sharded or the weights have moved, it would be too late.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

IN_THE_PROGRAM = "make it in the program, with initialize(lr_scheduler=...)"


def problems_of_names(path: str, cls: type, params: Mapping[str, Any], more: Iterable[str] = ()) -> list[str]:
    """A line for each of `params` that the constructor of `cls` does not take, or that is missing.

    The first parameter of the constructor, the parameters or the optimizer, is not of a file; `more` is taken too.
    """
    problems, taken = [], list(inspect.signature(cls).parameters.values())[1:]
    names = [*(parameter.name for parameter in taken), *more]
    for name, value in params.items():
        if name == "max_grad_norm":
            problems.append(f"{path}.params.{name}: write gradient_clipping")
        elif name not in names:
            problems.append(f"{path}.params.{name}: {cls.__name__} takes {', '.join(names)}")
        elif isinstance(value, str) and name in ("lr", "eps", "betas", "weight_decay", "momentum"):
            problems.append(f"{path}.params.{name}: must be a number, got {value!r}")
    missing = [each.name for each in taken if each.default is each.empty and each.name not in params]
    missing = [name for name in missing if name not in ("args", "kwargs")]
    return problems + ([f"{path}.params: {cls.__name__} needs {', '.join(missing)}"] if missing else [])


def problems_of_optimizer(cls: type[Optimizer], options: Mapping[str, Any]) -> list[str]:
    """A line if an optimizer of class `cls` cannot be made with `options`, or not be stepped."""
    on_gpu = torch.cuda.is_available() and (options.get("capturable") or options.get("fused"))
    element = nn.Parameter(torch.zeros(1, device="cuda" if on_gpu else "cpu"))
    element.grad = torch.ones_like(element)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cls([element], **options).step()
    except Exception as error:
        return [f"optimizer: {cls.__name__} cannot be stepped: {type(error).__name__}: {error}"]
    return []


def problems_of_schedule(
    cls: type[LRScheduler], params: Mapping[str, Any], optimizer: Optimizer | None = None
) -> list[str]:
    """A line if a schedule of class `cls` cannot be made with `params`, or not be stepped without arguments.

    It is tried on groups like those of `optimizer`; None: on as many as the longest list of rates has.
    """
    step = list(inspect.signature(cls.step).parameters.values())[1:]
    if needed := [each.name for each in step if each.default is each.empty]:
        how = f'engine.step(lr_kwargs={{"{needed[0]}": ...}})'
        return [f"scheduler.type: {cls.__name__} needs {needed[0]} at each step: {IN_THE_PROGRAM}, and call {how}"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tried = _stand_in(params, optimizer)
            schedule = cls(tried, **params)
            tried.step()
            schedule.step()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
        return [f"scheduler: {cls.__name__} cannot be stepped: {why}; what no file can hold, {IN_THE_PROGRAM}"]
    return []


class _StandIn(Optimizer):
    def step(self, closure: Any = None) -> Any:
        """Nothing: the schedule is what is tried."""


def _stand_in(params: Mapping[str, Any], optimizer: Optimizer | None) -> Optimizer:
    """An optimizer with the options and groups of `optimizer`, and one element in each."""
    lengths = [len(value) for value in params.values() if isinstance(value, list)]
    groups: list[dict[str, Any]] = [{}] * max([1, *lengths])
    defaults: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    if optimizer is not None:
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
        groups, defaults = [group | {"lr": float(group["lr"])} for group in groups], dict(optimizer.defaults)
    return _StandIn([{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups], defaults)
