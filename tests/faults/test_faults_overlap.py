"""Asynchronous work read too early, or its buffers reused: fault F27 of public bug reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from reference import assert_close
from torch import Tensor, nn

import minizero
from minizero.collectives import ReduceScatter, TorchTransport, launch_all_gather
from minizero.overlap import ByBytes, ByCount

pytestmark = pytest.mark.ch23
preload("minizero.overlap.prefetch")
SCHEDULES = [0, 1, 2, ByCount(1), ByCount(2), ByBytes(10_000)]
WIDTH, SIZES = 8, (5, 5, 8, 5, 5)  # neighbours of one size, which use each other's buffers, and one of another


class Chain(nn.Module):
    """Layer k's gradients are about k + 1 times as large as the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size), nn.Tanh(), nn.Linear(size, WIDTH)) for size in SIZES
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = x + (k + 1) * block(x)
        return self.head(x)


class LateGather:
    """An all-gather whose destination is full of NaN until somebody has waited for it."""

    def __init__(self, full: Tensor, shard: Tensor) -> None:
        self._full, self._arriving = full, torch.empty_like(full)
        self._work = launch_all_gather(self._arriving, shard.clone())
        with torch.no_grad():
            full.fill_(torch.nan)

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            self._full.copy_(self._arriving)


class WatchedReduce(ReduceScatter):
    """A reduce-scatter that finds out whether what it sends was changed while it was on its way."""

    def __init__(self, full: Tensor, *args: Any) -> None:
        self._sent, self._copy = full, full.clone()
        super().__init__(full, *args)

    def land(self) -> Tensor:
        assert torch.equal(self._sent, self._copy), "a bucket was refilled before its reduction had ended"
        total = super().land()
        assert not total.isnan().any()
        return total


class Watched(TorchTransport):
    def all_gather(self, full: Tensor, shard: Tensor) -> LateGather:
        return LateGather(full, shard)

    def reduce_scatter(self, full: Tensor, allocate: Callable[[Tensor], Tensor] = torch.empty_like) -> WatchedReduce:
        return WatchedReduce(full, self.group, allocate)


def batches(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(3, WIDTH, generator=generator) for _ in range(dist.get_world_size())] for _ in range(steps)]


def train(stage: int, prefetch: Any, accumulated: int, late_rank: int | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Chain()
    zero = minizero.Zero(model, model.blocks, stage=stage, prefetch=prefetch, transport=Watched())
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
    if dist.get_rank() == late_rank:
        for block in model.blocks[1::2]:
            block.register_forward_hook(lambda m, args, out: out.register_hook(lambda g: time.sleep(0.003)) and None)
            block.register_forward_pre_hook(lambda *_: time.sleep(0.003))
    for step, per_rank in enumerate(batches(2 * accumulated), 1):
        model(per_rank[dist.get_rank()]).square().mean().backward()
        if step % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return zero.full_state()


def one_process(accumulated: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step, per_rank in enumerate(batches(2 * accumulated), 1):
        for batch in per_rank:
            (model(batch).square().mean() / len(per_rank)).backward()
        if step % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def whatever_the_schedule(stage: int) -> None:
    for accumulated in (1, 3):
        first = train(stage, 0, accumulated, None)
        for prefetch in SCHEDULES if stage == 3 else [1]:
            for late_rank in (None, 0, 1):
                found = train(stage, prefetch, accumulated, late_rank)
                assert set(found) == set(first)
                assert all(torch.equal(found[name], value) for name, value in first.items())
        if dist.get_rank() == 0:
            for name, value in one_process(accumulated).items():
                assert_close(first[name], value, name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_F27_the_bits_are_the_same_with_any_schedule_and_a_rank_that_is_late(stage: int) -> None:
    run_ranks(2, whatever_the_schedule, stage)
