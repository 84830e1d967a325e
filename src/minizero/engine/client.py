"""Chapter 26, config: what a program brings to `initialize`, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from minizero.config import Config, ConfigError, optimizer_class, scheduler_class
from minizero.config.trial import problems_of_schedule
from minizero.optimizer import check_elementwise

Groups = list[dict[str, Any]]


def plan(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    wanted: Iterable[Any] | None,
    schedule: Any,
    config: Config,
) -> tuple[Optimizer | None, Groups | None]:
    """The optimizer of the program, if it brings one, and the groups to train, with names; None for all in one.

    Raises TypeError, ValueError or KeyError for what cannot work together.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = None if wanted is None else _as_groups(wanted)
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        optimizer = optimizer(list(model.parameters()) if groups is None else groups)
    if optimizer is not None:
        groups = _named(optimizer.param_groups, names)
        _check_client(optimizer, config, schedule)
    elif config.optimizer is not None:
        groups = None if groups is None else _named(groups, names)
    elif any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            'initialize() needs optimizer=, or an "optimizer" in the configuration. Without one it serves a frozen '
            "model: model.requires_grad_(False)"
        )
    _check_schedule(schedule, optimizer, config, groups)
    return optimizer, groups


def _as_groups(parameters: Iterable[Any]) -> Groups:
    listed = list(parameters)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _named(groups: Groups, names: dict[int, str]) -> Groups:
    """The groups with names in place of parameters; those that are frozen are left out, as no step changes them."""
    found: Groups = []
    for i, group in enumerate(groups):
        parameters = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for parameter in parameters:
            if id(parameter) not in names:
                raise KeyError(f"param group {i}: the parameter of shape {tuple(parameter.shape)} is not the model's")
        trained = [names[id(parameter)] for parameter in parameters if parameter.requires_grad]
        found.append({**group, "params": trained} | ({"param_names": trained} if "param_names" in group else {}))
    return found


def _check_client(optimizer: Optimizer, config: Config, scheduler: Any) -> None:
    check_elementwise(type(optimizer), config.zero_allow_untested_optimizer)
    for state in optimizer.state.values():
        if "step" not in state or state["step"] > 0:
            raise ValueError(
                f"the {type(optimizer).__name__} has stepped: its state is of whole parameters. Initialize first, then "
                "load a checkpoint"
            )
    if isinstance(scheduler, LRScheduler) and scheduler.optimizer is not optimizer:
        raise ValueError("lr_scheduler= is bound to another optimizer: the rates it sets would never be used")


def _check_schedule(given: Any, optimizer: Optimizer | None, config: Config, wanted: Groups | None) -> None:
    if optimizer is None and config.optimizer is None:
        if given is not None:
            raise ValueError("initialize() was given an lr_scheduler and no optimizer")
        return
    if given is not None:
        if not (callable(given) or hasattr(given, "step")):
            raise TypeError(f"lr_scheduler= has no step(): a {type(given).__name__}")
        return
    if config.scheduler is not None:
        if optimizer is None:
            assert config.optimizer is not None
            cls, options = optimizer_class(config.optimizer)
            stand_ins = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in wanted or [{}]]
            optimizer = cls([{k: v for k, v in g.items() if k != "param_names"} for g in stand_ins], **options)
        schedule = scheduler_class(config.scheduler)
        if problems := problems_of_schedule(schedule, config.scheduler.params, optimizer):
            raise ConfigError("config", problems)


def describe_data(data: Any) -> str:
    """What all ranks must have alike."""
    if data is None:
        return "none"
    return "a stream" if isinstance(data, IterableDataset) else f"{len(data)} samples"


def make_schedule(given: Any, optimizer: Optimizer, config: Config) -> Any:
    """The schedule of the program, or that of the configuration, or None."""
    if callable(given):
        return given(optimizer)
    if given is None and config.scheduler is not None:
        return scheduler_class(config.scheduler)(optimizer, **config.scheduler.params)
    if isinstance(given, LRScheduler) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        _mark_step(optimizer)
    return given


def _mark_step(optimizer: Optimizer) -> None:
    """Offloading has replaced `step()`, on which torch's schedules set a mark, to warn who steps them too early."""
    step: Any = optimizer.step

    def marked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]
