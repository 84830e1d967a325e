"""The model over the ranks: four stages, or an engine, behind one step. All begin with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import minizero
from minizero import GPT
from minizero.engine import Engine
from training.options import Options


@dataclass
class Trainee:
    """A model whose states may be cut over the ranks, and what a loop does with it."""

    device: torch.device
    model: GPT
    optimizer: torch.optim.Optimizer
    update: Callable[[Tensor, Tensor], tuple[float, float]]  # a step on a batch: this rank's loss, the norm
    whole: Callable[[], AbstractContextManager[Any]]  # inside, this rank has all parameters
    zero: minizero.Zero | None = None  # None in stage 0
    engine: Engine | None = None  # only with --config


def distribute(options: Options, device: torch.device) -> Trainee:
    """The model of the options in their stage. All ranks draw the same numbers."""
    torch.manual_seed(options.seed)
    if options.engine is not None:
        return by_engine(options, options.engine, device)
    return sharded(options, device) if options.stage else replicated(options, device)


def replicated(options: Options, device: torch.device) -> Trainee:
    """Stage 0."""
    with device:
        model = GPT(options.model)
    minizero.Replicated(model)
    optimizer = minizero.AdamW(model.parameters(), lr=options.lr)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), error_if_nonfinite=True)
    return Trainee(device, model, optimizer, one_step(model, optimizer, clip, options.clip), nullcontext)


def sharded(options: Options, device: torch.device) -> Trainee:
    """Stages 1 to 3."""
    with torch.device("meta"):  # shapes without memory: Zero fills one block after the other, and keeps its shard
        model = GPT(options.model)
    zero = minizero.Zero(model, units=model.blocks, stage=options.stage)
    optimizer = zero.optimizer(minizero.AdamW, lr=options.lr)
    update = one_step(model, optimizer, zero.clip_grad_norm, options.clip)
    return Trainee(device, model, optimizer, update, zero.gathered, zero)


def one_step(
    model: GPT, optimizer: torch.optim.Optimizer, clip: Callable[[float], Any], max_norm: float
) -> Callable[[Tensor, Tensor], tuple[float, float]]:
    """A step as PyTorch has it, in all stages."""

    def update(x: Tensor, y: Tensor) -> tuple[float, float]:
        loss = model(x, y)
        loss.backward()
        norm = float(clip(max_norm))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm

    return update


def by_engine(options: Options, config: dict[str, Any], device: torch.device) -> Trainee:
    """The model and optimizer that --config makes of it; a step is as many backwards as the file says."""
    with torch.device("meta"):
        model = GPT(options.model)
    given = None if config.get("optimizer") else partial(minizero.AdamW, lr=options.lr)
    engine, optimizer, _, _ = minizero.initialize(model=model, optimizer=given, config=config)

    def update(x: Tensor, y: Tensor) -> tuple[float, float]:
        losses = []
        for some_x, some_y in zip(x.split(engine.batch.micro), y.split(engine.batch.micro), strict=True):
            loss = engine(some_x, some_y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        return sum(losses) / len(losses), math.nan if norm is None else norm

    return Trainee(device, model, optimizer, update, engine.zero.gathered, engine.zero, engine)
